"""What a part of the library costs: the same work with it and without it, in turn, in one process.

The ratio is the median of the rounds, by the clock and by the processor time of the process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pxrs
from benchmarks.log.workload import PARTITIONS, pairs, send_all
from benchmarks.measure import Work

WANTED = 0.95


class Compared(NamedTuple):
    ratio: float
    """By the clock: more than 1 means that it was faster with the part."""
    cpu_ratio: float
    """By the processor time of the process, which other programs on the machine disturb less."""
    on_per_s: float
    off_per_s: float


class Result(NamedTuple):
    what: str
    found: Compared
    wanted: float | None = WANTED


Compare = Callable[[Work, int, int], Compared]
"""Is given the work, how many things it does, and how many rounds to make."""


def compare(with_it: Work, without_it: Work, count: int, rounds: int) -> Compared:
    seconds(with_it)
    seconds(without_it)
    found = [(seconds(with_it), seconds(without_it)) for _ in range(rounds)]
    ratios = [statistics.median(off[at] / on[at] for on, off in found) for at in range(2)]
    on_s, off_s = (statistics.median(each[at][0] for each in found) for at in range(2))
    return Compared(ratios[0], ratios[1], count / on_s, count / off_s)


def seconds(work: Work) -> tuple[float, float]:
    """By the clock, and of processor time."""
    began, cpu_began = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - cpu_began


def send_and_iterate(hub: pxrs.Hub, count: int, rounds: int, on_and_off: Compare) -> Iterator[Result]:
    """Messages one by one, in and out."""
    messages = pairs(count)
    hub.create_topic("sent", PARTITIONS, durability="os")
    hub.create_topic("read", PARTITIONS, durability="os")
    with hub.producer("sent") as producer:
        send = send_all(producer, messages)
        yield Result(f"send() + flush, {count:,} messages", on_and_off(send, count, rounds))
    with hub.producer("read") as producer:
        send_all(producer, messages)()
    groups = iter(range(10**6))

    def iterate() -> None:
        with hub.consumer("read", f"group-{next(groups)}", until="end") as inbox:
            for _ in inbox:
                pass

    yield Result(f"for message in inbox, {count:,} messages", on_and_off(iterate, count, rounds))


def run(description: str, title: str, messages: int, measure: Callable[[pxrs.Hub, int, int], Iterator[Result]]) -> int:
    """Print a table of what `measure` yields in an empty hub. Returns how many rounds were asked for."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=messages)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    print(f"{title:65} {'ratio':>7} {'of CPU':>7} {'on/s':>11} {'off/s':>11}")
    with tempfile.TemporaryDirectory() as folder, pxrs.open(Path(folder, "data")) as hub:
        for what, found, wanted in measure(hub, given.messages, given.rounds):
            speeds = f"{found.on_per_s:11,.0f} {found.off_per_s:11,.0f}"
            end = "" if wanted is None else f"   wanted {wanted}x"
            print(f"{what:65} {found.ratio:6.3f}x {found.cpu_ratio:6.3f}x {speeds}{end}", flush=True)
    return int(given.rounds)
