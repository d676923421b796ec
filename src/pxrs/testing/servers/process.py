"""One server process: its ports, its folder, its signals, and its death with the process that started it."""

from __future__ import annotations

import abc
import os
import shutil
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Final, Self

from pxrs.errors import MissingDependency, PxrsError
from pxrs.launching import HOST, free_ports, launch
from pxrs.testing.forked import Forked

try:
    import psutil
except ImportError as error:
    raise MissingDependency.of_extra("pxrs.testing.servers", "psutil", "testing") from error

START_S_MAX = 30.0
STOP_S_MAX = 10.0
PROBE_S_MAX = 1.0
POLL_S = 0.01
LOG_TAIL_BYTES = 4000


class ServerFailed(PxrsError):
    """A test server did not start, stop or answer in time. The message holds the end of its log."""


def wait_until(holds: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):  # psutil knows a process by its start time too: never a stranger's
        process.send_signal(number)


def _has_status(process: psutil.Process, *statuses: str) -> bool:
    """Say whether the process is in one of `statuses`; one that is gone is in all of them."""
    try:
        return process.status() in statuses
    except psutil.NoSuchProcess:
        return True


def temporary_folder() -> Path:
    """Make a folder with a short path that other users may pass through but not list."""
    parent = tempfile.gettempdir()
    if len(parent) > 30 and os.access("/tmp", os.W_OK):
        parent = "/tmp"  # macOS gives each user a long one
    folder = Path(tempfile.mkdtemp(prefix="pxrs-", dir=parent))
    folder.chmod(0o711)
    return folder


def remove_folder(folder: Path, process_id: int) -> None:
    if os.getpid() == process_id:  # a fork that exits must not take its parent's data away
        shutil.rmtree(folder, ignore_errors=True)


_STARTED: Final[weakref.WeakSet[Server]] = weakref.WeakSet()


def started_servers() -> list[Server]:
    """The servers that this process has started and not closed."""
    return list(_STARTED)


