"""A group that is deleted: what goes, what stays as a guard, and who was on the way; changes whose process dies."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

import pytest

from pxrs.errors import (
    Conflict,
    GroupActive,
    UnknownGroup,
)
from pxrs.group.admin import GroupHandle
from pxrs.group.listing import groups
from pxrs.group.records import Owner, Pinned, Target
from pxrs.log.memory import MemoryLog
from pxrs.registry import Registry
from tests.unit.group_admin.workers import KEYS, PARTITIONS, Worker, before_commit, checkpoints, id_of, owner, pause


def test_r4_a_deleted_group_is_gone_but_its_guards_stay(registry: Registry, idle: Worker, group: GroupHandle) -> None:
    pause(registry, 1)
    epochs = [owner(registry, number).epoch for number in range(PARTITIONS)]
    group.delete()
    assert groups(registry) == []
    with pytest.raises(UnknownGroup):
        group.describe()
    left = [KEYS.assignor, KEYS.leader, *(KEYS.owner(id_of("orders"), number) for number in range(PARTITIONS))]
    assert [entry.key for entry in registry.scan("groups/")] == [*left, KEYS.starts(id_of("orders"))]
    starts = registry.get(KEYS.starts(id_of("orders")))
    assert starts is not None
    assert Pinned.load(starts.key, starts.value) == Pinned(0), "no partition has a start any more"
    assert [owner(registry, number) for number in range(PARTITIONS)] == [Owner(None, epoch + 1) for epoch in epochs]
    with pytest.raises(UnknownGroup):
        group.delete()


def test_who_consumes_under_a_deleted_name_starts_afresh(
    registry: Registry, log: MemoryLog, idle: Worker, group: GroupHandle
) -> None:
    group.delete()
    bert = Worker(registry, log, "bert", begins=4).join().settle()
    assert sorted(bert.started) == [(number, 4) for number in range(PARTITIONS)]
    assert bert.commit({0: 6}) == []
    found = group.describe()
    assert (found.leader, found.partitions[0].checkpoint) == (bert.incarnation, 6)
    assert found.partitions[0].epoch > 2, "an epoch never comes back"


def test_g6_a_member_that_joins_while_the_group_is_deleted_is_sent_away(
    registry: Registry, log: MemoryLog, idle: Worker, group: GroupHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes it that every partition has a checkpoint, because `starts` says so until the last one is removed."""
    joined: list[Worker] = []

    def commit(*arguments: Any, **named: Any) -> dict[str, int]:
        if "put" in named and any("/starts/" in key for key in named["put"]) and not joined:
            joined.append(Worker(registry, log, "bert"))
            joined[0].join()
        return real(*arguments, **named)

    real = registry.commit
    monkeypatch.setattr(registry, "commit", commit)
    group.delete()
    assert joined
    assert registry.get(KEYS.member(joined[0].incarnation)) is None


def test_a_group_with_members_is_not_deleted(registry: Registry, worker: Worker, group: GroupHandle) -> None:
    before = registry.scan("")
    with pytest.raises(GroupActive):
        group.delete()
    assert registry.scan("") == before


def test_r4_no_write_from_before_passes_after_a_deletion(
    registry: Registry, log: MemoryLog, worker: Worker, group: GroupHandle
) -> None:
    late = worker.late_write(0, 9)
    leader = registry.get(KEYS.leader)
    assert leader is not None
    worker.die()
    group.delete()
    bert = Worker(registry, log, "bert", begins=4).join().settle()
    target = registry.get(KEYS.target(bert.incarnation))
    assert target is not None
    checkpoint_key = KEYS.checkpoint(id_of("orders"), 0)
    checkpoint = registry.get(checkpoint_key)
    assert checkpoint is not None
    # As on a store that counts a key's versions anew: whatever was made again has the expected version.
    with pytest.raises(Conflict) as refused:
        registry.commit({**late.expect, checkpoint_key: checkpoint.version}, late.put)
    assert refused.value.keys == (KEYS.owner(id_of("orders"), 0),)
    with pytest.raises(Conflict) as refused:
        registry.commit(
            {KEYS.leader: leader.version, target.key: target.version},
            {target.key: Target(2).dump()},
        )
    assert refused.value.keys == (KEYS.leader,)


def test_r4_a_target_on_its_way_is_refused_after_a_deletion(
    registry: Registry, worker: Worker, group: GroupHandle
) -> None:
    leader = registry.get(KEYS.leader)
    assert leader is not None
    worker.die()
    group.delete()
    with pytest.raises(Conflict):
        registry.commit({KEYS.leader: leader.version}, {KEYS.target(worker.incarnation): Target(2).dump()})


