"""What counting costs: `send()`, iterating and a round trip with metrics on, against the same with counting left out.

    python -m benchmarks.metrics [--messages 500000] [--rounds 15]

Metrics on means: everything is counted, as it always is. The reference replaces the functions that count by functions
that do nothing. Both are measured in turn, in the same process, with the same producer and the same messages. The ratio
is the median of the rounds, by the clock and by the processor time of the process. Wanted: at least 0.95x. The last
line is the time of one export for Prometheus.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager

import pxrs
from benchmarks.left_out import Compared, Result, compare, run, seconds, send_and_iterate
from benchmarks.measure import Work
from pxrs.metrics.instruments import Count, Timing, snapshot
from pxrs.metrics.prometheus import Exposition

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


def on_and_off(work: Work, count: int, rounds: int) -> Compared:
    def uncounted() -> None:
        with without_counting():
            work()

    return compare(work, uncounted, count, rounds)


def measure(hub: pxrs.Hub, count: int, rounds: int) -> Iterator[Result]:
    yield from send_and_iterate(hub, count, rounds, on_and_off)
    hub.create_topic("trip", 1, durability="os")
    with hub.producer("trip", linger_s=0) as producer, hub.consumer("trip", "trips") as inbox:
        reading = iter(inbox)

        def trip() -> None:
            for _ in range(TRIPS):
                producer.send(b"value", b"key").result()
                next(reading)

        what = f"send().result() and next(), one by one, {TRIPS} times"
        yield Result(what, on_and_off(trip, TRIPS, rounds))


def main() -> None:
    rounds = run(__doc__, "metrics on, against counting left out", 500_000, measure)
    exposition = Exposition()
    took_s = statistics.median(seconds(lambda: exposition.render(""))[1] for _ in range(rounds))
    print(f"one export of {sum(map(len, snapshot().values()))} series: {took_s * 1000:.1f} ms of processor time")


if __name__ == "__main__":
    main()
