"""Converts cells of the table to keys, values and times of messages."""

from __future__ import annotations

import base64
import json
import uuid
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from pxrs.errors import InvalidRecord
from pxrs.model import microseconds_of


def key_bytes(key: Any, column: str) -> bytes | None:
    """The key as bytes, the same in every database: whole numbers as decimal text."""
    if key is None:
        return None
    if isinstance(key, str):
        return key.encode()
    if isinstance(key, (bytes, bytearray, memoryview)):
        return bytes(key)
    if isinstance(key, uuid.UUID):
        return str(key).encode()
    if isinstance(key, Decimal) and key == key.to_integral_value():
        return str(int(key)).encode()
    if isinstance(key, int) and not isinstance(key, bool):
        return str(key).encode()
    raise InvalidRecord(
        f"a key in {column} has the type {type(key).__name__}; keys must be whole numbers, text, bytes or UUIDs"
    )


def micros(moment: Any, column: str) -> int:
    if moment is None:
        return 0
    if isinstance(moment, str):
        try:
            moment = datetime.fromisoformat(moment)
        except ValueError:
            raise InvalidRecord(f"a time in {column} is {moment!r}; as text it must be like 2026-01-31T12:00") from None
    if not isinstance(moment, datetime):
        raise InvalidRecord(f"a time in {column} has the type {type(moment).__name__}; it must be a date with a time")
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return microseconds_of(moment)


def as_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain).encode()


def _plain(value: Any) -> Any:
    """Types that JSON does not have: times as ISO 8601, bytes as base64, exact numbers and all others as text."""
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode()
    return str(value)
