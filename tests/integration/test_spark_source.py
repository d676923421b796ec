"""S1, S2, S3, S6, K3, K4, K5: `format("pxrs")` in a real Spark session, found with no registration. One for them all.

In the end a query and Python consumers share a group under load, and hand its partitions over both ways. Both write
what they have done into one topic, and say in a header who did it: the account of that topic shows what was lost, done
twice, or brought out of order at a hand-over.
"""

from __future__ import annotations

import itertools
import json
import os
import sqlite3
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import pxrs
from pxrs.consumer.consumer import Consumer
from pxrs.errors import SharedState
from pxrs.hub import Hub
from pxrs.server.serving import serving
from pxrs.spark import HubAddress, Pipeline, pipeline
from pxrs.spark.run import Run
from pxrs.testing.transfer import Row, transfer
from pxrs.testing.waiting import eventually

pytestmark = pytest.mark.sampled(2, of="module")

pyspark = pytest.importorskip("pyspark")

N = 2_000
PARTITIONS = 4
ROUNDS = 6 if os.environ.get("PXRS_SOAK") else 2
"""How often a consumer comes and goes."""
KEYS = 50
WAITING_MAX = 2_000
"""So many messages at most wait to be done: what is left when the load ends is soon done."""
STEP = 300
"""So many messages are done by each before the next thing happens."""
PATIENCE_S = 120.0


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Hub]:
    with pxrs.open(tmp_path / "hub") as hub:
        hub.create_topic("in", partitions=PARTITIONS)
        hub.create_topic("out", partitions=3)
        yield hub


@pytest.fixture
def hub(empty: Hub) -> Hub:
    send(empty, 0, N)
    return empty


def send(hub: Hub, first: int, end: int) -> None:
    numbers = [str(i).encode() for i in range(first, end)]
    headers = [[("n", number)] for number in numbers]
    keys = [f"k{i % 50}".encode() for i in range(first, end)]
    kind = pa.map_(pa.string(), pa.binary())
    with hub.producer("in") as out:
        out.send_batch(pa.table({"key": keys, "value": numbers, "headers": pa.array(headers, kind)}))


def values(hub: Hub, topic: str) -> list[int]:
    return sorted(int(value) for value in hub.topic(topic).to_arrow()["value"].to_pylist())


def reads(spark: Any, hub: Hub, **options: Any) -> Any:
    return spark.read.format("pxrs").options(url=hub.url, topic="in", **options)


def streams(spark: Any, hub: Hub, **options: Any) -> Any:
    return spark.readStream.format("pxrs").options(url=hub.url, topic="in", **{"group": "g", **options}).load()


def writes(frame: Any, hub: Hub, folder: Path) -> Any:
    """Start a query that copies what is there, and wait for its end."""
    out = frame.writeStream.format("pxrs").options(url=hub.url, topic="out", checkpointLocation=str(folder))
    query = out.trigger(availableNow=True).start()
    query.awaitTermination()
    return query


def wait_for_leaving(hub: Hub) -> None:
    """The group has no member: Spark does not wait for the end of the process that it stops."""
    deadline = time.monotonic() + 30
    while hub.group("g").describe().members:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_s1_a_topic_is_a_table(spark: Any, hub: Hub) -> None:
    frame = reads(spark, hub, includeHeaders="true", minPartitions="7").load()
    assert frame.columns == ["key", "value", "partition", "offset", "timestamp", "headers"]
    assert frame.rdd.getNumPartitions() >= 7
    rows = frame.collect()
    expected = hub.topic("in").to_arrow().to_pylist()
    found = [
        (row.partition, row.offset, bytes(row.key), bytes(row.value), row.headers[0].key, bytes(row.headers[0].value))
        for row in rows
    ]
    assert sorted(found) == sorted(
        (e["partition"], e["offset"], e["key"], e["value"], e["headers"][0]["key"], e["headers"][0]["value"])
        for e in expected
    )
    times = {(e["partition"], e["offset"]): e["timestamp"].timestamp() for e in expected}
    assert all(times[row.partition, row.offset] == row.timestamp.timestamp() for row in rows)


