"""Running pipelines: their streaming queries are started together, observed, and stopped between two batches.

Each pipeline is one streaming query, or two if it has dead letters. What can be checked is checked before the first
query starts: missing topics, a function that raises, state in a shared group, a folder of files that has batches
which the checkpoint location does not have.

    run = Run(spark, hub, pipelines, address, checkpoints)
    run.start()
    while not run.is_over:
        run.look()          updates `run.queries`

To stop, a query finishes its current batch and is stopped before the next one is committed; if the next batch has
begun, it is repeated after a restart, and counts once. If one query fails, the others are stopped in the same way.
Each call of `look` takes the next step; a thread of Spark fills the reports that `look` reads (`QueryWatch`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from pxrs.errors import Conflict, InvalidPipeline, PipelineFailed, PxrsError, RegistryError, SharedState, UnknownGroup
from pxrs.group.records import Checkpoint, Keys
from pxrs.hub import Hub
from pxrs.publishing.selection import FROM_START, boundary_offsets
from pxrs.publishing.starting import group_has_begun
from pxrs.registry.contract import ABSENT
from pxrs.spark.names import find_source, no_stream
from pxrs.spark.options import stream_options
from pxrs.spark.pipeline import DEAD_LETTERS, SHAPE, Pipeline, check_together
from pxrs.spark.progress import BatchReport, batch_of, short_reason
from pxrs.spark.sinks import HubAddress, OutputMode, Sink, SparkOption
from pxrs.spark.state import refuse_shared_state
from pxrs.spark.watch import QueryWatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SETTINGS: Final = {
    # After this time, a query with nothing to read asks its source again. Spark's default of 10 ms keeps a processor
    # busy.
    "spark.sql.streaming.pollingDelay": "100ms",
}
"""Settings of a Spark session that runs pipelines."""
FILES_LOG: Final = "_spark_metadata"
"""The log that Spark keeps in a folder into which a stream writes files, with an entry for each batch. Spark reads only
the files that the log names, and writes nothing for a batch whose number is in the log."""

QueryState = Literal["starting", "running", "ended", "failed"]


@dataclass(slots=True)
class QueryRun:
    """One streaming query of a run, and its progress."""

    name: str
    group: str
    source: str
    sink: Sink
    rows: DataFrame
    output_mode: OutputMode
    every: str | None
    checkpoint: Path
    state: QueryState = "starting"
    batches: list[BatchReport] = field(default_factory=list)
    """The batches that were finished between the last two calls of `look`."""
    last: BatchReport | None = None
    rows_done: int = 0
    """How many rows this run has read."""
    lag: int | None = None
    error: str | None = None
    query: Any = None
    """Spark's handle of the query; None until it is started."""
    last_when_stopping: int | None = None
    """The number of the last finished batch when `finish` was called."""

    @property
    def is_over(self) -> bool:
        return self.state in ("ended", "failed")


