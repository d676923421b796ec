"""Several hubs on one store in memory, each as a process of its own would have it, and events that happen between their
requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from pxrs.clock import ManualClock
from pxrs.hub import Hub
from pxrs.log.memory import MemoryLog
from pxrs.registry.contract import Commit, Entry
from pxrs.registry.memory import MemoryRegistry, MemoryStore


class HookedRegistry(MemoryRegistry):
    """A handle that calls functions of a test before each request, before and after each commit, and after each scan.

    A function may raise, as if the request had failed, or change the store, as if another process were faster."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.reach: Callable[[], None] = lambda: None
        """Called before each request."""
        self.before: Callable[[Commit], None] = lambda commit: None
        """Called before each commit is applied."""
        self.after: Callable[[Commit], None] = lambda commit: None
        """Called after each commit was applied, before its reply."""
        self.scanned: Callable[[str, list[Entry]], list[Entry]] = lambda prefix, found: found
        """Given the prefix and the result of a scan, returns the result that the caller gets."""

    def _get(self, key: str) -> Entry | None:
        self.reach()
        return super()._get(key)

    def _scan(self, prefix: str, after: str | None, limit: int | None) -> list[Entry]:
        self.reach()
        return self.scanned(prefix, super()._scan(prefix, after, limit))

    def _commit(self, commit: Commit) -> dict[str, int]:
        self.reach()
        self.before(commit)
        versions = super()._commit(commit)
        self.after(commit)
        return versions


class SharedStore:
    """A store in memory, and the hubs that share it, each as a process of its own would have it."""

    def __init__(self, stack: ExitStack, store: MemoryStore) -> None:
        self.store = store
        self._stack = stack

    @property
    def clock(self) -> ManualClock:
        assert isinstance(self.store.clock, ManualClock)
        return self.store.clock

    def on(self, store: MemoryStore) -> SharedStore:
        """The same for another store."""
        return SharedStore(self._stack, store)

    def open(self, registry: MemoryRegistry | None = None, log: MemoryLog | None = None) -> Hub:
        """One more hub, closed at the end of the test."""
        hub = Hub(log or MemoryLog(), registry or MemoryRegistry(self.store))
        return self._stack.enter_context(hub)

    def hooked(self) -> tuple[Hub, HookedRegistry]:
        """One more hub, and its registry, whose functions the test can set."""
        registry = HookedRegistry(self.store)
        return self.open(registry), registry


def take_value(hub: Hub, queue: str, timeout: float | None = None) -> bytes | None:
    """Take one item in a transaction of its own, and commit that; None if there was none."""
    with hub.transaction() as tx:
        item = tx.take(queue, timeout=timeout)
    return None if item is None else item.value


@contextmanager
def wall_time_shifted(clock: ManualClock, seconds: float) -> Iterator[None]:
    """Set the time of day forward or back by this number of seconds, as it may be set on a machine; `clock.now()` does
    not change."""
    read = clock.wall_time_us

    def shifted() -> int:
        return read() + round(seconds * 1_000_000)

    with mock.patch.object(clock, "wall_time_us", shifted):
        yield


def store_of(hub: Hub) -> Any:
    """The queue store of a hub."""
    return hub.parts.queue_store()