def test_s1_offsets_and_times_bound_a_batch(spark: Any, hub: Hub) -> None:
    topic = hub.topic("in")
    starts = {str(p): 10 for p in range(4)}
    assert reads(spark, hub, startingOffsets=json.dumps(starts)).load().count() == N - 40
    ends = {str(p): 20 for p in range(4)}
    assert reads(spark, hub, startingOffsets=json.dumps(starts), endingOffsets=json.dumps(ends)).load().count() == 40
    assert reads(spark, hub, startingTimestamp="4000000000000").load().count() == 0
    with hub.consumer("in", "readers", until="end") as inbox:
        for _ in zip(range(100), inbox, strict=False):
            pass
    done = N - sum(p.lag or 0 for p in hub.group("readers").describe().partitions)
    assert reads(spark, hub, group="readers", startingOffsets="committed").load().count() == N - done
    assert topic.end(0) > 20


def test_s1_a_batch_and_a_stream_bring_the_columns_that_are_asked_for(spark: Any, hub: Hub, tmp_path: Path) -> None:
    frame = reads(spark, hub, columns="offset,key,headers", includeHeaders="true").load()
    assert frame.columns == ["offset", "key", "headers"]
    found = [(row.offset, bytes(row.key), bytes(row.headers[0].value)) for row in frame.collect()]
    table = hub.topic("in").to_arrow().to_pylist()
    assert sorted(found) == sorted((each["offset"], each["key"], each["value"]) for each in table)
    query = writes(streams(spark, hub, columns="value"), hub, tmp_path / "checkpoint")
    assert query.lastProgress.numInputRows == N
    assert values(hub, "out") == list(range(N))
    assert set(hub.topic("out").to_arrow()["key"].to_pylist()) == {None}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"startingOfsetsByTimestamp": "3"},
            "unknown; did you mean startingOffsetsByTimestamp? pxrs has url, registry",
        ),
        ({"minPartitions": "x"}, "option minPartitions: 'x'; give a whole number"),
        (
            {"startingOffsets": '{"0": 1}'},
            "option startingOffsets: it lacks partitions 1 to 3 of in: name",
        ),
        ({"topic": "missing"}, "no topic 'missing'; existing: in, out"),
        ({"columns": "key,values"}, "option columns: 'values' is not a column; give some of key, value, topic"),
    ],
)
def test_a_mistake_is_told_in_one_line(spark: Any, hub: Hub, options: dict[str, str], says: str) -> None:
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException) as caught:
        spark.read.format("pxrs").options(**{"url": hub.url, "topic": "in", **options}).load().count()
    assert says in str(caught.value)


def test_a_schema_of_the_users_own_is_accepted_only_if_it_is_that_of_the_topic(spark: Any, hub: Hub) -> None:
    from pyspark.errors import PySparkException

    ours = reads(spark, hub).load().schema
    assert reads(spark, hub).schema(ours).load().count() == N
    with pytest.raises(PySparkException) as caught:
        reads(spark, hub).schema("key BINARY, value STRING").load().count()
    assert "option schema: the columns that are read are key BINARY, value BINARY, partition INT" in str(caught.value)
    assert "but the schema is key BINARY, value STRING" in str(caught.value)


@pytest.mark.parametrize("columns", ["", "(key BINARY, value BINARY)"])
def test_a_table_says_that_only_a_view_works_and_the_view_works(spark: Any, hub: Hub, columns: str) -> None:
    from pyspark.errors import PySparkException

    given = f"USING pxrs OPTIONS (url '{hub.url}', topic 'in')"

    def select_from_table() -> None:
        spark.sql(f"CREATE TABLE topic_table {columns} {given}")
        spark.sql("SELECT count(*) FROM topic_table").collect()

    try:
        with pytest.raises(PySparkException) as caught:
            select_from_table()
        assert "use a temporary view, whose options it does pass: CREATE TEMPORARY VIEW orders" in str(caught.value)
        spark.sql(f"CREATE TEMPORARY VIEW topic_view {given}")
        assert spark.sql("SELECT count(*) FROM topic_view WHERE partition >= 0").first()[0] == N
    finally:
        spark.sql("DROP TABLE IF EXISTS topic_table")
        spark.sql("DROP VIEW IF EXISTS topic_view")


