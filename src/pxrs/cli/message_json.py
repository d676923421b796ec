"""A message as one line of JSON, as `pxrs tail --json` prints it, and back, as `pxrs send --json` reads it.

Nothing is lost on the way: a key, a value or the value of a header is text if its bytes are UTF-8; if not, it is in
base64 under the name with the suffix `_base64`. A time beyond the calendar is in `timestamp_us`.
"""

from __future__ import annotations

import base64
import binascii
import json
from datetime import datetime
from typing import Any, Final, NamedTuple

from pxrs.cli.terminal import data_field, time_field
from pxrs.errors import InvalidRecord
from pxrs.model import Message, microseconds_of

_FIELDS: Final = {
    *("topic", "partition", "offset", "timestamp", "timestamp_us"),
    *("key", "key_base64", "value", "value_base64", "headers"),
}
_HEADER_FIELDS: Final = {"key", "value", "value_base64"}


class Record(NamedTuple):
    """What a line says about the message to be sent."""

    value: bytes | None
    key: bytes | None = None
    headers: list[tuple[str, bytes | None]] | None = None
    timestamp: int | None = None
    """Microseconds since 1970; None for the time at which it is sent."""
    partition: int | None = None
    """The partition that the message had; None if the line names none."""


def line_of(message: Message) -> str:
    """The message as a JSON object, from which `record_in` makes the same message."""
    headers = message.headers
    plain = {
        "partition": message.partition,
        "offset": message.offset,
        **time_field("timestamp", message.timestamp),
        **data_field("key", message.key),
        **data_field("value", message.value),
        "headers": None if headers is None else [{"key": name, **data_field("value", data)} for name, data in headers],
    }
    return json.dumps(plain)


def record_in(line: bytes) -> Record:
    """The message of a line. `offset` and `topic` are not used. Raises InvalidRecord for anything but an object with a
    value and no other fields than `line_of` writes: a misspelt field must not be left out unnoticed."""
    try:
        found = json.loads(line)
    except ValueError as error:
        raise InvalidRecord(f"not a JSON object: {error}") from error
    except RecursionError as error:
        raise InvalidRecord("its JSON is nested too deeply") from error
    if not isinstance(found, dict):
        raise InvalidRecord("not a JSON object")
    _check_fields("the object", found, _FIELDS)
    if "value" not in found and "value_base64" not in found:
        raise InvalidRecord("the field 'value' or 'value_base64' is missing: give null for a message without a value")
    return Record(
        _bytes_in(found, "value"), _bytes_in(found, "key"), _headers_in(found), _time_in(found), _partition_in(found)
    )


def _check_fields(what: str, found: dict[str, Any], known: set[str]) -> None:
    if unknown := sorted(found.keys() - known):
        raise InvalidRecord(f"{what} has the unknown field {unknown[0]!r}; the fields are {', '.join(sorted(known))}")


def _bytes_in(found: dict[str, Any], name: str) -> bytes | None:
    encoded, text = found.get(f"{name}_base64"), found.get(name)
    if encoded is not None and text is not None:
        raise InvalidRecord(f"{name!r} and '{name}_base64' are both set: give only one of them")
    if encoded is not None:
        try:
            return base64.b64decode(encoded, validate=True)
        except (TypeError, ValueError, binascii.Error) as error:
            raise InvalidRecord(f"'{name}_base64' is not valid base64: {error}") from None
    if text is None:
        return None
    if not isinstance(text, str):
        raise InvalidRecord(f"{name!r} is of type {type(text).__name__}: give a JSON string, null, or '{name}_base64'")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRecord(f"{name!r} cannot be encoded as UTF-8: {error}") from None


def _headers_in(found: dict[str, Any]) -> list[tuple[str, bytes | None]] | None:
    headers = found.get("headers")
    if headers is None:
        return None
    if not isinstance(headers, list) or not all(isinstance(each, dict) for each in headers):
        raise InvalidRecord('\'headers\' must be a list of objects such as {"key": "name", "value": "text"}')
    pairs = []
    for each in headers:
        _check_fields("a header", each, _HEADER_FIELDS)
        if not isinstance(each.get("key"), str):
            raise InvalidRecord("a header needs the field 'key', a string with its name")
        pairs.append((each["key"], _bytes_in(each, "value")))
    return pairs


def _time_in(found: dict[str, Any]) -> int | None:
    time_us, text = found.get("timestamp_us"), found.get("timestamp")
    if time_us is not None:
        if text is not None:
            raise InvalidRecord("'timestamp' and 'timestamp_us' are both set: give only one of them")
        if not isinstance(time_us, int) or isinstance(time_us, bool):
            raise InvalidRecord(f"'timestamp_us' is {time_us!r}: give an integer, in microseconds since 1970")
        return time_us
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise InvalidRecord(f"'timestamp' is {text!r}: give a time such as 2026-01-31T12:00:00.123456Z") from None
    if moment.tzinfo is None:
        raise InvalidRecord(f"'timestamp' is {text!r}: add its time zone, such as Z for UTC")
    return microseconds_of(moment)


def _partition_in(found: dict[str, Any]) -> int | None:
    partition = found.get("partition")
    if partition is not None and (not isinstance(partition, int) or isinstance(partition, bool)):
        raise InvalidRecord(f"'partition' is {partition!r}: give its number")
    return partition
