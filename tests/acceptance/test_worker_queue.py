"""`pxrs worker --queue`: real processes that take items, killed, stopped, told to end, cut off from the registry."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import pxrs
from pxrs.cli import app, worker
from pxrs.cli.worker_process import load_handler
from pxrs.cli.worker_settings import Settings
from pxrs.clock import SYSTEM
from pxrs.handler import OF_AN_ITEM
from pxrs.queue.records import TAKERS
from pxrs.registry.file.lease import expiry_of
from pxrs.testing.forked import Forked
from pxrs.testing.proxy import Proxy
from pxrs.testing.servers.etcd import EtcdServer
from pxrs.testing.waiting import eventually

PATIENCE_S = 60.0
SHOP = """
import os, time

def note(item):
    with open("handled", "ab", 0) as file:
        file.write(b"%d %b %d\\n" % (os.getpid(), item.value, item.deliveries))

def wait_for_go():
    while not os.path.exists("go"):
        time.sleep(0.01)

def handle(tx, item):
    note(item)
    tx.put("done", item.value)

def slowly(tx, item):  # waits for the file `go` from the 100th item on
    note(item)
    time.sleep(0.05)
    if int(item.value) >= 100:
        wait_for_go()
    tx.put("done", item.value)

def wait(tx, item):
    note(item)
    wait_for_go()
    tx.put("done", item.value)

def wait_the_first_time(tx, item):
    note(item)
    if item.deliveries == 1:
        wait_for_go()
    tx.put("done", b"%b by %d" % (item.value, os.getpid()))

def reject(tx, item):
    tx.put("done", item.value)
    raise ValueError("not this one")

def one(item):
    pass

