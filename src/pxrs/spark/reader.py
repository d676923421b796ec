"""Plans, in the driver, what Spark reads from topics, as a batch or as a stream. A batch may also read a registered
source: see `table.py`. The tasks that read are in `tasks.py`.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

import pxrs
from pxrs.errors import CheckpointOutOfRange, InvalidOption, UnknownTopic
from pxrs.group.records import Checkpoint, Keys, partition_of
from pxrs.group.timings import LEASE_TTL_DEFAULT
from pxrs.hub import Hub
from pxrs.log.contract import TopicLog
from pxrs.publishing.feed import Feed
from pxrs.publishing.offsets import OffsetForm
from pxrs.publishing.planning import Delay, Range, gather, split
from pxrs.publishing.selection import boundary_offsets
from pxrs.registry.lease import Lease
from pxrs.spark.following import Followed
from pxrs.spark.names import find_source, topics_to_read, topics_to_stream
from pxrs.spark.options import ReadFrom, ReadOptions, WriteOptions
from pxrs.spark.place import TOKEN_S, HubPlace, is_server
from pxrs.spark.table import TableSlice, table_slices
from pxrs.spark.tasks import Slice, Slices, TaskReader, checked_start

if TYPE_CHECKING:
    from pxrs.sources.catalog import RegisteredSource

_TASK_ROWS_MIN: Final = 20_000
"""Short ranges of several partitions are read by one task until it has this number of rows, unless minPartitions is
given."""


class BatchReader(TaskReader, DataSourceReader):  # type: ignore[misc]
    """`spark.read`: the messages between two offsets of each partition."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def partitions(self) -> list[Slice] | list[TableSlice]:
        options = self._options
        topics = options.where.topics
        with open_hub(options.where) as hub:
            if topics.only is not None and (table := _table(hub, topics.only)) is not None:
                return table_slices(hub, table, options)
            logs = topics_to_read(hub, topics)
            if options.source_url is not None:
                raise InvalidOption("sourceUrl", f"{topics} has none; only a table that is a registered source has one")
            names = [topic.name for topic in logs]
            options.starting.check_topics(names)
            options.ending.check_topics(names)
            found = [(topic, self._ranges(hub, topic)) for topic in logs]
            place = HubPlace.to_read(options.where.url, {topic.id for topic in logs})
            return _slices(options, place, found)

    def _ranges(self, hub: Hub, topic: TopicLog) -> list[Range]:
        """The ranges of offsets that are read of a topic."""
        options = self._options
        numbers = options.where.topics.partitions_of(topic.name, topic.partitions)
        if options.starting.word == "committed":
            starts = _committed(hub, topic, options.group or "", numbers)
        else:
            starts = boundary_offsets(topic, options.starting, numbers)
        ends = boundary_offsets(topic, options.ending, numbers)
        fails, bounds = options.fails_on_loss, topic.bounds(numbers)
        ranges = [
            Range(number, checked_start(topic.name, number, starts[number], bounds[number].start, fails), ends[number])
            for number in numbers
        ]
        return [each for each in ranges if each.start < each.end]

    def __reduce__(self) -> tuple[type[TaskReader], tuple[()]]:
        return TaskReader, ()


