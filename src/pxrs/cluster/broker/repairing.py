"""Repairs one closed ledger: performs the actions of `pxrs.cluster.copies.Repair`, on the caller's thread.

Every commit expects the version of the ledger's record. So of two repairs of one ledger only one goes on, and a repair
cannot restore the record of a ledger that was removed. A commit on a ledger of a partition also expects the version of
this broker's claim on the partition (`PartitionLedgers`), so only the owner can repair it.

Entries are read from a node that has them and added to the node that lacks them. At most about HELD_BYTES_MAX of them
are unacknowledged, so that a repair does not use up the limit of the link (`unanswered_bytes_max`), which writers
share.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final, Protocol

from pxrs.cluster import records
from pxrs.cluster.broker.context import Broker
from pxrs.cluster.broker.opened import NodeCount
from pxrs.cluster.broker.partition import OwnedPartition
from pxrs.cluster.copies import Action, CopyEntry, Ended, ListEntries, Repair, Repaired
from pxrs.cluster.ledgers import LedgerRecord
from pxrs.cluster.links import EntryRead
from pxrs.cluster.records import TopicRecord
from pxrs.cluster.replication import Change
from pxrs.errors import Conflict, LedgerFenced, NodeUnreachable, OutcomeUnknown, PxrsError, RegistryUnavailable
from pxrs.events.model import Json
from pxrs.metrics.instruments import BROKER_COPIED, BROKER_COPIED_ENTRIES

_logger = logging.getLogger(__name__)

CALL_S: Final = 10.0
"""How long a node may take to answer one request."""
ANSWER_S: Final = 60.0
"""How long a repair waits for an answer to an add. The timeout of the link is shorter."""
PAGE: Final = 10_000
"""How many entries of an index are requested at a time."""
READ_BYTES: Final = 4 << 20
"""How many bytes are read at a time."""
HELD_BYTES_MAX: Final = 16 << 20
"""Number of unacknowledged bytes beyond which no more entries are sent."""

Step = Callable[[], list[Action]]


class Ledgers(Protocol):
    """Why this broker repairs a ledger: what the ledger belongs to."""

    event: str
    """The name of the event that tells of a repair."""

    @property
    def topic(self) -> TopicRecord:
        """The topic, for the choice of nodes."""

    @property
    def is_over(self) -> bool:
        """Whether this broker is not to repair the ledger any more."""

    def expected(self) -> Mapping[str, int]:
        """The keys and versions that a commit expects beside the ledger's record."""

    def fields(self) -> dict[str, Json]:
        """The fields of the event that say what the ledger belongs to."""

    def repaired(self, record: LedgerRecord, counted: Mapping[str, NodeCount]) -> None:
        """The record of the ledger is this one now, unless a storage node has changed it since the repair has written
        it. counted: as for `OwnedPartition.look_again`, from the beginning of the repair."""


class PartitionLedgers:
    """The ledgers of a partition that this broker owns."""

    event = "ledger.repaired"

    def __init__(self, partition: OwnedPartition) -> None:
        self._partition = partition

    @property
    def topic(self) -> TopicRecord:
        return self._partition.topic

    @property
    def is_over(self) -> bool:
        return self._partition.why_not is not None and not self._partition.is_stuck

    def expected(self) -> Mapping[str, int]:
        partition = self._partition
        return {records.owner_key(partition.topic.topic.id, partition.partition): partition.claim.version}

    def fields(self) -> dict[str, Json]:
        topic = self.topic.topic
        return {"topic": topic.name, "topic_id": topic.id, "partition": self._partition.partition}

    def repaired(self, record: LedgerRecord, counted: Mapping[str, NodeCount]) -> None:
        self._partition.repaired(record)
        self._partition.look_again(record.named, counted)


