"""What a commit becomes: one ZooKeeper transaction ("multi"), as a list of steps. Nothing here does I/O.

Every key that a commit names is believed to be in some state: the one that the caller expects, or, for a blind write,
the one that was just read. The steps are right for that state and fail on any other, so the transaction decides all of
it at once. A failed step then tells which belief was wrong.

What ZooKeeper has no step for:
- "This key is absent": make it and delete it again; the pair fails if it is there and leaves nothing if it is not.
- "This node is persistent": make a child of it and delete it again, which an ephemeral node does not allow. A blind
  write needs that, because a node that was made anew in the other kind since it was read counts its writes from 0, too.
- "Make this ephemeral node persistent", or the other way round, or another session's: delete it and make it anew.
- "Which version has the node that I made": a step that makes a node answers with its path alone. All steps of a
  transaction share one transaction id, and one that sets data answers with it; so where a commit makes nodes and sets
  none, it sets the namespace's root, whose data nobody reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kazoo.exceptions import RolledBackError, RuntimeInconsistency
from kazoo.protocol.serialization import CheckVersion, Create, Delete, SetData

from pxrs.registry.contract import Commit
from pxrs.registry.zookeeper.layout import Layout, Version

ANY = -1
"""As a number of writes: whatever it is, but the node must be there."""
PROBE = "/;p"
_EPHEMERAL, _PERSISTENT = 1, 0


class Node(NamedTuple):
    """A node as it is believed to be; `is_mine` says that it lives with the session that commits."""

    writes: int
    is_ephemeral: bool
    is_mine: bool


class Step(NamedTuple):
    """One of kazoo's requests, and the key that it is about: None for the lease and the root."""

    request: Any
    key: str | None = None

    @property
    def wire_bytes(self) -> int:
        # Lengths, header and flags; for a new node also its access rights, of which these are the longest we give.
        request = self.request
        if isinstance(request, Create):
            return len(request.path) + len(request.data) + 60
        return len(request.path) + (len(request.data) if isinstance(request, SetData) else 0) + 24


def steps(
    commit: Commit, believed: Mapping[str, Node | None], layout: Layout, acl: Any, lease_path: str | None
) -> list[Step]:
    """The transaction for a commit. The lease comes first, so that its end is told before a conflict."""
    result = [] if lease_path is None else [Step(CheckVersion(lease_path, ANY))]
    written = commit.written
    makes = sets = False
    for key in commit.keys:
        path, node = layout.leaf(key), believed[key]
        if key not in written:
            if node is None:
                result += (Step(Create(path, b"", acl, _PERSISTENT), key), Step(Delete(path, ANY), key))
            elif key in commit.delete:
                result.append(Step(Delete(path, node.writes), key))
            else:
                result.append(Step(CheckVersion(path, node.writes), key))
            continue
        is_ephemeral, is_blind = key in commit.ephemeral, key not in commit.expect
        if node is not None and (node.is_mine and not is_blind if is_ephemeral else not node.is_ephemeral):
            result.append(Step(SetData(path, written[key], node.writes), key))
            if is_blind:
                result += (Step(Create(path + PROBE, b"", acl, _PERSISTENT), key), Step(Delete(path + PROBE, ANY), key))
            sets = True
            continue
        if node is not None:
            result.append(Step(Delete(path, node.writes), key))
        result.append(Step(Create(path, written[key], acl, _EPHEMERAL if is_ephemeral else _PERSISTENT), key))
        makes = True
    if makes and not sets:
        result.append(Step(SetData(layout.root, b"", ANY)))
    return result


def versions(commit: Commit, done: Sequence[Step], answers: Sequence[Any]) -> dict[str, Version]:
    """The new version of each key written, from the answers to a transaction that passed."""
    found: dict[str, Version] = {}
    made: list[tuple[str, bool]] = []
    written = commit.written
    changed_in = 0
    for (request, key), answer in zip(done, answers, strict=True):
        if isinstance(request, SetData):
            changed_in = answer.mzxid
            if key is not None:
                found[key] = Version.of(answer)
        elif isinstance(request, Create) and key in written and not request.path.endswith(PROBE):
            assert key is not None
            made.append((key, request.flags == _EPHEMERAL))
    for key, is_ephemeral in made:
        found[key] = Version(changed_in, is_ephemeral, 0)
    return found


def failure(done: Sequence[Step], answers: Sequence[Any]) -> tuple[Step, Exception] | None:
    """The step that made a transaction fail, and its error. The others only say that it failed as a whole."""
    other = None
    for step, answer in zip(done, answers, strict=True):
        if isinstance(answer, Exception):
            if not isinstance(answer, (RolledBackError, RuntimeInconsistency)):
                return step, answer
            other = other or (step, answer)
    return other
