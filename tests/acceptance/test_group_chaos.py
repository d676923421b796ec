"""Real processes of one group on every store, killed, stopped, woken, joined and left at random under load."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import pxrs
from pxrs.group.records import Checkpoint, Keys, Member
from pxrs.hub import Hub
from pxrs.testing.accounting import Account, Worker, account, read_journals
from pxrs.testing.servers import EtcdServer, PostgresServer, ZooKeeperServer

EVENTS = 200 if os.environ.get("PXRS_SOAK") else 15
PARTITIONS = 8
TTL_S = 1.5
PATIENCE_S = 60.0


@pytest.fixture(params=["file", "sqlite", "postgresql", "etcd", "zookeeper"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with ExitStack() as stack:
        match request.param:
            case "file":
                yield "-"
            case "sqlite":
                yield f"sqlite:///{tmp_path}/registry.db"
            case "postgresql":
                yield stack.enter_context(PostgresServer()).url
            case "etcd":
                yield stack.enter_context(EtcdServer()).url
            case "zookeeper":
                yield stack.enter_context(ZooKeeperServer()).url


class Chaos:
    """Workers that come and go by seed, while messages are sent."""

    def __init__(self, folder: Path, registry: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder, self.registry = folder, registry
        self.url = str(folder / "data")
        self.workers: list[Worker] = []
        self.stopped: dict[Worker, float] = {}
        self.leaving: list[Worker] = []
        self.stops = 0

    def start(self) -> Worker:
        name = f"w{len(self.workers)}"
        self.workers.append(Worker(self.url, self.registry, "t", "g", name, self.folder, TTL_S))
        return self.workers[-1]

    def running(self) -> list[Worker]:
        gone = {*self.stopped, *self.leaving}
        return [worker for worker in self.workers if worker.is_running and worker not in gone]

    def event(self) -> None:
        kind = self.random.choice(["kill", "stop", "stop", "cont", "join", "leave"])
        running = self.running()
        if kind == "cont" and self.stopped:
            worker = self.random.choice(list(self.stopped))
            del self.stopped[worker]
            worker.signal(signal.SIGCONT)
        elif kind == "join" or len(running) < 2:
            self.start()
        elif kind == "leave":
            self.leaving.append(self.random.choice(running))
            self.leaving[-1].signal(signal.SIGTERM)
        elif kind == "kill":
            killed = self.random.choice(running)
            killed.signal(signal.SIGKILL)
            killed.process.wait(10)  # so that it does not count among those that run
        elif kind == "stop" and not (self.registry.startswith("sqlite") and self.stopped):
            worker = self.random.choice(running)
            worker.signal(signal.SIGSTOP)
            self.stops += 1
            self.stopped[worker] = time.monotonic()

    def wake_all(self) -> None:
        for worker in self.stopped:
            worker.signal(signal.SIGCONT)
        self.stopped.clear()


def checkpoints(hub: Hub, group: str) -> list[int]:
    entries = hub.registry.scan(f"{Keys(group).checkpoints}{hub.topic('t').id}/")
    return [Checkpoint.load(entry.key, entry.value).offset for entry in entries]


def test_x3_x6_x11_random_kills_stops_joins_and_leaves_leave_an_exact_account(registry: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("SEED", time.time_ns() % 1_000_000))
    chaos = Chaos(tmp_path, registry, seed)
    with ExitStack() as stack:
        hub = stack.enter_context(pxrs.open(chaos.url, registry=None if registry == "-" else registry))
        hub.create_topic("t", partitions=PARTITIONS)
        hub.registry.get("x")  # open, so that its tables are there before the workers race for them
        out = hub.producer("t")
        for _ in range(3):
            stack.enter_context(chaos.start())
        sent = 0
        for _ in range(EVENTS):
            until = time.monotonic() + chaos.random.uniform(0.05, 0.6)
            while time.monotonic() < until:  # load goes on between the events
                for _ in range(20):
                    out.send(b"%d" % sent, b"key-%d" % (sent % 100))
                    sent += 1
                out.flush()
                time.sleep(0.01)
            before = len(chaos.workers)
            chaos.event()
            for worker in chaos.workers[before:]:
                stack.enter_context(worker)
        until = time.monotonic() + PATIENCE_S
        while any(name in members(hub, "g") for name in (worker.name for worker in chaos.stopped)):
            assert time.monotonic() < until, f"SEED={seed}: a stopped member is still there"
            time.sleep(0.05)
        chaos.wake_all()  # as zombies
        while len(chaos.running()) < 2:
            stack.enter_context(chaos.start())
        ends = {p: hub.topic("t").end(p) for p in range(PARTITIONS)}
        until = time.monotonic() + PATIENCE_S
        while checkpoints(hub, "g") != list(ends.values()):
            assert time.monotonic() < until, f"SEED={seed}: {checkpoints(hub, 'g')} of {ends}\n{errors(chaos)}"
            time.sleep(0.05)
        codes = {worker.name: worker.end() for worker in chaos.running()}
        assert set(codes.values()) == {0}, f"SEED={seed}: {codes}\n{errors(chaos)}"
        # One that was sent away while it was still starting had nothing to give up.
        left = {worker.name: worker.end() for worker in chaos.leaving}
        assert set(left.values()) <= {0, -signal.SIGTERM}, f"SEED={seed}: {left}\n{errors(chaos)}"
    found = account(read_journals(worker.journal for worker in chaos.workers), ends)
    assert found == Account(sent, 0, 0, found.redone, 0, found.late, found.ownerships), f"SEED={seed}\n{errors(chaos)}"
    # A handler that is running when its process is stopped goes on when it is woken: one for each stop, no more (G8).
    assert found.late <= chaos.stops, f"SEED={seed}"


def members(hub: Hub, group: str) -> set[str]:
    return {Member.load(entry.key, entry.value).name for entry in hub.registry.scan(Keys(group).members)}


def errors(chaos: Chaos) -> str:
    return "\n".join(f"{worker.name}: {worker.errors.read_text()[-2000:]}" for worker in chaos.workers)