answer = 42
"""


class Shop:
    """A directory with the queues `jobs` and `done`, a module `shop`, and what its handlers have noted."""

    def __init__(self, folder: Path, registry: str | None = None) -> None:
        self.folder, self.registry = folder, registry
        self.hub = pxrs.open(folder / "data", registry)
        self.jobs = self.hub.create_queue("jobs", pxrs.ConsumeTimes(3))
        self.done = self.hub.create_queue("done")
        (folder / "data").mkdir(exist_ok=True)
        (folder / "shop.py").write_text(SHOP)
        self.supervisors: list[Supervisor] = []

    def handled(self) -> list[tuple[int, str, int]]:
        """(pid, value, delivery)."""
        path = self.folder / "handled"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(pid), value, int(delivery)) for pid, value, delivery in map(str.split, lines)]

    def results(self) -> list[bytes]:
        return [item.value for item in self.done.peek(1_000)]

    def takers(self) -> set[int]:
        """The process ids of those who can take items."""
        return {json.loads(entry.value)["pid"] for entry in self.hub.registry.scan(TAKERS)}

    def worker(self, handler: str, *arguments: str, registry: str | None = None) -> Supervisor:
        """registry: in place of the directory, which a queue in a registry does not need."""
        place = ("--at", "data") if registry is None else ("--registry", registry)
        self.supervisors.append(Supervisor(self.folder, handler, *place, *arguments))
        return self.supervisors[-1]

    def close(self) -> None:
        for supervisor in self.supervisors:
            supervisor.close()
        self.hub.close()


class Supervisor:
    def __init__(self, folder: Path, handler: str, *arguments: str) -> None:
        queue = [] if "--queue" in arguments else ["--queue", "jobs"]
        command = ["worker", handler, *queue, *arguments, "--json"]
        self._told = folder / f"stderr-{time.monotonic_ns()}"
        with self._told.open("wb") as told:
            # `test_worker.py` has workers that are started afresh, and so has one of a queue in `test_examples.py`.
            module = "pxrs.testing.forked_workers"
            self.process = Forked(module, command, cwd=folder, stderr=told.fileno(), has_group=True)

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        lines = self._told.read_text().split("\n")[:-1]
        return [event for event in map(json.loads, lines) if kind in (None, event["event"])]

    def pids(self) -> list[int]:
        return [event["pid"] for event in self.events("started")]

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """End exactly what was started here."""
        self.process.kill()
        self.process.wait(10)
        for pid in self.pids():
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(tmp_path)
    yield shop
    shop.close()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_item_of_a_killed_worker_is_done_by_the_other(shop: Shop) -> None:
    supervisor = shop.worker("shop:wait_the_first_time", "--processes", "2")
    eventually(lambda: len(shop.takers()) == 2, PATIENCE_S, what=supervisor.events)
    shop.jobs.put("job")
    eventually(shop.handled, PATIENCE_S, what=supervisor.events)
    ((killed, *_),) = shop.handled()
    (other,) = set(supervisor.pids()) - {killed}
    os.kill(killed, signal.SIGKILL)
    eventually(shop.results, PATIENCE_S, what=supervisor.events)
    assert shop.handled() == [(killed, "job", 1), (other, "job", 2)]
    assert shop.results() == [b"job by %d" % other]
    eventually(lambda: len(supervisor.pids()) == 3, PATIENCE_S, what=supervisor.events)
    assert [(event["pid"], event["code"]) for event in supervisor.events("died")] == [(killed, -signal.SIGKILL)]
    assert supervisor.end() == 0, supervisor.events()


def test_a_worker_that_slept_through_its_lease_can_do_no_harm(shop: Shop) -> None:
    supervisor = shop.worker("shop:wait_the_first_time", "--processes", "2", "--lease-ttl", "1")
    eventually(lambda: len(shop.takers()) == 2, PATIENCE_S, what=supervisor.events)
    shop.jobs.put("job")
    eventually(shop.handled, PATIENCE_S, what=supervisor.events)
    ((asleep, *_),) = shop.handled()
    leases = [*(shop.folder / "data/registry/pxrs/leases").iterdir()]
    assert len(leases) >= 2
    assert all((expiry_of(lease) or 0.0) <= SYSTEM.now() + 1.0 for lease in leases), "not so short as they were to be"
    os.kill(asleep, signal.SIGSTOP)
    try:
        eventually(shop.results, PATIENCE_S, what=supervisor.events)
    finally:
        os.kill(asleep, signal.SIGCONT)
    (shop.folder / "go").touch()  # its handler returns, and its commit is refused
    eventually(
        lambda: any("was refused" in event["text"] for event in supervisor.events("log")),
        PATIENCE_S,
        what=supervisor.events,
    )
    (other,) = set(supervisor.pids()) - {asleep}
    assert shop.results() == [b"job by %d" % other]
    assert supervisor.end() == 0, supervisor.events()


def test_a_stop_finishes_what_is_in_hand_and_takes_nothing_more(shop: Shop) -> None:
    shop.jobs.put_many([f"{number:03}" for number in range(300)])
    supervisor = shop.worker("shop:slowly", "--processes", "2", "--threads", "2")
    eventually(lambda: len({pid for pid, *_ in shop.handled()}) == 2, PATIENCE_S, what=supervisor.events)
    supervisor.process.send_signal(signal.SIGTERM)
    eventually(lambda: supervisor.events("stopping"), PATIENCE_S, what=supervisor.events)
    (shop.folder / "go").touch()
    assert supervisor.process.wait(PATIENCE_S) == 0, supervisor.events()
    begun = sorted(value for _, value, _ in shop.handled())
    assert begun == sorted(value.decode() for value in shop.results()), "what was begun is done, once"
    left = shop.jobs.peek(1_000)
    assert {item.deliveries for item in left} == {0}
    assert len(left) == 300 - len(begun) == shop.jobs.depth().ready
    assert [event["code"] for event in supervisor.events("ended")] == [0, 0]
    assert not shop.takers(), "they have left, and are not waited for"


def test_who_is_not_done_in_time_is_killed_and_its_item_comes_back(shop: Shop) -> None:
    shop.jobs.put("job")
    supervisor = shop.worker("shop:wait", "--grace", "0.3")
    eventually(shop.handled, PATIENCE_S, what=supervisor.events)
    assert supervisor.end() == 1
    assert [event["pid"] for event in supervisor.events("killed")] == supervisor.pids()
    with shop.hub.transaction() as tx:
        item = tx.take("jobs", timeout=PATIENCE_S)
        assert item is not None
        assert (item.value, item.deliveries) == (b"job", 2)
    assert shop.results() == []


def test_what_a_handler_refuses_is_a_dead_letter_in_the_end_and_nothing_of_it_happens(shop: Shop) -> None:
    shop.jobs.put("job")
    supervisor = shop.worker("shop:reject")
    eventually(lambda: len(shop.jobs.dead_letters()), PATIENCE_S, what=supervisor.events)
    (letter,) = shop.jobs.dead_letters()
    assert (letter.deliveries, letter.error) == (3, "ValueError: not this one")
    assert shop.results() == []
    assert "delivery 3: the handler failed: ValueError" in supervisor.events("log")[2]["text"]
    assert supervisor.end() == 0, supervisor.events()


def test_a_worker_outlives_an_outage_of_the_registry(tmp_path: Path) -> None:
    with EtcdServer() as etcd, Proxy(etcd.host, etcd.port) as proxy:
        shop = Shop(tmp_path, etcd.url)
        try:
            through = f"etcd://{proxy.host}:{proxy.port}?timeout=1"
            supervisor = shop.worker("shop:handle", "--lease-ttl", "1", "--threads", "2", registry=through)
            eventually(shop.takers, PATIENCE_S, what=supervisor.events)
            proxy.cut()
            eventually(lambda: not shop.takers(), PATIENCE_S, what=supervisor.events)
            shop.jobs.put_many(["a", "b"])
            eventually(lambda: supervisor.events("log"), PATIENCE_S, what=supervisor.events)
            proxy.restore()
            eventually(lambda: sorted(shop.results()) == [b"a", b"b"], PATIENCE_S, what=supervisor.events)
            assert len(supervisor.pids()) == 1
            assert supervisor.events("died") == []
            assert supervisor.end() == 0, supervisor.events()
        finally:
            shop.close()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one", "shop_.*cannot be called with a transaction and an item"),
        ("answer", "is int, and not a function of a transaction and an item"),
    ],
)
def test_what_is_wrong_with_a_handler_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "shop_of_items.py").write_text(SHOP)
    monkeypatch.delitem(sys.modules, "shop_of_items", raising=False)
    with pytest.raises(ImportError, match=words):
        load_handler(f"shop_of_items:{name}", OF_AN_ITEM)


def test_a_handler_of_messages_is_told_at_once_and_nothing_starts(shop: Shop) -> None:
    supervisor = shop.worker("shop:one", "--processes", "3")
    assert supervisor.process.wait(PATIENCE_S) == 2
    (event,) = supervisor.events()
    assert (event["event"], "cannot be called with a transaction" in event["text"]) == ("bad-handler", True)


GIVEN = {"on-error": "retry", "retries": "3", "start": "latest", "assignor": "range", "until-end": None}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        *(
            (
                ("--queue", "jobs", *(part for part in (f"--{name}", GIVEN.get(name, "1")) if part)),
                2,
                f"--{name} is for topics and their groups: leave it out with --queue",
            )
            for name in (option.replace("_", "-") for option in worker.GROUP_OPTIONS)
        ),
        ((), 2, "give --topic and --group, or --queue"),
        (("--topic", "t"), 2, "give --topic and --group, or --queue"),
        (("--queue", "a/b"), 2, "queue name 'a/b'"),
        (("--queue", "jobs", "--queue", "done", "--queue", "jobs"), 2, "--queue jobs is given twice"),
        (("--queue", "jobs", "--at", "memory:"), 2, "exists in one process only"),
        (("--queue", "jobs", "--at", "typo", "--no-wait"), 2, "there is no directory typo"),
    ],
)
def test_an_option_that_means_nothing_is_refused_by_its_name(
    shop: Shop,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("it would have been started")

    monkeypatch.setattr(worker, "Supervisor", refuse)
    monkeypatch.chdir(shop.folder)
    at = () if "--at" in arguments else ("--at", "data")
    monkeypatch.setattr(sys, "argv", ["pxrs", "worker", "shop:handle", *at, *arguments])
    with pytest.raises(SystemExit) as ended:
        app.run()
    assert ended.value.code == code
    assert words in " ".join(capsys.readouterr().err.split())
    assert not Path("typo").exists()


def test_an_unknown_queue_is_one_error_and_not_one_for_each_worker(shop: Shop) -> None:
    supervisor = shop.worker("shop:handle", "--processes", "3", "--queue", "nope", "--no-wait")
    assert supervisor.process.wait(PATIENCE_S) == 3
    (event,) = supervisor.events()
    assert event["text"].startswith("no queue 'nope'")


def test_a_queue_that_is_deleted_ends_its_workers_for_good(shop: Shop) -> None:
    supervisor = shop.worker("shop:handle", "--processes", "2")
    eventually(lambda: len(shop.takers()) == 2, PATIENCE_S, what=supervisor.events)
    shop.hub.delete_queue("jobs")
    assert supervisor.process.wait(PATIENCE_S) == 3
    assert len(supervisor.pids()) == 2
    assert supervisor.events("died") == []
    assert all("no queue 'jobs'" in event["text"] for event in supervisor.events("failed"))
    assert len(supervisor.events("failed")) == 2


def test_settings_reach_a_worker_as_they_were_given() -> None:
    settings = Settings("shop:handle", [], None, "data", None, 2, 1.0, {"lease_ttl": 3.0}, queues=["jobs", "more"])
    assert Settings(**json.loads(settings.dump())) == settings