def test_s1_several_topics_are_one_table(spark: Any, hub: Hub) -> None:
    with hub.producer("out") as out:
        out.send_batch(pa.table({"value": [b"v"] * 7}))
    options = {
        "subscribe": "in,out",
        "endingOffsets": json.dumps({"in": dict.fromkeys("0123", 5), "out": dict.fromkeys("012", -1)}),
    }
    frame = spark.read.format("pxrs").options(url=hub.url, **options).load()
    assert frame.columns == ["key", "value", "topic", "partition", "offset", "timestamp"]
    assert dict(frame.groupBy("topic").count().collect()) == {"in": 20, "out": 7}
    frame = spark.read.format("pxrs").options(url=hub.url, subscribePattern="o..").load()
    assert {(row.topic, bytes(row.value)) for row in frame.collect()} == {("out", b"v")}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_pushing", [False, True])
def test_no_query_on_a_dataframe_reads_by_the_filter_of_another_one(spark: Any, hub: Hub, is_pushing: bool) -> None:
    """Also in a session that passes filters to Python sources: Spark 4.3 gives the partitions that a reader plans for
    one filter to every query on the same DataFrame (docs/decisions/0071)."""
    one, three = hub.topic("in").end(1), hub.topic("in").end(3)
    assert 0 < one < N > three > 0
    spark.conf.set("spark.sql.python.filterPushdown.enabled", str(is_pushing).lower())
    try:
        frame = reads(spark, hub).load()
        first, third = frame.where("partition = 1"), frame.where("partition = 3")
        assert [first.count(), frame.count(), third.count(), first.count()] == [one, N, three, one], "one by one"
        assert first.union(third).count() == one + three
        assert frame.union(first).count() == N + one
        places = ["partition", "offset"]
        assert first.join(frame, places).count() == one
        assert first.join(third, "offset").count() == min(one, three)
        cached = third.cache()
        try:
            assert [cached.count(), first.count(), cached.count(), frame.count()] == [three, one, three, N]
        finally:
            cached.unpersist()
        frame.createOrReplaceTempView("filtered")
        least = "(SELECT min(offset) FROM filtered WHERE partition = 3)"
        within = "(SELECT offset FROM filtered WHERE partition = 1)"
        query = f"SELECT count(*) FROM filtered WHERE offset >= {least} AND offset IN {within}"
        ends = [hub.topic("in").end(number) for number in range(PARTITIONS)]
        assert spark.sql(query).first()[0] == sum(min(end, one) for end in ends)
        with ThreadPoolExecutor(4) as threads:
            counts = threads.map(lambda each: each.count(), [first, frame, third] * 3)
            assert list(counts) == [one, N, three] * 3
    finally:
        spark.catalog.dropTempView("filtered")
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_s3_a_write_appends_all_or_nothing(spark: Any, hub: Hub) -> None:
    from pyspark.errors import PySparkException

    frame = reads(spark, hub).load().select("key", "value")
    frame.write.format("pxrs").options(url=hub.url, topic="out").mode("append").save()
    assert values(hub, "out") == list(range(N))
    table = hub.topic("out").to_arrow()
    places: dict[bytes, set[int]] = {}
    for key, place in zip(table["key"].to_pylist(), table["partition"].to_pylist(), strict=True):
        places.setdefault(key, set()).add(place)
    assert all(len(found) == 1 for found in places.values()), "a key has one partition"
    with pytest.raises(PySparkException):
        frame.selectExpr("key", "if(value = '1999', raise_error('bad row'), value) AS value").write.format(
            "pxrs"
        ).options(url=hub.url, topic="out").mode("append").save()
    assert len(values(hub, "out")) == N
    with pytest.raises(PySparkException, match="value is required"):
        frame.select("key").write.format("pxrs").options(url=hub.url, topic="out").mode("append").save()
    with pytest.raises(PySparkException, match="mode"):
        frame.write.format("pxrs").options(url=hub.url, topic="out").mode("overwrite").save()


