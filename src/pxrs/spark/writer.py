"""Writing a DataFrame to topics: tasks stage their rows, and the driver publishes them in one commit (K1).

The columns are those of `Producer.send_batch`: value, and optionally key, timestamp, headers and partition; and
`topic`, where the rows name their topics (`sink_columns.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, SupportsIndex

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

import pxrs
from pxrs.errors import BatchRefused, InvalidOption, RegistryReplaced
from pxrs.log.contract import Log
from pxrs.model import Topic, refuse_internal
from pxrs.publishing.feed import Feed
from pxrs.publishing.manifest import JOB
from pxrs.publishing.records import Part
from pxrs.publishing.staging.files import routed_writer
from pxrs.publishing.staging.routing import by_column
from pxrs.registry.outage import UNREACHABLE, with_advice
from pxrs.spark.collecting import freeze_imports
from pxrs.spark.names import topic_to_write
from pxrs.spark.options import WriteOptions
from pxrs.spark.place import HubPlace, end_tokens, staging_at
from pxrs.spark.publishers import Publishers, made_again
from pxrs.spark.sink_columns import check_columns
from pxrs.spark.tasks import run_of

_LOCATIONS: Final = "spark.sql.streaming.checkpointLocation"


class StagedFile(NamedTuple):
    """A file that a task has staged for a topic."""

    topic: str
    topic_id: str
    name: str


@dataclass(frozen=True)
class StagedMessage(WriterCommitMessage):  # type: ignore[misc]
    """What a task reports to the driver."""

    query: str
    files: tuple[StagedFile, ...]
    run: str
    """The id of this start of the query (`run_of`)."""
    locations: str | None = None
    """The session's folder for the checkpoint locations of queries that were started without one."""
    capability: str | None = None
    """The id of the token that the task has had, if the hub is behind a server."""


@dataclass(frozen=True)
class Stager:
    """What a task needs to stage rows. Spark sends this object to every executor, so it does not contain the address of
    the registry, which may contain a password."""

    place: HubPlace
    topic: Topic | None
    """None: the rows name their topics."""
    ignored: tuple[str, ...]
    """Columns that are not written."""

    @classmethod
    def of(cls, options: WriteOptions, schema: StructType) -> Stager:
        ignored = check_columns(schema, options.topic)
        with pxrs.open(options.url, registry=options.registry) as hub:
            topic = None
            # Checked in the driver, so that one error is raised and not one for each task.
            if options.topic is not None:
                handle = topic_to_write(hub, options.topic)
                handle.log.check_writable()
                topic = handle.topic
            staging_at(options.url).check_writable()
        return cls(HubPlace.of(options.url), topic, ignored)

    def for_tasks(self, options: WriteOptions) -> Stager:
        """The same for tasks, with a token if the hub is behind a server."""
        topics = None if self.topic is None else [self.topic.id]
        return replace(self, place=self.place.to_stage(options.url, topics))

    def stage(self, query: str, batch: int, rows: Iterator[pa.RecordBatch]) -> StagedMessage:
        self.place.check()
        self.place.load()
        staging = self.place.staging()
        freeze_imports()
        context = TaskContext.get()
        task = context.partitionId()
        if self.ignored:
            rows = (table.drop_columns(list(self.ignored)) for table in rows)
        if self.topic is not None:
            found = [(self.topic, staging.stage(self.topic, query, batch, task, rows))]
        else:
            with self.place.log() as log:
                found = staging.stage_routed(
                    by_column(lambda name: _topic_to_stage(log, name)), routed_writer(query), batch, task, rows
                )
        files = tuple(StagedFile(topic.name, topic.id, each.name) for topic, each in found if each.name is not None)
        return StagedMessage(query, files, run_of(context), capability=self.place.capability)


def _topic_to_stage(log: Log, name: str) -> Topic:
    """The topic that a row names. Raises UnknownTopic, and InvalidTopic if it is an internal topic."""
    refuse_internal(name, "written to")
    found = log.topic(name)
    found.check_writable()
    return found.topic


