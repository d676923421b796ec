"""Checkpoints of an old consumer that are imported, and messages that could not be handled."""

from __future__ import annotations

import pytest

from pxrs.consumer.consumer import Consumer
from pxrs.errors import (
    GroupActive,
    GroupError,
    InvalidGroup,
    OffsetOutOfRange,
    UnknownTopic,
)
from pxrs.group.admin import GroupHandle
from pxrs.group.listing import groups
from pxrs.group.records import Checkpoint, Paused
from pxrs.log.memory import MemoryLog
from pxrs.model import Topic
from pxrs.producer.producer import Producer
from pxrs.registry import Registry
from pxrs.registry.contract import ABSENT
from tests.unit.group_admin.workers import (
    CHECKPOINTS_AT,
    KEYS,
    PARTITIONS,
    Worker,
    before_commit,
    checkpoints,
    fill,
    id_of,
    pause,
)


def test_x21_every_partition_starts_from_its_old_checkpoint(
    registry: Registry, log: MemoryLog, group: GroupHandle
) -> None:
    offsets = {0: 6, 1: 0, 2: 10, 3: 2}
    assert group.import_checkpoint(offsets, "orders") == offsets
    assert groups(registry) == ["billing"]
    assert {row.by for row in group.describe().partitions} == {"import"}
    anna = Worker(registry, log, "anna").join().settle()
    assert dict(anna.started) == offsets
    with pytest.raises(OffsetOutOfRange, match="orders/0: offset 11"):
        GroupHandle(registry, "other", log).import_checkpoint({0: 11, 2: 1}, "orders")
    for bad in (-1, True, "3"):
        with pytest.raises(InvalidGroup):
            group.import_checkpoint(bad, "orders", force=True)  # type: ignore[arg-type]


def test_x21_a_single_position_of_a_topic_with_several_partitions_is_refused_and_passes_over_nothing(
    registry: Registry,
) -> None:
    log = MemoryLog()
    with Producer(log.create_topic(Topic("two", id_of("two"), 2))) as out:
        for partition, count in ((0, 6), (1, 4)):
            for number in range(count):
                out.send(b"%d" % number, partition=partition, timestamp=100 + number)
    group = GroupHandle(registry, "billing", log)
    for offset in (0, 3, 5):
        with pytest.raises(InvalidGroup, match=r"two has 2 partitions.*--partition 0=OFFSET.*at a time.*reset"):
            group.import_checkpoint(offset, "two", force=True)
    assert groups(registry) == []
    with Consumer(log.topic("two"), registry, "billing", until="end") as inbox:
        assert sorted((m.partition, m.offset) for m in inbox) == [
            *((0, number) for number in range(6)),
            *((1, number) for number in range(4)),
        ]


def test_x21_a_single_position_is_taken_as_it_is_where_offsets_are_global(registry: Registry) -> None:
    log = MemoryLog()
    fill(log, "one", partitions=1)
    group = GroupHandle(registry, "billing", log)
    assert group.import_checkpoint(6, "one") == {0: 6}
    with Consumer(log.topic("one"), registry, "billing", until="end") as inbox:
        assert [message.offset for message in inbox] == [6, 7, 8, 9]
    with pytest.raises(OffsetOutOfRange):
        group.import_checkpoint(11, "one", force=True)
    table = log.topic("one")
    table.has_gaps, table.partitions = True, 2  # as of a table in a database, whose offsets are the ids of its rows
    other = GroupHandle(registry, "other", MemoryLog(), sources=[table])
    assert other.import_checkpoint(10, "one") == {0: 10, 1: 10}


def test_x21_checkpoints_that_are_there_are_kept_unless_forced(registry: Registry, group: GroupHandle) -> None:
    assert group.import_checkpoint({1: 2}, "orders") == {1: 2}
    assert group.import_checkpoint(dict.fromkeys(range(PARTITIONS), 6), "orders") == {0: 6, 2: 6, 3: 6}
    assert group.import_checkpoint(dict.fromkeys(range(PARTITIONS), 7), "orders") == {}
    assert checkpoints(registry) == {0: 6, 1: 2, 2: 6, 3: 6}
    assert group.import_checkpoint(dict.fromkeys(range(PARTITIONS), 7), "orders", force=True) == dict.fromkeys(
        range(PARTITIONS), 7
    )


def test_x21_a_start_that_is_pinned_meanwhile_is_kept(
    registry: Registry, log: MemoryLog, group: GroupHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pin() -> None:
        key = KEYS.checkpoint(id_of("orders"), 1)
        registry.commit({key: ABSENT}, {key: Checkpoint(1).dump()})

    before_commit(registry, monkeypatch, pin)
    assert group.import_checkpoint(dict.fromkeys(range(PARTITIONS), 6), "orders") == {0: 6, 2: 6, 3: 6}
    assert checkpoints(registry) == {0: 6, 1: 1, 2: 6, 3: 6}


def test_x21_nothing_is_imported_while_members_are_there(
    registry: Registry, worker: Worker, group: GroupHandle
) -> None:
    for force in (False, True):
        with pytest.raises(GroupActive):
            group.import_checkpoint({0: 6}, "orders", force=force)
    assert checkpoints(registry) == CHECKPOINTS_AT
    with pytest.raises(UnknownTopic):
        GroupHandle(registry, "new", MemoryLog()).import_checkpoint({0: 6}, "orders")


# Messages that could not be handled.


def test_x14_a_paused_partition_is_told_to_try_again(registry: Registry, worker: Worker, group: GroupHandle) -> None:
    key = pause(registry, 1)
    assert group.paused("orders", 1) == Paused(3, "ValueError: no", 5.0, "anna")
    group.retry("orders", 1)
    assert registry.get(key) is None
    for ask in (group.retry, group.skip, group.paused):
        with pytest.raises(GroupError, match="partition 1 of orders is not paused"):
            ask("orders", 1)


def test_x14_a_paused_partition_is_told_to_go_on(registry: Registry, worker: Worker, group: GroupHandle) -> None:
    key = pause(registry, 1)
    with pytest.raises(GroupError, match="another message"):
        group.skip("orders", 1, offset=4)
    assert group.skip("orders", 1, offset=3) == 3
    entry = registry.get(key)
    assert entry is not None
    assert Paused.load(key, entry.value) == Paused(3, "ValueError: no", 5.0, "anna", skip=True)
    assert group.skip("orders", 1) == 3
    assert registry.get(key) == entry, "twice is once"


def test_x14_never_another_message_is_left_out_than_the_one_that_was_seen(
    registry: Registry, worker: Worker, group: GroupHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause(registry, 1)
    before_commit(registry, monkeypatch, lambda: pause(registry, 1, offset=8))
    with pytest.raises(GroupError, match="another message"):
        group.skip("orders", 1)
    assert group.paused("orders", 1).skip is False


def test_x14_a_pause_of_a_topic_that_is_gone_is_found_by_its_id(
    registry: Registry, log: MemoryLog, idle: Worker, group: GroupHandle
) -> None:
    key = pause(registry, 1)
    log.delete_topic("orders")
    group.retry(id_of("orders"), 1)
    assert registry.get(key) is None


def test_x14_trying_again_holds_whatever_else_is_decided_meanwhile(
    registry: Registry, worker: Worker, group: GroupHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = pause(registry, 1)
    before_commit(registry, monkeypatch, lambda: pause(registry, 1, offset=8))
    group.retry("orders", 1)
    assert registry.get(key) is None