def test_s2_s3_a_stream_copies_once_and_its_lag_is_seen_outside(spark: Any, hub: Hub, tmp_path: Path) -> None:
    frame = streams(spark, hub, maxRowsPerTrigger="700").select("key", "value")
    query = writes(frame, hub, tmp_path / "checkpoint")
    assert [progress.numInputRows for progress in query.recentProgress] == [700, 700, 600]
    assert values(hub, "out") == list(range(N))
    assert hub.group("g").describe().lag == 0
    wait_for_leaving(hub)

    send(hub, N, N + 100)
    assert hub.group("g").describe().lag == 100
    writes(frame, hub, tmp_path / "checkpoint")
    assert values(hub, "out") == list(range(N + 100))

    # The checkpoint location is lost: the group knows how far the work is, to the row (K3).
    send(hub, N + 100, N + 110)
    writes(frame, hub, tmp_path / "another")
    assert values(hub, "out") == list(range(N + 110))

    # The first location comes back: it is behind the group, and its state with it.
    with pytest.raises(pyspark.errors.StreamingQueryException, match="an old checkpoint location was restored"):
        writes(frame, hub, tmp_path / "checkpoint")
    assert values(hub, "out") == list(range(N + 110))
    assert [name for _, _, files in os.walk(tmp_path / "hub" / "staging") for name in files] == []


@pytest.mark.sampled(3, of="spark stories")
def test_s2_s3_k5_a_hub_behind_a_server_is_read_and_written_exactly(spark: Any, hub: Hub, tmp_path: Path) -> None:
    """With local tasks, which could open the directory too; `tests/acceptance/test_spark_chaos.py` proves that tasks
    need not."""
    hub.create_topic("more", partitions=2)
    with serving(hub) as url:
        frame = spark.read.format("pxrs").options(url=url, topic="in", minPartitions="8").load()
        assert sorted(int(row.value) for row in frame.collect()) == list(range(N))
        rows = frame.selectExpr("key", "value", "IF(partition < 2, 'out', 'more') AS topic")
        rows.write.format("pxrs").options(url=url).mode("append").save()
        out, more = values(hub, "out"), values(hub, "more")
        assert sorted(out + more) == list(range(N))

        options = {"url": url, "subscribe": "in,more", "group": "g", "maxRowsPerTrigger": "2000"}
        stream = spark.readStream.format("pxrs").options(**options).load().select("key", "value")
        writer = stream.writeStream.format("pxrs").options(url=url, topic="out")
        query = writer.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start()
        query.awaitTermination()
        assert values(hub, "out") == sorted([*out, *range(N), *more])
        assert hub.group("g").describe().lag == 0
        with pxrs.open(url) as remote:
            assert remote.group("g").describe().lag == 0
    assert [name for _, _, files in os.walk(tmp_path / "hub" / "staging") for name in files] == []


def test_a_query_that_runs_is_a_member_and_leaves_when_it_is_stopped(spark: Any, hub: Hub, tmp_path: Path) -> None:
    frame = streams(spark, hub).select("key", "value")
    out = frame.writeStream.format("pxrs").options(url=hub.url, topic="out", checkpointLocation=str(tmp_path / "c"))
    query = out.start()
    try:
        query.processAllAvailable()
        described = hub.group("g").describe()
        assert len(described.members) == 1
        assert {p.owner_name for p in described.partitions} == {described.members[0].name}
        second = streams(spark, hub, leaseTtl="0.5").writeStream.format("noop")
        other = second.option("checkpointLocation", str(tmp_path / "d")).start()
        with pytest.raises(pyspark.errors.StreamingQueryException, match=r"is used exclusively by "):
            other.awaitTermination(60)
    finally:
        query.stop()
    wait_for_leaving(hub)
    assert hub.group("g").describe().lag == 0
    assert values(hub, "out") == list(range(N))


