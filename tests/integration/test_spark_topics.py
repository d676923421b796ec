"""S1, S6: a batch of several topics, planned and read in this process instead of Spark's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import pxrs
from pxrs.errors import DataLost, InvalidOption, UnknownTopic
from pxrs.group.records import Checkpoint, Keys
from pxrs.hub import Hub

pytest.importorskip("pyspark")

from pxrs.spark.options import read_options
from pxrs.spark.reader import BatchReader
from pxrs.spark.source import PxrsSource
from pxrs.spark.tasks import Slice, read_slice

BOTH = "orders,returns"
ROWS = {"orders": 3, "returns": 2}
"""Partitions by topic; a partition has 100 messages, one in each millisecond."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with pxrs.open(tmp_path / "hub") as hub:
        for topic, partitions in ROWS.items():
            hub.create_topic(topic, partitions=partitions, retention=timedelta(days=1), segment_bytes=1 << 16)
            times = pa.array([1000 * i for i in range(100) for _ in range(partitions)], pa.timestamp("us", tz="UTC"))
            numbers = [number for _ in range(100) for number in range(partitions)]
            values = [f"{topic} {i}".encode() for i in range(100) for _ in range(partitions)]
            with hub.producer(topic) as out:
                out.send_batch(pa.table({"value": values, "partition": numbers, "timestamp": times}))
        hub.create_topic("other", partitions=1)
        yield hub


def slices(hub: Hub, **options: str) -> list[Slice]:
    return BatchReader(read_options({"url": hub.url, **options})).partitions()


def rows(hub: Hub, **options: str) -> list[dict[str, Any]]:
    return [row for part in slices(hub, **options) for batch in read_slice(part) for row in batch.to_pylist()]


def offsets(hub: Hub, **options: str) -> dict[tuple[str, int], tuple[int, int]]:
    """By topic and partition, the first and the last offset of the rows."""
    found: dict[tuple[str, int], list[int]] = {}
    for row in rows(hub, **options):
        found.setdefault((row["topic"], row["partition"]), []).append(row["offset"])
    for each in found.values():
        assert each == list(range(each[0], each[-1] + 1))
    return {place: (each[0], each[-1]) for place, each in found.items()}


def whole(*places: tuple[str, int]) -> dict[tuple[str, int], tuple[int, int]]:
    return dict.fromkeys(places, (0, 99))


ORDERS = [("orders", number) for number in range(3)]
RETURNS = [("returns", number) for number in range(2)]


def test_each_row_of_several_topics_names_its_topic(hub: Hub) -> None:
    found = rows(hub, subscribe=BOTH)
    assert list(found[0]) == ["key", "value", "topic", "partition", "offset", "timestamp"]
    assert Counter(row["topic"] for row in found) == {"orders": 300, "returns": 200}
    assert all(row["value"].decode() == f"{row['topic']} {row['offset']}" for row in found)
    assert "topic" not in rows(hub, topic="orders")[0]
    assert {row["topic"] for row in rows(hub, topic="orders", columns="topic")} == {"orders"}


def test_topics_by_pattern_and_partitions_by_number(hub: Hub) -> None:
    assert offsets(hub, subscribe=BOTH) == whole(*ORDERS, *RETURNS)
    assert offsets(hub, subscribePattern="or.*|ret.*") == whole(*ORDERS, *RETURNS)
    assert offsets(hub, subscribePattern="orders") == whole(*ORDERS)
    assert offsets(hub, assign='{"orders": [2, 0], "returns": [1]}') == whole(ORDERS[0], ORDERS[2], RETURNS[1])
    with pytest.raises(InvalidOption, match=r"option subscribePattern: no topic of the hub matches ord: create one"):
        slices(hub, subscribePattern="ord")
    with pytest.raises(UnknownTopic, match="nowhere"):
        slices(hub, subscribe="orders,nowhere")
    with pytest.raises(InvalidOption, match="option assign: returns has only partitions 0, 1, not 2"):
        slices(hub, assign='{"returns": [1, 2]}')


