"""Recovers one ledger: performs the actions of `pxrs.cluster.recovery.Recovery`. Runs on the caller's thread."""

from __future__ import annotations

import functools
import itertools
import logging
import queue
import time
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Final

from pxrs.cluster.broker.context import Broker
from pxrs.cluster.deciding import abandonment_of
from pxrs.cluster.ledgers import LedgerRecord
from pxrs.cluster.records import Abandonment, TopicRecord, abandoned_key
from pxrs.cluster.recovery import (
    CHANGED,
    DAMAGED,
    FENCED,
    MISSING,
    UNKNOWN,
    UNREADABLE,
    AddEntry,
    Closed,
    FenceNode,
    Measure,
    NeedSpares,
    ReadEntry,
    Recovery,
    Stopped,
)
from pxrs.cluster.recovery import Action as RecoveryAction
from pxrs.cluster.replication import Change
from pxrs.errors import (
    Conflict,
    InvalidPlacement,
    LedgerFenced,
    NodeUnreachable,
    OutcomeUnknown,
    PartitionUnavailable,
    PxrsError,
    RegistryUnavailable,
)
from pxrs.metrics.instruments import BROKER_RECOVERY

_logger = logging.getLogger(__name__)

RETRY_S: Final = 0.5
"""How long to wait for an answer before all unanswered requests are repeated."""
CALL_S: Final = 2.0
"""How long a node may take to answer one request."""

SILENT_S: Final = CALL_S + RETRY_S
"""A recovery ends when no node has answered for so long and other partitions wait for its thread. Every node has had
its time to answer then."""

_WHY: Final = {
    FENCED: "a later recovery of it has begun",
    CHANGED: "another process has changed its record",
    DAMAGED: "none of its storage nodes has an entry that was confirmed: look for their former disks, or abandon the "
    "nodes that had it (`pxrs cluster abandon`)",
}
_ANSWERS: Final = {
    None: "does not answer",
    MISSING: "does not have it",
    UNKNOWN: "is in doubt and does not know",
    UNREADABLE: "cannot read it",
}
_FENCE: Final = "fence"
_MEASURE: Final = ("", "measure")

Step = Callable[[], list[RecoveryAction]]


