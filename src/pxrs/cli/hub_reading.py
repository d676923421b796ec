"""What `pxrs metrics` exports: the lag of all groups, and the sizes of topics and queues, read from the hub itself.

Reading costs one scan of the registry for all groups, one for each queue, and a look at each partition of each topic,
which keeps no file open (`glancing.py`). So what was read is kept: a reading begins only if somebody asks for metrics
and the last one is at least `keep_s` old, and also four times as old as the last reading took, so that reading takes at
most a fifth of the time, however large the hub is. A request that has waited for WAIT_S gets the values of the last
reading, with their age. A metric has at most SERIES_MAX series.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pxrs.cli.glancing import Reached, SeenTopic, SeenTopics, group_entries
from pxrs.errors import PxrsError, RegistryUnavailable, UnknownQueue
from pxrs.group.admin import GroupHandle
from pxrs.group.records import Keys
from pxrs.group.snapshot import GroupState
from pxrs.hub import Hub
from pxrs.limited_log import LimitedLog
from pxrs.metrics import instruments, table
from pxrs.metrics.health import SILENT_S, Verdict
from pxrs.metrics.instruments import Series, Snapshot
from pxrs.model import is_internal

if TYPE_CHECKING:
    from pxrs.group.description import GroupDescription
    from pxrs.metrics.prometheus import Part
    from pxrs.sources.sql_table import SqlTable

WAIT_S: Final = 8.0
"""How long a request waits for a reading. Prometheus gives up after 10 s by default."""
FAILED_S: Final = 1.0
"""After a reading that failed, the next one may begin so soon: `keep_s` is for values that there are."""
READY_WAIT_S: Final = 2.0
"""The same for /readyz: a probe is given up sooner than a scrape."""
PAUSE_FACTOR: Final = 4.0
SERIES_MAX: Final = 20_000
"""How many series a metric has at most. What would come after them is left out, logged and counted as an error."""
_log: Final = LimitedLog(logging.getLogger(__name__))


class HubReading:
    """One reading of a hub."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._found: defaultdict[str, list[Series]] = defaultdict(list)

    def read(self) -> Snapshot:
        """All values. What cannot be read is logged, counted as an error, and left out. Raises PxrsError if the hub
        cannot be read at all."""
        registry = self._hub.registry
        states: dict[str, GroupState] = {}
        for group, entries in group_entries(registry):  # before the ends, so that no end is behind a checkpoint
            with _left_out(table.HUB_GROUP_LAG, f"group {group}"):
                states[group] = GroupState.of(Keys(group), entries)
        topics = SeenTopics(self._hub.log, Reached(states.values()))
        for topic in topics.by_name.values():
            if is_internal(topic.name):
                continue
            with _left_out(table.HUB_TOPIC_MESSAGES, f"topic {topic.name}"):
                self._read_topic(topic)
        sources, there = _Registered(self._hub), {topic.id for topic in topics.by_name.values()}
        for group, state in states.items():
            if state.is_there:
                with _left_out(table.HUB_GROUP_LAG, f"group {group}"):
                    found = GroupHandle(registry, group, topics, registered=sources).described(state)
                    self._read_group(found, there, time.time())
        for queue in self._hub.queues():
            with _left_out(table.HUB_QUEUE_ITEMS, f"queue {queue.name}"):
                depth = queue.depth()
                for each in ("ready", "delayed", "in_flight", "dead"):
                    self._add(table.HUB_QUEUE_ITEMS, getattr(depth, each), queue.name, each)
        return dict(self._found)

    def _add(self, metric: table.Metric, value: float, *labels: str) -> None:
        series = self._found[metric.name]
        if len(series) < SERIES_MAX:
            series.append((labels, value))
            return
        instruments.METRICS_ERRORS.of(metric.name).add()
        _log.log(metric.name, logging.WARNING, "%s: only the first %d series are exported", metric.name, SERIES_MAX)

    def _read_topic(self, topic: SeenTopic) -> None:
        name, extents = topic.name, topic.bounds(range(topic.partitions)).values()
        self._add(table.HUB_TOPIC_PARTITIONS, len(extents), name)
        self._add(table.HUB_TOPIC_MESSAGES, sum(end - start for start, end in extents), name)
        self._add(table.HUB_TOPIC_END, sum(end for _, end in extents), name)
        folder = self._hub.log.folder
        if folder is not None and (size := size_of(folder / "topics" / name / "partitions")) is not None:
            self._add(table.HUB_TOPIC_BYTES, size, name)

    def _read_group(self, found: GroupDescription, there: Container[str], now: float) -> None:
        """there: the ids of the topics of the hub. now: seconds since 1970."""
        self._add(table.HUB_GROUP_MEMBERS, len(found.members), found.name)
        unowned = sum(not each.is_owner_there for each in found.partitions)
        self._add(table.HUB_GROUP_UNOWNED, unowned, found.name)
        paused = sum(each.paused is not None for each in found.partitions)
        self._add(table.HUB_GROUP_PAUSED, paused, found.name)
        for topic in found.topics:
            if topic.lag is None:
                continue  # absent: 0 would say that there is nothing left to do
            if not topic.is_source and topic.topic_id not in there:
                continue  # it was deleted: the checkpoints stay until the group is deleted, under an id as the name
            self._add(table.HUB_GROUP_LAG, topic.lag, found.name, topic.topic)
            behind = [each for each in found.partitions if each.topic_id == topic.topic_id and each.lag]
            self._add(
                table.HUB_GROUP_LAG_MAX, max((each.lag or 0 for each in behind), default=0), found.name, topic.topic
            )
            ages = [max(0.0, now - each.when) for each in behind if each.when is not None]
            self._add(table.HUB_GROUP_AGE, max(ages, default=0.0), found.name, topic.topic)


