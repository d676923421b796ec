"""Reading a topic from Spark: the planning in the driver, and the tasks that turn stored batches into rows. A batch may
also read a registered source: see `table.py`.

A task maps the log's files and yields its record batches nearly as they lie there. Everything it needs comes with its
`Slice`: it runs in another process, perhaps long after the reader that planned it is gone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

import pxrs
from pxrs.clock import boot_id
from pxrs.errors import (
    CheckpointOutOfRange,
    DataLost,
    HubMoved,
    InvalidOption,
    OffsetOutOfRange,
    OffsetTrimmed,
    TopicDeleted,
    UnknownTopic,
    WrongMachine,
)
from pxrs.group.records import Checkpoint, Keys, partition_of
from pxrs.hub import Hub
from pxrs.log.batch import SCHEMA, Batch
from pxrs.log.contract import TopicLog
from pxrs.log.directory.log import DirectoryLog
from pxrs.publishing.planning import REPLACED, Range, Spans, dump_offset, gather, load_offset, split
from pxrs.publishing.query import Query, resolve_offsets, start_offsets
from pxrs.publishing.staging import Feed, Staging
from pxrs.spark.columns import BATCH_ROWS, arrow_schema
from pxrs.spark.names import find_source, topic_to_stream
from pxrs.spark.options import ReadOptions, Where
from pxrs.spark.table import TableSlice, read_table, table_slices

_logger = logging.getLogger(__name__)

_SMALL_ROWS: Final = BATCH_ROWS // 4
_TASK_ROWS_MIN: Final = 20_000
"""Fewer than these of several partitions are read by one task, unless minPartitions is given."""
_READ_BYTES: Final = 4 << 20
_COUNTING: Final = pa.array(range(BATCH_ROWS), pa.int64())


@dataclass(frozen=True)
class Slice(InputPartition):  # type: ignore[misc]
    """One task: offsets of a partition, or of several where they are few, and all that is needed to read them. No
    address of the registry: tasks do not need it, and it may hold a password."""

    url: str
    topic: str
    topic_id: str
    machine: str
    ranges: tuple[Range, ...]
    columns: tuple[str, ...]
    fails_on_loss: bool
    feed: Feed | None = None


class TaskReader:
    """What tasks are given of a reader: everything else is in their `Slice` or `TableSlice`."""

    def read(self, partition: Slice | TableSlice) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, TableSlice):
            check_machine(partition.machine, "reading a table there is not supported")
            return read_table(partition)
        return read_slice(partition)


class BatchReader(TaskReader, DataSourceReader):  # type: ignore[misc]
    """`spark.read`: what is there between two offsets of each partition."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def partitions(self) -> list[Slice] | list[TableSlice]:
        options = self._options
        name = options.where.topic
        with open_hub(options.where) as hub:
            try:
                topic = hub.topic(name).log
            except UnknownTopic:
                if (record := find_source(hub, name)) is None:
                    raise
                return table_slices(hub, record, options)
            if options.source_url is not None:
                raise InvalidOption("sourceUrl", f"{name} is a topic; only the table of a registered source has one")
            starts = (
                _committed(hub, topic, options) if options.starting == "committed" else start_offsets(topic, options)
            )
            if options.ending_us is not None:
                ends = {number: topic.offset_at(number, options.ending_us) for number in range(topic.partitions)}
            else:
                ends = resolve_offsets(topic, options.ending, "endingOffsets")
            ranges = [
                Range(number, _checked_start(topic, number, starts[number], options.fails_on_loss), ends[number])
                for number in range(topic.partitions)
            ]
            ranges = [each for each in ranges if each.start < each.end]
            return _slices(options, topic, ranges)

    def __reduce__(self) -> tuple[type[TaskReader], tuple[()]]:
        return TaskReader, ()


