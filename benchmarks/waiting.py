"""What it costs a process that many readers wait on one log, many watches on one registry, and many consumers (W6).

    python -m benchmarks.waiting [--waiters 1000] [--registry URL]

Each waiter is a thread that waits, as a server or a consumer does. Printed are the threads and descriptors that exist
beyond these threads before anyone waits, with one waiter (ten consumers) and with all, and how long after one message,
or one commit, the last one is awake. The reference is the smaller number: threads and descriptors must not grow with
the number of waiters.

A consumer has a lease. What the registry keeps for each lease is counted apart: a registry in files has a locked file
open for each, ZooKeeper a session (a connection, and threads of its client); the other registries have nothing.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pxrs
from pxrs import registry as registries
from pxrs.scheduler import IDLE_S

PATIENCE_S = 60.0
ROUNDS = 5
HOUR = timedelta(hours=1)


class Cost(NamedTuple):
    waiters: int
    threads: int
    """Beyond the waiters' own and those that there were before."""
    descriptors: int
    """Beyond those that there were before."""
    awake_ms: float
    """The median time from before the change until every waiter has returned."""


def measure(
    count: int,
    before: tuple[int, int],
    wait: Callable[[int, threading.Barrier], object],
    change: Callable[[], object],
    *,
    rounds: int = ROUNDS,
    idle_s: float = 0.0,
) -> Cost:
    """before: how many threads and descriptors there were before anyone waited.
    wait: waits for the next change on a thread of its own; passes the barrier just before it does.
    idle_s: how long after their last work threads are kept; they are counted after that."""
    most, times = (0, 0), []
    for _ in range(rounds):
        barrier = threading.Barrier(count + 1)
        threads = [threading.Thread(target=wait, args=(number, barrier), daemon=True) for number in range(count)]
        for thread in threads:
            thread.start()
        barrier.wait(PATIENCE_S)
        time.sleep(0.2 + count / 2000 + idle_s)  # they have said that they are about to wait, not that they do
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


def consumer_costs(folder: Path | str, url: str | None, counts: list[int]) -> list[Cost]:
    """Each consumer polls on a thread of its own; each is alone in its group, and owns its one partition. No commit and
    no renewal is due while they wait: those run on a bounded number of shared threads, which end when they are idle."""
    costs = []
    with pxrs.open(folder, registry=url) as hub, ExitStack() as stack:
        hub.create_topic("waiting", partitions=1)
        inboxes: list[pxrs.Consumer] = []

        def wait(number: int, barrier: threading.Barrier) -> None:
            barrier.wait(PATIENCE_S)
            assert inboxes[number].poll(timeout=PATIENCE_S)
            inboxes[number].commit()

        def change() -> None:
            with hub.producer("waiting") as out:
                out.send(b"more", partition=0)

        change()
        hub.topic("waiting").bounds([0])  # opens the partition's files
        time.sleep(IDLE_S + 1.0)
        before = threading.active_count(), _descriptors()
        for count in counts:
            while len(inboxes) < count:
                inbox = hub.consumer(
                    "waiting", f"g{len(inboxes)}", start="latest", commit_interval=HOUR, lease_ttl=HOUR
                )
                inboxes.append(stack.enter_context(inbox))
            until = time.monotonic() + PATIENCE_S
            while not all(each.assignment for each in inboxes):
                assert time.monotonic() < until, "a consumer has no partition"
                time.sleep(0.05)
            costs.append(measure(count, before, wait, change, rounds=2, idle_s=IDLE_S + 1.0))
    return costs


def _descriptors() -> int:
    """Without the files of leases."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one of this list
            found += "/leases/" not in os.readlink(f"/proc/self/fd/{name}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiters", type=int, default=1000)
    parser.add_argument("--registry", help="by default a registry in files")
    given = parser.parse_args()
    counts, consumers = [1, given.waiters], [min(10, given.waiters), given.waiters]
    # A consumer in files and its log have files open.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with tempfile.TemporaryDirectory() as folder:
        url = given.registry or f"file:{folder}/registry"
        scheme = url.partition(":")[0]
        for name, costs in (
            ("readers of one log in a directory", log_costs(Path(folder, "data"), counts)),
            (f"watches of one registry, {scheme}", registry_costs(url, counts)),
            ("consumers, registry in memory", consumer_costs("memory:", None, consumers)),
            (f"consumers, registry {scheme}", consumer_costs(Path(folder, "consumers"), given.registry, consumers)),
        ):
            print(f"{name}:")
            for cost in costs:
                print(
                    f"  {cost.waiters:>6,} waiting: {cost.threads:>3} threads and {cost.descriptors:>3} descriptors of "
                    f"ours, all awake after {cost.awake_ms:.1f} ms"
                )


if __name__ == "__main__":
    main()
