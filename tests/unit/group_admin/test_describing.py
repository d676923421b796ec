"""Groups from outside: what is shown of them."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest

from pxrs.clock import wall_time_us
from pxrs.errors import (
    GroupError,
    InvalidGroup,
    UnknownGroup,
)
from pxrs.group.admin import GroupHandle
from pxrs.group.listing import groups
from pxrs.group.records import Checkpoint, Keys, Leader, Member, Owner
from pxrs.log.memory import MemoryLog
from pxrs.model import Topic
from pxrs.registry import Registry
from tests.unit.group_admin.workers import CHECKPOINTS_AT, KEYS, PARTITIONS, Worker, fill, id_of, pause


def test_x17_a_group_is_described_with_all_that_it_does(registry: Registry, worker: Worker, group: GroupHandle) -> None:
    found = group.describe()
    (member,) = found.members
    assert (member.incarnation, member.name, member.host, member.pid) == (worker.incarnation, "anna", "host", 7)
    assert (member.topic, member.partitions) == ("orders", PARTITIONS)
    assert (found.leader, found.generation) == (worker.incarnation, 1)
    assert [(row.topic, row.partition, row.checkpoint, row.lag) for row in found.partitions] == [
        ("orders", number, offset, 10 - offset) for number, offset in CHECKPOINTS_AT.items()
    ]
    row = found.partitions[0]
    assert (row.owner, row.owner_name, row.is_owner_there, row.target) == (
        *(worker.incarnation, "anna", True),
        worker.incarnation,
    )
    assert (row.epoch, row.by, row.start, row.end, row.paused) == (1, "anna", 0, 10, None)
    assert row.when == pytest.approx(time.time(), abs=60)
    assert found.lag == 20
    lines = str(found).splitlines()
    assert lines[0] == "group billing: 1 member, 4 partitions, generation 1, lag 20"
    assert [line.split()[:6] for line in lines[-4:]] == [
        ["orders", str(number), "1", str(offset), "10", str(10 - offset)] for number, offset in CHECKPOINTS_AT.items()
    ]


def test_x17_a_description_is_a_table(registry: Registry, worker: Worker, group: GroupHandle) -> None:
    pause(registry, 1)
    table = group.describe().to_arrow()
    assert table.column("checkpoint").to_pylist() == list(CHECKPOINTS_AT.values())
    assert table.column("error").to_pylist() == [None, "ValueError: no", None, None]
    assert table.column("paused_at").to_pylist() == [None, 3, None, None]
    assert abs(table.column("when")[0].as_py() - datetime.now(UTC)).total_seconds() < 60


def test_looking_changes_nothing(registry: Registry, worker: Worker, group: GroupHandle) -> None:
    before = registry.scan("")
    group.describe()
    groups(registry)
    assert registry.scan("") == before


def test_a_dead_owner_is_told_from_one_that_is_there(worker: Worker, group: GroupHandle) -> None:
    worker.die()
    found = group.describe()
    assert (found.members, found.leader) == ((), None)
    assert {(row.owner, row.is_owner_there) for row in found.partitions} == {(worker.incarnation, False)}


def test_a_partition_that_moves_has_an_owner_and_another_target(
    registry: Registry, log: MemoryLog, worker: Worker, group: GroupHandle
) -> None:
    bert = Worker(registry, log, "bert").join()
    worker.drive(worker.protocol.look(0.0))
    rows = group.describe().partitions
    assert sum(row.owner == worker.incarnation and row.target == bert.incarnation for row in rows) == 2
    while worker.drive(worker.protocol.look(0.0)) | bert.drive(bert.protocol.look(0.0)):
        pass
    assert [(member.name, member.partitions) for member in group.describe().members] == [("anna", 2), ("bert", 2)]


def test_an_owner_without_a_checkpoint_is_shown_and_what_a_deleted_group_left_is_not(
    registry: Registry, log: MemoryLog, idle: Worker, group: GroupHandle
) -> None:
    group.delete()
    fill(log, "mail", 1)
    Worker(registry, log, "bert", "mail").join().settle()
    assert [(row.topic, row.checkpoint) for row in group.describe().partitions] == [("mail", 0)]
    registry.commit(delete=[KEYS.checkpoint(id_of("mail"), 0)])
    assert [(row.topic, row.checkpoint, row.lag) for row in group.describe().partitions] == [("mail", None, 10)]


def test_a_topic_that_is_replaced_while_it_is_looked_up_is_not_taken_for_the_old_one(
    registry: Registry, log: MemoryLog, worker: Worker
) -> None:
    class Late(MemoryLog):
        def topics(self) -> list[Topic]:
            return log.topics()

    late = Late()
    late.create_topic(Topic("orders", id_of("new"), PARTITIONS))
    assert {row.lag for row in GroupHandle(registry, "billing", late).describe().partitions} == {None}
    for topics in (Late(), late):
        with pytest.raises(GroupError, match="still exists"):
            GroupHandle(registry, "billing", topics).reset("latest", force=True)


def test_the_lag_of_a_topic_that_is_gone_is_unknown(
    registry: Registry, log: MemoryLog, worker: Worker, group: GroupHandle
) -> None:
    log.delete_topic("orders")
    rows = group.describe().partitions
    assert {(row.topic, row.end, row.lag) for row in rows} == {("orders", None, None)}, "a member knows its name"
    worker.leave()
    found = group.describe()
    assert ({row.topic for row in found.partitions}, found.lag) == ({id_of("orders")}, 0)
    fill(log, "other")
    log.create_topic(Topic("orders", id_of("new"), PARTITIONS))
    assert {row.lag for row in group.describe().partitions} == {None}, "a later topic of that name is another one"


def test_the_lag_counts_what_retention_has_left(registry: Registry, log: MemoryLog) -> None:
    fill(log, "short", 1, retention_s=1.0)
    Worker(registry, log, "anna", "short").join().settle()
    log.topic("short").retain(wall_time_us() + 10_000_000)
    start = log.topic("short").start(0)
    (row,) = GroupHandle(registry, "billing", log).describe().partitions
    assert (row.checkpoint, row.start, row.lag) == (0, start, 10 - start)
    assert start > 0


def test_a_foreign_source_is_found_beside_the_topics(registry: Registry, worker: Worker, log: MemoryLog) -> None:
    group = GroupHandle(registry, "billing", MemoryLog(), sources=[log.topic("orders")])
    assert group.describe().lag == 20
    worker.leave()
    assert group.reset("latest") == {"orders": dict.fromkeys(range(PARTITIONS), 10)}


def test_an_unknown_group_is_an_error_and_a_bad_name_too(group: GroupHandle, registry: Registry) -> None:
    for ask in (group.describe, group.delete, lambda: group.reset("latest"), lambda: group.retry("orders", 0)):
        with pytest.raises(UnknownGroup):
            ask()
    with pytest.raises(InvalidGroup):
        GroupHandle(registry, "a/b", MemoryLog())


def test_groups_are_listed_by_name_whatever_their_keys_sort_like(registry: Registry) -> None:
    names = ["a", "a-b", "a.b", "a0", "a0b", "b", "Z"]
    for name in names:
        keys = Keys(name)
        registry.commit(put={keys.checkpoint("t", number): Checkpoint(0).dump() for number in range(3)})
        registry.commit(put={keys.owner("t", 0): Owner(None, 1).dump(), keys.leader: Leader("", 1).dump()})
    with registry.lease(30) as lease:
        member = {Keys("only-members").member("i"): Member("m", "t", "t", 1).dump()}
        registry.commit(ephemeral=member, lease=lease)
        registry.commit(put={Keys("retired").owner("t", 0): Owner(None, 1).dump(), "groupsx/y": b"", "groups/!/x": b""})
        assert groups(registry) == sorted([*names, "only-members"])
