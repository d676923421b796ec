"""Starts server processes that end with the process that started them, and finds ports for them.

For commands that run several processes, such as `pxrs cluster up`, and for tests. Needs nothing but Python.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from pxrs.errors import MissingDependency

HOST: Final = "127.0.0.1"

PORTS = range(15_000, 32_000)
"""The ports that `free_ports` chooses from. The workers of a test run have a part each: a port that one of them has
been given, and nobody listens on yet, would be free for the others."""
_ports_taken: set[int] = set()
_ports_lock = threading.Lock()


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on, each handed out once by this process.

    They lie below the range that systems take for outgoing connections. Inside it, a client that
    keeps dialling a stopped server would sooner or later be given that very port as its own, and
    be connected to itself.
    """
    ports: list[int] = []
    with _ports_lock:
        while len(ports) < count:
            port = random.choice(PORTS)
            if len(_ports_taken) >= len(PORTS) // 2:
                _ports_taken.clear()  # those of long ago are given out again
            if port not in _ports_taken and _can_listen(port):
                _ports_taken.add(port)
                ports.append(port)
    return ports


def _can_listen(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


# Runs in a fresh interpreter, because `preexec_fn` would run in a fork of a process full of threads, and gRPC's
# fork handlers with it. The system clears the death signal when the user changes, so it is set after that.
_LAUNCHER = """
import ctypes, os, signal, sys
parent, death_signal, uid, gid = map(int, sys.argv[1:5])
if uid >= 0:
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, death_signal)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
os.execv(sys.argv[5], sys.argv[5:])
"""


@functools.cache
def _launching_thread(process_id: int) -> ThreadPoolExecutor:
    """Return a thread as long-lived as this process: Linux counts a parent as dead when the thread that forked ends."""
    return ThreadPoolExecutor(1, f"pxrs-servers-{process_id}")


def launch(
    command: Sequence[str],
    log: Path,
    death_signal: signal.Signals,
    user: tuple[int, int] | None,
    env: Mapping[str, str],
    folder: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Run `command` so that it gets `death_signal` when this process ends (on Linux), as `user` if given.

    Its output is appended to `log`; it runs in `folder`, by default that of the log. An interrupt at the keyboard does
    not reach it."""
    uid, gid = user or (-1, -1)
    numbers = map(str, (os.getpid(), int(death_signal), uid, gid))
    launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, *numbers]

    def launch() -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                [*launcher, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder or log.parent,
                env={**os.environ, **env},
                start_new_session=True,  # an interrupt at the keyboard is for the parent, which then stops its children
            )

    return _launching_thread(os.getpid()).submit(launch).result()


def package_folder(package: str, distribution: str) -> Path:
    """Return an installed package's folder, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependency(f"no package {package}: pip install {distribution}")
    return Path(spec.submodule_search_locations[0])
