"""Record batches, and the frames that hold them on disk and on the wire (docs/format.md).

A frame is a header and a payload; the payload is one Arrow IPC record batch without its schema. Each has a checksum.
The checksum of the payload is computed before the append lock is taken. The checksum of the header covers the other one
and the offset, and is computed under the lock, where the offset is known. Readers check both.

Frames are written in format 2, whose header names the topic and the partition and has the time at which the frame was
stored. Frames of format 1 have neither, and are still read. One segment may hold frames of both formats.
"""

from __future__ import annotations

import struct
import uuid
from typing import Any, Final, NamedTuple

import pyarrow as pa
import xxhash

from pxrs.errors import DamagedFrame, InvalidRecord, MisplacedFile
from pxrs.model import CODECS

HEADERS_TYPE: Final = pa.list_(
    pa.field("item", pa.struct([pa.field("key", pa.string(), False), pa.field("value", pa.binary())]), False)
)
SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("headers", HEADERS_TYPE),
    ]
)
MAGIC: Final = b"PXRS"
FORMAT: Final = 2
ALIGNMENT: Final = 32
FRAME_BYTES_MAX: Final = 64 << 20
GAP_ROWS_MAX: Final = (1 << 32) - 1
NO_PRODUCER: Final = uuid.UUID(int=0)
_NO_BYTES: Final = NO_PRODUCER.bytes
_START: Final = struct.Struct("<4sBBH")
_FIELDS: Final = "IIQqq16sIIQQII"
_HEADER: Final = struct.Struct(f"<4sBBH{_FIELDS}Qq16x")
_CHECKSUM: Final = struct.Struct("<Q")
_LAYOUTS: Final = {1: struct.Struct(f"<4sBBH{_FIELDS}Q"), 2: struct.Struct(f"<4sBBH{_FIELDS}Qq16xQ")}
"""The layout of a whole header, by its format. The last field is the checksum of all fields before it."""
HEADER_BYTES: Final = _LAYOUTS[FORMAT].size
"""The length of a header of format 2, which is the longest."""
HEADER_BYTES_MIN: Final = _LAYOUTS[1].size
_OPTIONS: Final = {
    codec: pa.ipc.IpcWriteOptions(compression=None if codec == "none" else codec, use_threads=False) for codec in CODECS
}


_SCHEMA_BYTES: Final = SCHEMA.serialize().size
_NOTHING: Final = pa.py_buffer(b"")
NO_RECORDS: Final = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in SCHEMA], schema=SCHEMA)
_NO_TIME: Final = -(1 << 63)
_FEW: Final = 64
"""Up to this number of times are compared in Python, which needs no import and takes no longer."""


class Origin(NamedTuple):
    """Who appended a batch: a producer, its epoch, and the number of this batch in its partition (L4)."""

    producer: uuid.UUID
    epoch: int
    sequence: int


ANONYMOUS: Final = Origin(NO_PRODUCER, 0, 0)


class Header(NamedTuple):
    codec: int
    frame_bytes: int
    rows: int
    base_offset: int
    first_timestamp: int
    last_timestamp: int
    producer: bytes
    epoch: int
    schema_id: int
    sequence: int
    payload_checksum: int
    payload_bytes: int
    follows: int
    """How many frames of the same append precede this one. With durability "disk", 0 proves that everything before this
    frame was synced, because each append is synced before the next one is written."""
    place_id: int | None
    """Names the topic and partition that the frame was written for: see the function `place_id`. None in format 1."""
    stored_at: int
    """When the frame was written, in microseconds since 1970. Format 1 has no such field: there it is the latest
    timestamp of a record."""
    header_bytes: int

    @property
    def origin(self) -> Origin:
        """The origin of the batch. A property, because a scan over many headers needs few of them."""
        producer = NO_PRODUCER if self.producer == _NO_BYTES else uuid.UUID(bytes=self.producer)
        return Origin(producer, self.epoch, self.sequence)

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.rows

    @property
    def is_gap(self) -> bool:
        """Whether the frame is a gap: its offsets belong to no message. They may have been given to messages that a
        power loss has taken."""
        return self.payload_bytes == 0


