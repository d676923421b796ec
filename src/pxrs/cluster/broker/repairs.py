"""Creates missing copies of the ledgers of this broker's partitions again (P6).

One thread checks the ledgers every LOOK_S, and after each change of the nodes in the registry:

    what the thread finds                                          what it does
    the open ledger has an empty position, and there is a spare    offer the spare to the writer
    the open ledger lacks copies, or one of its nodes is lost      close it and begin the next one
    a closed ledger lacks copies, and there is a spare             repair it, those with the fewest live nodes first
    a closed ledger was not checked since a recovery closed it     check it, which is a repair too

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
from dataclasses import dataclass
from typing import Final, NamedTuple

from pxrs.cluster.broker.context import Broker
from pxrs.cluster.broker.decisions import Decisions
from pxrs.cluster.broker.ownership import Ownership
from pxrs.cluster.broker.partition import OwnedPartition
from pxrs.cluster.broker.pools import ToldPool
from pxrs.cluster.broker.presence import Presence
from pxrs.cluster.broker.repairing import Repairer
from pxrs.cluster.broker.view import Place
from pxrs.cluster.copies import Repaired, is_repairable, needs_repair, urgency
from pxrs.cluster.ledgers import LedgerRecord
from pxrs.errors import Closed, PxrsError
from pxrs.events.recording import Recorder
from pxrs.metrics.instruments import BROKER_COPIED, BROKER_LACKING, BROKER_REPAIRS
from pxrs.waiting import start_thread

_logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
PAUSE_S: Final = 1.0
PAUSE_S_MAX: Final = 60.0
"""The first and the longest pause after a failed repair."""


class UnderWay(NamedTuple):
    """A repair that is under way."""

    ledger: str
    partition: str
    """The name of the topic, a slash, and the number of the partition."""
    copied_entries: int
    copied_bytes: int
    seconds: float


@dataclass(slots=True)
class Counts:
    """The totals of this broker's repairs since its start."""

    repaired: int = 0
    """Repairs that have finished, whether or not entries had to be copied."""
    failed: int = 0
    """Repairs that have failed; they are repeated."""
    copied_entries: int = 0
    copied_bytes: int = 0


class _Try(NamedTuple):
    """A repair after which the ledger still lacks copies."""

    until: float
    """When it is repeated (monotonic), or earlier if the live nodes change."""
    live: frozenset[str]
    pause_s: float


class _Job(NamedTuple):
    repairer: Repairer
    name: str
    began: float