class DriversWriter:
    """A writer in the driver's process, which is pickled for tasks without what tasks must not have.

    PySpark pickles such a writer twice, in this order (pyspark/sql/worker/write_into_data_source.py): within the
    function that the tasks run, and by itself, for `commit` in the driver. The first time, what `for_tasks` returns is
    pickled in its place. If another version of PySpark pickles in the other order, the driver gets a task's writer,
    whose `commit` raises BatchRefused."""

    _is_sent = False
    """Whether this writer was pickled for the tasks."""

    def for_tasks(self) -> tuple[type[object], tuple[object, ...]]:
        """The class of the writer that tasks get, and the arguments of its constructor."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if self._is_sent:
            return super().__reduce_ex__(protocol)
        self._is_sent = True
        return self.for_tasks()


class BatchTask(DataSourceArrowWriter):  # type: ignore[misc]
    """`df.write`, in a task."""

    def __init__(self, stager: Stager, job: str) -> None:
        self.stager, self.job = stager, job

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        return self.stager.stage(self.job, 0, iterator)

    def commit(self, messages: Sequence[StagedMessage | None]) -> None:
        raise refused_commit()

    def abort(self, messages: Sequence[StagedMessage | None]) -> None:
        """Undo nothing: the commit may have taken effect. Staged files that no manifest names are removed later."""


class BatchWriter(DriversWriter, BatchTask):
    """`df.write`: all rows become part of their topics, or none."""

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        refuse_overwrite(overwrite)
        super().__init__(Stager.of(options, schema), f"{JOB}{uuid.uuid4().hex}")
        self.options = options

    def for_tasks(self) -> tuple[type[object], tuple[object, ...]]:
        return BatchTask, (self.stager.for_tasks(self.options), self.job)

    def commit(self, messages: Sequence[StagedMessage | None]) -> None:
        with contextlib.closing(Publishers()) as publishers:  # the job has one batch: nothing is kept open
            publishers.publish(self.options, self.stager.topic, self.job, 0, _parts(messages))
            publishers.forget_job(self.options, self.job)
        end_tokens_of(self.options, messages)

    def abort(self, messages: Sequence[StagedMessage | None]) -> None:
        end_tokens_of(self.options, messages)


class StreamTask(DataSourceStreamArrowWriter):  # type: ignore[misc]
    """`df.writeStream`, in a task."""

    def __init__(self, stager: Stager) -> None:
        self.stager = stager

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        context = TaskContext.get()
        query = context.getLocalProperty("sql.streaming.queryId")
        message = self.stager.stage(query, int(context.getLocalProperty("streaming.sql.batchId")), iterator)
        return replace(message, locations=context.getLocalProperty(_LOCATIONS))

    def commit(self, messages: Sequence[StagedMessage | None], batchId: int) -> None:
        raise refused_commit()

    def abort(self, messages: Sequence[StagedMessage | None], batchId: int) -> None:
        """Undo nothing: Spark also calls this if the commit took effect and its reply was lost."""


class StreamWriter(StreamTask):
    """`df.writeStream`: each batch is published once, however often it is tried. For each commit, Spark makes a new
    writer from the options, so only tasks get what is pickled."""

    def __init__(self, options: WriteOptions, schema: StructType, checkpoints: str | None = None) -> None:
        super().__init__(Stager.of(options, schema))
        self.options, self._checkpoints = options, checkpoints

    def __reduce__(self) -> tuple[type[object], tuple[object, ...]]:
        return StreamTask, (self.stager.for_tasks(self.options),)

    def commit(self, messages: Sequence[StagedMessage | None], batchId: int) -> None:
        publish_batch(self.options, self.stager.topic, messages, batchId, self._checkpoints)
        end_tokens_of(self.options, messages)

    def abort(self, messages: Sequence[StagedMessage | None], batchId: int) -> None:
        end_tokens_of(self.options, messages)


def end_tokens_of(options: WriteOptions, messages: Sequence[StagedMessage | None]) -> None:
    """End the tokens that the tasks of a batch have had: no task of it runs any more."""
    end_tokens(options.url, (message.capability for message in messages if message is not None))


def publish_batch(
    options: WriteOptions,
    topic: Topic | None,
    messages: Sequence[StagedMessage | None],
    batch: int,
    checkpoints: str | None = None,
) -> None:
    """Make a batch of a streaming query part of its topics; called in the driver.

    topic:       the topic that the rows were staged for; None if they name their topics.
    checkpoints: the query's checkpoint location, if it was started with one."""
    reported = [message for message in messages if message is not None]
    queries = {(message.query, message.run) for message in reported}
    if len(queries) != 1:
        raise BatchRefused(f"batch {batch} comes from {len(queries)} queries, not from one")
    ((query, run),) = queries
    # A write with `txnAppId` moves no checkpoints: a batch may make several such writes, and its feeds can move the
    # checkpoints only once.
    feeds = staging_at(options.url).feeds(query, batch, run) if options.app is None else []
    location = find_location(query, checkpoints, reported[0].locations)
    _refuse_shared_state(feeds, location)
    planned = "" if location is None else hash_of_plan(location, batch)
    has_state = None if location is None else _has_state(location)
    try:
        _publishers.publish(options, topic, query, batch, _parts(messages), feeds, planned, has_state)
    except RegistryReplaced:  # the next attempt opens the registry that is there now
        _publishers.forget(options)
        raise
    except UNREACHABLE as error:
        raise with_advice(
            error,
            f"batch {batch} of query {query}: the registry could not be reached: {error}. Start the query again: the "
            "batch is published exactly once, however often it is retried",
        ) from error


