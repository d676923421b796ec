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

from pxrs.errors import InvalidOption
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


def check_schema(given: StructType, columns: Sequence[str]) -> None:
    """Raise InvalidOption if the schema that Spark will use is not that of these columns. It differs if the user has
    called `.schema(...)` with another one; every task would then fail."""
    ours = row_schema(columns)
    if [(f.name, f.dataType, f.nullable) for f in given] != [(f.name, f.dataType, f.nullable) for f in ours]:
        raise InvalidOption(
            "schema",
            f"the columns that are read are {_ddl(ours)}, but the schema is {_ddl(given)}. Remove the schema, choose "
            "columns with the option columns, and change types with cast",
        )


def arrow_schema(columns: Sequence[str]) -> pa.Schema:
    """These columns as the schema of the record batches that tasks yield."""
    return pa.schema([_IN_ARROW[name] for name in columns])


def _ddl(schema: StructType) -> str:
    """The columns in SQL, such as "key BINARY, partition INT NOT NULL"."""
    types = {field.name: field.dataType.simpleString().upper() for field in schema}
    return ", ".join(f"{field.name} {types[field.name]}{'' if field.nullable else ' NOT NULL'}" for field in schema)
