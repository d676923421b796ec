"""All keys of a namespace at one moment, although ZooKeeper has no snapshots.

A server answers all parts of one multiRead request between two transactions: it applies no transaction while it answers
a read. So one request that lists all folders and reads all keys is a snapshot, if it names every key that is there.

1. Read everything by ordinary requests, to learn the names.
2. Send one request for the children of every folder and the values of every key. Keys that are written only once, and
   whose values are known, are left out of it: the list of children says whether they are there.
3. Keys in these lists that the request did not name are read now. The value of a key that was written once, as its node
   says, is the one that it had at the moment. If such a key is gone or was written again, begin again at 2, knowing
   more names; after `ROUNDS_MAX` rounds the keys that are gone are returned as unread.

A request of more than `REQUEST_BYTES_MAX`, which the server would refuse, is sent in parts. Parts are of different
moments, so the answer counts only if all parts give the same answer a second time, which a registry under load will not
do: then RegistryUnavailable says so, and nothing inconsistent is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from pxrs.errors import RegistryUnavailable
from pxrs.registry.contract import Entry, Snapshot
from pxrs.registry.zookeeper.bulk import MultiRead
from pxrs.registry.zookeeper.client import Client
from pxrs.registry.zookeeper.layout import Layout, Version
from pxrs.registry.zookeeper.session import Session, barrier

ROUNDS_MAX: Final = 20
"""How often the moment is chosen anew because keys that came into being just before it were gone right after it."""
REPEATS_MAX: Final = 10
"""How often a request that needs several parts is repeated until two answers are equal."""
REQUEST_BYTES_MAX: Final = 900_000
"""ZooKeeper's own limit of a request (`jute.maxbuffer`) is 1 MiB by default."""
_NODE_BYTES: Final = 14
"""What a request takes for each node beside its path."""


@dataclass(slots=True)
class _Moment:
    """The answer to one request for everything."""

    names: dict[str, list[str]]
    """The children of each folder that was there."""
    found: dict[str, Any]
    """Value and stat of each key that was asked for and was there."""


@dataclass(slots=True)
class SnapshotReader:
    """Takes one snapshot."""

    session: Session
    client: Client
    layout: Layout
    is_written_once: Callable[[str], bool]
    folders: list[str] = field(default_factory=list)
    """The folders that are known, as prefixes of keys."""
    known: dict[str, Any] = field(default_factory=dict)
    """Value and stat of each key, as last read."""

    def take(self, until: float) -> Snapshot:
        self.session.wait(barrier(self.client, self.layout.root), until)
        self._learn("")
        for left in reversed(range(ROUNDS_MAX)):
            moment = self._at_one_moment()
            last = int(self.client.last_zxid)
            late, is_complete = self._late(moment)
            found = self._read(late)
            unread = [key for key, node in found.items() if node is None or not _is_as_created(node, last)]
            self.known |= {key: node for key, node in found.items() if node is not None}
            is_lost = any(not self.is_written_once(key) for key in unread)
            if is_complete and (not unread or (not left and not is_lost)):
                return self._snapshot(moment, late, unread, last)
        raise RegistryUnavailable(
            f"{self.session.endpoint.url}: keys are created and deleted faster than a consistent snapshot can be read; "
            "try again under less load"
        )

    def _learn(self, prefix: str) -> None:
        """Find the folders and keys at and below a prefix, and read the keys."""
        level, keys = [prefix], []
        while level:
            self.folders += level
            listings = self.session.gather(self.client.get_children_async, map(self.layout.folder, level))
            below: list[str] = []
            for folder, names in zip(level, listings, strict=True):
                here, prefixes = self.layout.children(folder, names or [])
                keys += here
                below += prefixes
            level = below
        self.known |= {key: node for key, node in self._read(keys).items() if node is not None}

    def _read(self, keys: Iterable[str]) -> dict[str, Any]:
        wanted = list(keys)
        return dict(zip(wanted, self.session.read(self.client, map(self.layout.leaf, wanted)), strict=True))

    def _at_one_moment(self) -> _Moment:
        keys = [key for key in self.known if not self.is_written_once(key)]
        parts = self._parts(keys)
        moment = self._ask(parts)
        for _ in range(REPEATS_MAX if len(parts) > 1 else 0):
            before, moment = moment, self._ask(parts)
            if before == moment:
                return moment
        if len(parts) > 1:
            raise RegistryUnavailable(
                f"{self.session.endpoint.url}: {len(keys):,} changing keys are more than ZooKeeper can read in one "
                "transaction, and they changed while they were being read; stop the programs that use them and try "
                "again"
            )
        return moment

    def _parts(self, keys: list[str]) -> list[tuple[list[str], list[str]]]:
        """Keys and folders, in parts that are small enough for one request each."""
        asked = [(self.layout.leaf(key), key, True) for key in keys]
        asked += [(self.layout.folder(prefix), prefix, False) for prefix in self.folders]
        parts: list[tuple[list[str], list[str]]] = [([], [])]
        size = 0
        for path, name, is_key in asked:
            size += len(path) + _NODE_BYTES
            if size > REQUEST_BYTES_MAX:
                parts.append(([], []))
                size = len(path) + _NODE_BYTES
            parts[-1][0 if is_key else 1].append(name)
        return parts

    def _ask(self, parts: list[tuple[list[str], list[str]]]) -> _Moment:
        moment = _Moment({}, {})
        for keys, folders in parts:
            request = MultiRead(tuple(map(self.layout.leaf, keys)), tuple(map(self.layout.folder, folders)))
            answers = self.session.wait(self.client.ask(request), self.session.bound())
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            moment.found |= {key: node for key, node in zip(keys, answers, strict=False) if node is not None}
            names = zip(folders, answers[len(keys) :], strict=True)
            moment.names |= {folder: sorted(found) for folder, found in names if found is not None}
        return moment

    def _late(self, moment: _Moment) -> tuple[list[str], bool]:
        """The keys that were there and were not asked for, unless they are written once and known; and whether every
        folder that was there was listed."""
        late: list[str] = []
        is_complete = True
        for folder, names in moment.names.items():
            keys, prefixes = self.layout.children(folder, names)
            late += [key for key in keys if key not in self.known]
            for prefix in prefixes:
                if prefix not in moment.names:
                    is_complete = False
                    self._learn(prefix)
        return late, is_complete

    def _snapshot(self, moment: _Moment, late: list[str], unread: list[str], last: int) -> Snapshot:
        there = [key for folder, names in moment.names.items() for key in self.layout.children(folder, names)[0]]
        read = {key: self.known[key] for key in there if self.is_written_once(key) and key in self.known}
        read |= moment.found
        read |= {key: self.known[key] for key in late if key in self.known}
        missing = set(unread)
        entries = tuple(
            Entry(key, value or b"", Version.of(stat).number())
            for key, (value, stat) in sorted(read.items())
            if key not in missing and not stat.ephemeralOwner
        )
        seen = {key: value or b"" for key, (value, _) in self.known.items()} if unread else {}
        return Snapshot(entries, f"transaction {last:#x}", tuple(unread), seen)


def _is_as_created(node: Any, last: int) -> bool:
    """Whether the node, read after a moment at which it was there, still has the value of that moment: it was not
    written since it was created, and it was created before the transaction `last`."""
    stat = node[1]
    return bool(stat.version == 0 and stat.czxid <= last)
