"""Pure: encodes and decodes the entries of a ledger.

Entry 0 of a ledger is the state of the partition's producers when the ledger began, as JSON (C3). Every other entry
contains the batches that one append stored in the partition, as frames of docs/format.md one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pxrs.errors import DamagedFrame
from pxrs.log.batch import (
    HEADER_BYTES,
    SCHEMA,
    Batch,
    Header,
    Origin,
    Payload,
    header_bytes,
    padding,
    read_header,
    read_payload,
)
from pxrs.log.contract import Append
from pxrs.log.producers import Producers

STATE_ENTRY = 0
"""The number of the entry that contains the producers' state."""


class Frame(NamedTuple):
    """One batch of an entry."""

    offset: int
    rows: int
    data: pa.Buffer
    """One Arrow IPC record batch, without the schema; it may be compressed."""

    @property
    def next_offset(self) -> int:
        return self.offset + self.rows

    def batch(self) -> Batch:
        return Batch(self.offset, pa.ipc.read_record_batch(self.data, SCHEMA), encoded=self.data)


class Entry(NamedTuple):
    """An entry that was encoded by this broker, or read from a node and verified."""

    frames: tuple[Frame, ...]
    pieces: tuple[Any, ...]
    """Its bytes, as a sequence of bytes objects and Arrow buffers."""
    size: int
    offset: int
    """The offset of its first row."""
    rows: int
    last_timestamp: int
    stored_at: int

    @property
    def next_offset(self) -> int:
        return self.offset + self.rows

    def origins(self, place: int) -> Iterator[tuple[Origin, int]]:
        """The origin and the offset of each batch. Only for entries made by `encode_entry`, which has three pieces per
        batch, the first of which is the header."""
        for piece in self.pieces[::3] if self.frames else ():
            header = read_header(piece, "an entry", 0, place)
            yield header.origin, header.base_offset


def state_entry(producers: Producers, offset: int, now: int) -> Entry:
    """Entry 0 of a ledger that begins at the offset `offset`. now: in microseconds since 1970."""
    text = json.dumps(producers.dump(), separators=(",", ":")).encode()
    return Entry((), (text,), len(text), offset, 0, 0, now)


def load_state(data: bytes) -> dict[str, Any]:
    """The producers' state in the body of entry 0. Raises ValueError if it is malformed."""
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object with the state of producers")
    return found


def encode_entry(new: Sequence[tuple[Append, int]], place: int, now: int) -> Entry:
    """The entry with these batches, each given with its offset. place: the partition's `place_id`. now: in microseconds
    since 1970."""
    frames, pieces, size = [], [], 0
    for follows, (append, offset) in enumerate(new):
        payload: Payload = append.payload
        pieces += [
            header_bytes(payload, offset, append.origin, place=place, stored_at=now, follows=follows),
            payload.data,
            padding(payload),
        ]
        size += payload.frame_bytes
        frames.append(Frame(offset, payload.rows, payload.data))
    first = frames[0].offset
    times = max(append.payload.last_timestamp for append, _ in new)
    return Entry(tuple(frames), tuple(pieces), size, first, frames[-1].next_offset - first, times, now)


def headers(data: Any, where: str, place: int) -> Iterator[tuple[int, Header]]:
    """The position and header of each frame of an entry. Raises DamagedFrame."""
    view, position = memoryview(data), 0
    while position < len(view):
        header = read_header(view[position : position + HEADER_BYTES], where, position, place)
        if not header.frame_bytes:
            raise DamagedFrame(where, position, "the header contradicts itself")
        yield position, header
        position += header.frame_bytes


def origin_heads(data: Any, where: str, place: int) -> Iterator[Header]:
    """The headers in the answer to a read with `heads`: those of an entry's frames, one after the other. Raises
    DamagedFrame."""
    view, position = memoryview(data), 0
    while position < len(view):
        header = read_header(view[position : position + HEADER_BYTES], where, position, place)
        yield header
        position += header.header_bytes


def decode_entry(data: pa.Buffer, where: str, place: int) -> Entry:
    """Decode the body of an entry, and verify every checksum. where: names the ledger and the entry in errors. Raises
    DamagedFrame."""
    frames, last_timestamp, stored_at = [], 0, 0
    for position, header in headers(data, where, place):
        read_payload(header, data.slice(position), where, position)
        start = position + header.header_bytes
        frames.append(Frame(header.base_offset, header.rows, data.slice(start, header.payload_bytes)))
        last_timestamp = max(last_timestamp, header.last_timestamp) if len(frames) > 1 else header.last_timestamp
        stored_at = header.stored_at
    if not frames:
        raise DamagedFrame(where, 0, "the entry holds no batch")
    rows = frames[-1].next_offset - frames[0].offset
    return Entry(tuple(frames), (data,), data.size, frames[0].offset, rows, last_timestamp, stored_at)


def offset_of(frames: Iterable[Frame], timestamp: int) -> int | None:
    """The offset of the first row with this timestamp or a later one; None if there is none."""
    for frame in frames:
        times = frame.batch().records.column("timestamp").cast(pa.int64())
        at = pc.index(pc.greater_equal(times, timestamp), True).as_py()
        if at >= 0:
            return frame.offset + int(at)
    return None


def within(frames: Iterable[Frame], offset: int, max_bytes: int) -> list[Batch]:
    """The batches from this offset on, about `max_bytes` but at least one. The first batch is cut at the offset."""
    found: list[Batch] = []
    size = 0
    for frame in frames:
        if frame.next_offset <= offset:
            continue
        size += frame.data.size
        if found and size > max_bytes:
            break
        found.append(frame.batch().within(offset))
    return found
