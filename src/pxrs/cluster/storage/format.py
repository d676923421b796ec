"""The encoding of the records of a storage node's journal (docs/cluster-format.md).

A record is a header, the text of the ledger's id, and a body. The frames of docs/format.md cannot be used as records: a
frame names one partition, and has no field for a ledger, an entry or a fence. The body of an entry is a sequence of
such frames.

The checksum of the header covers the header and the ledger's id, and is computed with the journal's seed. After a
damaged record, `find_record` searches for the next one. A producer that puts the bytes of a record into a message does
not know the seed, so the search does not accept them as a record. The header also contains the record's own position,
so a record that a damaged file system has put in another place is not accepted either.
"""

from __future__ import annotations

import re
import struct
from enum import IntEnum
from typing import Final, NamedTuple

import xxhash

from pxrs.errors import DamagedFrame

MAGIC: Final = b"PXJR"
FORMAT: Final = 1
"""The version of the records, and of the directory of a node."""
ALIGNMENT: Final = 8
LEDGER_BYTES_MAX: Final = 200
BODY_BYTES_MAX: Final = 64 << 20
NUMBER_MAX: Final = (1 << 63) - 1
"""The highest number that a field of a record can have."""
NONE: Final = -1
"""Encodes a recovery number of None."""
HERE: Final = -1
"""As `offset` of a REMOVED record that is not written yet: stands for the position that the record will get."""
_HEADER: Final = struct.Struct("<4sBBHIIQqqqqqqqQ")
_CHECKSUM: Final = struct.Struct("<Q")
FIXED_BYTES: Final = _HEADER.size + _CHECKSUM.size
"""The length of a header without the ledger's id."""
HEADER_BYTES_MAX: Final = FIXED_BYTES + LEDGER_BYTES_MAX
_MAGIC: Final = re.compile(re.escape(MAGIC))
_PADDING: Final = tuple(bytes(n) for n in range(ALIGNMENT))


class Kind(IntEnum):
    """The kind of a record."""

    ENTRY = 1
    """The node has this entry of the ledger."""
    FENCE = 2
    """The node accepts adds to the ledger only from recoveries with at least this number."""
    REMOVED = 3
    """The ledger's records at positions before `offset` are void. With `rows` 1, the node refuses writers of the
    partition's ledgers up to this one's number; a record that only says that has the `offset` 0."""
    PROBE = 4
    """No effect. The node writes it after a failure, to find out whether the journal can be written again."""
    DOUBT = 5
    """Records of this ledger may have been lost (C7): an entry that the node does not have is unknown, not missing."""


_KINDS: Final = {int(kind): kind for kind in Kind}


class Record(NamedTuple):
    """The header of a record."""

    kind: Kind
    ledger: str
    entry: int = 0
    lac: int = -1
    """The highest entry that the writer knew to be confirmed; -1 if there was none."""
    recovery: int | None = None
    """The number of the recovery that sent the add or the fence; None if the ledger's writer sent it."""
    offset: int = 0
    """The offset of the entry's first row. For REMOVED: the position in the journal up to which it applies."""
    rows: int = 0
    last_timestamp: int = 0
    stored_at: int = 0
    checksum: int = 0
    """XXH3-64 of the body."""
    body_bytes: int = 0
    position: int = 0
    """The position of the record: the number of bytes since the beginning of the journal."""
    follows: int = 0
    """The number of records before this one in the same batch. 0 proves that everything before this record was synced,
    because a batch is written only after the sync of the batch before it."""

    @property
    def header_bytes(self) -> int:
        return header_bytes(self.ledger)

    @property
    def size(self) -> int:
        """The length of the record, including padding."""
        return record_bytes(self.ledger, self.body_bytes)


def header_bytes(ledger: str) -> int:
    return _padded(FIXED_BYTES + len(ledger))


def record_bytes(ledger: str, body: int) -> int:
    return _padded(FIXED_BYTES + len(ledger)) + _padded(body)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def seed_of(node: str) -> int:
    """The seed of the header checksums in the journal of this node."""
    return xxhash.xxh3_64_intdigest(node.encode())


def encode(record: Record, position: int, follows: int, seed: int) -> bytes:
    """The header of a record that is written at this position. The ledger's id is ASCII text."""
    ledger = record.ledger.encode("ascii")
    fixed = _HEADER.pack(
        MAGIC,
        FORMAT,
        record.kind,
        len(ledger),
        record.body_bytes,
        follows,
        position,
        record.entry,
        record.lac,
        NONE if record.recovery is None else record.recovery,
        record.offset,
        record.rows,
        record.last_timestamp,
        record.stored_at,
        record.checksum,
    )
    checksum = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fixed + ledger, seed))
    return b"".join((fixed, checksum, ledger, _PADDING[-(FIXED_BYTES + len(ledger)) % ALIGNMENT]))


def body_padding(size: int) -> bytes:
    """The padding after a body of this length."""
    return _PADDING[-size % ALIGNMENT]


def decode(data: memoryview, at: int, base: int, seed: int, path: str) -> Record:
    """The header with which `data` begins. Raises DamagedFrame.

    data: HEADER_BYTES_MAX bytes, or the rest of the segment if that is shorter. at: the place of `data` in the segment.
    base: the position of the segment in the journal."""
    if len(data) < FIXED_BYTES:
        raise DamagedFrame(path, at, "the segment ends within a record's header")
    (magic, version, kind, length, body_bytes, follows, own, *numbers, checksum) = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise DamagedFrame(path, at, "no record starts here")
    ledger = bytes(data[FIXED_BYTES : FIXED_BYTES + length])
    (expected,) = _CHECKSUM.unpack_from(data, _HEADER.size)
    if len(ledger) < length or xxhash.xxh3_64_intdigest(bytes(data[: _HEADER.size]) + ledger, seed) != expected:
        raise DamagedFrame(path, at, "the checksum of the record's header does not match")
    if version != FORMAT or kind not in _KINDS:
        raise DamagedFrame(path, at, f"a record of format {version}, kind {kind}, which this version cannot read")
    if own != base + at:
        raise DamagedFrame(path, at, f"the record belongs at position {own:,} of the journal, not at {base + at:,}")
    entry, lac, recovery, offset, rows, last_timestamp, stored_at = numbers
    return Record(
        _KINDS[kind],
        ledger.decode("ascii"),
        entry,
        lac,
        None if recovery == NONE else recovery,
        offset,
        rows,
        last_timestamp,
        stored_at,
        checksum,
        body_bytes,
        own,
        follows,
    )


def find_record(data: memoryview, begin: int, base: int, seed: int, path: str) -> int | None:
    """The next place in a segment, from `begin` on, of a valid header; None if there is none.

    base: the position of the segment's first byte in the journal."""
    for found in _MAGIC.finditer(data, begin):
        at = found.start()
        if at % ALIGNMENT == 0:
            try:
                decode(data[at : at + HEADER_BYTES_MAX], at, base, seed, path)
            except DamagedFrame:
                continue
            return at
    return None
