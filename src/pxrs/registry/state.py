"""The keys and leases of a registry as a value in memory: the pure core of the memory and the file registry.

A `Change` is one step of the registry's history. Every process that applies the same changes in the same order has the
same state. `State.refusal` decides whether a commit may happen; the caller then publishes the change and applies it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from sortedcontainers import SortedDict

from pxrs.errors import Conflict, LeaseExpired
from pxrs.registry.contract import ABSENT, Commit, Entry


class Record(NamedTuple):
    value: bytes
    version: int
    lease: str | None


@dataclass(frozen=True, slots=True)
class Change:
    """One atomic step. The keys in `ephemeral` are bound to `lease`. A lease begins or ends in a step of its own."""

    put: Mapping[str, bytes] = field(default_factory=dict)
    ephemeral: Mapping[str, bytes] = field(default_factory=dict)
    delete: tuple[str, ...] = ()
    lease: str | None = None
    lease_begins: str | None = None
    leases_end: tuple[str, ...] = ()

    @classmethod
    def of(cls, commit: Commit) -> Change:
        lease = None if commit.lease is None else commit.lease.id
        return cls(commit.put, commit.ephemeral, tuple(sorted(commit.delete)), lease)


class State:
    """Keys in order, and the living leases with their keys. Not thread-safe: the registry that has it holds a lock."""

    def __init__(self) -> None:
        self.records: SortedDict[str, Record] = SortedDict()
        self.leases: dict[str, set[str]] = {}

    def get(self, key: str, without: Container[str] = ()) -> Entry | None:
        """without: leases whose keys are left out."""
        record = self.records.get(key)
        return None if record is None or record.lease in without else Entry(key, record.value, record.version)

    def scan(self, prefix: str, after: str | None, limit: int | None, without: Container[str] = ()) -> list[Entry]:
        """without: as in `get`."""
        return list(islice(self._entries(prefix, after, without), limit))

    def _entries(self, prefix: str, after: str | None, without: Container[str]) -> Iterator[Entry]:
        begin = prefix if after is None or after < prefix else after
        for key in self.records.irange(begin, inclusive=(begin != after, True)):
            if not key.startswith(prefix):
                return
            record = self.records[key]
            if record.lease in without:
                continue
            yield Entry(key, record.value, record.version)

    def persistent(self) -> tuple[Entry, ...]:
        """All keys that belong to no lease, in order."""
        return tuple(
            Entry(key, record.value, record.version) for key, record in self.records.items() if record.lease is None
        )

    def refusal(self, expect: Mapping[str, int], lease: str | None) -> Conflict | LeaseExpired | None:
        """Why a commit with these conditions may not happen now, or None if it may."""
        if lease is not None and lease not in self.leases:
            return LeaseExpired(f"lease {lease} has ended; take a new one and claim again")
        records = self.records
        differing = [
            key for key, version in expect.items() if (records[key].version if key in records else ABSENT) != version
        ]
        return Conflict(differing) if differing else None

    def apply(self, change: Change, version: int) -> list[str]:
        """Take the step; returns the keys that changed."""
        if change.lease_begins is not None:
            self.leases[change.lease_begins] = set()
        for key, value in change.put.items():
            self._write(key, Record(value, version, None))
        for key, value in change.ephemeral.items():
            self._write(key, Record(value, version, change.lease))
        removed = [key for key in change.delete if key in self.records]
        for lease in change.leases_end:
            removed += sorted(self.leases.pop(lease, ()))
        for key in removed:
            self._unbind(key, self.records.pop(key))
        return [*change.put, *change.ephemeral, *removed]

    def _write(self, key: str, record: Record) -> None:
        old = self.records.get(key)
        if old is not None:
            self._unbind(key, old)
        self.records[key] = record
        if record.lease is not None:
            self.leases[record.lease].add(key)

    def _unbind(self, key: str, record: Record) -> None:
        if record.lease is not None and record.lease in self.leases:
            self.leases[record.lease].discard(key)
