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
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Final, Literal

from pxrs.errors import InvalidPipeline
from pxrs.group.records import GROUP_NAME
from pxrs.handler import fault_of
from pxrs.publishing.selection import Topics
from pxrs.spark.letters import MESSAGE, REASON, dead_letters, with_message
from pxrs.spark.parsing import ParseJson
from pxrs.spark.rejecting import FunctionCall, same_decisions
from pxrs.spark.sinks import HubAddress, OutputMode, Sink, SparkOption
from pxrs.spark.subscription import reads, topics_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Function = Callable[["DataFrame"], "DataFrame"]

DEAD_LETTERS: Final = ".dead-letters"
"""Appended to the name and the group of a pipeline for the query that reads its bad rows."""
_OUTPUT_MODES: Final = ("append", "update", "complete")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}")
_OURS: Final = (
    *("url", "registry", "topic", "subscribe", "subscribepattern", "assign"),
    *("group", "sharegroup", "endingoffsets", "endingtimestamp", "endingoffsetsbytimestamp"),
)
SHAPE: Final = ("includeheaders", "includetopic", "columns")
"""Options that decide which columns there are, for a stream and for a batch over its history."""
_SCHEME: Final = re.compile(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]*:/")
_collected: ContextVar[list[Pipeline] | None] = ContextVar("_collected", default=None)


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """A function, what it reads, and where its rows go. Calling the pipeline calls the function."""

    function: Function
    name: str
    source: Topics
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
        return self._rows(messages, self._call())

    def bad(self, messages: DataFrame) -> DataFrame:
        """The messages that do not parse or that the function rejects, with the reason, as they go to the dead-letter
        topic."""
        if (found := self._bad(messages, messages.columns, self._call("collect"))) is None:
            raise InvalidPipeline(
                f"{self.name} has no parse step, and its function does not call reject, so no message can become a "
                "dead letter: give parse=parse_json(...), or call reject in the function"
            )
        return found

    def rejected(self, rows: DataFrame) -> DataFrame:
        """Of these rows, those that the function rejects, with a column `reason`. For tests of a function: rows are
        what the function gets."""
        from pyspark.sql import functions as F

        call = self._call("collect")
        self._called(rows.select("*", F.struct("*").alias(MESSAGE)), call)
        if not call.collected:
            raise InvalidPipeline(
                f"the function of {self.name} does not call reject, so no row is rejected: call reject(rows, "
                "condition, reason) in the function"
            )
        return _united(call.collected).select(f"{MESSAGE}.*", F.col(REASON).alias("reason"))

    def rows_and_dead_letters(self, messages: DataFrame, whole: DataFrame) -> tuple[DataFrame, DataFrame]:
        """The rows for the sink and the dead letters, as two DataFrames for two queries.

        whole: the same messages with all columns, also headers."""
        kept, collecting = self._call(), self._call("collect")
        rows = self._rows(messages, kept)
        bad = self._bad(whole, messages.columns, collecting)
        if bad is None:
            raise InvalidPipeline(
                f"{self.name}: dead_letters is given, but no message can become a dead letter: give "
                "parse=parse_json(...), or call reject in the function"
            )
        same_decisions(kept, collecting)
        return rows, bad

    def left_out(self, messages: DataFrame) -> int:
        """How many of these messages `over` leaves out, because they do not parse or because the function rejects
        them."""
        from pyspark.sql import functions as F

        found = self._found(messages, messages.columns, self._call("count"))
        return _united([each.select(F.lit(1)) for each in found]).count() if found else 0

    def _rows(self, messages: DataFrame, call: FunctionCall) -> DataFrame:
        rows = messages
        if self.parse is not None:
            rows = self.parse.good(messages, str(self.source), self.dead_letters is not None)
        result = self._called(rows, call)
        if result.isStreaming != messages.isStreaming:
            raise InvalidPipeline(f"{self.name} returned rows that do not come from its source")
        return result

    def _bad(self, messages: DataFrame, columns: Sequence[str], call: FunctionCall) -> DataFrame | None:
        """The dead letters; None if there can be none. columns: those that the function gets."""
        found = self._found(messages, columns, call)
        return dead_letters(_united(found)) if found else None

    def _found(self, messages: DataFrame, columns: Sequence[str], call: FunctionCall) -> list[DataFrame]:
        """The messages that do not parse, and those that each `reject` of the function collects."""
        whole = with_message(messages, str(self.source), columns)
        rows, found = whole, []
        if self.parse is not None:
            rows = self.parse.good(whole, str(self.source), True)
            found = [self.parse.bad(whole)]
        self._called(rows, call)
        return found + call.collected

    def _called(self, rows: DataFrame, call: FunctionCall) -> DataFrame:
        from pyspark.sql import DataFrame

        with call.running(rows):
            result = self.function(rows)
        if not isinstance(result, DataFrame):
            raise InvalidPipeline(f"{self.name} returned {type(result).__name__}, not a DataFrame")
        call.check_use(result)
        return result

    def _call(self, does: Literal["collect", "count"] | None = None) -> FunctionCall:
        are_dropped = self.dead_letters is not None or (self.parse is not None and self.parse.on_bad == "drop")
        taken = () if self.parse is None else (name.lower() for name in self.parse.struct().fieldNames())
        return FunctionCall(does or ("leave out" if are_dropped else "fail"), str(self.source), frozenset(taken))

    def messages(self, spark: SparkSession, address: HubAddress, **options: SparkOption) -> DataFrame:
        """A batch of what the source holds now, for `over`. options: more options of `spark.read`, such as the first
        and the last time."""
        shape = {name: value for name, value in self.options.items() if name.lower() in SHAPE}
        reader = spark.read.format("pxrs").options(**{**shape, **options})
        return reader.options(**address.options(self.source)).load()

    def topics(self) -> list[str]:
        """The names of the topics that the pipeline writes, and of those that it reads, unless a pattern selects
        them."""
        named = (*self.source.names, self.sink.topic, self.dead_letters)
        return list(dict.fromkeys(topic for topic in named if topic is not None))

    def groups(self) -> list[str]:
        return [self.group] if self.dead_letters is None else [self.group, self.group + DEAD_LETTERS]


