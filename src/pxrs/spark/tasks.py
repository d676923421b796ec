"""Reading a topic in Spark's tasks, which run on executors.

A task maps the log's files and yields the stored record batches nearly as they are. Everything that it needs is in its
`Slice`: it runs in another process than the reader that planned it, and perhaps long after that reader is gone.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import InputPartition

from pxrs.clock import boot_id
from pxrs.errors import DataLost, HubMoved, OffsetOutOfRange, OffsetTrimmed, TopicDeleted, UnknownTopic, WrongMachine
from pxrs.log.batch import SCHEMA, Batch
from pxrs.log.contract import TopicLog
from pxrs.log.directory.log import DirectoryLog
from pxrs.publishing.feed import Feed
from pxrs.publishing.planning import REPLACED, Range
from pxrs.publishing.staging.directory import DirectoryStaging
from pxrs.spark.columns import BATCH_ROWS, arrow_schema
from pxrs.spark.table import TableSlice, read_table

_logger = logging.getLogger(__name__)

_SMALL_ROWS: Final = BATCH_ROWS // 4
"""A stored batch with at least this number of rows is yielded as it is, and not joined with others."""
_READ_BYTES: Final = 4 << 20


@dataclass(frozen=True)
class Slice(InputPartition):  # type: ignore[misc]
    """The input of one task: offsets of one partition, or of several partitions where they are few, and all that is
    needed to read them. It does not hold the address of the registry: tasks do not need it, and it may hold a
    password."""

    url: str
    topic: str
    topic_id: str
    machine: str
    """Boot id of the driver's machine: the hub's directory is only there (K5)."""
    ranges: tuple[Range, ...]
    columns: tuple[str, ...]
    fails_on_loss: bool
    feed: Feed | None = None
    """The offsets that the whole batch of a streaming query reads; None in a batch job. The task stores it for the
    query's sink."""


class TaskReader:
    """The part of a reader that is sent to tasks: everything else is in their `Slice` or `TableSlice`."""

    def read(self, partition: Slice | TableSlice) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, TableSlice):
            check_machine(partition.machine, "reading a table there is not supported")
            return read_table(partition)
        return read_slice(partition)


def check_machine(machine: str, why: str = "the hub's directory is not there") -> None:
    """Raise WrongMachine in a task on another machine than the driver's (K5)."""
    if boot_id() != machine:
        raise WrongMachine(
            f"an executor runs on {os.uname().nodename}, which is another machine than the driver's: {why}. Run the "
            "executors on the driver's machine"
        )


def run_of(context: TaskContext) -> str:
    """The id of the start of the streaming query that a task belongs to. Spark makes a new id at every start, and names
    the query's job group by it."""
    return context.getLocalProperty("spark.jobGroup.id") or ""


def read_slice(part: Slice) -> Iterator[pa.RecordBatch]:
    """The rows of a task, with the columns that Spark was promised."""
    if not isinstance(part, Slice):  # if there is nothing to read, Spark makes an input of its own
        return
    check_machine(part.machine)
    if part.feed is not None:
        _announce(part.url, part.feed)
    stored = [name for name in part.columns if name in SCHEMA.names]
    try:
        topic = _topic_of(part)
        for each in part.ranges:
            for batch in _gathered(_batches(topic, each, stored, part.fails_on_loss)):
                yield from _rows(batch, each.partition, part.columns)
    except HubMoved:
        _topic.cache_clear()  # the next attempt of the task opens what is there now
        raise
    except UnknownTopic as error:
        if isinstance(error, TopicDeleted) and error.advice:
            raise
        _topic.cache_clear()  # the cached handle is of a deleted topic; there may be a new topic of its name
        _topic_of(part)
        raise


