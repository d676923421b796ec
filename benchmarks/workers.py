"""Two worker processes against one, for a handler that computes, on a log that is there already.

Run as a program of its own it is the worker: it joins, waits for a file, handles
everything, and tells when it ended.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa

import pxrs
from benchmarks.measure import Figure
from pxrs.clock import SYSTEM
from pxrs.model import Message

ROWS = 4_000
ROUNDS = 2_000
"""Of the hash: about a millisecond of work, in C code that holds the lock of the interpreter or not, as it likes."""


def handle(message: Message) -> None:
    hashlib.pbkdf2_hmac("sha256", message.value or b"", b"salt", ROUNDS)


def measure() -> Figure:
    seconds = {count: min(_run(count) for _ in range(2)) for count in (1, 2)}
    return Figure(seconds[1] / seconds[2], ROWS / seconds[2], ROWS / seconds[1])


def _run(count: int) -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with pxrs.open(folder / "data") as hub:
            hub.create_topic("t", partitions=8)
            with hub.producer("t") as out:
                numbers = range(ROWS)
                partitions = pa.array([i % 8 for i in numbers], pa.int32())
                out.send_batch(pa.table({"value": [b"%0100d" % i for i in numbers], "partition": partitions}))
            command = [sys.executable, "-m", "benchmarks.workers", str(folder), str(count)]
            workers = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in range(count)]
            try:
                for worker in workers:
                    assert worker.stdout is not None
                    assert worker.stdout.readline() == "ready\n"
                began = SYSTEM.now()
                (folder / "go").touch()
                ends = [float(worker.communicate(timeout=120)[0]) for worker in workers]
            finally:
                for worker in workers:
                    worker.kill()
                    worker.wait()
    return max(ends) - began


def _work(folder: Path, count: int, name: str) -> None:
    with pxrs.open(folder / "data") as hub, hub.consumer("t", group="g", name=name, until="end") as inbox:
        while len(inbox.assignment) != 8 // count:
            time.sleep(0.002)
        print("ready", flush=True)
        while not (folder / "go").exists():
            time.sleep(0.001)
        inbox.run(handle)
        print(SYSTEM.now(), flush=True)


if __name__ == "__main__":
    _work(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
