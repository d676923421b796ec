"""Writes that may be repeated and count once: `df.write` with `txnVersion`, as from `foreachBatch`.

The write is staged and published as a batch of a streaming query, under the query's id and the number of the batch, in
one commit with the group's checkpoints. A repeated write finds that it is published. With `txnAppId` the id is one that
the caller gives. Then the write moves no checkpoints, because it may be one of several that a batch makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter
from pyspark.sql.types import StructType

from pxrs.errors import InvalidOption
from pxrs.publishing.records import APP
from pxrs.spark.options import WriteOptions
from pxrs.spark.writer import (
    DriversWriter,
    StagedMessage,
    Stager,
    end_tokens_of,
    publish_batch,
    refuse_overwrite,
    refused_commit,
)


class NumberedTask(DataSourceArrowWriter):  # type: ignore[misc]
    """Stages rows as the writer of a stream does. The number of the batch is a field, because Spark passes none to a
    task of `df.write`."""

    def __init__(self, stager: Stager, app: str | None, version: int) -> None:
        self.stager, self.app, self.version = stager, app, version

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        return self.stager.stage(self._query(), self.version, iterator)

    def _query(self) -> str:
        if self.app is not None:
            return f"{APP}{self.app}"
        query: str | None = TaskContext.get().getLocalProperty("sql.streaming.queryId")
        if query is None:
            raise InvalidOption(
                "txnAppId",
                "missing: Spark did not pass the id of a streaming query to the tasks of this write, as happens over "
                "Spark Connect, or in a thread that foreachBatch has started. Give a name that stays the same when the "
                "query is restarted, and that no other query has",
            )
        return query

    def commit(self, messages: Sequence[StagedMessage | None]) -> None:
        raise refused_commit()

    def abort(self, messages: Sequence[StagedMessage | None]) -> None:
        """Undo nothing: the commit may have taken effect."""


class NumberedWriter(DriversWriter, NumberedTask):
    """`df.write` with `txnVersion`: publishes a batch as the writer of a stream does."""

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        refuse_overwrite(overwrite)
        assert options.version is not None
        super().__init__(Stager.of(options, schema), options.app, options.version)
        self.options = options

    def for_tasks(self) -> tuple[type[object], tuple[object, ...]]:
        return NumberedTask, (self.stager.for_tasks(self.options), self.app, self.version)

    def commit(self, messages: Sequence[StagedMessage | None]) -> None:
        publish_batch(self.options, self.stager.topic, messages, self.version)
        end_tokens_of(self.options, messages)

    def abort(self, messages: Sequence[StagedMessage | None]) -> None:
        end_tokens_of(self.options, messages)
