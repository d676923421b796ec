"""Upkeep: when it is due, who is elected to do it, and that a janitor that is late or frozen does no harm."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs import clock as clocks
from pxrs import disk
from pxrs.address import LazyRegistry
from pxrs.clock import ManualClock
from pxrs.errors import HubMoved, LogNotWritable, OutcomeUnknown, RegistryUnavailable
from pxrs.group.projection import FOLDER
from pxrs.hub import Hub
from pxrs.hub_parts import HubParts
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.memory import MemoryLog
from pxrs.model import Topic
from pxrs.publishing.staging.directory import DirectoryStaging
from pxrs.registry.contract import Commit
from pxrs.registry.memory import MemoryStore
from pxrs.testing.command import run_here
from pxrs.testing.hooked import HookedRegistry
from pxrs.testing.waiting import eventually
from pxrs.upkeep.duties import Round
from pxrs.upkeep.election import LEASE_TTL_S, Election, Role
from pxrs.upkeep.records import RoundReport
from pxrs.upkeep.schedule import LOOK_S, ROUND_S, ROUND_S_MIN, Schedule, retention_interval_s

HOUR_S = 3600.0
DAY_S = 86_400.0


@pytest.fixture
def upkeep_threads() -> Callable[[], list[str]]:
    """Tells which threads of upkeep have been started since the test began, and run."""

    def running() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("pxrs-upkeep")}

    before = running()
    return lambda: [thread.name for thread in running() - before]


class Place:
    """A directory, a registry that its processes share, and a clock for both."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, ManualClock()
        self.store = MemoryStore(self.clock)
        self._opened: list[Hub] = []

    def registry(self) -> HookedRegistry:
        registry = HookedRegistry(self.store)
        registry.url = "etcd://shared:2379"  # so that the hub does not take it for this process's own
        return registry

    def log(self) -> DirectoryLog:
        log = DirectoryLog(self.folder)
        log.clock = self.clock
        return log

    def hub(self, registry: HookedRegistry | None = None, *, upkeep: bool = False) -> Hub:
        hub = Hub(self.log(), registry or self.registry(), upkeep=upkeep)
        self._opened.append(hub)
        return hub

    def election(self, registry: HookedRegistry | None = None) -> Election:
        return Election(HubParts(self.log(), LazyRegistry(registry or self.registry()), 10.0))

    def close(self) -> None:
        for hub in self._opened:
            hub.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A hub with a topic of one hour, whose registry is on record."""
    place = Place(tmp_path / "data")
    hub = place.hub()
    hub.create_topic("t", partitions=1, retention=HOUR_S, segment_bytes=4096)
    hub.consumer("t", "g").close()
    yield place
    place.close()


def send_old(hub: Hub, topic: str = "t", count: int = 3) -> None:
    """Messages that were stored a day ago, a segment for each."""
    with pytest.MonkeyPatch.context() as patch, hub.producer(topic, linger_s=0) as out:
        patch.setattr(clocks, "wall_time_us", lambda: (time.time_ns() - 86_400 * 10**9) // 1000)
        for _ in range(count):
            out.send(b"x" * 4096).result()


# When.


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


def test_w4_a_client_of_a_server_does_no_upkeep(upkeep_threads: Callable[[], list[str]]) -> None:
    log = MemoryLog()
    log.is_kept_by_server = True
    with Hub(log, HookedRegistry(MemoryStore())) as hub:
        hub.create_topic("short", retention=HOUR_S)
        hub.producer("short").close()
        hub.start_upkeep()
        assert upkeep_threads() == []
        with pytest.raises(LogNotWritable, match="its server does the upkeep"):
            hub.run_upkeep()


# Who.


def test_one_of_the_hubs_is_elected_and_the_next_one_when_its_lease_has_ended(place: Place) -> None:
    first, second = place.election(), place.election()
    assert first.stand().role is Role.ELECTED
    assert second.stand().role is Role.CANDIDATE
    assert first.stand().role is Role.ELECTED, "it keeps the claim"
    known = second.look()
    assert known.claim is not None
    assert (known.claim.term, known.claim.pid, known.is_alive) == (1, os.getpid(), True)
    first.resign()
    assert second.stand().role is Role.ELECTED
    again = first.look().claim
    assert again is not None
    assert again.term == 2
    second.resign()


def test_a_candidate_takes_no_lease_while_the_janitor_lives(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease is a session and threads on some stores, and there may be a thousand candidates."""
    janitor, registry = place.election(), place.registry()
    assert janitor.stand().role is Role.ELECTED
    monkeypatch.setattr(registry, "lease", lambda ttl: 1 // 0)
    assert place.election(registry).stand().role is Role.CANDIDATE
    janitor.resign()


def test_a_frozen_janitor_finds_that_another_one_was_elected(place: Place) -> None:
    first, second = place.election(), place.election()
    assert first.stand().role is Role.ELECTED
    assert first._held is not None
    first._held.lease.abandon()  # as if its process were stopped
    place.clock.advance(LEASE_TTL_S + 1)
    assert second.stand().role is Role.ELECTED
    assert second.report(RoundReport(2.0, by="second"))
    assert not first.report(RoundReport(1.0, by="first")), "its report is fenced off"
    assert first.stand().role is Role.CANDIDATE
    report = first.look().report
    assert report is not None
    assert report.by == "second"
    key = place.registry().scan("upkeep/")[-2].key
    assert key.endswith("/janitor")
    place.registry().commit(put={key: b"{}"})
    assert not second.report(RoundReport(3.0)), "a claim that was written anew fences too, though the lease lives"


def test_of_two_that_find_the_janitor_gone_one_is_elected(place: Place) -> None:
    registry = place.registry()
    first, second = place.election(registry), place.election()
    overtaken: list[Role] = []

    def overtake(commit: Commit) -> None:
        registry.before = lambda commit: None
        overtaken.append(second.stand().role)

    registry.before = overtake
    assert first.stand().role is Role.CANDIDATE
    assert overtaken == [Role.ELECTED]
    second.resign()


def test_a_claim_whose_reply_was_lost_is_given_up(place: Place) -> None:
    registry = place.registry()
    first, second = place.election(registry), place.election()

    def lose(commit: Commit) -> None:
        registry.after = lambda commit: None
        raise OutcomeUnknown("the reply was lost")

    registry.after = lose
    standing = first.stand()
    assert (standing.role, standing.reason) == (Role.APART, "the reply was lost")
    assert second.stand().role is Role.ELECTED, "the lease of the lost claim was ended"
    assert first.stand().role is Role.CANDIDATE
    second.resign()


def test_hubs_that_share_a_registry_have_a_janitor_each(place: Place, tmp_path: Path) -> None:
    other = Place(tmp_path / "other")
    other.store = place.store
    hub = other.hub()
    hub.create_topic("t", partitions=1)
    hub.consumer("t", "another").close()
    here, there = place.election(), other.election()
    assert here.stand().role is Role.ELECTED
    assert there.stand().role is Role.ELECTED
    here.resign()
    there.resign()
    other.close()


def test_a_process_that_may_not_write_is_not_elected(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be the janitor, and nothing would be removed."""
    denied = PermissionError(13, "Permission denied", str(place.folder))
    with monkeypatch.context() as reader:
        reader.setattr(disk, "write_refusal", lambda path: denied)
        assert place.election().stand().role is Role.BARRED
        with pytest.raises(LogNotWritable):
            place.hub().run_upkeep()
    assert place.registry().scan("upkeep/") == []


def test_a_janitor_that_may_not_write_any_more_gives_the_claim_up(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as after its user was changed, or its mount made read-only: others may still write."""
    first, second = place.election(), place.election()
    assert first.stand().role is Role.ELECTED
    denied = PermissionError(13, "Permission denied", str(place.folder))
    with monkeypatch.context() as reader:
        reader.setattr(disk, "write_refusal", lambda path: denied)
        assert first.stand().role is Role.BARRED
    assert second.stand().role is Role.ELECTED
    assert first.stand().role is Role.CANDIDATE
    second.resign()


def test_without_a_registry_that_processes_share_nothing_is_written_and_plain_topics_are_retained(
    tmp_path: Path,
) -> None:
    with pxrs.open(tmp_path, upkeep=False) as hub:
        hub.create_topic("plain", partitions=1, retention=HOUR_S, segment_bytes=4096)
        send_old(hub, "plain")
        report = hub.run_upkeep()
        assert (report.removed, report.errors) == ({"plain": {"0": 3}}, {})
        assert (hub.upkeep().role, hub.upkeep().janitor) == ("apart", "")
    assert not (tmp_path / "registry").exists()


def test_a_registry_that_is_away_keeps_no_plain_topic_from_being_retained(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    registry = place.registry()
    hub = place.hub(registry)
    hub.create_topic("unread", partitions=1, retention=HOUR_S, segment_bytes=4096, keep_unread=True)
    for name in ("t", "unread"):
        send_old(hub, name)
    hub.run_upkeep()  # the id of the registry is known from now on
    send_old(hub)
    send_old(hub, "unread")

    def away() -> None:
        raise RegistryUnavailable("away")

    registry.reach = away
    with caplog.at_level(logging.WARNING):
        report = hub.run_upkeep()
    assert report.removed == {"t": {"0": 6}}
    assert report.errors == {"retention of unread": "away"}
    assert "electing a janitor is held up: away" in caplog.text
    status = hub.upkeep()
    assert (status.role, status.reason, status.errors) == ("apart", "away", {"retention of unread": "away"})
    registry.reach = lambda: None
    assert hub.run_upkeep().removed == {"unread": {"0": 6}}


def test_the_janitor_and_its_last_round_are_visible_to_others(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    janitor, other = place.hub(), place.hub()
    assert other.upkeep() == pxrs.UpkeepStatus("idle")
    send_old(janitor)
    janitor.start_upkeep()
    eventually(lambda: other.upkeep().last_round, 30)
    status = other.upkeep()
    assert (status.role, status.janitor.endswith(f":{os.getpid()}"), status.errors) == ("idle", True, {})
    assert status.since is not None
    assert status.last_round is not None
    assert status.last_round.removed == {"t": {"0": 3}}
    monkeypatch.setattr(janitor.topic("t").log, "retain", lambda now: 1 // 0)
    janitor.run_upkeep()
    assert other.upkeep().errors == {"retention of t": "integer division or modulo by zero"}
    janitor.close()
    assert other.upkeep().janitor == ""
    assert other.upkeep().last_round is not None, "what the last janitor did is still known"


def test_a_hub_that_was_asked_for_one_round_does_not_stay_the_janitor(place: Place) -> None:
    """It has no thread that would do the next one, and others would wait for it."""
    hub, next_one = place.hub(), place.election()
    hub.run_upkeep()
    assert hub.upkeep().janitor == ""
    assert next_one.stand().role is Role.ELECTED
    next_one.resign()


def test_a_janitor_whose_thread_has_ended_gives_the_claim_up(place: Place) -> None:
    """Its directory was moved. The hub has the same id where it is now, and a janitor there."""
    hub = place.hub()
    hub.start_upkeep()
    eventually(lambda: hub.upkeep().role == "elected" and hub.upkeep().last_round, 30)
    place.folder.rename(place.folder.with_name("moved"))
    place.clock.advance(LOOK_S)
    place.folder = place.folder.with_name("moved")
    election = place.election()
    eventually(lambda: election.stand().role is Role.ELECTED, 30)
    election.resign()


def test_a_janitor_whose_thread_ends_in_a_round_gives_the_claim_up(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was elected by the same look, so that no other hub would be before its lease has expired."""
    hub, election = place.hub(), place.election()
    hub.start_upkeep()
    eventually(lambda: hub.upkeep().role == "elected" and hub.upkeep().last_round, 30)

    def moved() -> list[Topic]:
        raise HubMoved(str(place.folder), "the directory was renamed or removed")

    with monkeypatch.context() as patch:
        patch.setattr(hub.log, "topics", moved)
        hub.start_upkeep()  # looks at once; the clock stands still, so that no lease expires
        eventually(lambda: election.stand().role is Role.ELECTED, 30)
    election.resign()


def test_a_round_that_takes_longer_than_its_interval_is_followed_by_a_pause(place: Place) -> None:
    hub = place.hub()
    hub.create_topic("short", partitions=1, retention=1e-6)
    janitor, log = hub._janitor, hub.topic("short").log
    retain = log.retain

    def slow(now: int, unread: Any = None) -> dict[int, int]:
        place.clock.advance(10)
        return retain(now, unread)

    log.retain = slow  # type: ignore[method-assign]
    with janitor._round:
        next_look_at = janitor._turn(Schedule(place.clock.now()))
    assert next_look_at >= place.clock.now() + ROUND_S_MIN
    janitor._election.resign()


def test_a_report_fits_into_the_registry_however_much_has_failed() -> None:
    many = {f"retention of {number}": "x" * 10_000 for number in range(5_000)}
    removed = {"t": {str(number): number for number in range(5_000)}, "u": {"0": 1}}
    found = RoundReport(1.0, 2.0, removed, many).bounded()
    assert len(found.dump()) < 100_000
    assert (len(found.removed["t"]), len(found.errors), found.errors["others"]) == (100, 101, "4900 more failed")


# What.


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


def test_a_process_whose_thread_has_made_a_round_makes_none_on_close(place: Place) -> None:
    with place.hub(upkeep=True) as hub:
        hub.start_upkeep()
        eventually(lambda: hub.upkeep().last_round, 30)
        send_old(hub)
    assert place.hub().topic("t").start(0) == 0, "the next janitor does it"


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


def test_a_deletion_that_was_cut_short_is_finished(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = place.hub()
    hub.create_topic("gone", partitions=1)
    with monkeypatch.context() as killed:
        killed.setattr(hub.log, "finish_deletions", lambda: None)  # the process dies before that
        hub.delete_topic("gone")
    assert list(place.folder.glob("topics/.deleted-*"))
    assert hub.run_upkeep().errors == {}
    assert not list(place.folder.glob("topics/.deleted-*"))
    assert len(list(place.folder.glob("logs/*"))) == 1


def keys_of_topics(place: Place) -> list[str]:
    return [entry.key.rpartition("/")[2] for entry in place.registry().scan("topics/")]


@pytest.mark.parametrize("way", ["the registry is away", "killed before", "killed after"])
def test_keys_of_a_deleted_topic_are_removed_though_its_deletion_was_cut_short(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    registry = place.registry()
    hub, other = place.hub(registry), place.hub()
    for name in ("unread", "stays"):
        hub.create_topic(name, partitions=1, retention=HOUR_S, keep_unread=True)
        hub.consumer(name, f"of {name}".replace(" ", "-")).close()
    assert keys_of_topics(place) == ["gate", "gate"]
    with monkeypatch.context() as cut_short:
        if way == "the registry is away":

            def reach() -> None:
                raise RegistryUnavailable("no answer")

            registry.reach = reach
            hub.delete_topic("unread")
            registry.reach = lambda: None
            assert "no answer" in caplog.text
        else:
            cut_short.setattr(
                hub.log, "delete_topic" if way == "killed before" else "finish_deletions", lambda *_: 1 // 0
            )
            with pytest.raises(ZeroDivisionError):
                hub.delete_topic("unread")
    assert keys_of_topics(place) == ["gate", "gate"]
    assert other.run_upkeep().errors == {}
    if way == "killed before":
        assert keys_of_topics(place) == ["gate", "gate"], "the topic is there: nothing of it may go"
        other.delete_topic("unread")
    assert keys_of_topics(place) == ["gate"], "that of the topic that stays"
    assert list((place.folder / "deleted").iterdir()) == []


def test_a_damaged_topic_that_is_deleted_leaves_no_keys(place: Place) -> None:
    hub = place.hub()
    hub.create_topic("unread", partitions=1, retention=HOUR_S, keep_unread=True)
    hub.consumer("unread", "g2").close()
    (place.folder / "topics" / "unread" / "topic.json").write_text("{}")
    place.hub().delete_topic("unread")
    assert keys_of_topics(place) == []


def test_a_topic_is_deleted_though_the_registry_cannot_be_asked_for_its_manifests(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    registry = place.registry()
    hub = place.hub(registry)
    identity = hub.topic("t").id
    file = staged(place.folder, identity, 1, 60.0)
    hub.registry.commit(put={f"spark/{identity}/query": json.dumps({"batch": 1, "files": [file.name]}).encode()})

    def reach() -> None:
        raise RegistryUnavailable("no answer")

    registry.reach = reach
    hub.delete_topic("t")
    registry.reach = lambda: None
    assert "no answer" in caplog.text
    assert hub.topics() == []
    assert file.exists(), "by it the janitor finds the manifests a day later"


def staged(folder: Path, topic_id: str, batch: int, age_s: float) -> Path:
    file = folder / "staging" / topic_id / "query" / str(batch) / "00000-x.arrow"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"rows")
    for path in (file, file.parent):
        os.utime(path, (time.time() - age_s, time.time() - age_s))
    return file


def test_staged_files_that_no_manifest_names_are_removed_after_a_day(place: Place) -> None:
    hub = place.hub()
    identity = hub.topic("t").id
    old, needed, young = (staged(place.folder, identity, *each) for each in ((1, 2 * DAY_S), (2, 2 * DAY_S), (3, 60.0)))
    hub.registry.commit(put={f"spark/{identity}/query": json.dumps({"batch": 2, "files": ["00000-x.arrow"]}).encode()})
    assert hub.run_upkeep().errors == {}
    assert [file.exists() for file in (old, needed, young)] == [False, True, True]
    gone = staged(place.folder, "0" * 32, 1, 2 * DAY_S)
    os.utime(gone.parents[2], (0, 0))
    os.utime(gone.parents[1], (0, 0))
    assert hub.run_upkeep().errors == {}
    assert not gone.parents[2].exists(), "of a topic that was deleted"


def test_what_was_committed_for_a_deleted_topic_a_short_while_ago_stays(place: Place) -> None:
    """The driver that has committed it may be about to finish it, and to tell that the topic is gone."""
    hub = place.hub()
    gone = staged(place.folder, "0" * 32, 1, 2 * DAY_S)
    for path in (gone.parents[1], gone.parents[2]):
        os.utime(path, (0, 0))
    written = {"batch": 1, "files": [gone.name], "at": time.time()}
    hub.registry.commit(put={f"spark/{'0' * 32}/query": json.dumps(written).encode()})
    assert hub.run_upkeep().errors == {}
    assert gone.exists()


def test_staged_files_stay_while_it_is_not_on_record_which_registry_has_the_manifests(tmp_path: Path) -> None:
    """A driver has committed its batch in a registry that this process does not know."""
    place = Place(tmp_path / "data")
    hub = place.hub()
    hub.create_topic("t", partitions=1)
    file = staged(place.folder, hub.topic("t").id, 1, 2 * DAY_S)
    assert hub.run_upkeep().errors == {}
    assert file.exists()
    hub.consumer("t", "g").close()  # which records its registry
    assert hub.run_upkeep().errors == {}
    assert not file.exists()
    place.close()


def test_a_file_of_somebody_else_in_the_staging_folder_stops_nobody(place: Place) -> None:
    hub = place.hub()
    identity = hub.topic("t").id
    old = staged(place.folder, identity, 1, 2 * DAY_S)
    strange = [old.parents[2] / ".DS_Store", old.parents[1] / ".DS_Store", place.folder / "staging" / "README"]
    for path in strange:
        path.write_text("")
    assert hub.run_upkeep().errors == {}
    assert not old.exists()
    DirectoryStaging(str(place.folder)).clear(identity, "query", 7)
    assert all(path.exists() for path in strange)


def test_a_janitor_that_was_frozen_after_it_read_the_manifests_removes_nothing_staged_since(tmp_path: Path) -> None:
    """It wakes up two days later; a manifest names the file by then, and is not published yet."""
    file = staged(tmp_path, "a" * 32, 1, 1.5 * DAY_S)
    DirectoryStaging(str(tmp_path)).sweep("a" * 32, {}, now=time.time() - 2 * DAY_S)
    assert file.exists()
    DirectoryStaging(str(tmp_path)).sweep("a" * 32, {}, now=time.time())
    assert not file.exists()


def test_readable_files_of_a_group_that_is_gone_are_removed(tmp_path: Path) -> None:
    with pxrs.open(tmp_path, upkeep=False) as hub:
        hub.create_topic("t", partitions=1)
        hub.consumer("t", "g").close()
        assert hub.registry.folder is not None
        files = hub.registry.folder / FOLDER
        (files / "gone").mkdir()
        (files / "gone" / "members.json").write_text("{}")
        (files / "g" / "owners.json").unlink()
        assert hub.run_upkeep().errors == {}
        assert not (files / "gone").exists()
        assert (files / "g" / "owners.json").exists()


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

    def stop_when_elected() -> None:
        with pxrs.open(tmp_path) as observer:
            eventually(lambda: observer.upkeep().janitor, 30)
        os.kill(os.getpid(), signal.SIGTERM)

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
