"""The registry in the memory of one process: for tests, and for programs that consist of one process.

Handles that share a `MemoryStore` see the same keys, as two processes with one server do. Leases are state of the
`MemoryStore`, so that a handle can attach to a lease of another handle of the same store.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pxrs.clock import SYSTEM, Clock
from pxrs.errors import LeaseExpired
from pxrs.registry.address import Address
from pxrs.registry.contract import Commit, Entry, Limits, Registry, Snapshot
from pxrs.registry.lease import Lease, id_of, new_secret, not_attached
from pxrs.registry.state import Change, State
from pxrs.registry.watch import PrefixWatch
from pxrs.waiting import start_thread

LIMITS = Limits(commit_keys_max=4096, commit_bytes_max=8 << 20, value_bytes_max=1 << 20)


def open(address: Address) -> Registry:
    address.refuse_unknown_options(())
    return MemoryRegistry()


class MemoryStore:
    """The state that several `MemoryRegistry` handles share. A lease whose time is over ends at the next call of any
    handle, or when the expiry thread wakes at the nearest expiry, so that watches are woken in time."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._state = State()
        self._version = 0
        self._expiry: dict[str, float] = {}
        """When each living lease ends unless it is renewed, by its id, on `clock`."""
        self._ttls: dict[str, float] = {}
        self._handles: weakref.WeakSet[MemoryRegistry] = weakref.WeakSet()
        self._begun = threading.Event()
        self._timer: threading.Thread | None = None

    def get(self, key: str) -> Entry | None:
        with self._lock:
            self._end_expired()
            return self._state.get(key)

    def scan(self, prefix: str, after: str | None, limit: int | None) -> list[Entry]:
        with self._lock:
            self._end_expired()
            return self._state.scan(prefix, after, limit)

    def snapshot(self) -> Snapshot:
        with self._lock:
            return Snapshot(self._state.persistent(), f"version {self._version}")

    def commit(self, commit: Commit) -> dict[str, int]:
        change = Change.of(commit)
        with self._lock:
            self._end_expired()
            refusal = self._state.refusal(commit.expect, change.lease)
            if refusal is not None:
                raise refusal
            version = self._apply(change)
        return dict.fromkeys(commit.written, version)

    def begin_lease(self, lease: str, ttl: float) -> float:
        """Begin a lease with this id; returns its deadline."""
        with self._lock:
            self._time_expiry()  # first: if no thread can be started, no lease has begun
            self._apply(Change(lease_begins=lease))
            self._ttls[lease] = ttl
            deadline = self._expiry[lease] = self.clock.now() + ttl
            self._begun.set()  # wakes the expiry thread: this lease may expire before all others
        return deadline

    def renew_lease(self, lease: str) -> Renewed:
        """Renew the lease for its ttl, from now on."""
        with self._lock:
            self._end_expired()
            if lease not in self._expiry:
                raise LeaseExpired(f"lease {lease} has ended")
            ttl = self._ttls[lease]
            deadline = self._expiry[lease] = self.clock.now() + ttl
            return Renewed(ttl, deadline)

    def end_lease(self, lease: str) -> None:
        with self._lock:
            if self._expiry.pop(lease, None) is not None:
                del self._ttls[lease]
                self._apply(Change(leases_end=(lease,)))

    def add_handle(self, handle: MemoryRegistry) -> None:
        with self._lock:
            self._handles.add(handle)
            if self._expiry:
                self._time_expiry()

    def remove_handle(self, handle: MemoryRegistry) -> None:
        with self._lock:
            self._handles.discard(handle)
            if not self._handles:
                self._begun.set()  # wakes the expiry thread, which ends because there is no handle

    def _apply(self, change: Change) -> int:
        self._version += 1
        changed = self._state.apply(change, self._version)
        if changed:
            for handle in self._handles:
                handle._note_change(changed)
        return self._version

    def _end_expired(self) -> None:
        if not self._expiry:
            return
        now = self.clock.now()
        for lease in [lease for lease, expiry in self._expiry.items() if expiry <= now]:
            del self._expiry[lease], self._ttls[lease]
            self._apply(Change(leases_end=(lease,)))

    def _time_expiry(self) -> None:
        """Start the thread that ends leases at their expiry, so that watches are woken. The thread ends with the last
        lease, or with the last handle."""
        if self._timer is None:
            self._timer = start_thread(self._expire_loop, "pxrs-memory-expiry")

    def _expire_loop(self) -> None:
        while True:
            with self._lock:
                self._end_expired()
                if not self._expiry or not self._handles:
                    self._timer = None
                    return
                first = min(self._expiry.values())
                self._begun.clear()
            self.clock.wait(self._begun, first)


class Renewed(NamedTuple):
    """What a renewal returns."""

    ttl: float
    deadline: float


class MemoryLease:
    """A lease in a `MemoryStore`, see `registry.lease.StoredLease`."""

    def __init__(self, store: MemoryStore, lease: str) -> None:
        self._store, self._lease = store, lease

    def renew(self) -> float:
        return self._store.renew_lease(self._lease).deadline

    def end(self) -> None:
        self._store.end_lease(self._lease)

    def let_go(self) -> None:
        """Nothing is held for it."""


class MemoryRegistry(Registry):
    """A handle to a `MemoryStore`, by default one of its own."""

    limits = LIMITS

    def __init__(self, store: MemoryStore | None = None) -> None:
        self._store = store or MemoryStore()
        super().__init__("memory:", clock=self._store.clock)
        self._store.add_handle(self)

    def _get(self, key: str) -> Entry | None:
        return self._store.get(key)

    def _scan(self, prefix: str, after: str | None, limit: int | None) -> list[Entry]:
        return self._store.scan(prefix, after, limit)

    def _snapshot(self, is_written_once: Callable[[str], bool]) -> Snapshot:
        return self._store.snapshot()

    def _commit(self, commit: Commit) -> dict[str, int]:
        return self._store.commit(commit)

    def _lease(self, ttl: float, renewed: bool) -> Lease:
        secret = new_secret()
        return self._grant(secret, ttl, self._store.begin_lease(id_of(secret), ttl))

    def _attach(self, secret: str, renewed: bool) -> Lease:
        try:
            ttl, deadline = self._store.renew_lease(id_of(secret))
        except LeaseExpired:
            raise not_attached() from None
        return self._grant(secret, ttl, deadline)

    def _grant(self, secret: str, ttl: float, deadline: float) -> Lease:
        lease = id_of(secret)
        return Lease(
            lease,
            ttl,
            deadline,
            secret=secret,
            stored=MemoryLease(self._store, lease),
            on_closed=self._forget_lease,
            clock=self.clock,
        )

    def _watch(self, watches: Sequence[PrefixWatch]) -> None:
        """Nothing to do: the store calls `_note_change` for every change, under its lock."""

    def _note_change(self, keys: list[str]) -> None:
        self._wake(keys)

    def _close(self) -> None:
        self._store.remove_handle(self)