def test_a_target_that_is_written_while_the_group_is_deleted_is_deleted_too(
    registry: Registry, log: MemoryLog, worker: Worker, group: GroupHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first target of a member, written after the member's key was deleted and before the leader's term has
    ended."""
    bert = Worker(registry, log, "bert").join()
    leader = registry.get(KEYS.leader)
    assert leader is not None
    written = []

    def commit(*arguments: Any, **named: Any) -> dict[str, int]:
        versions = real(*arguments, **named)
        if KEYS.member(bert.incarnation) in named.get("delete", ()):
            written.append(real({KEYS.leader: leader.version}, {KEYS.target(bert.incarnation): Target(2).dump()}))
        return versions

    real = registry.commit
    monkeypatch.setattr(registry, "commit", commit)
    group.delete(force=True)
    assert written
    assert registry.scan(KEYS.targets) == []


def test_r4_what_an_administrator_had_on_the_way_is_refused_after_a_deletion(
    registry: Registry, log: MemoryLog, group: GroupHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[tuple[Any, Any]] = []

    def hang(*arguments: Any, **named: Any) -> dict[str, int]:
        late.append((arguments, named))
        return {}

    with monkeypatch.context() as patch:
        patch.setattr(registry, "commit", hang)
        group.import_checkpoint(dict.fromkeys(range(PARTITIONS), 5), "orders")  # its commit hangs somewhere
    Worker(registry, log, "anna").join().leave()  # it has pinned, and owned nothing
    group.delete()
    ((arguments, named),) = late
    with pytest.raises(Conflict):
        registry.commit(*arguments, **named)
    assert groups(registry) == []


def test_a_forced_deletion_sends_the_members_away(
    registry: Registry, log: MemoryLog, worker: Worker, group: GroupHandle
) -> None:
    group.delete(force=True)
    assert groups(registry) == []
    worker.settle()
    assert worker.protocol.is_gone
    assert not worker.protocol.held
    again = Worker(registry, log, "anna", begins=2).join().settle()
    assert sorted(again.started) == [(number, 2) for number in range(PARTITIONS)]


def test_a_member_that_joins_while_the_group_is_deleted_joins_again(
    registry: Registry, log: MemoryLog, idle: Worker, group: GroupHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    bert = Worker(registry, log, "bert")
    before_commit(registry, monkeypatch, lambda: bert.join().settle())
    group.delete()
    bert.settle()
    assert bert.protocol.is_gone, "it has found checkpoints that are not there any more"
    assert groups(registry) == []


class Killed(BaseException):
    """What ends a process between two of its commits."""


def kill_after(registry: Registry, monkeypatch: pytest.MonkeyPatch, commits: int) -> None:
    commit, left = registry.commit, [None] * commits

    def counted(*arguments: Any, **named: Any) -> dict[str, int]:
        if not left:
            raise Killed
        left.pop()
        return commit(*arguments, **named)

    monkeypatch.setattr(registry, "commit", counted)


def settle_together(*workers: Worker) -> None:
    for _ in range(20):
        for worker in workers:
            worker.settle()


@pytest.mark.parametrize(("keys_max", "commits"), [(4096, 1), (8, 1), (8, 2)])
@pytest.mark.parametrize("action", ["reset", "delete"])
def test_members_that_are_idle_claim_again_what_a_change_took_whose_process_died(
    registry: Registry, log: MemoryLog, monkeypatch: pytest.MonkeyPatch, keys_max: int, commits: int, action: str
) -> None:
    anna, bert = Worker(registry, log, "anna").join().settle(), Worker(registry, log, "bert").join()
    settle_together(anna, bert)
    assert len(anna.protocol.held) == len(bert.protocol.held) == 2
    anna.started.clear()
    bert.started.clear()
    monkeypatch.setattr(registry, "limits", replace(registry.limits, commit_keys_max=keys_max))
    kill_after(registry, monkeypatch, commits)
    group = GroupHandle(registry, "billing", log)
    with contextlib.suppress(Killed):  # a reset that needs no more commits than it has left is whole
        group.reset(5, force=True) if action == "reset" else group.delete(force=True)
    monkeypatch.undo()
    settle_together(anna, bert)
    held = {number: owner(registry, number).incarnation for number in range(PARTITIONS)}
    assert held == {n: worker.incarnation for worker in (anna, bert) for n in worker.protocol.held}
    assert len(held) == PARTITIONS
    claimed = dict(anna.started + bert.started)
    assert claimed == {number: checkpoints(registry)[number] for number in claimed}
    assert len(claimed) >= (2 * commits if keys_max == 8 else PARTITIONS)


def test_a_change_does_not_undo_what_the_leader_assigns_meanwhile(
    registry: Registry, log: MemoryLog, worker: Worker, group: GroupHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    bert = Worker(registry, log, "bert")

    def assign() -> None:
        """Of the two writes of a rebalance only the first: no owner has changed yet."""
        bert.join()
        worker.drive(worker.protocol.look(time.monotonic()))

    before_commit(registry, monkeypatch, assign)
    group.reset(5, force=True)
    entry = registry.get(KEYS.target(worker.incarnation))
    assert entry is not None
    assert Target.load(entry.key, entry.value).generation == 2
    settle_together(worker, bert)
    assert len(worker.protocol.held) == len(bert.protocol.held) == 2
    assert set(checkpoints(registry).values()) == {5}
