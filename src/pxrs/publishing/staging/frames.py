"""The format of a staged file: encoded batches, which the driver appends to the log as they are.

    payload, payload, ...    each as `pxrs.log.batch.encode` has made it, at a multiple of ALIGNMENT bytes
    index                    for each payload: its partition, where it lies, and the other fields of `Payload`
    footer                   how many payloads there are, the checksum of the index, the format, MAGIC

A task encodes its rows once. The driver maps the file and hands slices of it to `TopicLog.append`, so it neither
decodes nor copies rows, and the memory that it needs does not grow with the batch. The footer is written last: a file
that was cut short has none.

Earlier versions staged Arrow IPC files (`.arrow`). A manifest may still name some, so `read_arrow_file` reads them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

import pyarrow as pa
import xxhash

from pxrs import disk
from pxrs.errors import BatchRefused
from pxrs.log.batch import Payload, encode

SUFFIX: Final = ".frames"
ARROW_SUFFIX: Final = ".arrow"
MAGIC: Final = b"PXRSSTGD"
FORMAT: Final = 1
ALIGNMENT: Final = 64
"""Arrow reads buffers without a copy if they lie at a multiple of this."""
_ENTRY: Final = struct.Struct("<IIQQQqqI4x")
"""Partition, rows, position, bytes, checksum, first and last timestamp, codec."""
_FOOTER: Final = struct.Struct("<QQI4x8s")
"""Number of payloads, checksum of the index, format, MAGIC."""
_PARTITION: Final = b"partition"
"""The key in the metadata of a record batch in an Arrow file whose value is the partition."""


class Piece(NamedTuple):
    """An encoded batch for one partition of a topic."""

    partition: int
    payload: Payload


class FramesWriter:
    """Writes a staged file, piece by piece."""

    def __init__(self, file: pa.NativeFile) -> None:
        self._file = file
        self._position = 0
        self._entries: list[bytes] = []
        self.rows = 0

    def add(self, partition: int, payload: Payload) -> None:
        data = payload.data
        self._entries.append(
            _ENTRY.pack(
                partition,
                payload.rows,
                self._position,
                data.size,
                payload.checksum,
                payload.first_timestamp,
                payload.last_timestamp,
                payload.codec,
            )
        )
        self._file.write(data)
        padding = -data.size % ALIGNMENT
        if padding:
            self._file.write(bytes(padding))
        self._position += data.size + padding
        self.rows += payload.rows

    def finish(self) -> None:
        """Write the index and the footer."""
        index = b"".join(self._entries)
        self._file.write(index + _FOOTER.pack(len(self._entries), xxhash.xxh3_64_intdigest(index), FORMAT, MAGIC))


def read_frames_file(path: str) -> Iterator[Piece]:
    """The pieces of a staged file, in their order, each checked by its checksum. Raises FileNotFoundError; BatchRefused
    if the file is damaged."""
    data = _mapped(path)
    index_end = data.size - _FOOTER.size
    if index_end < 0:
        raise _damaged(path, f"it has {data.size} bytes, too few for a footer")
    count, checksum, version, magic = _FOOTER.unpack(data.slice(index_end))
    if magic != MAGIC:
        raise _damaged(path, "it has no footer, so it is not whole")
    if version != FORMAT:
        raise _damaged(path, f"it has format {version}, and this version of pxrs reads format {FORMAT}")
    index_start = index_end - count * _ENTRY.size
    if index_start < 0 or xxhash.xxh3_64_intdigest(data.slice(index_start, index_end - index_start)) != checksum:
        raise _damaged(path, "the checksum of its index does not match")
    for at in range(index_start, index_end, _ENTRY.size):
        partition, rows, position, size, digest, first, last, codec = _ENTRY.unpack(data.slice(at, _ENTRY.size))
        payload = Payload(data.slice(position, size), digest, rows, first, last, codec)
        if xxhash.xxh3_64_intdigest(payload.data) != digest:
            raise _damaged(path, f"the checksum of the rows at byte {position:,} does not match")
        yield Piece(partition, payload)


def read_arrow_file(path: str, codec: str) -> Iterator[Piece]:
    """The pieces of an Arrow IPC file that an earlier version has staged, in their order. Raises FileNotFoundError;
    BatchRefused if the file is damaged."""
    try:
        with pa.memory_map(path) as mapped, pa.ipc.open_file(mapped) as file:
            for number in range(file.num_record_batches):
                found = file.get_batch_with_custom_metadata(number)
                yield Piece(int(found.custom_metadata[_PARTITION]), encode(found.batch, codec))
    except FileNotFoundError:
        raise
    except PermissionError as error:
        raise disk.log_error(error, path) from error
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        raise _damaged(path, str(error)) from error


def _mapped(path: str) -> pa.Buffer:
    """The content of a file, mapped. The map lives as long as the buffer and its slices."""
    try:
        with pa.memory_map(path) as mapped:
            return mapped.read_buffer()
    except FileNotFoundError:
        raise
    except PermissionError as error:
        raise disk.log_error(error, path) from error
    except (pa.ArrowException, OSError) as error:  # an empty file cannot be mapped
        raise _damaged(path, str(error)) from error


def _damaged(path: str, what: str) -> BatchRefused:
    return BatchRefused(f"the staged file {path} cannot be read: {what}")
