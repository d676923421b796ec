"""Creates missing copies of the ledgers of this broker's partitions again (P6), and of its share of the ledgers with
rows of Spark's tasks (`staged_copies`).

One thread checks the ledgers every LOOK_S, and after each change of the nodes in the registry:

    what the thread finds                                          what it does
    the open ledger has an empty position, and there is a spare    offer the spare to the writer
    the open ledger lacks copies, or one of its nodes is lost      close it and begin the next one
    a closed ledger lacks copies, and there is a spare             repair it, those with the fewest live nodes first
    a closed ledger was not checked since a recovery closed it     check it, which is a repair too

Ledgers of staged rows that are not closed are left to their writers; one whose writer has died is removed by its age.

A node is lost when it has been away for longer than `copies_grace_s`, or was retired. A failed repair is repeated after
a growing pause; the next repair finds the entries that were copied. If the partition gets another owner, that broker
continues from the records in the registry.

In the broker whose incarnation sorts first, the same thread also records events about lost and returned nodes, and the
decisions of operators.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from pxrs.cluster.broker.context import Broker
from pxrs.cluster.broker.decisions import Decisions
from pxrs.cluster.broker.doubts import NodeDoubts
from pxrs.cluster.broker.opened import NodeCount, counts
from pxrs.cluster.broker.ownership import Ownership
from pxrs.cluster.broker.partition import OwnedPartition
from pxrs.cluster.broker.pools import ToldPool
from pxrs.cluster.broker.presence import Presence
from pxrs.cluster.broker.repairing import Ledgers, PartitionLedgers, Repairer
from pxrs.cluster.broker.staged_copies import StagedLedgers
from pxrs.cluster.broker.view import Place
from pxrs.cluster.copies import Ended, Repaired, is_repairable, needs_repair, urgency
from pxrs.cluster.ledgers import LedgerRecord
from pxrs.cluster.records import ledgers_prefix
from pxrs.errors import Closed, InvalidPlacement, PxrsError, RegistryCorrupt
from pxrs.events.recording import Recorder
from pxrs.limited_log import LimitedLog
from pxrs.metrics.instruments import BROKER_LACKING, BROKER_REPAIR_FAILED, BROKER_REPAIRING, BROKER_REPAIRS
from pxrs.waiting import start_thread

_logger = logging.getLogger(__name__)
_log: Final = LimitedLog(_logger, records_max=1)

PARTITION: Final = "partition"
STAGED: Final = "staged"
"""What a ledger belongs to, as a label of a metric."""
LOOK_S: Final = 1.0
PAUSE_S: Final = 1.0
PAUSE_S_MAX: Final = 60.0
"""The first and the longest pause after a failed repair."""


@dataclass(slots=True)
class Counts:
    """The totals of this broker's repairs since its start."""

    repaired: int = 0
    """Repairs that have finished, whether or not entries had to be copied."""
    failed: int = 0
    """Repairs that have failed; they are repeated."""
    copied_entries: int = 0
    copied_bytes: int = 0
    failed_at: float = 0.0
    """When a repair last failed, in seconds since 1970; 0: none has."""


class _Try(NamedTuple):
    """A repair after which the ledger still lacks copies."""

    until: float
    """When it is repeated (monotonic), or earlier if the live nodes change."""
    live: frozenset[str]
    pause_s: float


