"""Which thread reads from a consumer: one at a time, so that no thread counts the messages of another one as done.

Without `ack="manual"` a message counts as done when the next one is asked for. That is right only if the thread that
asks is the thread that has the message. If thread B calls `poll` while thread A still works on what its own `poll`
returned, B's call would mark A's messages as done, the next checkpoint would cover them, and a crash would lose them.
So B's call raises `ConsumerBusy`: A's messages stay in hand, and B gets none.

A reading is one call that hands out messages. A reading by `poll` or `run` lasts from the call to its return. A reading
by a loop (`for message in inbox`, `batches`, `transactions`) lasts from the first message it asks for until the loop
ends or raises, or until its iterator is closed or garbage-collected. The consumer keeps the list of open readings and
changes it under its lock. Only `is_over` is set without the lock, because the garbage collector may close a loop on any
thread, also on one that holds the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from typing import Generic, TypeVar

from pxrs.errors import ConsumerBusy

T = TypeVar("T")


class Reading:
    """One call that hands out messages."""

    __slots__ = ("is_loop", "is_over", "thread", "what")

    def __init__(self, what: str, *, is_loop: bool = False) -> None:
        self.what, self.is_loop = what, is_loop
        self.thread = threading.current_thread()
        """The thread that began the reading. If another thread continues the loop, which `ack="manual"` allows, that
        thread."""
        self.is_over = False


class Readings:
    """The open readings of one consumer. The caller holds the consumer's lock."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._open: list[Reading] = []

    def add(self, reading: Reading) -> None:
        """Open a reading. Raises ConsumerBusy if a reading of another thread is open."""
        self.check_alone(reading.thread)
        self._open.append(reading)

    def check_alone(self, thread: threading.Thread) -> None:
        """Raise ConsumerBusy if a reading of another thread is open."""
        other = self.of_another(thread)
        if other is not None:
            end = "leave that loop, or close its iterator" if other.is_loop else "wait until that call has returned"
            raise ConsumerBusy(self._group, other.thread.name, f"is in {other.what}: {end}")

    def of_another(self, thread: threading.Thread) -> Reading | None:
        self._open = [reading for reading in self._open if not reading.is_over]
        return next((reading for reading in self._open if reading.thread is not thread), None)

    @property
    def has_loop(self) -> bool:
        return any(reading.is_loop and not reading.is_over for reading in self._open)


class Loop(Iterator[T], Generic[T]):
    """The iterator of `batches` and `transactions`. Before each step it checks whether this thread may take the step.

    `for message in inbox` is a bare generator instead, because one more call for each message would cost too much."""

    def __init__(
        self, what: str, begin: Callable[[Reading], Generator[T, None, None]], check: Callable[[Reading, bool], None]
    ) -> None:
        """
        begin: makes the generator, which registers the reading at its first step. It must not hold this object, so that
               it ends, and gives up what is in hand, as soon as nobody has this object any more.
        check: raises ConsumerBusy unless this thread may take the next step; its second argument is whether a step is
               being taken right now.
        """
        self._begin, self._check = begin, check
        self._stepping = threading.Lock()
        self._reading = Reading(what, is_loop=True)
        self._steps: Generator[T, None, None] | None = None

    def __next__(self) -> T:
        if not self._stepping.acquire(blocking=False):
            self._check(self._reading, True)
        try:
            if self._steps is None:
                self._reading = Reading(self._reading.what, is_loop=True)
                self._steps = self._begin(self._reading)
            elif not self._reading.is_over:
                self._check(self._reading, False)
            return next(self._steps)
        finally:
            self._stepping.release()

    def close(self) -> None:
        """Leave the loop. What is in hand is not done."""
        if self._steps is not None:
            self._steps.close()

    def restart(self) -> None:
        """Leave the loop; the next step begins it anew."""
        self.close()
        self._steps = None