class Payload(NamedTuple):
    """An encoded batch: everything of its frame that does not depend on where the frame is stored."""

    data: pa.Buffer
    """One Arrow IPC record batch of SCHEMA, without the schema, its buffers compressed by `codec`."""
    checksum: int
    """XXH3-64 of `data`."""
    rows: int
    first_timestamp: int
    """The earliest timestamp of a record, in microseconds since 1970."""
    last_timestamp: int
    """The latest timestamp of a record."""
    codec: int
    """The index of the codec's name in CODECS."""

    @property
    def frame_bytes(self) -> int:
        return _padded(HEADER_BYTES + self.data.size)


class _Checked(Payload):
    """A payload that `encode` or `received_payload` has made in this process. `check_encoded` accepts it without
    decoding it again, which would cost a tenth of an append of one record. A copy that was altered or unpickled is a
    plain Payload, because those bytes were not checked here."""

    __slots__ = ()

    def _replace(self, **changed: Any) -> Payload:  # type: ignore[override]  # not of this class
        return Payload(*self)._replace(**changed)

    def __reduce__(self) -> tuple[type[Payload], tuple[Any, ...]]:
        return Payload, tuple(self)


class Batch(NamedTuple):
    """Records with rising offsets. The offsets are consecutive from `base_offset` on, unless `offsets` lists them."""

    base_offset: int
    records: pa.RecordBatch
    offsets: pa.Int64Array | None = None
    """The offset of each record, in a source with gaps, such as a table whose ids are the offsets. Empty in a gap. None
    if the offsets are consecutive."""
    until: int | None = None
    """In a source with gaps: the offset up to which the batch was read. No other record has an offset before it. None
    if the offsets are consecutive."""
    encoded: pa.Buffer | None = None
    """The bytes of exactly these records as the log stores them, one Arrow IPC message, perhaps compressed; None if
    there are none. A server sends these and need not encode the records again."""

    @property
    def next_offset(self) -> int:
        return self.base_offset + int(self.records.num_rows) if self.until is None else self.until

    def within(self, start: int, end: int | None = None) -> Batch:
        """The part of the batch with offsets from `start` on and before `end`."""
        if self.offsets is None:
            count = self.records.num_rows
            first = min(max(start - self.base_offset, 0), count)
            last = count if end is None else min(max(end - self.base_offset, first), count)
            if first == 0 and last == count:
                return self
            return Batch(self.base_offset + first, self.records.slice(first, last - first))
        import pyarrow.compute as pc

        first = pc.sum(pc.less(self.offsets, start)).as_py() or 0
        last = len(self.offsets) if end is None else pc.sum(pc.less(self.offsets, end)).as_py() or 0
        until = self.next_offset if end is None else max(start, min(end, self.next_offset))
        base = max(start, self.base_offset)
        count = max(0, last - first)
        return Batch(base, self.records.slice(first, count), self.offsets.slice(first, count), until)


def encode(records: pa.RecordBatch, codec: str = "none") -> Payload:
    """Encode records for a log. Raises InvalidRecord if there are none, if their schema is not SCHEMA, or if they are
    too large for one frame."""
    if not records.schema.equals(SCHEMA):
        raise InvalidRecord(f"the batch's columns are {records.schema.to_string()}; they must be {SCHEMA.to_string()}")
    if records.num_rows == 0:
        raise InvalidRecord("the batch is empty")
    times = records.column("timestamp")
    if times.null_count:
        raise InvalidRecord("a record has no timestamp")
    data = records.serialize() if codec == "none" else _serialize(records, codec)
    if _padded(HEADER_BYTES + data.size) > FRAME_BYTES_MAX:
        raise InvalidRecord(f"the batch has {data.size:,} bytes; the limit of a frame is {FRAME_BYTES_MAX:,}")
    first, last = _first_and_last(times)
    return _Checked(data, xxhash.xxh3_64_intdigest(data), records.num_rows, first, last, CODECS.index(codec))


def _first_and_last(times: pa.TimestampArray) -> tuple[int, int]:
    """The earliest and the latest of these times, of which there is at least one."""
    if len(times) == 1:  # five times as fast: many senders send one record at a time
        only = times[0].value
        return only, only
    if len(times) <= _FEW:
        some = memoryview(times.buffers()[1]).cast("q")[times.offset : times.offset + len(times)]
        return min(some), max(some)
    # Imported here because the import takes longer than all others together, and a process that only reads does not
    # need it.
    import pyarrow.compute as pc

    found = pc.min_max(times)
    return found["min"].value, found["max"].value


