"""Pipelines: functions from a topic's rows to rows, with their sources and sinks. Spark runs them.

    @pipeline(source="orders", sink="totals", parse=parse_json("account STRING NOT NULL, amount DOUBLE"))
    def totals(orders): ...

The same function runs as a stream (`pxrs pipeline run FILE`), over history (`totals.over(messages)`), and in a test
(`totals(rows)`). pyspark is imported only when there are rows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from pxrs.errors import InvalidPipeline
from pxrs.group.records import GROUP_NAME
from pxrs.handler import fault_of
from pxrs.spark.parsing import ParseJson

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

OutputMode = Literal["append", "update", "complete"]
Function = Callable[["DataFrame"], "DataFrame"]
SparkOption = bool | int | float | str | None
"""The types that Spark accepts as values of options of its readers and writers."""

DEAD_LETTERS: Final = ".dead-letters"
"""Appended to the name and the group of a pipeline for the query that reads its bad rows."""
_OUTPUT_MODES: Final = ("append", "update", "complete")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}")
_OURS: Final = ("url", "registry", "topic", "subscribe", "group", "sharegroup", "endingoffsets", "endingtimestamp")
_SHAPE: Final = ("includeheaders", "columns")
"""Options that decide which columns there are, for a stream and for a batch over its history."""
_MESSAGE: Final = ("key", "value", "timestamp", "headers")
_FILES: Final = ("parquet", "orc", "json", "csv", "text", "xml", "avro")
"""Formats for which Spark writes a stream as files, with a log of the batches in the same folder."""
_SCHEME: Final = re.compile(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]*:/")
_collected: ContextVar[list[Pipeline] | None] = ContextVar("_collected", default=None)


@dataclass(frozen=True, slots=True)
class HubAddress:
    """The addresses of a hub and of its registry, as options of Spark."""

    url: str
    registry: str | None = field(default=None, repr=False)

    def options(self, topic: str) -> dict[str, str]:
        options = {"url": self.url, "topic": topic}
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
    if format == "pxrs":
        raise InvalidPipeline("a sink that is a topic is given by its name, sink='totals'")
    if not isinstance(format, str) or not format:
        raise InvalidPipeline(f"to: format is {format!r}; give the name of one of Spark's, such as 'console'")
    columns = (partition_by,) if isinstance(partition_by, str) else partition_by
    if not isinstance(columns, Sequence) or not all(isinstance(column, str) for column in columns):
        raise InvalidPipeline(f"to: partition_by is {partition_by!r}; give the name of a column, or several")
    columns = tuple(columns)
    return Sink(format, options, columns)


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """A function, what it reads, and where its rows go. Calling the pipeline calls the function."""

    function: Function
    name: str
    source: str
    sink: Sink
    group: str
    parse: ParseJson | None
    dead_letters: str | None
    output_mode: OutputMode
    every: str | None
    share_group: bool
    options: Mapping[str, SparkOption]

    def __call__(self, rows: DataFrame) -> DataFrame:
        return self.function(rows)

    def over(self, messages: DataFrame) -> DataFrame:
        """The result of the function for these messages after the parse step. messages: a stream of the source, or a
        batch of its history."""
        from pyspark.sql import DataFrame

        rows = messages
        if self.parse is not None:
            rows = self.parse.good(messages, self.source, self.dead_letters is not None)
        result = self.function(rows)
        if not isinstance(result, DataFrame):
            raise InvalidPipeline(f"{self.name} returned {type(result).__name__}, and not a DataFrame")
        if result.isStreaming != messages.isStreaming:
            raise InvalidPipeline(f"{self.name} returned rows that do not come from its source")
        return result

    def bad(self, messages: DataFrame) -> DataFrame:
        """The messages that do not parse, with the reason, as they go to the dead-letter topic."""
        if self.parse is None:
            raise InvalidPipeline(f"{self.name} has no parse step")
        return self.parse.bad(messages, self.source)

    def messages(self, spark: SparkSession, address: HubAddress, **options: SparkOption) -> DataFrame:
        """A batch of what the source holds now, for `over`. options: more options of `spark.read`, such as the first
        and the last time."""
        shape = {name: value for name, value in self.options.items() if name.lower() in _SHAPE}
        reader = spark.read.format("pxrs").options(**{**shape, **options})
        return reader.options(**address.options(self.source)).load()

    def topics(self) -> list[str]:
        """The topics that the pipeline reads and writes."""
        named = (self.source, self.sink.topic, self.dead_letters)
        return list(dict.fromkeys(topic for topic in named if topic is not None))

    def groups(self) -> list[str]:
        return [self.group] if self.dead_letters is None else [self.group, self.group + DEAD_LETTERS]


def pipeline(
    source: str,
    sink: str | Sink,
    group: str | None = None,
    *,
    name: str | None = None,
    parse: ParseJson | None = None,
    dead_letters: str | None = None,
    output_mode: OutputMode = "append",
    every: str | None = None,
    share_group: bool = False,
    options: Mapping[str, SparkOption] | None = None,
) -> Callable[[Function], Pipeline]:
    """Make a pipeline of a function from a DataFrame to a DataFrame.

    source:       the topic that it reads. Without a parse step, its columns: key, value, partition, offset, timestamp.
    sink:         a topic's name, or `parquet(...)`, or `to(...)`. See `as_messages` for what a topic is given.
    group:        the consumer group, by default the name.
    name:         of its checkpoint location too, by default the function's.
    parse:        such as `parse_json(schema)`.
    dead_letters: the topic for messages that do not parse. A query of its own reads the source for them, in the group
                  <group>.dead-letters: the source is read twice, and each of the two is exactly once by itself.
    output_mode:  "append", "update" or "complete", as Spark has them. Files can only be appended to.
    every:        how often there is a batch at most, such as "1 minute"; by default as soon as there are messages.
    share_group:  with other members, for functions that keep no state (K4).
    options:      more options of the source, such as {"maxRowsPerTrigger": 100_000}.

    Raises InvalidPipeline.
    """

    def decorate(function: Function) -> Pipeline:
        if isinstance(function, Pipeline) or not callable(function):
            raise InvalidPipeline(f"@pipeline stands before a function, and not before {type(function).__name__}")
        found = name if name is not None else getattr(function, "__name__", "")
        if options is not None and not isinstance(options, Mapping):
            raise InvalidPipeline(f"{found}: options is {options!r}; give a dictionary, such as {{'columns': 'value'}}")
        made = Pipeline(
            function,
            found,
            source,
            Sink("pxrs", topic=sink) if isinstance(sink, str) else sink,
            group if group is not None else found,
            parse,
            dead_letters,
            output_mode,
            every,
            share_group,
            dict(options or {}),
        )
        _check(made)
        if (collected := _collected.get()) is not None:
            collected.append(made)
        return made

    return decorate


def _check_types(made: Pipeline) -> None:
    """Raise InvalidPipeline for arguments of a wrong type, each of which would cause a TypeError later."""
    name = made.name
    if not isinstance(name, str):
        raise InvalidPipeline(f"a pipeline's name is {name!r}: give text")
    if isinstance(made.source, list | tuple | set | frozenset):
        raise InvalidPipeline(
            f"{name}: source is {made.source!r}: this version reads one topic. Write a pipeline for each of them, each "
            "with a name of its own, or send both to one topic"
        )
    if not isinstance(made.source, str) or not made.source:
        raise InvalidPipeline(f"{name}: source is {made.source!r}; give a topic's name")
    if not isinstance(made.sink, Sink) or made.sink.topic == "":
        given = made.sink.topic if isinstance(made.sink, Sink) else made.sink
        raise InvalidPipeline(f"{name}: sink is {given!r}; give a topic's name, parquet(...) or to(...)")
    if not isinstance(made.group, str):
        raise InvalidPipeline(f"{name}: {made.group!r} is no name of a group")
    if made.dead_letters is not None and (not isinstance(made.dead_letters, str) or not made.dead_letters):
        raise InvalidPipeline(f"{name}: dead_letters is {made.dead_letters!r}; give a topic's name")
    if made.parse is not None and not isinstance(made.parse, ParseJson):
        raise InvalidPipeline(f"{name}: parse is {made.parse!r}; give parse_json(...)")
    if made.every is not None and not isinstance(made.every, str):
        raise InvalidPipeline(f"{name}: every is {made.every!r}; give text such as '1 minute'")
    if not isinstance(made.share_group, bool):
        raise InvalidPipeline(f"{name}: share_group is {made.share_group!r}; give True or False")
    for option in made.options:
        if not isinstance(option, str):
            raise InvalidPipeline(f"{name}: options: {option!r} is no name of an option")
    if fault := fault_of(name or "the function", made.function, ("a DataFrame",)):
        raise InvalidPipeline(fault)


def _check(made: Pipeline) -> None:
    _check_types(made)
    name = made.name
    if not _NAME.fullmatch(name):
        raise InvalidPipeline(f"a pipeline's name is {name!r}: give name= of letters, digits, _ and -, 80 at most")
    for group in made.groups():
        if not GROUP_NAME.fullmatch(group):
            raise InvalidPipeline(f"{name}: {group!r} is no name of a group")
    if made.output_mode not in _OUTPUT_MODES:
        raise InvalidPipeline(f"{name}: output_mode is {made.output_mode!r}; choose from {', '.join(_OUTPUT_MODES)}")
    if made.sink.format == "parquet" and made.output_mode != "append":
        raise InvalidPipeline(f"{name}: Parquet files are appended to; output_mode={made.output_mode!r} cannot be")
    if made.sink.topic is not None and made.output_mode == "complete":
        raise InvalidPipeline(f"{name}: a topic is appended to; output_mode='update' sends what has changed")
    if made.dead_letters is not None and made.parse is None:
        raise InvalidPipeline(f"{name}: dead_letters without a parse step: give parse=parse_json(...)")
    if made.dead_letters is not None and made.parse is not None and made.parse.on_bad == "drop":
        raise InvalidPipeline(f"{name}: on_bad='drop' and dead_letters contradict each other")
    for topic, what in ((made.sink.topic, "sink"), (made.dead_letters, "dead_letters")):
        if topic == made.source:
            raise InvalidPipeline(f"{name}: {what} is the source, {topic}: it would feed itself for ever")
    if given := [option for option in made.options if option.lower() in _OURS]:
        raise InvalidPipeline(f"{name}: options: {', '.join(given)} cannot be given here")
    if made.parse is not None and "columns" in map(str.lower, made.options):
        raise InvalidPipeline(f"{name}: options: columns is for functions without a parse step, which needs them all")


def check_together(pipelines: Sequence[Pipeline]) -> None:
    """Raise InvalidPipeline if two pipelines have the same name, the same group, or the same folder of files."""
    names: set[str] = set()
    groups: dict[str, str] = {}
    folders: dict[str, str] = {}
    for each in pipelines:
        if each.name in names:
            raise InvalidPipeline(f"two pipelines are named {each.name}: give one of them another name=")
        names.add(each.name)
        for group in each.groups():
            if group in groups:
                raise InvalidPipeline(
                    f"{groups[group]} and {each.name} are both in the group {group}: each needs one of its own"
                )
            groups[group] = each.name
        if each.sink.folder is not None:
            folder = _resolved(each.sink.folder)
            if folder in folders:
                raise InvalidPipeline(
                    f"{folders[folder]} and {each.name} both write files into {folder}: each needs a folder of its "
                    "own, or Spark takes the batches of the one for those of the other"
                )
            folders[folder] = each.name


def _resolved(folder: str) -> str:
    if _SCHEME.match(folder):
        return folder.rstrip("/")
    return os.path.realpath(re.sub("^file:/+", "/", folder))


@contextmanager
def collecting() -> Iterator[list[Pipeline]]:
    """Collects the pipelines that are made within the block, in their order, also those whose names are defined again
    later."""
    collected: list[Pipeline] = []
    token = _collected.set(collected)
    try:
        yield collected
    finally:
        _collected.reset(token)


def as_messages(rows: DataFrame) -> DataFrame:
    """Rows with the columns that a topic takes.

    Rows with a column `value` are messages already: key, value, timestamp and headers are kept; partition and offset,
    which say where a row was read, are left out. Without that column, all columns but `key` become a JSON object in
    `value`.
    """
    from pyspark.sql import functions as F

    names = rows.columns
    if "value" in names:
        unknown = [name for name in names if name not in (*_MESSAGE, "partition", "offset")]
        if unknown:
            raise InvalidPipeline(
                f"there is a column value and also {', '.join(unknown)}: a message has {', '.join(_MESSAGE)}. "
                "Drop them, or rename value: without it, all columns become JSON"
            )
        return rows.select(*[name for name in names if name in _MESSAGE])
    fields = [F.col(_quoted(name)) for name in names if name != "key"]
    if not fields:
        raise InvalidPipeline("there are no columns to make a message's value of")
    value = F.to_json(F.struct(*fields)).alias("value")
    if "key" not in names:
        return rows.select(value)
    is_bytes = dict(rows.dtypes)["key"] == "binary"
    return rows.select(F.col("key") if is_bytes else F.col("key").cast("string").alias("key"), value)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
