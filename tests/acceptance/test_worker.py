"""`pxrs worker`: real processes under a real supervisor, stopped, killed, orphaned and given bad handlers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import pxrs
from pxrs.cli import worker
from pxrs.cli.worker_process import load_handler
from pxrs.cli.worker_settings import Settings
from pxrs.errors import UnknownGroup
from pxrs.group.admin import GroupHandle
from pxrs.testing.forked import Forked, run_text
from pxrs.testing.waiting import eventually

pytestmark = pytest.mark.sampled(3, of="module")

PARTITIONS = 8
SOAK = bool(os.environ.get("PXRS_SOAK"))
PATIENCE_S = 60.0
SHOP = """
import os, sys, time

def note(message):
    line = b"%d %d %d\\n" % (os.getpid(), message.partition, message.offset)
    with open("handled", "ab", 0) as file:
        file.write(line)

def handle(message):
    note(message)
    time.sleep(0.005)

def pause(message):  # handles the first messages of each partition, and waits for the file `go on` at the others
    handle(message)
    while message.offset >= 50 and not os.path.exists("go on"):
        time.sleep(0.01)

def hang(message):
    note(message)
    time.sleep(3600)

def die(message):
    note(message)
    os._exit(3)

def leave(message):
    note(message)
    sys.exit(0)

def reject(message):
    raise ValueError("not this one" if message.value == b"7" else "nor this one")

def refuse_bad(message):
    if message.value == b"bad":
        raise ValueError("bad")

async def asynchronous(message):
    pass

def two(message, other):
    pass

answer = 42
"""


class Shop:
    """A directory with a topic `t`, a module `shop`, and what its handlers have noted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hub = pxrs.open(folder / "data")
        self.topic = self.hub.create_topic("t", partitions=PARTITIONS)
        (folder / "shop.py").write_text(SHOP)
        self.supervisors: list[Supervisor] = []

    def send(self, count: int) -> None:
        with self.hub.producer("t") as out:
            for number in range(count):
                out.send(b"%d" % number, partition=number % PARTITIONS)

    def handled(self) -> list[tuple[int, int, int]]:
        """(pid, partition, offset)."""
        path = self.folder / "handled"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(pid), int(partition), int(offset)) for pid, partition, offset in map(str.split, lines)]

    def have_handled(self, count: int, pids: Iterable[int]) -> bool:
        """Whether so many messages were handled, and some by each of these."""
        handled = self.handled()
        return len(handled) > count and {pid for pid, *_ in handled} == set(pids)

    def go_on(self) -> None:
        """Let the handlers `pause` return."""
        (self.folder / "go on").touch()

    def places(self) -> Counter[tuple[int, int]]:
        return Counter((partition, offset) for _, partition, offset in self.handled())

    def checkpoints(self) -> dict[int, int | None]:
        rows = GroupHandle(self.hub.registry, "g", self.hub).describe().partitions
        return {row.partition: row.checkpoint for row in rows}

    def members(self) -> dict[int, int]:
        """How many partitions each has, by process id."""
        try:
            members = GroupHandle(self.hub.registry, "g", self.hub).describe().members
        except UnknownGroup:
            return {}
        return {member.pid: member.partitions for member in members}

    def are_at_work(self, pids: Iterable[int]) -> bool:
        """Whether these have all the partitions, and each of them some."""
        members = self.members()
        return members.keys() == set(pids) and all(members.values()) and sum(members.values()) == PARTITIONS

    def worker(self, handler: str, *arguments: str, are_forked: bool = True) -> Supervisor:
        """are_forked: the workers are, which is cheaper than to start them as `pxrs worker` does."""
        self.supervisors.append(Supervisor(self.folder, are_forked, handler, *arguments))
        return self.supervisors[-1]


