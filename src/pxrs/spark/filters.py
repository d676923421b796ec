"""The filters of a query that Spark passes to the source, as bounds of what has to be read.

Only comparisons of `topic`, `partition`, `offset` and `timestamp` with a literal narrow what is read; every other
filter is ignored. Spark applies all filters to the rows that it gets, so bounds may be too wide, but never too narrow.
Messages need not be stored in the order of their times. So a range ends behind the last stored batch that has a message
before the end of the times, and a task skips the stored batches within it that have none of these times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from pxrs.model import microseconds_of
from pxrs.spark.given import TOPIC

_MIN: Final = -(1 << 63)
_MAX: Final = 1 << 63


class Interval(NamedTuple):
    """Whole numbers from `start` on, and before `end`."""

    start: int = _MIN
    end: int = _MAX

    def both(self, other: Interval) -> Interval:
        return Interval(max(self.start, other.start), min(self.end, other.end))

    def holds(self, number: int) -> bool:
        return self.start <= number < self.end


ANY: Final = Interval()


class Times(NamedTuple):
    """Times from `start_us` on, and before `end_us`, in microseconds since 1970."""

    start_us: int
    end_us: int

    def may_be_in(self, records: pa.RecordBatch) -> bool:
        """Whether the stored batch may have a message within these times. False only if it has none."""
        # Imported here because the process that plans a stream does not need it, and every query waits for its imports.
        import pyarrow.compute as pc

        found = pc.min_max(records.column("timestamp"))
        return bool(found["min"].value < self.end_us and found["max"].value >= self.start_us)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The bounds that the filters of a query set. A message outside of them cannot pass the filters; a message within
    them may or may not pass."""

    topics: frozenset[str] | None = None
    """The names of topics; None: no filter names topics."""
    partitions: frozenset[int] | None = None
    """Numbers of partitions; None: only `partition_range` bounds them."""
    partition_range: Interval = ANY
    offsets: Interval = ANY
    times: Interval = ANY

    def has_topic(self, name: str) -> bool:
        return self.topics is None or name in self.topics

    def has_partition(self, number: int) -> bool:
        return self.partition_range.holds(number) and (self.partitions is None or number in self.partitions)

    @property
    def task_times(self) -> Times | None:
        """The bounds of times, by which a task skips stored batches; None if the filters set none."""
        return None if self.times == ANY else Times(*self.times)


ALL: Final = Wanted()


def wanted_by(filters: Iterable[Filter]) -> Wanted:
    """The bounds of a query that has all these filters, joined by AND."""
    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    ranges = {"partition": ANY, "offset": ANY, "timestamp": ANY}
    for each in filters:
        column = _column(each)
        if column == TOPIC and (names := _values(each, _text)) is not None:
            topics = names if topics is None else topics & names
        elif column == "partition" and (numbers := _values(each, _number)) is not None:
            partitions = numbers if partitions is None else partitions & numbers
        elif column in ranges:
            found = _interval(each, _time_us if column == "timestamp" else _number)
            ranges[column] = ranges[column].both(found)
    return Wanted(topics, partitions, ranges["partition"], ranges["offset"], ranges["timestamp"])


def _column(each: Filter) -> str | None:
    path: tuple[str, ...] = getattr(each, "attribute", ())
    return path[0].lower() if len(path) == 1 else None


def _values(each: Filter, convert: Callable[[Any], Any]) -> frozenset[Any] | None:
    """The values that an equality or IN filter lets pass; None for other filters, and for values of another type."""
    if isinstance(each, EqualTo | EqualNullSafe):
        found = [convert(each.value)]
    elif isinstance(each, In):
        # A null among the values makes the condition null, and not true, for a row that equals none of the others.
        found = [convert(value) for value in each.value if value is not None]
    else:
        return None
    return None if None in found else frozenset(found)


def _interval(each: Filter, convert: Callable[[Any], int | None]) -> Interval:
    """The smallest interval that has all numbers which the filter lets pass; ANY if the filter sets no bound."""
    values = _values(each, convert)
    if values is not None:
        return Interval(min(values), max(values) + 1) if values else Interval(0, 0)
    if not isinstance(each, GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual):
        return ANY
    value = convert(each.value)
    if value is None:
        return ANY
    if isinstance(each, GreaterThan | GreaterThanOrEqual):
        return Interval(start=value + isinstance(each, GreaterThan))
    return Interval(end=value + isinstance(each, LessThanOrEqual))


def _number(value: object) -> int | None:
    return value if type(value) is int else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _time_us(value: object) -> int | None:
    """The time in microseconds. None for a time without a zone, which cannot be compared with the column."""
    return microseconds_of(value) if isinstance(value, datetime) and value.tzinfo is not None else None