class Run:
    """The streaming queries of some pipelines."""

    def __init__(
        self,
        spark: SparkSession,
        hub: Hub,
        pipelines: Sequence[Pipeline],
        address: HubAddress,
        checkpoints: Path,
        is_once: bool = False,
    ) -> None:
        """Check and plan the queries, without starting them. is_once: each query ends when it has read what is there
        when it starts. Raises InvalidPipeline, SharedState."""
        check_together(pipelines)
        check_topics(hub, pipelines)
        check_files(spark, pipelines, checkpoints)
        self._pipelines = pipelines
        self._spark, self._hub, self._address, self._checkpoints = spark, hub, address, checkpoints
        self._is_once = is_once
        self._stops_at: float | None = None
        self._watch = QueryWatch(spark)
        self.queries: list[QueryRun] = [query for each in pipelines for query in self._planned(each)]

    @property
    def is_over(self) -> bool:
        return all(query.is_over for query in self.queries)

    @property
    def is_stopping(self) -> bool:
        return self._stops_at is not None

    @property
    def failed(self) -> QueryRun | None:
        """The first query that failed, None if none did."""
        return next((query for query in self.queries if query.state == "failed"), None)

    def start(self) -> None:
        """Start all queries. If one cannot be started, those that were are stopped, and PipelineFailed is raised."""
        for pipeline in self._pipelines:
            if pipeline.dead_letters is not None:
                pin_starts(self._hub, pipeline, self._address)
        if self.queries:
            self._watch.start()
        for each in self.queries:
            try:
                each.query = self._started(each)
            except Exception as error:
                self.stop()
                if isinstance(error, PxrsError):
                    raise
                raise PipelineFailed(f"{each.name}: {short_reason(str(error))}") from error
            each.state = "running"

    def _started(self, each: QueryRun) -> Any:
        writer = each.sink.stream(each.rows, self._address, each.output_mode)
        writer = writer.option("checkpointLocation", str(each.checkpoint)).queryName(each.name)
        if self._is_once:
            writer = writer.trigger(availableNow=True)
        elif each.every is not None:
            writer = writer.trigger(processingTime=each.every)
        return writer.start()

    def look(self) -> None:
        """Update `queries`, and stop those that are to be stopped and have finished their batch. After the end of the
        last query, the listener of Spark's reports is removed."""
        for each in self.queries:
            each.batches = []
            if each.query is None or each.is_over:
                continue
            report = self._watch.report(each.query.runId)
            if report is not None:
                self._count(each, report.batches)
                each.rows_done = report.rows  # of all batches, also if there were more than the watch keeps
            if not each.query.isActive:
                self._end(each)
            elif self._stops_at is not None and self._may_stop(each):
                self._stop(each)
            each.lag = self._lag(each.group)
        if self.failed is not None and self._stops_at is None:
            self.finish()
        if self.is_over:
            self._watch.close()

    def finish(self, patience_s: float = 60.0) -> None:
        """Make `look` stop each query when its current batch is finished, or after this time."""
        self._stops_at = time.monotonic() + patience_s
        for each in self.queries:
            each.last_when_stopping = None if each.last is None else each.last.number

    def stop(self) -> None:
        """Stop all queries at once. The next run repeats the batches that were interrupted."""
        for each in self.queries:
            if each.query is not None and not each.is_over:
                self._stop(each)
        self._watch.close()

    # Progress.

    def _count(self, each: QueryRun, batches: Iterable[BatchReport | None]) -> None:
        for batch in batches:
            if batch is None or (each.last is not None and batch.number <= each.last.number):
                continue
            each.batches.append(batch)
            each.last = batch
            each.rows_done += batch.rows

    def _count_last(self, each: QueryRun) -> None:
        """When a query has ended, add the batches that Spark has not reported to the listener yet."""
        self._count(each, (batch_of(json.loads(progress.json)) for progress in each.query.recentProgress))

    def _end(self, each: QueryRun) -> None:
        self._count_last(each)
        error = each.query.exception()
        each.state = "ended" if error is None else "failed"
        each.error = None if error is None else short_reason(str(error))

    def _stop(self, each: QueryRun) -> None:
        if each.query.exception() is not None:  # the query has failed since `look` read `isActive`
            self._end(each)
            return
        each.query.stop()  # blocks until the query has ended; errors of its interrupted tasks do not count
        self._count_last(each)
        each.state = "ended"

    def _may_stop(self, each: QueryRun) -> bool:
        assert self._stops_at is not None
        last = None if each.last is None else each.last.number
        is_new = last != each.last_when_stopping
        return is_new or not each.query.status["isTriggerActive"] or time.monotonic() >= self._stops_at

    def _lag(self, group: str) -> int | None:
        try:
            return self._hub.group(group).describe().lag
        except (UnknownGroup, RegistryError):
            # The query has not joined its group yet, or the registry cannot be reached, which need not end the
            # pipeline: the lag is shown as unknown.
            return None

    # Planning.

    def _planned(self, each: Pipeline) -> list[QueryRun]:
        def planned(suffix: str, given: DataFrame, sink: Sink, mode: OutputMode) -> QueryRun:
            if each.share_group:
                _named(each.name, lambda: refuse_shared_state(given))
            rows = _named(each.name, lambda: sink.shaped(given))
            name, group = each.name + suffix, each.group + suffix
            return QueryRun(name, group, str(each.source), sink, rows, mode, each.every, self._checkpoints / name)

        if each.dead_letters is None:
            rows = _named(each.name, lambda: each.over(self._messages(each, each.group, each.options)))
            return [planned("", rows, each.sink, each.output_mode)]
        options = {name: value for name, value in each.options.items() if name.lower() not in SHAPE}
        whole = {**options, "includeHeaders": "true", "includeTopic": "true"}
        rows, bad = _named(
            each.name,
            lambda: each.rows_and_dead_letters(
                self._messages(each, each.group, each.options),
                self._messages(each, each.group + DEAD_LETTERS, whole),
            ),
        )
        letters = Sink("pxrs", topic=each.dead_letters)
        return [planned("", rows, each.sink, each.output_mode), planned(DEAD_LETTERS, bad, letters, "append")]

    def _messages(self, each: Pipeline, group: str, options: Mapping[str, SparkOption]) -> DataFrame:
        reader = self._spark.readStream.format("pxrs").options(**options).options(**self._address.options(each.source))
        return reader.option("group", group).option("shareGroup", str(each.share_group).lower()).load()


def check_topics(hub: Hub, pipelines: Sequence[Pipeline]) -> None:
    """Raise InvalidPipeline if topics are missing, naming the commands that create them, if a source is a registered
    table, or if a pipeline would write to its own source."""
    check_sources(hub, pipelines)
    if missing := missing_topics(hub, pipelines):
        commands = "; ".join(f"pxrs topic create {topic} --at {hub.url}" for topic in missing)
        names = ", ".join(missing)
        raise InvalidPipeline(f"no topic {names}: create what is missing with --create-topics, or with {commands}")
    # Compared by id: on a file system that ignores case, `orders` and `Orders` are one topic.
    there = [topic.name for topic in hub.topics()]
    for each in pipelines:
        read = {hub.topic(topic).id: topic for topic in each.source.among(there)}
        if not read:
            raise InvalidPipeline(f"{each.name}: source: no topic of the hub matches {each.source.pattern}: create one")
        for topic in each.topics():
            if topic not in read.values() and (source := read.get(hub.topic(topic).id)) is not None:
                raise InvalidPipeline(
                    f"{each.name}: {topic} is another name of the source, {source}: it would read its own output"
                )


