"""Where the buffers of an Arrow IPC record batch lie, and how large they are once decompressed.

Arrow's reader allocates what a compressed buffer says it will have, before it decompresses it: a message of a megabyte
can ask for any number of gigabytes. So the server reads these numbers itself first. The metadata of the message is a
flatbuffer (Message.fbs and Schema.fbs of Arrow's format):

    Message       0 version   1 header_type   2 header   3 bodyLength
    RecordBatch   0 length    1 nodes         2 buffers  3 compression
    Buffer        offset, length: 64 bits each          BodyCompression   0 codec   1 method

A compressed buffer begins with its length once decompressed, 64 bits; -1 says that it is not compressed.

Only metadata of version V5 is accepted, which Arrow writes since 1.0. For V4, Arrow's reader also decompresses a batch
whose message names a codec in its `custom_metadata`, so that a batch without `compression` could be compressed.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from pxrs.errors import InvalidRecord
from pxrs.remote.flight import Bytes

BUFFERS_MAX: Final = 64
"""The columns of the log have fewer."""
_RECORD_BATCH: Final = 3
_VERSION_5: Final = 4
"""How metadata of version V5 names its version."""
_CODECS: Final = {0: 1, 1: 2}
"""The index in CODECS of each codec of Arrow: LZ4 frames, Zstandard."""


class Layout(NamedTuple):
    codec: int
    """The index of the codec's name in CODECS."""
    decoded_bytes: int
    """How many bytes the compressed buffers have once decompressed; 0 if the batch is not compressed."""


class _Table:
    """A table of a flatbuffer. Every number is checked: the bytes are those of a client."""

    def __init__(self, data: Bytes, at: int) -> None:
        self._data, self._at = data, at
        self._fields = at - _int(self._data, "<i", at)
        self._fields_bytes = _int(self._data, "<H", self._fields)

    def number(self, field: int, kind: str) -> int:
        """The number in this field; 0 if the field is not there."""
        at = self._place(field)
        return 0 if at is None else _int(self._data, kind, at)

    def table(self, field: int) -> _Table | None:
        at = self._place(field)
        return None if at is None else _Table(self._data, at + _int(self._data, "<I", at))

    def pairs(self, field: int) -> list[tuple[int, int]]:
        """A vector of structures of two numbers of 64 bits."""
        at = self._place(field)
        if at is None:
            return []
        at += _int(self._data, "<I", at)
        count = _int(self._data, "<I", at)
        if count > BUFFERS_MAX:
            raise InvalidRecord(f"the batch has {count:,} buffers, more than the columns of the log have")
        return [
            (_int(self._data, "<q", at + 4 + 16 * n), _int(self._data, "<q", at + 12 + 16 * n)) for n in range(count)
        ]

    def _place(self, field: int) -> int | None:
        entry = 4 + 2 * field
        if entry + 2 > self._fields_bytes:
            return None
        offset = _int(self._data, "<H", self._fields + entry)
        return self._at + offset if offset else None


def _int(data: Bytes, kind: str, at: int) -> int:
    if at < 0:
        raise InvalidRecord("the batch's metadata is damaged")
    try:
        found: int = struct.unpack_from(kind, data, at)[0]
    except struct.error as error:
        raise InvalidRecord("the batch's metadata is damaged") from error
    return found


def read_layout(header: Bytes, body: Bytes) -> Layout:
    """The layout of a record batch, by its metadata and its body. Raises InvalidRecord."""
    message = _Table(header, _int(header, "<I", 0))
    batch = message.table(2)
    if message.number(1, "<B") != _RECORD_BATCH or batch is None:
        raise InvalidRecord("the message is not a record batch: send only batches that have the columns of the log")
    if message.number(0, "<h") != _VERSION_5:
        raise InvalidRecord("the batch is not in version V5 of Arrow's format: send it with Arrow 1.0 or later")
    compression = batch.table(3)
    if compression is None:
        return Layout(0, 0)
    codec = _CODECS.get(compression.number(0, "<b"))
    if codec is None or compression.number(1, "<b"):
        raise InvalidRecord("the batch has an unknown compression: use lz4 or zstd, for each buffer")
    return Layout(codec, sum(_decoded_bytes(body, *each) for each in batch.pairs(2)))


def _decoded_bytes(body: Bytes, offset: int, length: int) -> int:
    if offset < 0 or length < 0 or offset + length > len(body):
        raise InvalidRecord("a buffer of the batch lies outside of its body")
    if length < 8:
        return 0
    (size,) = struct.unpack_from("<q", body, offset)
    return length if size < 0 else int(size)
