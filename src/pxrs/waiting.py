"""Waiting for a change that another thread notices, without a thread or a descriptor for each waiter (W6).

Whoever waits gives a callback, usually `threading.Event.set`, to a `Subscribers` object, looks once more, and sleeps on
the event. One thread for each open log or table notices changes (a `BackgroundThread`) and calls the callbacks. So a
waiter costs its own thread and one entry in a dictionary. A server that has no thread per client gives a callback that
wakes its event loop.

The order is always: subscribe, then look, then sleep. A change after the look calls the callback, a change before the
look is seen by it.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Final, Self, TypeVar

_logger = logging.getLogger(__name__)

Callback = Callable[[], object]
"""Called on the thread that notices the change. It must return soon, must not raise, and may be called more than once
for one change."""

LINGER_S: Final = 5.0
"""How long a `BackgroundThread` runs after the last `release`. Not 0, so that a reader that waits again and again does
not start a thread each time; bounded, so that an object that was never closed does not keep a thread for ever."""
FAILED_PAUSE_S: Final = 1.0
"""How long a `BackgroundThread` pauses after a step that failed unexpectedly."""

SIGNAL_S: Final = 1.0
"""How late the handler of a signal may run in a main thread that waits with `wait_for_signal` or `wait_for`."""

_Found = TypeVar("_Found")


class SignalEvent:
    """An event that the handlers of signals set, for one thread that waits.

    `threading.Event.set` waits for a lock. A handler runs in the main thread, between any two of its steps: if that
    thread has just begun to wait for the event, it holds this lock, and the handler would wait for ever. `SimpleQueue`
    may be put to at any time."""

    def __init__(self) -> None:
        self._is_set = False
        self._changes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._changes.put(None)

    def clear(self) -> None:
        """A `wait` that follows may return False before its time is up."""
        self._is_set = False

    def wait(self, timeout: float) -> bool:
        """Wait until the event is set or the time is up. Returns whether it is set."""
        if not self._is_set:
            with suppress(queue.Empty):
                self._changes.get(timeout=timeout)
        return self._is_set


def wait_for_signal(event: threading.Event | SignalEvent) -> None:
    """Wait until the event is set, by the handler of a signal or by another thread.

    A wait without a timeout can last for ever: Python runs signal handlers in the main thread only, and a signal does
    not wake that thread if it comes just before the wait begins, or if the system gives it to another thread."""
    while not event.wait(SIGNAL_S):
        pass


def _wait_at_most(event: threading.Event, seconds: float) -> None:
    """Wait until the event is set or the time is up; in the main thread so that the handlers of signals run."""
    if threading.current_thread() is not threading.main_thread():
        event.wait(seconds)
        return
    until = time.monotonic() + seconds
    while not event.wait(max(0.0, min(SIGNAL_S, until - time.monotonic()))):
        if time.monotonic() >= until:
            return


class _Limit(threading.local):
    until = math.inf


_limit = _Limit()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """All calls of a store or a log that this thread makes inside the block end within this number of seconds together.
    If an outer block has an earlier limit, that one counts."""
    with time_limit_at(time.monotonic() + seconds):
        yield


@contextmanager
def time_limit_at(until: float) -> Iterator[None]:
    """As `time_limit`, until a moment of the monotonic clock. A call that makes others on further threads passes on
    its own limit, `limit_until()`, by this."""
    before = _limit.until
    _limit.until = min(before, until)
    try:
        yield
    finally:
        _limit.until = before


def limit_until() -> float:
    """The moment of the monotonic clock at which this thread's limit is over; infinite if it has none."""
    return _limit.until


def seconds_left(seconds: float) -> float:
    """The smaller one of `seconds` and the time until this thread's limit."""
    return max(0.0, min(seconds, _limit.until - time.monotonic()))


class Subscription:
    """A callback that is registered until `close`. A context manager."""

    __slots__ = ("_end",)

    def __init__(self, end: Callback) -> None:
        self._end: Callback | None = end

    def close(self) -> None:
        """Idempotent. A call of the callback that has begun on another thread may still be running afterwards."""
        end, self._end = self._end, None
        if end is not None:
            end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Cancel:
    """Ends calls that wait, from another thread: `set` it, and every call that was given it returns.

    It is set once and stays set. A client of a remote source turns it into the cancellation of its request.
    Takes no lock, so that a signal handler or a finalizer may set it."""

    def __init__(self) -> None:
        self._is_set = False
        self._callbacks: dict[object, Callback] = {}

    @property
    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Idempotent."""
        # Set the flag, then read `_callbacks`. `subscribe` adds to `_callbacks`, then reads the flag. So a callback
        # that is registered at the same time is called by at least one of the two.
        self._is_set = True
        for callback in list(self._callbacks.values()):
            callback()

    def subscribe(self, callback: Callback) -> Subscription:
        """Call the callback when this is set, or at once if it is set already."""
        token = object()
        self._callbacks[token] = callback
        if self._is_set:
            callback()
        return Subscription(lambda: self._callbacks.pop(token, None))


class Subscribers:
    """Callbacks by what they are interested in, such as a partition's number. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens = itertools.count()
        self._all: dict[int, Callback] = {}
        self._by_key: dict[Hashable, dict[int, Callback]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, keys: Iterable[Hashable], callback: Callback) -> Subscription:
        """Register a callback that `wake` calls for a change of any of these keys. With no key, only `wake_all` calls
        it."""
        chosen = frozenset(keys)
        with self._lock:
            token = next(self._tokens)
            self._all[token] = callback
            for key in chosen:
                self._by_key.setdefault(key, {})[token] = callback
        return Subscription(lambda: self._remove(token, chosen))

    def add_needing(self, thread: BackgroundThread, keys: Collection[Hashable], callback: Callback) -> Subscription:
        """As `add`, for changes that only this thread finds: the thread is needed until the subscription ends. With no
        key it is not needed, because there is no change that it could find. Raises RuntimeError if the thread cannot be
        started; then nothing is registered."""
        if not keys:
            return self.add(keys, callback)
        thread.need()
        added = self.add(keys, callback)

        def end() -> None:
            added.close()
            thread.release()

        return Subscription(end)

    def _remove(self, token: int, keys: frozenset[Hashable]) -> None:
        with self._lock:
            self._all.pop(token, None)
            for key in keys:
                left = self._by_key.get(key)
                if left is not None:
                    left.pop(token, None)
                    if not left:
                        del self._by_key[key]

    def wake(self, keys: Iterable[Hashable]) -> None:
        """Call the callbacks that concern any of these keys, on this thread, holding no lock."""
        with self._lock:
            chosen: dict[int, Callback] = {}
            for key in keys:
                chosen |= self._by_key.get(key, {})
        call_all(chosen.values())

    def wake_all(self) -> None:
        """Call every callback: after an event that concerns all, or if a change may have been missed."""
        with self._lock:
            chosen = list(self._all.values())
        call_all(chosen)


