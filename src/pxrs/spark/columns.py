"""The columns of a message in Spark and in Arrow. Spark accepts a batch only if its Arrow schema is exactly that of the
columns, in order and nullability too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pxrs.log.batch import SCHEMA
from pxrs.spark.given import HEADERS, TOPIC

BATCH_ROWS: Final = 10_000
"""How many rows a batch for Spark has at most. Spark is fastest with batches of about this size."""
_HEADER: Final = StructType([StructField("key", StringType(), False), StructField("value", BinaryType())])
_IN_SPARK: Final = {
    "key": StructField("key", BinaryType()),
    "value": StructField("value", BinaryType()),
    TOPIC: StructField(TOPIC, StringType(), False),
    "partition": StructField("partition", IntegerType(), False),
    "offset": StructField("offset", LongType(), False),
    "timestamp": StructField("timestamp", TimestampType(), False),
    HEADERS: StructField(HEADERS, ArrayType(_HEADER, False)),
}
_IN_ARROW: Final = {
    **{field.name: field for field in SCHEMA},
    TOPIC: pa.field(TOPIC, pa.string(), False),
    "partition": pa.field("partition", pa.int32(), False),
    "offset": pa.field("offset", pa.int64(), False),
}


def row_schema(columns: Sequence[str]) -> StructType:
    """These columns as the schema of a data source in Spark."""
    return StructType([_IN_SPARK[name] for name in columns])


def arrow_schema(columns: Sequence[str]) -> pa.Schema:
    """These columns as the schema of the record batches that tasks yield."""
    return pa.schema([_IN_ARROW[name] for name in columns])