class Repairs:
    """Runs from `start` to `close`. Threads share it."""

    def __init__(self, broker: Broker, ownership: Ownership, recorder: Recorder) -> None:
        self._broker, self._ownership, self._recorder = broker, ownership, recorder
        self._decisions = Decisions(broker.registry, recorder)
        self._presence = Presence(broker.settings.copies_grace_s)
        self._lock = threading.Lock()
        self._jobs: dict[str, Repairer | None] = {}
        """By ledger: the repairs that are under way; None until the repair has read the ledger's record."""
        self._tries: dict[str, _Try] = {}
        self._short: dict[Place, tuple[object, frozenset[str], list[LedgerRecord]]] = {}
        """By partition: the chain and the live nodes that were checked last, and the closed ledgers that need a
        repair."""
        self._staged = StagedLedgers(broker)
        self._short_staged = 0
        """How many ledgers of staged rows lacked copies at the last check."""
        self.counts = Counts()
        self._counted: dict[str, NodeCount] = {}
        """By storage node: as of the last look."""
        self._wake = threading.Event()
        self._is_closed = False
        self._doubts = NodeDoubts(broker, self._wake.set)
        self._pool = ToldPool(broker.settings.repairs_max, "pxrs-repair")
        self._subscription = broker.view.subscribe(self._wake.set)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        BROKER_LACKING.watch(self, lambda repairs: [((kind,), count) for kind, count in repairs.short.items()])
        BROKER_REPAIRING.watch(self, lambda repairs: [((), repairs.under_way)])
        BROKER_REPAIR_FAILED.watch(self, lambda repairs: repairs.last_failure)
        self._thread = start_thread(self._run, "pxrs-repairs")

    @property
    def short(self) -> dict[str, int]:
        """The number of closed ledgers that this broker is to repair and that lacked copies at the last check, by what
        they belong to."""
        with self._lock:
            return {
                PARTITION: sum(len(records) for _, _, records in self._short.values()),
                STAGED: self._short_staged,
            }

    @property
    def under_way(self) -> int:
        """How many ledgers are being repaired."""
        with self._lock:
            return len(self._jobs)

    @property
    def last_failure(self) -> list[tuple[tuple[()], float]]:
        """When a repair last failed, as a gauge has it: without a value if none has."""
        with self._lock:
            return [((), self.counts.failed_at)] if self.counts.failed_at else []

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait(LOOK_S)
            self._wake.clear()
            if self._is_closed:
                return
            try:
                self._look()
            except Closed:
                return
            except PxrsError as error:
                _logger.warning("the copies of ledgers could not be checked, retrying soon: %s", error)
            except Exception:
                _logger.exception("the copies of ledgers could not be checked, retrying soon")

    def _look(self) -> None:
        partitions = self._ownership.partitions()
        live = self._live()
        lacking_of = self._doubts.look(self._broker.view.seen.alive)
        for partition in partitions.values():
            # A placement function that fails is reported by `Placements`, and holds up no other topic.
            with suppress(InvalidPlacement):
                partition.tend(live, lacking_of)
        self._read_cleared(partitions)
        lacking = [*self._lacking(partitions, live), *self._lacking_staged(live)]
        self._forget_tries({record.id for _, record in lacking})
        lacking.sort(key=lambda each: urgency(each[1], live))
        for owner, record in lacking:
            with self._lock:
                if len(self._jobs) >= self._broker.settings.repairs_max or self._is_closed:
                    return
                tried = self._tries.get(record.id)
                if record.id in self._jobs or (
                    tried is not None and tried.live == live and time.monotonic() < tried.until
                ):
                    continue
            try:
                spares = self._broker.spares(owner.topic, ())
            except InvalidPlacement:
                continue
            if is_repairable(record, live, spares):
                with self._lock:
                    self._jobs[record.id] = None
                self._pool.submit(self._repair, owner, record, live, spares)

    def _read_cleared(self, partitions: dict[Place, OwnedPartition]) -> None:
        """Storage nodes clear `is_complete` of closed ledgers of which they lack entries (C7). Read the records of a
        node's ledgers again after it may have done so: after each change of its count, and after each of its starts,
        which may have lost the count."""
        now = counts(self._broker.view.seen.alive)
        self._staged.read_again({node for node, count in now.items() if self._counted.get(node) != count})
        self._counted |= now
        for place, partition in partitions.items():
            before = partition.counted
            changed = {node for node, count in now.items() if before.get(node) != count}
            known = {record.id: record for record in partition.chain if record.is_complete and record.named & changed}
            if known:
                for record in self._records(place):
                    if record.id in known and record.is_closed and record != known[record.id]:
                        partition.repaired(record)
            partition.note_counts(before, now)

    def _records(self, place: Place) -> Iterator[LedgerRecord]:
        """The ledgers of a partition, without those whose record is damaged: each of these is logged once."""
        for entry in self._broker.registry.scan(ledgers_prefix(*place)):
            try:
                yield LedgerRecord.parse(entry.key, entry.value)
            except RegistryCorrupt as error:
                _log.log(entry.key, logging.ERROR, "a ledger cannot be repaired: %s", error)

    def _live(self) -> frozenset[str]:
        seen = self._broker.view.seen
        news = self._presence.look(seen.alive, seen.retired, seen.nodes, time.monotonic())
        if self._broker.membership.incarnation == min(seen.brokers, default=""):  # only one broker records these events
            for node, away_s in news.lost:
                self._recorder.record("node.lost", node=node, seconds=round(away_s, 1))
            for node, away_s in news.returned:
                self._recorder.record("node.returned", node=node, seconds=round(away_s, 1))
            try:
                self._decisions.look()
            except RegistryCorrupt as error:
                _log.log("decisions", logging.ERROR, "the decisions of operators cannot be recorded: %s", error)
        return news.live

    def _lacking(
        self, partitions: dict[Place, OwnedPartition], live: frozenset[str]
    ) -> Iterator[tuple[Ledgers, LedgerRecord]]:
        """The closed ledgers of partitions that need a repair. The result of the last check is reused for a partition
        if neither its chain nor the live nodes have changed."""
        with self._lock:
            before = self._short
        after = {}
        for place, partition in partitions.items():
            chain, known = partition.chain, before.get(place)
            if known is not None and known[0] is chain and known[1] == live:
                after[place] = known
            else:
                after[place] = chain, live, [record for record in chain if needs_repair(record, live)]
        with self._lock:
            self._short = after
        for place, (_, _, records) in after.items():
            for record in records:
                yield PartitionLedgers(partitions[place]), record

    def _lacking_staged(self, live: frozenset[str]) -> list[tuple[Ledgers, LedgerRecord]]:
        """The ledgers of staged rows that this broker is to repair."""
        found = [(owner, record) for owner, record in self._staged.look(time.monotonic()) if needs_repair(record, live)]
        with self._lock:
            self._short_staged = len(found)
        return [*found]

    def _forget_tries(self, lacking: set[str]) -> None:
        with self._lock:
            self._tries = {ledger: tried for ledger, tried in self._tries.items() if ledger in lacking}

    def _repair(self, owner: Ledgers, known: LedgerRecord, live: frozenset[str], spares: list[str]) -> None:
        """On a thread of the pool."""
        ledger, began = known.id, time.monotonic()
        is_done = False
        try:
            entry = self._broker.registry.get(known.key)
            if entry is None:
                return  # removed by retention, with its topic, or because the staged rows were published
            record, counted = LedgerRecord.parse(entry.key, entry.value), counts(self._broker.view.seen.alive)
            repairer = Repairer(self._broker, owner, record, entry.version, live, spares)
            with self._lock:
                if self._is_closed:
                    return
                self._jobs[ledger] = repairer
            ended = repairer.run()
            if isinstance(ended, Ended) and self._broker.registry.get(known.key) is None:
                return  # the same, while it was repaired: no failure
            owner.repaired(repairer.record, counted)
            is_done = isinstance(ended, Repaired) and not ended.shortages
            self._tell(owner, record, repairer, ended, time.monotonic() - began)
        except PxrsError as error:
            self._count_failure()
            _logger.warning("ledger %s could not be repaired, retrying later: %s", ledger, error)
        except Exception:
            self._count_failure()
            _logger.exception("ledger %s could not be repaired, retrying later", ledger)
        finally:
            with self._lock:
                self._jobs.pop(ledger, None)
                tried = self._tries.pop(ledger, None)
                if not is_done:
                    pause_s = PAUSE_S if tried is None or tried.live != live else min(tried.pause_s * 2, PAUSE_S_MAX)
                    self._tries[ledger] = _Try(time.monotonic() + pause_s, live, pause_s)
            self._wake.set()

    def _count_failure(self) -> None:
        with self._lock:
            self.counts.failed += 1
            self.counts.failed_at = time.time()
        BROKER_REPAIRS.of("failed").add()

    def _tell(
        self, owner: Ledgers, before: LedgerRecord, repairer: Repairer, ended: Repaired | Ended, seconds: float
    ) -> None:
        entries = repairer.copied_entries
        with self._lock:
            self.counts.copied_entries += entries
            self.counts.copied_bytes += repairer.copied_bytes
        if isinstance(ended, Ended):
            self._count_failure()
            _logger.warning(
                "ledger %s lacks copies, and its repair failed after %d copied entries: %s%s; it will be retried",
                before.id,
                entries,
                ended.why,
                "" if repairer.problem is None else f" ({repairer.problem})",
            )
            return
        with self._lock:
            self.counts.repaired += 1
        BROKER_REPAIRS.of("repaired").add()
        if entries or ended.record.fragments != before.fragments:
            self._recorder.record(
                owner.event,
                **owner.fields(),
                ledger=before.id,
                entries=entries,
                nodes=sorted(ended.record.named - before.named),
                seconds=round(seconds, 3),
                left=len(ended.shortages),
            )

    def close(self) -> None:
        """Stop the thread and the repairs that are under way. Entries that were copied stay."""
        with self._lock:
            self._is_closed = True
            jobs = [job for job in self._jobs.values() if job is not None]
        self._wake.set()
        self._subscription.close()
        for job in jobs:
            job.stop()
        if self._thread is not None:
            self._thread.join(LOOK_S * 5)
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:  # other brokers count them now
            self._short, self._short_staged, self._jobs = {}, 0, {}
