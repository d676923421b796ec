"""What work queues cost: against hand-written ones, with many workers, at depth, and asleep. `make bench` runs it.

An item's way is what is measured: it is taken, counted as delivered before it is delivered, and committed; durably each
time, as the store does it. The handler does nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import procrastinate
import psycopg
from kazoo.client import KazooClient
from rich.console import Console
from rich.table import Table

import pxrs
from pxrs.hub import Hub
from pxrs.queue.handle import QueueHandle
from pxrs.testing.servers import EtcdServer, PostgresServer, ZooKeeperServer

VALUE = b"x" * 100
ITEMS = 1_000
ROUNDS = 5
WORKERS = 16
SHALLOW, DEEP, DEEP_ZOOKEEPER = 100, 100_000, 10_000
TAKES_AT_DEPTH = 200
WAKES = 200
STORES = ("memory", "file", "sqlite", "postgresql", "etcd", "zookeeper")
Drain = Callable[[int], None]
"""Work off `ITEMS` items with so many workers."""


def main() -> None:
    logging.getLogger("procrastinate").setLevel(logging.ERROR)  # it warns of apps that are made in a script
    console = Console()
    with ExitStack() as stack:
        urls = {name: stack.enter_context(store(name)) for name in STORES}
        against_others(console, urls["postgresql"], urls["zookeeper"])
        with_many_workers(console, urls)
        at_depth(console, urls)
        asleep(console, urls)


@contextmanager
def store(name: str) -> Iterator[str]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        match name:
            case "memory":
                yield "memory:"
            case "file":
                yield f"{folder}/registry"
            case "sqlite":
                yield f"sqlite:///{folder}/registry.db"
            case "postgresql":
                yield stack.enter_context(PostgresServer()).url
            case "etcd":
                yield stack.enter_context(EtcdServer()).url
            case "zookeeper":
                yield stack.enter_context(ZooKeeperServer()).url


@contextmanager
def queue_at(url: str) -> Iterator[tuple[Hub, QueueHandle]]:
    with pxrs.open("memory:", registry=url) as hub:
        name = f"bench-{uuid.uuid4().hex[:8]}"
        yield hub, hub.create_queue(name, policy=pxrs.ConsumeTimes(5))
        with contextlib.suppress(pxrs.errors.UnknownQueue):
            hub.delete_queue(name)


def in_threads(work: Callable[[], None], count: int) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# Against others.


def against_others(console: Console, postgresql: str, zookeeper: str) -> None:
    table = Table(title=f"{ITEMS:,} items of {len(VALUE)} bytes, taken and committed one by one: items a second")
    for column in ("against", "workers", "ours", "theirs", "ratio", "wanted"):
        table.add_column(column, justify="left" if column == "against" else "right")
    with (
        queue_at(postgresql) as (hub, queue),
        skip_locked(postgresql) as theirs,
        procrastinating(postgresql) as procrastinator,
    ):
        for name, other, wanted in (("SKIP LOCKED", theirs, "0.5x"), ("procrastinate", procrastinator, "1x")):
            for workers in (1, WORKERS):
                _row(table, f"PostgreSQL: {name}", workers, lambda n: drain(hub, queue, n), other, wanted)
    with queue_at(zookeeper) as (hub, queue), bare_zookeeper(zookeeper) as bare:
        for workers in (1, WORKERS):
            _row(table, "ZooKeeper: bare transactions", workers, lambda n: drain(hub, queue, n), bare, "0.5x")
    console.print(table)


def _row(table: Table, name: str, workers: int, ours: Drain, theirs: Drain, wanted: str) -> None:
    pairs = []
    for _ in range(ROUNDS):
        pairs.append((_seconds(ours, workers), _seconds(theirs, workers)))
    ratio = statistics.median(their_s / our_s for our_s, their_s in pairs)
    our_s, their_s = (statistics.median(side) for side in zip(*pairs, strict=True))
    table.add_row(name, f"{workers}", f"{ITEMS / our_s:,.0f}", f"{ITEMS / their_s:,.0f}", f"{ratio:.2f}x", wanted)


def _seconds(drain: Drain, workers: int) -> float:
    """What a drain counts for itself: filling the queue does not count."""
    _measured.clear()
    drain(workers)
    return _measured[0]


_measured: list[float] = []


@contextmanager
def measured() -> Iterator[None]:
    began = time.perf_counter()
    yield
    _measured.append(time.perf_counter() - began)


def drain(hub: Hub, queue: QueueHandle, workers: int) -> None:
    queue.put_many([VALUE] * ITEMS)

    def work() -> None:
        while True:
            with hub.transaction() as tx:
                if tx.take(queue, timeout=0) is None:
                    return

    with measured():
        in_threads(work, workers)


@contextmanager
def skip_locked(url: str) -> Iterator[Drain]:
    """The queue that people write by hand, with deliveries counted before the delivery: two durable statements each."""
    take = (
        "UPDATE jobs SET attempts = attempts + 1, taken_by = %s, taken_at = now() WHERE id = (SELECT id FROM jobs "
        "WHERE taken_by IS NULL ORDER BY priority, id FOR UPDATE SKIP LOCKED LIMIT 1) RETURNING id, value, attempts"
    )
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(
            "CREATE TABLE jobs (id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, priority INT NOT NULL DEFAULT 0, "
            "value BYTEA, attempts INT NOT NULL DEFAULT 0, taken_by TEXT, taken_at TIMESTAMPTZ)"
        )
        admin.execute("CREATE INDEX ON jobs (priority, id) WHERE taken_by IS NULL")

        def drain(workers: int) -> None:
            with admin.cursor() as cursor:
                cursor.executemany("INSERT INTO jobs (value) VALUES (%s)", [(VALUE,)] * ITEMS)
            connections = [psycopg.connect(url, autocommit=True) for _ in range(workers)]
            free = list(connections)

            def work() -> None:
                connection = free.pop()
                while (row := connection.execute(take, ("me",)).fetchone()) is not None:
                    connection.execute("DELETE FROM jobs WHERE id = %s AND attempts = %s", (row[0], row[2]))

            with measured():
                in_threads(work, workers)
            for connection in connections:
                connection.close()

        yield drain


@contextmanager
def procrastinating(url: str) -> Iterator[Drain]:
    """procrastinate with a task that does nothing, done jobs deleted: its worker takes `concurrency` at a time."""

    async def prepare() -> None:
        app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url))
        async with app.open_async():
            await app.schema_manager.apply_schema_async()

    asyncio.run(prepare())

    def drain(workers: int) -> None:
        async def run() -> None:
            app = procrastinate.App(
                connector=procrastinate.PsycopgConnector(conninfo=url, min_size=workers, max_size=workers + 4)
            )

            @app.task(name="nothing")  # type: ignore[untyped-decorator]
            async def nothing(value: str) -> None: ...

            async with app.open_async():
                await nothing.batch_defer_async(*({"value": VALUE.decode()} for _ in range(ITEMS)))
                with measured():
                    await app.run_worker_async(
                        concurrency=workers, wait=False, delete_jobs="always", install_signal_handlers=False
                    )

        asyncio.run(run())

    yield drain


@contextmanager
def bare_zookeeper(url: str) -> Iterator[Drain]:
    """kazoo's own transactions for the same moves, without leases, order or counts: the names are known beforehand."""
    client = KazooClient(url.removeprefix("zookeeper://").partition("/")[0])
    client.start()
    try:
        for folder in ("/bare/ready", "/bare/inflight"):
            client.ensure_path(folder)

        def drain(workers: int) -> None:
            names = [f"{uuid.uuid4().hex}" for _ in range(ITEMS)]
            for created in [client.create_async(f"/bare/ready/{name}", VALUE) for name in names]:
                created.get()

            def work() -> None:
                while names:
                    try:
                        name = names.pop()
                    except IndexError:
                        return
                    take = client.transaction()
                    take.delete(f"/bare/ready/{name}", 0)
                    take.create(f"/bare/inflight/{name}", VALUE)
                    take.commit()
                    done = client.transaction()
                    done.delete(f"/bare/inflight/{name}", 0)
                    done.commit()

            with measured():
                in_threads(work, workers)

        yield drain
    finally:
        client.stop()
        client.close()


