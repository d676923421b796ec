"""Several hubs on one store in memory, as so many processes would have them, and things that happen between their
requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from pxrs.clock import ManualClock
from pxrs.hub import Hub
from pxrs.log.memory import MemoryLog
from pxrs.queue.store import QueueStore
from pxrs.registry.contract import Commit, Entry
from pxrs.registry.memory import MemoryRegistry, MemoryStore


class HookedRegistry(MemoryRegistry):
    """A handle to which things happen: before each request, before and after each commit, after each scan."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.reach: Callable[[], None] = lambda: None
        self.before: Callable[[Commit], None] = lambda commit: None
        self.after: Callable[[Commit], None] = lambda commit: None
        self.scanned: Callable[[str, list[Entry]], list[Entry]] = lambda prefix, found: found

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


class Place:
    """A store in memory, and hubs on it as so many processes would have them."""

    def __init__(self, stack: ExitStack, store: MemoryStore) -> None:
        self.store = store
        self._stack = stack

    @property
    def clock(self) -> ManualClock:
        assert isinstance(self.store.clock, ManualClock)
        return self.store.clock

    def on(self, store: MemoryStore) -> Place:
        return Place(self._stack, store)

    def open(self, registry: MemoryRegistry | None = None, log: MemoryLog | None = None) -> Hub:
        hub = Hub(log or MemoryLog(), registry or MemoryRegistry(self.store))
        return self._stack.enter_context(hub)

    def hooked(self) -> tuple[Hub, HookedRegistry]:
        registry = HookedRegistry(self.store)
        return self.open(registry), registry


def take_value(hub: Hub, queue: str, timeout: float | None = None) -> bytes | None:
    """Take one item and be done with it."""
    with hub.transaction() as tx:
        item = tx.take(queue, timeout=timeout)
    return None if item is None else item.value


@contextmanager
def wall_time_shifted(clock: ManualClock, seconds: float) -> Iterator[None]:
    """The time of day is set forward or back by so much, as that of a machine may be, and `clock.now()` is not."""
    read = clock.wall_time_us

    def shifted() -> int:
        return read() + round(seconds * 1_000_000)

    with mock.patch.object(clock, "wall_time_us", shifted):
        yield


def store_of(hub: Hub) -> QueueStore:
    return hub.parts.queue_store()


def is_waiting(hub: Hub, queue: str) -> bool:
    """Whether a thread of this process has looked in vain and waits for items."""
    return store_of(hub).is_waiting_for(queue)
