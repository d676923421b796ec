"""What counting costs: `send()`, iterating and a round trip with metrics on, against the same with counting left out.

    python -m benchmarks.metrics [--messages 500000] [--rounds 15]

Metrics on means: everything is counted, as it always is. The reference replaces the functions that count by functions
that do nothing. Both are measured in turn, in the same process, with the same producer and the same messages. The ratio
is the median of the rounds, by the clock and by the processor time of the process. Wanted: at least 0.95x. The last
line is the time of one export for Prometheus.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pxrs
from benchmarks.log.workload import PARTITIONS, pairs
from benchmarks.measure import Work
from pxrs.metrics.instruments import Count, Timing, snapshot
from pxrs.metrics.prometheus import Exposition

WANTED = 0.95
TRIPS = 200


@contextmanager
def without_counting() -> Iterator[None]:
    add, observe = Count.add, Timing.observe
    Count.add = lambda self, amount=1: None  # type: ignore[method-assign]
    Timing.observe = lambda self, seconds: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Count.add, Timing.observe = add, observe  # type: ignore[method-assign]


class Compared(NamedTuple):
    ratio: float
    """By the clock: more than 1 means that it was faster with metrics."""
    cpu_ratio: float
    """By the processor time of the process, which other programs on the machine disturb less."""
    on_per_s: float
    off_per_s: float


def on_and_off(work: Work, count: int, rounds: int) -> Compared:
    def uncounted() -> None:
        with without_counting():
            work()

    seconds(work)
    seconds(uncounted)
    pairs = [(seconds(work), seconds(uncounted)) for _ in range(rounds)]
    ratios = [statistics.median(off[at] / on[at] for on, off in pairs) for at in range(2)]
    on_s, off_s = (statistics.median(each[at][0] for each in pairs) for at in range(2))
    return Compared(ratios[0], ratios[1], count / on_s, count / off_s)


def seconds(work: Work) -> tuple[float, float]:
    """By the clock, and of processor time."""
    began, cpu_began = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - cpu_began


def measure(folder: Path, count: int, rounds: int) -> Iterator[tuple[str, Compared]]:
    messages = pairs(count)
    with pxrs.open(folder) as hub:
        hub.create_topic("sent", PARTITIONS, durability="os")
        hub.create_topic("read", PARTITIONS, durability="os")
        hub.create_topic("trip", 1, durability="os")
        with hub.producer("sent") as producer:

            def send() -> None:
                put = producer.send
                for key, value in messages:
                    put(value, key)
                producer.flush()

            yield f"send() + flush, {count:,} messages", on_and_off(send, count, rounds)
        with hub.producer("read") as producer:
            for key, value in messages:
                producer.send(value, key)

        groups = iter(range(10**6))

        def iterate() -> None:
            with hub.consumer("read", f"group-{next(groups)}", until="end") as inbox:
                for _ in inbox:
                    pass

        yield f"for message in inbox, {count:,} messages", on_and_off(iterate, count, rounds)
        with hub.producer("trip", linger_s=0) as producer, hub.consumer("trip", "trips") as inbox:
            reading = iter(inbox)

            def trip() -> None:
                for _ in range(TRIPS):
                    producer.send(b"value", b"key").result()
                    next(reading)

            yield f"send().result() and next(), one by one, {TRIPS} times", on_and_off(trip, TRIPS, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    print(f"{'metrics on, against counting left out':55} {'ratio':>7} {'of CPU':>7} {'on/s':>11} {'off/s':>11}")
    with tempfile.TemporaryDirectory() as folder:
        for what, found in measure(Path(folder) / "data", given.messages, given.rounds):
            speeds = f"{found.on_per_s:11,.0f} {found.off_per_s:11,.0f}"
            print(f"{what:55} {found.ratio:6.3f}x {found.cpu_ratio:6.3f}x {speeds}   wanted {WANTED}x", flush=True)
    exposition = Exposition()
    took_s = statistics.median(seconds(lambda: exposition.render(""))[1] for _ in range(given.rounds))
    print(f"one export of {sum(map(len, snapshot().values()))} series: {took_s * 1000:.1f} ms of processor time")


if __name__ == "__main__":
    main()
