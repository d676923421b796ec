"""A replicated cluster over loopback: against one log in a directory, against `pxrs serve`, and against NATS JetStream.

The cluster is three storage nodes, a broker and etcd, each a process of its own. A topic has three copies, and an
append is acknowledged when two nodes have synced it. All processes share this machine's cores and its disk, so the
ratios say what the copies cost here; on machines of their own the nodes work beside each other. Messages have 100
bytes. `python -m benchmarks.cluster messages` runs one part.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
from rich.console import Console
from rich.table import Table

import pxrs
from benchmarks.cluster_peers import NatsCluster
from benchmarks.log.workload import PARTITIONS, ROWS, Row, pairs, records, send_all
from benchmarks.measure import compare
from benchmarks.tables import Part, print_rows
from pxrs.errors import PxrsError
from pxrs.testing.servers import EtcdServer, HubServer, Server

NODES = 3
BATCHES = 50
MESSAGES = 200_000
PEER_MESSAGES = 20_000
READY_S = 30.0
COST_ROUNDS = 5
WHO = ("client", "broker", "node")


class Member(HubServer):
    """`pxrs storage` or `pxrs broker`."""

    def __init__(self, command: str, registry: str, *flags: str) -> None:
        super().__init__(flags=flags)
        self._kind, self._cluster = command, registry

    def _command(self, folder: Path) -> list[str]:
        command = [sys.executable, "-m", "pxrs.cli", self._kind, "--registry", self._cluster]
        command += ["--listen", f"{self.host}:{self.port}", *self._flags]
        return [*command, "--dir", str(folder / "node")] if self._kind == "storage" else command


class Processes:
    """A cluster."""

    def __init__(self, stack: ExitStack, *flags: str, limits: Sequence[str] = ()) -> None:
        """flags: of the broker. limits: of the storage nodes."""
        node_flags = [each for limit in limits for each in ("--limit", limit)]
        self.etcd = stack.enter_context(EtcdServer())
        self.nodes = [stack.enter_context(Member("storage", self.etcd.url, *node_flags)) for _ in range(NODES)]
        self.broker = stack.enter_context(Member("broker", self.etcd.url, *flags))
        self.hub = stack.enter_context(pxrs.open(self.broker.url))

    def create_topic(self, name: str) -> None:
        """Make a topic, and wait until the broker serves its partitions."""
        self.hub.create_topic(name, PARTITIONS, ensemble=NODES, write_quorum=NODES, ack_quorum=2)
        until = time.monotonic() + READY_S
        while True:
            try:
                self.hub.topic(name).log.ends()
                return
            except PxrsError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def stopped(self, work: Callable[[], None]) -> Callable[[], None]:
        """The work, while the processes of this cluster stand still."""
        processes = self.etcd, *self.nodes, self.broker

        def alone() -> None:
            for each in processes:
                each.pause()
            try:
                work()
            finally:
                for each in processes:
                    each.resume()

        return alone

    def read_bytes(self) -> int:
        """How many bytes the storage nodes have read from files and pipes."""
        return sum(psutil.Process(each.pid).io_counters().read_chars for each in self.nodes)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parts: dict[str, Part] = {
        "messages": messages,
        "batches": batches,
        "reads": reads,
        "scrub": scrub,
        "nats": peers,
    }
    parser.add_argument("parts", nargs="*", choices=[*parts, "costs", []], help="which to run; all if none is named")
    chosen = parser.parse_args().parts or [*parts, "costs"]
    console = Console()
    print_rows(console, "three copies, two acknowledgements, synced; messages a second", parts, chosen)
    if "costs" in chosen:
        with console.status("measuring the CPU time of each process"):
            console.print(costs())


def messages(folder: Path) -> Iterator[Row]:
    """Messages one by one, in."""
    given = pairs(MESSAGES)
    with ExitStack() as stack:
        cluster = Processes(stack)
        local = stack.enter_context(pxrs.open(folder / "data"))
        cluster.create_topic("t")
        local.create_topic("t", PARTITIONS)
        ways = [send_all(stack.enter_context(hub.producer("t")), given) for hub in (cluster.hub, local)]
        figure = compare(*ways, times=1, rounds=7).times(MESSAGES)
        yield Row("send() + flush", "a log in a directory, synced", figure, "0.4x")


def batches(folder: Path) -> Iterator[Row]:
    """Arrow batches, in."""
    with ExitStack() as stack:
        cluster = Processes(stack)
        local = stack.enter_context(pxrs.open(folder / "data"))
        cluster.create_topic("t")
        local.create_topic("t", PARTITIONS)
        ways = [_send_batches(stack.enter_context(hub.producer("t"))) for hub in (cluster.hub, local)]
        figure = compare(*ways, times=1, rounds=7).times(BATCHES * ROWS)
        yield Row("send_batch() + flush", "a log in a directory, synced", figure, "0.1x")


def reads(folder: Path) -> Iterator[Row]:
    """Out, against one server with one copy."""
    with ExitStack() as stack:
        cluster = Processes(stack)
        served = stack.enter_context(pxrs.open(stack.enter_context(HubServer()).url))
        cluster.create_topic("t")
        served.create_topic("t", PARTITIONS)
        hubs = cluster.hub, served
        for hub in hubs:
            with hub.producer("t") as out:
                _send_batches(out)()
        total = BATCHES * ROWS
        for what, read in (
            ("read Arrow batches", _read_batches),
            ("iterate messages", _read_messages),
            ("a group reads and commits", _consume),
            ("a group reads batches and commits", _consume_batches),
        ):
            figure = compare(*(read(hub, total) for hub in hubs), times=1, rounds=5).times(total)
            yield Row(what, "pxrs serve, one copy", figure, "0.5x")


def peers(folder: Path) -> Iterator[Row]:
    """NATS JetStream with three replicas, in and out, through its Python client."""
    given = pairs(PEER_MESSAGES)
    with ExitStack() as stack:
        cluster = Processes(stack)
        cluster.create_topic("t")
        out = stack.enter_context(cluster.hub.producer("t"))
        for synced in (False, True):
            nats = stack.enter_context(NatsCluster(given, is_synced=synced))
            kind = "NATS JetStream, 3 replicas" + (", synced" if synced else ", synced every 2 minutes")
            figure = compare(send_all(out, given), nats.publish, times=1, rounds=3).times(PEER_MESSAGES)
            yield Row("send() + flush", f"{kind}: async publish", figure)
            figure = compare(_consume(cluster.hub, PEER_MESSAGES), nats.fetch, times=1, rounds=3).times(PEER_MESSAGES)
            yield Row("a group reads and commits", f"{kind}: fetch + ack", figure)
            nats.close()


def scrub(folder: Path) -> Iterator[Row]:
    """Messages and batches in, while the nodes check their sealed segments all the time, at the limit of the speed. The
    processes of the cluster that is not measured stand still."""
    given = pairs(MESSAGES)
    with ExitStack() as stack:
        limits = "segment_bytes=16000000", "scrub_round_s=0.01"
        checking, plain = (Processes(stack, limits=[*limits, *more]) for more in ((), ("scrub_bytes_s=0",)))
        ways = []
        for cluster in (checking, plain):
            cluster.create_topic("t")
            out = stack.enter_context(cluster.hub.producer("t"))
            while_checked = _send_batches(out)
            for _ in range(4):  # several sealed segments in each node
                while_checked()
            ways.append((send_all(out, given), while_checked))
        for what, count, mine, theirs in (
            ("send() + flush", MESSAGES, ways[0][0], ways[1][0]),
            ("send_batch() + flush", BATCHES * ROWS, ways[0][1], ways[1][1]),
        ):
            pair = plain.stopped(mine), checking.stopped(theirs)
            before = checking.read_bytes()
            figure = compare(*pair, times=1, rounds=15).times(count)
            assert checking.read_bytes() > before + NODES * 10_000_000, "the nodes have checked nothing"
            yield Row(what, "the same without checks", figure, "0.95x")


def _send_batches(producer: pxrs.Producer) -> Callable[[], None]:
    table = pa.Table.from_batches([records().drop_columns(["timestamp", "headers"])] * 10)

    def work() -> None:
        for _ in range(BATCHES // 10):
            producer.send_batch(table)
        producer.flush()

    return work


def _read_batches(hub: pxrs.Hub, total: int) -> Callable[[], None]:
    topic = hub.topic("t")

    def work() -> None:
        parts = (topic.batches(partition, 0) for partition in range(PARTITIONS))
        assert sum(batch.records.num_rows for part in parts for batch in part) == total

    return work


def _read_messages(hub: pxrs.Hub, total: int) -> Callable[[], None]:
    topic = hub.topic("t")

    def work() -> None:
        assert sum(1 for partition in range(PARTITIONS) for _ in topic.messages(partition)) == total

    return work


def _consume(hub: pxrs.Hub, total: int) -> Callable[[], None]:
    """In a group, up to the end, with checkpoints."""
    groups = iter(range(1_000))
    name = os.urandom(4).hex()

    def work() -> None:
        count = 0
        with hub.consumer("t", group=f"{name}-{next(groups)}", until="end") as inbox:
            for _ in inbox:
                count += 1
                if count == total:
                    break
        assert count == total

    return work


def _consume_batches(hub: pxrs.Hub, total: int) -> Callable[[], None]:
    groups = iter(range(1_000))
    name = os.urandom(4).hex()

    def work() -> None:
        count = 0
        with hub.consumer("t", group=f"{name}-{next(groups)}", until="end") as inbox:
            for batch in inbox.batches():
                count += batch.records.num_rows
                if count >= total:
                    break
        assert count >= total

    return work


def costs() -> Table:
    """The CPU time of each process. Unlike a ratio, it does not depend on how many cores they share."""
    title = "CPU time in ms: client, broker, one of three storage nodes, all"
    table = Table("what", title=title, header_style="bold")
    for unit in ("per 1,000 messages", "per MB"):
        for who in (*WHO, "all"):
            table.add_column(f"{who} {unit}", justify="right")
    given, size = pairs(MESSAGES), records().nbytes / ROWS / 1e6
    for place, flags in (("the broker's memory", ()), ("storage nodes", ("--cache-mb", "1"))):
        with ExitStack() as stack:
            cluster = Processes(stack, *flags)
            cluster.create_topic("t")
            out = stack.enter_context(cluster.hub.producer("t"))
            if flags:
                for _ in range(3):  # more than the broker keeps of what it has read from nodes
                    _send_batches(out)()
            else:
                table.add_row("send() + flush", *_costs(cluster, send_all(out, given), MESSAGES, size))
            topic = cluster.hub.topic("t")
            read = functools.partial(_drain, topic)
            table.add_row(f"read Arrow batches from {place}", *_costs(cluster, read, sum(topic.log.ends()), size))
            if not flags:
                cluster.create_topic("b")
                many = stack.enter_context(cluster.hub.producer("b"))
                table.add_row("send_batch() + flush", *_costs(cluster, _send_batches(many), BATCHES * ROWS, size))
    return table


def _costs(cluster: Processes, work: Callable[[], None], count: int, size: float) -> list[str]:
    """count: how many messages are moved by one call; size: megabytes of one message."""
    work()
    before = _cpu_s(cluster)
    for _ in range(COST_ROUNDS):
        work()
    after = _cpu_s(cluster)
    used = [1e3 * (after[who] - before[who]) / COST_ROUNDS / count for who in WHO]
    used.append(used[0] + used[1] + NODES * used[2])
    return [*(f"{1e3 * each:.2f}" for each in used), *(f"{each / size:.2f}" for each in used)]


def _drain(topic: pxrs.TopicHandle) -> None:
    for partition in range(PARTITIONS):
        for _ in topic.batches(partition, 0):
            pass


def _cpu_s(cluster: Processes) -> Mapping[str, float]:
    """The CPU seconds of the client, the broker, and one storage node on average, up to now."""

    def of(process: Any) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    def server(each: Server) -> float:
        return of(psutil.Process(each.pid))

    nodes = sum(map(server, cluster.nodes)) / len(cluster.nodes)
    return {"client": of(psutil.Process()), "broker": server(cluster.broker), "node": nodes}


if __name__ == "__main__":
    main()
