"""The columns that the sink takes, checked when Spark plans a write: a wrong one is one error, and no task starts.

The columns are those of Kafka's sink (topic, key, value, headers, partition), and `timestamp`. Rows of pxrs's own
source can be written as they are: `offset` is the source's, and is ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    CharType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
    VarcharType,
)

from pxrs.errors import InvalidOption, InvalidRecord
from pxrs.publishing.staging.routing import TOPIC

_TEXT: Final = (StringType, VarcharType, CharType)
_WHOLE: Final = (ByteType, ShortType, IntegerType, LongType)


class _Column(NamedTuple):
    is_right: Callable[[DataType], bool]
    wanted: str
    cast: str
    """The expression in SQL that makes such a column of one of another type."""


def _is_bytes(given: DataType) -> bool:
    return isinstance(given, (BinaryType, *_TEXT))


def _are_headers(given: DataType) -> bool:
    if isinstance(given, MapType):
        return isinstance(given.keyType, _TEXT) and _is_bytes(given.valueType)
    if not isinstance(given, ArrayType) or not isinstance(given.elementType, StructType):
        return False
    fields = {field.name: field.dataType for field in given.elementType.fields}
    return set(fields) == {"key", "value"} and all(_is_bytes(kind) for kind in fields.values())


_COLUMNS: Final = {
    "key": _Column(_is_bytes, "binary or string", "CAST(key AS STRING)"),
    "value": _Column(_is_bytes, "binary or string", "CAST(value AS STRING)"),
    "timestamp": _Column(lambda given: isinstance(given, TimestampType), "timestamp", "CAST(timestamp AS TIMESTAMP)"),
    "headers": _Column(
        _are_headers,
        "array<struct<key:string,value:binary>> or map<string,binary>",
        "array(struct('name' AS key, CAST(x AS BINARY) AS value))",
    ),
    "partition": _Column(lambda given: isinstance(given, _WHOLE), "int", "CAST(partition AS INT)"),
    TOPIC: _Column(lambda given: isinstance(given, _TEXT), "string", "CAST(topic AS STRING)"),
    "offset": _Column(lambda given: isinstance(given, _WHOLE), "bigint, and is ignored", "CAST(offset AS BIGINT)"),
}
_NESTED: Final = (ArrayType, MapType, StructType)


def check_columns(schema: StructType, topic: str | None) -> tuple[str, ...]:
    """The columns that are not written: `offset`, and `topic` if the option `topic` is given, as in Kafka's sink.

    topic: the option `topic`. Raises InvalidRecord, naming the column; InvalidOption if no topic is given."""
    names = schema.fieldNames()
    twice = [name for name in names if names.count(name) > 1]
    unknown = [name for name in names if name not in _COLUMNS]
    if unknown or twice or "value" not in names:
        raise InvalidRecord(
            f"the columns are {', '.join(names)}; value is required, and "
            f"{', '.join(name for name in _COLUMNS if name != 'value')} are optional, each at most once. Create value "
            "with to_json(struct(...)) AS value"
        )
    for field in schema.fields:
        column, given = _COLUMNS[field.name], field.dataType
        if not isinstance(given, NullType) and not column.is_right(given):
            is_nested = isinstance(given, _NESTED) and column.is_right(StringType()) and field.name != TOPIC
            cast = f"to_json({field.name})" if is_nested else column.cast
            raise InvalidRecord(
                f"the column {field.name} is {given.simpleString()}, but must be {column.wanted}: use {cast} AS "
                f"{field.name}"
            )
    if topic is None and TOPIC not in names:
        raise InvalidOption(
            "topic", "missing; give the name of the topic, or a column topic that names the topic of each row"
        )
    return tuple(name for name in names if name == "offset" or (name == TOPIC and topic is not None))
