"""One attempt to commit: read the keys that the caller has no expectation of, send one transaction, and find out why
it failed.

Invariants: the transaction is handed to kazoo once. An error before that, and an answer that says that the transaction
failed, mean that no key was changed, and the attempt may be repeated. If no answer comes, the outcome is
`OutcomeUnknown` (R5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kazoo.exceptions import (
    BadVersionError,
    KazooException,
    NoChildrenForEphemeralsError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    QuotaExceededError,
)
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.serialization import Create

from pxrs.errors import (
    CommitTooLarge,
    Conflict,
    OutcomeUnknown,
    PxrsError,
    RegistryCorrupt,
    RegistryUnavailable,
    StorageFull,
)
from pxrs.registry.contract import ABSENT, Commit
from pxrs.registry.zookeeper.client import Client
from pxrs.registry.zookeeper.layout import Layout, Version, ancestors
from pxrs.registry.zookeeper.lease import LeaseSession
from pxrs.registry.zookeeper.multi import PROBE, Node, Step, failure, steps, versions
from pxrs.registry.zookeeper.session import DENIED, REFUSED, Session, TryAgain, barrier, denied

# A server closes the connection on a request of more than 1,048,575 bytes.
WIRE_BYTES_MAX = 1_048_000

_CHANGED = (NoNodeError, NodeExistsError, BadVersionError)


@dataclass(slots=True)
class Attempt:
    commit: Commit
    layout: Layout
    session: Session
    holder: LeaseSession | None
    """The session of the lease that the commit names; None if it names none."""
    client: Client
    until: float

    def perform(self) -> dict[str, int]:
        """The new versions; raises the commit's refusal, or TryAgain."""
        believed = self._believed()
        if self._deletes_one_key_blindly and None in believed.values():
            return {}
        lease_path = None if self.holder is None else self.holder.path
        todo = steps(self.commit, believed, self.layout, self.session.endpoint.acl, lease_path)
        _check_wire_size(todo)
        answers = self._send(todo)
        failed = failure(todo, answers)
        if failed is not None:
            raise self._meaning(todo, *failed)
        new = versions(self.commit, todo, answers)
        if self.holder is not None:
            self.holder.made.update({key: new[key].made_in for key in self.commit.ephemeral})
            for key in (*self.commit.put, *self.commit.delete):
                self.holder.made.pop(key, None)
        return {key: version.number() for key, version in new.items()}

    @property
    def _deletes_one_key_blindly(self) -> bool:
        """Whether the commit only deletes one key, without an expectation: if it is absent, there is nothing to do.
        That several keys are absent at one moment takes a transaction to prove."""
        commit = self.commit
        return len(commit.keys) == len(commit.delete) == 1 and not commit.expect and self.holder is None

    def _believed(self) -> dict[str, Node | None]:
        believed = self._look_at_blind()
        for key, number in self.commit.expect.items():
            if number == ABSENT:
                believed[key] = None
                continue
            version = Version.parse(number)
            if not version.is_possible:
                raise Conflict(self._differing([key]))
            is_mine = self.holder is not None and self.holder.made.get(key) == version.made_in
            believed[key] = Node(version.writes, version.is_ephemeral, is_mine)
        return believed

    def _look_at_blind(self) -> dict[str, Node | None]:
        """The nodes of the keys that the commit names without an expectation, as they are. If one changes before the
        transaction, the transaction fails and is repeated; the next read on the same session sees that change."""
        blind = [key for key in self.commit.keys if key not in self.commit.expect]
        if not blind:
            return {}
        if self._deletes_one_key_blindly:
            self.session.wait(barrier(self.client, self.layout.root), self.until)
        me = (self.client.client_id or (None,))[0]
        stats = self.session.gather(self.client.exists_async, map(self.layout.leaf, blind))
        return {
            key: None if stat is None else Node(stat.version, stat.ephemeralOwner != 0, stat.ephemeralOwner == me)
            for key, stat in zip(blind, stats, strict=True)
        }

    def _send(self, todo: list[Step]) -> list[Any]:
        transaction = self.client.transaction()
        transaction.operations.extend(step.request for step in todo)
        result = transaction.commit_async()
        try:
            answers: list[Any] = self.session.wait(result, self.until)
        except (*REFUSED, *DENIED):
            raise
        except (KazooException, KazooTimeoutError) as error:
            raise OutcomeUnknown(
                f"{self.session.endpoint.url}: the reply to a commit was lost ({type(error).__name__}); the commit may "
                "have been applied, or may still be"
            ) from error
        return answers

    def _meaning(self, todo: list[Step], step: Step, error: Exception) -> Exception:
        """The error to raise for a failed transaction, which has changed nothing."""
        if isinstance(error, NoNodeError) and self.holder is not None and step.request.path == self.holder.path:
            return self.holder.expire()
        if isinstance(error, NoNodeError) and (isinstance(step.request, Create) or step.key is None):
            creates = (s.request.path for s in todo if isinstance(s.request, Create))
            made = {folder for path in creates if not path.endswith(PROBE) for folder in ancestors(path)}
            self.session.make(self.client, made, self.until)
            return TryAgain()
        if isinstance(error, _CHANGED) and step.key is not None:
            return Conflict(self._differing([step.key])) if step.key in self.commit.expect else TryAgain()
        if isinstance(error, NoChildrenForEphemeralsError) and step.request.path.endswith(PROBE):
            return TryAgain()
        return self._refusal(step, error)

    def _refusal(self, step: Step, error: Exception) -> PxrsError:
        endpoint, path = self.session.endpoint, step.request.path
        if isinstance(error, DENIED):
            return denied(endpoint, error)
        if isinstance(error, QuotaExceededError):
            return StorageFull(f"{endpoint.url}: the quota for {path} is used up")
        if isinstance(error, (NotEmptyError, NoChildrenForEphemeralsError)):
            return RegistryCorrupt(
                path, "a key has child nodes, or a folder is ephemeral: another program created these nodes"
            )
        return RegistryUnavailable(f"{endpoint.url}: {type(step.request).__name__} {path}: {error!r}")

    def _differing(self, failed: list[str]) -> list[str]:
        """The keys whose versions are not as expected; if all are by now, or cannot be read, the keys that made the
        transaction fail. A session reads nothing older than its own transaction that has just failed."""
        expect = self.commit.expect
        try:
            nodes = list(self.session.read(self.client, map(self.layout.leaf, expect)))
        except (KazooException, KazooTimeoutError):
            return failed
        now = (ABSENT if node is None else Version.of(node[1]).number() for node in nodes)
        return [key for (key, version), found in zip(expect.items(), now, strict=True) if found != version] or failed


def _check_wire_size(todo: list[Step]) -> None:
    size = sum(step.wire_bytes for step in todo)
    if size > WIRE_BYTES_MAX:
        raise CommitTooLarge(
            f"the commit has {size:,} bytes with the paths of all keys; the limit is {WIRE_BYTES_MAX:,}"
        )
