"""What events cost: `send()`, iterating and a group that rebalances with events kept, against the same without.

    python -m benchmarks.events [--messages 200000] [--rounds 15]

With events means: as a hub always works. The reference gives them to nobody: neither logged nor stored. Both are
measured in turn, in the same process, with the same messages. The ratio is the median of the rounds, by the clock and
by the processor time of the process, which includes the threads that store events. Wanted: at least 0.95x.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pxrs
from benchmarks.left_out import Compared, Result, compare, run, send_and_iterate
from benchmarks.log.workload import PARTITIONS
from benchmarks.measure import Work
from pxrs.events.writer import EventWriter

JOINS = 20


@contextmanager
def without_events() -> Iterator[None]:
    record = EventWriter.record
    EventWriter.record = lambda self, name, on_stored=None, /, **fields: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        EventWriter.record = record  # type: ignore[method-assign]


def measure(hub: pxrs.Hub, count: int, rounds: int) -> Iterator[Result]:
    def on_and_off(work: Work, count: int, rounds: int) -> Compared:
        def with_them() -> None:
            work()
            assert hub.parts.events.flush(60)

        def without_them() -> None:
            with without_events():
                work()

        return compare(with_them, without_them, count, rounds)

    yield from send_and_iterate(hub, count, rounds, on_and_off)
    hub.create_topic("empty", PARTITIONS, durability="os")

    def join() -> None:
        for _ in range(JOINS):
            with hub.consumer("empty", "joins", until="end") as inbox:
                assert list(inbox) == []

    what = f"a member joins, claims {PARTITIONS} partitions and leaves, {JOINS} times"
    yield Result(what, on_and_off(join, JOINS, rounds), wanted=None)


if __name__ == "__main__":
    run(__doc__, "with events, against none", 200_000, measure)
