"""A commit as one ZooKeeper transaction ("multi"), which is a list of steps. Nothing here does I/O.

For every key that a commit names a state is assumed: the one that the caller expects or, for a key without an
expectation (a blind write), the one that was just read. The steps succeed only in that state, so the transaction checks
all keys atomically. The step that failed tells which assumption was wrong.

ZooKeeper has no step for these, so others are used:
- "This key is absent": create it and delete it again. The pair fails if the node exists, and leaves nothing if not.
- "This node is persistent": create a child of it and delete the child again, which fails below an ephemeral node. A
  blind write needs that: a node that was replaced by one of the other kind after it was read counts its writes from 0
  too.
- "Make this ephemeral node persistent", or the reverse, or bind it to another session: delete it and create it again.
- "Return the version of the node that was created": the answer to a create has only the path. All steps of a
  transaction share one transaction id, which is in the answer to a step that sets data. So a commit that creates nodes
  and sets none also sets the data of the namespace's root, which nothing reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kazoo.exceptions import RolledBackError, RuntimeInconsistency
from kazoo.protocol.serialization import CheckVersion, Create, Delete, SetData

from pxrs.registry.contract import Commit
from pxrs.registry.zookeeper.layout import Layout, Version

ANY = -1
"""In place of a number of writes: any number, but the node must exist."""
PROBE = "/;p"
_EPHEMERAL, _PERSISTENT = 1, 0


class Node(NamedTuple):
    """The assumed state of a node. is_mine: whether it is an ephemeral node of the session that commits."""

    writes: int
    is_ephemeral: bool
    is_mine: bool


class Step(NamedTuple):
    """One of kazoo's requests, and the key that it is about: None for the lease and the root."""

    request: Any
    key: str | None = None

    @property
    def wire_bytes(self) -> int:
        # The path and the data, and a bound for lengths, header and flags; for a create also for the access rights.
        request = self.request
        if isinstance(request, Create):
            return len(request.path) + len(request.data) + 60
        return len(request.path) + (len(request.data) if isinstance(request, SetData) else 0) + 24


def steps(
    commit: Commit, believed: Mapping[str, Node | None], layout: Layout, acl: Any, lease_path: str | None
) -> list[Step]:
    """The transaction for a commit. The lease is checked first, so that its end is reported before a conflict."""
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
    """The new version of each key written, from the answers to a transaction that succeeded."""
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
    """The step that made a transaction fail, and its error. The errors of the other steps only say that it failed."""
    other = None
    for step, answer in zip(done, answers, strict=True):
        if isinstance(answer, Exception):
            if not isinstance(answer, (RolledBackError, RuntimeInconsistency)):
                return step, answer
            other = other or (step, answer)
    return other
