"""Faults between any two system calls: kill, stop or fail a piece of code at its n-th call into the kernel.

The calls are counted where Python makes them, by wrapping the functions of `os` and `fcntl` that touch files, in a
forked child: so the test runs the real code against the real kernel, and every step of it can be the last one.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Fault = Callable[[str], None]

CALLS = (
    *("open", "close", "read", "write", "pread", "pwrite", "fsync", "fdatasync"),
    *("link", "unlink", "rename", "mkdir", "rmdir", "stat", "listdir", "scandir", "ftruncate", "replace", "pwritev"),
    *("readlink", "symlink"),
)


@dataclass
class Steps:
    """Counts calls, and acts before the one that `at` names (the first is 1)."""

    at: int | None = None
    act: Callable[[str], None] = lambda name: None
    count: int = 0

    def step(self, name: str) -> None:
        self.count += 1
        if self.count == self.at:
            self.act(name)


def kill(name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(name: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail(number: int) -> Callable[[str], None]:
    """Make the call fail as the kernel would. Closing and reading do not fail for lack of space."""

    def act(name: str) -> None:
        if name not in ("close", "unlink", "stat", "flock", "rmdir"):
            raise OSError(number, os.strerror(number), name)

    return act


no_space = fail(errno.ENOSPC)


@contextmanager
def counted(steps: Steps) -> Iterator[Steps]:
    """Count the calls made inside the block. For a child process: it changes `os` for all its threads.

    The garbage collector does not run meanwhile: finalizers of what earlier code has left would be counted too."""
    originals: list[tuple[Any, str, Any]] = []

    def wrap(module: Any, name: str) -> None:
        original = getattr(module, name)
        originals.append((module, name, original))

        def call(*arguments: Any, **named: Any) -> Any:
            steps.step(name)
            return original(*arguments, **named)

        setattr(module, name, call)

    for name in CALLS:
        if hasattr(os, name):
            wrap(os, name)
    wrap(fcntl, "flock")
    collects = gc.isenabled()
    gc.disable()
    try:
        yield steps
    finally:
        if collects:
            gc.enable()
        for module, name, original in originals:
            setattr(module, name, original)


@contextmanager
def child(work: Callable[[], None]) -> Iterator[int]:
    """Run `work` in a forked child; yields its process id. At the end the child is killed if it still runs, and
    reaped."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException as error:  # noqa: BLE001 - reported by the exit code and on stderr
            os.write(2, f"child: {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(status)
    try:
        yield pid
    finally:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass  # the test has reaped it already


def wait_exit(pid: int) -> int:
    """The child's exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_stopped(pid: int) -> bool:
    """Wait until the child has stopped itself (True) or has ended (False)."""
    _, status = os.waitpid(pid, os.WUNTRACED)
    return os.WIFSTOPPED(status)
