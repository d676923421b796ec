"""Large groups: what a rebalance costs each member, counted; and how long it takes, with a process for each member.

    python -m benchmarks.groups_scale [--members 50] [--partitions 10000] [--store etcd --store postgresql]

The first table is of the simulator: registry calls, keys and bytes in a group of 1,000 members and 10,000 partitions,
when one member joins, one dies, and the leader dies. It does not depend on the machine.

The second table is of real processes and servers. The members have no messages to read. The time counts from a barrier
that all of them pass when their process is ready, until every partition is owned and the shares are fair; then from
when one more member, whose process is ready, joins. Afterwards the owner keys in the store are compared with what the
members have reported. If they differ, or if a member has lost a partition, as after an expired lease, the row says so
instead of a time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, cast

from rich.console import Console
from rich.table import Table

from pxrs import registry as registries
from pxrs.group.lane import Lane
from pxrs.group.member import GroupMember
from pxrs.group.records import Keys, Owner
from pxrs.log.contract import TopicLog
from pxrs.log.memory import MemoryLog
from pxrs.model import Topic
from pxrs.testing.servers import EtcdServer, PostgresServer
from pxrs.testing.simulator.scale import Crowd

SIMULATED = (1_000, 10_000)
SETTLE_WANTED_S = 15
JOIN_WANTED_S = 3
PATIENCE_S = 300.0
CONNECTIONS_MAX = 500
"""Of the PostgreSQL server: each process has a few."""
SERVERS: dict[str, Callable[[], Any]] = {
    "etcd": EtcdServer,
    "postgresql": lambda: PostgresServer(settings={"max_connections": str(CONNECTIONS_MAX)}),
}


def _ready(connections: list[Connection], timeout: float | None = None) -> list[Connection]:
    return cast(list[Connection], wait(connections, timeout))


def topic_of(partitions: int) -> TopicLog:
    """A topic of which a member asks nothing but its size; the same id in every process."""
    return MemoryLog().create_topic(Topic("bench", uuid.UUID(int=partitions, version=4).hex, partitions))


class Report(NamedTuple):
    """What a member has told last."""

    owned: int
    lost: int = 0
    """How many partitions it has lost so far: taken by others, or gone with an expired lease."""


class Holder:
    """A consumer that reads nothing, and reports how many partitions it has."""

    def __init__(self, report: Connection) -> None:
        self._lanes: dict[int, Lane] = {}
        self._report = report
        self._lost = 0

    def lanes_assigned(self, lanes: Sequence[Lane]) -> None:
        self._lanes.update((lane.partition, lane) for lane in lanes)

    def lane_revoked(self, lane: Lane) -> None: ...

    def lane_resumed(self, lane: Lane) -> None: ...

    def group_changed(self) -> None: ...

    def lane_released(self, lane: Lane) -> None:
        self._lanes.pop(lane.partition, None)

    def lane_lost(self, lane: Lane) -> None:
        self._lost += 1
        self.lane_released(lane)

    def call_back(self) -> None:
        """Called when a procedure of the member is over."""
        self._report.send(Report(len(self._lanes), self._lost))

    def member_failed(self) -> None:
        self._report.send(None)


def run_member(url: str, partitions: int, report: Connection, go: Any, end: Any) -> None:
    """A process of the benchmark: one member."""
    with registries.open(url) as registry:
        registry.get("ready")  # connected
        holder = Holder(report)
        member = GroupMember(registry, "g", topic_of(partitions), holder, start_of=lambda _number, first: first)
        report.send(Report(0))
        go.wait()
        member.start()
        end.wait()
        member.close()


class Crew:
    """Processes, each with a member, and how many partitions each has told that it owns."""

    def __init__(self, url: str, partitions: int) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["pxrs.group.member"])
        self._url, self._partitions = url, partitions
        self._end = self._context.Event()
        self._processes: list[Any] = []
        self._told: dict[Connection, Report] = {}

    def prepare(self, count: int) -> Any:
        """Start processes. Returns the event that has their members join, when all of them are ready."""
        go = self._context.Event()
        for _ in range(count):
            ours, theirs = self._context.Pipe(duplex=False)
            arguments = (self._url, self._partitions, theirs, go, self._end)
            process = self._context.Process(target=run_member, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._told[ours] = Report(-1)
        self._listen(lambda: min(told.owned for told in self._told.values()) >= 0)
        return go

    def settle(self, go: Any) -> float:
        """Let them join. How many seconds it took until all partitions were fairly owned. Raises RuntimeError if that
        is not what the store says, or if partitions were lost on the way."""
        began = time.perf_counter()
        go.set()
        self._listen(self._is_settled)
        took_s = time.perf_counter() - began
        self._check()
        return took_s

    def _is_settled(self) -> bool:
        sizes = [told.owned for told in self._told.values()]
        return sum(sizes) == self._partitions and max(sizes) - min(sizes) <= 1

    def _check(self) -> None:
        keys = Keys("g")
        with registries.open(self._url) as registry:
            entries = registry.scan(keys.owners)
        stored = Counter(Owner.load(entry.key, entry.value).incarnation for entry in entries)
        sizes, told = sorted(stored.values()), sorted(each.owned for each in self._told.values())
        if None in stored or sizes != told:
            raise RuntimeError(f"{self._url}: the members have told {told}, and the store has {sizes}")
        if lost := sum(each.lost for each in self._told.values()):
            raise RuntimeError(f"{self._url}: {lost} partitions were lost on the way")

    def _listen(self, is_over: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not is_over():
            ready = _ready(list(self._told), max(0.0, until - time.monotonic()))
            if not ready:
                sizes = sorted(told.owned for told in self._told.values())
                raise TimeoutError(f"{self._url}: {sizes} after {PATIENCE_S:g} s")
            for connection in ready:
                try:
                    told = connection.recv()
                except EOFError:
                    told = None
                if told is None:
                    raise RuntimeError(f"{self._url}: a member has failed")
                self._told[connection] = told

    def close(self) -> None:
        """End all members at once; those that have not ended soon are killed."""
        self._end.set()
        drain = threading.Thread(target=self._drain, daemon=True)  # a full pipe would keep a process from ending
        drain.start()
        for process in self._processes:
            process.join(60)
            if process.is_alive():
                process.kill()

    def _drain(self) -> None:
        connections = list(self._told)
        while connections:
            for connection in _ready(connections):
                try:
                    connection.recv()
                except (EOFError, OSError):
                    connections.remove(connection)


def counted(members: int, partitions: int) -> Table:
    title = f"simulated: {members:,} members, {partitions:,} partitions; the most that one member did"
    table = Table("change", "who", title=title, header_style="bold")
    for column in ("members", "partitions moved", "calls", "commits", "keys", "bytes"):
        table.add_column(column, justify="right")
    crowd = Crowd(members, partitions)
    changes = {"one joins": crowd.join, "one dies": crowd.die, "the leader dies": crowd.die_leading}
    for name, change in changes.items():
        for share in crowd.costs_of(change):
            most = share.most
            figures = (share.members, share.moved_max, most.calls, most.writes, most.keys, most.size)
            table.add_row(name, share.who, *(f"{figure:,}" for figure in figures))
        crowd.check()
    return table


def timed(members: int, partitions: int, stores: Sequence[str]) -> Table:
    """A store on which the group does not settle has a row that says so: the others are measured all the same."""
    title = f"{members} member processes, {partitions:,} partitions"
    table = Table("what", "where", title=title, header_style="bold")
    for column in ("result", "wanted"):
        table.add_column(column, justify="right")
    for store in stores:
        with ExitStack() as stack:
            url = stack.enter_context(SERVERS[store]()).url
            crew = Crew(url, partitions)
            stack.callback(crew.close)
            for what, count, wanted_s in (
                ("from the barrier until all is owned", members, SETTLE_WANTED_S),
                ("one more member", 1, JOIN_WANTED_S),
            ):
                try:
                    result = f"{crew.settle(crew.prepare(count)):.2f} s"
                except (TimeoutError, RuntimeError) as error:
                    table.add_row(what, store, f"failed: {error}", f"{wanted_s} s")
                    break
                table.add_row(what, store, result, f"{wanted_s} s")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.groups_scale")
    parser.add_argument("--members", type=int, default=50)
    parser.add_argument("--partitions", type=int, default=10_000)
    parser.add_argument("--store", action="append", choices=sorted(SERVERS), help="by default all of these")
    parser.add_argument("--simulated", type=int, nargs=2, default=SIMULATED, metavar=("MEMBERS", "PARTITIONS"))
    options = parser.parse_args()
    console = Console(width=130)
    console.print(counted(*options.simulated))
    console.print(timed(options.members, options.partitions, options.store or sorted(SERVERS)))


if __name__ == "__main__":
    main()