def received_payload(data: pa.Buffer, codec: int) -> Payload:
    """The payload with these bytes, which came over a network. They are decoded and checked in full, whoever sent them,
    and are stored as they came. Raises InvalidRecord."""
    import pyarrow.compute as pc

    try:
        records = pa.ipc.read_record_batch(data, SCHEMA)
        records.validate(full=True)
    except (pa.ArrowException, OSError, EOFError, ValueError, TypeError, OverflowError) as error:
        raise InvalidRecord(
            f"the batch is not an Arrow record batch with the log's columns: {str(error)[:500]}"
        ) from error
    times = records.column("timestamp")
    if not 0 < records.num_rows <= GAP_ROWS_MAX or times.null_count:
        raise InvalidRecord("the batch is empty or has too many records, or a record has no timestamp")
    headers = records.column("headers")
    if headers.null_count < len(headers):  # `validate` does not look for nulls in columns that may have none
        pairs = headers.flatten()
        if pairs.null_count or pairs.field("key").null_count:
            raise InvalidRecord("a header is null, or has no key")
    bounds = pc.min_max(times.cast(pa.int64()))
    first, last = bounds["min"].as_py(), bounds["max"].as_py()
    payload = _Checked(data, xxhash.xxh3_64_intdigest(data), records.num_rows, first, last, codec)
    if payload.frame_bytes > FRAME_BYTES_MAX:
        raise InvalidRecord(f"the batch has {data.size:,} bytes; the limit of a frame is {FRAME_BYTES_MAX:,}")
    return payload


def check_encoded(payload: Payload) -> None:
    """Check a payload that another process has encoded, before it is stored. Raises InvalidRecord.

    A frame that cannot be decoded would stop every reader at its offset. So an uncompressed payload is decoded, which
    copies nothing, and its rows are counted. A compressed payload is not decompressed, because that costs about as much
    as the whole append: its checksum and its outer form are checked, and each reader checks the rest. A payload that
    `encode` or `received_payload` has made in this process needs no check."""
    if type(payload) is _Checked:
        return
    size = payload.data.size
    if not 0 < payload.rows <= GAP_ROWS_MAX or not 0 <= payload.codec < len(CODECS):
        raise InvalidRecord(f"the batch was not encoded by pxrs: {payload.rows} rows, codec {payload.codec}")
    if not size or payload.frame_bytes > FRAME_BYTES_MAX:
        raise InvalidRecord(f"the batch has {size:,} bytes; the limit of a frame is {FRAME_BYTES_MAX:,}")
    if xxhash.xxh3_64_intdigest(payload.data) != payload.checksum:
        raise InvalidRecord("the batch was damaged after it was encoded: its checksum does not match")
    try:
        if payload.codec:
            is_batch = pa.ipc.read_message(payload.data).type == "record batch"
            rows = payload.rows
        else:
            records = pa.ipc.read_record_batch(payload.data, SCHEMA)
            is_batch, rows = not records.column("timestamp").null_count, records.num_rows
    except (pa.ArrowInvalid, EOFError, OSError) as error:
        raise InvalidRecord(f"the batch is not an Arrow record batch with the log's columns: {error}") from error
    if not is_batch or rows != payload.rows:
        raise InvalidRecord(f"the batch was not encoded by pxrs: it has {rows} rows, but says {payload.rows}")


