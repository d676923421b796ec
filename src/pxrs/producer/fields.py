"""The fields of one message, as users give them to `send`, checked and converted."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from pxrs.errors import InvalidRecord
from pxrs.model import microseconds_of

Headers = list[tuple[str, bytes | None]]


def bytes_of(name: str, given: object) -> bytes | None:
    """The key, value or header with this name. The very same object if it is bytes. Raises InvalidRecord."""
    if given is None or isinstance(given, bytes):
        return given
    if isinstance(given, str):
        return _utf8(name, given)
    if isinstance(given, bytearray | memoryview):
        return bytes(given)
    raise InvalidRecord(f"the {name} must be bytes, str or None, not {type(given).__name__}")


def headers_of(headers: Iterable[tuple[str, bytes | None]]) -> Headers:
    """The headers, checked. Raises InvalidRecord."""
    try:
        pairs = [(name, bytes_of("header", content)) for name, content in headers]
    except (TypeError, ValueError) as error:
        raise InvalidRecord(f"headers are pairs of a name and bytes: {error}") from None
    for name, _ in pairs:
        if not isinstance(name, str):
            raise InvalidRecord(f"the header name {name!r} is not a str")
        _utf8("header name", name)
    return pairs


def microseconds(timestamp: int | datetime) -> int:
    """The time in microseconds since 1970. Raises InvalidRecord."""
    if isinstance(timestamp, datetime):
        if timestamp.tzinfo is None:
            raise InvalidRecord(f"the time {timestamp} has no time zone; give one, such as UTC")
        return microseconds_of(timestamp)
    if not isinstance(timestamp, int) or isinstance(timestamp, bool) or not -(1 << 63) <= timestamp < 1 << 63:
        raise InvalidRecord(f"the time {timestamp!r} must be a datetime or whole microseconds since 1970")
    return timestamp


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRecord(f"the {name} cannot be encoded as UTF-8: {error}") from None
