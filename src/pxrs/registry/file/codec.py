"""Bytes of a journal entry and of a snapshot: a checksummed header in JSON, then the values one after the other.

    magic 4 | crc32 4 | header length 4 | header JSON | values

The checksum covers all bytes after it. Nothing is compressed, so that people can read the files with a pager.

The header field `synced` of an entry is the number up to which the entry's author had synced the journal when it wrote
the entry. So every entry up to that number was on disk: if one of them is missing, a power loss was not the cause.
Version 0.1 wrote no such field.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

from pxrs.errors import RegistryCorrupt
from pxrs.registry.state import Change, Record, State

_ENTRY, _SNAPSHOT = b"PXJ1", b"PXS1"
_HEAD = struct.Struct("<4sI")
_LENGTH = struct.Struct("<I")
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True).encode


@dataclass(frozen=True, slots=True)
class Seal:
    """The last entry of a generation: history goes on in the folder `successor`."""

    successor: str


class JournalEntry(NamedTuple):
    """What the file of an entry holds."""

    step: Change | Seal
    synced: int | None
    """The number up to which the author had synced the journal; None if the entry is of version 0.1."""


def encode_entry(step: Change | Seal, synced: int | None) -> bytes:
    header: dict[str, Any] = {} if synced is None else {"synced": synced}
    if isinstance(step, Seal):
        return _pack(_ENTRY, {**header, "seal": step.successor}, [])
    if step.put:
        header["put"] = [[key, len(value)] for key, value in step.put.items()]
    if step.ephemeral:
        header["ephemeral"] = [[key, len(value)] for key, value in step.ephemeral.items()]
    for name in ("delete", "lease", "lease_begins", "leases_end"):
        if value := getattr(step, name):
            header[name] = value
    return _pack(_ENTRY, header, [*step.put.values(), *step.ephemeral.values()])


def decode_entry(data: bytes, where: str) -> JournalEntry:
    header, values = _unpack(_ENTRY, data, where)
    synced = header.get("synced")
    if "seal" in header:
        return JournalEntry(Seal(header["seal"]), synced)
    put = {key: values.take(length) for key, length in header.get("put", ())}
    ephemeral = {key: values.take(length) for key, length in header.get("ephemeral", ())}
    change = Change(
        put,
        ephemeral,
        tuple(header.get("delete", ())),
        header.get("lease"),
        header.get("lease_begins"),
        tuple(header.get("leases_end", ())),
    )
    return JournalEntry(change, synced)


def encode_snapshot(state: State, number: int) -> bytes:
    records = [[key, len(r.value), r.version, r.lease] for key, r in state.records.items()]
    header = {"number": number, "leases": list(state.leases), "records": records}
    return _pack(_SNAPSHOT, header, [record.value for record in state.records.values()])


def decode_snapshot(data: bytes, where: str) -> tuple[State, int]:
    header, values = _unpack(_SNAPSHOT, data, where)
    state = State()
    state.leases = {lease: set() for lease in header["leases"]}
    records = {}
    for key, length, version, lease in header["records"]:
        records[key] = Record(values.take(length), version, lease)
        if lease is not None:
            state.leases[lease].add(key)
    state.records.update(records)
    return state, header["number"]


class _Values:
    """The values behind the header, to be taken one after the other."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data, self._position = data, position

    def take(self, length: int) -> bytes:
        begin, self._position = self._position, self._position + length
        return self._data[begin : self._position]


def _pack(magic: bytes, header: dict[str, Any], values: list[bytes]) -> bytes:
    text = _encode(header).encode()
    body = b"".join([_LENGTH.pack(len(text)), text, *values])
    return _HEAD.pack(magic, zlib.crc32(body)) + body


def _unpack(magic: bytes, data: bytes, where: str) -> tuple[dict[str, Any], _Values]:
    begin = _HEAD.size + _LENGTH.size
    if len(data) < begin:
        raise RegistryCorrupt(where, f"{len(data)} bytes are too few for an entry")
    found, checksum = _HEAD.unpack_from(data)
    if found != magic:
        raise RegistryCorrupt(
            where,
            f"begins with {found!r}, not {magic!r}: the file is damaged, or was written by another version of pxrs",
        )
    if zlib.crc32(memoryview(data)[_HEAD.size :]) != checksum:
        raise RegistryCorrupt(where, "the checksum does not match: the file is damaged")
    (length,) = _LENGTH.unpack_from(data, _HEAD.size)
    header: dict[str, Any] = json.loads(data[begin : begin + length])
    return header, _Values(data, begin + length)
