"""Where tests keep temporary files: in memory, where the system has a file system for that.

On a disk, tests and the servers that they start often wait for `fsync`. What a test checks does not depend on the disk:
no test cuts the power, and tests of what a power cut leaves rebuild that from the system calls. `make soak` uses the
disk. So does a run for which TMPDIR is set, which also keeps the files; otherwise they are removed in the end.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")
ROOM_BYTES = 8 << 30
"""How much must be free, of the file system and of the machine's memory: a run has up to 1 GB of files at a time."""


def use_memory() -> None:
    """Set TMPDIR for this process and those that it starts, in the process that starts the run."""
    if "TMPDIR" in os.environ or "PXRS_SOAK" in os.environ or not _has_room():
        return
    folder = tempfile.mkdtemp(prefix="pxrs-", dir=MEMORY)  # short: the paths of Unix sockets are limited
    os.chmod(folder, 0o1777)  # as of /tmp: PostgreSQL, and tests of who may only read, run as other users
    atexit.register(_remove, folder, os.getpid())
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:  # not at the end of a process that a test has forked
        shutil.rmtree(folder, ignore_errors=True)


def _has_room() -> bool:
    try:
        if shutil.disk_usage(MEMORY).free < ROOM_BYTES:  # often 64 MB in a container
            return False
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not on Linux
        return False
    available = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)
    return available >= ROOM_BYTES
