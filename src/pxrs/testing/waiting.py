"""Waiting in tests: for something to become true, and for a call that may never return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

PATIENCE_S: Final = 30.0

T = TypeVar("T")


def eventually(
    check: Callable[[], T | None], patience_s: float = PATIENCE_S, *, what: str | Callable[[], object] = ""
) -> T:
    """Call `check` until it returns something true, and return that. After `patience_s` seconds raise AssertionError,
    with `what` as its text: what was waited for, or a function that tells what there is instead."""
    began = time.monotonic()
    while not (found := check()):
        waited_s = time.monotonic() - began
        assert waited_s < patience_s, f"not in time: {what() if callable(what) else what}"
        # What takes long is asked for less often: the checks themselves would slow down what they wait for.
        time.sleep(min(0.002 + waited_s / 20, 0.05))
    return found


class _Aside(Future[T]):
    """A call on a thread of its own. Unlike with other futures, `result` and `exception` wait for a bounded time if
    none is given, so that a call that hangs is a failed test."""

    def result(self, timeout: float | None = PATIENCE_S) -> T:
        return super().result(timeout)

    def exception(self, timeout: float | None = PATIENCE_S) -> BaseException | None:
        return super().exception(timeout)


def aside(work: Callable[[], T]) -> Future[T]:
    """Call `work` on a daemon thread of its own, which keeps no process alive if the call never returns. `result` and
    `exception` of the future wait for `PATIENCE_S` seconds if no other time is given."""
    future: Future[T] = _Aside()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
