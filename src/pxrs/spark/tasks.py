"""Reading a topic in Spark's tasks, which run on executors.

A task maps the log's files, or fetches its ranges from the server of the hub, and yields the stored record batches
nearly as they are. Everything that it needs is in its `Slice`: it runs in another process than the reader that planned
it, and perhaps long after that reader is gone.
"""

from __future__ import annotations

import array
import functools
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import InputPartition

from pxrs.errors import DataLost, HubMoved, OffsetOutOfRange, OffsetTrimmed, TopicDeleted, UnknownTopic
from pxrs.log.batch import SCHEMA, Batch
from pxrs.log.contract import TopicLog
from pxrs.log.directory.log import DirectoryLog
from pxrs.publishing.feed import Feed
from pxrs.publishing.planning import REPLACED, Range
from pxrs.spark.collecting import freeze_imports
from pxrs.spark.columns import BATCH_ROWS, arrow_schema
from pxrs.spark.given import TOPIC
from pxrs.spark.place import HubPlace, check_machine
from pxrs.spark.table import TableSlice, read_table

if TYPE_CHECKING:
    from pxrs.remote.client.connection import Connection

_logger = logging.getLogger(__name__)

_SMALL_ROWS: Final = BATCH_ROWS // 4
"""A stored batch with at least this number of rows is yielded as it is, and not joined with others."""
_READ_BYTES: Final = 4 << 20
_RUN: Final = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_SESSION: Final = re.compile(f"spark-session-{_RUN.pattern}")


@dataclass(frozen=True)
class Slice(InputPartition):  # type: ignore[misc]
    """The input of one task: offsets of one partition, or of several partitions where they are few, and all that is
    needed to read them. It does not hold the address of the registry: tasks do not need it, and it may hold a
    password."""

    place: HubPlace
    topic: str
    topic_id: str
    ranges: tuple[Range, ...]
    columns: tuple[str, ...]
    fails_on_loss: bool
    feed: Feed | None = None
    """The offsets that the whole batch of a streaming query reads of this topic; None in a batch job. The task stores
    it for the query's sink."""

    @property
    def rows(self) -> int:
        """How many rows the task reads at most: its number of offsets."""
        return sum(each.rows for each in self.ranges)


@dataclass(frozen=True)
class Slices(InputPartition):  # type: ignore[misc]
    """The input of one task that reads few rows of several topics."""

    slices: tuple[Slice, ...]


class TaskReader:
    """The part of a reader that is sent to tasks: everything else is in their `Slice` or `TableSlice`."""

    def read(self, partition: Slice | Slices | TableSlice) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, Slice):
            partition.place.load()
        elif isinstance(partition, Slices):
            partition.slices[0].place.load()
        freeze_imports()
        if isinstance(partition, Slices):
            return _read_slices(partition.slices)
        if isinstance(partition, TableSlice):
            check_machine(partition.machine, "reading a table there is not supported: read it on the driver's machine")
            return read_table(partition)
        return read_slice(partition)


def run_of(context: TaskContext) -> str:
    """The id of the start of the streaming query that a task belongs to. Spark makes a new id at every start, and names
    the query's job group by it.

    A function of the user's own (`foreachBatch`) may set another job group, which may be the same at every start. Then
    the id is the tag of the session that the task belongs to: each start of a query has a session of its own."""
    group = context.getLocalProperty("spark.jobGroup.id") or ""
    if _RUN.fullmatch(group):
        return group
    tags = (context.getLocalProperty("spark.job.tags") or "").split(",")
    return next((tag for tag in tags if _SESSION.fullmatch(tag)), group)


def _read_slices(parts: Sequence[Slice]) -> Iterator[pa.RecordBatch]:
    # All feeds before the first row: a plan with a limit may take no rows of the later slices, and the sink's commit
    # needs the feeds of all topics.
    for part in parts:
        _begin(part)
    for part in parts:
        yield from read_slice(part)


def _begin(part: Slice) -> None:
    part.place.check()
    if part.feed is not None:
        _announce(part.place, part.feed)


