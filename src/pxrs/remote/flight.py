"""Messages of Arrow Flight's gRPC service, encoded and decoded by hand.

Only the fields that pxrs uses are written; unknown ones are skipped. `FlightData` matters for speed: its
header and body are slices of an encoded Arrow IPC message, so nothing is decoded to be sent.

    FlightData        1 descriptor   2 data_header   3 app_metadata   1000 data_body
    FlightDescriptor  1 type (1 path, 2 cmd)   2 cmd   3 path (repeated)
    Ticket            1 ticket
    Action            1 type   2 body
    ActionType        1 type   2 description
    Result, PutResult 1 body / app_metadata
    SchemaResult      1 schema
    FlightInfo        1 schema   2 descriptor   3 endpoint (repeated)   4 total_records   5 total_bytes
    FlightEndpoint    1 ticket
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import pyarrow as pa

from pxrs.log.batch import SCHEMA

SERVICE: Final = "arrow.flight.protocol.FlightService"
_BODY_TAG: Final = b"\xc2\x3e"
"""Field 1000, length-delimited."""
_CONTINUATION: Final = b"\xff\xff\xff\xff"
_PATH, _COMMAND = 1, 2
FIELDS_MAX: Final = 1_000
"""How many fields a message may have. Those of Flight have a few; to read millions would stop the event loop."""

Bytes = bytes | memoryview


class MalformedMessage(Exception):
    """The bytes are no message of protobuf."""


class FlightData(NamedTuple):
    """One message of a stream of batches."""

    header: Bytes = b""
    """The metadata of an Arrow IPC message, without the length before it."""
    body: Bytes = b""
    app_metadata: Bytes = b""
    command: bytes | None = None
    """What the descriptor in the first message of a client has as `cmd`; None if there is no descriptor."""


class Descriptor(NamedTuple):
    command: bytes = b""
    path: tuple[str, ...] = ()


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def field(number: int, value: Bytes) -> bytes:
    """A length-delimited field: bytes, text or a message."""
    return b"".join((varint(number << 3 | 2), varint(len(value)), value))


def fields(data: Bytes) -> Iterator[tuple[int, memoryview | int]]:
    """The fields of a message: their numbers, and their contents without a copy. Raises MalformedMessage, also if there
    are more than FIELDS_MAX."""
    view = memoryview(data)
    at, end = 0, len(view)
    for _ in range(FIELDS_MAX):
        if at >= end:
            return
        tag, at = _read_varint(view, at)
        number, kind = tag >> 3, tag & 7
        if kind == 2:
            size, at = _read_varint(view, at)
            if size > end - at:
                raise MalformedMessage("a field is longer than the message")
            yield number, view[at : at + size]
            at += size
        elif kind == 0:
            value, at = _read_varint(view, at)
            yield number, value
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
            if at > end:
                raise MalformedMessage("a field is longer than the message")
        else:
            raise MalformedMessage(f"a field has the unknown wire type {kind}")
    if at < end:
        raise MalformedMessage(f"more than {FIELDS_MAX:,} fields")


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        if at >= len(view) or shift > 63:
            raise MalformedMessage("a varint is truncated or longer than 64 bits")
        byte = view[at]
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, at
        shift += 7


def _bytes(data: Bytes, number: int) -> bytes:
    """The last field of this number; empty if there is none."""
    found = b""
    for each, value in fields(data):
        if each == number and not isinstance(value, int):
            found = bytes(value)
    return found


# FlightData.


def ipc_message(data: Bytes) -> tuple[memoryview, memoryview]:
    """The metadata and the body of one encapsulated Arrow IPC message, as slices of it. Raises MalformedMessage."""
    view = memoryview(data).cast("B")
    if len(view) < 8 or bytes(view[:4]) != _CONTINUATION:
        raise MalformedMessage("not an Arrow IPC message")
    (size,) = struct.unpack_from("<i", view, 4)
    if not 0 < size <= len(view) - 8:
        raise MalformedMessage("an Arrow IPC message is truncated")
    return view[8 : 8 + size], view[8 + size :]


def encapsulated(header: Bytes, body: Bytes) -> pa.Buffer:
    """One Arrow IPC message of its two parts, as `pa.ipc.read_record_batch` takes it; copies both."""
    padding = -len(header) % 8
    parts = (_CONTINUATION, struct.pack("<i", len(header) + padding), header, b"\0" * padding, body)
    return pa.py_buffer(b"".join(parts))


SCHEMA_HEADER: Final = bytes(ipc_message(SCHEMA.serialize())[0])
"""The header of the first message of every stream of batches of topics: their schema."""


def flight_data(message: FlightData) -> bytes:
    parts: list[Bytes] = []
    if message.command is not None:
        parts.append(field(1, descriptor(Descriptor(message.command))))
    if len(message.header):
        parts += (b"\x12", varint(len(message.header)), message.header)
    if len(message.app_metadata):
        parts += (b"\x1a", varint(len(message.app_metadata)), message.app_metadata)
    if len(message.header):  # Flight's own clients expect the field after a header, even if it is empty
        parts += (_BODY_TAG, varint(len(message.body)), message.body)
    return b"".join(parts)


def read_flight_data(data: Bytes) -> FlightData:
    """Its parts are slices of `data`. Raises MalformedMessage."""
    header: Bytes = b""
    body: Bytes = b""
    app_metadata: Bytes = b""
    command = None
    for number, value in fields(data):
        if isinstance(value, int):
            continue
        if number == 1:
            command = read_descriptor(value).command
        elif number == 2:
            header = value
        elif number == 3:
            app_metadata = value
        elif number == 1000:
            body = value
    return FlightData(header, body, app_metadata, command)


# The small ones.


def descriptor(value: Descriptor) -> bytes:
    if value.path:
        return b"".join((b"\x08", varint(_PATH), *(field(3, each.encode()) for each in value.path)))
    return b"\x08" + varint(_COMMAND) + field(2, value.command)


def read_descriptor(data: Bytes) -> Descriptor:
    command, path = b"", []
    for number, value in fields(data):
        if isinstance(value, int):
            continue
        if number == 2:
            command = bytes(value)
        elif number == 3:
            path.append(bytes(value).decode(errors="replace"))
    return Descriptor(command, tuple(path))


def ticket(value: bytes) -> bytes:
    return field(1, value)


def read_ticket(data: Bytes) -> bytes:
    return _bytes(data, 1)


def action(name: str, body: bytes) -> bytes:
    return field(1, name.encode()) + field(2, body)


def read_action(data: Bytes) -> tuple[str, bytes]:
    return _bytes(data, 1).decode(errors="replace"), _bytes(data, 2)


def action_type(name: str, description: str) -> bytes:
    return field(1, name.encode()) + field(2, description.encode())


def result(body: bytes) -> bytes:
    """A `Result`, a `PutResult` or a `SchemaResult`: each has one field."""
    return field(1, body)


def read_result(data: Bytes) -> bytes:
    return _bytes(data, 1)


def flight_info(schema: pa.Schema, about: Descriptor, tickets: Iterable[bytes]) -> bytes:
    endpoints = (field(3, field(1, ticket(each))) for each in tickets)
    unknown = b"\x20" + varint((1 << 64) - 1) + b"\x28" + varint((1 << 64) - 1)
    return b"".join((field(1, schema.serialize()), field(2, descriptor(about)), *endpoints, unknown))