def test_s2_a_stream_over_a_pattern_takes_in_a_topic_that_comes_while_it_runs(
    spark: Any, empty: Hub, tmp_path: Path
) -> None:
    """Count, distinct and sum are exact, and progress reports name the topics."""
    numbers = iter(range(1_000_000))

    def fill(topic: str, count: int) -> None:
        with empty.producer(topic) as out:
            for number in itertools.islice(numbers, count):
                out.send(str(number), key=f"k{number % 7}")

    def copied() -> list[int]:
        return values(empty, "out")

    def reported() -> list[str]:
        latest = json.loads(query.lastProgress.sources[0].latestOffset)
        return sorted(found["name"] for found in latest["topics"].values())

    for topic, partitions in (("shop-b", 2), ("shop-c", 1)):
        empty.create_topic(topic, partitions=partitions)
        fill(topic, 50)
    reader = spark.readStream.format("pxrs").options(url=empty.url, subscribePattern="shop-.*", group="g")
    frame = reader.load()
    assert frame.columns == ["key", "value", "topic", "partition", "offset", "timestamp"]
    out = frame.select("key", "value").writeStream.format("pxrs").options(url=empty.url, topic="out")
    query = out.option("checkpointLocation", str(tmp_path / "c")).start()
    try:
        eventually(lambda: len(copied()) == 100, PATIENCE_S)
        empty.create_topic("shop-a", partitions=2)  # before the others, so that their partitions get other numbers
        fill("shop-a", 30)
        fill("shop-c", 10)
        eventually(lambda: len(copied()) == 140, PATIENCE_S)
        eventually(lambda: reported() == ["shop-a", "shop-b", "shop-c"], PATIENCE_S)
    finally:
        query.stop()
    found = copied()
    assert (len(found), len(set(found)), sum(found)) == (140, 140, sum(range(140)))
    wait_for_leaving(empty)
    assert empty.group("g").describe().lag == 0


def test_x21_a_registered_table_is_read_as_a_topic_is(spark: Any, empty: Hub, tmp_path: Path) -> None:
    """The planning process and the tasks are Spark's own. The address has an option in the place of a password: SQLite
    takes none."""
    from pyspark.errors import PySparkException

    secret, file = "7319465", tmp_path / "shop.db"
    with closing(sqlite3.connect(file)) as shop, shop:
        shop.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY AUTOINCREMENT, account TEXT, body TEXT, made TEXT)")
        rows = [(f"k{i % 50}", str(i), f"2026-01-01T00:00:{i % 60:02}") for i in range(N)]
        shop.executemany("INSERT INTO orders (account, body, made) VALUES (?, ?, ?)", rows)
        shop.execute("DELETE FROM orders WHERE id % 10 = 0")
    empty.add_source(
        "events",
        f"sqlite:///{file}",
        table="orders",
        key_column="account",
        value_column="body",
        timestamp_column="made",
        partitions=PARTITIONS,
    )
    given = {"topic": "events", "sourceUrl": f"sqlite:///{file}?cached_statements={secret}"}
    whole = spark.read.format("pxrs").options(url=empty.url, minPartitions="3", includeHeaders="true", **given)
    frame = whole.load()
    assert frame.schema == reads(spark, empty, includeHeaders="true").load().schema
    assert frame.rdd.getNumPartitions() == 3
    found = {
        row.offset: (row.partition, bytes(row.key), bytes(row.value), row.timestamp.timestamp(), row.headers)
        for row in frame.collect()
    }
    source = empty.source("events")
    assert found == {
        offset: (partition, row["key"], row["value"], row["timestamp"].timestamp(), None)
        for partition in range(PARTITIONS)
        for batch in source.read(partition, 0)
        for offset, row in zip(batch.offsets.to_pylist(), batch.records.to_pylist(), strict=True)
    }
    assert len(found) == N - N // 10
    bounds = {"startingOffsets": json.dumps(dict.fromkeys(range(4), 101)), "columns": "offset"}
    bounded = spark.read.format("pxrs").options(url=empty.url, topic="events", **bounds).load()
    assert sorted(row.offset for row in bounded.collect()) == sorted(id for id in found if id > 100)

    plans = [frame._jdf.queryExecution().toString(), frame._jdf.queryExecution().executedPlan().treeString()]
    assert not [text for text in plans if secret in text]
    with closing(sqlite3.connect(file)) as shop, shop:
        shop.execute("INSERT INTO orders (account, body, made) VALUES ('k', 'v', 'no time')")
    with pytest.raises(PySparkException, match="a time in made is 'no time'") as caught:
        whole.load().collect()
    assert secret not in str(caught.value)
    stream = spark.readStream.format("pxrs").options(url=empty.url, topic="events", group="g").load()
    query = stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c")).start()
    with pytest.raises(PySparkException, match=r"events is a registered source.*pxrs worker"):
        query.awaitTermination(60)
    writer = bounded.selectExpr("'v' AS value").write.format("pxrs").options(url=empty.url, topic="events")
    with pytest.raises(PySparkException, match=r"events is a registered source.*only reads"):
        writer.mode("append").save()


