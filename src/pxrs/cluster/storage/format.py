"""Records of a storage node's journal, as bytes (docs/cluster-format.md).

A record is a header, the text of the ledger's id, and a body. The frames of docs/format.md cannot be used: they name
one partition, and have no place for a ledger, an entry or a fence. The body of an entry is a run of such frames.

The checksum of the header covers the header and the ledger's id, and is computed with the journal's seed. A producer
that puts the bytes of a record into a message does not know the seed, so the search for the next record behind a
damaged one (`find_record`) does not take that message for a record. The header also has the record's own position: a
record that was copied to another place by a damaged file system is not taken for one either.
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
"""Stands for a recovery number that is absent."""
HERE: Final = -1
"""As `offset` of a REMOVED record that is not written yet: the position that the record will have."""
_HEADER: Final = struct.Struct("<4sBBHIIQqqqqqqqQ")
_CHECKSUM: Final = struct.Struct("<Q")
FIXED_BYTES: Final = _HEADER.size + _CHECKSUM.size
"""The length of a header without the ledger's id."""
HEADER_BYTES_MAX: Final = FIXED_BYTES + LEDGER_BYTES_MAX
_MAGIC: Final = re.compile(re.escape(MAGIC))
_PADDING: Final = tuple(bytes(n) for n in range(ALIGNMENT))


class Kind(IntEnum):
    """What a record says."""

    ENTRY = 1
    """The node has this entry of the ledger."""
    FENCE = 2
    """The ledger takes adds only of recoveries with at least this number."""
    REMOVED = 3
    """The ledger's records at positions before `offset` are no longer part of the journal."""
    PROBE = 4
    """Nothing: the node has tried whether the journal can be written again after a failure."""


_KINDS: Final = {int(kind): kind for kind in Kind}


class Record(NamedTuple):
    """The header of a record."""

    kind: Kind
    ledger: str
    entry: int = 0
    lac: int = -1
    """The highest entry that the writer knew to be confirmed; -1 if there was none."""
    recovery: int | None = None
    """The number of the recovery that added the entry, or that fenced; None for the ledger's own writer."""
    offset: int = 0
    """The first offset of the entry. For REMOVED: the position in the journal up to which it holds."""
    rows: int = 0
    last_timestamp: int = 0
    stored_at: int = 0
    checksum: int = 0
    """XXH3-64 of the body."""
    body_bytes: int = 0
    position: int = 0
    """Where the record begins in the journal, counted from the journal's first byte ever."""
    follows: int = 0
    """How many records before this one were written together with it. 0 proves that everything before this record was
    synced, because the next batch is written only after the sync of the last one."""

    @property
    def header_bytes(self) -> int:
        return header_bytes(self.ledger)

    @property
    def size(self) -> int:
        """The length of the record, with its padding."""
        return record_bytes(self.ledger, self.body_bytes)


def header_bytes(ledger: str) -> int:
    return _padded(FIXED_BYTES + len(ledger))


def record_bytes(ledger: str, body: int) -> int:
    return _padded(FIXED_BYTES + len(ledger)) + _padded(body)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def seed_of(node: str) -> int:
    """The seed of the checksums in the journal of this node."""
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
    """What follows a body of this length."""
    return _PADDING[-size % ALIGNMENT]


def decode(data: memoryview, at: int, base: int, seed: int, path: str) -> Record:
    """The header with which `data` begins. Raises DamagedFrame.

    at:   where it begins in the segment. base: where the segment begins in the journal.
    data: must have HEADER_BYTES_MAX, or all that is left of the segment."""
    if len(data) < FIXED_BYTES:
        raise DamagedFrame(path, at, "the segment ends within a record's header")
    (magic, version, kind, length, body_bytes, follows, own, *numbers, checksum) = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise DamagedFrame(path, at, "no record begins here")
    ledger = bytes(data[FIXED_BYTES : FIXED_BYTES + length])
    (expected,) = _CHECKSUM.unpack_from(data, _HEADER.size)
    if len(ledger) < length or xxhash.xxh3_64_intdigest(bytes(data[: _HEADER.size]) + ledger, seed) != expected:
        raise DamagedFrame(path, at, "the checksum of the record's header does not match")
    if version != FORMAT or kind not in _KINDS:
        raise DamagedFrame(path, at, f"a record of format {version}, kind {kind}, which this version does not read")
    if own != base + at:
        raise DamagedFrame(path, at, f"the record belongs to position {own:,} of the journal, not {base + at:,}")
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
    """The next place in a segment, from `begin` on, where a whole header lies; None if there is none.

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