def call_all(callbacks: Iterable[Callback]) -> None:
    """Call the callbacks one after the other. An exception of one is logged, and the others are still called."""
    for callback in callbacks:
        try:
            callback()
        except Exception:
            _logger.exception("a callback for a change failed: %r", callback)


def wait_for(
    look: Callable[[], _Found],
    subscribe: Callable[[Callback], Subscription],
    timeout: float | None,
    cancel: Cancel | None = None,
    look_again_s: Callable[[], float | None] = lambda: None,
) -> _Found:
    """Call `look` until it finds something (returns a true value), the time is up, or `cancel` is set; its last result.

    look:          called on this thread, at least once, and again after each call of the callback
    subscribe:     is given the callback, which any thread may call after a change
    timeout:       in seconds; None for no limit, 0 to look once
    look_again_s:  called after each look: after how many seconds to look again without a call of the callback, or None
    """
    until = None if timeout is None else time.monotonic() + timeout
    found = look()
    if found or (timeout is not None and timeout <= 0) or (cancel is not None and cancel.is_set):
        return found
    woken = threading.Event()
    subscriptions = [subscribe(woken.set)]
    try:
        if cancel is not None:
            subscriptions.append(cancel.subscribe(woken.set))
        while True:
            woken.clear()  # before the look: a change during the look ends the sleep that follows
            found = look()
            left = None if until is None else until - time.monotonic()
            if found or (left is not None and left <= 0) or (cancel is not None and cancel.is_set):
                return found
            pauses = [pause for pause in (left, look_again_s(), threading.TIMEOUT_MAX) if pause is not None]
            _wait_at_most(woken, min(pauses))
    finally:
        for each in subscriptions:
            each.close()


def start_thread(run: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread. Raises RuntimeError if the process has as many threads as it may have, or is ending.

    Whoever keeps the thread in a field assigns the result of this call, and so nothing if it raises: a later call then
    finds no thread, and starts one."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


class BackgroundThread:
    """Calls `step` in a loop on a thread of its own, while there are more calls of `need` than of `release`.

    The thread is started by the first `need` and ends `LINGER_S` after the last `release`, or with `close`; `need`
    starts another one. It is a daemon, so a program that does not close what it opened can end."""

    def __init__(
        self, name: str, step: Callable[[], object], interrupt: Callback, on_end: Callback | None = None
    ) -> None:
        """step:      waits for a change and reports it; may return at any time, and must return after `interrupt`
        on_end:    called once, when this is closed and the thread, if there is one, does not run any more"""
        self._name, self._step, self._interrupt, self._on_end = name, step, interrupt, on_end
        # Its lock is reentrant: the garbage collector may end a generator, whose end calls `release`, in a thread that
        # has the lock.
        self._changed = threading.Condition(threading.RLock())
        self._needed = 0
        """How many calls of `need` were not followed by `release` yet."""
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def need(self) -> None:
        """Raises RuntimeError, and does not count as a call, if no thread could be started."""
        with self._changed:
            if self._thread is None and not self._is_closed:
                self._thread = start_thread(self._run, self._name)
            self._needed += 1
            if self._needed == 1:
                self._changed.notify()

    def release(self) -> None:
        with self._changed:
            self._needed -= 1

    def close(self, timeout: float = 30.0) -> None:
        """Idempotent. Waits until the thread has ended, unless it is called on that thread."""
        with self._changed:
            was_closed, self._is_closed = self._is_closed, True
            thread = self._thread
            self._changed.notify()
        if was_closed:
            return
        self._interrupt()
        if thread is None:
            self._end()
        elif thread is not threading.current_thread():
            thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._needed and not self._is_closed:
                    self._changed.wait(LINGER_S)
                is_closed = self._is_closed
                if is_closed or not self._needed:
                    self._thread = None
                    break
            try:
                self._step()
            except Exception:
                _logger.exception("%s failed and continues in %g s", self._name, FAILED_PAUSE_S)
                with self._changed:
                    if not self._is_closed:
                        self._changed.wait(FAILED_PAUSE_S)
        if is_closed:  # otherwise `close` finds no thread, and calls `_end` itself
            self._end()

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()
