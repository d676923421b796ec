"""Every test has a time limit: a test that takes longer fails, with what each of its threads and processes is doing.

The limit covers a test with its fixtures. A thread beside the tests measures it. At the limit that thread writes down
the stack of every thread of this process, and the processes that this process has started, and sends a signal to the
main thread, in which the test runs. The handler of the signal raises `pytest.fail` there, so the test fails, its
fixtures are torn down, the servers that they have started are stopped, and the next test runs.

If the main thread does not return to Python code (a call of a C library that ends for no signal), or if the teardown
hangs too, the signal is sent again after `GRACE_S`. After `SIGNALS_MAX` signals this process kills the processes that
it has started, and ends. pytest-xdist then reports the test as the one that crashed its worker, and starts another
worker for the other tests.

pytest's own `faulthandler_timeout` does not do: all that it can do after the dump is to end the process at once. The
servers of the worker stay, no fixture is torn down, and the tests that share a server with the one that hung run
without it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Final, NoReturn

import psutil
import pytest

LIMIT_S: Final = 300.0
"""The limit of a test that has no other by the marker `limit`. The longest tests take a minute on two idle cores, and
up to four times that on a busy machine."""
SOAK_FACTOR: Final = 24
"""How much longer a test may take in `make soak`."""
GRACE_S: Final = 60.0
"""The time between two signals to the main thread, for the teardown of the test that failed."""
SIGNALS_MAX: Final = 3
EXIT_CODE: Final = 70
_SIGNAL: Final = signal.SIGRTMIN + 4
"""A signal that nothing else uses: tests use SIGALRM, SIGUSR1 and SIGUSR2 themselves."""


class Limits:
    """The plugin of pytest. One in each process that runs tests."""

    def __init__(self, factor: float = 1.0, grace_s: float = GRACE_S) -> None:
        """factor: by what each limit is multiplied."""
        self._factor, self._grace_s = factor, grace_s
        self._stderr = os.dup(2)
        """Standard error as it was before pytest began to capture it."""
        self._changed = threading.Condition()
        self._test: str | None = None
        """The test that runs now; None between two tests."""
        self._limit_s = self._deadline = 0.0
        """The moment of the monotonic clock at which the next signal is sent to the main thread."""
        self._signals = 0
        """How many signals the test that runs now was sent."""
        self._dump = ""
        """What the threads and processes did at the limit of the test that runs now; set before each signal."""
        self._pid = 0
        """The process in which the thread that measures runs; a forked child has none."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        marker = item.get_closest_marker("limit")
        limit_s = (LIMIT_S if marker is None else float(marker.args[0])) * self._factor
        self._begin(item.nodeid, limit_s)
        try:
            return (yield)  # type: ignore[return-value]
        finally:
            with self._changed:
                self._test = None

    def _begin(self, test: str, limit_s: float) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            signal.signal(_SIGNAL, self._fail)
            threading.Thread(target=self._run, name="limits-of-tests", daemon=True).start()
        with self._changed:
            self._test, self._deadline, self._signals = test, time.monotonic() + limit_s, 0
            self._limit_s = limit_s
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                left_s = self._deadline - time.monotonic() if self._test is not None else None
                if left_s is None or left_s > 0:
                    self._changed.wait(left_s)
                    continue
                test, signals = self._test, self._signals
                self._signals += 1
                self._deadline = time.monotonic() + self._grace_s
                self._dump = f"{test} has taken more than {self._limit_s:g} s\n{threads()}\n{processes()}"
            if signals >= SIGNALS_MAX:
                self._end_process()
            signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)

    def _fail(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal, in the main thread."""
        if self._test is not None and self._signals:  # else the test has ended while the signal was under way
            pytest.fail(self._dump, pytrace=False)

    def _end_process(self) -> NoReturn:
        with contextlib.suppress(OSError):
            os.write(self._stderr, f"\n{self._dump}\nThe test ignores its limit: its process ends.\n".encode())
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        os._exit(EXIT_CODE)


def threads() -> str:
    """The stack of every thread of this process but the one that calls."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            stack = "".join(traceback.format_stack(frame))
            parts.append(f"--- thread {names.get(ident, ident)}\n{stack}")
    return "\n".join(parts)


def processes() -> str:
    """The processes that this process has started, and those that they have started: one line each."""
    lines = ["--- processes"]
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            command = " ".join(child.cmdline())[:200]
            lines.append(f"{child.pid} (of {child.ppid()}) {child.status()}: {command}")
    return "\n".join(lines)