class Supervisor:
    def __init__(self, folder: Path, are_forked: bool, handler: str, *arguments: str) -> None:
        module = "pxrs.testing.forked_workers" if are_forked else "pxrs.cli"
        command = ["worker", handler, "--topic", "t", "--group", "g", "--at", "data", *arguments, "--json"]
        self._told = folder / f"stderr-{time.monotonic_ns()}"
        with self._told.open("wb") as told:
            self.process = Forked(module, command, cwd=folder, stderr=told.fileno(), has_group=True)

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        lines = self._told.read_text().split("\n")[:-1]
        return [event for event in map(json.loads, lines) if kind in (None, event["event"])]

    def pids(self) -> list[int]:
        return [event["pid"] for event in self.events("started")]

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def interrupt(self) -> int:
        """As a terminal does: the supervisor and its workers, all at once."""
        os.killpg(self.process.pid, signal.SIGINT)
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
    for supervisor in shop.supervisors:
        supervisor.close()
    shop.hub.close()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_graceful_stop_writes_down_all_that_was_handled_and_nothing_is_redone(shop: Shop, number: int) -> None:
    arguments = ("--processes", "3", "--threads", "2", "--commit-interval", "3600")
    supervisor = shop.worker("shop:pause", *arguments, are_forked=number != signal.SIGTERM)
    eventually(
        lambda: len(supervisor.pids()) == 3 and shop.are_at_work(supervisor.pids()), PATIENCE_S, what=supervisor.events
    )
    shop.send(4_000)
    eventually(lambda: shop.have_handled(100, supervisor.pids()), PATIENCE_S, what=supervisor.events)
    supervisor.process.send_signal(number)
    eventually(lambda: supervisor.events("stopping"), PATIENCE_S, what=supervisor.events)
    shop.go_on()
    assert supervisor.process.wait(PATIENCE_S) == 0, supervisor.events()
    handled = shop.handled()
    assert len(handled) < 4_000, "it was stopped in the middle"
    ends = Counter(partition for _, partition, _ in handled)
    assert shop.checkpoints() == {p: ends[p] for p in range(PARTITIONS)}
    assert not shop.members(), "they have left, and are not waited for"
    assert [event["code"] for event in supervisor.events("ended")] == [0, 0, 0]
    assert shop.worker("shop:note", "--processes", "2", "--until-end").process.wait(PATIENCE_S) == 0
    assert shop.places() == Counter((p, offset) for p in range(PARTITIONS) for offset in range(500))


def test_a_terminal_interrupts_the_supervisor_and_its_workers_together(shop: Shop) -> None:
    shop.send(4_000)
    supervisor = shop.worker("shop:handle", "--processes", "2", are_forked=False)
    eventually(lambda: len(shop.handled()) > 50, PATIENCE_S, what=supervisor.events)
    assert supervisor.interrupt() == 0, supervisor.events()
    assert sum(offset or 0 for offset in shop.checkpoints().values()) == len(shop.handled())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("stop", "moments_s"),
    [
        (Supervisor.end, (0.0, 0.1, 0.3) if SOAK else (0.1,)),
        (Supervisor.interrupt, (0.0, 0.1, 0.3) if SOAK else (0.3,)),
    ],
)
def test_a_stop_while_the_workers_are_starting_is_not_forgotten(
    shop: Shop, stop: Callable[[Supervisor], int], moments_s: tuple[float, ...]
) -> None:
    shop.send(4_000)
    for moment_s in moments_s:
        supervisor = shop.worker("shop:handle", "--processes", "2", are_forked=False)
        eventually(lambda told=supervisor: len(told.pids()) == 2, PATIENCE_S, what=supervisor.events)
        time.sleep(moment_s)  # no condition to wait on: any moment of a start will do
        assert stop(supervisor) == 0, supervisor.events()
        assert [event["code"] for event in supervisor.events("ended")] == [0, 0]
    eventually(lambda: not shop.members(), PATIENCE_S, what=shop.members)
    assert max(shop.places().values(), default=1) == 1, "nothing was redone"