def test_offsets_and_times_are_given_by_topic_as_for_kafkas_source(hub: Hub) -> None:
    starting = json.dumps({"orders": {"0": 23, "1": -2, "2": 99}, "returns": {"0": 50, "1": -2}})
    ending = json.dumps({"orders": {"0": 24, "1": 1, "2": -1}, "returns": {"0": -1, "1": 2}})
    assert offsets(hub, subscribe=BOTH, startingOffsets=starting, endingOffsets=ending) == {
        ("orders", 0): (23, 23),
        ("orders", 1): (0, 0),
        ("orders", 2): (99, 99),
        ("returns", 0): (50, 99),
        ("returns", 1): (0, 1),
    }
    starting = json.dumps({"orders": {"0": 10, "2": 98}, "returns": {"1": 1}})
    ending = json.dumps({"orders": {"0": 12, "2": 1000}, "returns": {"1": 2}})
    chosen = {"assign": '{"orders": [0, 2], "returns": [1]}'}
    by_time = {"startingOffsetsByTimestamp": starting, "endingOffsetsByTimestamp": ending}
    assert offsets(hub, **chosen, **by_time) == {
        ("orders", 0): (10, 11),
        ("orders", 2): (98, 99),
        ("returns", 1): (1, 1),
    }
    assert offsets(hub, **chosen, startingTimestamp="97", endingTimestamp="98") == {
        ("orders", 0): (97, 97),
        ("orders", 2): (97, 97),
        ("returns", 1): (97, 97),
    }
    with pytest.raises(InvalidOption, match="option startingOffsets: it lacks returns: name every topic"):
        slices(hub, subscribe=BOTH, startingOffsets='{"orders": {"0": 0, "1": 0, "2": 0}}')
    with pytest.raises(InvalidOption, match="option endingOffsets: it lacks partitions 0, 1 of orders: name"):
        slices(hub, subscribe="orders", endingOffsets='{"2": 0}')
    with pytest.raises(InvalidOption, match="it names partition 1 of orders: name only partitions 0, 2"):
        slices(hub, assign='{"orders": [0, 2]}', startingOffsets='{"orders": {"0": 0, "1": 0, "2": 0}}')
    with pytest.raises(InvalidOption, match="option startingTimestamp: orders has no message of that time or later in"):
        slices(hub, topic="orders", startingTimestamp="1000", startingOffsetsByTimestampStrategy="error")
    assert slices(hub, topic="orders", startingTimestamp="1000") == []


def test_tasks_are_shared_out_over_all_topics(hub: Hub) -> None:
    assert [part.topic for part in slices(hub, subscribe=BOTH)] == ["orders", "returns"], "short ranges share a task"
    parts = slices(hub, subscribe=BOTH, minPartitions="5")
    assert [(part.topic, part.ranges[0].partition) for part in parts] == ORDERS + RETURNS
    parts = slices(hub, subscribe=BOTH, minPartitions="20")
    assert 20 <= len(parts) <= 25
    assert offsets(hub, subscribe=BOTH, minPartitions="20") == whole(*ORDERS, *RETURNS)


def test_s6_what_retention_has_removed_of_one_topic_is_named(hub: Hub) -> None:
    assert hub.topic("returns").log.retain(1 << 60)[0] == 100
    with hub.producer("returns") as out:
        out.send_batch(pa.table({"value": [b"v"] * 5, "partition": [0] * 5}))
    starting = json.dumps({"orders": dict.fromkeys("012", 90), "returns": {"0": 0, "1": 100}})
    with pytest.raises(DataLost) as caught:
        slices(hub, subscribe=BOTH, startingOffsets=starting)
    assert (caught.value.place, caught.value.start, caught.value.end) == ("returns/0", 0, 100)
    found = offsets(hub, subscribe=BOTH, startingOffsets=starting, failOnDataLoss="false")
    assert found == {**dict.fromkeys(ORDERS, (90, 99)), ("returns", 0): (100, 104)}


def test_a_batch_of_several_topics_begins_at_the_checkpoints_of_a_group(hub: Hub) -> None:
    for topic, number, offset in (("orders", 0, 40), ("returns", 1, 60)):
        key = Keys("g").checkpoint(hub.topic(topic).id, number)
        hub.registry.commit({}, {key: Checkpoint(offset).dump()})
    found = offsets(hub, subscribe=BOTH, startingOffsets="committed", group="g")
    assert found == {**whole(*ORDERS, *RETURNS), ("orders", 0): (40, 99), ("returns", 1): (60, 99)}


def test_a_schema_of_the_users_own_is_refused_before_anything_is_read(hub: Hub) -> None:
    source = PxrsSource({"url": hub.url, "topic": "orders"})
    ours = source.schema()
    source.reader(ours).partitions()
    for given in (ours[:2], type(ours)([*ours[:4], ours[2]]), type(ours)().add("key", "string")):
        says = "option schema: the columns that are read are key BINARY, .* NOT NULL, but the schema is key"
        with pytest.raises(InvalidOption, match=says):
            source.reader(given)
        with pytest.raises(InvalidOption, match=says):
            PxrsSource({"url": hub.url, "topic": "orders", "group": "g"}).streamReader(given)