SECRET = "a-password"


@pytest.mark.sampled(3, of="spark stories")
def test_no_password_reaches_a_task_a_plan_or_the_checkpoint_location(spark: Any, tmp_path: Path) -> None:
    """The address of the registry has a namespace in the place of a password: a directory takes none. Its tasks fail if
    they are given it."""
    from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceReader, DataSourceStreamArrowWriter

    from pxrs.spark.source import PxrsSource

    class Probe:  # in a function, so that Spark sends this class itself to its processes
        def __init__(self, source: Any, inner: Any) -> None:
            self.source, self.inner = source, inner

        def check(self, *more: Any) -> None:
            import pickle

            assert SECRET.encode() not in pickle.dumps((getattr(self.source, "options", None), self.inner, *more))

    class ProbeReader(Probe, DataSourceReader):
        def read(self, partition: Any) -> Any:
            self.check(partition)
            return self.inner.read(partition)

        def partitions(self) -> Any:
            return self.inner.partitions()

    class ProbeWriter(Probe, DataSourceArrowWriter):
        def write(self, rows: Any) -> Any:
            self.check()
            return self.inner.write(rows)

        def commit(self, *given: Any) -> None:
            self.inner.commit(*given)

    class ProbeStreamWriter(Probe, DataSourceStreamArrowWriter):
        write, commit = ProbeWriter.write, ProbeWriter.commit

    class Probed(PxrsSource):
        @classmethod
        def name(cls) -> str:
            return "probed"

        def reader(self, schema: Any) -> Any:
            return ProbeReader(self, super().reader(schema))

        def writer(self, schema: Any, overwrite: bool) -> Any:
            return ProbeWriter(None, super().writer(schema, overwrite))

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:
            return ProbeStreamWriter(None, super().streamWriter(schema, overwrite))

    spark.dataSource.register(Probed)
    place = {"url": str(tmp_path / "hub"), "registry": f"{tmp_path}/registry?namespace={SECRET}"}
    with pxrs.open(**place) as hub:
        hub.create_topic("in", partitions=2)
        hub.create_topic("out", partitions=2)
        send(hub, 0, 20)
        rows = spark.read.format("probed").options(topic="in", **place).load().select("key", "value")
        rows.write.format("probed").options(topic="out", **place).mode("append").save()
        stream = spark.readStream.format("pxrs").options(topic="in", group="g", **place).load()
        out = stream.select("key", "value").writeStream.format("probed").options(topic="out", **place)
        query = out.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
        query.awaitTermination()
        assert values(hub, "out") == sorted([*range(20)] * 2)
        assert hub.group("g").describe().lag == 0
    plans = [frame._jdf.queryExecution().toString() for frame in (rows, stream)]
    told = [query._jsq.explainInternal(True), *(progress.json for progress in query.recentProgress)]
    assert not [text for text in (*plans, *told) if SECRET in text]
    written = [
        path for folder in ("checkpoint", "hub/staging") for path in (tmp_path / folder).rglob("*") if path.is_file()
    ]
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]


