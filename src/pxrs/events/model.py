"""`Event`: something that happened to a hub, with its fields, as a value and as the JSON text that a topic keeps."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

Json = object
"""A value that JSON can express: None, bool, int, float, str, or a list or dictionary of such values."""
EVENT_BYTES_MAX: Final = 16 << 10
"""How long the stored text of one event may be. Long texts in it are shortened."""
TEXT_CHARACTERS_MAX: Final = 1_000
"""How long a text in an event that is too large may be."""
ACTION: Final = re.compile("[a-z_]{1,50}")
"""The names of actions, and the second part of the names of all events."""
AT_MAX: Final = (1 << 63) - 1
"""The latest time that a message of the log can have, in microseconds since 1970."""


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
        """The event as it is stored: at most EVENT_BYTES_MAX bytes. If it is longer, long texts are shortened; then
        fields are left out, the longest ones first, and `shortened` says so. Never raises: a value that JSON cannot
        express is replaced by the name of its type."""
        found = {"name": self.name, "at": self.at, "fields": dict(self.fields)}
        try:
            stored = _json(found).encode()
        except Exception:  # noqa: BLE001 - a user's object, or a value that contains itself
            return self._dump_shortened()
        return stored if len(stored) <= EVENT_BYTES_MAX else self._dump_shortened()

    def _dump_shortened(self) -> bytes:
        texts = {name: _shortened_json(value) for name, value in self.fields.items()}
        longest_last = sorted(texts, key=lambda name: len(texts[name]))
        while True:
            fields = ",".join(f"{_json(name)}:{text}" for name, text in texts.items())
            stored = f'{{"name":{_json(self.name)},"at":{self.at},"fields":{{{fields}}}}}'.encode()
            if len(stored) <= EVENT_BYTES_MAX or not longest_last:
                return stored
            del texts[longest_last.pop()]
            texts["shortened"] = "true"

    @classmethod
    def load(cls, value: bytes | None) -> Event | None:
        """The event that was stored so; None if this is none."""
        try:
            found = json.loads(value or b"")
            name, at, fields = found["name"], found["at"], found["fields"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        is_one = isinstance(name, str) and isinstance(fields, dict) and type(at) is int and 0 <= at <= AT_MAX
        return cls(name, at, fields) if is_one else None


def _json(value: Json) -> str:
    """In ASCII."""
    return json.dumps(value, separators=(",", ":"), default=str)


def _shortened_json(value: Json) -> str:
    try:
        return _json(_shortened(value))
    except Exception:  # noqa: BLE001 - as in `dump`
        return _json(f"<{type(value).__name__}>")


def _shortened(value: Json) -> Json:
    if isinstance(value, Mapping):
        return {name: _shortened(each) for name, each in value.items()}
    if isinstance(value, str) and len(value) > TEXT_CHARACTERS_MAX:
        return f"{value[:TEXT_CHARACTERS_MAX]}..."
    return value
