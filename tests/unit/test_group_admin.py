"""Groups from outside: what is shown of them, and that what an administrator does goes through the fence."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pxrs import registry as registries
from pxrs.clock import wall_time_us
from pxrs.consumer.consumer import Consumer
from pxrs.errors import (
    Conflict,
    GroupActive,
    GroupError,
    InvalidGroup,
    OffsetOutOfRange,
    OffsetTrimmed,
    UnknownGroup,
    UnknownTopic,
)
from pxrs.group.admin import GroupHandle, groups
from pxrs.group.lane import Lane
from pxrs.group.protocol import MemberProtocol
from pxrs.group.records import Checkpoint, Keys, Leader, Member, Owner, Paused, Pinned, Target
from pxrs.log.memory import MemoryLog
from pxrs.model import Topic
from pxrs.producer.producer import Producer
from pxrs.registry import Registry
from pxrs.registry.contract import ABSENT
from pxrs.registry.steps import Steps, Write, drive

PARTITIONS = 4
KEYS = Keys("billing")
CHECKPOINTS_AT = {0: 3, 1: 0, 2: 10, 3: 7}


@pytest.fixture(params=["memory", "file"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Registry]:
    with registries.open("memory:" if request.param == "memory" else tmp_path / "registry") as handle:
        yield handle


@pytest.fixture
def log() -> MemoryLog:
    """The topic orders, in each partition 10 messages, of the times 100 to 109."""
    log = MemoryLog()
    fill(log, "orders")
    return log


@pytest.fixture
def group(registry: Registry, log: MemoryLog) -> GroupHandle:
    return GroupHandle(registry, "billing", log)


def id_of(topic: str) -> str:
    """An id as topics have them: it looks like a random UUID, and is always the same."""
    return uuid.UUID(bytes=hashlib.md5(topic.encode()).digest(), version=4).hex


def fill(log: MemoryLog, name: str, partitions: int = PARTITIONS, **settings: Any) -> None:
    with Producer(log.create_topic(Topic(name, id_of(name), partitions, **settings))) as out:
        for partition, number in itertools.product(range(partitions), range(10)):
            out.send(b"x", partition=partition, timestamp=100 + number)


class Worker:
    """A member, moved by hand."""

    def __init__(self, registry: Registry, log: MemoryLog, name: str, topic: str = "orders", begins: int = 0) -> None:
        source = log.topic(topic)
        self.registry, self.lease = registry, registry.lease(30)
        self.started: list[tuple[int, int]] = []
        member = Member(name, source.id, source.name, source.partitions, "host", 7, time.time())
        keys_max = registry.limits.commit_keys_max
        self.incarnation = f"{name}-{uuid.uuid4().hex[:6]}"
        self.protocol = MemberProtocol(
            KEYS,
            self.incarnation,
            member,
            self,
            lambda _number, first: max(begins, first),
            time.time,
            keys_max,
            handover_s=30.0,
        )

    def drive(self, steps: Steps[Any]) -> Any:
        return drive(steps, self.registry, self.lease)

    def join(self) -> Worker:
        self.drive(self.protocol.join())
        return self

    def settle(self) -> Worker:
        while self.drive(self.protocol.look(time.monotonic())):
            pass
        return self

    def commit(self, done: dict[int, int]) -> list[int]:
        for partition, offset in done.items():
            lane = self.protocol.held[partition].lane
            lane.done = lane.position = offset
        return self.drive(self.protocol.commit(done))  # type: ignore[no-any-return]

    def late_write(self, partition: int, offset: int) -> Write:
        """A checkpoint that is on its way."""
        holding = self.protocol.held[partition]
        assert holding.checkpoint_version is not None
        key = KEYS.checkpoint(id_of("orders"), partition)
        expect = {KEYS.owner(id_of("orders"), partition): holding.version, key: holding.checkpoint_version}
        return Write(expect, {key: Checkpoint(offset, 0.0, "anna", holding.epoch).dump()})

    def leave(self) -> None:
        self.drive(self.protocol.commit(list(self.protocol.held), is_last=True))
        self.lease.close()

    def die(self) -> None:
        self.lease.close()

    def assigned(self, partition: int, epoch: int, offset: int) -> Lane:
        self.started.append((partition, offset))
        return Lane(partition, epoch, offset)

    def revoked(self, lane: Lane) -> None: ...

    def released(self, lane: Lane) -> None: ...

    def lost(self, lane: Lane) -> None: ...


@pytest.fixture
def worker(registry: Registry, log: MemoryLog) -> Worker:
    """It owns everything, and has read some of it."""
    anna = Worker(registry, log, "anna").join().settle()
    anna.commit(CHECKPOINTS_AT)
    return anna


@pytest.fixture
def idle(worker: Worker) -> Worker:
    """The group has been left by its only member."""
    worker.leave()
    return worker


def checkpoints(registry: Registry, topic: str = "orders") -> dict[int, int]:
    entries = registry.scan(f"{KEYS.checkpoints}{id_of(topic)}/")
    return {int(entry.key[-5:]): Checkpoint.load(entry.key, entry.value).offset for entry in entries}


def owner(registry: Registry, partition: int) -> Owner:
    entry = registry.get(KEYS.owner(id_of("orders"), partition))
    assert entry is not None
    return Owner.load(entry.key, entry.value)


def pause(registry: Registry, partition: int, offset: int = 3, topic: str = "orders") -> str:
    key = KEYS.pause(id_of(topic), partition)
    registry.commit(put={key: Paused(offset, "ValueError: no", 5.0, "anna").dump()})
    return key


def before_commit(registry: Registry, monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Let it happen once, between what the next commit's caller has read and that commit."""
    commit = registry.commit
    actions = [action]

    def interrupted(*arguments: Any, **named: Any) -> dict[str, int]:
        if actions:
            actions.pop()()
        return commit(*arguments, **named)

    monkeypatch.setattr(registry, "commit", interrupted)


# Looking.


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
        with pytest.raises(GroupError, match="still there"):
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


# Reset.


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
        (-1, InvalidGroup, "no offset"),
        (True, InvalidGroup, "no offset"),
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
    with pytest.raises(GroupError, match="no topic that is still there"):
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
    with pytest.raises(GroupActive, match="faster"):
        group.reset("earliest")


# Delete.


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


# A process that dies in the middle of a change.


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


# The checkpoint of an old consumer.


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
        with pytest.raises(GroupError, match="has not paused partition 1 of orders"):
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
