"""What counting costs: `send()`, iterating and a round trip with metrics on, against the same with counting left out.

    python -m benchmarks.metrics [--messages 500000] [--rounds 15]

Metrics on means: everything is counted, as it always is. The reference replaces the functions that count by functions
that do nothing. Both are measured in turn, in the same process, with the same producer and the same messages; the ratio
is the median of the rounds. Wanted: at least 0.95x. The last line is the time of one export for Prometheus.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pxrs
from benchmarks.log.workload import PARTITIONS, pairs
from benchmarks.measure import Figure, Work, compare
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


def on_and_off(work: Work, rounds: int) -> Figure:
    def uncounted() -> None:
        with without_counting():
            work()

    return compare(work, uncounted, times=1, rounds=rounds)


def measure(folder: Path, count: int, rounds: int) -> Iterator[tuple[str, Figure]]:
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

            yield f"send() + flush, {count:,} messages", on_and_off(send, rounds).times(count)
        with hub.producer("read") as producer:
            for key, value in messages:
                producer.send(value, key)

        groups = iter(range(10**6))

        def iterate() -> None:
            with hub.consumer("read", f"group-{next(groups)}", until="end") as inbox:
                for _ in inbox:
                    pass

        yield f"for message in inbox, {count:,} messages", on_and_off(iterate, rounds).times(count)
        with hub.producer("trip", linger_s=0) as producer, hub.consumer("trip", "trips") as inbox:
            reading = iter(inbox)

            def trip() -> None:
                for _ in range(TRIPS):
                    producer.send(b"value", b"key").result()
                    next(reading)

            yield f"send().result() and next(), one by one, {TRIPS} times", on_and_off(trip, rounds).times(TRIPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    print(f"{'metrics on, against counting left out':60} {'ratio':>7} {'on/s':>12} {'off/s':>12}   wanted {WANTED}x")
    with tempfile.TemporaryDirectory() as folder:
        for what, figure in measure(Path(folder) / "data", given.messages, given.rounds):
            speeds = f"{figure.ours_per_s:12,.0f} {figure.reference_per_s:12,.0f}"
            print(f"{what:60} {figure.ratio:6.3f}x {speeds}", flush=True)
    exposition = Exposition()
    took_s = statistics.median(_seconds(lambda: exposition.render("")) for _ in range(given.rounds))
    series = sum(map(len, snapshot().values()))
    print(f"one export of {series} series: {took_s * 1000:.1f} ms")


def _seconds(work: Work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
