"""Rows that change, told to a topic again each time: output mode `update`, exactly once.

Spark lets a sink in Python append, and no more. So a query in this mode hands each of its batches to a function, which
writes it as a batch of that query: staged and published under the query's id and the batch's number, in one commit with
the group's checkpoints, as `writeStream.format("pxrs")` does it. A batch that is repeated finds that it is published.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter
from pyspark.sql.types import StructType

from pxrs.spark.options import Where, write_options
from pxrs.spark.writer import StagedMessage, StreamWriter, refuse_overwrite

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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


class UpdateWriter(DataSourceArrowWriter):  # type: ignore[misc]
    """Does as the writer of a stream does, with the batch's number from outside."""

    def __init__(self, where: Where, schema: StructType, batch: int) -> None:
        self._stream, self._batch = StreamWriter(where, schema), batch

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        query = TaskContext.get().getLocalProperty("sql.streaming.queryId")
        return self._stream.stage(query, self._batch, iterator)

    def commit(self, messages: Sequence[StagedMessage | None]) -> None:
        self._stream.commit(messages, self._batch)

    def abort(self, messages: Sequence[StagedMessage | None]) -> None:
        """Nothing is undone: the commit may have happened."""


def stream_updates(rows: DataFrame, options: Mapping[str, Any]) -> Any:
    """Spark's writer of a query that sends its changed rows to a topic, for output mode `update`."""
    rows.sparkSession.dataSource.register(UpdateSink)

    def send(batch: DataFrame, number: int) -> None:
        batch.write.format(UpdateSink.name()).options(**options).option(_BATCH, str(number)).mode("append").save()

    return rows.writeStream.foreachBatch(send)
