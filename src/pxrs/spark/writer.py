"""Writing a DataFrame to a topic: tasks stage their rows, the driver publishes them in one commit (K1).

Columns as `send_batch` takes them: value, and if there key, timestamp, headers and partition.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from pxrs.clock import boot_id
from pxrs.errors import BatchRefused, InvalidOption, InvalidRecord
from pxrs.hub import Hub
from pxrs.model import Topic
from pxrs.spark.manifest import Publisher
from pxrs.spark.options import Where
from pxrs.spark.reader import check_machine, open_hub, run_of
from pxrs.spark.staging import Feed, Staged, Staging

_COLUMNS = ("key", "value", "timestamp", "headers", "partition")


@dataclass(frozen=True)
class StagedMessage(WriterCommitMessage):  # type: ignore[misc]
    """What a task tells the driver."""

    query: str
    staged: Staged
    run: str
    """Which start of the query it is of."""


class _Writer:
    def __init__(self, where: Where, schema: StructType) -> None:
        _check_columns(schema)
        self.where, self.machine = where, boot_id()
        with open_hub(where) as hub:
            self.topic: Topic = hub.topic(where.topic).topic

    def stage(self, query: str, batch: int, rows: Iterator[pa.RecordBatch]) -> StagedMessage:
        check_machine(self.machine)
        context = TaskContext.get()
        staged = Staging(self.where.url).stage(self.topic, query, batch, context.partitionId(), rows)
        return StagedMessage(query, staged, run_of(context))

    def check_topic(self, hub: Hub) -> None:
        if hub.topic(self.where.topic).id != self.topic.id:
            raise BatchRefused(f"the topic {self.where.topic} was deleted and made again while rows for it were staged")


class BatchWriter(_Writer, DataSourceArrowWriter):  # type: ignore[misc]
    """`df.write`: all of it becomes part of the topic, or nothing."""

    def __init__(self, where: Where, schema: StructType, overwrite: bool) -> None:
        refuse_overwrite(overwrite)
        super().__init__(where, schema)
        self._job = f"job-{uuid.uuid4().hex}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        return self.stage(self._job, 0, iterator)

    def commit(self, messages: Sequence[StagedMessage | None]) -> None:
        with open_hub(self.where) as hub:
            self.check_topic(hub)
            publisher = Publisher(hub.registry, hub.topic(self.where.topic).log, Staging(self.where.url))
            publisher.finish_others()
            publisher.publish(self._job, 0, _files(messages))
            publisher.forget(self._job)

    def abort(self, messages: Sequence[StagedMessage | None]) -> None:
        """Nothing is undone: the commit may have happened. What was staged for nothing is collected later."""


class StreamWriter(_Writer, DataSourceStreamArrowWriter):  # type: ignore[misc]
    """`df.writeStream`: each batch once, however often it is tried."""

    def __init__(self, where: Where, schema: StructType, checkpoints: str | None = None) -> None:
        super().__init__(where, schema)
        self._checkpoints = checkpoints

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        context = TaskContext.get()
        query = context.getLocalProperty("sql.streaming.queryId")
        return self.stage(query, int(context.getLocalProperty("streaming.sql.batchId")), iterator)

    def commit(self, messages: Sequence[StagedMessage | None], batchId: int) -> None:
        queries = {(message.query, message.run) for message in messages if message is not None}
        if len(queries) != 1:
            raise BatchRefused(f"batch {batchId} is of {len(queries)} queries")
        ((query, run),) = queries
        feeds = Staging(self.where.url).feeds(query, batchId, run)
        self._refuse_shared_state(feeds)
        _publisher(self.where, self.topic.id).publish(query, batchId, _files(messages), feeds)

    def _refuse_shared_state(self, feeds: Sequence[Feed]) -> None:
        """Partitions of a shared group move, a query's state does not (K4). Spark keeps it beside its checkpoints."""
        groups = [feed.group for feed in feeds if feed.is_shared]
        if groups and self._checkpoints and Path(self._checkpoints.removeprefix("file:"), "state").exists():
            raise InvalidOption(
                "shareGroup",
                f"the query keeps state, and partitions of the shared group {groups[0]} may move away from it: leave "
                "shareGroup out, and start with a new checkpoint location",
            )

    def abort(self, messages: Sequence[StagedMessage | None], batchId: int) -> None:
        """Nothing is undone: Spark calls this also when the commit took effect and its answer was lost."""


@functools.lru_cache(maxsize=4)
def _publisher(where: Where, topic_id: str) -> Publisher:
    """Kept between the batches, in the driver's process for commits. The first one cleans up after those who died."""
    hub = open_hub(where)
    publisher = Publisher(hub.registry, hub.topic(where.topic).log, Staging(where.url))
    publisher.finish_others()
    return publisher


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
