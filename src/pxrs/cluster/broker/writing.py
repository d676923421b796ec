"""Writes one ledger: performs the actions of `pxrs.cluster.replication.LedgerWriter`.

The partition's lock guards the writer. Answers of nodes arrive on the threads of their links, and outcomes of commits
on threads of the broker's pool `Broker.crew`; both take the lock.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Final

import xxhash

from pxrs.cluster.broker.context import Broker
from pxrs.cluster.broker.entries import Entry
from pxrs.cluster.ledgers import EntryHead, LedgerRecord
from pxrs.cluster.records import TopicRecord
from pxrs.cluster.replication import CLOSED, Action, Change, Confirmed, Forget, LedgerWriter, Send, Stop
from pxrs.errors import (
    Conflict,
    InvalidPlacement,
    LedgerFenced,
    LedgerRemoved,
    NodeUnreachable,
    OutcomeUnknown,
    PartitionUnavailable,
    PxrsError,
    RegistryUnavailable,
)
from pxrs.metrics.instruments import BROKER_CONFIRM, BROKER_CONFIRMED, BROKER_DEGRADED, BROKER_ENTRIES, BROKER_REPLACED
from pxrs.model import Topic

_logger = logging.getLogger(__name__)

RETRY_S: Final = 0.2
"""How long to wait before a commit with an unknown outcome is repeated."""


def head_of(entry: Entry) -> EntryHead:
    digest = xxhash.xxh3_64()
    for piece in entry.pieces:
        digest.update(piece)
    return EntryHead(entry.offset, entry.rows, entry.size, entry.last_timestamp, entry.stored_at, digest.intdigest())


class LedgerShell:
    """One ledger that this broker writes. The caller holds the partition's lock, except in `close`."""

    def __init__(
        self,
        broker: Broker,
        topic: TopicRecord,
        record: LedgerRecord,
        version: int,
        changed: threading.Condition,
        on_confirmed: Callable[[LedgerShell, int], None],
        on_stopped: Callable[[LedgerShell, str], None],
    ) -> None:
        """changed: the partition's condition variable, whose lock guards the writer. on_confirmed: called with the
        number of entries that were newly confirmed. on_stopped: called with the reason when the writer has stopped
        without closing the ledger. Both are called under the lock."""
        self._broker, self._topic, self._changed = broker, topic, changed
        self._on_confirmed, self._on_stopped = on_confirmed, on_stopped
        self._core = LedgerWriter(record, version)
        self._entries: dict[int, tuple[Entry, EntryHead]] = {}
        """By number: the entries that not all of their nodes have acknowledged."""
        self._confirmed = -1
        self._sent_at: deque[float] = deque()
        """When each unconfirmed entry was sent (monotonic), in order."""
        self._failed: set[int] = set()
        """The tenures (`Send.tenure`) whose node has failed, so that each failure is reported once."""
        BROKER_DEGRADED.watch(self, lambda shell: [((), shell.is_degraded and not shell.is_stopped)])
        self._doubted: set[str] = set()
        """The nodes that have said that they may have lost entries of this ledger."""
        self.began_at = broker.clock.wall_time_us()
        self.size = 0
        self._tell_empty()

    def _tell_empty(self) -> None:
        """Log a warning if a position of the ledger has no node."""
        nodes = self.record.fragments[-1].nodes
        if None in nodes and not self.record.is_closed:
            _logger.warning(
                "ledger %s is degraded: only %d storage nodes are available for its %d positions; start more nodes",
                self.record.id,
                sum(node is not None for node in nodes),
                len(nodes),
            )

    @property
    def record(self) -> LedgerRecord:
        return self._core.record

    @property
    def is_degraded(self) -> bool:
        return self._core.is_degraded

    def is_short(self, live: Collection[str]) -> bool:
        """Whether entries lack a copy, so that the ledger should be closed: only closed ledgers are repaired. A node
        that is not in `live` counts as lost, although the writer has not noticed because it has sent nothing since.
        live: the nodes that are alive, or have been away for less than `copies_grace_s`."""
        gone = {node for fragment in self.record.fragments for node in fragment.nodes if node is not None} - {*live}
        return self._core.should_roll or bool(gone)

    def is_full(self, topic: Topic) -> bool:
        """Whether the next entry should go to a new ledger: this one is too large or too old, or lacks copies."""
        age_us = self._broker.clock.wall_time_us() - self.began_at
        # A negative age means that the clock was set back; the ledger counts as old.
        is_old = topic.segment_age_s is not None and not 0 <= age_us < topic.segment_age_s * 1e6
        return self.size >= topic.segment_bytes or is_old or self._core.should_roll

    @property
    def confirmed(self) -> int:
        """The last entry that is confirmed; -1 if none is."""
        return self._core.confirmed

    @property
    def is_stopped(self) -> bool:
        return self._core.stopped is not None

    @property
    def is_everywhere(self) -> bool:
        """Whether every node has acknowledged all its entries."""
        return not self._entries

    def append(self, entry: Entry) -> None:
        head = head_of(entry)
        self._entries[self._core.next] = entry, head
        self._sent_at.append(time.monotonic())
        BROKER_ENTRIES.of().add()
        self.size += entry.size
        self._do(self._core.append(head))

    def doubt(self, node: str) -> None:
        """The node says that it may have lost entries of this ledger (C7): replace it. The ledger is then to be closed
        and repaired, whether or not anything more is appended."""
        if node in self._doubted or self.is_stopped or node not in self.record.named:
            return
        self._doubted.add(node)
        _logger.warning(
            "node %s may have lost entries of ledger %s: the ledger will be closed and repaired",
            node,
            self.record.id,
        )
        self._do(self._core.offer(self._spares({*self.record.named, node})))
        self._do(self._core.doubted(node))

    def offer_spares(self) -> None:
        """If a position is empty, offer the available nodes to the writer."""
        if self._core.is_degraded and not self.is_stopped:
            self._do(self._core.offer(self._spares(self.record.named)))

    def stop(self) -> None:
        self._do(self._core.stop("stopped"))

    def close(self, until: float) -> LedgerRecord:
        """Close the ledger when every entry is confirmed. until: the deadline (monotonic). The caller does not hold the
        lock. Raises PartitionUnavailable."""
        with self._changed:
            self._do(self._core.close())
            while self._core.stopped is None:
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            stopped = self._core.stopped
        if stopped is None or stopped.why != CLOSED or stopped.record is None:
            why = "not enough nodes have acknowledged its entries" if stopped is None else stopped.why
            raise PartitionUnavailable(f"ledger {self.record.id}", f"it could not be closed: {why}")
        return stopped.record

    # Under the lock.

    def _do(self, actions: list[Action]) -> None:
        waiting = list(actions)
        while waiting:
            action = waiting.pop(0)
            match action:
                case Send(node, tenure, number, lac):
                    waiting += self._send(node, tenure, number, lac)
                case Change():
                    self._broker.crew.submit(self._commit, action)
                case Confirmed(upto):
                    count, self._confirmed = upto - self._confirmed, upto
                    self._count_confirmed(count)
                    self._on_confirmed(self, count)
                case Forget(upto):
                    for number in range(min(self._entries, default=0), upto + 1):
                        self._entries.pop(number, None)
                case Stop(why):
                    self._entries.clear()
                    if why != CLOSED:
                        self._on_stopped(self, why)
                    self._changed.notify_all()

    def _count_confirmed(self, count: int) -> None:
        now = time.monotonic()
        BROKER_CONFIRMED.of().add(count)
        for _ in range(count):
            BROKER_CONFIRM.of().observe(now - self._sent_at.popleft())

    def _send(self, node: str, tenure: int, number: int, lac: int) -> list[Action]:
        entry, head = self._entries[number]
        try:
            link = self._broker.links(node)
        except NodeUnreachable as error:
            return self._fail(node, tenure, error)
        done = functools.partial(self._answered, node, tenure, number)
        link.add(self.record.id, number, head, entry.pieces, lac, None, done)
        return []

    def _fail(self, node: str, tenure: int, error: NodeUnreachable) -> list[Action]:
        if tenure in self._failed or self.is_stopped:
            return []
        self._failed.add(tenure)
        BROKER_REPLACED.of().add()
        self._broker.news.record(
            "node.replaced", topic=self._topic.topic.name, ledger=self.record.id, node=node, error=str(error)
        )
        spares = self._spares({*self.record.named, node})
        return [
            *self._core.offer(spares),
            *self._core.failed(node, tenure, is_lasting=isinstance(error, LedgerRemoved)),
        ]

    def _spares(self, without: set[str]) -> list[str]:
        """The spares, the best first. If the placement function fails, which `Placements` reports, the writer continues
        without a spare."""
        try:
            return self._broker.spares(self._topic, without)
        except InvalidPlacement:
            return []

    # On other threads.

    def _answered(self, node: str, tenure: int, number: int, error: Exception | None) -> None:
        with self._changed:
            if self._core.stopped is not None:
                return
            if error is None:
                actions = self._core.acked(node, tenure, number)
            elif isinstance(error, LedgerFenced):
                actions = self._core.fenced()
            elif isinstance(error, NodeUnreachable):
                actions = self._fail(node, tenure, error)
            else:
                _logger.error("ledger %s: node %s refused entry %d: %s", self.record.id, node, number, error)
                actions = self._core.stop(str(error))
            if actions:
                self._do(actions)

    def _commit(self, change: Change) -> None:
        key = change.record.key
        registry = self._broker.registry
        step: Callable[[], list[Action]]
        try:
            version = registry.commit({key: change.expect}, {key: change.record.dump()})[key]
            step = functools.partial(self._core.committed, version)
        except Conflict:
            try:
                found = registry.get(key)
            except PxrsError:
                step = self._core.unknown
            else:
                record = None if found is None else LedgerRecord.parse(found.key, found.value)
                step = functools.partial(self._core.conflicted, record, 0 if found is None else found.version)
        except (OutcomeUnknown, RegistryUnavailable) as error:
            _logger.warning("the record of ledger %s may not have been written, retrying: %s", self.record.id, error)
            time.sleep(RETRY_S)
            step = self._core.unknown
        except Exception as error:
            _logger.exception("the record of ledger %s could not be written; its writer stops", self.record.id)
            step = functools.partial(self._core.stop, str(error))
        with self._changed:
            before = self.record
            self._do(step())
            if self.record is not before:
                self._tell_empty()
            self._changed.notify_all()
