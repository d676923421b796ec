"""Writing a DataFrame to a topic: tasks stage their rows, and the driver publishes them in one commit (K1).

The columns are those of `Producer.send_batch`: value, and optionally key, timestamp, headers and partition.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, SupportsIndex

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from pxrs.clock import boot_id
from pxrs.errors import BatchRefused, HubMoved, InvalidOption, InvalidRecord, LogError, RegistryReplaced
from pxrs.hub import Hub
from pxrs.model import Topic
from pxrs.publishing.feed import Feed
from pxrs.publishing.manifest import JOB, PATIENCE_S, Publisher, forget_deleted_topics
from pxrs.publishing.outage import UNREACHABLE, ride_out, with_advice
from pxrs.publishing.staging.contract import Staged, TaskStaging
from pxrs.publishing.staging.directory import DirectoryStaging
from pxrs.spark.names import topic_to_write
from pxrs.spark.options import Where
from pxrs.spark.reader import open_hub
from pxrs.spark.tasks import check_machine, run_of
from pxrs.topics import TopicHandle

_logger = logging.getLogger(__name__)

_COLUMNS: Final = ("key", "value", "timestamp", "headers", "partition")
_LOCATIONS: Final = "spark.sql.streaming.checkpointLocation"


@dataclass(frozen=True)
class StagedMessage(WriterCommitMessage):  # type: ignore[misc]
    """What a task reports to the driver."""

    query: str
    staged: Staged
    run: str
    """The id of this start of the query (`run_of`)."""
    locations: str | None = None
    """The session's folder for the checkpoint locations of queries that were started without one."""


@dataclass(frozen=True)
class Stager:
    """What a task needs to stage rows for a topic. Spark sends this object to every executor, so it does not contain
    the address of the registry, which may contain a password."""

    staging: TaskStaging
    topic: Topic
    machine: str

    @classmethod
    def of(cls, where: Where, schema: StructType) -> Stager:
        _check_columns(schema)
        with open_hub(where) as hub:
            handle = topic_to_write(hub, where.topic)
            handle.log.check_writable()  # in the driver, so that one error is raised and not one for each task
            staging = DirectoryStaging(where.url)
            staging.check_writable()
            return cls(staging, handle.topic, boot_id())

    def stage(self, query: str, batch: int, rows: Iterator[pa.RecordBatch]) -> StagedMessage:
        check_machine(self.machine)
        context = TaskContext.get()
        staged = self.staging.stage(self.topic, query, batch, context.partitionId(), rows)
        return StagedMessage(query, staged, run_of(context))


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
    """`df.write`: all rows become part of the topic, or none."""

    def __init__(self, where: Where, schema: StructType, overwrite: bool) -> None:
        refuse_overwrite(overwrite)
        super().__init__(Stager.of(where, schema), f"{JOB}{uuid.uuid4().hex}")
        self.where = where

    def for_tasks(self) -> tuple[type[object], tuple[object, ...]]:
        return BatchTask, (self.stager, self.job)

    def commit(self, messages: Sequence[StagedMessage | None]) -> None:
        with open_hub(self.where) as hub:
            publisher = _first_publisher(hub, self.where, self.stager.topic.id)
            publisher.publish(self.job, 0, _files(messages))
            publisher.forget(self.job)


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

    def __init__(self, where: Where, schema: StructType, checkpoints: str | None = None) -> None:
        super().__init__(Stager.of(where, schema))
        self.where, self._checkpoints = where, checkpoints

    def __reduce__(self) -> tuple[type[object], tuple[object, ...]]:
        return StreamTask, (self.stager,)

    def commit(self, messages: Sequence[StagedMessage | None], batchId: int) -> None:
        publish_batch(self.where, self.stager.topic.id, messages, batchId, self._checkpoints)


def publish_batch(
    where: Where,
    topic_id: str,
    messages: Sequence[StagedMessage | None],
    batch: int,
    checkpoints: str | None = None,
) -> None:
    """Make a batch of a streaming query part of the topic; called in the driver. checkpoints: the query's checkpoint
    location, if it was started with one."""
    reported = [message for message in messages if message is not None]
    queries = {(message.query, message.run) for message in reported}
    if len(queries) != 1:
        raise BatchRefused(f"batch {batch} is of {len(queries)} queries")
    ((query, run),) = queries
    feeds = DirectoryStaging(where.url).feeds(query, batch, run)
    location = find_location(query, checkpoints, reported[0].locations)
    _refuse_shared_state(feeds, location)
    planned = "" if location is None else hash_of_plan(location, batch)
    has_state = None if location is None else _has_state(location)
    try:
        _publishers.get(where, topic_id).publish(query, batch, _files(messages), feeds, planned, has_state)
    except RegistryReplaced:  # the next attempt opens the registry that is there now
        _publishers.forget(where)
        raise
    except UNREACHABLE as error:
        raise with_advice(
            error,
            f"batch {batch} of query {query}: the registry could not be reached: {error}. Start the query again: the "
            "batch is published once, however often that is tried",
        ) from error