def test_a_worker_that_is_killed_is_started_again(shop: Shop) -> None:
    supervisor = shop.worker("shop:handle", "--processes", "2")
    eventually(
        lambda: len(supervisor.pids()) == 2 and shop.are_at_work(supervisor.pids()), PATIENCE_S, what=supervisor.events
    )
    shop.send(400)
    killed, other = supervisor.pids()
    eventually(lambda: killed in {pid for pid, *_ in shop.handled()}, PATIENCE_S, what=supervisor.events)
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: len(supervisor.pids()) == 3, PATIENCE_S, what=supervisor.events)
    died = supervisor.events("died")
    assert [(event["worker"], event["pid"], event["code"]) for event in died] == [(1, killed, -signal.SIGKILL)]
    assert "was killed by SIGKILL; restarting it in 0.2 s" in died[0]["text"]
    assert supervisor.events("started")[2]["worker"] == 1
    eventually(lambda: shop.are_at_work([other, supervisor.pids()[2]]), PATIENCE_S, what=supervisor.events)
    shop.send(400)
    eventually(
        lambda: sum(offset or 0 for offset in shop.checkpoints().values()) == 800, PATIENCE_S, what=shop.checkpoints
    )
    assert supervisor.end() == 0, supervisor.events()
    assert supervisor.pids()[2] in {pid for pid, *_ in shop.handled()}
    assert set(shop.places()) == {(p, offset) for p in range(PARTITIONS) for offset in range(100)}


def test_a_worker_that_dies_again_and_again_is_started_after_growing_pauses(shop: Shop) -> None:
    shop.send(1)
    supervisor = shop.worker("shop:die")
    eventually(lambda: len(supervisor.events("died")) >= 3, PATIENCE_S, what=supervisor.events)
    assert [event["restart_s"] for event in supervisor.events("died")][:3] == [0.2, 0.4, 0.8]
    assert {event["code"] for event in supervisor.events("died")} == {3}
    assert supervisor.end() == 0, supervisor.events()


def test_workers_that_end_by_themselves_are_not_started_again(shop: Shop) -> None:
    shop.send(100)
    supervisor = shop.worker("shop:handle", "--processes", "2", "--until-end")
    assert supervisor.process.wait(PATIENCE_S) == 0
    assert len(supervisor.pids()) == 2
    assert len(shop.handled()) == len(shop.places()) == 100


def test_workers_read_several_topics_and_name_a_paused_partition_by_its_topic(shop: Shop) -> None:
    shop.send(100)
    returns = shop.hub.create_topic("u", partitions=2)
    with shop.hub.producer("u") as out:
        for number in range(20):
            out.send(b"bad" if number == 6 else b"good", partition=number % 2)
    supervisor = shop.worker("shop:refuse_bad", "--topic", "u", "--processes", "2", "--until-end")
    assert supervisor.process.wait(PATIENCE_S) == 3, supervisor.events()
    assert {tuple(place) for told in supervisor.events("paused") for place in told["partitions"]} == {("u", 0)}
    found = shop.hub.group("g").describe()
    assert [(each.topic, each.lag) for each in found.topics] == [("t", 0), ("u", 7)]
    (row,) = (row for row in found.partitions if row.paused is not None)
    assert (row.topic, row.partition, row.checkpoint, returns.end(0)) == ("u", 0, 3, 10)


