"""The fields of one message, as users give them to `send`, checked and converted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from pxrs.arguments import shown
from pxrs.errors import InvalidRecord
from pxrs.model import microseconds_of

Headers = list[tuple[str, bytes | None]]
GivenHeaders = Mapping[str, bytes | None] | Iterable[tuple[str, bytes | None]]
"""What `send` takes as headers: only pairs can have a name more than once."""


def bytes_of(name: str, given: object) -> bytes | None:
    """The key, value or header with this name. The very same object if it is bytes. Raises InvalidRecord."""
    if given is None or isinstance(given, bytes):
        return given
    if isinstance(given, str):
        return _utf8(name, given)
    if isinstance(given, bytearray | memoryview):
        return bytes(given)
    raise InvalidRecord(f"the {name} is {type(given).__name__}; give bytes, str or None")


def headers_of(headers: GivenHeaders) -> Headers:
    """The headers, checked. Raises InvalidRecord."""
    given = headers.items() if isinstance(headers, Mapping) else headers
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise InvalidRecord(f'headers is {shown(given)}: give a mapping such as {{"name": b"..."}}, or a list of pairs')
    pairs: Headers = []
    for pair in given:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InvalidRecord(f'the header {shown(pair)} is no pair: give ("name", b"...")')
        name, content = pair
        if not isinstance(name, str):
            raise InvalidRecord(f"the header name {shown(name)} is {type(name).__name__}; give str")
        _utf8("header name", name)
        pairs.append((name, bytes_of(f"header {shown(name)}", content)))
    return pairs


def microseconds(timestamp: int | datetime) -> int:
    """The time in microseconds since 1970. Raises InvalidRecord."""
    if isinstance(timestamp, datetime):
        if timestamp.tzinfo is None:
            raise InvalidRecord(f"the time {timestamp} has no time zone; give one, such as UTC")
        return microseconds_of(timestamp)
    if not isinstance(timestamp, int) or isinstance(timestamp, bool) or not -(1 << 63) <= timestamp < 1 << 63:
        raise InvalidRecord(f"the time {timestamp!r} is not in whole microseconds since 1970")
    return timestamp


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRecord(f"the {name} is no text that UTF-8 can hold: {error}") from None
