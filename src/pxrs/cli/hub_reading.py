"""What `pxrs metrics` exports: the lag of all groups, and the sizes of topics and queues, read from the hub itself.

Reading costs one scan of the registry for each group and each queue, and looks at each partition of each topic. So what
was read is kept: a reading begins only if somebody asks for metrics and the last one is at least `keep_s` old, and also
four times as old as the last reading took, so that reading takes at most a fifth of the time, however large the hub
is. A request that has waited for WAIT_S gets the values of the last reading, with their age.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pxrs.errors import NoDirectory, PxrsError, RegistryUnavailable, UnknownGroup, UnknownQueue, UnknownTopic
from pxrs.hub import Hub
from pxrs.limited_log import LimitedLog
from pxrs.metrics import instruments, table
from pxrs.metrics.health import Verdict
from pxrs.metrics.instruments import Series, Snapshot
from pxrs.model import Topic

if TYPE_CHECKING:
    from pxrs.group.description import GroupDescription
    from pxrs.metrics.prometheus import Part

WAIT_S: Final = 8.0
"""How long a request waits for a reading. Prometheus gives up after 10 s by default."""
PAUSE_FACTOR: Final = 4.0
_log: Final = LimitedLog(logging.getLogger(__name__))


class HubReading:
    """One reading of a hub."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._found: defaultdict[str, list[Series]] = defaultdict(list)

    def read(self) -> Snapshot:
        """All values. What cannot be read is logged, counted as an error, and left out. Raises PxrsError if the hub
        cannot be read at all."""
        for topic in self._topics():
            with _left_out(table.HUB_TOPIC_MESSAGES, f"topic {topic.name}"):
                self._read_topic(topic.name)
        for group in self._hub.groups():
            with _left_out(table.HUB_GROUP_LAG, f"group {group}"):
                self._read_group(self._hub.group(group).describe(), time.time())
        for queue in self._hub.queues():
            with _left_out(table.HUB_QUEUE_ITEMS, f"queue {queue.name}"):
                depth = queue.depth()
                for state in ("ready", "delayed", "in_flight", "dead"):
                    self._add(table.HUB_QUEUE_ITEMS, getattr(depth, state), queue.name, state)
        return dict(self._found)

    def _topics(self) -> list[Topic]:
        try:
            return self._hub.topics()
        except NoDirectory:
            return []  # the hub was opened by its registry alone

    def _add(self, metric: table.Metric, value: float, *labels: str) -> None:
        self._found[metric.name].append((labels, value))

    def _read_topic(self, name: str) -> None:
        extents = self._hub.topic(name).log.extents()
        self._add(table.HUB_TOPIC_PARTITIONS, len(extents), name)
        self._add(table.HUB_TOPIC_MESSAGES, sum(end - start for start, end in extents), name)
        self._add(table.HUB_TOPIC_END, sum(end for _, end in extents), name)
        folder = self._hub.log.folder
        if folder is not None and (size := size_of(folder / "topics" / name / "partitions")) is not None:
            self._add(table.HUB_TOPIC_BYTES, size, name)

    def _read_group(self, found: GroupDescription, now: float) -> None:
        """now: seconds since 1970."""
        self._add(table.HUB_GROUP_MEMBERS, len(found.members), found.name)
        unowned = sum(not each.is_owner_there for each in found.partitions)
        self._add(table.HUB_GROUP_UNOWNED, unowned, found.name)
        paused = sum(each.paused is not None for each in found.partitions)
        self._add(table.HUB_GROUP_PAUSED, paused, found.name)
        for topic in found.topics:
            if topic.lag is None:
                continue  # absent: 0 would say that there is nothing left to do
            self._add(table.HUB_GROUP_LAG, topic.lag, found.name, topic.topic)
            behind = [each for each in found.partitions if each.topic_id == topic.topic_id and each.lag]
            self._add(
                table.HUB_GROUP_LAG_MAX, max((each.lag or 0 for each in behind), default=0), found.name, topic.topic
            )
            ages = [max(0.0, now - each.when) for each in behind if each.when is not None]
            self._add(table.HUB_GROUP_AGE, max(ages, default=0.0), found.name, topic.topic)


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
    except (UnknownTopic, UnknownGroup, UnknownQueue):
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
        self._error = "the hub was not read yet"
        """Why the last reading failed; empty if it succeeded."""
        self._thread = threading.Thread(target=self._serve, name="pxrs-metrics-reading", daemon=True)
        self._thread.start()

    def parts(self) -> list[Part]:
        """The values to export; those of the last reading if the next one takes longer than WAIT_S."""
        from pxrs.metrics.prometheus import Part

        with self._changed:
            self._await_due()
            values = dict(self._values)
            values[table.HUB_UP.name] = [((), 0 if self._error else 1)]
            if self._read_at is not None:
                values[table.HUB_AGE.name] = [((), max(0.0, self._clock() - self._read_at))]
                values[table.HUB_READ.name] = [((), self._took_s)]
        return [Part({}, {**instruments.snapshot(), **values})]

    def ready(self) -> Verdict:
        """Whether the hub could be read the last time."""
        with self._changed:
            self._await_due()
            return Verdict(not self._error, self._error)

    def _await_due(self) -> None:
        """Under `_changed`: if a reading is due or under way, wait for it, for up to WAIT_S."""
        if self._clock() >= self._due_at:
            self._is_wanted = True
            self._changed.notify_all()
        until = self._done + 1 if self._is_wanted else self._done
        self._changed.wait_for(lambda: self._done >= until or self._is_closing, WAIT_S)

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
            began = self._clock()
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
                self._error = error
                self._due_at = ended + max(self._keep_s, PAUSE_FACTOR * (ended - began))
                self._is_wanted = False
                self._done += 1
                self._changed.notify_all()
