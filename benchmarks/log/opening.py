"""Opening a large partition, and finding an offset in it.

A sealed segment costs nothing until it is read, so the tail decides: the time is shown with that of reading its bytes.
Cold: the system was told to drop the files' pages beforehand. After a reboot: nothing is published, so the tail is
checked frame by frame.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

import pxrs
from benchmarks.log.workload import Row, records
from benchmarks.measure import Work, compare
from pxrs.log.batch import encode
from pxrs.log.contract import Append, TopicLog
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.outcomes import offsets_of
from pxrs.model import SEGMENT_BYTES_DEFAULT

SMALL_GB = 0.1
FRAMES = 2_000
"""Frames of one message in an append, where the tail is made of such."""
SPARE_BYTES = 2 << 20


def measure(folder: Path, gigabytes: float) -> Iterator[Row]:
    with pxrs.open(folder / "data") as hub:
        for name in ("large", "small", "fine"):
            hub.create_topic(name, partitions=1)
    log = DirectoryLog(folder / "data")
    _fill(log.topic("large"), folder, int(gigabytes * 1e9))
    _fill(log.topic("small"), folder, int(SMALL_GB * 1e9))
    _fill_tail(log.topic("fine"), folder, records(1), FRAMES)
    yield _find(log, gigabytes)
    log.close()
    for topic, kind in (("large", f"{gigabytes:g} GB, frames of 10,000"), ("fine", "64 MB, frames of 1")):
        yield from _open(folder, topic, kind)


def _find(log: DirectoryLog, gigabytes: float) -> Row:
    def find_in(topic: TopicLog) -> Work:
        offsets = random.Random(7)
        end = topic.end(0)
        return lambda: topic.read(0, offsets.randrange(end), max_bytes=1)

    figure = compare(find_in(log.topic("large")), find_in(log.topic("small")), times=50, rounds=9)
    return Row(f"read at a random offset of {gigabytes:g} GB", f"the same of {SMALL_GB:g} GB", figure)


def _open(folder: Path, name: str, kind: str) -> Iterator[Row]:
    files = folder / "data/topics" / name / "partitions/partition-0"
    tail = sorted(files.glob("*.log"))[-1]
    one = records(1)

    def open_and_read() -> None:
        log = DirectoryLog(folder / "data")
        topic = log.topic(name)
        topic.read(0, topic.end(0) - 1)
        log.close()

    def open_and_append() -> None:
        log = DirectoryLog(folder / "data")
        offsets_of(log.topic(name).append([Append.encoded(0, one)]))
        log.close()

    def read_tail() -> None:
        tail.read_bytes()

    def forget() -> None:
        (files / "published").unlink(missing_ok=True)

    def cold() -> None:
        for path in files.iterdir():
            with open(path, "rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def forget_cold() -> None:
        forget()
        cold()

    reference = f"reading the tail's {tail.stat().st_size >> 20} MiB"
    for what, work, state, before in (
        ("open and read the last", open_and_read, "warm", lambda: None),
        ("open and read the last", open_and_read, "cold", cold),
        ("open and append one", open_and_append, "warm", lambda: None),
        ("open and append one", open_and_append, "cold", cold),
        ("open after a reboot, read", open_and_read, "warm", forget),
        ("open after a reboot, read", open_and_read, "cold", forget_cold),
    ):
        figure = compare(work, read_tail, times=1, rounds=5, before=before)
        yield Row(f"{what} ({kind}), {state}", reference, figure, "200 ms")


def _fill(topic: TopicLog, folder: Path, size: int) -> None:
    """Up to about this many bytes, and then until the tail is nearly a whole segment."""
    batch = records()
    for _ in range(size // encode(batch).frame_bytes):
        offsets_of(topic.append([Append.encoded(0, batch)]))
    _fill_tail(topic, folder, batch, 1)


def _fill_tail(topic: TopicLog, folder: Path, batch: pa.RecordBatch, frames: int) -> None:
    files = folder / "data/topics" / topic.name / "partitions/partition-0"
    step = encode(batch).frame_bytes * frames
    offsets_of(topic.append([Append.encoded(0, batch)]))
    while sorted(files.glob("*.log"))[-1].stat().st_size + step < SEGMENT_BYTES_DEFAULT - SPARE_BYTES:
        offsets_of(topic.append([Append.encoded(0, batch)] * frames))
