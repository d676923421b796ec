"""All members of a group have the same assignor: one that differs is refused (F7)."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Iterator

import pytest

import pxrs
from pxrs.cli.restarts import is_final
from pxrs.errors import AssignorMismatch, GroupActive
from pxrs.group.records import ChosenAssignor, Keys, Leader, Member
from pxrs.hub import Hub
from pxrs.testing.waiting import eventually

KEYS = Keys("g")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with pxrs.open("memory:") as hub:
        hub.create_topic("t", partitions=4)
        yield hub


def members(hub: Hub) -> list[str]:
    return [Member.load(entry.key, entry.value).name for entry in hub.registry.scan(KEYS.members)]


def record(hub: Hub, assignor: str = "") -> bytes:
    """That of a member of another process."""
    return Member("old", hub.topic("t").id, "t", 4, "h", assignor=assignor).dump()


def earlier_record(hub: Hub, assignor: str | None) -> bytes:
    """That of a member of version 0.2.dev1; or of version 0.1, which states no assignor."""
    fields = json.loads(record(hub)) | {"assignor": assignor, "since": 2e9}
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


def test_f7_a_member_with_another_assignor_is_refused_and_told_who_differs(hub: Hub) -> None:
    with hub.consumer("t", "g", name="first", assignor="range") as first:
        eventually(lambda: first.assignment == [0, 1, 2, 3])
        with pytest.raises(AssignorMismatch) as refusal:
            hub.consumer("t", "g", name="second")
        assert members(hub) == ["first"]
        assert first.assignment == [0, 1, 2, 3], "nobody else is disturbed"
        with hub.consumer("t", "g", name="third", assignor="range") as third:
            eventually(lambda: third.assignment == [2, 3])
    error = refusal.value
    assert (error.group, error.assignor) == ("g", "sticky")
    ((name, theirs),) = error.others.items()
    assert name.startswith("first on ")
    assert theirs == "range"
    assert "this member has the assignor 'sticky', but first on" in str(error)
    assert "stop them before you start this member" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert is_final(error), "`pxrs worker` ends at once"


def test_f7_when_all_the_old_members_are_gone_another_assignor_takes_over(hub: Hub) -> None:
    for assignor in ("sticky", "range", "round-robin", "range"):
        with hub.consumer("t", "g", assignor=assignor), hub.consumer("t", "g", assignor=assignor) as second:
            eventually(lambda second=second: len(second.assignment) == 2)  # type: ignore[misc]


def test_f7_one_that_died_counts_until_its_lease_has_ended(hub: Hub) -> None:
    lease = hub.registry.lease(60)
    hub.registry.commit(ephemeral={KEYS.member("dead"): record(hub, assignor="range")}, lease=lease)
    with pytest.raises(AssignorMismatch, match="old on h has 'range'"):
        hub.consumer("t", "g")
    lease.close()
    with hub.consumer("t", "g") as inbox:
        eventually(lambda: len(inbox.assignment) == 4)


def test_f7_a_member_whose_record_states_no_assignor_goes_with_any(hub: Hub) -> None:
    with hub.registry.lease(60) as lease:
        hub.registry.commit(ephemeral={KEYS.member("old"): record(hub)}, lease=lease)
        with hub.consumer("t", "g", assignor="range") as inbox:
            eventually(lambda: len(inbox.assignment) == 2)


def test_f7_a_member_that_reads_another_topic_of_the_group_is_refused_too(hub: Hub) -> None:
    """It may come to lead the group, and would have to call an assignor that is not installed where it runs."""
    hub.create_topic("u", partitions=2)
    with hub.consumer("t", "g", assignor="range") as first:
        with pytest.raises(AssignorMismatch):
            hub.consumer("u", "g")
        with hub.consumer("u", "g", assignor="range") as second:
            eventually(lambda: (len(first.assignment), len(second.assignment)) == (4, 2))


@pytest.mark.parametrize("assignor", ["sticky", None], ids=["0.2.dev1", "0.1"])
def test_a_member_of_an_earlier_version_is_not_joined(hub: Hub, assignor: str | None) -> None:
    """It follows the targets in another key, so that two members would wait for each other for ever."""
    with hub.registry.lease(60) as lease:
        hub.registry.commit(ephemeral={KEYS.member("old"): earlier_record(hub, assignor)}, lease=lease)
        with pytest.raises(GroupActive, match="member old on h of group g runs an earlier version of pxrs") as refusal:
            hub.consumer("t", "g")
    assert is_final(refusal.value), "`pxrs worker` ends at once"
    with hub.consumer("t", "g") as inbox:
        eventually(lambda: len(inbox.assignment) == 4)


def test_a_member_of_version_02_dev1_takes_this_one_for_one_with_another_assignor(hub: Hub) -> None:
    """So it does not join: it compares the names as they are stored."""
    with hub.consumer("t", "g"):
        (entry,) = hub.registry.scan(KEYS.members)
        chosen = hub.registry.get(KEYS.assignor)
    assert json.loads(entry.value)["assignor"] == "sticky@2"
    assert chosen is not None
    assert json.loads(chosen.value)["assignor"] == "sticky@2"


def test_a_member_of_version_01_that_joins_all_the_same_is_given_nothing_and_told_of(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not look at the others."""
    with hub.consumer("t", "g", name="first") as first, hub.registry.lease(60) as lease:
        eventually(lambda: len(first.assignment) == 4)
        caplog.set_level(logging.WARNING, "pxrs.group.rounds")
        hub.registry.commit(ephemeral={KEYS.member("zzz"): earlier_record(hub, None)}, lease=lease)
        eventually(lambda: "the members old run an earlier version" in caplog.text)
        assert len(first.assignment) == 4


def test_a_member_of_version_01_that_leads_is_not_followed(hub: Hub) -> None:
    """It would write no targets."""
    with hub.consumer("t", "g", name="first") as first, hub.registry.lease(60) as lease:
        eventually(lambda: len(first.assignment) == 4)
        put = {KEYS.leader: Leader("zzz", 99).dump()}
        hub.registry.commit({}, put, {KEYS.member("zzz"): earlier_record(hub, None)}, lease)
        with pytest.raises(GroupActive, match="is led by the member old on h, which runs an earlier version"):
            first.poll(timeout=30)


def test_f7_a_member_that_comes_back_to_a_group_with_another_assignor_is_told(hub: Hub) -> None:
    with hub.consumer("t", "g", name="first") as first:
        eventually(lambda: len(first.assignment) == 4)
        with first._member.session.mutex:  # as if it had slept while its lease ended and the group was changed
            lease = first._member.lease
            assert lease is not None
            lease.close()
            other = hub.registry.lease(60)
            chosen = {KEYS.assignor: ChosenAssignor.of("range", is_agreed=True).dump()}
            hub.registry.commit({}, chosen, {KEYS.member("other"): record(hub, assignor="range")}, other)
        with pytest.raises(AssignorMismatch, match="old on h has 'range'"):
            first.poll(timeout=30)
        other.close()
