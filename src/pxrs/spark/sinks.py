"""Where the rows of a pipeline go: a topic, Parquet files, or any other format that Spark can write a stream to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from pxrs.errors import InvalidPipeline
from pxrs.publishing.selection import Topics
from pxrs.spark.subscription import reader_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

OutputMode = Literal["append", "update", "complete"]
SparkOption = bool | int | float | str | None
"""The types that Spark accepts as values of options of its readers and writers."""

_MESSAGE: Final = ("key", "value", "timestamp", "headers")
_ORIGIN: Final = ("topic", "partition", "offset")
"""Columns that say where a row was read."""
_FILES: Final = ("parquet", "orc", "json", "csv", "text", "xml", "avro")
"""Formats for which Spark writes a stream as files, with a log of the batches in the same folder."""


@dataclass(frozen=True, slots=True)
class HubAddress:
    """The addresses of a hub and of its registry, as options of Spark."""

    url: str
    registry: str | None = field(default=None, repr=False)

    def options(self, topics: str | Topics) -> dict[str, str]:
        """The options of a reader or writer for this hub and this topic; for a reader, also several topics."""
        named = {"topic": topics} if isinstance(topics, str) else reader_options(topics)
        options = {"url": self.url, **named}
        return options if self.registry is None else {**options, "registry": self.registry}


@dataclass(frozen=True, slots=True)
class Sink:
    """Where the rows of a pipeline go. Made from a topic's name, by `parquet` or by `to`."""

    format: str
    options: Mapping[str, SparkOption] = field(default_factory=dict)
    partition_by: tuple[str, ...] = ()
    topic: str | None = None

    def __str__(self) -> str:
        return self.topic or f"{self.format} {self.options.get('path', '')}".rstrip()

    @property
    def folder(self) -> str | None:
        """The folder into which the sink writes files, None if it writes none. A folder takes the files of one stream
        only, because Spark's log in it counts the batches of one stream."""
        if self.format.lower() not in _FILES:
            return None
        return next((str(value) for name, value in self.options.items() if name.lower() == "path"), None)

    def write(self, rows: DataFrame, address: HubAddress) -> None:
        """Append the rows of a batch, which `shaped` has returned."""
        writer = rows.write.format(self.format).options(**self._options(address)).mode("append")
        (writer.partitionBy(*self.partition_by) if self.partition_by else writer).save()

    def stream(self, rows: DataFrame, address: HubAddress, mode: OutputMode) -> DataStreamWriter:
        """Spark's writer of a query of these rows, which `shaped` has returned. The query is not started."""
        if self.topic is not None and mode == "update":
            from pxrs.spark.updates import stream_updates

            return stream_updates(rows, **address.options(self.topic))
        writer = rows.writeStream.format(self.format).options(**self._options(address)).outputMode(mode)
        return writer.partitionBy(*self.partition_by) if self.partition_by else writer

    def shaped(self, rows: DataFrame) -> DataFrame:
        """The rows with the columns that this sink takes."""
        return rows if self.topic is None else as_messages(rows)

    def _options(self, address: HubAddress) -> Mapping[str, SparkOption]:
        return self.options if self.topic is None else address.options(self.topic)


def parquet(path: str, partition_by: str | Sequence[str] = ()) -> Sink:
    """Parquet files in a folder; with `partition_by`, a folder in it for each value of these columns."""
    return to("parquet", partition_by, path=str(path))


def to(format: str, partition_by: str | Sequence[str] = (), **options: SparkOption) -> Sink:
    """Any format that Spark can write a stream to, and its options: to("console"), to("delta", path="...")."""
    if not isinstance(format, str) or not format:
        raise InvalidPipeline(f"to: format is {format!r}; give the name of one of Spark's formats, such as 'console'")
    if format.lower() == "pxrs":  # Spark ignores the case
        raise InvalidPipeline("to write to a topic, give its name as the sink: sink='totals'")
    columns = (partition_by,) if isinstance(partition_by, str) else partition_by
    if not isinstance(columns, Sequence) or not all(isinstance(column, str) for column in columns):
        raise InvalidPipeline(f"to: partition_by is {partition_by!r}; give the name of a column, or several")
    columns = tuple(columns)
    return Sink(format, options, columns)


def as_messages(rows: DataFrame) -> DataFrame:
    """Rows with the columns that a topic takes.

    Rows with a column `value` are messages already: key, value, timestamp and headers are kept; topic, partition and
    offset, which say where a row was read, are left out. Without that column, all columns but `key` become a JSON
    object in `value`.
    """
    from pyspark.sql import functions as F

    names = rows.columns
    if "value" in names:
        unknown = [name for name in names if name not in (*_MESSAGE, *_ORIGIN)]
        if unknown:
            raise InvalidPipeline(
                f"there is a column value and also {', '.join(unknown)}: a message has {', '.join(_MESSAGE)}. "
                "Drop them, or rename value: without it, all columns become JSON"
            )
        return rows.select(*[name for name in names if name in _MESSAGE])
    fields = [F.col(_quoted(name)) for name in names if name != "key"]
    if not fields:
        raise InvalidPipeline("there are no columns for the value of a message")
    value = F.to_json(F.struct(*fields)).alias("value")
    if "key" not in names:
        return rows.select(value)
    is_bytes = dict(rows.dtypes)["key"] == "binary"
    return rows.select(F.col("key") if is_bytes else F.col("key").cast("string").alias("key"), value)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