def checked_start(topic: TopicLog, number: int, start: int, fails: bool, first: int | None = None) -> int:
    """The offset at which reading can begin. Raises DataLost if that is behind `start` and `fails` is set (S6).

    first: the first offset that is there, if the caller knows it."""
    first = topic.start(number) if first is None else first
    if start >= first:
        return start
    lost = DataLost(f"{topic.name}/{number}", start, first)
    if fails:
        raise lost
    _logger.warning("%s", lost)
    return first


def _announce(url: str, feed: Feed) -> None:
    context = TaskContext.get()
    query = context.getLocalProperty("sql.streaming.queryId") if context else None
    batch = context.getLocalProperty("streaming.sql.batchId") if context else None
    if query is not None and batch is not None:
        DirectoryStaging(url).announce(query, int(batch), run_of(context), feed)


def _topic_of(part: Slice) -> TopicLog:
    """The topic for which the read was planned. Raises UnknownTopic; TopicDeleted if another topic has its name now."""
    topic = _topic(part.url, part.topic)
    if topic.id != part.topic_id:
        _topic.cache_clear()
        topic = _topic(part.url, part.topic)
        if topic.id != part.topic_id:
            advice = REPLACED if part.feed is not None else "Start the read again"
            raise TopicDeleted(part.topic, part.topic_id, is_made_again=True, advice=advice)
    return topic


@functools.lru_cache(maxsize=16)
def _topic(url: str, name: str) -> TopicLog:
    """The open topic. Cached, because an executor's process runs many tasks of one topic."""
    return DirectoryLog(Path(url)).topic(name)


def _batches(topic: TopicLog, part: Range, columns: list[str], fails_on_loss: bool) -> Iterator[Batch]:
    number, offset, end = part
    while offset < end:
        try:
            batches = topic.read(number, offset, _READ_BYTES)
        except OffsetTrimmed as error:
            offset = checked_start(topic, number, offset, fails_on_loss, min(error.first_offset, end))
            continue
        if not batches:
            raise OffsetOutOfRange(f"{topic.name}/{number}", end, offset)
        for batch in batches:
            batch = batch.within(offset, end)
            if batch.records.num_rows:
                yield batch._replace(records=batch.records.select(columns))
            offset = batch.next_offset
            if offset >= end:
                break


def _gathered(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Join small batches with consecutive offsets, because each batch that Spark gets has a fixed cost."""
    waiting: list[Batch] = []
    rows = size = 0
    for batch in batches:
        rows, size = rows + batch.records.num_rows, size + batch.records.nbytes
        is_full = rows > BATCH_ROWS or size > _READ_BYTES
        if waiting and (is_full or waiting[-1].next_offset != batch.base_offset):
            yield _together(waiting)
            waiting, rows, size = [], batch.records.num_rows, batch.records.nbytes
        waiting.append(batch)
        if rows >= _SMALL_ROWS and len(waiting) == 1:
            yield waiting.pop()
            rows = size = 0
    if waiting:
        yield _together(waiting)


def _together(batches: list[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    return Batch(batches[0].base_offset, pa.concat_batches([batch.records for batch in batches]))


def _rows(batch: Batch, partition: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    schema = arrow_schema(columns)
    for at in range(0, batch.records.num_rows, BATCH_ROWS):
        piece = batch.records.slice(at, BATCH_ROWS)
        arrays = [_column(name, piece, partition, batch.base_offset + at) for name in columns]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


@functools.cache
def _counting() -> pa.Array:
    """The numbers from 0 to the length of the longest batch. `pa.array` imports pandas, if it is installed, so this is
    called in tasks only: the process that plans a stream does not need it."""
    return pa.array(range(BATCH_ROWS), pa.int64())


def _column(name: str, records: pa.RecordBatch, partition: int, offset: int) -> pa.Array:
    if name == "partition":
        return pa.repeat(pa.scalar(partition, pa.int32()), records.num_rows)
    if name == "offset":
        # Imported here because the process that plans a stream does not need it, and every query waits for its imports.
        import pyarrow.compute as pc

        return pc.add(_counting().slice(0, records.num_rows), offset)
    return records.column(name)