@pytest.mark.parametrize("handler", ["nowhere:handle", "shop:nothing"])
def test_a_handler_that_cannot_be_used_is_told_at_once_and_nothing_starts(shop: Shop, handler: str) -> None:
    supervisor = shop.worker(handler, "--processes", "3")
    assert supervisor.process.wait(PATIENCE_S) == 2
    (event,) = supervisor.events()
    assert event["event"] == "bad-handler"
    assert event["text"].startswith(f"{handler}: ")
    assert "\n" not in event["text"]


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        ("shop", "give MODULE:HANDLER"),
        ("nowhere:handle", "there is no module nowhere in "),
        ("shop_.py:handle", "write shop_:handle, without .py"),
        ("needy:handle", "importing needy failed: ModuleNotFoundError: No module named 'not_installed'"),
        ("broken:handle", "broken.py, line 2)"),
        ("untidy:handle", "untidy.py, line 1)"),
        ("leaving:handle", "SystemExit: 7"),
        ("shop_:nothing", "there is no 'nothing' in"),
        ("shop_:answer", "is of type int, but must be a function"),
        ("shop_:asynchronous", "neither async nor a generator"),
        ("shop_:two", "cannot be called with one message"),
    ],
)
def test_what_is_wrong_with_a_handler_is_said_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("shop_.py").write_text(SHOP)
    Path("broken.py").write_text("import os\nos.environ['not there, I hope']\n")
    Path("untidy.py").write_text("def handle(message:\n")
    Path("leaving.py").write_text("raise SystemExit(7)\n")
    Path("needy.py").write_text("import not_installed\n")
    monkeypatch.delitem(sys.modules, "shop_", raising=False)
    with pytest.raises(ImportError) as raised:
        load_handler(handler)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--topic", "nope", "--no-wait", "--group", "g"), 3, "no topic 'nope'"),
        (("--topic", "t", "--group", "g"), 2, "--topic t is given twice"),
        (("--group", "g/h"), 2, "group name 'g/h'"),
        (("--group", "g", "--lease-ttl", "-1"), 2, "lease_ttl is -1"),
        (("--group", "g", "--registry", "memory:"), 2, "exists in one process only"),
        (("--group", "g", "--registry", "kafka://h"), 2, "unknown scheme 'kafka'"),
        (("--group", "g", "--on-error", "dead-letter"), 2, "must be given together"),
        (
            ("--group", "g", "--no-wait", "--on-error", "dead-letter", "--dead-letters", "nope"),
            3,
            "no topic 'nope'",
        ),
    ],
)
def test_a_bad_setting_is_one_error_and_not_one_for_each_worker(
    shop: Shop, arguments: tuple[str, ...], code: int, words: str
) -> None:
    given = ("shop:handle", "--topic", "t", "--at", "data", "--processes", "3", *arguments)
    result = run_text("pxrs.cli", ["worker", *given], cwd=shop.folder, timeout=PATIENCE_S)
    assert result.returncode == code, result.stderr
    assert " ".join(result.stderr.split()).count(words) == 1, result.stderr
    assert "Traceback" not in result.stderr


def test_a_killed_supervisor_leaves_no_orphans_and_nothing_undone(shop: Shop) -> None:
    arguments = ("--processes", "3", "--commit-interval", "3600")
    supervisor = shop.worker("shop:pause", *arguments, are_forked=False)
    eventually(
        lambda: len(supervisor.pids()) == 3 and shop.are_at_work(supervisor.pids()), PATIENCE_S, what=supervisor.events
    )
    shop.send(4_000)
    eventually(lambda: len(shop.handled()) > 100, PATIENCE_S, what=supervisor.events)
    assert supervisor.end(signal.SIGKILL) == -signal.SIGKILL
    eventually(lambda: len(supervisor.events("orphaned")) == 3, PATIENCE_S, what=supervisor.events)
    shop.go_on()
    eventually(lambda: not any(map(is_running, supervisor.pids())), PATIENCE_S, what=supervisor.events)
    assert len(shop.handled()) < 4_000, "they did not go on to the end"
    assert sum(offset or 0 for offset in shop.checkpoints().values()) == len(shop.handled())
    assert {event["worker"] for event in supervisor.events("orphaned")} == {1, 2, 3}


def test_an_orphan_whose_handler_hangs_ends_all_the_same(shop: Shop) -> None:
    shop.send(1)
    supervisor = shop.worker("shop:hang", "--grace", "0.5")
    eventually(shop.handled, PATIENCE_S, what=supervisor.events)
    supervisor.end(signal.SIGKILL)
    eventually(lambda: not any(map(is_running, supervisor.pids())), PATIENCE_S, what=supervisor.events)


def test_a_worker_that_is_not_done_in_time_is_killed_and_the_exit_code_says_so(shop: Shop) -> None:
    supervisor = shop.worker("shop:hang", "--processes", "2", "--grace", "5")
    eventually(
        lambda: len(supervisor.pids()) == 2 and shop.are_at_work(supervisor.pids()), PATIENCE_S, what=supervisor.events
    )
    shop.send(1)
    eventually(shop.handled, PATIENCE_S, what=supervisor.events)
    assert supervisor.end() == 1
    assert [event["pid"] for event in supervisor.events("killed")] == [shop.handled()[0][0]]
    assert sorted(event["code"] for event in supervisor.events("ended")) == [-signal.SIGKILL, 0]
    assert not any(map(is_running, supervisor.pids()))


