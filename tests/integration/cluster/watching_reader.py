"""A reader in a process of its own that writes down everything it sees: the ends of all partitions, and every message.

It reads each partition from its beginning to its end, and then again from random offsets on, until SIGTERM. A call that
fails is written down and tried again.

    python watching_reader.py URL TOPIC JOURNAL SEED

Lines of the journal, of which a killed process may leave the last one incomplete:

    end PARTITION OFFSET
    read PARTITION OFFSET KEY VALUE
    hole PARTITION OFFSET       nothing was read there although more messages follow
    failed PARTITION ERROR
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pxrs
from pxrs.errors import PxrsError
from pxrs.testing.forked import Forked
from pxrs.waiting import SignalEvent

PAUSE_S = 0.05 if os.environ.get("PXRS_SOAK") else 0.15
READ_BYTES = 1 << 16


class WatchingReader:
    """The parent's side."""

    def __init__(self, url: str, topic: str, name: str, folder: Path, seed: int) -> None:
        self.name = name
        self.journal, self.errors = folder / f"{name}.journal", folder / f"{name}.stderr"
        with self.errors.open("wb") as errors:
            arguments = [url, topic, str(self.journal), str(seed)]
            self.process = Forked(__file__, arguments, stderr=errors.fileno())

    def __enter__(self) -> WatchingReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(10)


@dataclass
class Watched:
    """What the readers have seen."""

    messages: dict[tuple[int, int], tuple[bytes, bytes]] = field(default_factory=dict)
    """By partition and offset: key and value."""
    reads: int = 0
    failed: int = 0
    wrong: list[str] = field(default_factory=list)
    """Ends that went back, messages that changed, and offsets before the end at which there was none."""


def watched(journals: Iterable[Path]) -> Watched:
    """Judge the journals: for each reader the end of a partition never goes back, and the message that anybody has seen
    at an offset is the one that everybody sees there."""
    found = Watched()
    for journal in journals:
        ends: dict[int, int] = {}
        for line in journal.read_bytes().splitlines() if journal.exists() else ():
            kind, *rest = line.split()
            if kind == b"end" and len(rest) == 2:
                partition, end = map(int, rest)
                if end < ends.get(partition, 0):
                    found.wrong.append(f"{journal.stem}: the end of {partition} was {ends[partition]}, and then {end}")
                ends[partition] = end
            elif kind == b"read" and len(rest) == 4:
                place, message = (int(rest[0]), int(rest[1])), (rest[2], rest[3])
                found.reads += 1
                if found.messages.setdefault(place, message) != message:
                    found.wrong.append(f"{journal.stem}: {place} was {found.messages[place]}, and then {message}")
            elif kind == b"hole":
                found.wrong.append(f"{journal.stem}: {line.decode()}")
            elif kind == b"failed":
                found.failed += 1
    return found


def main(url: str, topic: str, journal: str, seed: str) -> None:
    stop, parent, chance = SignalEvent(), os.getppid(), random.Random(int(seed))
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    descriptor = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(lines: Iterable[str]) -> None:
        os.write(descriptor, "".join(f"{line}\n" for line in lines).encode())

    with pxrs.open(url) as hub:
        log = hub.log.topic(topic)
        positions = dict.fromkeys(range(log.partitions), 0)
        while not stop.wait(PAUSE_S) and os.getppid() == parent:
            partition = chance.randrange(log.partitions)
            try:
                end = log.end(partition)
                note([f"end {partition} {end}"])
                is_again = bool(end) and chance.random() < 0.5
                start = chance.randrange(end) if is_again else positions[partition]
                batches = log.read(partition, start, READ_BYTES)
            except PxrsError as error:
                note([f"failed {partition} {type(error).__name__}: {' '.join(str(error).split())}"])
                continue
            position = start
            lines = []
            for batch in batches:
                if batch.base_offset != position:
                    lines.append(f"hole {partition} {position}")
                rows = (batch.records.column(name).to_pylist() for name in ("key", "value"))
                for position, (key, value) in enumerate(zip(*rows, strict=True), batch.base_offset):
                    lines.append(f"read {partition} {position} {key.decode()} {value.decode()}")
                position = batch.next_offset
            if position < end and position == start:
                lines.append(f"hole {partition} {position}")
            note(lines)
            if not is_again:
                positions[partition] = position


if __name__ == "__main__":
    main(*sys.argv[1:])
