"""What an entry, a checkpoint and an idle second cost each process of a cluster, in CPU time, at three sizes.

    python -m benchmarks.cluster_sizing

Each size is a real cluster of processes on loopback (as `pxrs cluster up`). The figures are user and system time of the
processes, which a busy machine changes little; nothing here measures how fast the disk or the network is. The table of
docs/cluster.md is computed from the last lines that this prints.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psutil

import pxrs
from pxrs import registry as registries
from pxrs.cli.cluster.local import LocalCluster
from pxrs.cli.cluster.plan import Wish, planned
from pxrs.cli.cluster.process import Process
from pxrs.cluster.broker.view import View
from pxrs.cluster.records import OwnerRecord, owner_key
from pxrs.launching import free_ports

SIZES = ((1, 3), (2, 4), (3, 6))
"""Brokers and storage nodes."""
SMALL, LARGE = 100, 1_000_000
"""Bytes of an entry."""
ENTRIES = {SMALL: 1_000, LARGE: 60}
COMMITS = 300
LEASES, LEASE_TTL = 300, 6.0
IDLE_S = 6.0
TOPIC = "sized"


class Cost(NamedTuple):
    """Milliseconds of CPU: of all brokers, of all storage nodes, of etcd."""

    brokers: float
    storage: float
    etcd: float

    def __sub__(self, other: Cost) -> Cost:
        return Cost(*(now - before for now, before in zip(self, other, strict=True)))

    def each(self, count: float) -> Cost:
        return Cost(*(value / count for value in self))


def used(cluster: LocalCluster) -> Cost:
    return Cost(_cpu_ms(cluster.brokers), _cpu_ms(cluster.storage), _cpu_ms(cluster.etcd))


def _cpu_ms(processes: Sequence[Process]) -> float:
    times = [psutil.Process(process.pid).cpu_times() for process in processes if process.pid is not None]
    return 1e3 * sum(each.user + each.system for each in times)


def measure(cluster: LocalCluster) -> dict[str, Cost]:
    with pxrs.open(cluster.plan.address) as hub:
        hub.create_topic(TOPIC, partitions=6)
        with hub.producer(TOPIC) as producer:
            _send(producer, 20, SMALL)  # connections, ledgers
            idle = _idle_second(cluster)
            found = {"idle second": idle}
            for size, count in ENTRIES.items():
                before, began = used(cluster), time.monotonic()
                _send(producer, count, size)
                found[f"entry of {size:,} B"] = _beyond(idle, used(cluster) - before, began).each(count)
        with hub.consumer(TOPIC, "sizing", start="earliest", ack="manual") as consumer:
            messages: list[pxrs.Message] = []
            while len(messages) < COMMITS:
                messages += consumer.poll(COMMITS, timeout=10)
            before, began = used(cluster), time.monotonic()
            for message in messages[:COMMITS]:
                consumer.ack(message)
                consumer.commit()
            found["commit of a checkpoint"] = _beyond(idle, used(cluster) - before, began).each(COMMITS)
    found["lease, for a second"] = _lease_second(cluster, idle)
    return found


def _lease_second(cluster: LocalCluster, idle: Cost) -> Cost:
    """Of one lease of LEASE_TTL that is renewed all the time, as brokers, storage nodes and members have one."""
    with registries.open(cluster.registry) as registry, ExitStack() as leases:
        for _ in range(LEASES):
            leases.enter_context(registry.lease(LEASE_TTL))
        before, began = used(cluster), time.monotonic()
        time.sleep(IDLE_S)
        return _beyond(idle, used(cluster) - before, began).each(LEASES * (time.monotonic() - began))


def _idle_second(cluster: LocalCluster) -> Cost:
    before, began = used(cluster), time.monotonic()
    time.sleep(IDLE_S)
    return (used(cluster) - before).each(time.monotonic() - began)


def _beyond(idle: Cost, cost: Cost, began: float) -> Cost:
    """Without what the processes use when nothing is asked of them."""
    seconds = time.monotonic() - began
    return cost - Cost(*(value * seconds for value in idle))


def _send(producer: pxrs.Producer, count: int, size: int) -> None:
    for number in range(count):
        producer.send(bytes(size), partition=number % 6).result(60)


def view_cost_us(records_max: int = 10_000) -> float:
    """Microseconds of CPU for each record that a broker reads when it looks at the cluster, with a registry in memory:
    what the broker itself computes, without etcd and the network."""
    with registries.open("memory:") as registry:
        owner = OwnerRecord(3, "i" * 32, "127.0.0.1:7077", 5)
        for at in range(0, records_max, 100):
            registry.commit(put={owner_key("t", number): owner.dump() for number in range(at, at + 100)})
        view = View(registry)
        try:
            began = time.process_time()
            view.refresh()
            return (time.process_time() - began) / records_max * 1e6
        finally:
            view.close()


def main() -> None:
    print(f"a broker's look at the cluster: {view_cost_us():.1f} us of CPU for each record in the registry")
    rows: dict[str, dict[str, list[float]]] = {}
    for brokers, storage in SIZES:
        with tempfile.TemporaryDirectory(prefix="pxrs-sizing-", ignore_cleanup_errors=True) as folder:
            plan = planned(Wish(brokers, storage), None, free_ports)
            cluster = LocalCluster(Path(folder), plan)
            try:
                cluster.start()
                costs = measure(cluster)
            finally:
                for process in reversed(cluster.processes):
                    process.kill()
        name = f"{brokers} brokers, {storage} nodes"
        print(f"{name:<24}{'brokers':>10}{'nodes':>10}{'etcd':>10}   ms of CPU, all processes of a kind together")
        for what, cost in costs.items():
            print(f"  {what:<22}{cost.brokers:>10.3f}{cost.storage:>10.3f}{cost.etcd:>10.3f}")
        rows[name] = {what: [round(value, 4) for value in cost] for what, cost in costs.items()}
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
