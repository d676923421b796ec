"""Watches: flags that a change sets and that `Watch.wait` clears.

A watch says that something under its prefixes has changed, never what: the reader scans again. So several changes may
be one wake, and a possibly missed change (a reconnect, an overflow, a lost notification) is a wake too. Open the watch
first, then scan: every change after the scan sets the flag (R2).

Any number of `Watch` handles of one open registry share what the store does for them (W6). The store arms a
`PrefixWatch` once for each distinct prefix, and `SharedWatches` passes its wakes on to the handles:

| state of a prefix | becomes | when |
|---|---|---|
| (none) | NEW | the first handle with this prefix is opened |
| NEW | ARMING | a thread that opens a handle begins to arm it; other openers wait |
| ARMING | ARMED | the store has confirmed that every later change will be told |
| ARMING | NEW | arming failed: that opener raises, and one of those who wait tries next |
| any | (none) | the last handle with this prefix is closed; the store is told to forget it |
"""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Final, Self

from pxrs import arguments
from pxrs.clock import SYSTEM, Clock
from pxrs.errors import Closed, InvalidArgument, UsedAfterFork
from pxrs.waiting import Callback, Subscription, call_all

_LOOK_S: Final = 1.0
"""How often a thread that waits for another one to arm a prefix looks whether its own handle was closed meanwhile."""


class Watch:
    """What `Registry.watch(*prefixes)` returns. One thread waits on it at a time.

    The registry keeps it: a watch that is dropped without `close` ends with the registry."""

    def __init__(self, prefixes: Iterable[str], on_close: Callable[[Watch], None]) -> None:
        self.prefixes = tuple(prefixes)
        self._raised = threading.Event()
        self._callbacks: dict[object, Callback] = {}
        self._closed = False
        self._on_close = on_close
        self._pid = os.getpid()

    def covers(self, key: str) -> bool:
        """Whether a change of the key concerns this watch. A prefix that ends in no slash is a single key."""
        return any(covers(prefix, key) for prefix in self.prefixes)

    def wake(self) -> None:
        """Set the flag and call the callbacks. Called by the store's thread, and by any thread that wants the waiter to
        look."""
        self._raised.set()
        if self._callbacks:
            call_all(list(self._callbacks.values()))

    def subscribe(self, callback: Callback) -> Subscription:
        """Call the callback each time the flag is raised, also by `close`, on the thread that raises it: for whoever
        has no thread that could wait. It must return at once and must not call the registry, whose lock may be held.
        Subscribe first, then call `wait(0)` or scan: a flag that is up already causes no call."""
        token = object()
        self._callbacks[token] = callback
        return Subscription(lambda: self._callbacks.pop(token, None))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a change since the last call. True if there may be one, False if the time has passed."""
        return self.wait_until(None, SYSTEM, timeout)

    def wait_until(self, until: float | None, clock: Clock, timeout: float | None = None) -> bool:
        """As `wait`, and no longer than until this clock's `now` has reached `until`."""
        timeout = None if timeout is None else arguments.seconds(InvalidArgument, "timeout", timeout)
        if os.getpid() != self._pid:
            raise UsedAfterFork("the watch was opened before a fork: open one in the child")
        woken = clock.wait(self._raised, until, timeout)
        if woken:
            # Lower the flag, then read `_closed`. `close` sets `_closed`, then raises the flag, so a close in between
            # is seen here or raises the flag again. The flag is lowered only if the wait saw it up: one that is raised
            # just when the time is over stays up for the next call.
            self._raised.clear()
        if self._closed:
            self._raised.set()
            raise Closed("the watch was closed")
        return woken

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Stop watching. A waiter is woken and gets Closed. Idempotent."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self.wake()
        self._on_close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _State(enum.Enum):
    NEW = enum.auto()
    ARMING = enum.auto()
    ARMED = enum.auto()


