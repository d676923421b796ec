"""Counts of this process: counters, histograms, and gauges that are read when somebody exports them.

Counting costs a lock and an addition, and is done for each batch, call or commit, never for each message. So it is
always on: exporters (`prometheus.py`, `opentelemetry.py`, `reports.py`) read what is there, and a program that exports
nothing pays about a microsecond for each batch. The counts are of the process, as those of other libraries: two hubs
that have topics of the same name share a series.

Bounded: a metric has at most SERIES_MAX combinations of labels. Those that come later share one series, whose labels
are all `other`.
"""

from __future__ import annotations

import logging
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any, Final, Generic, NamedTuple, TypeVar

from pxrs.limited_log import LimitedLog
from pxrs.metrics import table
from pxrs.metrics.table import BUCKETS_S, Metric

SERIES_MAX: Final = 2_000
OTHER: Final = "other"
_log: Final = LimitedLog(logging.getLogger(__name__))

Labels = tuple[str, ...]
Read = tuple[Labels, float]
"""The labels and the value that a gauge has read."""


class Distribution(NamedTuple):
    """What a histogram has seen."""

    counts: tuple[int, ...]
    """How many values fell into each bucket of BUCKETS_S; the last number counts what is larger."""
    sum: float


Value = float | Distribution
Series = tuple[Labels, Value]
Snapshot = dict[str, list[Series]]
"""The series of each metric that has any, by the name of the metric."""


class Count:
    """One series of a counter."""

    __slots__ = ("_lock", "value")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.value: float = 0

    def add(self, amount: float = 1) -> None:
        with self._lock:
            self.value += amount

    def read(self) -> Value:
        return self.value


class Timing:
    """One series of a histogram of seconds."""

    __slots__ = ("_counts", "_labels", "_lock", "_of", "_sum")

    def __init__(self, of: Histogram, labels: Labels) -> None:
        self._of, self._labels = of, labels
        self._lock = threading.Lock()
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        bucket = bisect_left(BUCKETS_S, seconds)
        with self._lock:
            self._counts[bucket] += 1
            self._sum += seconds
        if (passed_to := self._of.passed_to) is not None:
            passed_to(seconds, self._labels)

    def read(self) -> Value:
        with self._lock:
            return Distribution(tuple(self._counts), self._sum)


S = TypeVar("S", Count, Timing)


class Family(Generic[S]):
    """All series of one metric."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self._lock = threading.Lock()
        self._series: dict[Labels, S] = {}

    def _new(self, labels: Labels) -> S:
        raise NotImplementedError

    def of(self, *labels: str) -> S:
        """The series with these labels, in the order of `Metric.labels`."""
        found = self._series.get(labels)
        if found is not None:
            return found
        with self._lock:
            if len(self._series) >= SERIES_MAX and labels not in self._series:
                labels = (OTHER,) * len(labels)
            if labels not in self._series:
                self._series[labels] = self._new(labels)
            return self._series[labels]

    def read(self) -> list[Series]:
        with self._lock:
            series = list(self._series.items())
        return [(labels, each.read()) for labels, each in series]


class Counter(Family[Count]):
    def _new(self, labels: Labels) -> Count:
        return Count()


class Histogram(Family[Timing]):
    passed_to: Callable[[float, Labels], None] | None = None
    """Called with every value and its labels: OpenTelemetry's API has no other way to export a histogram."""

    def _new(self, labels: Labels) -> Timing:
        return Timing(self, labels)