_publishers: Final = Publishers()


def refused_commit() -> BatchRefused:
    return BatchRefused(
        "a task's writer was asked to commit, but it has no address of the registry. Nothing was written: this version "
        "of PySpark is not supported, because it pickles writers in another order"
    )


def find_location(query: str, given: str | None, locations: str | None) -> Path | None:
    """The checkpoint location of a query, if it is a folder of this machine: the given one, or one in the session's
    folder. A location contains the id of its query. If several have this id, because somebody keeps a copy in the same
    folder, it is the one that was written to last."""
    where = given or locations
    if where is None:
        return None
    folder = Path(where.removeprefix("file:"))
    found = []
    for metadata in [folder / "metadata"] if given else folder.glob("*/metadata"):
        try:
            if json.loads(metadata.read_text())["id"] == query:
                found.append(((metadata.parent / "offsets").stat().st_mtime, metadata.parent))
        except (OSError, ValueError, LookupError, TypeError):  # not a checkpoint location, or one that is being removed
            continue
    return max(found)[1] if found else None


def hash_of_plan(location: Path, batch: int) -> str:
    """A hash that is the same whenever Spark repeats a batch, and differs for another batch with the same number. Empty
    if Spark's plan of the batch cannot be read.

    Spark writes the plan once, before it runs the batch, and the plan has the time at which it was made."""
    try:
        return hashlib.sha256((location / "offsets" / str(batch)).read_bytes()).hexdigest()[:32]
    except OSError:
        return ""


def _has_state(location: Path) -> bool:
    """Whether the query keeps state. Its tasks write the state into the checkpoint location before the sink commits."""
    return (location / "state").exists()


def _refuse_shared_state(feeds: Sequence[Feed], location: Path | None) -> None:
    """Raise InvalidOption if a query of a shared group keeps state, or may keep state: partitions move to other
    members, and the state stays in the query's checkpoint location (K4)."""
    groups = [feed.group for feed in feeds if feed.is_shared]
    if groups and location is None:
        raise InvalidOption(
            "shareGroup",
            f"it is unknown whether the query keeps state, and partitions of the shared group {groups[0]} may move "
            "away from it: remove shareGroup, or give a checkpointLocation that is a local folder of this machine",
        )
    if groups and location is not None and _has_state(location):
        raise InvalidOption(
            "shareGroup",
            f"the query keeps state, and partitions of the shared group {groups[0]} may move away from it: remove "
            "shareGroup, and start with a new checkpoint location",
        )


def refuse_overwrite(overwrite: bool) -> None:
    if overwrite:
        raise InvalidOption("mode", "a topic is append-only: write with mode('append')")


def _parts(messages: Iterable[StagedMessage | None]) -> list[Part]:
    """The staged files of all tasks, by topic, without the ends. Raises BatchRefused if two tasks have found different
    topics under one name."""
    parts: dict[str, Part] = {}
    for message in messages:
        for file in () if message is None else message.files:
            part = parts.setdefault(file.topic, Part(file.topic_id, file.topic, [], []))
            if part.topic != file.topic_id:
                raise made_again(file.topic)
            part.files.append(file.name)
    return [parts[name] for name in sorted(parts)]