def _serialize(records: pa.RecordBatch, codec: str) -> pa.Buffer:
    """Serialize records without their schema. `RecordBatch.serialize` takes no options, so a compressed batch is
    written to a stream, and the schema at its beginning is cut off."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA, options=_OPTIONS[codec]) as writer:
        writer.write_batch(records)
        end = sink.tell()
    return sink.getvalue()[_SCHEMA_BYTES:end]


def place_id(topic_id: str, partition: int) -> int:
    """The number by which files name the partition that they belong to: XXH3-64 of `<topic id>/<partition>`."""
    return xxhash.xxh3_64_intdigest(f"{topic_id}/{partition}".encode())


def header_bytes(
    payload: Payload,
    base_offset: int,
    origin: Origin = ANONYMOUS,
    *,
    place: int,
    stored_at: int,
    follows: int = 0,
    schema_id: int = 0,
) -> bytes:
    """The header of a frame that gets this offset, in the partition with this `place_id`."""
    fixed = _HEADER.pack(
        MAGIC,
        FORMAT,
        payload.codec,
        HEADER_BYTES,
        payload.frame_bytes,
        payload.rows,
        base_offset,
        payload.first_timestamp,
        payload.last_timestamp,
        origin.producer.bytes,
        origin.epoch,
        schema_id,
        origin.sequence,
        payload.checksum,
        payload.data.size,
        follows,
        place,
        stored_at,
    )
    return fixed + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fixed))


def gap_bytes(base_offset: int, rows: int, *, place: int, stored_at: int) -> bytes:
    """A gap frame that takes up this number of offsets."""
    nothing = Payload(_NOTHING, xxhash.xxh3_64_intdigest(b""), rows, _NO_TIME, _NO_TIME, 0)
    return header_bytes(nothing, base_offset, place=place, stored_at=stored_at)


def padding(payload: Payload) -> bytes:
    """The padding between the end of the payload and the end of the frame."""
    return bytes(payload.frame_bytes - HEADER_BYTES - payload.data.size)


def read_header(data: bytes | memoryview, file: str, position: int, place: int | None = None) -> Header:
    """The header at the beginning of `data`, checked. Raises DamagedFrame, and MisplacedFile if `place` is given and
    the header names another partition.

    `data` may end behind the header. It must have HEADER_BYTES, or all bytes that are left of the file."""
    layout = _LAYOUTS.get(data[4]) if len(data) >= HEADER_BYTES_MIN else None
    if layout is None or len(data) < layout.size:
        raise DamagedFrame(file, position, _unreadable(data))
    magic, _, codec, length, frame, rows, base, first, last, *rest, checksum = layout.unpack_from(data)
    if magic != MAGIC or xxhash.xxh3_64_intdigest(data[: layout.size - _CHECKSUM.size]) != checksum:
        raise DamagedFrame(file, position, _unreadable(data))
    producer, epoch, schema, sequence, digest, size, follows, *added = rest
    if codec >= len(CODECS) or frame != _padded(length + size) or length != layout.size or not rows:
        raise DamagedFrame(file, position, "the header contradicts itself")
    written_for, stored_at = added or (None, last)
    if place is not None and written_for is not None and written_for != place:
        raise MisplacedFile(file, position, "the frame was written for another topic or partition")
    return Header(
        codec,
        frame,
        rows,
        base,
        first,
        last,
        producer,
        epoch,
        schema,
        sequence,
        digest,
        size,
        follows,
        written_for,
        stored_at,
        length,
    )


def _unreadable(data: bytes | memoryview) -> str:
    """Why no header of a known format can be read from the beginning of `data`."""
    if len(data) < HEADER_BYTES_MIN:
        return f"{len(data)} bytes are too few for a frame's header"
    magic, version, _, length = _START.unpack_from(data)
    if magic != MAGIC:
        return "no frame begins here"
    if not HEADER_BYTES_MIN <= length <= len(data):
        return f"the header has {length} bytes, but only {len(data)} are left"
    (checksum,) = _CHECKSUM.unpack_from(data, length - _CHECKSUM.size)
    if version not in _LAYOUTS and xxhash.xxh3_64_intdigest(data[: length - _CHECKSUM.size]) == checksum:
        return f"the frame has format {version}, which this version cannot read"
    return "the header's checksum does not match"


def check_payload(header: Header, data: memoryview, file: str, position: int) -> None:
    """Check that `data` begins with the whole frame of this header, by its checksum. Raises DamagedFrame."""
    if len(data) < header.frame_bytes:
        raise DamagedFrame(
            file, position, f"the file ends {header.frame_bytes - len(data):,} bytes before the end of the frame"
        )
    payload = data[header.header_bytes : header.header_bytes + header.payload_bytes]
    if xxhash.xxh3_64_intdigest(payload) != header.payload_checksum:
        raise DamagedFrame(file, position, "the payload's checksum does not match")


def read_payload(header: Header, data: pa.Buffer, file: str, position: int) -> pa.RecordBatch:
    """The records of the frame with which `data` begins, checked and without a copy. Raises DamagedFrame."""
    check_payload(header, memoryview(data), file, position)
    if header.is_gap:
        return NO_RECORDS
    try:
        records = pa.ipc.read_record_batch(data.slice(header.header_bytes, header.payload_bytes), SCHEMA)
    except (pa.ArrowInvalid, OSError) as error:
        raise DamagedFrame(file, position, f"the payload is not a valid record batch: {error}") from error
    if records.num_rows != header.rows:
        raise DamagedFrame(file, position, f"{records.num_rows} records, but the header says {header.rows}")
    return records


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
