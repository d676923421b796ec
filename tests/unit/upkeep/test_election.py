"""Which hub is the janitor, and what others see of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs import disk
from pxrs.errors import HubMoved, LogNotWritable, OutcomeUnknown, RegistryUnavailable
from pxrs.hub import Hub
from pxrs.log.memory import MemoryLog
from pxrs.model import Topic
from pxrs.registry.contract import Commit
from pxrs.registry.memory import MemoryStore
from pxrs.testing.hooked import HookedRegistry
from pxrs.testing.waiting import eventually
from pxrs.upkeep.election import LEASE_TTL_S, Role
from pxrs.upkeep.records import RoundReport
from pxrs.upkeep.schedule import LOOK_S, ROUND_S_MIN, Schedule
from tests.unit.upkeep.hubs import HOUR_S, Place, send_old


def test_w4_a_client_of_a_server_does_no_upkeep(upkeep_threads: Callable[[], list[str]]) -> None:
    log = MemoryLog()
    log.is_kept_by_server = True
    with Hub(log, HookedRegistry(MemoryStore())) as hub:
        hub.create_topic("short", retention=HOUR_S)
        hub.producer("short").close()
        hub.start_upkeep()
        assert upkeep_threads() == []
        with pytest.raises(LogNotWritable, match="the server does the upkeep"):
            hub.run_upkeep()


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
    assert "electing a janitor is blocked: away" in caplog.text
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
