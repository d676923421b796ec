"""Work queues on every store: the same promises, its own limits, and nobody polls who waits."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs import ConsumeTimes, FixedBackoff, QueueListener
from pxrs.errors import InvalidItem, TransactionTooLarge
from pxrs.hub import Hub
from pxrs.queue.records import TAKERS
from pxrs.queue.transaction import Transaction
from pxrs.registry import Registry
from pxrs.testing.servers import EtcdServer, PostgresServer, ZooKeeperServer

pytestmark = pytest.mark.sampled(2, of="module")

PATIENCE_S = 30.0
IDLE_S = 0.6
STORES = ("memory", "file", "sqlite", "postgresql", "etcd", "zookeeper")
POLLING = ("sqlite",)


@pytest.fixture(scope="module", params=STORES)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    folder: Path = tmp_path_factory.mktemp("store")
    with ExitStack() as stack:
        match request.param:
            case "memory":
                url = "memory:"
            case "file":
                url = f"{folder}/registry"
            case "sqlite":
                url = f"sqlite:///{folder}/registry.db"
            case "postgresql":
                url = stack.enter_context(PostgresServer()).url
            case "etcd":
                url = stack.enter_context(EtcdServer()).url
            case _:
                url = stack.enter_context(ZooKeeperServer()).url
        yield request.param, url


class Place:
    """One store in a namespace of its own."""

    def __init__(self, kind: str, url: str, stack: ExitStack) -> None:
        self.kind, self._stack = kind, stack
        self._url = url if kind == "memory" else f"{url}?namespace=n{uuid.uuid4().hex[:8]}"

    def open(self) -> Hub:
        """Without a directory: a queue needs the registry and nothing else."""
        return self._stack.enter_context(pxrs.open(registry=self._url))


@pytest.fixture
def place(store: tuple[str, str]) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(*store, stack)


def fail(hub: Hub, queue: str) -> None:
    tx = hub.transaction()
    assert tx.take(queue, timeout=PATIENCE_S) is not None
    tx.rollback("it failed")


def eventually(check: Callable[[], Any]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < until, "not in time"
        time.sleep(0.005)


def test_z8_the_same_promises_on_every_store(place: Place) -> None:
    hub = place.open()
    jobs = hub.create_queue("jobs", ConsumeTimes(2), backoff=FixedBackoff(0.05))
    strict = hub.create_queue("strict", fifo=True)
    done = hub.create_queue("done")
    ids = [jobs.put("low"), jobs.put("high", priority=7, key=b"\x00k"), jobs.put("later", delay=0.1)]
    with hub.transaction() as tx:
        item = tx.take("jobs")
        assert item is not None
        assert (item.id, item.value, item.key, item.priority) == (ids[1], b"high", b"\x00k", 7)
        tx.put("done", item.value)
        tx.put("strict", "1")
        tx.put("strict", "2")
    for _ in range(4):  # both of the others, twice, with a pause between
        fail(hub, "jobs")
    assert sorted(item.value for item in jobs.dead_letters()) == [b"later", b"low"]
    assert {item.error for item in jobs.dead_letters()} == {"it failed"}
    assert jobs.dead_letters().purge(ids[2]) == jobs.dead_letters().retry() == 1
    strict.put("3")
    fail(hub, "strict")
    with hub.transaction() as tx:
        assert [item.value for item in tx.take_many("strict", 2)] == [b"1", b"2"]
        assert [item.value for item in tx.take_many("strict", 2)] == [b"3"]
    with QueueListener(jobs, lambda tx, item: tx.put("done", item.value), threads=3):
        eventually(lambda: done.depth().ready == 2)
    for queue in (jobs, strict, done):
        assert queue.depth().in_flight == 0
    hub.delete_queue("jobs")
    assert [queue.name for queue in hub.queues()] == ["done", "strict"]


def test_z8_the_limits_of_the_store_are_told_before_it_refuses(place: Place) -> None:
    hub = place.open()
    queue = hub.create_queue("q", ConsumeTimes(1))
    limits = hub.registry.limits
    with pytest.raises(InvalidItem, match="the limit of this store is"):
        queue.put(b"x" * limits.value_bytes_max)
    with pytest.raises(InvalidItem) as caught:
        queue.put(b"x" * limits.value_bytes_max)
    most = int(str(caught.value).partition("this store is ")[2].partition(":")[0].replace(",", ""))
    queue.put(b"x" * most)
    fail(hub, "q")
    assert queue.dead_letters().retry() == 1
    fail(hub, "q")
    assert queue.dead_letters().purge() == 1

    def put_all(tx: Transaction) -> None:
        for _ in range(5_000):
            tx.put("q", "x")

    def take_all(tx: Transaction) -> None:
        while tx.take_many("q", 5_000, timeout=0):
            pass

    with hub.transaction() as tx, pytest.raises(TransactionTooLarge):
        put_all(tx)
    ready = queue.depth().ready
    assert ready > limits.commit_keys_max - 10
    queue.put_many(["x"] * 20)
    tx = hub.transaction()
    with pytest.raises(TransactionTooLarge):
        take_all(tx)
    tx.rollback()
    until = time.monotonic() + 30
    while queue.depth().in_flight and time.monotonic() < until:  # a rollback of so many may go on for a moment
        time.sleep(0.02)
    depth = queue.depth()
    assert depth.in_flight == 0
    assert depth.ready + depth.dead == ready + 20
    assert depth.dead > ready - 20, "as many as fit were taken, and may be taken once"


class Counted:
    """How often a registry was asked anything."""

    def __init__(self, registry: Registry) -> None:
        self.count = 0
        for name in ("_get", "_scan", "_commit"):
            setattr(registry, name, self._counting(getattr(registry, name)))

    def _counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any) -> Any:
            self.count += 1
            return call(*arguments)

        return counting


def test_z9_who_waits_asks_nothing_and_wakes_when_something_comes(place: Place) -> None:
    hub = place.open()
    other = hub if place.kind == "memory" else place.open()
    queue = hub.create_queue("q")
    with other.transaction() as tx:  # it is a taker, and the sweeper, and has had the time to look at everything
        assert tx.take("q", timeout=IDLE_S) is None
    eventually(lambda: len(hub.registry.scan(queue.settings.root)) == 1 and hub.registry.scan(TAKERS))
    counted = Counted(other.registry)
    with other.transaction() as tx:
        assert tx.take("q", timeout=IDLE_S) is None
    assert counted.count <= 6, "it looks, watches, looks again, and once more when the time is up; somebody polls"
    found: list[float] = []

    def wait() -> None:
        with other.transaction() as tx:
            assert tx.take("q", timeout=PATIENCE_S) is not None
            found.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: other.parts.queue_store().head(queue.settings)._waiters == 1)
    began = time.monotonic()
    queue.put("x")
    thread.join(PATIENCE_S)
    assert found[0] - began < (PATIENCE_S if place.kind in POLLING else PATIENCE_S / 2)
