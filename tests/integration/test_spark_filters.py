"""Filters that Spark passes to the source: what is read because of them has every row that they let pass."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import pxrs
from pxrs.hub import Hub
from pxrs.log.directory import reading
from pxrs.model import EPOCH, microseconds_of

pytest.importorskip("pyspark")

from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from pxrs.spark.filters import ANY, Interval, Times, Wanted, wanted_by
from pxrs.spark.options import read_options
from pxrs.spark.reader import BatchReader, FilteredBatchReader
from pxrs.spark.source import PxrsSource
from pxrs.spark.tasks import Slice, read_slice

Row = dict[str, Any]

COLUMNS = "topic,partition,offset,timestamp"
ROWS = 3_000
PARTITIONS = 4
COMPARISONS: dict[type[Filter], Callable[[Any, Any], bool]] = {
    EqualTo: operator.eq,
    EqualNullSafe: operator.eq,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    In: lambda value, values: value in values,
}


def at(microseconds: int) -> datetime:
    return EPOCH + timedelta(microseconds=microseconds)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """Two topics of many small stored batches in several segments. The times of `steady` rise, with jitter of less than
    a batch; those of `mixed` also go back by up to the whole length of the topic."""
    chance = random.Random(7)
    with pxrs.open(tmp_path_factory.mktemp("filters") / "hub") as hub:
        for topic, jitter in (("steady", 20), ("mixed", ROWS)):
            hub.create_topic(topic, partitions=PARTITIONS, segment_bytes=1 << 16)
            with hub.producer(topic) as out:
                for first in range(0, ROWS, 100):
                    is_late = topic == "mixed" and chance.random() < 0.2
                    span = ROWS if is_late else 20
                    times = [max(0, i - chance.randrange(min(jitter, span))) for i in range(first, first + 100)]
                    table = {
                        "value": [b"v" * 200] * 100,
                        "timestamp": pa.array(times, pa.timestamp("us", tz="UTC")),
                        "partition": [chance.randrange(PARTITIONS) for _ in times],
                    }
                    out.send_batch(pa.table(table)).result()
        yield hub


def planned(hub: Hub, filters: list[Filter], **options: str) -> list[Slice]:
    given = {"url": hub.url, "subscribe": "steady,mixed", "pushFilters": "true", "columns": COLUMNS, **options}
    reader = FilteredBatchReader(read_options(given))
    assert list(reader.pushFilters(filters)) == filters, "Spark applies all of them itself"
    return reader.partitions()


def read(parts: list[Slice]) -> list[Row]:
    return [row for part in parts for batch in read_slice(part) for row in batch.to_pylist()]


def passes(each: Filter, row: Row) -> bool:
    return COMPARISONS[type(each)](row[each.attribute[0]], each.value)


def identity(row: Row) -> tuple[str, int, int]:
    return row["topic"], row["partition"], row["offset"]


def random_filter(chance: random.Random) -> Filter:
    kind = chance.choice(list(COMPARISONS))
    column = chance.choice(["topic", "partition", "offset", "timestamp", "timestamp"])

    def value() -> Any:
        if column == "topic":
            return chance.choice(["steady", "mixed", "none"])
        if column == "timestamp":
            return at(chance.randrange(-5, ROWS + 5))
        return chance.randrange(-1, PARTITIONS + 1 if column == "partition" else ROWS // PARTITIONS + 50)

    return kind((column,), tuple(value() for _ in range(chance.randrange(4))) if kind is In else value())


@pytest.mark.parametrize("seed", range(4))
def test_no_row_that_the_filters_let_pass_is_left_out(hub: Hub, seed: int) -> None:
    chance = random.Random(seed)
    everything = read(planned(hub, []))
    assert len(everything) == 2 * ROWS
    fewer = 0
    for _ in range(25):
        filters = [random_filter(chance) for _ in range(chance.randrange(1, 4))]
        found = read(planned(hub, filters, **chance.choice([{}, {"minPartitions": "9"}])))
        fewer += len(found) < len(everything)
        expected = sorted(identity(row) for row in everything if all(passes(each, row) for each in filters))
        assert sorted(identity(row) for row in found if all(passes(each, row) for each in filters)) == expected, filters
        assert len({identity(row) for row in found}) == len(found)
    assert fewer > 12, "most filters narrow what is read"


def test_a_range_of_times_reads_about_that_and_a_partition_only_itself(hub: Hub) -> None:
    tenth = [GreaterThanOrEqual(("timestamp",), at(1_500)), LessThan(("timestamp",), at(1_800))]
    steady = planned(hub, tenth, subscribe="steady")
    assert 300 <= len(read(steady)) <= 600, "whole stored batches are read, and no others"
    assert all(250 < each.start < each.end < 550 for part in steady for each in part.ranges), "planned so already"
    (one,) = planned(hub, [EqualTo(("partition",), 1), EqualTo(("topic",), "mixed")])
    assert one.topic == "mixed"
    assert [each.partition for each in one.ranges] == [1]
    assert planned(hub, [EqualTo(("partition",), PARTITIONS)]) == []
    assert planned(hub, [In(("topic",), ())]) == []
    (middle,) = planned(hub, [GreaterThan(("offset",), 9), LessThanOrEqual(("offset",), 19)], subscribe="steady")
    assert {(each.start, each.end) for each in middle.ranges} == {(10, 20)}


def test_the_end_of_a_time_is_not_searched_for_in_too_many_frames(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = hub.topic("steady").log
    assert topic.offset_at(0, 1_500) < topic.end_before(0, 1_500) < topic.end(0)
    monkeypatch.setattr(reading, "LOOKED_AT_MAX", 3)
    assert topic.end_before(0, 1_500) == topic.end(0)
    assert topic.end_before(0, ROWS - 25) == topic.end(0)


@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        ([], Wanted()),
        ([EqualTo(("key",), b"k"), IsNotNull(("offset",)), Not(EqualTo(("partition",), 1))], Wanted()),
        ([EqualTo(("offset", "part"), 1), EqualTo(("offset",), "1"), LessThan(("offset",), 1.5)], Wanted()),
        ([LessThan(("timestamp",), datetime(2026, 1, 1))], Wanted()),
        ([EqualTo(("PARTITION",), 1), In(("partition",), (1, 2, None))], Wanted(partitions=frozenset({1}))),
        ([GreaterThan(("partition",), 1)], Wanted(partition_range=Interval(2, ANY.end))),
        ([In(("offset",), (7, 3))], Wanted(offsets=Interval(3, 8))),
        ([EqualTo(("timestamp",), at(5)), LessThan(("timestamp",), at(5))], Wanted(times=Interval(5, 5))),
    ],
)
def test_only_what_is_certain_narrows(filters: list[Filter], wanted: Wanted) -> None:
    assert wanted_by(filters) == wanted


def test_a_time_of_another_zone_is_the_same_time() -> None:
    moment = datetime(2026, 3, 1, 12, 0, 0, 7, tzinfo=UTC)
    assert wanted_by([GreaterThanOrEqual(("timestamp",), moment)]).times.start == microseconds_of(moment)
    assert wanted_by([GreaterThanOrEqual(("timestamp",), moment)]).task_times == Times(microseconds_of(moment), ANY.end)


def test_a_source_that_was_not_asked_for_it_defines_no_push_filters(tmp_path: Path) -> None:
    """Spark refuses a reader that defines it in a session in which the setting is off."""
    given = {"url": str(tmp_path), "topic": "t"}
    for more, kind in (({}, BatchReader), ({"pushFilters": "true"}, FilteredBatchReader)):
        source = PxrsSource({**given, **more})
        reader = source.reader(source.schema())
        assert type(reader) is kind
        is_defined = type(reader).pushFilters is not DataSourceReader.pushFilters
        assert is_defined == bool(more)