def check_sources(hub: Hub, pipelines: Sequence[Pipeline]) -> None:
    """Raise InvalidPipeline if a pipeline reads a registered source: pipelines are streams."""
    topics = missing_topics(hub, pipelines)
    for each in pipelines:
        for topic in each.source.names:
            if topic in topics and find_source(hub, topic) is not None:
                raise InvalidPipeline(f"{each.name}: {no_stream(topic)}")


def missing_topics(hub: Hub, pipelines: Sequence[Pipeline]) -> list[str]:
    """The topics that these pipelines name and that do not exist. A damaged topic exists: opening it raises an error
    that says what is damaged."""
    there = {topic.name for topic in hub.topics()} | {topic.name for topic in hub.damaged_topics()}
    return list(dict.fromkeys(topic for each in pipelines for topic in each.topics() if topic not in there))


def check_files(spark: SparkSession, pipelines: Sequence[Pipeline], checkpoints: Path) -> None:
    """Raise InvalidPipeline if a folder has batches that the checkpoint location does not have, because the location is
    new or was restored from an old copy. The numbers of these batches would be used again for other rows, and Spark
    would silently not write those."""
    for each in pipelines:
        if (folder := each.sink.folder) is None or (written := last_written(spark, folder)) is None:
            continue
        location = checkpoints / each.name
        planned = location / "offsets"
        if written > _last(path.name for path in (planned.iterdir() if planned.is_dir() else ())):
            raise InvalidPipeline(
                f"{each.name}: a stream has written batches into {folder}, up to {written}, that the checkpoint "
                f"location {location} does not know; Spark would skip new batches with the same numbers. Give another "
                f"path, or remove {folder}/{FILES_LOG}: Spark then reads only the files that are written later"
            )


def last_written(spark: SparkSession, folder: str) -> int | None:
    """The number of the last batch that a stream has written into a folder, -1 if it has written none; None if no
    stream writes into the folder."""
    log = spark._jvm.org.apache.hadoop.fs.Path(folder, FILES_LOG)
    files = log.getFileSystem(spark._jsc.hadoopConfiguration())
    return _last(status.getPath().getName() for status in files.listStatus(log)) if files.exists(log) else None


def _last(names: Iterable[str]) -> int:
    """The highest batch number in one of Spark's logs, whose files have names such as 8, 9.compact, .9.compact.crc."""
    return max((int(name.partition(".")[0]) for name in names if name[0].isdigit()), default=-1)


def pin_starts(hub: Hub, each: Pipeline, address: HubAddress) -> None:
    """Write the first checkpoints of both queries of a pipeline, so that rows and dead letters begin at the same
    messages: by itself, each query would find another "latest". Dead letters that are added to a pipeline begin no
    later than its rows. A topic that was added to a group that has begun is read from its first message on, whatever
    `startingOffsets` says (G6)."""
    given = {name: str(value) for name, value in each.options.items() if name.lower().startswith("starting")}
    options = stream_options({**address.options(each.source), "group": each.group, **given})
    topics = [hub.topic(name) for name in each.source.among(topic.name for topic in hub.topics())]
    for_rows, for_dead = (
        FROM_START if group_has_begun(hub.registry, group, [topic.log for topic in topics]) else options.starting
        for group in each.groups()
    )
    for topic in topics:
        are_rows_pinned, are_dead_pinned = (
            len(hub.registry.scan(Keys(group).checkpoints_of(topic.id))) >= topic.partitions for group in each.groups()
        )
        if are_rows_pinned and are_dead_pinned:
            continue
        for number, start in boundary_offsets(topic.log, for_dead if are_rows_pinned else for_rows).items():
            _pin_start(hub, each, topic.id, number, start)


def _pin_start(hub: Hub, each: Pipeline, topic_id: str, number: int, start: int) -> None:
    rows, dead = (Keys(group).checkpoint(topic_id, number) for group in each.groups())
    begun = hub.registry.get(rows)
    if begun is not None:
        start = min(start, Checkpoint.load(rows, begun.value).offset)
    value = Checkpoint(start, time.time(), "start").dump()
    put = dict.fromkeys([dead] if begun is not None else [rows, dead], value)
    with suppress(Conflict):  # the query has written its first checkpoint meanwhile
        hub.registry.commit(dict.fromkeys(put, ABSENT), put)


def _named(name: str, plan: Callable[[], Any]) -> Any:
    """Call `plan`, which calls the user's function and Spark's analysis. An error gets the name of the pipeline."""
    try:
        return plan()
    except SharedState as error:
        raise SharedState(f"{name}: {error}") from error
    except PxrsError as error:
        error.add_note(f"in the pipeline {name}")
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {short_reason(str(error))}"
        raise InvalidPipeline(f"the pipeline {name} cannot be planned: {reason}") from error