class Repairs:
    """Runs from `start` to `close`. Threads share it."""

    def __init__(self, broker: Broker, ownership: Ownership, recorder: Recorder) -> None:
        self._broker, self._ownership, self._recorder = broker, ownership, recorder
        self._decisions = Decisions(broker.registry, recorder)
        self._presence = Presence(broker.settings.copies_grace_s)
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job | None] = {}
        """By ledger: the repairs that are under way; None until the repair has read the ledger's record."""
        self._tries: dict[str, _Try] = {}
        self._short: dict[Place, tuple[object, frozenset[str], list[LedgerRecord]]] = {}
        """By partition: the chain and the live nodes that were checked last, and the closed ledgers that need a
        repair."""
        self.counts = Counts()
        self._wake = threading.Event()
        self._is_closed = False
        self._pool = ToldPool(broker.settings.repairs_max, "pxrs-repair")
        self._subscription = broker.view.subscribe(self._wake.set)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        BROKER_LACKING.watch(self, lambda repairs: [((), repairs.short)])
        self._thread = start_thread(self._run, "pxrs-repairs")

    @property
    def short(self) -> int:
        """The number of closed ledgers of this broker's partitions that lacked copies at the last check."""
        with self._lock:
            return sum(len(records) for _, _, records in self._short.values())

    def under_way(self) -> list[UnderWay]:
        with self._lock:
            jobs = [(ledger, job) for ledger, job in self._jobs.items() if job is not None]
        now = time.monotonic()
        return [
            UnderWay(ledger, job.name, job.repairer.copied_entries, job.repairer.copied_bytes, now - job.began)
            for ledger, job in jobs
        ]

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
                _logger.warning("the copies of ledgers could not be checked, trying again soon: %s", error)
            except Exception:
                _logger.exception("the copies of ledgers could not be checked, trying again soon")

    def _look(self) -> None:
        partitions = self._ownership.partitions()
        live = self._live()
        for partition in partitions.values():
            partition.tend(live)
        found = [(record, partition) for partition, record in self._lacking(partitions, live)]
        found.sort(key=lambda each: urgency(each[0], live))
        for record, partition in found:
            with self._lock:
                if len(self._jobs) >= self._broker.settings.repairs_max or self._is_closed:
                    return
                tried = self._tries.get(record.id)
                if record.id in self._jobs or (
                    tried is not None and tried.live == live and time.monotonic() < tried.until
                ):
                    continue
            spares = self._broker.spares(partition.topic, ())
            if is_repairable(record, live, spares):
                with self._lock:
                    self._jobs[record.id] = None
                self._pool.submit(self._repair, partition, record, live, spares)

    def _live(self) -> frozenset[str]:
        seen = self._broker.view.seen
        news = self._presence.look(seen.alive, seen.retired, seen.nodes, time.monotonic())
        if self._broker.membership.incarnation == min(seen.brokers, default=""):  # only one broker records these events
            self._decisions.look()
            for node, away_s in news.lost:
                self._recorder.record("node.lost", node=node, seconds=round(away_s, 1))
            for node, away_s in news.returned:
                self._recorder.record("node.returned", node=node, seconds=round(away_s, 1))
        return news.live

    def _lacking(
        self, partitions: dict[Place, OwnedPartition], live: frozenset[str]
    ) -> Iterator[tuple[OwnedPartition, LedgerRecord]]:
        """The closed ledgers that need a repair. The result of the last check is reused for a partition if neither its
        chain nor the live nodes have changed."""
        with self._lock:
            before = self._short
        after = {}
        for place, partition in partitions.items():
            chain, known = partition.chain, before.get(place)
            if known is not None and known[0] is chain and known[1] == live:
                after[place] = known
            else:
                after[place] = chain, live, [record for record in chain if needs_repair(record, live)]
        lacking = {record.id for _, _, records in after.values() for record in records}
        with self._lock:
            self._short = after
            self._tries = {ledger: tried for ledger, tried in self._tries.items() if ledger in lacking}
        for place, (_, _, records) in after.items():
            for record in records:
                yield partitions[place], record

    def _repair(self, partition: OwnedPartition, known: LedgerRecord, live: frozenset[str], spares: list[str]) -> None:
        """Repair one ledger. Runs on a thread of the pool."""
        ledger, began = known.id, time.monotonic()
        is_done = False
        try:
            entry = self._broker.registry.get(known.key)
            if entry is None:
                return  # removed by retention or the deletion of the topic
            record = LedgerRecord.parse(entry.key, entry.value)
            repairer = Repairer(self._broker, partition, record, entry.version, live, spares)
            with self._lock:
                if self._is_closed:
                    return
                self._jobs[ledger] = _Job(repairer, partition.name, began)
            ended = repairer.run()
            partition.repaired(repairer.record)
            is_done = isinstance(ended, Repaired) and not ended.shortages
            self._tell(partition, record, repairer, ended if isinstance(ended, Repaired) else ended.why, began)
        except PxrsError as error:
            _logger.warning("ledger %s could not be repaired, trying again later: %s", ledger, error)
        except Exception:
            _logger.exception("ledger %s could not be repaired, trying again later", ledger)
        finally:
            with self._lock:
                self._jobs.pop(ledger, None)
                tried = self._tries.pop(ledger, None)
                if not is_done:
                    pause_s = PAUSE_S if tried is None or tried.live != live else min(tried.pause_s * 2, PAUSE_S_MAX)
                    self._tries[ledger] = _Try(time.monotonic() + pause_s, live, pause_s)
            self._wake.set()

    def _tell(
        self, partition: OwnedPartition, before: LedgerRecord, repairer: Repairer, ended: Repaired | str, began: float
    ) -> None:
        entries, seconds = repairer.copied_entries, time.monotonic() - began
        with self._lock:
            self.counts.copied_entries += entries
            self.counts.copied_bytes += repairer.copied_bytes
            self.counts.repaired += isinstance(ended, Repaired)
            self.counts.failed += not isinstance(ended, Repaired)
        BROKER_REPAIRS.of("repaired" if isinstance(ended, Repaired) else "failed").add()
        BROKER_COPIED.of().add(repairer.copied_bytes)
        if isinstance(ended, str):
            _logger.warning(
                "ledger %s lacks copies, and its repair failed after %d copied entries: %s%s; it will be repeated",
                before.id,
                entries,
                ended,
                "" if repairer.problem is None else f" ({repairer.problem})",
            )
        elif entries or ended.record.fragments != before.fragments:
            topic = partition.topic.topic
            self._recorder.record(
                "ledger.repaired",
                topic=topic.name,
                topic_id=topic.id,
                partition=partition.partition,
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
            job.repairer.stop()
        if self._thread is not None:
            self._thread.join(LOOK_S * 5)
        self._pool.shutdown(wait=True, cancel_futures=True)
