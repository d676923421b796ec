"""The path of a key in ZooKeeper's tree, and the parts of its version. Nothing here does I/O.

The problem: a ZooKeeper node is a file and a folder at once, and an ephemeral node may not have children. But `a` and
`a/b` may both be keys, and any key may be ephemeral. So a folder's node carries a trailing `;`,
which no key contains: `groups/g/members/x` is `<root>/groups;/g;/members;/x`, and a key's node never has children.
Leases are beside the keys, under `<root>/;leases`, a name that no folder and no key can have.

A version is (transaction that created the node, whether it is ephemeral, how often it was written since). ZooKeeper can
compare only the third part in a transaction. The first part differs when a key was deleted and created again, which a
reader can compare (R4). From the second part a commit knows, without a read, whether the node must be replaced to
become persistent or ephemeral.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

LEASES = ";leases"
_WRITES_BITS = 32
_WRITES_MASK = (1 << _WRITES_BITS) - 1


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths of one namespace, whose keys are under the node `root`."""

    root: str

    def leaf(self, key: str) -> str:
        return f"{self.root}/{key.replace('/', ';/')}"

    def folder(self, prefix: str) -> str:
        """The node above all keys that begin with `prefix`, which is empty or ends in a slash."""
        return f"{self.leaf(prefix[:-1])};" if prefix else self.root

    def lease(self, lease_id: str) -> str:
        return f"{self.root}/{LEASES}/{lease_id}"

    def is_folder(self, path: str) -> bool:
        return path == self.root or path.endswith(";")

    def key(self, leaf: str) -> str:
        return leaf[len(self.root) + 1 :].replace(";/", "/")

    def prefix(self, folder: str) -> str:
        return "" if folder == self.root else f"{self.key(folder)[:-1]}/"

    def children(self, prefix: str, names: list[str]) -> tuple[list[str], list[str]]:
        """The keys and the prefixes of the children of a folder, from the names of their nodes."""
        keys = [prefix + name for name in names if ";" not in name]
        prefixes = [f"{prefix}{name[:-1]}/" for name in names if name.endswith(";")]
        return keys, prefixes


def ancestors(path: str) -> list[str]:
    """The nodes that must exist before `path` can be created, the highest first, without the root of the tree."""
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(2, len(parts))]


class Version(NamedTuple):
    """The three parts of a version."""

    made_in: int
    is_ephemeral: bool
    writes: int

    @classmethod
    def of(cls, stat: Any) -> Version:
        return cls(stat.czxid, stat.ephemeralOwner != 0, stat.version)

    @classmethod
    def parse(cls, number: int) -> Version:
        writes = number & _WRITES_MASK
        signed = writes - (1 << _WRITES_BITS) if writes >> (_WRITES_BITS - 1) else writes
        return cls(number >> (_WRITES_BITS + 1), bool(number >> _WRITES_BITS & 1), signed)

    def number(self) -> int:
        # The writes are the lowest bits, so that a number that is off by one fails the comparison that ZooKeeper makes.
        return self.made_in << (_WRITES_BITS + 1) | self.is_ephemeral << _WRITES_BITS | self.writes & _WRITES_MASK

    @property
    def is_possible(self) -> bool:
        """Whether a node can have this version. For ZooKeeper, -1 as the number of writes means any number."""
        return self.made_in > 0 and self.writes != -1