class Recoverer:
    """One recovery of one ledger, for the broker that owns the partition."""

    def __init__(
        self,
        broker: Broker,
        topic: TopicRecord,
        record: LedgerRecord,
        version: int,
        epoch: int,
        check: Callable[[], None] = lambda: None,
        confirmed: int = -1,
        is_crowded: Callable[[], bool] = lambda: False,
    ) -> None:
        """check: raises an error once the broker has given the partition up; the recovery is then ended. confirmed: the
        last entry that this broker has confirmed as the ledger's writer. is_crowded: whether others wait for the
        thread; the recovery then ends after SILENT_S without an answer, and is begun again later."""
        self._broker, self._topic, self._check, self._is_crowded = broker, topic, check, is_crowded
        self._decided = abandonment_of(broker.registry, record)
        nodes = () if self._decided is None else self._decided.nodes
        self._core = Recovery(record, version, epoch, abandoned=nodes, confirmed=confirmed)
        self._ledger = record.id
        self._steps: queue.SimpleQueue[Step] = queue.SimpleQueue()
        """Calls of the core's methods, queued by other threads when answers arrive, and made by the thread in `run`."""
        self._heard_at = time.monotonic()
        """When a node or the registry has last answered."""
        self._asked: set[tuple[str, int | str]] = set()
        """Questions that are not answered: the node, and the entry that is read, or `_FENCE`. With "" in place of a
        node: `_MEASURE`, and the number of each commit. The core asks again for what is late. Without this set, each
        retry would occupy one more thread of `Broker.crew` with a node that hangs, and the commits of other partitions
        would wait for these threads. Each operation on the set is atomic."""
        self._commits = itertools.count()
        """The numbers of the commits: a commit that is repeated has another one."""
        self._problem = ""
        """Why the last commit or `Measure` has failed; empty if it has not."""

    def run(self) -> Closed:
        """Recover the ledger. Raises PartitionUnavailable if too few nodes answer within `recovery_s`, or if another
        process has changed the record; what `check` raises."""
        began, outcome = time.monotonic(), "failed"
        try:
            closed = self._run()
            outcome = "closed"
            return closed
        finally:
            BROKER_RECOVERY.of(outcome).observe(time.monotonic() - began)

    def _run(self) -> Closed:
        self._heard_at = time.monotonic()
        until = self._heard_at + self._broker.settings.recovery_s
        self._offer()
        self._do(self._core.start())
        while self._core.stopped is None:
            self._check()
            try:
                step = self._steps.get(timeout=RETRY_S)
            except queue.Empty:
                if time.monotonic() > until or (self._is_silent and self._is_crowded()):
                    raise PartitionUnavailable(f"ledger {self._ledger}", self._waits_for()) from None
                if self._decided != abandonment_of(self._broker.registry, self._core.record):
                    raise PartitionUnavailable(
                        f"ledger {self._ledger}", "an operator has abandoned nodes; the recovery restarts"
                    ) from None
                self._offer()
                step = self._core.retry
            self._do(step())
        if isinstance(self._core.stopped, Stopped):
            raise PartitionUnavailable(
                f"ledger {self._ledger}", f"its recovery stopped: {_WHY[self._core.stopped.why]}"
            )
        closed = self._core.stopped
        if self._decided is not None:
            self._note_used(self._decided)
        if closed.record.doubted:
            self._broker.news.record(
                "ledger.ended_in_doubt",
                topic=self._topic.topic.name,
                topic_id=self._topic.topic.id,
                partition=closed.record.partition,
                ledger=closed.record.id,
                end=closed.record.end,
                nodes=list(closed.record.doubted),
            )
        return closed

    @property
    def _is_silent(self) -> bool:
        """Whether no node has answered for SILENT_S, although the recovery waits for nothing else: a slow registry or
        a `Measure` is no silence."""
        is_busy = any(not node for node, _ in self._asked.copy())
        return not is_busy and time.monotonic() - self._heard_at > SILENT_S

    def _waits_for(self) -> str:
        """Why the recovery does not end, as the end of a message."""
        if self._problem:
            return self._problem
        entry, answers = self._core.awaited()
        if entry is None:
            return f"too few of its storage nodes can be fenced: {', '.join(sorted(answers))} do not answer"
        told = ", ".join(f"{node} {_ANSWERS[answer]}" for node, answer in sorted(answers.items()))
        return f"it is not certain whether entry {entry} was acknowledged: {told or 'too few spares accept copies'}"

    def _offer(self) -> None:
        """Offer every node that takes entries. The core leaves out those of the entry's own fragment; nodes that the
        record names for other entries may be all that is left."""
        try:
            spares = self._broker.spares(self._topic, ())
        except InvalidPlacement:  # which `Placements` reports; the nodes of the ledger may suffice
            spares = []
        self._do(self._core.offer(spares))

    def _note_used(self, decided: Abandonment) -> None:
        """Delete the decision, which is carried out: the ledger's record lists the abandoned nodes."""
        record = self._core.record
        _logger.warning(
            "ledger %s was closed at offset %s without the storage nodes %s, as %s decided: acknowledged messages "
            "after this offset may be lost",
            record.id,
            record.end,
            ", ".join(decided.nodes),
            decided.who,
        )
        try:
            self._broker.registry.commit(delete=[abandoned_key(record.name)])
        except PxrsError as error:
            _logger.info(
                "the decision about ledger %s was applied, but not removed from the registry: %s", record.id, error
            )

    def _do(self, actions: Iterable[RecoveryAction]) -> None:
        reads: list[ReadEntry] = []
        for action in actions:
            match action:
                case ReadEntry(node, entry):
                    if self._is_first(node, entry):
                        reads.append(action)
                case Change():
                    number = next(self._commits)
                    self._asked.add(("", number))
                    self._broker.crew.submit(self._commit, action, number)
                case FenceNode(node, number):
                    if self._is_first(node, _FENCE):
                        self._broker.crew.submit(self._fence, node, number)
                case AddEntry():
                    self._add(action)
                case Measure(last):
                    if self._is_first(*_MEASURE):
                        for silent in {node for node, _ in self._asked.copy() if node}:
                            self._broker.reader.avoid(silent)
                        self._broker.crew.submit(self._measure, last)
                case NeedSpares() | Closed() | Stopped():
                    pass  # `run` offers spares with each retry, and reads the outcome from `stopped`
        for (node, number), group in groupby(sorted(reads), lambda read: (read.node, read.recovery)):
            entries = [read.entry for read in group]
            self._broker.crew.submit(self._read, node, number, entries)

    def _is_first(self, node: str, what: int | str) -> bool:
        """Whether this question is not being asked already. If so, it is noted as asked."""
        if (node, what) in self._asked:
            return False
        self._asked.add((node, what))
        return True

    # On threads of `Broker.crew`.

    def _tell(self, step: Callable[..., list[RecoveryAction]], *arguments: object, **named: object) -> None:
        if step != self._core.failed:
            self._heard_at = time.monotonic()
        self._steps.put(functools.partial(step, *arguments, **named))

    def _failed(self, node: str, error: PxrsError) -> None:
        if isinstance(error, LedgerFenced):
            self._tell(self._core.refused)
            return
        _logger.info("recovery of ledger %s: %s", self._ledger, error)
        self._tell(self._core.failed, node)

    def _fence(self, node: str, number: int) -> None:
        try:
            found = self._broker.links(node).fence(self._ledger, number, CALL_S)
        except (NodeUnreachable, LedgerFenced) as error:
            self._failed(node, error)
        else:
            self._tell(self._core.fenced, node, found.lac)
        finally:
            self._asked.discard((node, _FENCE))

    def _read(self, node: str, number: int, entries: list[int]) -> None:
        try:
            self._read_all(node, number, {*entries})
        finally:
            self._asked.difference_update((node, entry) for entry in entries)

    def _read_all(self, node: str, number: int, wanted: set[int]) -> None:
        first, last = min(wanted), max(wanted)
        while first <= last:
            try:
                found = self._broker.links(node).read(self._ledger, first, last, recovery=number, timeout_s=CALL_S)
            except (NodeUnreachable, LedgerFenced) as error:
                self._failed(node, error)
                return
            for each in found:
                if each.entry not in wanted:
                    continue
                if each.error is not None:
                    self._tell(self._core.unreadable, node, each.entry)
                elif each.is_unknown:
                    self._tell(self._core.doubtful, node, each.entry)
                elif each.head is None:
                    self._tell(self._core.missing, node, each.entry)
                else:
                    self._tell(self._core.found, node, each.entry, each.head, bytes(each.body))
            if not found:
                self._tell(self._core.failed, node)
                return
            first = max(each.entry for each in found) + 1

    def _add(self, add: AddEntry) -> None:
        def done(error: Exception | None) -> None:
            if error is None:
                self._tell(self._core.acked, add.node, add.entry)
            elif isinstance(error, PxrsError):
                self._failed(add.node, error)
            else:
                self._tell(self._core.failed, add.node)

        try:
            link = self._broker.links(add.node)
        except NodeUnreachable as error:
            self._failed(add.node, error)
            return
        link.add(self._ledger, add.entry, add.head, (add.body,), add.lac, add.recovery, done)

    def _measure(self, last: int) -> None:
        try:
            index = self._broker.reader.index_upto(self._core.record, last, CALL_S)
        except PxrsError as error:
            _logger.info("recovery of ledger %s: %s", self._ledger, error)
            self._problem = f"the length of its entries is not known: {error}"
            if self._core.record.abandoned:  # some entries are lost, and their length is unknown
                self._tell(self._core.measured, last, 0)
            return  # `retry` asks again
        finally:
            self._asked.discard(_MEASURE)
        self._problem = ""
        self._tell(self._core.measured, last, index.bytes)

    def _commit(self, change: Change, number: int) -> None:
        try:
            self._write(change)
        finally:
            self._asked.discard(("", number))

    def _write(self, change: Change) -> None:
        key = change.record.key
        registry = self._broker.registry
        try:
            version = registry.commit({key: change.expect}, {key: change.record.dump()})[key]
        except Conflict:
            try:
                found = registry.get(key)
            except PxrsError:
                self._tell(self._core.unknown)
                return
            record = None if found is None else LedgerRecord.parse(found.key, found.value)
            self._tell(self._core.conflicted, record, 0 if found is None else found.version)
        except (OutcomeUnknown, RegistryUnavailable) as error:
            _logger.warning("the record of ledger %s may not have been written, retrying: %s", self._ledger, error)
            self._problem = f"its record may not have been written: {error}"
            time.sleep(RETRY_S)
            self._tell(self._core.unknown)
        else:
            self._problem = ""
            self._tell(self._core.committed, version)
