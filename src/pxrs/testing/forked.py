"""Processes that run a module as `python -m MODULE` does, forked from one process that has already imported pxrs.

A new interpreter spends about a second of CPU on imports before a command or a worker does anything, and the tests
start hundreds of them. Here one process of `multiprocessing`'s fork server imports what they share, has no threads of
its own and opens no registry; each child is forked from it and begins where `python -m` would, in a few milliseconds.
A child is a process in every other respect: it has its own descriptors, environment and folder, and can be killed.

What is not like a new interpreter: options that are read when one starts, such as PYTHONIOENCODING, have no effect, and
modules that the fork server has imported are imported in the child. Tests of those use `subprocess`.

The fork server ends with the process that uses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing import reduction
from typing import Any, Final, Self, TypedDict, Unpack

_CONTEXT: Final = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["pxrs.testing.preloaded"])
_PR_SET_PDEATHSIG: Final = 1
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RunOptions(TypedDict, total=False):
    """The keyword arguments of `run`."""

    input: bytes | None
    stdin: int
    stdout: int | None
    env: Mapping[str, str] | None
    cwd: str | os.PathLike[str]
    timeout: float


class Forked:
    """A running child. Its methods are those of `subprocess.Popen` that bear the same names."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        stderr: int | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] = ".",
        has_group: bool = False,
        is_mortal: bool = False,
    ) -> None:
        """module: its name, or the path of a file, which ends in `.py`.
        has_group: the child begins a process group of its own, as behind a shell's prompt.
        is_mortal: on Linux, the child is killed when the process that uses the fork server ends, however that ends.
        stdin, stdout, stderr: descriptors, which stay open in this process. By default the child has nothing to read
        and writes where this process does."""
        null = os.open(os.devnull, os.O_RDWR)
        try:
            given = (null if stdin == subprocess.DEVNULL else stdin, 1 if stdout is None else stdout)
            streams = [_Stream(each) for each in (*given, 2 if stderr is None else stderr)]
            variables = dict(os.environ if env is None else env)
            self._process = _CONTEXT.Process(
                target=_become,
                args=(module, list(arguments), streams, variables, os.path.abspath(cwd), has_group, is_mortal),
            )
            self._process.start()
        finally:
            os.close(null)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since, as `subprocess.Popen` has it
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()


def run(
    module: str,
    arguments: Sequence[str],
    *,
    input: bytes | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] = ".",
    timeout: float = 120.0,
) -> subprocess.CompletedProcess[bytes]:
    """Run the module to its end, as `subprocess.run` does with `capture_output=True`. A child that takes longer than
    `timeout` is killed."""
    with ExitStack() as files:
        out, errors, source = (files.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        if input is not None:
            source.write(input)
            source.seek(0)
            stdin = source.fileno()
        target = out.fileno() if stdout is None else stdout
        process = Forked(module, arguments, stdin=stdin, stdout=target, stderr=errors.fileno(), env=env, cwd=cwd)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
            process.wait()
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess([module, *arguments], code, out.read(), errors.read())


def run_text(module: str, arguments: Sequence[str], **options: Unpack[RunOptions]) -> subprocess.CompletedProcess[str]:
    """As `run`, with what was printed as text."""
    done = run(module, arguments, **options)
    texts = (printed.decode(errors="replace") for printed in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, *texts)


class _Stream:
    """A descriptor on its way to a child."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _Arrived, (reduction.DupFd(self.descriptor),)


class _Arrived:
    def __init__(self, sent: Any) -> None:
        self.descriptor: int = sent.detach()


def _become(
    module: str,
    arguments: list[str],
    streams: Sequence[_Arrived],
    variables: dict[str, str],
    folder: str,
    has_group: bool,
    is_mortal: bool,
) -> None:
    """The child: become what `python -m MODULE ARGUMENTS` would be."""
    if has_group:
        os.setpgid(0, 0)
    if is_mortal and sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the fork server ends with its user, and then this
        if os.getppid() != parent:
            os._exit(1)
    for number, stream in enumerate(streams):
        os.dup2(stream.descriptor, number)
        os.close(stream.descriptor)
    os.environ.clear()
    os.environ.update(variables)
    time.tzset()
    os.chdir(folder)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115 - until the child ends
    raw = io.FileIO(2, "w", closefd=False)
    sys.stderr = io.TextIOWrapper(raw, errors="backslashreplace", write_through=True)
    sys.argv = [module, *arguments]
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if module.endswith(".py"):
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
