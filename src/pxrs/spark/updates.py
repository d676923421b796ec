"""Output mode `update` with a topic as the sink: rows that have changed are sent again, each change exactly once.

Spark lets a sink in Python only append. So a query in this mode gives each of its batches to a function
(`foreachBatch`), which writes it as a batch of that query: staged and published under the query's id and the batch's
number, in one commit with the group's checkpoints, as `writeStream.format("pxrs")` does it. A repeated batch finds that
it is published.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter
from pyspark.sql.types import StructType

from pxrs.spark.options import Where, write_options
from pxrs.spark.writer import (
    DriversWriter,
    StagedMessage,
    Stager,
    publish_batch,
    refuse_overwrite,
    refused_commit,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_BATCH: Final = "batch"


class UpdateSink(DataSource):  # type: ignore[misc]
    """One batch of a streaming query, written from `foreachBatch`."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        return "pxrs-update"

    def writer(self, schema: StructType, overwrite: bool) -> UpdateWriter:
        refuse_overwrite(overwrite)
        options = dict(self.options)
        batch = int(options.pop(_BATCH))
        return UpdateWriter(write_options(options), schema, batch)


class UpdateTask(DataSourceArrowWriter):  # type: ignore[misc]
    """Stages rows as the writer of a stream does. It is given the number of the batch, because for Spark this is a
    write without one."""

    def __init__(self, stager: Stager, batch: int) -> None:
        self.stager, self.batch = stager, batch

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        query = TaskContext.get().getLocalProperty("sql.streaming.queryId")
        return self.stager.stage(query, self.batch, iterator)

    def commit(self, messages: Sequence[StagedMessage | None]) -> None:
        raise refused_commit()

    def abort(self, messages: Sequence[StagedMessage | None]) -> None:
        """Undo nothing: the commit may have taken effect."""


class UpdateWriter(DriversWriter, UpdateTask):
    """Publishes a batch as the writer of a stream does."""

    def __init__(self, where: Where, schema: StructType, batch: int) -> None:
        super().__init__(Stager.of(where, schema), batch)
        self.where = where

    def for_tasks(self) -> tuple[type[object], tuple[object, ...]]:
        return UpdateTask, (self.stager, self.batch)

    def commit(self, messages: Sequence[StagedMessage | None]) -> None:
        publish_batch(self.where, self.stager.topic.id, messages, self.batch)


def stream_updates(rows: DataFrame, options: Mapping[str, str]) -> DataStreamWriter:
    """Spark's writer of a query that sends its changed rows to a topic, for output mode `update`."""
    rows.sparkSession.dataSource.register(UpdateSink)

    def send(batch: DataFrame, number: int) -> None:
        batch.write.format(UpdateSink.name()).options(**options).option(_BATCH, str(number)).mode("append").save()

    return rows.writeStream.foreachBatch(send)
