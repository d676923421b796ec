"""S1, S2, S3, S6, K5: `format("pxrs")` in a real Spark session, found with no registration."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import pxrs
from pxrs.hub import Hub

pyspark = pytest.importorskip("pyspark")

from pxrs.spark import session  # noqa: E402

N = 2_000


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    found = session("tests", "local[2]")
    found.sparkContext.setLogLevel("OFF")
    yield found
    found.stop()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with pxrs.open(tmp_path / "hub") as hub:
        hub.create_topic("in", partitions=4)
        hub.create_topic("out", partitions=3)
        send(hub, 0, N)
        yield hub


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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"offset": "3"}, "option offset: unknown; pxrs has url, registry"),
        ({"minPartitions": "x"}, "option minPartitions: 'x'; give a whole number"),
        ({"startingOffsets": '{"0": 1}'}, "option startingOffsets: in has the partitions 0 to 3: name each"),
        ({"topic": "missing"}, "no topic 'missing'; there are in, out"),
    ],
)
def test_a_mistake_is_told_in_one_line(spark: Any, hub: Hub, options: dict[str, str], says: str) -> None:
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException) as caught:
        spark.read.format("pxrs").options(**{"url": hub.url, "topic": "in", **options}).load().count()
    assert says in str(caught.value)


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
    with pytest.raises(PySparkException, match="there must be value"):
        frame.select("key").write.format("pxrs").options(url=hub.url, topic="out").mode("append").save()
    with pytest.raises(PySparkException, match="mode"):
        frame.write.format("pxrs").options(url=hub.url, topic="out").mode("overwrite").save()


def test_s2_s3_a_stream_copies_once_and_its_lag_is_seen_outside(spark: Any, hub: Hub, tmp_path: Path) -> None:
    frame = streams(spark, hub, maxRowsPerTrigger="700").select("key", "value")
    query = writes(frame, hub, tmp_path / "checkpoint")
    assert [progress.numInputRows for progress in query.recentProgress] == [700, 700, 600]
    assert values(hub, "out") == list(range(N))
    described = hub.group("g").describe()
    assert (described.lag, len(described.members)) == (0, 0)

    send(hub, N, 2 * N)
    assert hub.group("g").describe().lag == N
    writes(frame, hub, tmp_path / "checkpoint")
    assert values(hub, "out") == list(range(2 * N))

    # The checkpoint location is lost: the group knows how far the work is, to the row (K3).
    send(hub, 2 * N, 2 * N + 10)
    writes(frame, hub, tmp_path / "another")
    assert values(hub, "out") == list(range(2 * N + 10))

    # The first location comes back: it is behind the group, and its state with it.
    with pytest.raises(pyspark.errors.StreamingQueryException, match="an old checkpoint location was restored"):
        writes(frame, hub, tmp_path / "checkpoint")
    assert values(hub, "out") == list(range(2 * N + 10))
    assert [name for _, _, files in os.walk(tmp_path / "hub" / "staging") for name in files] == []


def test_state_and_windows_over_a_topic(spark: Any, hub: Hub, tmp_path: Path) -> None:
    frame = streams(spark, hub, maxRowsPerTrigger="900").groupBy("key").count()
    query = frame.writeStream.format("memory").queryName("counts").outputMode("complete")
    query.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start().awaitTermination()
    assert {row["count"] for row in spark.table("counts").collect()} == {N // 50}


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
        with pytest.raises(pyspark.errors.StreamingQueryException, match=r"belongs to .* alone"):
            other.awaitTermination(60)
    finally:
        query.stop()
    deadline = time.monotonic() + 30  # Spark does not wait for the end of the process that it stops
    while hub.group("g").describe().members:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert hub.group("g").describe().lag == 0
    assert values(hub, "out") == list(range(N))
