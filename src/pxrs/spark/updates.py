"""Writes that may be repeated and count once: output mode `update`, and other writes from `foreachBatch`.

Spark lets a sink in Python only append. So a query in mode `update` gives each of its batches to a function
(`foreachBatch`), which writes it as a batch of that query: staged and published under the query's id and the batch's
number, in one commit with the group's checkpoints, as `writeStream.format("pxrs")` does it. A repeated batch finds that
it is published.

Over Spark Connect, the tasks of such a write do not know the query. Then the caller names the writer (`app_id`): the
write counts once for each name and number, and the group's checkpoints follow after the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter
from pyspark.sql.types import StructType

from pxrs.errors import InvalidOption
from pxrs.spark.options import WriteOptions
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


class NumberedTask(DataSourceArrowWriter):  # type: ignore[misc]
    """Stages rows as the writer of a stream does. It is given the number of the batch, because for Spark this is a
    write without one."""

    def __init__(self, stager: Stager, app: str | None, version: int) -> None:
        self.stager, self.app, self.version = stager, app, version

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        return self.stager.stage(self._query(), self.version, iterator)

    def _query(self) -> str:
        if self.app is not None:
            return f"app-{self.app}"
        query: str | None = TaskContext.get().getLocalProperty("sql.streaming.queryId")
        if query is None:
            raise InvalidOption(
                "txnAppId",
                "missing: the tasks of this write do not know which streaming query they belong to, as over Spark "
                "Connect, or in a thread that foreachBatch has started. Give a name that stays the same when the query "
                "is started again, and that no other query has",
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
        return NumberedTask, (self.stager, self.app, self.version)

    def commit(self, messages: Sequence[StagedMessage | None]) -> None:
        publish_batch(self.options, self.stager.topic, messages, self.version)


def stream_updates(
    rows: DataFrame, *, url: str, topic: str | None = None, registry: str | None = None, app_id: str | None = None
) -> DataStreamWriter:
    """Spark's writer of a query in output mode `update` whose changed rows go to a topic, each change exactly once.

        query = stream_updates(counts, url="data", topic="counts").option("checkpointLocation", ...).start()

    topic:  None if the rows have a column `topic`.
    app_id: a name for this query that stays the same when it is started again with its checkpoint location. Needed over
            Spark Connect. With it, the group's checkpoints follow after each batch instead of together with it.
    Raises InvalidOption."""
    if app_id is None and type(rows).__module__.startswith("pyspark.sql.connect"):
        raise InvalidOption(
            "app_id",
            "missing: over Spark Connect a batch does not know the id of its query. Give a name that stays the same "
            "when the query is started again with its checkpoint location, and that no other query has",
        )
    given = {"url": url, "topic": topic, "registry": registry, "txnAppId": app_id}
    options = {name: value for name, value in given.items() if value is not None}

    def send(batch: DataFrame, number: int) -> None:
        batch.write.format("pxrs").options(**options).option("txnVersion", str(number)).mode("append").save()

    return rows.writeStream.foreachBatch(send).outputMode("update")
