"""What events cost: `send()`, iterating and a group that rebalances with events kept, against the same without.

    python -m benchmarks.events [--messages 200000] [--rounds 15]

With events means: as a hub always works. The reference gives them to nobody: neither logged nor stored. Both are
measured in turn, in the same process, with the same messages. The ratio is the median of the rounds, by the clock and
by the processor time of the process, which includes the threads that store events. Wanted: at least 0.95x.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pxrs
from benchmarks.log.workload import PARTITIONS, pairs
from benchmarks.measure import Work
from benchmarks.metrics import WANTED, Compared, seconds
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


def on_and_off(hub: pxrs.Hub, work: Work, count: int, rounds: int) -> Compared:
    def with_them() -> None:
        work()
        assert hub.parts.events.flush(60)

    def without_them() -> None:
        with without_events():
            work()

    seconds(with_them)
    seconds(without_them)
    found = [(seconds(with_them), seconds(without_them)) for _ in range(rounds)]
    ratios = [statistics.median(off[at] / on[at] for on, off in found) for at in range(2)]
    on_s, off_s = (statistics.median(each[at][0] for each in found) for at in range(2))
    return Compared(ratios[0], ratios[1], count / on_s, count / off_s)


def measure(folder: Path, count: int, rounds: int) -> Iterator[tuple[str, Compared]]:
    messages = pairs(count)
    with pxrs.open(folder) as hub:
        hub.create_topic("sent", PARTITIONS, durability="os")
        hub.create_topic("read", PARTITIONS, durability="os")
        hub.create_topic("empty", PARTITIONS, durability="os")
        with hub.producer("sent") as producer:

            def send() -> None:
                put = producer.send
                for key, value in messages:
                    put(value, key)
                producer.flush()

            yield f"send() + flush, {count:,} messages", on_and_off(hub, send, count, rounds)
        with hub.producer("read") as producer:
            for key, value in messages:
                producer.send(value, key)
        groups = iter(range(10**6))

        def iterate() -> None:
            with hub.consumer("read", f"group-{next(groups)}", until="end") as inbox:
                for _ in inbox:
                    pass

        yield f"for message in inbox, {count:,} messages", on_and_off(hub, iterate, count, rounds)

        def join() -> None:
            for _ in range(JOINS):
                with hub.consumer("empty", "joins", until="end") as inbox:
                    assert list(inbox) == []

        what = f"a member joins, claims {PARTITIONS} partitions and leaves, {JOINS} times"
        yield what, on_and_off(hub, join, JOINS, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    print(f"{'with events, against none':65} {'ratio':>7} {'of CPU':>7} {'on/s':>11} {'off/s':>11}")
    with tempfile.TemporaryDirectory() as folder:
        for what, found in measure(Path(folder) / "data", given.messages, given.rounds):
            speeds = f"{found.on_per_s:11,.0f} {found.off_per_s:11,.0f}"
            wanted = "" if "joins" in what else f"   wanted {WANTED}x"
            print(f"{what:65} {found.ratio:6.3f}x {found.cpu_ratio:6.3f}x {speeds}{wanted}", flush=True)


if __name__ == "__main__":
    main()
