"""`format("pxrs")`: what Spark finds under that name."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from pxrs.errors import InvalidOption
from pxrs.spark.columns import check_schema, row_schema
from pxrs.spark.numbered import NumberedWriter
from pxrs.spark.options import columns_of, read_options, stream_options, write_options
from pxrs.spark.reader import BatchReader, StreamReader
from pxrs.spark.writer import BatchWriter, StreamWriter


class PxrsSource(DataSource):  # type: ignore[misc]
    """A topic as a table (read, readStream, write, writeStream), or a registered source (read). Relative paths in the
    options are resolved against the driver's working directory."""

    _is_planned = False
    """Whether a reader was made of this source in this process. Spark then pickles the source once more, within the
    function that tasks run. The options are left out of that: tasks do not need them, and the addresses of the registry
    and of a table may hold passwords."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "options": {}} if self._is_planned else self.__dict__

    @classmethod
    def name(cls) -> str:
        return "pxrs"

    def schema(self) -> StructType:
        return row_schema(columns_of(self.options))

    def reader(self, schema: StructType) -> BatchReader:
        self._is_planned = True
        options = read_options(self.options)
        check_schema(schema, options.columns)
        return BatchReader(options)

    def streamReader(self, schema: StructType) -> StreamReader:
        self._is_planned = True
        options = stream_options(self.options)
        check_schema(schema, options.columns)
        return StreamReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter | NumberedWriter:
        options = write_options(self.options)
        return (BatchWriter if options.version is None else NumberedWriter)(options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        if overwrite:
            raise InvalidOption("outputMode", "a topic is append-only: 'complete' would send all rows in each batch")
        options = write_options(self.options, is_stream=True)
        return StreamWriter(options, schema, self.options.get("checkpointLocation"))
