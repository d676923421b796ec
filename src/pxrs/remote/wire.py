"""The words of docs/wire.md: names of calls, and how values are written as JSON."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any, Final

from pxrs.errors import PxrsError
from pxrs.errors import wire as errors_wire
from pxrs.model import Topic
from pxrs.registry.values import Entry

VERSION: Final = 1
"""The version of the protocol that this version of pxrs speaks."""
VERSION_MIN: Final = 1
"""The oldest version that it speaks."""
CONTROL: Final = b"pxrs.control"
"""The command in the descriptor of a control stream."""
ERROR_METADATA: Final = "pxrs-error-bin"
"""The trailing metadata with the error of a call, as JSON."""
TOKEN_METADATA: Final = "authorization"
DIRECT_METADATA: Final = "pxrs-direct"
"""Metadata of a call to a broker of a cluster that wants no other broker to be asked: a partition that the broker does
not own is refused with PartitionMoved."""
MESSAGE_BYTES_MAX: Final = (64 << 20) + (1 << 20)
"""The longest message of gRPC: a frame of the log, and what is around it."""
ERROR_TEXT_MAX: Final = 4096
"""How much of an error is sent in metadata, which gRPC bounds to 8 kB."""


def dumps(value: Mapping[str, Any]) -> bytes:
    return _encode(value).encode()


def loads(data: bytes | memoryview) -> dict[str, Any]:
    """Raises ValueError if it is not one JSON object, and RecursionError if it is nested too deeply."""
    found = _decode(bytes(data).decode())
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


# Made once: `json.dumps` and `json.loads` make a new one for each call with options.
_encode: Final = json.JSONEncoder(separators=(",", ":")).encode
_decode: Final = json.JSONDecoder(parse_constant=_refuse).decode


def text_of(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def bytes_of(text: object) -> bytes:
    """Raises ValueError if it is not base64 text."""
    if not isinstance(text, str):
        raise ValueError("bytes must be sent as a base64 string")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from error


def entry_to_list(entry: Entry) -> list[Any]:
    return [entry.key, text_of(entry.value), entry.version]


def entry_of(found: list[Any]) -> Entry:
    key, value, version = found
    return Entry(key, bytes_of(value), version)


def topic_to_dict(topic: Topic) -> dict[str, Any]:
    from dataclasses import asdict

    found = asdict(topic)
    return {**found.pop("extra"), **found}


def topic_of(found: Mapping[str, Any]) -> Topic:
    """Raises InvalidTopic, and TypeError if something is missing."""
    known = {name: value for name, value in found.items() if name in Topic.__dataclass_fields__ and name != "extra"}
    extra = {name: value for name, value in found.items() if name not in Topic.__dataclass_fields__}
    return Topic(**known, extra=extra)


def error_to_dict(error: PxrsError) -> dict[str, Any]:
    return errors_wire.to_dict(error)


def any_error_to_dict(error: Exception) -> dict[str, Any]:
    """As `error_to_dict`. An error that is not of pxrs is sent as a PxrsError with its text."""
    return error_to_dict(error if isinstance(error, PxrsError) else PxrsError(f"{type(error).__name__}: {error}"))


def error_of(found: Mapping[str, Any]) -> PxrsError:
    return errors_wire.from_dict(found)


def error_to_metadata(error: PxrsError) -> bytes:
    """The error as metadata, in at most ERROR_TEXT_MAX bytes. One that is longer is sent without its cause and notes,
    then without its fields, then with a shorter text."""
    found = errors_wire.to_dict(error)
    shorter: list[dict[str, Any]] = [{}, {"cause": None, "notes": []}, {"fields": {}}]
    # JSON needs up to 12 bytes for a character.
    for change in (*shorter, {"message": found["message"][: ERROR_TEXT_MAX // 24]}):
        found.update(change)
        text = dumps(found)
        if len(text) <= ERROR_TEXT_MAX:
            break
    return text
