"""V2: what is counted, compared with what was done; and that counting is bounded."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pyarrow as pa
import pytest

import pxrs
from pxrs import ConsumeOnce
from pxrs.errors import AppendFailed
from pxrs.hub import Hub
from pxrs.log.contract import TopicLog
from pxrs.metrics import instruments, table
from pxrs.metrics.instruments import SERIES_MAX, Counter, Distribution, Gauge, snapshot
from pxrs.queue.listener import QueueListener
from pxrs.spark.watch import QueryWatch
from tests.unit.numbered import send_numbers


@pytest.fixture
def hub() -> Iterator[Hub]:
    with pxrs.open("memory:") as hub:
        yield hub


class Since:
    """What was counted since it was made: tests of one process share the counts."""

    def __init__(self) -> None:
        self._before = snapshot()

    def of(self, metric: table.Metric, *labels: str) -> float:
        """Of a histogram, how many values."""
        return self._value(snapshot(), metric, labels) - self._value(self._before, metric, labels)

    def _value(self, found: instruments.Snapshot, metric: table.Metric, labels: tuple[str, ...]) -> float:
        value = dict(found.get(metric.name, [])).get(labels, 0)
        return sum(value.counts) if isinstance(value, Distribution) else value


def test_v2_producers_count_messages_bytes_batches_and_appends(hub: Hub) -> None:
    hub.create_topic("counted", partitions=1)
    since = Since()
    with hub.producer("counted", linger_s=60) as out:
        for number in range(10):
            out.send(b"%d" % number, b"k")
        out.flush()
        out.send_batch(pa.table({"value": pa.array([b"x"] * 5, pa.binary())}))
    assert since.of(table.PRODUCER_MESSAGES, "counted") == 15
    assert since.of(table.PRODUCER_BATCHES, "counted") == 2
    assert since.of(table.PRODUCER_APPEND, "counted") == 2
    assert since.of(table.PRODUCER_BYTES, "counted") > 15
    assert since.of(table.PRODUCER_ERRORS, "counted", "AppendFailed") == 0


def test_v2_retries_and_errors_of_appends_are_counted(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    log = hub.create_topic("failing", partitions=1).log

    def fail(self: TopicLog, appends: object) -> None:
        raise AppendFailed("the disk is full")

    monkeypatch.setattr(type(log), "append", fail)
    since = Since()
    out = hub.producer("failing", tries_max=2)
    out.send(b"x", b"k")
    with pytest.raises(AppendFailed):
        out.close()
    assert since.of(table.PRODUCER_RETRIES, "failing") == 1
    assert since.of(table.PRODUCER_ERRORS, "failing", "AppendFailed") == 1
    assert since.of(table.PRODUCER_MESSAGES, "failing") == 0


def sent(hub: Hub, topic: str, count: int, partitions: int = 1) -> None:
    hub.create_topic(topic, partitions=partitions)
    send_numbers(hub, topic, count, partitions)


@pytest.mark.parametrize("how", ["loop", "left", "poll", "batches", "run"])
def test_v2_consumers_count_the_messages_that_they_have_handed_out(hub: Hub, how: str) -> None:
    topic = f"read-{how}"
    sent(hub, topic, 100)
    since = Since()
    wanted = 100
    with hub.consumer(topic, "g", until="end") as inbox:
        match how:
            case "loop":
                assert len(list(inbox)) == 100
            case "left":
                for message in inbox:
                    if message.offset == 29:
                        break
                wanted = 30
                gc.collect()
            case "poll":
                wanted = len(inbox.poll(7)) + len(inbox.poll(5))
                assert wanted == 12
            case "batches":
                assert sum(each.records.num_rows for each in inbox.batches()) == 100
            case "run":
                inbox.run(lambda message: None)
    assert since.of(table.CONSUMER_MESSAGES, "g", topic) == wanted
    assert since.of(table.CONSUMER_BATCHES, "g", topic) >= 1
    assert since.of(table.CONSUMER_POLL, "g") >= (how != "run")
    assert (since.of(table.CONSUMER_HANDLING, "g", topic) > 0) == (how == "run")


def test_v2_commits_rebalances_and_refusals_are_counted(hub: Hub) -> None:
    sent(hub, "moved", 8, partitions=2)
    since = Since()
    with hub.consumer("moved", "moving") as inbox:
        inbox.poll(1)
        inbox.commit()
        assert since.of(table.CONSUMER_COMMITS, "moving", "written") == 1
        assert since.of(table.CONSUMER_COMMIT, "moving") == 1
        found = dict(instruments.CONSUMER_PARTITIONS.read()), dict(instruments.CONSUMER_LAG.read())
        assert (found[0]["moving", "moved"], found[1]["moving", "moved"]) == (2, 7)
        inbox.poll(1)
        with inbox._member.session.mutex:  # so that the member cannot find out by itself
            hub.group("moving").reset("earliest", force=True)
            with pytest.raises(pxrs.errors.PartitionLost):
                inbox.commit()
    assert since.of(table.CONSUMER_COMMITS, "moving", "refused") >= 1
    assert since.of(table.CONSUMER_MOVES, "moving", "assigned") >= 2
    assert since.of(table.CONSUMER_MOVES, "moving", "lost") >= 1
    assert ("moving", "moved") not in dict(instruments.CONSUMER_PARTITIONS.read()), "a closed consumer owns nothing"


def test_v2_failures_of_handlers_are_counted_by_what_followed(hub: Hub) -> None:
    sent(hub, "refused", 1)
    since = Since()

    def fail(message: object) -> None:
        raise ValueError("no")

    inbox = hub.consumer("refused", "g", until="end", on_error="retry", retries_max=2, retry_pause=0)
    with inbox, pytest.raises(pxrs.errors.PartitionsPaused):
        inbox.run(fail)
    assert since.of(table.CONSUMER_FAILURES, "g", "refused", "retried") == 2
    assert since.of(table.CONSUMER_FAILURES, "g", "refused", "paused") == 1


def test_v2_queues_count_items_by_what_became_of_them(hub: Hub) -> None:
    queue, other = hub.create_queue("jobs"), hub.create_queue("once", ConsumeOnce())
    since = Since()
    queue.put("direct")
    with hub.transaction() as tx:
        tx.put("once", b"in a transaction")
        assert tx.take("jobs") is not None
        assert dict(instruments.QUEUE_IN_FLIGHT.read())["jobs",] == 1
    assert ("jobs",) not in dict(instruments.QUEUE_IN_FLIGHT.read())
    queue.put("again")
    tx = hub.transaction()
    tx.take("jobs")
    tx.rollback()

    def fail(*_: object) -> None:
        raise ValueError("no")

    QueueListener(other, fail).handle_next()
    counted = {
        (metric.name, name): since.of(metric, name)
        for metric in (table.QUEUE_PUT, table.QUEUE_TAKEN, table.QUEUE_DONE, table.QUEUE_RETRIED, table.QUEUE_DEAD)
        for name in ("jobs", "once")
    }
    assert counted == {
        ("pxrs.queue.put", "jobs"): 2,
        ("pxrs.queue.put", "once"): 1,
        ("pxrs.queue.taken", "jobs"): 2,
        ("pxrs.queue.taken", "once"): 1,
        ("pxrs.queue.done", "jobs"): 1,
        ("pxrs.queue.done", "once"): 0,
        ("pxrs.queue.retried", "jobs"): 1,
        ("pxrs.queue.retried", "once"): 0,
        ("pxrs.queue.dead", "jobs"): 0,
        ("pxrs.queue.dead", "once"): 1,
    }


def test_v2_upkeep_counts_rounds_and_the_bytes_that_it_removes(tmp_path: pytest.TempPathFactory) -> None:
    with pxrs.open(f"{tmp_path}/data", upkeep=False) as hub:
        hub.create_topic("old", partitions=1, segment_bytes=1 << 16, retention_bytes=1 << 16)
        with hub.producer("old") as out:
            for _ in range(8):
                out.send(bytes(50_000), partition=0)
                out.flush()
        since = Since()
        assert hub.run_upkeep().removed
        assert since.of(table.UPKEEP_ROUNDS) == since.of(table.UPKEEP_ROUND) == 1
        assert since.of(table.UPKEEP_ERRORS) == 0
        assert since.of(table.UPKEEP_REMOVED, "old") > 100_000


def test_v2_reports_of_spark_are_counted() -> None:
    progress = """{"runId": "r1", "name": "totals", "batchId": 3, "numInputRows": 5,
        "durationMs": {"addBatch": 40, "triggerExecution": 70}, "stateOperators": [{"numRowsTotal": 9}]}"""
    since, watch = Since(), QueryWatch(None)  # type: ignore[arg-type]  # no listener is added
    watch.on_started("r1", "totals")
    watch.on_progress(progress)
    assert dict(instruments.SPARK_STATE.read())["totals",] == 9
    watch.on_terminated("r1", "ValueError: oops")
    assert since.of(table.SPARK_ROWS, "totals") == 5
    assert since.of(table.SPARK_BATCHES, "totals") == since.of(table.SPARK_BATCH, "totals") == 1
    assert since.of(table.SPARK_FAILURES, "totals") == 1
    assert ("totals",) not in dict(instruments.SPARK_STATE.read()), "it has ended"


def test_a_metric_has_a_bounded_number_of_series() -> None:
    counter = Counter(table.PRODUCER_MESSAGES)
    for number in range(SERIES_MAX + 500):
        counter.of(f"topic-{number}").add()
    found = dict(counter.read())
    assert len(found) == SERIES_MAX + 1
    assert found["other",] == 500
    gauge = Gauge(table.PRODUCER_BUFFER)
    gauge.watch(counter, lambda _: [((f"topic-{number}",), 1.0) for number in range(SERIES_MAX + 7)])
    assert dict(gauge.read())["other",] == 7


def test_a_gauge_reads_what_is_there_adds_it_up_and_counts_what_cannot_be_read() -> None:
    class Owner:
        def __init__(self, value: float | None) -> None:
            self.value = value

        def read(self) -> list[instruments.Read]:
            assert self.value is not None, "broken"
            return [(("t",), self.value)]

    gauge, since = Gauge(table.PRODUCER_BUFFER), Since()
    one, two, broken = Owner(1), Owner(2), Owner(None)
    for each in (one, two, broken):
        gauge.watch(each, Owner.read)
    assert gauge.read() == [(("t",), 3)]
    assert since.of(table.METRICS_ERRORS, "pxrs.producer.buffer") == 1
    del one, each
    gc.collect()
    assert gauge.read() == [(("t",), 2)]


def test_a_histogram_has_its_values_in_the_right_buckets() -> None:
    histogram = instruments.Histogram(table.UPKEEP_ROUND)
    for seconds in (0.0, 0.0005, 0.0006, 60.0, 61.0):
        histogram.of().observe(seconds)
    ((_, found),) = histogram.read()
    assert isinstance(found, Distribution)
    assert (found.counts[0], found.counts[1], found.counts[-2], found.counts[-1]) == (2, 1, 1, 1)
    assert found.sum == pytest.approx(121.0011)


def test_the_lag_of_a_consumer_is_not_read_for_every_export(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    sent(hub, "lagging", 3)
    reads = 0
    with hub.consumer("lagging", "g") as inbox:
        extents = type(hub.topic("lagging").log).extents

        def counted(self: TopicLog) -> list[tuple[int, int]]:
            nonlocal reads
            reads += 1
            return extents(self)

        assert len(inbox.poll(1)) == 1
        monkeypatch.setattr(type(hub.topic("lagging").log), "extents", counted)
        began = time.monotonic()
        found = [dict(instruments.CONSUMER_LAG.read()).get(("g", "lagging")) for _ in range(5)]
        assert found[-1] == 3
        assert reads == 1 or time.monotonic() - began > 4, "the machine is slow"
        assert inbox.lag == {0: 3}
