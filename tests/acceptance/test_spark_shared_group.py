"""K3, K4: a streaming query and Python consumers share a group under load, and hand its partitions over both ways.

Both write what they have done into one topic, and say in a header who did it: the account of that topic shows what was
lost, done twice, or brought out of order at a hand-over.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.consumer import Consumer
from pxrs.errors import SharedState
from pxrs.hub import Hub
from pxrs.spark import pipeline, session
from pxrs.spark.options import ReadOptions, Where
from pxrs.spark.pipeline import Pipeline, Place
from pxrs.spark.planning import Spans
from pxrs.spark.query import Query
from pxrs.spark.run import Run
from pxrs.testing.transfer import Row, transfer

ROUNDS = 20 if os.environ.get("PXRS_SOAK") else 2
"""How often a consumer comes and goes."""
PARTITIONS = 4
KEYS = 50
WAITING_MAX = 2_000
"""So many messages at most wait to be done: what is left when the load ends is soon done."""
STEP = 300
"""So many messages are done by each before the next thing happens."""
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    config = {"spark.sql.shuffle.partitions": "1", "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}
    found = session("shared-group", "local[2]", config)
    found.sparkContext.setLogLevel("OFF")
    yield found
    found.stop()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with pxrs.open(tmp_path / "hub") as hub:
        hub.create_topic("in", partitions=PARTITIONS)
        hub.create_topic("out", partitions=3)
        yield hub


class Shared(ExitStack):
    """A producer that never pauses for long, a query, and consumers of one group."""

    def __init__(self, spark: Any, hub: Hub, folder: Path) -> None:
        super().__init__()
        self.spark, self.hub, self.folder = spark, hub, folder
        self.out = hub.topic("out")
        self.sent: list[Row] = []
        self.query: Any = None
        self.python = 0
        self.is_loading = True
        self._loader = threading.Thread(target=self._load)
        self.callback(self.end_load)
        self.callback(self.stop_query)
        self._loader.start()

    def _load(self) -> None:
        with self.hub.producer("in") as producer:
            while self.is_loading:
                if len(self.sent) - self.done() < WAITING_MAX:
                    for number in range(len(self.sent), len(self.sent) + 20):
                        row = b"key-%d" % (number % KEYS), b"%d" % number
                        producer.send(row[1], row[0])
                        self.sent.append(row)
                    producer.flush()
                time.sleep(0.02)

    def end_load(self) -> None:
        self.is_loading = False
        self._loader.join()

    def done(self) -> int:
        """By both."""
        return sum(self.out.end(number) for number in range(self.out.partitions))

    def by_spark(self) -> int:
        return self.done() - self.python

    def start_query(self) -> None:
        source = {"url": self.hub.url, "topic": "in", "group": "g", "shareGroup": "true", "maxRowsPerTrigger": "500"}
        rows = self.spark.readStream.format("pxrs").options(**source).load()
        who = "array(named_struct('key', 'by', 'value', CAST('spark' AS BINARY))) AS headers"
        sink = {"url": self.hub.url, "topic": "out", "checkpointLocation": str(self.folder / "checkpoint")}
        self.query = rows.selectExpr("key", "value", who).writeStream.format("pxrs").options(**sink).start()

    def stop_query(self) -> None:
        if self.query is not None:
            self.query.stop()
            self.query = None

    def work(self, inbox: Consumer, until: Callable[[], bool], what: str) -> None:
        """As a Python worker: what was polled is done when it is in the other topic, before the next poll."""
        with self.hub.producer("out") as producer:
            for _ in self.turns(until, what):
                messages = inbox.poll(100, 0.1)
                for message in messages:
                    assert message.value is not None
                    producer.send(message.value, message.key, headers=[("by", b"python")])
                producer.flush()
                self.python += len(messages)

    def wait(self, until: Callable[[], bool], what: str) -> None:
        for _ in self.turns(until, what):
            time.sleep(0.02)

    def turns(self, until: Callable[[], bool], what: str) -> Iterator[None]:
        deadline = time.monotonic() + PATIENCE_S
        while not until():
            if self.query is not None and not self.query.isActive:
                raise AssertionError(f"the query ended while {what}: {self.query.exception()}")
            assert time.monotonic() < deadline, f"{what}\n{self.hub.group('g').describe()}"
            yield

    def owners(self) -> set[str | None]:
        return {each.owner for each in self.hub.group("g").describe().partitions}


def test_k3_each_message_is_done_by_one_of_them_and_partitions_move_both_ways(
    spark: Any, hub: Hub, tmp_path: Path
) -> None:
    with Shared(spark, hub, tmp_path) as shared:
        shared.start_query()
        shared.wait(lambda: shared.by_spark() >= STEP, "Spark begins alone")
        for turn in range(ROUNDS):
            with hub.consumer("in", "g", name=f"worker-{turn}") as inbox:
                spark_had, python_had = shared.by_spark(), shared.python
                shared.work(
                    inbox,
                    lambda: shared.python >= python_had + STEP and shared.by_spark() >= spark_had + STEP,  # noqa: B023
                    "both are at work",
                )
                assert 0 < len(inbox.assignment) < PARTITIONS, "they share it"
                if turn % 2:  # the query goes, and the worker has everything; then it comes back
                    shared.stop_query()
                    shared.work(inbox, lambda: len(inbox.assignment) == PARTITIONS, "the worker takes all")
                    python_had = shared.python
                    shared.work(inbox, lambda: shared.python >= python_had + STEP, "the worker is alone")  # noqa: B023
                    shared.start_query()
                    shared.work(inbox, lambda: len(inbox.assignment) < PARTITIONS, "the query is back")
                inbox.commit()
            spark_had = shared.by_spark()
            name = f"worker-{turn}"
            shared.wait(lambda: name not in shared.owners() and None not in shared.owners(), "Spark has it all")  # noqa: B023
            shared.wait(lambda: shared.by_spark() >= spark_had + STEP, "Spark is alone again")  # noqa: B023
        shared.end_load()
        shared.wait(lambda: hub.group("g").describe().lag == 0 and shared.done() >= len(shared.sent), "the end")
        shared.stop_query()
        account = transfer(shared.sent, shared.out)
        assert account.is_exact, account
        by = Counter(
            dict(message.headers or [])["by"] for number in range(3) for message in shared.out.messages(number)
        )
        assert by[b"python"] == shared.python >= ROUNDS * STEP
        assert by[b"spark"] == len(shared.sent) - shared.python >= ROUNDS * STEP


# State.


def test_k4_the_sink_refuses_a_query_with_state_in_a_shared_group(spark: Any, hub: Hub, tmp_path: Path) -> None:
    from pyspark.errors import StreamingQueryException

    send(hub, 40)
    rows = spark.readStream.format("pxrs").options(url=hub.url, topic="in", group="g", shareGroup="true").load()
    sink = {"url": hub.url, "topic": "out", "checkpointLocation": str(tmp_path / "checkpoint")}
    once = rows.select("key", "value").dropDuplicates(["key"]).writeStream.format("pxrs").options(**sink)
    query = once.trigger(availableNow=True).start()
    with pytest.raises(StreamingQueryException, match="option shareGroup: the query keeps state, and partitions of"):
        query.awaitTermination()
    assert sum(hub.topic("out").end(number) for number in range(3)) == 0
    assert hub.group("g").describe().lag == 40


def test_k4_a_pipeline_with_state_in_a_shared_group_is_refused_before_it_starts(
    spark: Any, hub: Hub, tmp_path: Path
) -> None:
    def planned(each: Pipeline) -> Run:
        return Run(spark, hub, [each], Place(hub.url), tmp_path / "checkpoints")

    @pipeline(source="in", sink="out", share_group=True, output_mode="update")
    def totals(rows: Any) -> Any:
        return rows.groupBy("key").count()

    with pytest.raises(SharedState, match=r"totals: it keeps state \(an aggregation\).*Give it a group of its own"):
        planned(totals)

    @pipeline(source="in", sink="out", share_group=True)
    def copies(rows: Any) -> Any:
        return rows.select("key", "value")

    assert planned(copies).queries, "without state it may"
    assert hub.groups() == []


# Without Spark: what it counts as finished, and nobody has done.

SHARED = ReadOptions(Where("memory:", None, "in"), "g", is_shared=True, lease_ttl=1.0)


@pytest.fixture
def memory() -> Iterator[Hub]:
    with pxrs.open("memory:") as hub:
        hub.create_topic("in", partitions=1)
        send(hub, 100)
        yield hub


def send(hub: Hub, count: int) -> None:
    with hub.producer("in") as out:
        for number in range(count):
            out.send(b"%d" % number, b"key-%d" % number)


def read(query: Query, start: Spans, end: Spans) -> list[tuple[int, int]]:
    return [(span.start, span.end) for span in query.ranges(start, end)[0].values()]


def test_k3_what_a_repeated_batch_leaves_out_is_not_passed_over_by_a_later_restart(memory: Hub) -> None:
    with Query(memory, SHARED) as query:
        planned = query.latest({}, None, None)
        assert read(query, {}, planned) == [(0, 100)]
    with memory.consumer("in", "g", ack="manual") as inbox:  # the driver died, and a consumer does a part of it
        messages = inbox.poll(500, 10)
        while len(messages) < 50:
            messages += inbox.poll(500, 10)
        for message in messages[:50]:
            inbox.ack(message)
    with Query(memory, SHARED) as query:
        assert read(query, {}, planned) == []  # and Spark counts the batch as finished
    with Query(memory, SHARED) as query:
        assert read(query, planned, query.latest(planned, None, None)) == [(50, 100)]


def test_k3_what_was_lost_between_plan_and_batch_is_not_passed_over(memory: Hub) -> None:
    with Query(memory, replace(SHARED, lease_ttl=5.0)) as query:
        planned = query.latest({}, None, None)
        lease = query._member.lease
        assert lease is not None
        lease.close()
        deadline = time.monotonic() + PATIENCE_S
        while query._member.lease is lease or not query._member.is_settled:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert read(query, {}, planned) == []
        assert read(query, planned, query.latest(planned, None, None)) == [(0, 100)]
