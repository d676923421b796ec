"""An exact account of what a group has done: real workers that write down what they handle, and the reckoning.

Each worker appends a line to its own journal before it is asked for the next message: what it was assigned, what it
began to handle, what it gave up. A process that is killed leaves its journal as it was. `account` then says whether
anything was lost, out of order, or done twice beyond the last checkpoint.

    python -m pxrs.testing.accounting URL REGISTRY TOPIC GROUP NAME JOURNAL LEASE_TTL
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pxrs
import pxrs.consumer
from pxrs.clock import SYSTEM
from pxrs.model import Message

HANDLING_S = 0.0005


@dataclass
class Ownership:
    """One member's time with a partition, under one epoch."""

    partition: int
    epoch: int
    member: str
    start: int
    claimed_at: float
    handled: list[int] = field(default_factory=list)
    handled_at: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Account:
    messages: int
    lost: int
    out_of_order: int
    redone: int
    """Handled again after a member died or was stopped: what it had not written down."""
    wrong_starts: int
    """Ownerships that began before an accepted checkpoint or behind what was handled."""
    late: int
    """Messages whose handling began after the partition had been claimed by another."""
    ownerships: int


class Worker:
    """A consumer in a process of its own."""

    def __init__(self, url: str, registry: str, topic: str, group: str, name: str, folder: Path, ttl: float) -> None:
        self.name = name
        self.journal = folder / f"{name}.journal"
        command = [sys.executable, "-m", "pxrs.testing.accounting", url, registry, topic, group, name]
        self.errors = folder / f"{name}.stderr"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen([*command, str(self.journal), str(ttl)], stderr=errors)

    def signal(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def end(self, timeout: float = 20.0) -> int:
        """Gracefully; its exit code."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_running:
            self.signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(10)


def read_journals(paths: Iterable[Path]) -> list[Ownership]:
    """The ownerships that the journals tell of, in the order of their epochs."""
    found: dict[tuple[int, int], Ownership] = {}
    for path in paths:
        if not path.exists():
            continue
        for line in path.read_text().splitlines():
            kind, *rest = line.split()
            if kind == "assigned" and len(rest) == 4:
                partition, epoch, offset = map(int, rest[:3])
                found[partition, epoch] = Ownership(partition, epoch, path.stem, offset, float(rest[3]))
            elif kind == "handled" and len(rest) == 4:
                partition, epoch, offset = map(int, rest[:3])
                found[partition, epoch].handled.append(offset)
                found[partition, epoch].handled_at.append(float(rest[3]))
    return sorted(found.values(), key=lambda each: (each.partition, each.epoch))


def account(ownerships: Sequence[Ownership], ends: Mapping[int, int], starts: Mapping[int, int] = {}) -> Account:
    """Reckon up. `ends` are the partitions' ends, all of which must have been handled."""
    lost = out_of_order = redone = wrong_starts = late = 0
    for partition, end in ends.items():
        mine = [each for each in ownerships if each.partition == partition]
        reached = begun = starts.get(partition, 0)
        for at, each in enumerate(mine):
            # Not behind what was handled (a gap), nor before where an earlier one began (a checkpoint that went back).
            wrong_starts += not begun <= each.start <= reached
            begun = each.start
            out_of_order += each.handled != list(range(each.start, each.start + len(each.handled)))
            redone += max(0, min(reached, each.start + len(each.handled)) - each.start)
            reached = max(reached, each.start + len(each.handled))
            until = mine[at + 1].claimed_at if at + 1 < len(mine) else float("inf")
            late += sum(moment > until for moment in each.handled_at)
        lost += end - reached
    return Account(sum(ends.values()), lost, out_of_order, redone, wrong_starts, late, len(ownerships))


def _work(url: str, registry: str, topic: str, group: str, name: str, journal: str, ttl: str) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())  # first: it may come while the store is slow to open
    hub = pxrs.open(url, registry=None if registry == "-" else registry)
    descriptor = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(*words: object) -> None:
        os.write(descriptor, (" ".join(map(str, words)) + "\n").encode())

    class Noting(pxrs.consumer.Consumer):
        def lanes_assigned(self, lanes: Any) -> None:
            for lane in lanes:
                note("assigned", lane.partition, lane.epoch, lane.position, SYSTEM.now())
            super().lanes_assigned(lanes)

    consumer = Noting(hub._log.topic(topic), hub.registry, group, name=name, lease_ttl=float(ttl), commit_interval=0.1)

    def handle(message: Message) -> None:
        note("handled", message.partition, message.epoch, message.offset, SYSTEM.now())
        time.sleep(HANDLING_S)

    def end() -> None:
        stop.wait()
        consumer.stop()

    threading.Thread(target=end, daemon=True).start()
    consumer.run(handle)
    hub.close()


if __name__ == "__main__":
    _work(*sys.argv[1:])
