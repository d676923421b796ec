"""A `pxrs` command whose Python child processes are forked from it, for tests of `pxrs worker`.

    Forked("pxrs.testing.forked_workers", ["worker", "shop:handle", ...])

A worker that is started afresh spends half a second of CPU on imports. The supervisor has no threads and opens neither
log nor registry, so a fork of it can become a worker. Tests of how a worker starts run `pxrs.cli` instead.

In this process `subprocess.Popen` forks when it is given `python OPTIONS -c CODE`, and is as always for other commands.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final

_CONTEXT: Final = multiprocessing.get_context("fork")
_STARTED_AFRESH: Final = subprocess.Popen
_DESCRIPTORS_MAX: Final = 1024


class ForkedChild:
    """A running child. Its methods are those of `subprocess.Popen` that bear the same names."""

    def __init__(self, code: str) -> None:
        settings, ours = os.pipe()
        try:
            self._process = _CONTEXT.Process(target=_become, args=(code, settings))
            self._process.start()
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(settings)
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdin = open(ours, "wb")  # noqa: SIM115 - the supervisor closes it

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _become(code: str, settings: int) -> None:
    """The child: become what `python -c CODE` would be, with `settings` as its standard input."""
    os.dup2(settings, 0)
    # Also the other children's pipes: a child knows by the end of its own that the supervisor is gone.
    os.closerange(3, _DESCRIPTORS_MAX)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - until the child ends
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    exec(code, {"__name__": "__main__"})


def _start(command: Sequence[str], **options: Any) -> Any:
    is_python = [*command[:1], *command[-2:-1]] == [sys.executable, "-c"]
    if is_python and options == {"stdin": subprocess.PIPE}:
        return ForkedChild(command[-1])
    return _STARTED_AFRESH(command, **options)


if __name__ == "__main__":
    subprocess.Popen = _start  # type: ignore[assignment,misc]
    runpy.run_module("pxrs.cli", run_name="__main__", alter_sys=True)
