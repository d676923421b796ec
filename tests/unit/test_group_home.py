"""A group of a registry reads the topics of one hub (G7): a second directory that uses its name is refused."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs import registry as registries
from pxrs.errors import Conflict, GroupElsewhere
from pxrs.group.lane import Lane
from pxrs.group.protocol import MemberProtocol
from pxrs.group.records import Home, Keys, Member, Pinned
from pxrs.registry import Registry
from pxrs.registry.steps import Get, Operation, Write, drive, perform

KEYS = Keys("g")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/reg.db"


def hub_at(folder: Path, url: str, topic: str = "orders") -> pxrs.Hub:
    hub = pxrs.open(folder, url)
    hub.create_topic(topic, partitions=2)
    with hub.producer(topic) as out:
        for number in range(10):
            out.send(b"%d" % number, partition=number % 2)
    return hub


def drain(hub: pxrs.Hub, topic: str = "orders", group: str = "billing") -> int:
    with hub.consumer(topic, group, until="end") as inbox:
        return sum(1 for _ in inbox)


def test_a_second_directory_may_not_join_a_group_that_has_members_elsewhere(tmp_path: Path, url: str) -> None:
    with hub_at(tmp_path / "a", url) as a, hub_at(tmp_path / "b", url) as b, a.consumer("orders", "billing"):
        with pytest.raises(GroupElsewhere) as refusal:
            b.consumer("orders", "billing")
        assert str(tmp_path / "a") in refusal.value.theirs
        assert str(tmp_path / "b") in refusal.value.ours
        assert len(a.group("billing").describe().partitions) == 2
        b.consumer("orders", "another").close()


def test_a_second_directory_may_not_join_later_either_until_the_group_is_deleted(tmp_path: Path, url: str) -> None:
    with hub_at(tmp_path / "a", url) as a, hub_at(tmp_path / "b", url) as b:
        assert drain(a) == 10
        with pytest.raises(GroupElsewhere):
            drain(b)
        a.group("billing").delete()
        assert drain(b) == 10
        with pytest.raises(GroupElsewhere):
            drain(a)
        assert b.group("billing").describe().lag == 0


def test_a_topic_that_was_made_again_and_other_topics_of_the_hub_are_read_as_ever(tmp_path: Path, url: str) -> None:
    with hub_at(tmp_path / "a", url) as a:
        assert drain(a) == 10
        a.delete_topic("orders")
    with hub_at(tmp_path / "a", url) as a, hub_at(tmp_path / "a", url, "more") as again:
        assert drain(a) == 10
        assert drain(again, "more") == 10


def test_a_directory_that_was_renamed_is_still_the_same_hub(tmp_path: Path, url: str) -> None:
    with hub_at(tmp_path / "a", url) as a:
        assert drain(a) == 10
    shutil.move(tmp_path / "a", tmp_path / "elsewhere")
    with pxrs.open(tmp_path / "elsewhere", url) as moved:
        assert drain(moved) == 0


def test_a_group_of_the_previous_version_belongs_to_the_first_hub_that_joins(tmp_path: Path, url: str) -> None:
    with hub_at(tmp_path / "a", url) as a, hub_at(tmp_path / "b", url) as b:
        assert drain(a) == 10
        with registries.open(url) as registry:
            registry.commit(delete=[Keys("billing").home])  # version 0.1 has none
        assert drain(a) == 0
        with pytest.raises(GroupElsewhere):
            drain(b)


class Joiner:
    """A member of the group g that reads a topic of the hub of this id, moved by hand."""

    def __init__(self, registry: Registry, hub: str) -> None:
        self.registry, self.lease = registry, registry.lease(30)
        home = Home(hub, f"place of {hub}") if hub else None
        record = Member("joiner", f"topic-of-{hub}", "orders", 1)
        self.protocol = MemberProtocol(
            KEYS, uuid.uuid4().hex, record, self, lambda _number, _first: 0, lambda: 0.0, 64, 30.0, home=home
        )

    def join(self) -> Joiner:
        drive(self.protocol.join(), self.registry, self.lease)
        return self

    def perform(self, operation: Operation) -> Any:
        return perform(operation, self.registry, self.lease)

    def assigned(self, partition: int, epoch: int, offset: int) -> Lane:
        return Lane(partition, epoch, offset)

    def revoked(self, lane: Lane) -> None: ...

    def released(self, lane: Lane) -> None: ...

    def resumed(self, lane: Lane) -> None: ...

    def lost(self, lane: Lane) -> None: ...


@pytest.fixture
def registry() -> Iterator[Registry]:
    with registries.open("memory:") as handle:
        yield handle


def test_of_two_hubs_that_join_at_the_same_moment_one_is_refused(registry: Registry) -> None:
    anna, bert = Joiner(registry, "h1"), Joiner(registry, "h2")
    steps = bert.protocol.join()
    operation = next(steps)
    while not isinstance(operation, Write):
        operation = steps.send(bert.perform(operation))
    # bert has read that the group belongs to no hub, and has decided to write that it belongs to h2.
    anna.join()
    with pytest.raises(Conflict) as conflict:
        bert.perform(operation)
    assert isinstance(steps.throw(conflict.value), Get)
    with pytest.raises(GroupElsewhere, match=r"place of h1.*place of h2"):
        drive(bert.protocol.join(), registry, bert.lease)
    assert len(registry.scan(KEYS.members)) == 1


def test_a_group_that_nobody_needs_any_more_is_taken_by_the_hub_that_joins(registry: Registry) -> None:
    """A member that wrote the hub's key and died before it wrote a checkpoint must not hold the name for ever."""
    dead = Joiner(registry, "h1")
    steps = dead.protocol.join()
    operation = next(steps)
    while not isinstance(operation, Write):
        operation = steps.send(dead.perform(operation))
    dead.perform(operation)
    with pytest.raises(GroupElsewhere):
        Joiner(registry, "h2").join()
    dead.lease.close()
    Joiner(registry, "h2").join()
    with pytest.raises(GroupElsewhere):
        Joiner(registry, "h1").join()


