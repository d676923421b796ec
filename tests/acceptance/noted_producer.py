"""A producer in a process of its own, which writes down where each of its messages is stored once it is acknowledged.

Two threads send until SIGTERM, one message by message and one in tables, each with a producer and with keys of its own.
The process ends with code 0 if every message was acknowledged, and with code 1 at the first error.

    python noted_producer.py URL TOPIC JOURNAL PAUSE_S

A line of the journal: the key, the value, the partition, the offset.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

import pxrs
from pxrs.hub import Hub
from pxrs.testing.forked import Forked

KEYS = 7
AT_A_TIME = 5
"""How many messages each thread sends before it waits for all of them."""


class Acknowledged(NamedTuple):
    key: bytes
    value: bytes
    partition: int
    offset: int


class NotedProducer:
    """The parent's side."""

    def __init__(self, url: str, topic: str, name: str, folder: Path, pause_s: float) -> None:
        self.name = name
        self.journal, self.errors = folder / f"{name}.journal", folder / f"{name}.stderr"
        with self.errors.open("wb") as errors:
            arguments = [url, topic, str(self.journal), str(pause_s)]
            self.process = Forked(__file__, arguments, stderr=errors.fileno())

    @property
    def written(self) -> int:
        """How many bytes the journal has."""
        return self.journal.stat().st_size if self.journal.exists() else 0

    def read(self) -> list[Acknowledged]:
        """What was acknowledged, in that order."""
        lines = (line.split() for line in self.journal.read_bytes().splitlines())
        return [Acknowledged(key, value, int(partition), int(offset)) for key, value, partition, offset in lines]

    def __enter__(self) -> NotedProducer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(10)


def send_messages(hub: Hub, topic: str, name: str, descriptor: int, turns: Iterator[int]) -> None:
    with hub.producer(topic) as out:
        for turn in turns:
            numbers = range(turn * AT_A_TIME, (turn + 1) * AT_A_TIME)
            sent = [(f"{name}-{number % KEYS}", f"{name}-m{number}") for number in numbers]
            receipts = [out.send(value, key) for key, value in sent]
            stored = [receipt.result() for receipt in receipts]
            note(descriptor, [(*each, *place) for each, place in zip(sent, stored, strict=True)])


def send_tables(hub: Hub, topic: str, name: str, descriptor: int, turns: Iterator[int]) -> None:
    with hub.producer(topic) as out:
        for turn in turns:
            key = f"{name}-t{turn % KEYS}"  # one for the whole table, so that its rows are in one partition
            values = [f"{name}-t{number}" for number in range(turn * AT_A_TIME, (turn + 1) * AT_A_TIME)]
            stored = out.send_batch(pa.table({"key": [key] * AT_A_TIME, "value": values})).result()
            places = [(each.partition, each.offset + at) for each in stored for at in range(each.rows)]
            note(descriptor, [(key, value, *place) for value, place in zip(values, places, strict=True)])


def note(descriptor: int, lines: list[tuple[object, ...]]) -> None:
    os.write(descriptor, "".join(" ".join(map(str, line)) + "\n" for line in lines).encode())


def main(url: str, topic: str, journal: str, pause_s: str) -> None:
    stop, parent = threading.Event(), os.getppid()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    descriptor = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    name = Path(journal).stem

    def turns() -> Iterator[int]:
        for turn in itertools.count():
            if stop.wait(float(pause_s)) or os.getppid() != parent:
                return
            yield turn

    with pxrs.open(url) as hub, ThreadPoolExecutor(2) as pool:
        works = [pool.submit(send, hub, topic, name, descriptor, turns()) for send in (send_messages, send_tables)]
        for work in works:
            work.add_done_callback(lambda _: stop.set())
        for work in works:
            work.result()


if __name__ == "__main__":
    main(*sys.argv[1:])
