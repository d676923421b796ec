"""Waiting in tests: for something to become true, and for a call that may never return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

PATIENCE_S: Final = 30.0

T = TypeVar("T")


def eventually(check: Callable[[], T | None], patience_s: float = PATIENCE_S) -> T:
    """What `check` returns, as soon as that is true. Raises AssertionError if it is not in time."""
    until = time.monotonic() + patience_s
    while not (found := check()):
        assert time.monotonic() < until, "not in time"
        time.sleep(0.002)
    return found


def aside(work: Callable[[], T]) -> Future[T]:
    """Call it in a thread of its own, so that the test goes on if it never returns."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asks
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