class StreamReader(TaskReader, DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """`spark.readStream`: lives in a process of its own beside the driver, as a member of the group."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._hub: Hub | None = None
        self._query: Query | None = None
        self._loaded: tuple[Mapping[str, Any], Spans] | None = None
        """The offset that Spark came with last, and what it says: an idle query comes with the same one each time."""

    def initialOffset(self) -> dict[str, Any]:
        """Nothing is read yet. Where it begins is written down in the group, before anything is handed out (G6)."""
        with open_hub(self._options.where) as hub:
            return dump_offset(topic_to_stream(hub, self._options.where.topic).id, {})

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.rows_max is not None:
            return ReadMaxRows(self._options.rows_max)
        if self._options.bytes_max is not None:
            return ReadMaxBytes(self._options.bytes_max)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        query = self._joined()
        with self._topic_there(query):
            query.target_now()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        query = self._joined()
        spans = self._load(query, start)
        is_all = isinstance(limit, ReadAllAvailable)
        rows_max = None if is_all else self._options.rows_max
        bytes_max = None if is_all else self._options.bytes_max
        with self._topic_there(query):
            latest = query.latest(spans, rows_max, bytes_max)
        return start if latest is spans or latest == spans else dump_offset(query.source.id, latest)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        query = self._joined()
        with self._topic_there(query):
            ends = {str(number): end for number, end in enumerate(query.source.ends())}
        return {"topic": query.source.id, "partitions": ends}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Slice]:
        query = self._joined()
        topic = query.source
        assert isinstance(topic, TopicLog)
        begin, finish = self._load(query, start), self._load(query, end)
        if begin == finish:
            return []
        with self._topic_there(query):
            spans, fences = query.ranges(begin, finish)
        feed = self._feed(query, spans, fences)
        ranges = [Range(number, span.start, span.end) for number, span in spans.items()]
        # Even a batch of which nothing may be read has a task: it says so to the sink.
        return _slices(self._options, topic, ranges or [Range(0, 0, 0)], feed)

    def __reduce__(self) -> tuple[type[TaskReader], tuple[()]]:
        return TaskReader, ()

    def commit(self, end: dict[str, Any]) -> None:
        query = self._joined()
        query.finish(self._load(query, end))

    def stop(self) -> None:
        query, hub = self._query, self._hub
        self._query = self._hub = None
        try:
            if query is not None:
                query.close()
        finally:
            if hub is not None:
                hub.close()

    def _joined(self) -> Query:
        if self._query is None:
            _stop_on_sigterm()
            self._hub = open_hub(self._options.where)
            self._query = Query(self._hub, self._options)
        return self._query

    @contextlib.contextmanager
    def _topic_there(self, query: Query) -> Iterator[None]:
        """Raise TopicDeleted in place of UnknownTopic if there is another topic of this name now."""
        try:
            yield
        except UnknownTopic as error:
            assert self._hub is not None
            topics = {topic.name: topic.id for topic in self._hub.topics()}
            if topics.get(query.source.name, query.source.id) != query.source.id:
                raise TopicDeleted(query.source.name, query.source.id, is_made_again=True, advice=REPLACED) from error
            raise

    def _load(self, query: Query, offset: Mapping[str, Any]) -> Spans:
        if self._loaded is None or self._loaded[0] != offset:
            self._loaded = offset, load_offset(offset, query.source.id, query.source.name)
        return self._loaded[1]

    def _feed(self, query: Query, spans: Spans, fences: dict[int, int]) -> Feed:
        assert self._options.group is not None
        return Feed(
            self._options.group,
            query.source.id,
            query.incarnation or "",
            query.registry_id,
            spans,
            fences,
            self._options.is_shared,
            query.lease_s,
        )


def open_hub(where: Where) -> Hub:
    return pxrs.open(where.url, registry=where.registry)


def check_machine(machine: str, why: str = "the hub's directory is not there") -> None:
    """Raise WrongMachine in a task on another machine than the driver's (K5)."""
    if boot_id() != machine:
        raise WrongMachine(
            f"an executor runs on {os.uname().nodename}, which is another machine than the driver's: {why}. Run the "
            "executors on the driver's machine"
        )


def read_slice(part: Slice) -> Iterator[pa.RecordBatch]:
    """The rows of a task, as Spark wants them."""
    if not isinstance(part, Slice):  # where nothing is to be read, Spark makes one of its own
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
        _topic.cache_clear()  # the next try of the task opens what is there now
        raise
    except UnknownTopic as error:
        if isinstance(error, TopicDeleted) and error.advice:
            raise
        _topic.cache_clear()  # the handle that was kept is of a topic that is gone; there may be another of its name
        _topic_of(part)
        raise


def _topic_of(part: Slice) -> TopicLog:
    """The topic that was planned to be read. Raises UnknownTopic; TopicDeleted if there is another one of its name."""
    topic = _topic(part.url, part.topic)
    if topic.id != part.topic_id:
        _topic.cache_clear()
        topic = _topic(part.url, part.topic)
        if topic.id != part.topic_id:
            advice = REPLACED if part.feed is not None else "Start the read again"
            raise TopicDeleted(part.topic, part.topic_id, is_made_again=True, advice=advice)
    return topic


def _rows(batch: Batch, partition: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    schema = arrow_schema(columns)
    for at in range(0, batch.records.num_rows, BATCH_ROWS):
        piece = batch.records.slice(at, BATCH_ROWS)
        arrays = [_column(name, piece, partition, batch.base_offset + at) for name in columns]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _column(name: str, records: pa.RecordBatch, partition: int, offset: int) -> pa.Array:
    if name == "partition":
        return pa.repeat(pa.scalar(partition, pa.int32()), records.num_rows)
    if name == "offset":
        # Here, because the process that plans a stream has no use for it, and each query waits for its imports.
        import pyarrow.compute as pc

        return pc.add(_COUNTING.slice(0, records.num_rows), offset)
    return records.column(name)


def _batches(topic: TopicLog, part: Range, columns: list[str], fails_on_loss: bool) -> Iterator[Batch]:
    number, offset, end = part
    while offset < end:
        try:
            batches = topic.read(number, offset, _READ_BYTES)
        except OffsetTrimmed as error:
            offset = _checked_start(topic, number, offset, fails_on_loss, min(error.first_offset, end))
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
    """Small batches together: each that Spark is given has a fixed cost."""
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


@functools.lru_cache(maxsize=16)
def _topic(url: str, name: str) -> TopicLog:
    """Kept between the tasks of an executor."""
    return DirectoryLog(Path(url)).topic(name)


def _announce(url: str, feed: Feed) -> None:
    context = TaskContext.get()
    query = context.getLocalProperty("sql.streaming.queryId") if context else None
    batch = context.getLocalProperty("streaming.sql.batchId") if context else None
    if query is not None and batch is not None:
        Staging(url).announce(query, int(batch), run_of(context), feed)


def run_of(context: TaskContext) -> str:
    """Which start of its streaming query a task is of: Spark makes an id for each, and names its jobs by it."""
    return context.getLocalProperty("spark.jobGroup.id") or ""


def _slices(options: ReadOptions, topic: TopicLog, ranges: Sequence[Range], feed: Feed | None = None) -> list[Slice]:
    least = options.partitions_min
    tasks = gather(ranges, _TASK_ROWS_MIN) if least is None else [[each] for each in split(ranges, least)]
    url, machine = options.where.url, boot_id()
    return [
        Slice(url, topic.name, topic.id, machine, tuple(each), options.columns, options.fails_on_loss, feed)
        for each in tasks
    ]


def _checked_start(topic: TopicLog, number: int, start: int, fails: bool, first: int | None = None) -> int:
    """Where reading can begin. Raises DataLost if that is later, unless that is allowed (S6)."""
    first = topic.start(number) if first is None else first
    if start >= first:
        return start
    lost = DataLost(f"{topic.name}/{number}", start, first)
    if fails:
        raise lost
    _logger.warning("%s", lost)
    return first


def _committed(hub: Hub, topic: TopicLog, options: ReadOptions) -> dict[int, int]:
    """The group's checkpoints; where it has none, the beginning."""
    keys = Keys(options.group or "")
    found = {
        partition_of(entry.key)[1]: Checkpoint.load(entry.key, entry.value).offset
        for entry in hub.registry.scan(f"{keys.checkpoints}{topic.id}/")
    }
    bounds = topic.bounds(range(topic.partitions))
    starts = {number: found.get(number, bounds[number].start) for number in range(topic.partitions)}
    for number, start in starts.items():
        if start > (end := bounds[number].end):
            raise CheckpointOutOfRange(
                f"group {keys.group} is at offset {start} of {topic.name}/{number}, which ends at {end}; is this the "
                "same log? Reset the group if it is"
            )
    return starts


def _stop_on_sigterm() -> None:
    """Spark ends this process by SIGTERM, more than once, without calling `stop`: leave in good order instead."""

    def leave(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(0)

    signal.signal(signal.SIGTERM, leave)
