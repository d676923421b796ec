"""The way in: messages one by one, tables, ready batches."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import xxhash

import pxrs
from benchmarks.log.workload import PARTITIONS, ROWS, Row, pairs, records
from benchmarks.measure import compare
from pxrs.log.batch import encode
from pxrs.log.contract import Append
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.directory.segments.frames import frames
from pxrs.log.outcomes import offsets_of

MESSAGES = 1_000_000
FEW_MESSAGES = 200_000
"""So few that all of them wait in the buffer when the last is sent: the flush is then a third of the time."""
TABLES = 5


def measure(folder: Path) -> Iterator[Row]:
    with pxrs.open(folder / "data") as hub:
        hub.create_topic("one-by-one", PARTITIONS)
        hub.create_topic("tables", PARTITIONS)
        yield from _send(hub)
        yield _send_batch(hub, folder)
    yield _append(folder)


def _send(hub: pxrs.Hub) -> Iterator[Row]:
    yield from _send_so_many(hub, MESSAGES, rounds=5)
    yield from _send_so_many(hub, FEW_MESSAGES, rounds=9)


def _send_so_many(hub: pxrs.Hub, count: int, rounds: int) -> Iterator[Row]:
    messages = pairs(count)
    lock, hash_of, now = threading.Lock(), xxhash.xxh64_intdigest, time.time_ns
    reference = "bare loop: hash, lock, append to lists"

    def by_hand() -> None:
        lists: list[tuple[list[bytes], list[bytes], list[int]]] = [([], [], []) for _ in range(PARTITIONS)]
        for key, value in messages:
            place = hash_of(key) % PARTITIONS
            with lock:
                keys, values, times = lists[place]
                keys.append(key)
                values.append(value)
                times.append(now())

    with hub.producer("one-by-one") as producer:

        def send() -> None:
            put = producer.send
            for key, value in messages:
                put(value, key)

        def send_and_flush() -> None:
            send()
            producer.flush()

        whole = compare(send_and_flush, by_hand, times=1, rounds=rounds)
        yield Row(f"send() + flush, {count:,} messages", reference, whole.times(count), "0.6x")
        alone = compare(send, by_hand, times=1, rounds=rounds, before=producer.flush)
        yield Row(f"send() until the last of {count:,} returns", reference, alone.times(count))


def _send_batch(hub: pxrs.Hub, folder: Path) -> Row:
    """The reference writes what ours wrote in the same round: the same frames, synced where ours were."""
    rows = ROWS * PARTITIONS
    table = pa.Table.from_batches([records(rows).select(["key", "value", "timestamp"])])
    written = _Written(folder / "data/topics/tables/partitions")
    appends: list[tuple[int, bytes]] = []
    files = [os.open(folder / f"raw-{n}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) for n in range(PARTITIONS)]

    with hub.producer("tables") as producer:

        def ours() -> None:
            for _ in range(TABLES):
                producer.send_batch(table)
            producer.flush()

        def by_hand() -> None:
            for partition, data in appends:
                os.write(files[partition], data)
                os.fdatasync(files[partition])

        def take_what_ours_wrote() -> None:
            appends[:] = written.new_appends() or appends

        figure = compare(ours, by_hand, times=1, rounds=9, before=take_what_ours_wrote)
    for file in files:
        os.close(file)
    return Row(
        "send_batch + flush, split by key", "write + fdatasync, same frames", figure.times(TABLES * rows), "0.5x"
    )


class _Written:
    """What was appended to the partitions since the last look, append by append."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[Path, int] = {}

    def new_appends(self) -> list[tuple[int, bytes]]:
        return [
            (number, data)
            for number in range(PARTITIONS)
            for path in sorted((self._folder / f"partition-{number}").glob("*.log"))
            for data in self._appends(path)
        ]

    def _appends(self, path: Path) -> Iterator[bytes]:
        begin = self._seen.get(path, 0)
        with open(path, "rb") as file:
            file.seek(begin)
            data = file.read()
        self._seen[path] = begin + len(data)
        # A frame that follows none begins an append.
        walk = frames(pa.py_buffer(data), str(path), 0, len(data))
        starts = [position for position, header in walk if header.follows == 0]
        for start, end in pairwise([*starts, len(data)]):
            yield data[start:end]


def _append(folder: Path) -> Row:
    """A batch of ready Arrow records, against writing and syncing the same bytes to a plain file."""
    batch = records()
    data = encode(batch).data
    log = DirectoryLog(folder / "data")
    topic = log.topic("tables")
    at = 0

    def ours() -> None:
        nonlocal at
        at = (at + 1) % PARTITIONS
        offsets_of(topic.append([Append.encoded(at, batch)]))

    with open(folder / "raw", "ab", buffering=0) as file:

        def by_hand() -> None:
            file.write(data)
            os.fdatasync(file.fileno())

        figure = compare(ours, by_hand, times=20, rounds=11)
    log.close()
    return Row("append ready Arrow batches", "write + fdatasync", figure.times(ROWS), "0.5x")