def test_a_second_interrupt_does_not_wait(shop: Shop) -> None:
    shop.send(1)
    supervisor = shop.worker("shop:hang", "--grace", "3600")
    eventually(shop.handled, PATIENCE_S, what=supervisor.events)
    supervisor.process.send_signal(signal.SIGINT)
    eventually(lambda: supervisor.events("stopping"), PATIENCE_S, what=supervisor.events)
    assert supervisor.end(signal.SIGINT) == 1


def test_what_a_handler_refuses_goes_to_the_dead_letters(shop: Shop) -> None:
    shop.send(20)
    dead = shop.hub.create_topic("dead", partitions=1)
    arguments = ("--on-error", "dead-letter", "--dead-letters", "dead", "--until-end")
    supervisor = shop.worker("shop:reject", *arguments)
    assert supervisor.process.wait(PATIENCE_S) == 0, supervisor.events()
    assert sorted(int(message.value or b"") for message in dead.messages(0)) == list(range(20))


def test_a_handler_that_raises_restarts_its_worker_if_so_asked(shop: Shop) -> None:
    shop.send(8)
    supervisor = shop.worker("shop:reject", "--on-error", "raise")
    eventually(lambda: len(supervisor.events("died")) >= 2, PATIENCE_S, what=supervisor.events)
    assert "the handler failed on t/" in supervisor.events("failed")[0]["text"]
    assert supervisor.end() == 0, supervisor.events()


def test_a_signal_of_the_handlers_own_does_not_stop_its_worker(shop: Shop) -> None:
    (shop.folder / "own.py").write_text(
        "import signal, os\nfrom shop import note\nsignal.signal(signal.SIGUSR1, lambda *_: None)\n"
        "def handle(message):\n    os.kill(os.getpid(), signal.SIGUSR1)\n    note(message)\n"
    )
    supervisor = shop.worker("own:handle")
    shop.send(80)
    eventually(lambda: len(shop.handled()) == 80, PATIENCE_S, what=supervisor.events)
    time.sleep(1.0)  # no condition to wait on: nothing must happen
    shop.send(80)
    eventually(lambda: len(shop.handled()) == 160, PATIENCE_S, what=supervisor.events)
    assert supervisor.events("ended") == []
    assert supervisor.end() == 0, supervisor.events()


def test_a_worker_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    supervisor = worker.Supervisor(Settings("shop:handle", ["t"], "g", "data", None, 1, 1.0, {}), 2)
    assert supervisor._start_due()
    assert supervisor._running() == []
    assert all(slot.restart_at and slot.pause_s == 2 * worker.RESTART_S[0] for slot in supervisor._slots)


def test_a_handler_that_exits_has_not_ended_the_work(shop: Shop) -> None:
    shop.send(1)
    supervisor = shop.worker("shop:leave")
    eventually(lambda: len(supervisor.events("died")) >= 2, PATIENCE_S, what=supervisor.events)
    assert "SystemExit" in supervisor.events("failed")[0]["text"]
    assert supervisor.end() == 0, supervisor.events()


def test_x13_a_worker_that_hangs_on_is_started_again(shop: Shop) -> None:
    shop.send(1)
    supervisor = shop.worker("shop:hang", "--progress-timeout", "0.5", "--grace", "0.5")
    eventually(lambda: len(supervisor.pids()) >= 2, PATIENCE_S, what=supervisor.events)
    (hung, *_) = supervisor.events("hung")
    assert hung["pid"] == supervisor.pids()[0] == supervisor.events("died")[0]["pid"]
    supervisor.end()


def test_x14_workers_end_at_the_end_and_tell_what_is_paused(shop: Shop) -> None:
    shop.send(8)
    supervisor = shop.worker("shop:reject", "--until-end")
    assert supervisor.process.wait(PATIENCE_S) == 3, supervisor.events()
    assert len(supervisor.pids()) == 1
    (told,) = supervisor.events("paused")
    assert told["partitions"] == list(range(PARTITIONS))