# Many workers, depth, and waking.


def with_many_workers(console: Console, urls: dict[str, str]) -> None:
    table = Table(title="Threads of one process: items a second")
    for column in ("store", "1", f"{WORKERS}", "ratio", "wanted"):
        table.add_column(column, justify="left" if column == "store" else "right")
    for name, url in urls.items():
        with queue_at(url) as (hub, queue):
            pairs = [
                (_seconds(lambda n: drain(hub, queue, n), 1), _seconds(lambda n: drain(hub, queue, n), WORKERS))
                for _ in range(ROUNDS)
            ]
        ratio = statistics.median(one / many for one, many in pairs)
        one, many = (statistics.median(side) for side in zip(*pairs, strict=True))
        wanted = "1x" if name in ("postgresql", "etcd") else "0.8x"
        table.add_row(name, f"{ITEMS / one:,.0f}", f"{ITEMS / many:,.0f}", f"{ratio:.2f}x", wanted)
    console.print(table)


def at_depth(console: Console, urls: dict[str, str]) -> None:
    table = Table(title="A take and its commit, in milliseconds, by how many items are in the queue")
    for column in ("store", f"{SHALLOW:,}", "deep", "depth", "cost", "wanted"):
        table.add_column(column, justify="left" if column == "store" else "right")
    for name, url in urls.items():
        deep = DEEP_ZOOKEEPER if name == "zookeeper" else DEEP
        with queue_at(url) as (hub, shallow), queue_at(url) as (other, full):
            full.put_many([VALUE] * deep)
            pairs = [(_take_s(hub, shallow, SHALLOW), _take_s(other, full, None)) for _ in range(ROUNDS)]
            wanted = "-" if name == "zookeeper" else "2x"
        cost = statistics.median(far / near for near, far in pairs)
        near, far = (statistics.median(side) for side in zip(*pairs, strict=True))
        table.add_row(name, f"{near * 1e3:.2f}", f"{far * 1e3:.2f}", f"{deep:,}", f"{cost:.2f}x", wanted)
    console.print(table)


