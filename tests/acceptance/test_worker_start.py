"""`pxrs worker` that is started before what it reads exists, or takes from several queues."""

from __future__ import annotations

import json
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.cli import worker_process
from pxrs.cli.worker_process import Listeners
from pxrs.errors import RegistryUnavailable, UnknownQueue
from pxrs.testing.waiting import aside, eventually
from tests.acceptance.running import Running, starting

PATIENCE_S = 60.0
SHOP = """
def note(what):
    with open("handled", "a") as file:
        file.write(what + "\\n")

def handle(message):
    note(message.value.decode())

def handle_item(tx, item):
    note(f"{item.queue}:{item.value.decode()}")
"""


class Worker(Running):
    """`pxrs worker`, whose worker processes are forked."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        module = "pxrs.testing.forked_workers"
        super().__init__(folder, "worker", *arguments, "--json", module=module, with_output=False)

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        lines = self.told().split("\n")[:-1]
        return [event for event in map(json.loads, lines) if kind in (None, event["event"])]

    def handled(self) -> list[str]:
        path = self.folder / "handled"
        return sorted(path.read_text().splitlines()) if path.exists() else []


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Worker]]:
    (tmp_path / "shop.py").write_text(SHOP)
    yield from starting(Worker, tmp_path, monkeypatch)


MEMBER = ("shop:handle", "--at", "data", "--topic", "orders", "--group", "g")


def test_a_worker_waits_until_its_topic_exists(tmp_path: Path, start: Callable[..., Worker]) -> None:
    worker = start(*MEMBER)
    (waiting,) = eventually(lambda: worker.events("waiting"), PATIENCE_S, what=worker.events)
    assert waiting["text"] == (
        f"waiting until the topic orders exists: create it with `pxrs topic create orders --at {tmp_path}/data`, or "
        "start the worker with --create; --no-wait exits instead"
    )
    assert not (tmp_path / "data").exists(), "to wait creates nothing"
    with pxrs.open(tmp_path / "data") as hub:
        hub.create_topic("orders", partitions=1)
        with hub.producer("orders") as out:
            out.send(b"first")
        eventually(lambda: worker.handled() == ["first"], PATIENCE_S, what=worker.events)
    assert worker.end() == 0, worker.events()
    assert [event["event"] for event in worker.events()][:2] == ["waiting", "started"]


def test_a_worker_waits_until_all_its_queues_exist_and_takes_from_each(
    tmp_path: Path, start: Callable[..., Worker]
) -> None:
    with pxrs.open(tmp_path / "data") as hub:
        hub.create_topic("orders")
        worker = start("shop:handle_item", "--at", "data", "--queue", "a", "--queue", "b", "--threads", "3")
        eventually(lambda: worker.events("waiting"), PATIENCE_S, what=worker.events)
        assert not (tmp_path / "data" / "registry").exists(), "to wait creates no registry"
        hub.create_queue("a").put("1")
        hub.create_queue("b").put("2")
        eventually(lambda: worker.handled() == ["a:1", "b:2"], PATIENCE_S, what=worker.events)
    assert worker.end() == 0, worker.events()
    assert [event["code"] for event in worker.events("ended")] == [0]


def test_one_deleted_queue_of_several_ends_the_worker_for_good(tmp_path: Path, start: Callable[..., Worker]) -> None:
    with pxrs.open(tmp_path / "data") as hub:
        hub.create_queue("a").put("1")
        hub.create_queue("b")
        worker = start("shop:handle_item", "--at", "data", "--queue", "a", "--queue", "b")
        eventually(lambda: worker.handled() == ["a:1"], PATIENCE_S, what=worker.events)
        hub.delete_queue("b")
        assert worker.process.wait(PATIENCE_S) == 3, worker.events()
    (failed,) = worker.events("failed")
    assert "no queue 'b'" in failed["text"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait(start: Callable[..., Worker], number: int) -> None:
    worker = start("shop:handle_item", "--at", "data", "--queue", "a")
    eventually(lambda: worker.events("waiting"), PATIENCE_S, what=worker.events)
    assert worker.end(number) == 0, worker.events()
    assert [event["event"] for event in worker.events()] == ["waiting", "stopping"]


def test_readiness_says_what_is_waited_for(tmp_path: Path, start: Callable[..., Worker]) -> None:
    worker = start(*MEMBER, "--metrics-listen", "0")
    (event,) = eventually(lambda: worker.events("metrics"), PATIENCE_S, what=worker.events)
    (url,) = re.findall(r"(http://[\d.:]+)/metrics", event["text"])

    def readiness() -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=PATIENCE_S) as answer:
                return json.loads(answer.read())  # type: ignore[no-any-return]
        except urllib.error.HTTPError as error:
            return json.loads(error.read())  # type: ignore[no-any-return]

    expected = "waiting until the topic orders exists"
    eventually(lambda: readiness().get("reason") == expected, PATIENCE_S, what=readiness)
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:
        assert 'worker="0"' not in answer.read().decode(), "the trial process is no worker"
    with pxrs.open(tmp_path / "data") as hub:
        hub.create_topic("orders", partitions=1)
        eventually(lambda: readiness() == {"ok": True, "workers": {"1": "ready"}}, PATIENCE_S, what=readiness)
    assert worker.end() == 0, worker.events()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*MEMBER, "--no-wait"), "no topic 'orders'"),
        (("shop:handle_item", "--at", "data", "--queue", "a", "--no-wait"), "no queue 'a'"),
        (
            (*MEMBER[:4], "there", *MEMBER[5:], "--on-error", "dead-letter", "--dead-letters", "dead", "--no-wait"),
            "no topic 'dead'",
        ),
        ((*MEMBER, "--until-end"), "no topic 'orders'; existing: there"),
    ],
    ids=["topic", "queue", "dead letters", "until the end"],
)
def test_without_waiting_what_does_not_exist_ends_the_command(
    tmp_path: Path, start: Callable[..., Worker], arguments: tuple[str, ...], words: str
) -> None:
    with pxrs.open(tmp_path / "data") as hub:
        hub.create_topic("there")
    worker = start(*arguments)
    assert worker.process.wait(PATIENCE_S) == 3, worker.events()
    (failed,) = worker.events()
    assert words in failed["text"]


def test_what_does_not_exist_is_created_on_demand(tmp_path: Path, start: Callable[..., Worker]) -> None:
    member = start(*MEMBER, "--on-error", "dead-letter", "--dead-letters", "dead", "--create")
    taker = start("shop:handle_item", "--at", "data", "--queue", "a", "--create")
    for worker in (member, taker):
        eventually(lambda each=worker: each.events("started"), PATIENCE_S, what=worker.events)  # type: ignore[misc]
    assert [event["text"] for event in member.events("created")] == [
        "created the topic orders with default settings",
        "created the topic dead with default settings",
    ]
    assert [event["text"] for event in taker.events("created")] == ["created the queue a with default settings"]
    with pxrs.open(tmp_path / "data") as hub:
        assert [topic.name for topic in hub.topics()] == ["dead", "orders"]
        assert [queue.name for queue in hub.queues()] == ["a"]
    assert (member.end(), taker.end()) == (0, 0)


def test_a_wait_is_told_again_from_time_to_time_and_outlasts_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker_process, "SAY_S", 0.0)
    monkeypatch.setattr(worker_process, "_MISSING_S", 0.001)
    (tmp_path / "shop.py").write_text(SHOP)
    settings = worker_process.Settings("shop:handle_item", [], None, "data", None, 1, 1.0, {}, queues=["q"], waits=True)
    process = worker_process.Process(settings, 0)
    looks: list[Any] = [UnknownQueue("q"), UnknownQueue("q"), RegistryUnavailable("no answer"), None]

    def look(hub: object) -> Any:
        found = looks.pop(0)
        if isinstance(found, RegistryUnavailable):
            raise found
        return found

    monkeypatch.setattr(process, "_first_missing", look)
    with pxrs.open("memory:") as hub:
        process._wait_for_missing(hub)
    assert looks == []
    told = capfd.readouterr().err.splitlines()
    assert [line.partition("waiting until the queue q exists: ")[2][:9] for line in told] == [
        "create it",
        "create it",
        "no answer",
    ]


# Several queues in one process.


def test_the_threads_of_a_worker_are_shared_out_among_its_queues() -> None:
    with pxrs.open("memory:") as hub:
        queues = [hub.create_queue(name) for name in "abc"]
        for threads, shares in ((7, [3, 2, 2]), (3, [1, 1, 1]), (1, [1, 1, 1])):
            listeners = Listeners(queues, lambda tx, item: None, threads)
            assert [each._count for each in listeners._all] == shares


def test_a_stop_before_the_start_is_no_failure_and_a_deleted_queue_is_one() -> None:
    with pxrs.open("memory:") as hub:
        queues = [hub.create_queue(name) for name in "ab"]
        listeners = Listeners(queues, lambda tx, item: None, 2)
        listeners.stop()
        listeners.run()
        hub.delete_queue("b")
        running = aside(Listeners(queues, lambda tx, item: None, 2).run)
        with pytest.raises(UnknownQueue, match="no queue 'b'"):
            running.result()
