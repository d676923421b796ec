"""`Event`: something that happened to a hub, with its fields, as a value and as the JSON text that a topic keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

Json = object
"""A value that JSON can express: None, bool, int, float, str, or a list or dictionary of such values."""
EVENT_BYTES_MAX: Final = 16 << 10
"""How long the stored text of one event may be. Long texts in it are shortened."""
TEXT_CHARACTERS_MAX: Final = 1_000
"""How long a text in an event that is too large may be."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `pxrs.events.names` lists the names, and the fields of each."""

    name: str
    """Such as `partition.taken_over`. Those of `_audit` begin with `audit.`."""
    at: int
    """When it happened, by the clock of the process that recorded it: microseconds since 1970."""
    fields: Mapping[str, Json] = field(default_factory=dict)
    """What it concerns: group, topic, topic_id, partition, epoch, member, ..."""

    @property
    def is_audit(self) -> bool:
        """Whether this is the action of an administrator, which belongs into `_audit`."""
        return self.name.startswith("audit.")

    def dump(self) -> bytes:
        """The event as it is stored: at most EVENT_BYTES_MAX bytes."""
        stored = _stored(self)
        if len(stored) <= EVENT_BYTES_MAX:
            return stored
        stored = _stored(Event(self.name, self.at, {name: _shortened(value) for name, value in self.fields.items()}))
        if len(stored) <= EVENT_BYTES_MAX:
            return stored
        plain = {name: value for name, value in self.fields.items() if isinstance(value, int | bool | None)}
        return _stored(Event(self.name, self.at, {**plain, "shortened": True}))

    @classmethod
    def load(cls, value: bytes | None) -> Event | None:
        """The event that was stored so; None if this is none."""
        try:
            found = json.loads(value or b"")
            name, at, fields = found["name"], found["at"], found["fields"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        is_one = isinstance(name, str) and type(at) is int and isinstance(fields, dict)
        return cls(name, at, fields) if is_one else None


def _stored(event: Event) -> bytes:
    found = {"name": event.name, "at": event.at, "fields": dict(event.fields)}
    return json.dumps(found, separators=(",", ":"), default=str).encode()


def _shortened(value: Json) -> Json:
    if isinstance(value, Mapping):
        return {name: _shortened(each) for name, each in value.items()}
    if isinstance(value, str) and len(value) > TEXT_CHARACTERS_MAX:
        return f"{value[:TEXT_CHARACTERS_MAX]}..."
    return value
