"""What a commit becomes: one ZooKeeper transaction ("multi"), as a list of steps. Nothing here does I/O.

Every key that a commit names is believed to be in some state: the one that the caller expects, or, for a blind write,
the one that was just read. The steps are right for that state and fail on any other, so the transaction decides all of
it at once. A failed step then tells which belief was wrong.

What ZooKeeper has no step for:
- "This key is absent": make it and delete it again; the pair fails if it is there and leaves nothing if it is not.
- "Make this ephemeral node persistent", or the other way round, or another session's: delete it and make it anew.
- "Which version has the node that I made": a step that makes a node answers with its path alone. All steps of a
  transaction share one transaction id, and one that sets data answers with it; so where a commit makes nodes and sets
  none, it sets the namespace's root, whose data nobody reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from kazoo.exceptions import RolledBackError, RuntimeInconsistency

from pxrs.registry.contract import Commit
from pxrs.registry.zookeeper.layout import Layout, Version

ANY = -1
"""As a data version: whatever it is, but the node must be there."""


class Node(NamedTuple):
    """A node as it is believed to be; `is_mine` says that it lives with the session that commits."""

    writes: int
    is_ephemeral: bool
    is_mine: bool


class Step(NamedTuple):
    kind: Literal["check", "create", "set", "delete"]
    path: str
    key: str | None = None
    """The key that it is about; None for the lease and the root."""
    writes: int = ANY
    value: bytes = b""
    is_ephemeral: bool = False

    @property
    def wire_bytes(self) -> int:
        # Lengths, header and flags; for a new node also its access rights, of which these are the longest we give.
        return len(self.path) + len(self.value) + (60 if self.kind == "create" else 24)


def steps(commit: Commit, believed: Mapping[str, Node | None], layout: Layout, lease_path: str | None) -> list[Step]:
    """The transaction for a commit. The lease comes first, so that its end is told before a conflict."""
    result = [] if lease_path is None else [Step("check", lease_path)]
    written = commit.written
    for key in commit.keys:
        path, node = layout.leaf(key), believed[key]
        if key in written:
            result += _write(Step("create", path, key, ANY, written[key], key in commit.ephemeral), node)
        elif node is None:
            result += [Step("create", path, key), Step("delete", path, key)]
        else:
            result.append(Step("delete" if key in commit.delete else "check", path, key, node.writes))
    if any(step.kind == "create" for step in result) and not any(step.kind == "set" for step in result):
        result.append(Step("set", layout.root))
    return result


def _write(create: Step, node: Node | None) -> list[Step]:
    if node is None:
        return [create]
    if node.is_mine if create.is_ephemeral else not node.is_ephemeral:
        return [create._replace(kind="set", writes=node.writes)]
    return [Step("delete", create.path, create.key, node.writes), create]


def versions(commit: Commit, done: Sequence[Step], results: Sequence[Any]) -> dict[str, Version]:
    """The new version of each key written, from the answers to a transaction that passed."""
    changed_in = next((stat.mzxid for step, stat in zip(done, results, strict=True) if step.kind == "set"), 0)
    found = {}
    for step, answer in zip(done, results, strict=True):
        if step.key is None or not (step.key in commit.put or step.key in commit.ephemeral):
            continue
        if step.kind == "set":
            found[step.key] = Version.of(answer)
        elif step.kind == "create":
            found[step.key] = Version(changed_in, step.is_ephemeral, 0)
    return found


def failure(done: Sequence[Step], results: Sequence[Any]) -> tuple[Step, Exception] | None:
    """The step that made a transaction fail, and its error. The others only say that it failed as a whole."""
    failed = [(step, answer) for step, answer in zip(done, results, strict=True) if isinstance(answer, Exception)]
    causes = [pair for pair in failed if not isinstance(pair[1], (RolledBackError, RuntimeInconsistency))]
    return next(iter(causes or failed), None)
