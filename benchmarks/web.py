"""What the page costs for a large hub: 200 groups, 1,000 topics, 10,000 partitions.

    python -m benchmarks.web

Printed are the time of the first overview of a new page, of the next ones, and the calls of the registry that a refresh
makes after so many groups have changed. The reference of the calls is one scan for each group that has changed.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import urllib.request
from pathlib import Path

import pxrs
from pxrs.group.records import Checkpoint, Keys
from pxrs.testing.many_groups import counted_calls, fill
from pxrs.web.serving import WebServer

GROUPS, TOPICS, PARTITIONS = 200, 1_000, 10_000
ROUNDS = 5


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        with pxrs.open(Path(folder) / "hub", upkeep=False) as hub:
            began = time.perf_counter()
            topics = fill(hub, groups=GROUPS, topics=TOPICS, partitions=PARTITIONS)
            print(f"made {GROUPS} groups, {TOPICS:,} topics, {PARTITIONS:,} partitions", end=" ")
            print(f"in {time.perf_counter() - began:.1f} s")
        with pxrs.open(Path(folder) / "hub", upkeep=False) as hub, WebServer(hub, "127.0.0.1:0") as server:
            began = time.process_time()
            took_s, size = _load(server)
            cpu_ms = (time.process_time() - began) * 1e3
            print(f"first overview, {size / 1e3:,.0f} kB: {took_s * 1e3:,.0f} ms (wanted: under 1,000)", end=", ")
            print(f"{cpu_ms:,.0f} ms of CPU")
            for changed in (0, 1, 20, 200):
                times, scans = [], []
                for number in range(ROUNDS):
                    _change(hub, topics[0], changed, number)
                    server.observer.forget()
                    with counted_calls(hub.registry) as calls:
                        times.append(_load(server)[0])
                    scans.append(calls["scan"])
                told = f"{statistics.median(times) * 1e3:,.0f} ms, {max(scans)} scans (wanted: at most {changed})"
                print(f"next overview after {changed} groups have changed: {told}")


def _load(server: WebServer) -> tuple[float, int]:
    began = time.perf_counter()
    with urllib.request.urlopen(f"{server.url}api/overview", timeout=60) as answer:
        size = len(answer.read())
    return time.perf_counter() - began, size


def _change(hub: pxrs.Hub, topic: pxrs.Topic, groups: int, number: int) -> None:
    for group in range(groups):
        key = Keys(f"group-{group:03d}").checkpoint(topic.id, 0)
        hub.registry.commit(put={key: Checkpoint(0, time.time(), "m", number).dump()})


if __name__ == "__main__":
    main()
