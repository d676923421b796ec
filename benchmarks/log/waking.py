"""How long after an append a reader that waits in another process is awake (the monotonic clock is the machine's)."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pxrs
from benchmarks.log.workload import Row, records
from benchmarks.measure import Figure, Work
from pxrs.log.arrivals import wait_for_messages
from pxrs.log.batch import encode
from pxrs.log.contract import Append
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.outcomes import offsets_of

ARRIVALS = 500
SETTLE_S = 0.002
"""Time for the reader to fall asleep: it says that it is about to, not that it is."""


def measure(folder: Path) -> Iterator[Row]:
    batch = records(1)
    data = bytes(encode(batch).data)
    with pxrs.open(folder / "data") as hub:
        hub.create_topic("wake", partitions=1)
    log = DirectoryLog(folder / "data")
    topic = log.topic("wake")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    readable, writable = context.Pipe(duplex=False)
    reader = context.Process(target=_read, args=(folder / "data", theirs, readable), daemon=True)
    reader.start()
    try:
        with open(folder / "wake-raw", "ab", buffering=0) as file:

            def by_hand() -> None:
                file.write(data)
                os.fdatasync(file.fileno())
                os.write(writable.fileno(), b"!")

            for _ in range(20):
                _one(ours, "log", lambda: offsets_of(topic.append([Append.encoded(0, batch)])))
                _one(ours, "pipe", by_hand)
            pairs = [
                (
                    _one(ours, "log", lambda: offsets_of(topic.append([Append.encoded(0, batch)]))),
                    _one(ours, "pipe", by_hand),
                )
                for _ in range(ARRIVALS)
            ]
        ours.send("end")
        reader.join(10)
    finally:
        if reader.is_alive():
            reader.kill()
        log.close()
    mine, reference = (statistics.quantiles(side, n=100) for side in zip(*pairs, strict=True))
    for name, at in (("p50", 49), ("p99", 98)):
        figure = Figure(reference[at] / mine[at], 1 / mine[at], 1 / reference[at])
        yield Row(f"wake a reader of another process, {name}", "write, fdatasync, a byte through a pipe", figure)


def _one(reader: Connection, how: str, work: Work) -> float:
    """Seconds from before the work until the reader was awake."""
    reader.send(how)
    assert reader.recv() == "ready"
    time.sleep(SETTLE_S)
    began = time.monotonic()
    work()
    awake: float = reader.recv()
    return awake - began


def _read(path: Path, writer: Connection, readable: Connection) -> None:
    log = DirectoryLog(path)
    topic = log.topic("wake")
    offset = topic.end(0)
    while (how := writer.recv()) != "end":
        writer.send("ready")
        if how == "log":
            assert wait_for_messages(topic, {0: offset}, 10) == {0}
        else:
            os.read(readable.fileno(), 1)
        awake = time.monotonic()
        if how == "log":
            offset = topic.end(0)
        writer.send(awake)
    log.close()
