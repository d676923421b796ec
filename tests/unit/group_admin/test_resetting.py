"""A reset of a group: where it goes, what refuses it, and that it goes through the fence."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from pxrs.clock import wall_time_us
from pxrs.errors import (
    Conflict,
    GroupActive,
    GroupError,
    InvalidGroup,
    OffsetOutOfRange,
    OffsetTrimmed,
    UnknownTopic,
)
from pxrs.group.admin import GroupHandle
from pxrs.group.records import Owner
from pxrs.log.memory import MemoryLog
from pxrs.registry import Registry
from tests.unit.group_admin.workers import (
    CHECKPOINTS_AT,
    KEYS,
    PARTITIONS,
    Worker,
    before_commit,
    checkpoints,
    fill,
    id_of,
    owner,
    pause,
)


@pytest.mark.parametrize(
    ("to", "offsets"),
    [
        ("earliest", {0: 0, 1: 0, 2: 0, 3: 0}),
        ("latest", {0: 10, 1: 10, 2: 10, 3: 10}),
        (5, {0: 5, 1: 5, 2: 5, 3: 5}),
        (10, {0: 10, 1: 10, 2: 10, 3: 10}),
        (datetime.fromtimestamp(104 / 1e6, UTC), {0: 4, 1: 4, 2: 4, 3: 4}),
        (datetime(2000, 1, 1, tzinfo=UTC), {0: 10, 1: 10, 2: 10, 3: 10}),
        ({3: 1, 1: 9}, {1: 9, 3: 1}),
    ],
)
def test_a_reset_moves_the_group(
    registry: Registry, log: MemoryLog, idle: Worker, group: GroupHandle, to: Any, offsets: dict[int, int]
) -> None:
    assert group.reset(to) == {"orders": offsets}
    assert checkpoints(registry) == CHECKPOINTS_AT | offsets
    assert [row.by for row in group.describe().partitions] == ["reset" if p in offsets else "anna" for p in range(4)]
    bert = Worker(registry, log, "bert").join().settle()
    assert dict(bert.started) == CHECKPOINTS_AT | offsets


def test_g5_a_reset_bumps_the_owner(registry: Registry, idle: Worker, group: GroupHandle) -> None:
    epochs = [owner(registry, number).epoch for number in range(PARTITIONS)]
    group.reset({1: 4})
    assert owner(registry, 1) == Owner(None, epochs[1] + 1)
    assert [owner(registry, number).epoch for number in (0, 2, 3)] == [epochs[0], *epochs[2:]]


def test_a_reset_is_refused_while_members_are_there(registry: Registry, worker: Worker, group: GroupHandle) -> None:
    before = registry.scan("")
    with pytest.raises(GroupActive, match="anna"):
        group.reset("earliest")
    assert registry.scan("") == before


def test_g5_a_checkpoint_on_its_way_is_refused_after_a_reset(
    registry: Registry, worker: Worker, group: GroupHandle
) -> None:
    late = worker.late_write(0, 9)
    worker.die()
    group.reset("earliest")
    with pytest.raises(Conflict) as refused:
        registry.commit(late.expect, late.put)
    assert KEYS.owner(id_of("orders"), 0) in refused.value.keys
    assert checkpoints(registry) == dict.fromkeys(range(PARTITIONS), 0)


def test_a_forced_reset_makes_an_owner_lose_claim_again_and_start_there(
    registry: Registry, worker: Worker, group: GroupHandle
) -> None:
    worker.started.clear()
    with registry.watch(KEYS.target(worker.incarnation)) as watch:
        group.reset({0: 1, 2: 2}, force=True)
        assert watch.wait(30), "one that waits for nothing watches its target, not the owners"
    worker.commit({1: 5})
    worker.settle()
    assert sorted(worker.started) == [(0, 1), (2, 2)]
    assert checkpoints(registry) == {0: 1, 1: 5, 2: 2, 3: 7}
    assert worker.commit({0: 2}) == []
    assert owner(registry, 0).epoch == 3


@pytest.mark.parametrize("missed", [(KEYS.members,), (KEYS.members, KEYS.targets)])
def test_r1_a_member_that_a_scan_has_missed_is_told_that_a_reset_took_its_partition(
    registry: Registry, worker: Worker, group: GroupHandle, monkeypatch: pytest.MonkeyPatch, missed: tuple[str, ...]
) -> None:
    """It has joined, and claimed, while the group was scanned. If nothing told it, and nothing came that it could
    commit, the partition would have no owner, and nobody would read it again."""
    worker.started.clear()
    scan = registry.scan

    def torn(*given: Any, **named: Any) -> Any:
        found = scan(*given, **named)
        monkeypatch.setattr(registry, "scan", scan)
        return [entry for entry in found if not entry.key.startswith(missed)]

    read = group._reader.read

    def read_torn() -> Any:
        monkeypatch.setattr(group._reader, "read", read)
        monkeypatch.setattr(registry, "scan", torn)
        return read()

    state = group._reader.read_there()
    monkeypatch.setattr(group._reader, "read_there", lambda: state)
    monkeypatch.setattr(group._reader, "read", read_torn)
    with registry.watch(KEYS.target(worker.incarnation)) as watch:
        group.reset({0: 1}, force=True)
        assert watch.wait(30)
    worker.settle()
    assert worker.started == [(0, 1)]
    assert owner(registry, 0).incarnation == worker.incarnation


def test_a_reset_frees_paused_partitions(registry: Registry, idle: Worker, group: GroupHandle) -> None:
    pause(registry, 0)
    other = pause(registry, 1)
    group.reset({0: 0})
    assert [entry.key for entry in registry.scan(KEYS.paused)] == [other]


@pytest.mark.parametrize(
    ("to", "error", "words"),
    [
        (11, OffsetOutOfRange, "orders/0: offset 11 is beyond the end, 10"),
        ({0: 3, 2: 11}, OffsetOutOfRange, "orders/2"),
        (-1, InvalidGroup, "not an offset"),
        (True, InvalidGroup, "not an offset"),
        ({4: 0}, InvalidGroup, "no partition 4; it has 0 to 3"),
        ({-1: 0}, InvalidGroup, "no partition -1"),
        ({}, InvalidGroup, "no partition is named"),
        (datetime(2026, 1, 1), InvalidGroup, "time zone"),
        ("start", InvalidGroup, "'earliest', 'latest'"),
    ],
)
def test_an_offset_that_is_not_in_the_log_is_refused_and_nothing_is_written(
    registry: Registry, idle: Worker, group: GroupHandle, to: Any, error: type[Exception], words: str
) -> None:
    before = registry.scan("")
    with pytest.raises(error, match=words):
        group.reset(to)
    assert registry.scan("") == before


def test_an_offset_that_retention_took_is_refused_and_a_time_before_it_is_the_start(
    registry: Registry, log: MemoryLog
) -> None:
    fill(log, "short", 1, retention_s=1.0)
    Worker(registry, log, "anna", "short").join().settle().leave()
    log.topic("short").retain(wall_time_us() + 10_000_000)
    start = log.topic("short").start(0)
    group = GroupHandle(registry, "billing", log)
    with pytest.raises(OffsetTrimmed):
        group.reset(start - 1)
    assert group.reset(datetime(1970, 1, 1, tzinfo=UTC)) == {"short": {0: start}}


def test_offsets_are_of_one_topic_and_words_of_all_that_are_still_there(
    registry: Registry, log: MemoryLog, idle: Worker, group: GroupHandle
) -> None:
    for name in ("mail", "gone"):
        fill(log, name, 1)
        Worker(registry, log, "bert", name).join().settle().leave()
    log.delete_topic("gone")
    with pytest.raises(InvalidGroup, match="mail, orders"):
        group.reset(3)
    assert group.reset(3, topic="mail") == {"mail": {0: 3}}
    assert checkpoints(registry) == CHECKPOINTS_AT
    assert group.reset("latest") == {"mail": {0: 10}, "orders": dict.fromkeys(range(PARTITIONS), 10)}
    assert checkpoints(registry, "gone") == {0: 0}
    with pytest.raises(UnknownTopic):
        group.reset("latest", topic="gone")
    log.delete_topic("mail")
    log.delete_topic("orders")
    with pytest.raises(GroupError, match="no topic that still exists"):
        group.reset("latest")


@pytest.mark.parametrize(("limit", "commits"), [({"commit_keys_max": 7}, 2), ({"commit_bytes_max": 500}, 4)])
def test_a_change_is_split_as_the_store_demands(
    registry: Registry,
    idle: Worker,
    group: GroupHandle,
    monkeypatch: pytest.MonkeyPatch,
    limit: dict[str, int],
    commits: int,
) -> None:
    monkeypatch.setattr(registry, "limits", replace(registry.limits, **limit))
    made = itertools.count()
    commit = registry.commit
    monkeypatch.setattr(registry, "commit", lambda *a, **k: commit(*a, **k) if next(made) >= 0 else {})
    group.reset(1)
    assert checkpoints(registry) == dict.fromkeys(range(PARTITIONS), 1)
    assert next(made) == commits
    group.delete()
    assert checkpoints(registry) == {}


def test_a_forced_reset_wins_over_a_checkpoint_that_comes_in_between(
    registry: Registry, worker: Worker, group: GroupHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_commit(registry, monkeypatch, lambda: worker.commit({1: 8}))
    group.reset("earliest", force=True)
    assert checkpoints(registry) == dict.fromkeys(range(PARTITIONS), 0)


def test_a_reset_stops_when_a_member_has_come_in_between(
    registry: Registry, log: MemoryLog, idle: Worker, group: GroupHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_commit(registry, monkeypatch, lambda: Worker(registry, log, "bert").join().settle())
    with pytest.raises(GroupActive, match="bert"):
        group.reset("earliest")
    assert checkpoints(registry) == CHECKPOINTS_AT


def test_a_change_that_never_fits_ends(
    registry: Registry, idle: Worker, group: GroupHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> dict[str, int]:
        raise Conflict(["x"])

    monkeypatch.setattr(registry, "commit", refuse)
    with pytest.raises(GroupActive, match="kept changing"):
        group.reset("earliest")