def pipeline(
    source: str | Sequence[str] | Topics,
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

    source:       the topic that it reads, a list of topics, or `topics_matching(...)`. Without a parse step, its
                  columns: key, value, partition, offset, timestamp; and topic, if it is not a single name.
    sink:         a topic's name, or `parquet(...)`, or `to(...)`. See `as_messages` for what a topic is given.
    group:        the consumer group, by default the name.
    name:         of its checkpoint location too, by default the function's.
    parse:        such as `parse_json(schema)`.
    dead_letters: the topic for messages that do not parse, or that the function rejects (`reject`). A query of its own
                  reads the source for them, in the group <group>.dead-letters: each of the two queries is exactly once
                  by itself.
    output_mode:  "append", "update" or "complete", as Spark has them. Files can only be appended to.
    every:        how often there is a batch at most, such as "1 minute"; by default as soon as there are messages.
    share_group:  with other members, for functions that keep no state (K4).
    options:      more options of the source, such as {"maxRowsPerTrigger": 100_000}.

    Raises InvalidPipeline.
    """

    def decorate(function: Function) -> Pipeline:
        if isinstance(function, Pipeline) or not callable(function):
            raise InvalidPipeline(f"@pipeline decorates a function, not {type(function).__name__}")
        found = name if name is not None else getattr(function, "__name__", "")
        if options is not None and not isinstance(options, Mapping):
            raise InvalidPipeline(f"{found}: options is {options!r}; give a dictionary, such as {{'columns': 'value'}}")
        made = Pipeline(
            function,
            found,
            _topics(found, source),
            Sink("pxrs", topic=sink) if isinstance(sink, str) else sink,
            group if group is not None else found,
            parse,
            dead_letters,
            output_mode,
            every,
            share_group,
            _with_topic(source, options or {}),
        )
        _check(made)
        if (collected := _collected.get()) is not None:
            collected.append(made)
        return made

    return decorate


def _with_topic(source: object, options: Mapping[str, SparkOption]) -> Mapping[str, SparkOption]:
    """A function of several topics needs their names, also if the list that it is given has only one of them."""
    is_given = "includetopic" in (str(name).lower() for name in options)
    return options if isinstance(source, str) or is_given else {"includeTopic": "true", **options}


def _topics(name: str, source: object) -> Topics:
    try:
        return topics_of(source)
    except InvalidPipeline as error:
        raise InvalidPipeline(f"{name}: {error}") from None


def _check_types(made: Pipeline) -> None:
    """Raise InvalidPipeline for arguments of a wrong type, each of which would cause a TypeError later."""
    name = made.name
    if not isinstance(name, str):
        raise InvalidPipeline(f"a pipeline's name is {name!r}: give a string")
    if not isinstance(made.sink, Sink) or made.sink.topic == "":
        given = made.sink.topic if isinstance(made.sink, Sink) else made.sink
        raise InvalidPipeline(f"{name}: sink is {given!r}; give a topic's name, parquet(...) or to(...)")
    if not isinstance(made.group, str):
        raise InvalidPipeline(f"{name}: {made.group!r} is not a valid name of a group")
    if made.dead_letters is not None and (not isinstance(made.dead_letters, str) or not made.dead_letters):
        raise InvalidPipeline(f"{name}: dead_letters is {made.dead_letters!r}; give a topic's name")
    if made.parse is not None and not isinstance(made.parse, ParseJson):
        raise InvalidPipeline(f"{name}: parse is {made.parse!r}; give parse_json(...)")
    if made.every is not None and not isinstance(made.every, str):
        raise InvalidPipeline(f"{name}: every is {made.every!r}; give a string such as '1 minute'")
    if not isinstance(made.share_group, bool):
        raise InvalidPipeline(f"{name}: share_group is {made.share_group!r}; give True or False")
    for option in made.options:
        if not isinstance(option, str):
            raise InvalidPipeline(f"{name}: options: {option!r} is not the name of an option")
    if fault := fault_of(name or "the function", made.function, ("a DataFrame",)):
        raise InvalidPipeline(fault)


def _check(made: Pipeline) -> None:
    _check_types(made)
    name = made.name
    if not _NAME.fullmatch(name):
        raise InvalidPipeline(f"a pipeline's name is {name!r}: give up to 80 letters, digits, _ and - as name=")
    for group in made.groups():
        if not GROUP_NAME.fullmatch(group):
            raise InvalidPipeline(f"{name}: {group!r} is not a valid name of a group")
    if made.output_mode not in _OUTPUT_MODES:
        raise InvalidPipeline(f"{name}: output_mode is {made.output_mode!r}; choose from {', '.join(_OUTPUT_MODES)}")
    if made.sink.format == "parquet" and made.output_mode != "append":
        raise InvalidPipeline(f"{name}: Parquet files are append-only; remove output_mode={made.output_mode!r}")
    if made.sink.topic is not None and made.output_mode == "complete":
        raise InvalidPipeline(f"{name}: a topic is append-only; output_mode='update' sends what has changed")
    if made.dead_letters is not None and made.parse is not None and made.parse.on_bad == "drop":
        raise InvalidPipeline(f"{name}: on_bad='drop' and dead_letters contradict each other")
    for topic, what in ((made.sink.topic, "sink"), (made.dead_letters, "dead_letters")):
        if topic is not None and reads(made.source, topic):
            raise InvalidPipeline(f"{name}: {what} is the source, {topic}: the pipeline would read its own output")
    spelled: dict[str, str] = {}
    for option in made.options:
        if (other := spelled.setdefault(option.lower(), option)) != option:
            raise InvalidPipeline(f"{name}: options: {other} and {option} are one option, because Spark ignores case")
    if given := [option for option in made.options if option.lower() in _OURS]:
        raise InvalidPipeline(f"{name}: options: {', '.join(given)} cannot be options of a pipeline")
    if made.parse is not None and "columns" in map(str.lower, made.options):
        raise InvalidPipeline(f"{name}: options: remove columns, because the parse step needs all columns")


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
                    f"{groups[group]} and {each.name} are both in the group {group}: each needs its own group"
                )
            groups[group] = each.name
        if each.sink.folder is not None:
            folder = _resolved(each.sink.folder)
            if folder in folders:
                raise InvalidPipeline(
                    f"{folders[folder]} and {each.name} both write files into {folder}: each needs a folder of its "
                    "own, because Spark would mistake the batches of one for those of the other"
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


def _united(frames: Sequence[DataFrame]) -> DataFrame:
    return reduce(lambda one, other: one.union(other), frames)
