"""Where events are kept: the internal topics `_events` and `_audit`, each with one partition and a bounded retention.

A topic is created by the first event. A hub whose directory does not exist yet is not created by an event: nothing but
`create_topic` makes a hub. The log of a hub that a server keeps is written by the server (`Log.record_events`), which
adds who the caller is, so that no client can write events in the name of another one.
"""

from __future__ import annotations

import time
import uuid
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

from pxrs.errors import NoDirectory, TopicExists, UnknownTopic
from pxrs.events.model import Event
from pxrs.log.contract import Log, TopicLog
from pxrs.model import AUDIT_TOPIC, EVENTS_TOPIC, Topic

DAY_S: Final = 86_400.0
RETAIN_S: Final = 600.0
"""How often a process that records events applies the retention of their topics. The janitor does it too."""
RETENTION_BYTES: Final = 64 << 20
"""How many bytes of each internal topic are kept."""
SEGMENT_BYTES: Final = 4 << 20
SETTINGS: Final = {
    EVENTS_TOPIC: {"retention_s": 7 * DAY_S, "durability": "os"},
    AUDIT_TOPIC: {"retention_s": 365 * DAY_S, "durability": "disk"},
}
"""What differs between the internal topics. Events survive the death of every process; a power loss may take the last
seconds of them. What administrators did survives that too."""


def settings_of(name: str) -> Topic:
    """The description of a new internal topic of this name."""
    given = {"retention_bytes": RETENTION_BYTES, "segment_bytes": SEGMENT_BYTES, **SETTINGS[name]}
    return Topic(name, uuid.uuid4().hex, 1, **given)  # type: ignore[arg-type]


class EventStore:
    """Appends events to the internal topics of one log. Used by one thread at a time for each topic."""

    def __init__(self, log: Log, prepare: Callable[[], None]) -> None:
        """prepare: called before a topic is created."""
        self._log, self._prepare = log, prepare
        self._topics: dict[str, TopicLog] = {}
        self._retained_at: dict[str, float] = {}

    def store(self, name: str, events: Sequence[Event]) -> None:
        """Append the events to the topic of this name, in one batch. Raises PxrsError if that failed, or is not known
        to have been done: storing them again may store them twice."""
        if self._log.is_kept_by_server:
            self._log.record_events([each.dump() for each in events])
        else:
            self._append(name, events)

    def _append(self, name: str, events: Sequence[Event]) -> None:
        topic = self._topic(name)
        try:
            append(topic, events)
        except UnknownTopic:  # somebody has deleted it
            del self._topics[name]
            append(self._topic(name), events)
        self._retain(name)

    def _topic(self, name: str) -> TopicLog:
        found = self._topics.get(name)
        if found is None:
            found = self._topics[name] = self._open(name)
        return found

    def _open(self, name: str) -> TopicLog:
        self._log.check_topics()
        folder = self._log.folder
        if folder is not None and not folder.is_dir():
            raise NoDirectory(self._log.url)
        try:
            return self._log.topic(name)
        except UnknownTopic:
            self._prepare()
        try:
            return self._log.create_topic(settings_of(name))
        except TopicExists:  # another process has created it since
            return self._log.topic(name)

    def _retain(self, name: str) -> None:
        """Apply the topic's retention, if this process has not done so for RETAIN_S seconds."""
        now = time.monotonic()
        if now >= self._retained_at.setdefault(name, now) + RETAIN_S:
            self._retained_at[name] = now
            topic = self._topics[name]
            topic.retain(topic.clock.wall_time_us())


def append(topic: TopicLog, events: Sequence[Event]) -> None:
    """Append the events to an internal topic as one batch. Raises PxrsError."""
    import pyarrow as pa  # here: this module is imported by processes that record nothing

    from pxrs.log.batch import SCHEMA
    from pxrs.log.contract import Append
    from pxrs.log.outcomes import StoredAt

    # From buffers: `pa.array` of a list would import pandas where that is installed, a second of work.
    def binary(values: list[bytes]) -> pa.Array:
        offsets = array("i", accumulate(map(len, values), initial=0))
        return pa.Array.from_buffers(
            pa.binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(values))]
        )

    columns = [
        binary([_key(each) for each in events]),
        binary([each.dump() for each in events]),
        pa.Array.from_buffers(
            SCHEMA.field("timestamp").type,
            len(events),
            [None, pa.py_buffer(array("q", [each.at for each in events]))],
        ),
        pa.nulls(len(events), SCHEMA.field("headers").type),
    ]
    (outcome,) = topic.append([Append.encoded(0, pa.RecordBatch.from_arrays(columns, schema=SCHEMA))])
    if not isinstance(outcome, StoredAt):
        raise outcome.error


def _key(event: Event) -> bytes:
    """What the event concerns: the key of its message, for whoever reads the topic by other means."""
    for kind in ("group", "queue", "topic"):
        name = event.fields.get(kind)
        if isinstance(name, str):
            return f"{kind}/{name}".encode(errors="replace")
    return event.name.encode(errors="replace")