class Repairer:
    """One repair of one ledger."""

    def __init__(
        self,
        broker: Broker,
        owner: Ledgers,
        record: LedgerRecord,
        version: int,
        live: Collection[str],
        spares: Iterable[str],
    ) -> None:
        """record, version: the current record in the registry. live, spares: as for `Repair`."""
        self._broker, self._owner, self._live = broker, owner, live
        self._core = Repair(record, version, live, spares)
        self._ledger = record.id
        self._steps: queue.SimpleQueue[Step] = queue.SimpleQueue()
        """Calls of the core's methods, queued by other threads when answers arrive, and made by the thread in `run`."""
        self._room = threading.Condition()
        self._held = 0
        """The number of unacknowledged bytes. `_room` guards it."""
        self._is_stopped = False
        self.copied_bytes = 0
        self.problem: str | None = None
        """The last error of a node or of the registry, for the log."""

    @property
    def record(self) -> LedgerRecord:
        """The record as this repair has last committed or read it."""
        return self._core.record

    @property
    def copied_entries(self) -> int:
        return self._core.copied_entries

    def stop(self) -> None:
        """Make `run` return soon. Called by other threads."""
        self._is_stopped = True
        self._steps.put(list)

    def run(self) -> Repaired | Ended:
        actions = self._core.start()
        while True:
            self._do(actions)
            if self._core.ended is not None:
                return self._core.ended
            actions = [action for step in self._answers() for action in step()]
            if self._is_stopped or self._owner.is_over:
                return Ended("the broker is stopping, or another one repairs the ledger now")

    def _answers(self) -> Iterator[Step]:
        """Wait for the next queued call, and return it with all that are queued."""
        try:
            yield self._steps.get(timeout=ANSWER_S)
            while True:
                yield self._steps.get_nowait()
        except queue.Empty:
            return

    def _do(self, actions: list[Action]) -> None:
        waiting, copies = list(actions), list[CopyEntry]()
        while waiting:
            action = waiting.pop(0)
            match action:
                case Change():
                    waiting += self._commit(action)
                case ListEntries(node):
                    waiting += self._list(node)
                case CopyEntry():
                    copies.append(action)
        for run in _runs(copies):
            self._copy(run)

    def _commit(self, change: Change) -> list[Action]:
        key = change.record.key
        try:
            versions = self._broker.registry.commit(
                {key: change.expect, **self._owner.expected()},
                {key: change.record.dump()},
                lease=self._broker.membership.lease,
            )
        except Conflict as error:
            self.problem = str(error)
            return self._core.conflicted()
        except (OutcomeUnknown, RegistryUnavailable) as error:
            self.problem = str(error)
            return self._core.unknown()
        return self._core.committed(versions[key])

    def _list(self, node: str) -> list[Action]:
        found: set[int] = set()
        after, has_more = -1, True
        try:
            link = self._broker.links(node)
            while has_more:
                page = link.index(self._ledger, after=after, limit=PAGE, timeout_s=CALL_S)
                found.update(entry for entry, _ in page.entries)
                after, has_more = max(found, default=-1), page.has_more
        except NodeUnreachable as error:
            self.problem = str(error)
            return self._core.failed(node)
        return self._core.listed(node, found)

    def _copy(self, run: list[CopyEntry]) -> None:
        """Copy consecutive entries that have the same sources."""
        wanted = {each.entry: each for each in run}
        for source in sorted(run[0].sources, key=lambda node: (node not in self._live, node)):
            if not wanted:
                return
            for read in self._read(source, min(wanted), max(wanted)):
                copy = wanted.pop(read.entry, None)
                if copy is not None:
                    self._add(copy, read)
        for entry in sorted(wanted):
            self._steps.put(functools.partial(self._core.lost, entry))

    def _read(self, source: str, first: int, last: int) -> Iterator[EntryRead]:
        """The entries from `first` to `last` that the source has and can read."""
        while first <= last:
            try:
                found = self._broker.links(source).read(self._ledger, first, last, READ_BYTES, timeout_s=CALL_S)
            except (NodeUnreachable, LedgerFenced) as error:
                self.problem = str(error)
                return
            for read in found:
                if read.error is not None:
                    self.problem = f"storage node {source}: {read.error}"
                if read.head is not None:
                    yield read
            if not found:
                return
            first = max(read.entry for read in found) + 1

    def _add(self, copy: CopyEntry, read: EntryRead) -> None:
        assert read.head is not None
        size = read.head.size
        with self._room:
            self._room.wait_for(lambda: self._held < HELD_BYTES_MAX, ANSWER_S)
            self._held += size

        def done(error: Exception | None) -> None:
            with self._room:
                self._held -= size
                self._room.notify()
            if error is None:
                self.copied_bytes += size
                BROKER_COPIED.of().add(size)
                BROKER_COPIED_ENTRIES.of().add()
                self._steps.put(functools.partial(self._core.copied, copy.target, copy.entry))
            else:
                self.problem = str(error)
                self._steps.put(functools.partial(self._core.failed, copy.target))

        try:
            link = self._broker.links(copy.target)
        except PxrsError as error:
            done(error)
            return
        link.add(self._ledger, copy.entry, read.head, (read.body,), -1, copy.recovery, done)


def _runs(copies: list[CopyEntry]) -> Iterator[list[CopyEntry]]:
    """The copies, grouped into consecutive entries with the same sources."""
    run: list[CopyEntry] = []
    for copy in sorted(copies, key=lambda each: each.entry):
        if run and (copy.entry != run[-1].entry + 1 or {*copy.sources} != {*run[0].sources}):
            yield run
            run = []
        run.append(copy)
    if run:
        yield run