def test_a_query_of_version_0_1_goes_on_exactly_once(spark: Any, tmp_path: Path) -> None:
    """Its checkpoint location and its hub are as version 0.1 has left them: see tests/golden/0.1/make.py."""
    with tarfile.open(Path(__file__).parents[1] / "golden" / "0.1" / "old.tar.xz") as packed:
        packed.extractall(tmp_path)  # our own archive; `filter` came with Python 3.11.4
    with pxrs.open(tmp_path / "hub-spark") as hub:
        assert values(hub, "out") == list(range(100))
        for begin, end in ((100, 160), (160, 170)):
            with hub.producer("in") as producer:
                for number in range(begin, end):
                    producer.send(str(number), key=f"key-{number % 10}")
            rows = streams(spark, hub, group="copier", maxRowsPerTrigger="60").select("key", "value")
            query = writes(rows, hub, tmp_path / "checkpoint")
            assert query.recentProgress[0].batchId >= 2, "it is the same query"
            assert values(hub, "out") == list(range(end))
            assert hub.group("copier").describe().lag == 0


# A group that a query shares with consumers.


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


@pytest.mark.sampled(3, of="spark stories")
def test_k3_each_message_is_done_by_one_of_them_and_partitions_move_both_ways(
    spark: Any, empty: Hub, tmp_path: Path
) -> None:
    with Shared(spark, empty, tmp_path) as shared:
        shared.start_query()
        shared.wait(lambda: shared.by_spark() >= STEP, "Spark begins alone")
        for turn in range(ROUNDS):
            with empty.consumer("in", "g", name=f"worker-{turn}") as inbox:
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
        shared.wait(lambda: empty.group("g").describe().lag == 0 and shared.done() >= len(shared.sent), "the end")
        shared.stop_query()
        account = transfer(shared.sent, shared.out)
        assert account.is_exact, account
        by = Counter(
            dict(message.headers or [])["by"] for number in range(3) for message in shared.out.messages(number)
        )
        assert by[b"python"] == shared.python >= ROUNDS * STEP
        assert by[b"spark"] == len(shared.sent) - shared.python >= ROUNDS * STEP


def test_k4_the_sink_refuses_a_query_with_state_in_a_shared_group(spark: Any, empty: Hub, tmp_path: Path) -> None:
    from pyspark.errors import StreamingQueryException

    send(empty, 0, 40)
    rows = spark.readStream.format("pxrs").options(url=empty.url, topic="in", group="g", shareGroup="true").load()
    once = rows.select("key", "value").dropDuplicates(["key"]).writeStream.format("pxrs")
    spark.conf.set("spark.sql.streaming.checkpointLocation", str(tmp_path / "locations"))
    try:
        query = once.options(url=empty.url, topic="out").trigger(availableNow=True).start()
    finally:
        spark.conf.unset("spark.sql.streaming.checkpointLocation")
    with pytest.raises(StreamingQueryException, match="option shareGroup: the query keeps state, and partitions of"):
        query.awaitTermination()
    assert sum(empty.topic("out").end(number) for number in range(3)) == 0
    assert empty.group("g").describe().lag == 40


def test_k4_a_pipeline_with_state_in_a_shared_group_is_refused_before_it_starts(
    spark: Any, empty: Hub, tmp_path: Path
) -> None:
    def planned(each: Pipeline) -> Run:
        return Run(spark, empty, [each], HubAddress(empty.url), tmp_path / "checkpoints")

    @pipeline(source="in", sink="out", share_group=True, output_mode="update")
    def totals(rows: Any) -> Any:
        return rows.groupBy("key").count()

    with pytest.raises(SharedState, match=r"totals: it keeps state \(an aggregation\).*Give it a group of its own"):
        planned(totals)

    @pipeline(source="in", sink="out", share_group=True)
    def copies(rows: Any) -> Any:
        return rows.select("key", "value")

    assert planned(copies).queries, "without state it may"
    assert empty.groups() == []
