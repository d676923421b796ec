"""Writing from Spark: rows that name their topics, rows as the source has them, threads, and output mode `update`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pxrs
from pxrs.errors import InvalidOption, InvalidRecord
from pxrs.hub import Hub
from pxrs.publishing.records import Manifest, manifests_of

pytest.importorskip("pyspark")

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DoubleType,
    IntegerType,
    LongType,
    NullType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from pxrs.spark import stream_updates, use_in_thread
from pxrs.spark.numbered import NumberedTask
from pxrs.spark.options import write_options
from pxrs.spark.sink_columns import check_columns

pytestmark = pytest.mark.sampled(2, of="module")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with pxrs.open(tmp_path / "hub") as hub:
        for name, partitions in (("in", 2), ("out", 2), ("more", 1)):
            hub.create_topic(name, partitions=partitions)
        with hub.producer("in") as out:
            for number in range(30):
                out.send(str(number), key=f"key-{number % 5}", headers=[("n", str(number).encode())])
        yield hub


def values(hub: Hub, topic: str) -> list[int]:
    return sorted(int(value) for value in hub.topic(topic).to_arrow().column("value").to_pylist())


def reads(spark: Any, hub: Hub) -> Any:
    return spark.read.format("pxrs").options(url=hub.url, topic="in", includeHeaders="true").load()


def streams(spark: Any, hub: Hub, group: str) -> Any:
    reader = spark.readStream.format("pxrs").options(url=hub.url, topic="in", group=group)
    return reader.options(maxRowsPerTrigger="20").load()


def write(frame: Any, hub: Hub, **options: Any) -> None:
    frame.write.format("pxrs").options(url=hub.url, **options).mode("append").save()


def finish(writer: Any, folder: Path) -> None:
    """Start a query with this checkpoint location, and wait for its end."""
    query = writer.option("checkpointLocation", str(folder)).trigger(availableNow=True).start()
    query.awaitTermination()


ROUTE = "CASE WHEN CAST(CAST(value AS STRING) AS INT) < 10 THEN 'more' ELSE 'out' END AS topic"


def test_rows_of_the_source_are_written_as_they_are_and_name_their_topics(spark: Any, hub: Hub) -> None:
    rows = reads(spark, hub)
    write(rows, hub, topic="out")  # with partition, offset, timestamp and headers of where they come from
    source, copy = (
        hub.topic(name).to_arrow().sort_by([("partition", "ascending"), ("offset", "ascending")])
        for name in ("in", "out")
    )
    assert copy.equals(source), "also the partitions, the times and the headers"
    routed = rows.drop("partition").selectExpr("*", ROUTE)
    write(routed, hub)
    assert values(hub, "more") == list(range(10))
    assert values(hub, "out") == sorted([*range(30), *range(10, 30)])
    write(routed.limit(1), hub, topic="out")  # the option takes precedence over the column, as in Kafka's sink
    assert len(values(hub, "out")) == 51
    with pytest.raises(Exception, match=r"partition 1, but the topic more has partitions 0 to 0.*df\.drop"):
        write(rows, hub, topic="more")
    with pytest.raises(Exception, match=r"no topic 'nowhere'.*pxrs topic create"):
        write(rows.drop("partition").selectExpr("*", "IF(offset = 7, 'nowhere', 'out') AS topic"), hub)
    assert len(values(hub, "out")) == 51
    assert len(values(hub, "more")) == 10
    assert not [path for path in Path(hub.url, "staging").rglob("*") if path.is_file()]


def test_writes_and_streams_work_in_threads_once_the_thread_has_the_session(
    spark: Any, hub: Hub, tmp_path: Path
) -> None:
    frame = spark.range(3).selectExpr("CAST(id AS STRING) AS value").coalesce(1)
    with ThreadPoolExecutor(1) as pool, pytest.raises(Exception, match="DATA_SOURCE_NOT_FOUND") as caught:
        pool.submit(write, frame, hub, topic="out").result()
    assert "pxrs" in str(caught.value), "if this has become possible, use_in_thread is needed no more"
    routed = streams(spark, hub, "router").drop("partition").selectExpr("*", ROUTE).writeStream.format("pxrs")
    with ThreadPoolExecutor(2, initializer=use_in_thread, initargs=(spark,)) as pool:
        pool.submit(finish, routed.options(url=hub.url), tmp_path / "routed").result()
    assert values(hub, "more") == list(range(10))
    assert values(hub, "out") == list(range(10, 30))
    assert hub.group("router").describe().lag == 0

    def fan_out(batch: Any, number: int) -> None:
        rows = batch.limit(3).selectExpr("CAST(offset AS STRING) AS value")
        with ThreadPoolExecutor(2, initializer=use_in_thread, initargs=(batch.sparkSession,)) as pool:
            for done in [
                pool.submit(write, rows, hub, topic=topic, txnAppId=f"fan-{topic}", txnVersion=number)
                for topic in ("out", "more", "more")  # a write that is repeated counts once
            ]:
                done.result()

    reader = spark.readStream.format("pxrs").options(url=hub.url, topic="in", group="fan")
    finish(reader.load().writeStream.foreachBatch(fan_out), tmp_path / "fan")
    assert len(values(hub, "more")) == 13
    assert len(values(hub, "out")) == 23


def test_k3_a_job_group_of_the_users_own_does_not_mix_the_feeds_of_two_starts(
    spark: Any, hub: Hub, tmp_path: Path
) -> None:
    fails = [True]

    def send(batch: Any, number: int) -> None:
        """Its jobs have a group of the user's own, the same at every start."""
        batch.sparkSession.sparkContext.setJobGroup("daily [1/2]", "the user's own")
        if fails and batch.count():
            raise RuntimeError(fails.pop())
        write(batch.select("value"), hub, topic="out", txnVersion=number)

    with pytest.raises(Exception, match="RuntimeError"):
        finish(streams(spark, hub, "grouped").writeStream.foreachBatch(send), tmp_path / "grouped")
    finish(streams(spark, hub, "grouped").writeStream.foreachBatch(send), tmp_path / "grouped")
    assert values(hub, "out") == list(range(30))
    (manifest,) = hub.registry.scan(manifests_of(hub.topic("out").id))
    assert Manifest.load(manifest).ranges, "the checkpoints were in the commit of the batch (K3)"