class PrefixWatch:
    """One prefix, or a single key, that the store watches for all handles of one open registry that name it."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.handles: tuple[Watch, ...] = ()
        """Replaced, never changed, under the lock of `SharedWatches`."""
        self.state = _State.NEW
        """Changes under the lock of `SharedWatches`."""

    def covers(self, key: str) -> bool:
        """Whether a change of the key concerns this prefix."""
        return covers(self.prefix, key)

    def wake(self) -> None:
        """Wake every handle. Called by the store after a change under the prefix, and after any doubt."""
        for watch in self.handles:
            watch.wake()


class SharedWatches:
    """The open `Watch` handles of a registry, and the prefixes that they share. Threads share it.

    It holds no reference to the registry, so that a registry that nobody has any more is collected."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._handles: set[Watch] = set()
        self._by_prefix: dict[str, PrefixWatch] = {}

    def __len__(self) -> int:
        return len(self._handles)

    def handles(self) -> list[Watch]:
        with self._changed:
            return list(self._handles)

    def prefixes(self) -> list[PrefixWatch]:
        with self._changed:
            return list(self._by_prefix.values())

    def add(self, watch: Watch) -> None:
        """From now on every wake of its prefixes wakes this handle; call `arm` next."""
        with self._changed:
            self._handles.add(watch)
            for prefix in set(watch.prefixes):
                shared = self._by_prefix.setdefault(prefix, PrefixWatch(prefix))
                shared.handles += (watch,)

    def arm(
        self,
        watch: Watch,
        arm: Callable[[Sequence[PrefixWatch]], None],
        disarm: Callable[[PrefixWatch], None],
    ) -> None:
        """Return when every prefix of this handle is armed.

        arm:     called with the prefixes that no other thread arms; what it raises is raised. The wait for other
                 threads ends, because their calls of `arm` do
        disarm:  called with a prefix whose last handle was closed while it was being armed"""
        while True:
            with self._changed:
                if watch.is_closed:
                    raise Closed("the watch was closed")
                needed = [self._by_prefix[prefix] for prefix in set(watch.prefixes)]
                mine = [each for each in needed if each.state is _State.NEW]
                for each in mine:
                    each.state = _State.ARMING
                if not mine:
                    if all(each.state is _State.ARMED for each in needed):
                        return
                    self._changed.wait(_LOOK_S)
                    continue
            state = _State.NEW
            try:
                arm(mine)
                state = _State.ARMED
            finally:
                with self._changed:
                    for each in mine:
                        each.state = state
                    unused = [each for each in mine if self._by_prefix.get(each.prefix) is not each]
                    self._changed.notify_all()
                for each in unused:
                    disarm(each)

    def remove(self, watch: Watch) -> list[PrefixWatch]:
        """Forget a handle; the prefixes that no other handle names, which the store may forget."""
        gone = []
        with self._changed:
            if watch not in self._handles:
                return []
            self._handles.discard(watch)
            for prefix in set(watch.prefixes):
                shared = self._by_prefix[prefix]
                shared.handles = tuple(each for each in shared.handles if each is not watch)
                if not shared.handles:
                    del self._by_prefix[prefix]
                    gone.append(shared)
            self._changed.notify_all()
        return gone

    def wake(self, keys: Iterable[str] | None) -> None:
        """Wake the handles that any of the keys concerns. None: it is not known what changed, so all handles wake."""
        if not self._handles:
            return
        with self._changed:
            if keys is None:
                chosen = list(self._handles)
            else:
                named = {name for key in keys for name in _prefixes_of(key)}
                shared = [found for name in named if (found := self._by_prefix.get(name)) is not None]
                chosen = list({watch for each in shared for watch in each.handles})
        for watch in chosen:
            watch.wake()

    def wake_under(self, folder: str) -> None:
        """Wake the handles that watch anything under the folder, or a folder that it is in."""
        for shared in self.prefixes():
            if shared.covers(folder) or shared.prefix.startswith(folder):
                shared.wake()


def covers(prefix: str, key: str) -> bool:
    """Whether the key is under the prefix or, if the prefix ends in no slash, is that key."""
    return key.startswith(prefix) if prefix == "" or prefix.endswith("/") else key == prefix


def _prefixes_of(key: str) -> Iterator[str]:
    """All that covers the key: everything, each folder that the key is in, the key itself."""
    yield ""
    at = key.find("/")
    while at >= 0:
        yield key[: at + 1]
        at = key.find("/", at + 1)
    yield key
