"""What consumer groups cost: settling, taking over, handing out. `make bench` runs it; each store in the same run."""

from __future__ import annotations

import signal
import statistics
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.table import Table

import pxrs
from benchmarks import workers
from benchmarks.groups_scale import topic_of
from benchmarks.measure import compare
from pxrs import registry as registries
from pxrs.group.lane import Lane
from pxrs.group.member import GroupMember
from pxrs.group.records import Keys, Owner
from pxrs.group.timings import Timings
from pxrs.registry import Registry
from pxrs.testing.accounting import Worker, read_journals
from pxrs.testing.servers import EtcdServer, PostgresServer, ZooKeeperServer

MEMBERS = 10
SETTLE_WANTED_S = {"memory": 1, "file": 1, "etcd": 3, "postgresql": 3, "zookeeper": 6}
PATIENCE_S = 120.0
ROWS = 1_000_000


class Holder:
    """A consumer that reads nothing."""

    def __init__(self, changed: threading.Event) -> None:
        self.lanes: dict[int, Lane] = {}
        self._changed = changed

    def lanes_assigned(self, lanes: Sequence[Lane]) -> None:
        self.lanes.update((lane.partition, lane) for lane in lanes)
        self._changed.set()

    def lane_revoked(self, lane: Lane) -> None: ...

    def lane_resumed(self, lane: Lane) -> None: ...

    def group_changed(self) -> None: ...

    def lane_released(self, lane: Lane) -> None:
        self.lanes.pop(lane.partition, None)
        self._changed.set()

    lane_lost = lane_released

    def call_back(self) -> None: ...

    def member_failed(self) -> None:
        self._changed.set()


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the operations of every registry of this process."""
    counts: Counter[str] = Counter()
    originals = {name: getattr(Registry, name) for name in ("get", "scan", "commit")}

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return call(*args, **options)

        return count

    for name, call in originals.items():
        setattr(Registry, name, counting(name, call))
    try:
        yield counts
    finally:
        for name, call in originals.items():
            setattr(Registry, name, call)


def settle(url: str, partitions: int) -> tuple[float, Counter[str]]:
    """Ten members join at once, each with a handle of its own; until all partitions are fairly owned."""
    source = topic_of(partitions)
    changed = threading.Event()
    handles = [registries.open(url)] * MEMBERS if url == "memory:" else [registries.open(url) for _ in range(MEMBERS)]
    holders = [Holder(changed) for _ in range(MEMBERS)]
    members = [
        GroupMember(handle, f"g{partitions}", source, holder, start_of=lambda _number, first: first, timings=Timings())
        for handle, holder in zip(handles, holders, strict=True)
    ]
    with counted() as counts:
        began = time.perf_counter()
        joining = [threading.Thread(target=member.start) for member in members]
        for thread in joining:
            thread.start()
        while True:
            sizes = [len(holder.lanes) for holder in holders]
            if sum(sizes) == partitions and max(sizes) - min(sizes) <= 1:
                break
            if not changed.wait(PATIENCE_S):
                raise TimeoutError(f"{url}: {sizes}")
            changed.clear()
        seconds = time.perf_counter() - began
        for thread in joining:
            thread.join()
        found = Counter(counts)
    for member in members:
        member.close()
    for handle in set(handles):
        handle.close()
    return seconds, found


def settling(table: Table) -> None:
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        urls = {
            "memory": "memory:",
            "file": f"file:{folder}/registry",
            "etcd": stack.enter_context(EtcdServer()).url,
            "postgresql": stack.enter_context(PostgresServer()).url,
            "zookeeper": stack.enter_context(ZooKeeperServer()).url,
        }
        for store, url in urls.items():
            for partitions in (10, 100, 900, 1_000):
                seconds, counts = settle(url, partitions)
                wanted = f"{SETTLE_WANTED_S[store]} s" if partitions == 900 else ""
                operations = f"{counts['commit']} commits, {counts['scan']} scans, {counts['get']} gets"
                table.add_row(
                    f"{MEMBERS} members settle {partitions} partitions", store, operations, f"{seconds:.2f} s", wanted
                )


def taking_over(table: Table) -> None:
    """From the kill to the claim of the killed one's partitions, on files."""
    times = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with pxrs.open(folder / "data") as hub:
            hub.create_topic("t", partitions=8)
            keys = Keys("g")
            for attempt in range(5):
                workers = [
                    Worker(str(folder / "data"), "-", "t", "g", f"{attempt}-{i}", folder, 10.0) for i in range(3)
                ]
                with ExitStack() as stack:
                    for worker in workers:
                        stack.enter_context(worker)
                    _until(lambda: len(_owners(hub.registry, keys)) == 3)
                    killed = hub.registry.clock.now()
                    workers[0].signal(signal.SIGKILL)
                    _until(lambda: len(_owners(hub.registry, keys)) == 2)
                    claims = read_journals(worker.journal for worker in workers[1:])
                    times.append(max(each.claimed_at for each in claims) - killed)
                    for worker in workers[1:]:
                        worker.end()
    table.add_row(
        "take-over after kill -9",
        "file",
        "median of 5, kill to last claim",
        f"{statistics.median(times):.3f} s",
        "0.3 s",
    )


def _owners(registry: Registry, keys: Keys) -> set[str]:
    """Who owns anything, if everything is owned."""
    owners = [Owner.load(entry.key, entry.value).incarnation for entry in registry.scan(keys.owners)]
    return {owner for owner in owners if owner is not None} if owners and None not in owners else set()


def _until(is_true: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_true():
        if time.monotonic() > until:
            raise TimeoutError("the group did not settle")
        time.sleep(0.002)


def handing_out(table: Table) -> None:
    """`for message in inbox` with commits, against iterating the log."""
    with tempfile.TemporaryDirectory() as name, pxrs.open(Path(name) / "data") as hub:
        topic = hub.create_topic("t", partitions=8)
        with hub.producer("t") as out:
            keys = [b"key-%d" % (i % 1000) for i in range(ROWS)]
            out.send_batch(pa.table({"key": keys, "value": [b"%0100d" % i for i in range(ROWS)]}))

        def consume() -> None:
            with hub.consumer("t", uuid.uuid4().hex, until="end") as inbox:
                for _ in inbox:
                    pass

        def iterate() -> None:
            for partition in range(8):
                for _ in topic.messages(partition):
                    pass

        figure = compare(consume, iterate, times=1, rounds=5)
    row = f"{figure.ours_per_s * ROWS:,.0f}/s against {figure.reference_per_s * ROWS:,.0f}/s"
    table.add_row("for message in inbox", "iterating the log", row, f"{figure.ratio:.2f}x", "0.6x")


def sharing(table: Table) -> None:
    figure = workers.measure()
    row = f"{figure.ours_per_s:,.0f}/s against {figure.reference_per_s:,.0f}/s"
    table.add_row("two worker processes, computing", "one", row, f"{figure.ratio:.2f}x", "1.6x")


def main() -> None:
    table = Table("what", "where", "how", title="consumer groups", header_style="bold")
    for column in ("result", "wanted"):
        table.add_column(column, justify="right")
    for part in (handing_out, sharing, taking_over, settling):
        part(table)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
