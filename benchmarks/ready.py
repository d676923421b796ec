"""A Python data source that yields one prepared batch again and again: the least that a Python source costs in Spark.

Everything that remains is the transfer of the rows from a Python worker into the JVM. `benchmarks.spark` compares a
topic with it. In a module of its own, because Spark's workers import it by name.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, MutableMapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from pxrs.spark.columns import arrow_schema, row_schema


class ReadySource(DataSource):  # type: ignore[misc]
    """Options: `rows` in all, `tasks`, `batch` rows in a batch, `valueBytes`, and `columns` with commas between."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        return "ready"

    def schema(self) -> StructType:
        return row_schema(self.options["columns"].split(","))

    def reader(self, schema: StructType) -> ReadyReader:
        return ReadyReader(self.options)


class ReadyReader(DataSourceReader):  # type: ignore[misc]
    def __init__(self, options: MutableMapping[str, str]) -> None:
        self._columns = tuple(options["columns"].split(","))
        self._batch, self._value_bytes = int(options["batch"]), int(options["valueBytes"])
        self._tasks, self._rows = int(options["tasks"]), int(options["rows"])

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(self._rows // self._tasks // self._batch) for _ in range(self._tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        batch = _prepared(self._columns, self._batch, self._value_bytes)
        for _ in range(partition.value):
            yield batch


@functools.cache
def _prepared(columns: tuple[str, ...], rows: int, value_bytes: int) -> pa.RecordBatch:
    """A batch of messages as a topic has them. Made once in each worker."""
    source = random.Random(7)
    schema = arrow_schema(columns)
    values = {
        "key": [b"key-%d" % (number % 1_000) for number in range(rows)],
        "value": [source.randbytes(value_bytes) for _ in range(rows)],
        "partition": [0] * rows,
        "offset": list(range(rows)),
        "timestamp": list(range(1_700_000_000_000_000, 1_700_000_000_000_000 + rows)),
    }
    arrays = [pa.array(values[field.name], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