def read_slice(part: Slice) -> Iterator[pa.RecordBatch]:
    """The rows of a task, with the columns that Spark was promised."""
    if not isinstance(part, Slice):  # if there is nothing to read, Spark makes an input of its own
        return
    _begin(part)
    try:
        for number, batches in _fetched(part) if part.place.is_served else _mapped(part):
            for batch in _gathered(_wanted(batches, part)):
                yield from _rows(batch, part.topic, number, part.columns)
    except HubMoved:
        _forget_topics()  # the next attempt of the task opens the topic again
        raise
    except UnknownTopic as error:
        if isinstance(error, TopicDeleted) and (error.advice or part.place.is_served):
            raise
        _forget_topics()  # the cached handle belongs to a deleted topic; a new topic may have the same name
        _topic_of(part)
        raise


def checked_start(topic: str, number: int, start: int, first: int, fails: bool) -> int:
    """The offset at which reading can begin: `start`, or `first`, the first offset that is there. Raises DataLost if
    that is behind `start` and `fails` is set (S6)."""
    if start >= first:
        return start
    lost = DataLost(f"{topic}/{number}", start, first)
    if fails:
        raise lost
    _logger.warning("%s", lost)
    return first


def _announce(place: HubPlace, feed: Feed) -> None:
    context = TaskContext.get()
    query = context.getLocalProperty("sql.streaming.queryId") if context else None
    batch = context.getLocalProperty("streaming.sql.batchId") if context else None
    if query is not None and batch is not None:
        place.staging().announce(query, int(batch), run_of(context), feed)


def _topic_of(part: Slice) -> TopicLog:
    """The topic for which the read was planned. Raises UnknownTopic; TopicDeleted if another topic has its name now."""
    topic = _topic(part.place.url, part.topic)
    if topic.id != part.topic_id:
        _forget_topics()
        topic = _topic(part.place.url, part.topic)
        if topic.id != part.topic_id:
            raise _made_again(part)
    return topic


def _made_again(part: Slice) -> TopicDeleted:
    advice = REPLACED if part.feed is not None else "Start the read again"
    return TopicDeleted(part.topic, part.topic_id, is_made_again=True, advice=advice)


@functools.lru_cache(maxsize=1_000)
def _topic(url: str, name: str) -> TopicLog:
    """The open topic. Cached, because an executor's process runs many tasks of the same topics."""
    return _log(url).topic(name)


@functools.lru_cache(maxsize=16)
def _log(url: str) -> DirectoryLog:
    return DirectoryLog(Path(url))


def _forget_topics() -> None:
    _topic.cache_clear()
    _log.cache_clear()


def _wanted(batches: Iterable[Batch], part: Slice) -> Iterator[Batch]:
    """The batches that have rows, with the stored columns that the query needs."""
    columns = [name for name in part.columns if name in SCHEMA.names]
    for batch in batches:
        if batch.records.num_rows:
            yield batch._replace(records=batch.records.select(columns), encoded=None)


def _mapped(part: Slice) -> Iterator[tuple[int, Iterator[Batch]]]:
    """The batches of each range, by partition, from the files of the log."""
    topic = _topic_of(part)
    for each in part.ranges:
        yield each.partition, _batches(topic, each, part.fails_on_loss)


def _batches(topic: TopicLog, part: Range, fails_on_loss: bool) -> Iterator[Batch]:
    number, offset, end = part
    read_bytes = 1  # the first stored batch, whose size tells how much more to read: no more than the range needs
    while offset < end:
        try:
            batches = topic.read(number, offset, read_bytes)
        except OffsetTrimmed as error:
            offset = checked_start(topic.name, number, offset, min(error.first_offset, end), fails_on_loss)
            continue
        if not batches:
            raise OffsetOutOfRange(f"{topic.name}/{number}", end, offset)
        for batch in batches:
            batch = batch.within(offset, end)
            yield batch
            offset = batch.next_offset
            if offset >= end:
                break
        last = batches[-1].records
        row_bytes = last.nbytes / last.num_rows if last.num_rows else _READ_BYTES
        read_bytes = max(1, min(_READ_BYTES, int((end - offset) * row_bytes)))


