"""Dead letters: messages as they were stored, with two more headers, for the reason and the origin.

Messages that do not parse and messages that a pipeline's function rejects become dead letters. So that a row can become
a dead letter after its columns have changed, the query of the dead letters gives each row one more column, `MESSAGE`, a
struct of the whole message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

REASON_HEADER: Final = "pxrs-reason"
ORIGIN_HEADER: Final = "pxrs-origin"
MESSAGE: Final = "_pxrs_message"
"""A column of the query of the dead letters: key, value, timestamp, headers and origin of the message."""
REASON: Final = "_pxrs_reason"
"""Why a row is bad; null for a good row."""
_HEADERS: Final = "ARRAY<STRUCT<key: STRING, value: BINARY>>"
_TYPES: Final = {"key": "BINARY", "value": "BINARY", "timestamp": "TIMESTAMP", "headers": _HEADERS}


def with_message(messages: DataFrame, topic: str, columns: Sequence[str]) -> DataFrame:
    """These columns of the messages, and the column `MESSAGE`. topic: the name of the topic, for messages without a
    column `topic`."""
    from pyspark.sql import functions as F

    there = messages.columns
    fields = [(F.col(name) if name in there else F.lit(None)).cast(kind).alias(name) for name, kind in _TYPES.items()]
    whole = F.struct(*fields, origin(there, topic).alias("origin"))
    return messages.select(*columns, whole.alias(MESSAGE))


def dead_letters(bad: DataFrame) -> DataFrame:
    """Rows with the columns `MESSAGE` and `REASON` as messages for the dead-letter topic."""
    from pyspark.sql import functions as F

    message = F.col(MESSAGE)
    added = F.array(_header(REASON_HEADER, F.col(REASON)), _header(ORIGIN_HEADER, message["origin"])).cast(_HEADERS)
    headers = F.concat(F.coalesce(message["headers"], F.array().cast(_HEADERS)), added)
    kept = [message[name].alias(name) for name in ("key", "value", "timestamp")]
    return bad.select(*kept, headers.alias("headers"))


def origin(columns: Sequence[str], topic: str) -> Column:
    """Where a message is stored, such as `orders/3 offset 17`. A missing partition or offset is shown as `?`.

    columns: the columns that the row has. topic: the name of the topic, for rows without a column `topic`."""
    from pyspark.sql import functions as F

    name = F.col("topic") if "topic" in columns else F.lit(topic)
    number, offset = (F.col(each).cast("string") if each in columns else F.lit("?") for each in ("partition", "offset"))
    return F.concat(name, F.lit("/"), number, F.lit(" offset "), offset)


def _header(name: str, text: Column) -> Any:
    from pyspark.sql import functions as F

    return F.struct(F.lit(name).alias("key"), text.cast("binary").alias("value"))