def refused_commit() -> BatchRefused:
    return BatchRefused(
        "a task's writer was asked to commit; it has no address of the registry. Nothing was written: this version of "
        "PySpark pickles writers in another order than those that pxrs supports"
    )


class Publishers:
    """Open hubs, each with the publishers of its topics. The process that commits keeps them between batches.

    At most `hubs_max` hubs are open; beyond that, the least recently used one is closed."""

    def __init__(self, hubs_max: int = 8) -> None:
        self._hubs_max = hubs_max
        self._hubs: dict[tuple[str, str | None], tuple[Hub, dict[str, Publisher]]] = {}

    def get(self, where: Where, topic_id: str) -> Publisher:
        """The publisher of a topic. A new one first finishes the unfinished manifests of other queries. Raises
        UnknownTopic; BatchRefused if another topic has the name now."""
        place = where.url, where.registry
        hub, publishers = self._hubs.pop(place) if place in self._hubs else (open_hub(where), {})
        self._hubs[place] = hub, publishers  # put at the end: the first entry is the least recently used one
        if len(self._hubs) > self._hubs_max:
            self._close(next(iter(self._hubs)))
        try:
            _find_topic(hub, where.topic, topic_id)
        except HubMoved:  # the next attempt opens the hub that is there now
            self.forget(where)
            raise
        publisher = publishers.get(where.topic)
        if publisher is None or publisher.topic_id != topic_id:
            publisher = publishers[where.topic] = _first_publisher(hub, where, topic_id)
        return publisher

    def forget(self, where: Where) -> None:
        """Close the hub, so that the next batch opens it and its registry again."""
        place = where.url, where.registry
        if place in self._hubs:
            self._close(place)

    def close(self) -> None:
        for place in list(self._hubs):
            self._close(place)

    def _close(self, place: tuple[str, str | None]) -> None:
        hub, _ = self._hubs.pop(place)
        hub.close()


_publishers: Final = Publishers()


def _find_topic(hub: Hub, name: str, topic_id: str) -> TopicHandle:
    """The topic for which rows were staged. Raises UnknownTopic; BatchRefused if another topic has its name now."""
    topic = hub.topic(name)
    if topic.id != topic_id:
        raise BatchRefused(
            f"the topic {name} was deleted and made again while rows for it were staged. Nothing of them was written. "
            "Start the query again: it goes on with this batch, in the new topic"
        )
    return topic


def _first_publisher(hub: Hub, where: Where, topic_id: str) -> Publisher:
    """A publisher that has finished the unfinished manifests of other queries, and has removed what was staged for
    deleted topics. Raises WrongRegistry: another registry does not have the manifests of this hub. If the hub has no
    registry on record, this one is recorded: a process with another registry would take the staged files of a batch
    for abandoned ones, and remove them."""
    hub.join_registry()
    staging = DirectoryStaging(where.url)
    publisher = Publisher(hub.registry, _find_topic(hub, where.topic, topic_id).log, staging)
    publisher.finish_others()
    try:
        damaged = hub.damaged_topics()
        topics = {each.id for each in hub.topics()} | {each.id for each in damaged if each.id is not None}
    except (LogError, OSError) as error:  # an error of another topic must not stop this one
        _logger.warning("what was staged for deleted topics is not removed: %s", error)
        return publisher
    if nameless := [each.name for each in damaged if each.id is None]:
        _logger.warning(
            "what was staged for deleted topics is not removed: the id of topic %s is not known", nameless[0]
        )
        return publisher
    ride_out(lambda: forget_deleted_topics(hub.registry, staging, topics), PATIENCE_S, errors=UNREACHABLE)
    return publisher


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
            f"whether the query keeps state is not known, and partitions of the shared group {groups[0]} may move away "
            "from it: leave shareGroup out, or give a checkpointLocation that is a folder of this machine",
        )
    if groups and location is not None and _has_state(location):
        raise InvalidOption(
            "shareGroup",
            f"the query keeps state, and partitions of the shared group {groups[0]} may move away from it: leave "
            "shareGroup out, and start with a new checkpoint location",
        )


def refuse_overwrite(overwrite: bool) -> None:
    if overwrite:
        raise InvalidOption("mode", "a topic is appended to: write with mode('append')")


def _files(messages: Sequence[StagedMessage | None]) -> list[str]:
    return [message.staged.name for message in messages if message is not None and message.staged.name is not None]


def _check_columns(schema: StructType) -> None:
    unknown = [name for name in schema.fieldNames() if name not in _COLUMNS]
    if unknown or "value" not in schema.fieldNames():
        raise InvalidRecord(
            f"the columns are {', '.join(schema.fieldNames())}; there must be value, and there may be "
            f"{', '.join(name for name in _COLUMNS if name != 'value')}. Make one with to_json(struct(...)) AS value"
        )
