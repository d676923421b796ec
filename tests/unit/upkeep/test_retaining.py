"""When retention is due, and who applies it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.cli import upkeep as command
from pxrs.clock import ManualClock
from pxrs.errors import RegistryUnavailable
from pxrs.hub import Hub
from pxrs.log.memory import MemoryLog
from pxrs.model import Topic
from pxrs.registry.memory import MemoryStore
from pxrs.testing.command import run_here
from pxrs.testing.hooked import HookedRegistry
from pxrs.testing.waiting import eventually
from pxrs.upkeep import janitor as janitor_module
from pxrs.upkeep.duties import Round
from pxrs.upkeep.election import Role
from pxrs.upkeep.janitor import UpkeepStatus
from pxrs.upkeep.records import RoundReport
from pxrs.upkeep.schedule import LOOK_S, ROUND_S, ROUND_S_MIN, Schedule, retention_interval_s
from tests.unit.upkeep.hubs import DAY_S, HOUR_S, Place, send_old


def topic(name: str, retention_s: float | None, **settings: Any) -> Topic:
    return Topic(name, name * 8, 1, retention_s=retention_s, **settings)


@pytest.mark.parametrize(
    ("retention_s", "every_s"), [(8.0, 2.0), (240.0, 60.0), (DAY_S, 60.0), (None, 60.0), (1e-6, ROUND_S_MIN)]
)
def test_retention_is_due_every_quarter_of_it_or_every_minute(retention_s: float | None, every_s: float) -> None:
    assert retention_interval_s(topic("t", retention_s, retention_bytes=1 << 20)) == every_s
    schedule, topics = Schedule(100.0), [topic("t", retention_s, retention_bytes=1 << 20), topic("never", None)]
    assert [each.name for each in schedule.due_topics(topics, 100.0)] == ["t"]
    assert schedule.due_topics(topics, 100.0 + 0.99 * every_s) == []
    assert schedule.next_look_at(100.0) == min(100.0 + LOOK_S, 100.0 + every_s)
    assert [each.name for each in schedule.due_topics(topics, 100.0 + every_s)] == ["t"]


def test_a_topic_is_due_when_it_appears_and_forgotten_when_it_is_gone() -> None:
    schedule = Schedule(0.0)
    assert schedule.due_topics([], 0.0) == []
    assert schedule.next_look_at(0.0) == LOOK_S
    assert len(schedule.due_topics([topic("new", DAY_S)], 1.0)) == 1
    assert schedule.due_topics([], 500.0) == []
    assert schedule.next_look_at(500.0) == 500.0 + LOOK_S, "a topic that is gone is not waited for"


def test_the_other_duties_are_due_every_minute() -> None:
    schedule = Schedule(0.0)
    assert [schedule.others_are_due(now) for now in (0.0, ROUND_S - 1, ROUND_S, ROUND_S + 1)] == [
        True,
        False,
        True,
        False,
    ]


def test_the_thread_applies_retention_when_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    calls: list[float] = []
    with Hub(MemoryLog(clock), HookedRegistry(MemoryStore(clock))) as hub:
        log = hub.create_topic("t", partitions=1, retention=8.0).log
        monkeypatch.setattr(log, "retain", lambda now: calls.append(clock.now()) or {})
        begun = clock.now()
        with hub.producer("t") as out:
            out.send("x")
        for number in range(1, 5):
            clock.advance(2.0)
            eventually(lambda number=number: len(calls) == number, 30)
            with hub._janitor._round:  # the round has ended, and with it the choice of the next moment
                pass
    assert calls == [begun + 2.0 * number for number in range(1, 5)]


def test_only_a_hub_that_sends_or_consumes_what_has_a_retention_has_a_thread(
    upkeep_threads: Callable[[], list[str]],
) -> None:
    with pxrs.open("memory:") as hub:
        hub.create_topic("kept", partitions=1)
        hub.create_topic("short", partitions=1, retention=HOUR_S)
        hub.producer("kept").close()
        hub.consumer("kept", "g").close()
        list(hub.topic("short").messages(0))
        assert hub.upkeep().role == "idle"
        assert upkeep_threads() == []
        for _ in range(3):
            hub.producer("short").close()
            hub.consumer("short", "g").close()
        assert len(upkeep_threads()) == 1
    assert upkeep_threads() == []
    with pxrs.open("memory:", upkeep=False) as hub:
        hub.create_topic("short", retention=HOUR_S)
        hub.producer("short").close()
        assert upkeep_threads() == []


def test_a_report_fits_into_the_registry_however_much_has_failed() -> None:
    many = {f"retention of {number}": "x" * 10_000 for number in range(5_000)}
    removed = {"t": {str(number): number for number in range(5_000)}, "u": {"0": 1}}
    found = RoundReport(1.0, 2.0, removed, many).bounded()
    assert len(found.dump()) < 100_000
    assert (len(found.removed["t"]), len(found.errors), found.errors["others"]) == (100, 101, "4900 more failed")


@pytest.mark.parametrize("way", ["no janitor", "a janitor", "upkeep=False"])
def test_a_short_lived_process_retains_on_close_if_there_is_no_janitor(place: Place, way: str) -> None:
    janitor = place.election()
    if way == "a janitor":
        assert janitor.stand().role is Role.ELECTED
    with place.hub(upkeep=way != "upkeep=False") as hub:
        _ = hub.registry  # in use, so that it can be asked who is the janitor
        send_old(hub)
        assert hub.topic("t").start(0) == 0
    assert place.hub().topic("t").start(0) == (3 if way == "no janitor" else 0)
    janitor.resign()


def test_a_process_whose_thread_has_made_a_round_makes_none_on_close(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[object] = []
    with place.hub(upkeep=True) as hub:
        send_old(hub)
        place.clock.advance(LOOK_S)
        eventually(lambda: hub.topic("t").start(0) == 3, 30)
        eventually(lambda: hub.upkeep().last_round, 30)
        monkeypatch.setattr(janitor_module, "Round", lambda *_, **__: rounds.append("made"))
    assert rounds == []


def test_a_process_whose_round_was_cut_short_retains_on_close(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread begins its first round just when the hub is closed, and so does none of its duties."""
    with place.hub(upkeep=True) as hub:
        _ = hub.registry
        send_old(hub)
        cut_short = Round(hub.parts, lambda: True, with_registry=True)
        with monkeypatch.context() as patched:
            patched.setattr(janitor_module, "Round", lambda *_, **__: cut_short)
            hub.run_upkeep()
        assert hub.upkeep().last_round is not None
        assert hub.topic("t").start(0) == 0
    assert place.hub().topic("t").start(0) == 3