def test_k1_changed_rows_are_sent_in_mode_update_each_change_once(spark: Any, hub: Hub, tmp_path: Path) -> None:
    def counts(group: str) -> Any:
        counted = streams(spark, hub, group).groupBy("key").count()
        return counted.selectExpr("key", "CAST(count AS STRING) AS value")

    folder = tmp_path / "updates"
    for _ in range(2):
        finish(stream_updates(counts("counter"), url=hub.url, topic="more"), folder)
        counted = [message.value or b"" for message in hub.topic("more").messages(0)]
        assert sum(int(value) for value in counted[-5:]) == 30
        assert len(counted) == 10, "the counts of five keys after each of two batches"
        for name in ("1", ".1.crc"):  # as if the driver had died before Spark recorded the second batch
            (folder / "commits" / name).unlink()
    assert hub.group("counter").describe().lag == 0
    with pytest.raises(Exception, match="pxrs does not support Update mode"):  # docs/spark.md quotes it
        finish(
            counts("plain").writeStream.format("pxrs").options(url=hub.url, topic="more").outputMode("update"),
            tmp_path / "plain",
        )
    with pytest.raises(Exception, match="value is bigint, but must be binary or string: use CAST"):
        write(spark.range(3).selectExpr("id AS value"), hub, topic="out")


# Tests that need no Spark session.


def schema(**columns: Any) -> StructType:
    found = StructType()
    for name, kind in columns.items():
        found.add(name, kind)
    return found


HEADER = StructType().add("key", StringType()).add("value", BinaryType())


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"value": IntegerType()}, "value is int, but must be binary or string: use CAST(value AS STRING) AS value"),
        (
            {"value": HEADER},
            "value is struct<key:string,value:binary>, but must be binary or string: use to_json(value)",
        ),
        ({"value": BinaryType(), "key": DoubleType()}, "key is double, but must be binary or string"),
        ({"value": BinaryType(), "timestamp": TimestampNTZType()}, "use CAST(timestamp AS TIMESTAMP) AS timestamp"),
        ({"value": BinaryType(), "timestamp": LongType()}, "timestamp is bigint, but must be timestamp"),
        ({"value": BinaryType(), "partition": StringType()}, "partition is string, but must be int: use CAST"),
        ({"value": BinaryType(), "topic": LongType()}, "topic is bigint, but must be string"),
        ({"value": BinaryType(), "headers": ArrayType(StringType())}, "headers is array<string>, but must be array<"),
        ({"value": BinaryType(), "offset": StringType()}, "offset is string, but must be bigint"),
        ({"value": BinaryType(), "amount": LongType()}, "the columns are value, amount; value is required"),
        ({"key": BinaryType()}, "value is required"),
    ],
)
def test_a_wrong_column_is_told_by_name_type_and_cast_when_the_write_is_planned(
    columns: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidRecord) as caught:
        check_columns(schema(**columns), "out")
    assert says in str(caught.value)


def test_the_columns_of_kafkas_sink_and_of_our_source_are_taken() -> None:
    source = {
        "key": BinaryType(),
        "value": StringType(),
        "partition": IntegerType(),
        "offset": LongType(),
        "timestamp": TimestampType(),
        "headers": ArrayType(HEADER),
        "topic": StringType(),
    }
    assert check_columns(schema(**source), None) == ("offset",)
    assert check_columns(schema(**source), "out") == ("offset", "topic")
    assert check_columns(schema(value=BinaryType(), key=NullType(), headers=NullType()), "out") == ()
    with pytest.raises(InvalidOption, match=r"option topic: missing.*a column topic that names"):
        check_columns(schema(value=BinaryType()), None)


@pytest.mark.parametrize(
    ("options", "is_stream", "says"),
    [
        ({"txnAppId": "a"}, False, "option txnVersion: missing"),
        ({"txnAppId": "a/b", "txnVersion": "1"}, False, "option txnAppId: 'a/b'"),
        ({"txnVersion": "-1"}, False, "option txnVersion: '-1'; give a whole number"),
        ({"txnVersion": "1"}, True, "option txnVersion: not an option of writeStream"),
        ({"topics": "a"}, False, "option topics: unknown"),
    ],
)
def test_a_wrong_option_of_a_write_is_told(options: dict[str, str], is_stream: bool, says: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        write_options({"url": "data", **options}, is_stream=is_stream)
    assert says in str(caught.value)


def test_a_write_whose_tasks_do_not_know_their_query_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over Spark Connect: there a task of foreachBatch has no local properties."""

    class Context:
        def getLocalProperty(self, name: str) -> None:
            return None

    monkeypatch.setattr("pxrs.spark.numbered.TaskContext", type("T", (), {"get": staticmethod(Context)}))
    stager: Any = SimpleNamespace(stage=None)
    with pytest.raises(InvalidOption, match=r"txnAppId: missing.*Spark Connect"):
        NumberedTask(stager, None, 3).write(iter(()))
    rows: Any = type("DataFrame", (), {"__module__": "pyspark.sql.connect.dataframe"})()
    with pytest.raises(InvalidOption, match=r"app_id: missing.*Spark Connect"):
        stream_updates(rows, url="data", topic="out")