class _Registered:
    """The registered sources of a hub, listed once for all groups of a reading."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.records = functools.cache(hub.sources)

    def open(self, name: str) -> SqlTable:
        return self._hub.source(name)

    def open_to_look(self, name: str) -> SqlTable:
        return self._hub.source(name)


def size_of(partitions: Path) -> int | None:
    """The bytes of all files of a topic's partitions; None if they cannot be read from here."""
    total = 0
    try:
        for folder in os.scandir(partitions):
            for file in os.scandir(folder):
                try:
                    total += file.stat(follow_symlinks=False).st_size
                except FileNotFoundError:
                    continue  # retention has removed it meanwhile
    except OSError:
        return None
    return total


@contextmanager
def _left_out(metric: table.Metric, what: str) -> Iterator[None]:
    """Log and count what cannot be read; the rest is read all the same. Not if the registry cannot be reached, because
    then each of thousands of names would wait for it."""
    try:
        yield
    except UnknownQueue:
        pass  # it was deleted since it was listed
    except RegistryUnavailable:
        raise
    except PxrsError as error:
        instruments.METRICS_ERRORS.of(metric.name).add()
        _log.log(metric.name, logging.WARNING, "%s cannot be read for metrics: %s", what, error)


class KeptReading:
    """The last reading, and the thread that makes the next one when somebody asks."""

    def __init__(
        self, read: Callable[[], Snapshot], keep_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read, self._keep_s, self._clock = read, keep_s, clock
        self._changed = threading.Condition()
        """Guards the fields below."""
        self._values: Snapshot = {}
        self._read_at: float | None = None
        """When the values were read; None before the first reading that succeeded."""
        self._took_s = 0.0
        self._due_at = float("-inf")
        self._is_wanted = self._is_closing = False
        self._done = 0
        """How many readings have ended."""
        self._began_at: float | None = None
        """When the reading that is under way began; None if none is."""
        self._error = "the hub has not been read yet"
        """Why the last reading failed; empty if it succeeded."""
        self._thread = threading.Thread(target=self._serve, name="pxrs-metrics-reading", daemon=True)
        self._thread.start()

    def parts(self) -> list[Part]:
        """The values to export; those of the last reading if the next one takes longer than WAIT_S."""
        from pxrs.metrics.prometheus import Part

        with self._changed:
            self._await_due(WAIT_S)
            values = dict(self._values)
            values[table.HUB_UP.name] = [((), 0 if self._problem() else 1)]
            if self._read_at is not None:
                values[table.HUB_AGE.name] = [((), max(0.0, self._clock() - self._read_at))]
                values[table.HUB_READ.name] = [((), self._took_s)]
        return [Part({}, {**instruments.snapshot(), **values})]

    def ready(self) -> Verdict:
        """Whether the hub could be read the last time, and the reading that is under way makes progress."""
        with self._changed:
            self._await_due(READY_WAIT_S)
            problem = self._problem()
            return Verdict(not problem, problem)

    def _problem(self) -> str:
        """Under `_changed`: why the hub cannot be read now; empty if it can."""
        if self._began_at is not None and (for_s := self._clock() - self._began_at) >= SILENT_S:
            return f"reading the hub has taken {for_s:.0f} s so far, without an answer"
        return self._error

    def _await_due(self, wait_s: float) -> None:
        """Under `_changed`: if a reading is due or under way, wait for it, for up to this time."""
        if self._clock() >= self._due_at:
            self._is_wanted = True
            self._changed.notify_all()
        until = self._done + 1 if self._is_wanted else self._done
        self._changed.wait_for(lambda: self._done >= until or self._is_closing, wait_s)

    def close(self) -> None:
        """End the thread, once the reading that is under way has ended; wait for that no longer than WAIT_S."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(WAIT_S)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_wanted or self._is_closing)
                if self._is_closing:
                    return
                began = self._began_at = self._clock()
            values: Snapshot | None = None
            error = ""
            try:
                values = self._read()
            except Exception as raised:  # noqa: BLE001 - /readyz shows it, and the next request tries again
                error = str(raised) or type(raised).__name__
                _log.log("hub", logging.WARNING, "the hub cannot be read for metrics: %s", raised)
            ended = self._clock()
            with self._changed:
                if values is not None:
                    self._values, self._read_at, self._took_s = values, ended, ended - began
                self._error, self._began_at = error, None
                pause_s = FAILED_S if values is None else max(self._keep_s, PAUSE_FACTOR * (ended - began))
                self._due_at = ended + pause_s
                self._is_wanted = False
                self._done += 1
                self._changed.notify_all()
