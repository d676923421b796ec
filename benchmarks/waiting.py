"""What it costs a process that many readers wait on one log, and many watches on one registry (W6).

    python -m benchmarks.waiting [--waiters 1000] [--registry URL]

Each waiter is a thread that waits, as a server or a consumer does. Printed are the threads and descriptors that exist
beyond these threads before anyone waits, with one waiter and with all, and how long after one message, or one commit,
the last one is awake. The reference is one waiter: threads and descriptors must not grow with the number of waiters.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pxrs
from pxrs import registry as registries

PATIENCE_S = 60.0
ROUNDS = 5


class Cost(NamedTuple):
    waiters: int
    threads: int
    """Beyond the waiters' own and those that there were before."""
    descriptors: int
    """Beyond those that there were before."""
    awake_ms: float
    """The median time from before the change until every waiter has returned."""


def measure(
    count: int, before: tuple[int, int], wait: Callable[[int, threading.Barrier], object], change: Callable[[], object]
) -> Cost:
    """before: how many threads and descriptors there were before anyone waited.
    wait: waits for the next change on a thread of its own; passes the barrier just before it does."""
    most, times = (0, 0), []
    for _ in range(ROUNDS):
        barrier = threading.Barrier(count + 1)
        threads = [threading.Thread(target=wait, args=(number, barrier), daemon=True) for number in range(count)]
        for thread in threads:
            thread.start()
        barrier.wait(PATIENCE_S)
        time.sleep(0.2 + count / 2000)  # they have said that they are about to wait, not that they do
        most = max(most, (threading.active_count() - count - before[0], _descriptors() - before[1]))
        began = time.perf_counter()
        change()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a waiter was not woken"
        times.append(time.perf_counter() - began)
    return Cost(count, *most, statistics.median(times) * 1000)


def log_costs(folder: Path, counts: list[int]) -> list[Cost]:
    with pxrs.open(folder) as hub:
        hub.create_topic("waiting", partitions=16)
        topic = hub.topic("waiting").log
        with hub.producer("waiting") as out:
            out.send(b"first", partition=0)

        def wait(number: int, barrier: threading.Barrier) -> None:
            ends = dict(enumerate(topic.ends()))
            barrier.wait(PATIENCE_S)
            assert topic.fetch(ends, timeout=PATIENCE_S)

        def change() -> None:
            with hub.producer("waiting") as out:
                out.send(b"more", partition=0)

        topic.bounds(range(16))  # opens the files of all partitions, whether anyone waits or not
        before = threading.active_count(), _descriptors()
        return [measure(count, before, wait, change) for count in counts]


def registry_costs(url: str, counts: list[int]) -> list[Cost]:
    """Every handle watches one prefix that all have in common, and one of a hundred others."""
    with registries.open(url) as registry, registries.open(url) as writer, ExitStack() as stack:
        watches: list[registries.Watch] = []

        def wait(number: int, barrier: threading.Barrier) -> None:
            while watches[number].wait(0):
                continue
            barrier.wait(PATIENCE_S)
            assert watches[number].wait(PATIENCE_S)

        costs = []
        before = threading.active_count(), _descriptors()
        for count in counts:
            while len(watches) < count:
                watches.append(stack.enter_context(registry.watch("waiting/all/", f"waiting/{len(watches) % 100}")))
            costs.append(measure(count, before, wait, lambda: writer.commit(put={"waiting/all/a": b""})))
        return costs


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiters", type=int, default=1000)
    parser.add_argument("--registry", help="by default a registry in files")
    given = parser.parse_args()
    counts = [1, given.waiters]
    with tempfile.TemporaryDirectory() as folder:
        url = given.registry or f"file:{folder}/registry"
        for name, costs in (
            ("readers of one log in a directory", log_costs(Path(folder, "data"), counts)),
            (f"watches of one registry, {url.partition(':')[0]}", registry_costs(url, counts)),
        ):
            print(f"{name}:")
            for cost in costs:
                print(
                    f"  {cost.waiters:>6,} waiting: {cost.threads:>3} threads and {cost.descriptors:>3} descriptors of "
                    f"ours, all awake after {cost.awake_ms:.1f} ms"
                )


if __name__ == "__main__":
    main()