class Gauge:
    """Values that are read when somebody exports them, from objects that are held weakly."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self._lock = threading.Lock()
        self._readers: dict[int, tuple[weakref.ref[Any], Callable[[Any], Iterable[Read]]]] = {}

    def watch(self, owner: Any, read: Callable[[Any], Iterable[Read]]) -> None:
        """Read from this object until it is garbage-collected. Values with equal labels are added up.

        read: must not refer to the owner, which it is called with. What it raises is logged, and the value left out."""
        key = id(owner)
        # The callback takes no lock: the garbage collector may run it on a thread that holds `_lock`.
        reference = weakref.ref(owner, lambda _: self._readers.pop(key, None))
        with self._lock:
            self._readers[key] = reference, read

    def read(self) -> list[Series]:
        found: dict[Labels, float] = {}
        for reference, read in self._readers.copy().values():
            owner = reference()
            if owner is None:
                continue
            try:
                for labels, value in read(owner):
                    if labels in found or len(found) < SERIES_MAX:
                        found[labels] = found.get(labels, 0) + value
                    else:
                        others = (OTHER,) * len(labels)
                        found[others] = found.get(others, 0) + value
            except Exception as error:  # noqa: BLE001 - one value that cannot be read must not hide the others
                METRICS_ERRORS.of(self.metric.name).add()
                what = f"metric {self.metric.name}"
                _log.log(
                    what, logging.WARNING, "%s cannot be read: %s", what, error, extra={"metric": self.metric.name}
                )
        return list(found.items())


PRODUCER_MESSAGES: Final = Counter(table.PRODUCER_MESSAGES)
PRODUCER_BYTES: Final = Counter(table.PRODUCER_BYTES)
PRODUCER_BATCHES: Final = Counter(table.PRODUCER_BATCHES)
PRODUCER_APPEND: Final = Histogram(table.PRODUCER_APPEND)
PRODUCER_RETRIES: Final = Counter(table.PRODUCER_RETRIES)
PRODUCER_ERRORS: Final = Counter(table.PRODUCER_ERRORS)
PRODUCER_BUFFER: Final = Gauge(table.PRODUCER_BUFFER)
CONSUMER_MESSAGES: Final = Counter(table.CONSUMER_MESSAGES)
CONSUMER_BATCHES: Final = Counter(table.CONSUMER_BATCHES)
CONSUMER_POLL: Final = Histogram(table.CONSUMER_POLL)
CONSUMER_HANDLING: Final = Counter(table.CONSUMER_HANDLING)
CONSUMER_FAILURES: Final = Counter(table.CONSUMER_FAILURES)
CONSUMER_COMMITS: Final = Counter(table.CONSUMER_COMMITS)
CONSUMER_COMMIT: Final = Histogram(table.CONSUMER_COMMIT)
CONSUMER_MOVES: Final = Counter(table.CONSUMER_MOVES)
CONSUMER_PARTITIONS: Final = Gauge(table.CONSUMER_PARTITIONS)
CONSUMER_LAG: Final = Gauge(table.CONSUMER_LAG)
QUEUE_PUT: Final = Counter(table.QUEUE_PUT)
QUEUE_TAKEN: Final = Counter(table.QUEUE_TAKEN)
QUEUE_DONE: Final = Counter(table.QUEUE_DONE)
QUEUE_RETRIED: Final = Counter(table.QUEUE_RETRIED)
QUEUE_DEAD: Final = Counter(table.QUEUE_DEAD)
QUEUE_IN_FLIGHT: Final = Gauge(table.QUEUE_IN_FLIGHT)
UPKEEP_ROUNDS: Final = Counter(table.UPKEEP_ROUNDS)
UPKEEP_ROUND: Final = Histogram(table.UPKEEP_ROUND)
UPKEEP_ERRORS: Final = Counter(table.UPKEEP_ERRORS)
UPKEEP_REMOVED: Final = Counter(table.UPKEEP_REMOVED)
SERVER_STREAMS: Final = Gauge(table.SERVER_STREAMS)
SERVER_STREAM: Final = Counter(table.SERVER_STREAM)
SERVER_CALLS: Final = Counter(table.SERVER_CALLS)
SERVER_CALL: Final = Histogram(table.SERVER_CALL)
SERVER_RECEIVED: Final = Counter(table.SERVER_RECEIVED)
SERVER_SENT: Final = Counter(table.SERVER_SENT)
SERVER_REFUSED: Final = Counter(table.SERVER_REFUSED)
STORAGE_ENTRIES: Final = Counter(table.STORAGE_ENTRIES)
STORAGE_WRITTEN: Final = Counter(table.STORAGE_WRITTEN)
STORAGE_SYNC: Final = Histogram(table.STORAGE_SYNC)
STORAGE_FAILURES: Final = Counter(table.STORAGE_FAILURES)
STORAGE_REMOVED: Final = Counter(table.STORAGE_REMOVED)
STORAGE_BYTES: Final = Gauge(table.STORAGE_BYTES)
STORAGE_LEDGERS: Final = Gauge(table.STORAGE_LEDGERS)
STORAGE_FREE: Final = Gauge(table.STORAGE_FREE)
STORAGE_REFUSES: Final = Gauge(table.STORAGE_REFUSES)
STORAGE_DOUBTS: Final = Gauge(table.STORAGE_DOUBTS)
STORAGE_DAMAGED: Final = Gauge(table.STORAGE_DAMAGED)
STORAGE_SCRUBBED: Final = Counter(table.STORAGE_SCRUBBED)
STORAGE_SCRUB_LEFT: Final = Gauge(table.STORAGE_SCRUB_LEFT)
STORAGE_SCRUB_ENDED: Final = Gauge(table.STORAGE_SCRUB_ENDED)
BROKER_PARTITIONS: Final = Gauge(table.BROKER_PARTITIONS)
BROKER_UNSERVED: Final = Gauge(table.BROKER_UNSERVED)
BROKER_ENTRIES: Final = Counter(table.BROKER_ENTRIES)
BROKER_CONFIRMED: Final = Counter(table.BROKER_CONFIRMED)
BROKER_CONFIRM: Final = Histogram(table.BROKER_CONFIRM)
BROKER_REPLACED: Final = Counter(table.BROKER_REPLACED)
BROKER_RECOVERY: Final = Histogram(table.BROKER_RECOVERY)
BROKER_OPENING: Final = Histogram(table.BROKER_OPENING)
BROKER_DEGRADED: Final = Gauge(table.BROKER_DEGRADED)
BROKER_LACKING: Final = Gauge(table.BROKER_LACKING)
BROKER_REPAIRING: Final = Gauge(table.BROKER_REPAIRING)
BROKER_REPAIRS: Final = Counter(table.BROKER_REPAIRS)
BROKER_REPAIR_FAILED: Final = Gauge(table.BROKER_REPAIR_FAILED)
BROKER_COPIED: Final = Counter(table.BROKER_COPIED)
BROKER_COPIED_ENTRIES: Final = Counter(table.BROKER_COPIED_ENTRIES)
SPARK_BATCHES: Final = Counter(table.SPARK_BATCHES)
SPARK_ROWS: Final = Counter(table.SPARK_ROWS)
SPARK_BATCH: Final = Histogram(table.SPARK_BATCH)
SPARK_FAILURES: Final = Counter(table.SPARK_FAILURES)
SPARK_LAG: Final = Gauge(table.SPARK_LAG)
SPARK_STATE: Final = Gauge(table.SPARK_STATE)
WORKER_RESTARTS: Final = Counter(table.WORKER_RESTARTS)
METRICS_ERRORS: Final = Counter(table.METRICS_ERRORS)

INSTRUMENTS: Final[dict[str, Counter | Histogram | Gauge]] = {
    each.metric.name: each for each in list(globals().values()) if isinstance(each, Counter | Histogram | Gauge)
}
"""What this process counts, by the name of the metric. The metrics of TABLE that are not here are read by the commands
that export them."""


def snapshot() -> Snapshot:
    """All that this process has counted, and all gauges, which are read now."""
    found: Snapshot = {}
    for name, each in INSTRUMENTS.items():
        if series := each.read():
            found[name] = series
    return found
