"""Several hubs on one store in memory, each as a process of its own would have it, and events that happen between their
requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum
from typing import Any, ClassVar, TypeVar
from unittest import mock

from pxrs.clock import ManualClock
from pxrs.errors import OutcomeUnknown, RegistryError, RegistryUnavailable
from pxrs.hub import Hub
from pxrs.log.memory import MemoryLog
from pxrs.registry.contract import Commit, Entry
from pxrs.registry.lease import Lease
from pxrs.registry.memory import MemoryRegistry, MemoryStore
from pxrs.registry.watch import PrefixWatch


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


class Fault(Enum):
    """What happens to one request of a `FaultyRegistry`."""

    REFUSED = "it has no effect, and RegistryUnavailable is raised"
    REPLY_LOST = "it has its effect, and the reply is lost: OutcomeUnknown for a commit, else RegistryUnavailable"
    LATE = "as REPLY_LOST, but a commit has its effect only after the next request (R5)"
    AWAY = "it and the next ones have no effect: RegistryUnavailable"


class FaultyRegistry(MemoryRegistry):
    """A handle that counts its requests (reads, commits, leases, watches) and fails the one with a given number.

    To try a fault at every request, count them in a run without a fault, and repeat the run for each number: a request
    that is added to the code later is then covered too."""

    AWAY_REQUESTS: ClassVar[int] = 4

    def __init__(self, store: MemoryStore, at: int | None = None, fault: Fault = Fault.REFUSED) -> None:
        """at: the number of the request that fails; the first one is 1."""
        super().__init__(store)
        self.requests: list[str] = []
        """What was requested, each as the operation and the key, prefix or nothing."""
        self.is_counting = True
        """Whether requests are counted, and may fail."""
        self._at, self._fault = at, fault
        self._guard = threading.Lock()
        self._late: list[tuple[int, Commit]] = []

    def opened(self) -> FaultyRegistry:
        """This handle, as `pxrs.registry.open` gives it. That is a request too."""
        return _reply(self, self._request("open"))

    def _request(self, what: str) -> bool:
        """Count a request. Whether its reply is to be lost. Raises RegistryUnavailable."""
        with self._guard:
            if not self.is_counting:
                return False
            self.requests.append(what)
            number = len(self.requests)
            late = [commit for due, commit in self._late if due <= number]
            self._late = [each for each in self._late if each[0] > number]
        for commit in late:
            with suppress(RegistryError):  # a later one has taken its place: it has no effect
                super()._commit(commit)
        if self._at is None:
            return False
        is_away = self._fault is Fault.AWAY and self._at <= number < self._at + self.AWAY_REQUESTS
        if is_away or (self._fault is Fault.REFUSED and number == self._at):
            raise RegistryUnavailable(f"request {number}, {what}, was refused")
        return number == self._at

    def _get(self, key: str) -> Entry | None:
        is_lost = self._request(f"get {key}")
        return _reply(super()._get(key), is_lost)

    def _scan(self, prefix: str, after: str | None, limit: int | None) -> list[Entry]:
        is_lost = self._request(f"scan {prefix}")
        return _reply(super()._scan(prefix, after, limit), is_lost)

    def _commit(self, commit: Commit) -> dict[str, int]:
        is_lost = self._request(f"commit {' '.join(sorted(commit.keys))}")
        if is_lost and self._fault is Fault.LATE:
            with self._guard:
                self._late.append((len(self.requests) + 2, commit))
            raise OutcomeUnknown("the commit is under way")
        versions = super()._commit(commit)
        if is_lost:
            raise OutcomeUnknown("the reply was lost")
        return versions

    def _lease(self, ttl: float, renewed: bool) -> Lease:
        is_lost = self._request("lease")
        return _reply(super()._lease(ttl, renewed), is_lost)

    def _watch(self, watches: Sequence[PrefixWatch]) -> None:
        is_lost = self._request(f"watch {' '.join(each.prefix for each in watches)}")
        _reply(super()._watch(watches), is_lost)


T = TypeVar("T")


def _reply(found: T, is_lost: bool) -> T:
    if is_lost:
        raise RegistryUnavailable("the reply was lost")
    return found


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