def _take_s(hub: Hub, queue: QueueHandle, depth: int | None) -> float:
    """The mean of some takes; with a `depth`, the queue is filled up to it before each."""
    spent = 0.0
    for number in range(TAKES_AT_DEPTH):
        if depth is not None and number % 50 == 0:
            queue.put_many([VALUE] * (depth - queue.depth().ready))
        began = time.perf_counter()
        with hub.transaction() as tx:
            assert tx.take(queue, timeout=0) is not None
        spent += time.perf_counter() - began
    return spent / TAKES_AT_DEPTH


def asleep(console: Console, urls: dict[str, str]) -> None:
    table = Table(title="From put to delivered, to one that waits, in milliseconds (SQLite polls)")
    for column in ("store", "p50", "p99"):
        table.add_column(column, justify="left" if column == "store" else "right")
    for name, url in urls.items():
        with queue_at(url) as (hub, queue):
            other = hub if name == "memory" else pxrs.open("memory:", registry=url)
            delays = _wake_delays(hub, queue, other)
            if other is not hub:
                other.close()
        delays.sort()
        p50, p99 = statistics.median(delays), delays[int(len(delays) * 0.99) - 1]
        table.add_row(name, f"{p50 * 1e3:.1f}", f"{p99 * 1e3:.1f}")
    console.print(table)


def _wake_delays(hub: Hub, queue: QueueHandle, other: Hub) -> list[float]:
    arrived = threading.Event()
    at: list[float] = []

    def handle(tx: object, item: object) -> None:
        at.append(time.perf_counter())

    delays = []
    with pxrs.QueueListener(other.queue(queue.name), handle) as listener:
        head = other.parts.queue_store().head(queue.settings)
        for number in range(WAKES):
            while head._waiters == 0 or listener.committed < number:
                time.sleep(0.001)
            began = time.perf_counter()
            queue.put(VALUE)
            while len(at) <= number:
                arrived.wait(0.0005)
            delays.append(at[number] - began)
    return delays


if __name__ == "__main__":
    main()