# Over the limit: whatever a test does to a server process, and what each kind of server says about itself.
class Server(abc.ABC):
    """One server process with its own folder and ports. The folder lasts until `close`, the process until `stop`."""

    # Over the limit: one method for each thing that a test does to a server or asks of it.

    scheme: ClassVar[str]
    _stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    _death_signal: ClassVar[signal.Signals] = signal.SIGKILL  # sent when the tests' process is gone

    def __init__(self) -> None:
        self.host = HOST
        (self.port,) = free_ports(1)
        self._folder: Path | None = None
        self._remove: Callable[[], object] = lambda: None
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._is_paused = False

    @abc.abstractmethod
    def _prepare(self, folder: Path) -> None:
        """Write what the first start needs into `folder`."""

    @abc.abstractmethod
    def _command(self, folder: Path) -> list[str]:
        """Return the command that runs the server in the foreground."""

    @abc.abstractmethod
    def is_ready(self) -> bool:
        """Say whether the server serves requests now; False also when it cannot be reached."""

    @property
    def url(self) -> str:
        """The address in the form that `pxrs` takes."""
        return f"{self.scheme}://{self.host}:{self.port}"

    @property
    def directory(self) -> Path:
        """The server's folder; it exists from the first `start` to `close`."""
        if self._folder is None:
            raise ServerFailed(f"{self!r} was not started")
        return self._folder

    @property
    def is_running(self) -> bool:
        """Whether the process exists, paused or not."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the server (of its parent process, where it has several)."""
        return self._running().pid

    def start(self, *, wait: bool = True) -> Self:
        """Start the server if it does not run, and wait until it serves unless `wait` is False."""
        if self.is_running:
            return self
        try:
            if self._folder is None:
                self._make_folder()
            _STARTED.add(self)
            command, log = self._command(self.directory), self.directory / "log"
            self._process = self._launch(command, log)
            if wait:
                self.wait_until_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def wait_until_ready(self, timeout_s: float = START_S_MAX) -> None:
        """Return once the server serves; raise with the end of its log if it ends or takes too long."""
        if not wait_until(lambda: not self.is_running or self.is_ready(), timeout_s):
            raise ServerFailed(f"{self!r} did not serve within {timeout_s} s:\n{self.log_tail()}")
        if not self.is_running:
            raise ServerFailed(f"{self!r} has ended{self._how()}:\n{self.log_tail()}")

    def fault(self, timeout_s: float = START_S_MAX) -> str | None:
        """Why the server does not serve: it is paused, has ended, or does not answer within `timeout_s`; with the end
        of its log. None if it serves."""
        if self._is_paused:
            return f"{self!r} is paused"
        try:
            self.wait_until_ready(timeout_s)
        except ServerFailed as error:
            return str(error)
        return None

    def restore(self) -> None:
        """Have the server serve again, on the same data, if it is paused or has ended."""
        self.resume()
        self.start()

    def stop(self) -> None:
        """Stop the server in its orderly way, or kill it if that takes too long. The data stay."""
        if self.is_running:
            self.resume()
            self._running().send_signal(self._stop_signal)
            if not wait_until(lambda: not self.is_running, STOP_S_MAX):
                self.kill()

    def kill(self) -> None:
        """End every process of the server at once (SIGKILL), as a crash would. The data stay."""
        processes: list[psutil.Process] = []
        with suppress(ServerFailed, psutil.NoSuchProcess):  # it may end by itself meanwhile
            processes = _freeze(self)
        if self._process is None or not self.is_running:
            return
        for process in reversed(processes):  # the parent last, so that it cannot act on the death of a child
            _signal(process, signal.SIGKILL)
        self._process.wait(STOP_S_MAX)
        if not wait_until(lambda: all(_has_status(p, psutil.STATUS_ZOMBIE) for p in processes), STOP_S_MAX):
            raise ServerFailed(f"{self!r} did not end after SIGKILL")
        self._is_paused = False

    def pause(self) -> None:
        """Stop every process of the server (SIGSTOP): connections stay open and nobody answers."""
        self._running()
        _freeze(self)
        self._is_paused = True

    def resume(self) -> None:
        """Let a paused server go on (SIGCONT)."""
        for process in reversed(self._processes()):
            _signal(process, signal.SIGCONT)
        self._is_paused = False

    def restart(self, *, wait: bool = True) -> None:
        """Stop the server if it runs, and start it on the same data and port."""
        self.stop()
        self.start(wait=wait)

    def close(self) -> None:
        """End the server and delete its folder. Nobody will read the data, so it gets no time to save them."""
        try:
            self.kill()
        finally:
            self._remove()
            self._folder = None
            _STARTED.discard(self)

    def log_tail(self) -> str:
        """Return the end of what the server wrote."""
        try:
            return (self.directory / "log").read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        except (OSError, ServerFailed):
            return "(no log)"

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.host}:{self.port})"

    def _launch(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes] | Forked:
        """Run `command` with its output appended to `log`."""
        return launch(command, log, self._death_signal, self._user(), self._environment())

    def _how(self) -> str:
        """The exit code of the process that has ended, for a message."""
        code = None if self._process is None else self._process.poll()
        return "" if code is None else f" with code {code}"

    def _make_folder(self) -> None:
        folder = temporary_folder()
        self._remove = weakref.finalize(self, remove_folder, folder, os.getpid())
        self._prepare(folder)
        self._folder = folder  # last: after a failure the next start begins anew

    def _user(self) -> tuple[int, int] | None:
        """Return the user and group that the server runs as, or None for our own."""
        return None

    def _environment(self) -> Mapping[str, str]:
        return {}

    def _running(self) -> subprocess.Popen[bytes] | Forked:
        if self._process is None or self._process.poll() is not None:
            raise ServerFailed(f"{self!r} does not run:\n{self.log_tail()}")
        return self._process

    def _processes(self) -> list[psutil.Process]:
        """Return the server's processes, the parent first."""
        if not self.is_running:
            return []
        parent = psutil.Process(self.pid)
        return [parent, *parent.children(recursive=True)]


def _freeze(server: Server) -> list[psutil.Process]:
    """Stop all processes of a server (SIGSTOP) and return them. The parent first: it can start no more children then.
    Raises ServerFailed."""
    _freeze_these(server, [psutil.Process(server.pid)])
    processes = server._processes()
    _freeze_these(server, processes[1:])
    return processes


def _freeze_these(server: Server, processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        _signal(process, signal.SIGSTOP)
    frozen = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    if not wait_until(lambda: all(_has_status(p, *frozen) for p in processes), STOP_S_MAX):
        raise ServerFailed(f"{server!r} did not stop on SIGSTOP")
