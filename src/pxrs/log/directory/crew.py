"""Threads that wait for the disk at the same time.

A file system syncs several files in hardly more time than one if the calls overlap; one after the other, each call
waits for a commit of the file system's journal. The calling thread does a share of the work, and all of it if no thread
can be started. The threads are daemons, because a producer may still append while the interpreter ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Final, TypeVar

HELPERS_MAX: Final = 3

T = TypeVar("T")


class Crew:
    """At most `helpers_max` threads, each started when it is first needed."""

    def __init__(self, helpers_max: int = HELPERS_MAX) -> None:
        self._helpers_max = helpers_max
        self._helpers = 0
        self._lock = threading.Lock()
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Do all pieces of work, in any order, and return when all are done. Raises the error of the first piece that
        has one. After an interrupt no more pieces are begun."""
        waiting = deque(enumerate(tasks))
        done: SimpleQueue[tuple[int, T | None, BaseException | None]] = SimpleQueue()
        interrupts: list[BaseException] = []

        def work() -> None:
            while True:
                try:
                    at, task = waiting.popleft()
                except IndexError:
                    return
                try:
                    done.put((at, None if interrupts else task(), None))
                except BaseException as error:  # noqa: BLE001 - raised to the caller, below
                    if not isinstance(error, Exception):
                        interrupts.append(error)
                    done.put((at, None, error))

        for _ in range(self._hire(len(tasks) - 1)):
            self._calls.put(work)
        try:
            work()
            outcomes = sorted((done.get() for _ in tasks), key=lambda outcome: outcome[0])
        finally:
            waiting.clear()
        for error in (*interrupts, *(error for _, _, error in outcomes)):
            if error is not None:
                raise error
        return [result for _, result, _ in outcomes]  # type: ignore[misc]

    def close(self) -> None:
        """End the threads, each after the piece that it works on."""
        with self._lock:
            for _ in range(self._helpers):
                self._calls.put(None)
            self._helpers = self._helpers_max = 0

    def _hire(self, wanted: int) -> int:
        """Start helpers, up to the number wanted. Returns how many there are."""
        with self._lock:
            while self._helpers < min(wanted, self._helpers_max):
                try:
                    threading.Thread(target=_help, args=(self._calls,), name="pxrs-crew", daemon=True).start()
                except RuntimeError:  # the limit of threads is reached, or the interpreter is exiting
                    break
                self._helpers += 1
            return min(wanted, self._helpers)

    def __del__(self) -> None:
        self.close()


def _help(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    """The function of a helper thread. It has no reference to the Crew, which could not be collected otherwise."""
    while (work := calls.get()) is not None:
        work()
        del work  # it refers to the appended batches