def test_a_short_lived_process_that_needs_no_registry_opens_none(tmp_path: Path) -> None:
    with pxrs.open(tmp_path) as hub:
        hub.create_topic("plain", partitions=1, retention=HOUR_S, segment_bytes=4096)
        send_old(hub, "plain")
    assert not (tmp_path / "registry").exists()
    pxrs.registry.open(tmp_path / "registry").close()
    with pxrs.open(tmp_path) as hub:
        assert hub.topic("plain").start(0) == 3
        send_old(hub, "plain")
    assert not hub.parts.registry.is_open, "nor one that is there, which may be a server that does not answer"
    with pxrs.open(tmp_path) as hub:
        assert hub.topic("plain").start(0) == 6


def test_one_topic_that_fails_keeps_no_other_from_being_retained(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = place.hub()
    hub.create_topic("a", partitions=1, retention=HOUR_S, segment_bytes=4096)
    for name in ("a", "t"):
        send_old(hub, name)
    monkeypatch.setattr(hub.topic("a").log, "retain", lambda now: 1 // 0)
    report = hub.run_upkeep()
    assert report.removed == {"t": {"0": 3}}
    assert list(report.errors) == ["retention of a"]


def test_a_topic_that_was_made_again_since_the_topics_were_listed_is_due_by_itself(place: Place) -> None:
    hub = place.hub()
    (listed,) = hub.topics()
    hub.delete_topic("t")
    hub.create_topic("t", partitions=1, retention=HOUR_S, segment_bytes=4096)
    send_old(hub)
    work = Round(hub.parts, lambda: False, with_registry=True)
    assert work.run([listed], with_others=False).removed == {}
    assert (work.errors, work.done) == ({}, ["retention of t"])
    assert work.run(hub.topics(), with_others=False).removed == {"t": {"0": 3}}


def test_a_registry_that_could_not_be_reached_is_not_asked_again_for_each_topic(place: Place) -> None:
    """Each call would take as long as the registry's time limit."""
    registry = place.registry()
    hub = place.hub(registry)
    for number in range(5):
        hub.create_topic(f"unread{number}", partitions=1, retention=HOUR_S, keep_unread=True)
    calls = []

    def away() -> None:
        calls.append(1)
        raise RegistryUnavailable("away")

    registry.reach = away
    assert len(hub.run_upkeep().errors) == 5
    assert len(calls) == 1
    registry.reach = lambda: None


def test_closing_does_not_wait_for_a_round_to_end(
    monkeypatch: pytest.MonkeyPatch, upkeep_threads: Callable[[], list[str]]
) -> None:
    """The step that the thread is in ends; the next ones are left to the next janitor."""
    clock, entered, leave = ManualClock(), threading.Event(), threading.Event()
    hub = Hub(MemoryLog(clock), HookedRegistry(MemoryStore(clock)))
    done: list[str] = []

    def slow(name: str) -> Callable[[int], dict[int, int]]:
        def retain(now: int) -> dict[int, int]:
            done.append(name)
            entered.set()
            assert leave.wait(30)
            return {}

        return retain

    for name in ("a", "b"):
        monkeypatch.setattr(hub.create_topic(name, partitions=1, retention=8.0).log, "retain", slow(name))
    hub.producer("a").close()
    clock.advance(3)
    assert entered.wait(30)
    closing = threading.Thread(target=hub.close)
    closing.start()
    eventually(lambda: hub.parts.is_closed, 30)
    eventually(lambda: hub._janitor._is_closing, 30)
    leave.set()
    closing.join(30)
    assert not closing.is_alive()
    assert done == ["a"]
    assert upkeep_threads() == []


def test_the_command_does_a_round_and_shows_who_keeps_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ("--at", str(tmp_path))
    with pxrs.open(tmp_path, upkeep=False) as hub:
        hub.create_topic("t", partitions=1, retention=HOUR_S, segment_bytes=4096)
        hub.consumer("t", "g").close()
        send_old(hub)
        (row,) = run_here(monkeypatch, capsys, ("upkeep", "--once", "--json", *at)).rows()
        assert (row["removed"], row["errors"]) == ({"t": {"0": 3}}, {})
        (row,) = run_here(monkeypatch, capsys, ("upkeep", "status", "--json", *at)).rows()
        assert (row["janitor"], row["last_round"]["removed"]) == (None, {"t": {"0": 3}})
        hub.start_upkeep()
        eventually(lambda: hub.upkeep().role == "elected", 30)
        shown = run_here(monkeypatch, capsys, ("upkeep", "status", *at))
        assert f":{os.getpid()}\n" in shown.out
        assert "last round" in shown.out
        hub.close()

    is_shown, role_text = threading.Event(), command._role_text

    def shown_role(found: UpkeepStatus) -> str:
        is_shown.set()
        return role_text(found)

    def stop_when_elected() -> None:
        """And when the command has seen it: others see its claim in the registry a moment before."""
        is_shown.wait(30)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(command, "_role_text", shown_role)
    stopper = threading.Thread(target=stop_when_elected)
    stopper.start()
    shown = run_here(monkeypatch, capsys, ("upkeep", *at))
    stopper.join()
    assert (shown.code, shown.out.splitlines()[0]) == (0, "elected")
    with pxrs.open(tmp_path) as hub:
        assert hub.upkeep().janitor == "", "it has given the claim up"
    result = run_here(monkeypatch, capsys, ("upkeep", "--once"))
    assert result.code == 2
    assert "--at" in result.errors