def test_a_group_that_is_used_again_is_not_taken_by_a_hub_that_saw_it_unused(registry: Registry) -> None:
    Joiner(registry, "h1").join().lease.close()
    starts = {entry.key: Pinned().dump() for entry in registry.scan(f"{KEYS.root}starts/")}
    registry.commit(put=starts, delete=[entry.key for entry in registry.scan(KEYS.checkpoints)])  # the group is deleted
    slow = Joiner(registry, "h2")
    steps = slow.protocol.join()
    operation = next(steps)
    while not isinstance(operation, Write):
        operation = steps.send(slow.perform(operation))
    Joiner(registry, "h1").join().lease.close()  # it has left a checkpoint
    with pytest.raises(Conflict):
        slow.perform(operation)


def test_a_member_that_pins_late_finds_that_its_group_was_taken_meanwhile(registry: Registry) -> None:
    """It was stopped between its join and its first checkpoint; the group was deleted, and another hub took it."""
    late = Joiner(registry, "h1")
    steps = late.protocol.join()
    operation = next(steps)
    while not (isinstance(operation, Write) and any("/checkpoints/" in key for key in operation.put)):
        operation = steps.send(late.perform(operation))
    registry.commit(delete=[KEYS.member(late.protocol.incarnation)])  # as `delete` does
    Joiner(registry, "h2").join()
    with pytest.raises(Conflict) as conflict:
        late.perform(operation)
    assert isinstance(steps.throw(conflict.value), Get)
    with pytest.raises(GroupElsewhere):
        drive(late.protocol._pin(late.protocol.member.reads[0]), registry, late.lease)


def test_an_imported_checkpoint_makes_the_group_its_hubs_and_is_refused_elsewhere(tmp_path: Path, url: str) -> None:
    with hub_at(tmp_path / "a", url) as a, hub_at(tmp_path / "b", url) as b:
        a.group("billing").import_checkpoint({0: 1}, "orders")
        for refused in (
            lambda: b.consumer("orders", "billing"),
            lambda: b.group("billing").import_checkpoint({1: 1}, "orders"),
            lambda: b.group("billing").reset("latest", "orders"),
        ):
            with pytest.raises(GroupElsewhere):
                refused()
        assert drain(a) == 9
        b.group("billing").delete()
        b.group("billing").import_checkpoint({1: 2}, "orders")
        assert drain(b) == 8


def test_a_member_whose_source_belongs_to_no_hub_joins_any_group(registry: Registry) -> None:
    Joiner(registry, "h1").join()
    Joiner(registry, "").join()
    assert len(registry.scan(KEYS.members)) == 2