class StreamReader(TaskReader, DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """`spark.readStream`: runs in a Python process of its own beside the driver, as a member of the group."""

    def __init__(self, options: ReadOptions) -> None:
        if options.is_shared and options.where.topics.assigned is not None:
            raise InvalidOption(
                "assign", "a query that reads only some partitions must own all of them: remove shareGroup"
            )
        self._options = options
        self._hub: Hub | None = None
        self._followed: Followed | None = None
        self._delay = None if options.rows_min is None else Delay(options.rows_min, options.trigger_delay_s)
        self._lease: Lease | None = None
        """With which the tokens of tasks end, if the hub is behind a server."""
        self._issued: tuple[float, frozenset[str], HubPlace] | None = None
        """When the tasks' token was made, for which topics, and where they find the hub."""

    def initialOffset(self) -> dict[str, Any]:
        """An offset without spans: nothing is read yet. The group's checkpoints say where the query begins; the member
        writes them when it joins, before anything is handed out (G6)."""
        with open_hub(self._options.where) as hub:
            return OffsetForm.of(topics_to_stream(hub, self._options.where.topics)).dump({})

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.rows_max is not None:
            return ReadMaxRows(self._options.rows_max)
        if self._options.bytes_max is not None:
            return ReadMaxBytes(self._options.bytes_max)
        if self._options.rows_min is not None:
            return ReadMinRows(self._options.rows_min)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        followed = self._joined()
        with followed.topics_there():
            followed.query.target_now()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        followed = self._joined()
        followed.follow(start)
        while True:  # ends, because each failed try leaves fewer topics
            try:
                with followed.topics_there():
                    return self._latest(followed, start, is_all=isinstance(limit, ReadAllAvailable))
            except UnknownTopic:
                if not followed.drop_deleted(start):
                    raise

    def _latest(self, followed: Followed, start: dict[str, Any], *, is_all: bool) -> dict[str, Any]:
        options, spans = self._options, followed.load(start)
        if is_all:
            latest = followed.query.latest(spans, None, None)
        else:
            latest = followed.query.latest(spans, options.rows_max, options.bytes_max, self._delay)
        return start if latest is spans or latest == spans else followed.form.dump(latest)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        followed = self._joined()
        try:
            with followed.topics_there():
                return followed.form.dump_ends(followed.query.source.ends())
        except UnknownTopic:  # `latestOffset` decides whether the query continues without the topic
            if self._options.fails_on_loss:
                raise
            return None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Slice | Slices]:
        followed = self._joined()
        query = followed.query
        begin, finish = followed.load(start), followed.load(end)
        if begin == finish:
            return []
        with followed.topics_there():
            spans, fences = query.ranges(begin, finish)
        feeds = {feed.topic: feed for feed in query.feeds(spans, fences)}
        ranges: dict[str, list[Range]] = {topic: [] for topic in feeds}
        for number, span in spans.items():
            part, partition = query.source.place(number)
            ranges[part.id].append(Range(partition, span.start, span.end))
        # A batch of which nothing may be read has a task too, because a task has to store the feed for the sink.
        topics = [part for part in query.source.parts if isinstance(part, TopicLog) and part.id in ranges]
        found = [(topic, ranges[topic.id] or [Range(0, 0, 0)]) for topic in topics]
        slices = _slices(self._options, self._place(ranges), found, feeds)
        if self._options.partitions_min is not None:
            return list(slices)
        tasks = gather(slices, _TASK_ROWS_MIN)
        return [task[0] if len(task) == 1 else Slices(tuple(task)) for task in tasks]

    def __reduce__(self) -> tuple[type[TaskReader], tuple[()]]:
        return TaskReader, ()

    def _place(self, topics: Collection[str]) -> HubPlace:
        """Where the tasks of a batch find the hub. topics: the ids of those that they read."""
        hub, now = self._hub, time.monotonic()
        assert hub is not None
        url, issued, lease = self._options.where.url, self._issued, self._lease
        if not is_server(url):
            return HubPlace.of(url)
        if lease is None or not lease.alive:
            lease = self._lease = hub.registry.lease(self._options.lease_ttl or LEASE_TTL_DEFAULT)
            issued = None
        if issued is None or now > issued[0] + TOKEN_S / 4 or not issued[1].issuperset(topics):
            issued = self._issued = now, frozenset(topics), HubPlace.to_read(url, topics, lease.secret)
        return issued[2]

    def commit(self, end: dict[str, Any]) -> None:
        followed = self._joined()
        followed.query.finish(followed.load(end))

    def stop(self) -> None:
        followed, hub = self._followed, self._hub
        self._followed = self._hub = None
        lease, self._lease, self._issued = self._lease, None, None
        try:
            if followed is not None:
                followed.query.close()
            if lease is not None:
                lease.end()
        finally:
            if hub is not None:
                hub.close()

    def _joined(self) -> Followed:
        if self._followed is None:
            _stop_on_sigterm()
            hub = open_hub(self._options.where)
            try:
                self._followed = Followed(hub, self._options)
            except BaseException:
                hub.close()
                raise
            self._hub = hub
            # This process lives as long as the query, and may be the only one that does: without it, nobody would apply
            # the retention of the topics, or remove what earlier runs of queries have left in the staging folder.
            self._hub.start_upkeep()
        return self._followed


def open_hub(where: ReadFrom | WriteOptions) -> Hub:
    return pxrs.open(where.url, registry=where.registry)


def _table(hub: Hub, name: str) -> RegisteredSource | None:
    """The registered source of this name, None if there is a topic of this name. Raises UnknownTopic if there is
    neither."""
    try:
        hub.topic(name)
    except UnknownTopic:
        if (record := find_source(hub, name)) is None:
            raise
        return record
    return None


def _slices(
    options: ReadOptions,
    place: HubPlace,
    found: Sequence[tuple[TopicLog, Sequence[Range]]],
    feeds: Mapping[str, Feed] | None = None,
) -> list[Slice]:
    """The tasks that read these ranges of topics. A task reads one topic. feeds: of a stream, by topic id."""
    least = options.partitions_min
    if least is None:
        tasks = [(topic, part) for topic, ranges in found for part in gather(ranges, _TASK_ROWS_MIN)]
    else:
        pieces = split([each for _, ranges in found for each in ranges], least)
        owners = [topic for topic, ranges in found for _ in ranges]
        tasks = [(topic, [each]) for topic, parts in zip(owners, pieces, strict=True) for each in parts]
    return [
        Slice(
            place,
            topic.name,
            topic.id,
            tuple(part),
            options.columns,
            options.fails_on_loss,
            None if feeds is None else feeds[topic.id],
        )
        for topic, part in tasks
    ]


def _committed(hub: Hub, topic: TopicLog, group: str, numbers: Sequence[int]) -> dict[int, int]:
    """The group's checkpoint of each of these partitions; the start of a partition that has none."""
    keys = Keys(group)
    found = {
        partition_of(entry.key)[1]: Checkpoint.load(entry.key, entry.value).offset
        for entry in hub.registry.scan(f"{keys.checkpoints}{topic.id}/")
    }
    bounds = topic.bounds(numbers)
    starts = {number: found.get(number, bounds[number].start) for number in numbers}
    for number, start in starts.items():
        if start > (end := bounds[number].end):
            raise CheckpointOutOfRange(
                f"group {keys.group} is at offset {start} of {topic.name}/{number}, which ends at {end}; is this the "
                "same log? Reset the group if it is"
            )
    return starts


def _stop_on_sigterm() -> None:
    """Exit at SIGTERM, so that `stop` runs and the member leaves its group. Spark ends this process by SIGTERM, sent
    more than once, without calling `stop`."""

    def leave(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(0)

    signal.signal(signal.SIGTERM, leave)
