"""The registry of a simulation: the exact rules of `registry.state`, with the clock and the delays of a schedule.

A request is sent, applied and answered at three moments, between which anything may happen. A request whose sender gave
up waiting may still be applied later; its expectations are checked then.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pxrs.errors import RegistryError
from pxrs.registry.contract import Entry
from pxrs.registry.state import Change, State
from pxrs.registry.steps import Get, Operation, Scan, Write


@dataclass(slots=True, eq=False)
class Request:
    """One operation on its way, and what became of it."""

    operation: Operation
    incarnation: str
    lease: str | None
    is_applied: bool = False
    result: Any = None
    error: RegistryError | None = None
    first: list[Entry] | None = None
    """What a scan saw at the first of its two moments."""


@dataclass(slots=True)
class Cost:
    """What a member has asked of the store."""

    calls: int = 0
    keys: int = 0
    """How many keys were read, expected, written or deleted."""
    size: int = 0
    """The size of these keys and their values, in bytes."""
    writes: int = 0

    def add(self, keys: Iterable[str], values: Iterable[bytes], *, is_write: bool = False) -> None:
        named = list(keys)
        self.calls += 1
        self.writes += is_write
        self.keys += len(named)
        self.size += sum(map(len, named)) + sum(map(len, values))


Accepted = Callable[[Request, Write], None]


class SimulatedStore:
    """A simulated store. counts_anew: as on ZooKeeper, every key counts its own versions, from the start when it is
    created again."""

    def __init__(self, rng: random.Random, *, counts_anew: bool, scans_in_two_moments: bool) -> None:
        self.rng = rng
        self.state = State()
        self.counts_anew = counts_anew
        self.scans_in_two_moments = scans_in_two_moments
        self.expiry: dict[str, float] = {}
        self.version = 0
        self.writes = 0
        """How many writes were accepted, leases aside."""
        self.costs: defaultdict[str, Cost] = defaultdict(Cost)
        """The cost of all requests, by the member that has sent them."""
        self.on_accepted: Accepted = lambda request, write: None
        """Told of a write before it is applied."""
        self.on_changed: Callable[[list[str], bool], None] = lambda keys, is_quiet: None

    def has(self, key: str) -> bool:
        return key in self.state.records

    def begin_lease(self, lease: str, expiry: float) -> None:
        self._apply(Change(lease_begins=lease), is_quiet=True)
        self.expiry[lease] = expiry

    def renew_lease(self, lease: str, expiry: float) -> bool:
        if lease not in self.expiry:
            return False
        self.expiry[lease] = max(expiry, self.expiry[lease])
        return True

    def end_lease(self, lease: str) -> None:
        if self.expiry.pop(lease, None) is not None:
            self._apply(Change(leases_end=(lease,)), is_quiet=False)

    def expired(self, now: float) -> list[str]:
        return [lease for lease, expiry in self.expiry.items() if expiry <= now]

    def apply(self, request: Request) -> None:
        """Let the request happen now; of a scan that takes two moments, the next of them."""
        match request.operation:
            case Get(key):
                request.result = self.state.get(key)
                found = [] if request.result is None else [request.result]
                self.costs[request.incarnation].add([key], (entry.value for entry in found))
            case Scan(prefix, after, limit):
                found = self.state.scan(prefix, after, None)
                if self.scans_in_two_moments and request.first is None:
                    request.first = found
                    return
                request.result = found = (found if request.first is None else self._mix(request.first, found))[:limit]
                values = (entry.value for entry in found)
                self.costs[request.incarnation].add((entry.key for entry in found), values)
            case Write() as write:
                self._write(request, write)
        request.is_applied = True

    def _mix(self, first: list[Entry], second: list[Entry]) -> list[Entry]:
        """Each key with its value at either of two moments, as R1 allows; a key that was written or deleted in between
        may be there or not."""
        before = {entry.key: entry for entry in first}
        after = {entry.key: entry for entry in second}
        found = []
        for key in sorted({**before, **after}):
            entry = (before if self.rng.random() < 0.5 else after).get(key)
            if entry is not None:
                found.append(entry)
        return found

    def _write(self, request: Request, write: Write) -> None:
        values = {**write.put, **write.ephemeral}
        named = {*write.expect, *values, *write.delete}
        self.costs[request.incarnation].add(named, values.values(), is_write=True)
        lease = request.lease if write.is_leased or write.ephemeral else None
        request.error = self.state.refusal(write.expect, lease)
        if request.error is not None:
            return
        self.on_accepted(request, write)
        self.writes += 1
        change = Change(write.put, write.ephemeral, tuple(write.delete), lease=lease)
        request.result = self._apply(change, is_quiet=write.is_quiet)

    def delete(self, key: str) -> None:
        self._apply(Change(delete=(key,)), is_quiet=False)

    def _apply(self, change: Change, *, is_quiet: bool) -> dict[str, int]:
        written = [*change.put, *change.ephemeral]
        records = self.state.records
        before = {key: records[key].version for key in written if key in records}
        self.version += 1
        changed = self.state.apply(change, self.version)
        versions = dict.fromkeys(written, self.version)
        if self.counts_anew:
            for key in written:
                versions[key] = before.get(key, 0) + 1
                records[key] = records[key]._replace(version=versions[key])
        self.on_changed(changed, is_quiet)
        return versions
