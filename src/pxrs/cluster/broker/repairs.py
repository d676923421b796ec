"""Keeps every ledger of the partitions that this broker owns at its number of copies (P6).

One thread looks, every LOOK_S and after each change of the registry that concerns nodes:

    what is seen                                                       what is done
    the open ledger has an empty position, and a node has come         the writer gets the node
    the open ledger has lost copies, or a node of it is lost           it is closed, and the next one begun
    a closed ledger lacks copies, and there is a node to take them     it is repaired, the worst ones first
    a closed ledger was never checked (a recovery has closed it)       it is checked, which is a repair too

A node is lost when it was away for longer than `copies_grace_s`, or was retired. A repair that fails is tried again
after a pause that grows; what it has copied is found by the next one. The next owner of a partition begins anew with
what the records say.

The same thread of one broker, the one whose incarnation sorts first, records which nodes are lost and return, and what
operators have decided.
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
"""The pause after a repair that failed, at first and at most."""


class UnderWay(NamedTuple):
    """A repair that a thread performs."""

    ledger: str
    partition: str
    """The name of the topic, a slash, and the partition."""
    copied_entries: int
    copied_bytes: int
    seconds: float


@dataclass(slots=True)
class Counts:
    """What the repairs of this broker have done since its start."""

    repaired: int = 0
    """Ledgers that were put in order, or found in order."""
    failed: int = 0
    """Repairs that ended before that; the ledger is tried again."""
    copied_entries: int = 0
    copied_bytes: int = 0


class _Try(NamedTuple):
    """A repair that has ended without putting the ledger in order."""

    until: float
    """Not tried again before, on the monotonic clock, unless the nodes have changed."""
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
        """By ledger: the repairs that are under way; None while one begins."""
        self._tries: dict[str, _Try] = {}
        self._short: dict[Place, tuple[object, frozenset[str], list[LedgerRecord]]] = {}
        """By partition: the chain and the live nodes that were looked at, and the ledgers that lack copies."""
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
        """How many closed ledgers of this broker's partitions lack copies, as last seen."""
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
                _logger.warning("the copies of ledgers could not be looked at, tried again soon: %s", error)
            except Exception:
                _logger.exception("the copies of ledgers could not be looked at, tried again soon")

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
        if self._broker.membership.incarnation == min(seen.brokers, default=""):  # one broker records it
            self._decisions.look()
            for node, away_s in news.lost:
                self._recorder.record("node.lost", node=node, seconds=round(away_s, 1))
            for node, away_s in news.returned:
                self._recorder.record("node.returned", node=node, seconds=round(away_s, 1))
        return news.live

    def _lacking(
        self, partitions: dict[Place, OwnedPartition], live: frozenset[str]
    ) -> Iterator[tuple[OwnedPartition, LedgerRecord]]:
        """The closed ledgers that lack copies. A partition whose chain is the same as before, with the same nodes, is
        not looked through again."""
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
        """On a thread of the pool."""
        ledger, began = known.id, time.monotonic()
        is_done = False
        try:
            entry = self._broker.registry.get(known.key)
            if entry is None:
                return  # retention, or the deletion of the topic, has removed it
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
            _logger.warning("ledger %s could not be repaired, tried again later: %s", ledger, error)
        except Exception:
            _logger.exception("ledger %s could not be repaired, tried again later", ledger)
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
                "ledger %s lacks copies, and its repair ended after %d entries: %s%s; it is tried again",
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
        """Repairs that are under way end soon. What they have copied stays."""
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