def _fetched(part: Slice) -> Iterator[tuple[int, Iterator[Batch]]]:
    """The batches of each range, by partition, from the server of the hub: one stream for each range."""
    with part.place.connected() as connection:
        for each in part.ranges:
            yield each.partition, _streamed(connection, part, each)


def _streamed(connection: Connection, part: Slice, each: Range) -> Iterator[Batch]:
    from pxrs.remote.client.transfers import read_range

    number, offset, end = each
    while offset < end:
        try:
            with part.place.connected_for(connection, part.topic, part.topic_id, number) as nearest:
                for batch in read_range(nearest, part.topic, part.topic_id, number, offset, end):
                    yield batch
                    offset = batch.next_offset
        except OffsetTrimmed as error:
            offset = checked_start(part.topic, number, offset, min(error.first_offset, end), part.fails_on_loss)
        except TopicDeleted as error:
            raise (_made_again(part) if error.is_made_again else error) from None


def _gathered(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Join small batches with consecutive offsets, because each batch that Spark gets has a fixed cost. Others are
    passed on as they are: joining copies them, and already their `nbytes` takes a while."""
    waiting: list[Batch] = []
    rows = size = 0
    for batch in batches:
        count = batch.records.num_rows
        is_small = count < _SMALL_ROWS
        nbytes = batch.records.nbytes if is_small else 0
        is_full = rows + count > BATCH_ROWS or size + nbytes > _READ_BYTES
        if waiting and (not is_small or is_full or waiting[-1].next_offset != batch.base_offset):
            yield _together(waiting)
            waiting, rows, size = [], 0, 0
        if is_small:
            waiting.append(batch)
            rows, size = rows + count, size + nbytes
        else:
            yield batch
    if waiting:
        yield _together(waiting)


def _together(batches: list[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    return Batch(batches[0].base_offset, pa.concat_batches([batch.records for batch in batches]))


def _rows(batch: Batch, topic: str, partition: int, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    schema = _schema(columns)
    for at in range(0, batch.records.num_rows, BATCH_ROWS):
        piece = batch.records.slice(at, BATCH_ROWS)
        arrays = [_column(name, piece, topic, partition, batch.base_offset + at) for name in columns]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _column(name: str, records: pa.RecordBatch, topic: str, partition: int, offset: int) -> pa.Array:
    if name == TOPIC:
        return _repeated_name(topic).slice(0, records.num_rows)
    if name == "partition":
        return _repeated_number(partition).slice(0, records.num_rows)
    if name == "offset":
        # Imported here because the process that plans a stream does not need it, and every query waits for its imports.
        import pyarrow.compute as pc

        return pc.add(_COUNTING.slice(0, records.num_rows), _from_numbers(pa.int64(), "q", [offset])[0])
    return records.column(name)


_schema = functools.lru_cache(maxsize=64)(arrow_schema)


@functools.lru_cache(maxsize=256)
def _repeated_number(number: int) -> pa.Int32Array:
    """The number as often as the longest batch has rows. Cached, because a task needs it for each of its batches."""
    return _from_numbers(pa.int32(), "i", [number] * BATCH_ROWS)


@functools.lru_cache(maxsize=256)
def _repeated_name(name: str) -> pa.StringArray:
    """The name as often as the longest batch has rows."""
    text = name.encode()
    ends = array.array("i", range(0, (BATCH_ROWS + 1) * len(text), len(text)))
    return pa.Array.from_buffers(pa.string(), BATCH_ROWS, [None, pa.py_buffer(ends), pa.py_buffer(text * BATCH_ROWS)])


def _from_numbers(kind: pa.DataType, code: str, numbers: Iterable[int]) -> pa.Array:
    """An array of these numbers, without nulls. `pa.array` and `pa.scalar` would import pandas where it is installed,
    which takes each worker half a second.

    code: the type of the numbers for the module `array`"""
    values = array.array(code, numbers)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


_COUNTING: Final = _from_numbers(pa.int64(), "q", range(BATCH_ROWS))
