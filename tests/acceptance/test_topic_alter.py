"""Changing the settings of a topic that other processes have open, at any kill and any power loss (decision 0060).

Two open logs of one directory stand for two processes: they share nothing but the files."""

from __future__ import annotations

import os
import random
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.errors import DamagedFrame, InvalidQueue, InvalidTopic, OffsetTrimmed
from pxrs.group.records import gate_key
from pxrs.log.contract import Append, Bounds, RetentionPlan, TopicLog
from pxrs.log.directory.check import check
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.outcomes import offsets_of
from pxrs.registry.contract import Entry
from pxrs.server.serving import serving
from pxrs.testing import forked, power
from pxrs.testing.log_fixtures import new_topic, records, values_from

LOSSES = 2_500 if os.environ.get("PXRS_SOAK") else 250
DAY_US = 86_400 * 1_000_000


@pytest.fixture
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path_factory.mktemp("power")
    folder = place / f"pxrs-alter-{uuid.uuid4().hex}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[tuple[DirectoryLog, DirectoryLog]]:
    """The logs of two processes, with the topic t of one partition."""
    first, second = DirectoryLog(tmp_path), DirectoryLog(tmp_path)
    first.create_topic(new_topic("t", 1))
    yield first, second
    first.close()
    second.close()


def send(topic: TopicLog, value: bytes) -> int:
    return offsets_of(topic.append([Append.encoded(0, records([value]))]))[0]


def files(folder: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in folder.glob(f"topics/t/partitions/partition-0/{pattern}"))


def read(topic: TopicLog) -> dict[int, bytes | None]:
    """What can be read, by offset. A power loss may damage what was not synced."""
    found: dict[int, bytes | None] = {}
    offset = topic.start(0)
    while offset < topic.end(0):
        try:
            for batch in topic.read(0, offset):
                found |= enumerate(batch.records.column("value").to_pylist(), batch.base_offset)
                offset = batch.next_offset
        except DamagedFrame:
            offset += 1
    return found


def findings(folder: Path) -> list[str]:
    return [finding.what for checked in check(folder) for finding in checked.findings]


def test_another_process_uses_the_new_settings_from_its_next_append_on(
    logs: tuple[DirectoryLog, DirectoryLog], tmp_path: Path
) -> None:
    sender, operator = logs
    topic = sender.topic("t")
    for number in range(4):
        send(topic, b"%d" % number + b"x" * 4000)
    assert len(files(tmp_path, "*.log")) == 1
    operator.alter_topic("t", {"segment_bytes": 4096, "codec": "zstd"})
    assert topic.topic.codec == "none", "nobody has told it yet"
    send(topic, b"x" * 4000)
    send(topic, b"x" * 4000)
    assert topic.topic.codec == "zstd"
    assert len(files(tmp_path, "*.log")) == 3
    assert findings(tmp_path) == []


def test_a_description_that_cannot_be_read_changes_nothing_for_those_who_have_the_topic_open(
    logs: tuple[DirectoryLog, DirectoryLog], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topic = logs[0].topic("t")
    send(topic, b"a")
    (tmp_path / "topics/t/topic.json").write_text("{")
    send(topic, b"b")
    send(topic, b"c")
    assert values_from(topic, 0) == [b"a", b"b", b"c"]
    assert len([each for each in caplog.records if "stay as they were" in each.message]) == 1


def test_a_retention_that_began_before_the_change_removes_nothing_after_it(
    logs: tuple[DirectoryLog, DirectoryLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    janitor, operator = logs
    operator.alter_topic("t", {"retention_s": 3600.0, "segment_bytes": 4096})
    topic = janitor.topic("t")
    for _ in range(4):
        send(topic, b"x" * 4096)
    now = time.time_ns() // 1000 + DAY_US
    plan_retention = topic.plan_retention

    def plan(now: int, unread: Mapping[int, int] | None = None) -> RetentionPlan:
        found = plan_retention(now, unread)
        assert found.starts == {0: 4}
        operator.alter_topic("t", {"retention_s": 30 * 86_400.0})
        return found

    with monkeypatch.context() as patched:
        patched.setattr(topic, "plan_retention", plan)
        assert topic.retain(now) == {}
    assert topic.start(0) == 0
    assert topic.retain(now) == {}, "30 days are not over"
    operator.alter_topic("t", {"retention_s": 3600.0})
    assert topic.retain(now) == {0: 4}


@pytest.mark.parametrize("first", [None, 3600.0])
def test_a_first_segment_that_is_missing_is_told_whatever_the_retention_was(
    first: float | None, tmp_path: Path
) -> None:
    """Without a file `start` the setting tells what a missing segment means; a change of it must not blind anybody."""
    log = DirectoryLog(tmp_path)
    topic = log.create_topic(new_topic("t", 1, segment_bytes=4096, retention_s=first))
    for _ in range(3):
        send(topic, b"x" * 4096)
    log.alter_topic("t", {"retention_s": 3600.0 if first is None else None})
    log.close()
    assert findings(tmp_path) == []
    os.unlink(tmp_path / "topics/t/partitions/partition-0/00000000000000000000.log")
    assert any("the segment is missing" in what for what in findings(tmp_path))


def test_after_the_change_to_disk_everything_is_synced_and_offsets_are_reserved_no_more(
    logs: tuple[DirectoryLog, DirectoryLog], tmp_path: Path, boot: Callable[[], None]
) -> None:
    sender, operator = logs
    operator.alter_topic("t", {"durability": "os"})
    topic = sender.topic("t")
    send(topic, b"a")
    assert files(tmp_path, "reserved") == ["reserved"]
    operator.alter_topic("t", {"durability": "disk"})
    assert files(tmp_path, "reserved") == []
    assert send(topic, b"b") == 1
    assert files(tmp_path, "reserved") == []
    operator.alter_topic("t", {"durability": "os"})
    assert send(topic, b"c") == 2
    assert files(tmp_path, "reserved") == ["reserved"], "it was removed since this process wrote it"
    sender.close()
    boot()
    again = DirectoryLog(tmp_path)
    assert send(again.topic("t"), b"d") > 1 << 16, "the rest of the reservation is a gap"
    again.close()
    assert findings(tmp_path) == []


@pytest.fixture
def tape(fast: Path) -> power.Tape:
    """Appends of two processes while the durability changes back and forth. Its marks: the offset and value of each
    append; once all earlier ones must survive, the first offset that need not; and the durability that was set, None
    while it is being changed."""
    root = fast / "run"
    root.mkdir()
    sender, operator = DirectoryLog(root), DirectoryLog(root)
    topic = sender.create_topic(new_topic("t", 1, segment_bytes=8192))
    other = operator.topic("t")
    dice = random.Random(7)
    with power.recorded(root) as tape:
        for durability in ("os", "disk", "os", "disk", "os"):
            tape.mark(("settings", None))
            operator.alter_topic("t", {"durability": durability})
            tape.mark(("settings", durability))
            if durability == "disk":
                tape.mark(("durable", topic.end(0)))
            for number in range(3):
                value = b"%s-%d-" % (durability.encode(), number) + b"x" * dice.choice((1, 100, 3000))
                offset = send(dice.choice((topic, other)), value)
                tape.mark((offset, value))
                if durability == "disk":
                    tape.mark(("durable", offset + 1))
    sender.close()
    operator.close()
    return tape


def test_l1_a_power_loss_during_a_change_of_durability_loses_nothing_that_was_promised(
    tape: power.Tape, fast: Path, boot: Callable[[], None]
) -> None:
    seen = set()
    for seed in range(LOSSES):
        dice = random.Random(seed)
        at = dice.randrange(len(tape.events) + 1)
        target = fast / "state"
        tape.restore(at, dice.randrange, target)
        boot()
        log = DirectoryLog(target)
        topic = log.topic("t")
        seen.add(topic.topic.durability)
        durable, sent, settings = 0, {}, None
        for first, second in tape.marks(at):
            if first == "durable":
                durable = second
            elif first == "settings":
                settings = second
            else:
                sent[first] = second
        assert settings in (None, topic.topic.durability), f"seed {seed}: the change was undone"
        found = read(topic)
        assert found.keys() >= {offset for offset in sent if offset < durable}, f"seed {seed}: promised and lost"
        assert all(found[offset] == value for offset, value in sent.items() if offset in found), f"seed {seed}"
        assert send(topic, b"after") > max(sent, default=-1), f"seed {seed}: an offset was given again"
        log.close()
        shutil.rmtree(target)
    assert seen == {"disk", "os"}


# `keep_unread`.


@pytest.fixture
def hubs(tmp_path: Path) -> Iterator[tuple[pxrs.Hub, pxrs.Hub]]:
    with pxrs.open(tmp_path, upkeep=False) as first, pxrs.open(tmp_path, upkeep=False) as second:
        first.create_topic("t", partitions=1, retention=3600, segment_bytes=4096)
        with first.producer("t", linger_s=0) as out:
            for _ in range(6):
                out.send(b"x" * 4096).result()
        yield first, second


def test_o10_a_group_that_begins_by_the_former_settings_is_not_robbed(
    hubs: tuple[pxrs.Hub, pxrs.Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention has read the checkpoints when a member, which opened the topic before `keep_unread` was set, writes the
    first one of its group."""
    operator, member = hubs
    stale = member.topic("t").log
    operator.alter_topic("t", keep_unread=True)
    assert not stale.keeps_unread
    handle = operator.topic("t")
    plan_retention = handle.log.plan_retention
    rounds = []

    def plan(now: int, unread: Mapping[int, int] | None = None) -> RetentionPlan:
        found = plan_retention(now + DAY_US, unread)
        rounds.append(dict(unread or {}))
        if len(rounds) == 2:  # the gate is there by now, and the checkpoints were read
            member.consumer(stale, "late").close()
        return found

    monkeypatch.setattr(handle.log, "plan_retention", plan)
    assert handle.retain() == {}
    assert rounds == [{}, {}, {0: 0}], "the commit of the start was refused"
    with member.consumer("t", "late", until="end") as inbox:
        assert len(list(inbox)) == 6
    assert handle.retain() == {0: 6}


def test_o10_a_checkpoint_without_a_gate_is_refused_once_retention_has_made_one(
    hubs: tuple[pxrs.Hub, pxrs.Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other order: the member has found no gate when retention makes it and removes everything."""
    operator, member = hubs
    stale = member.topic("t").log
    operator.alter_topic("t", keep_unread=True)
    handle = operator.topic("t")
    monkeypatch.setattr(handle.log.clock.__class__, "wall_time_us", lambda self: time.time_ns() // 1000 + DAY_US)
    registry = member.registry
    get, bounds = registry.get, stale.bounds
    tried: list[str] = []

    def noted(key: str) -> Entry | None:
        if key == gate_key(handle.id):
            tried.append("read the gate")
        return get(key)

    def late(partitions: Iterable[int]) -> dict[int, Bounds]:
        found = bounds(partitions)
        if tried == ["read the gate"]:
            tried.append("chose an offset")
            assert handle.retain() == {0: 6}
        return found

    monkeypatch.setattr(registry, "get", noted)
    monkeypatch.setattr(stale, "bounds", late)
    with member.consumer(stale, "late", until="end") as inbox:
        assert list(inbox) == []
    reads = ["read the gate"] * 2  # once for the second commit, and once to see that no checkpoint is missing
    assert tried == ["read the gate", "chose an offset", *reads], "its first commit was refused"
    assert operator.registry.get(gate_key(handle.id)) is not None
    (found,) = operator.group("late").describe().partitions
    assert found.checkpoint == 6, "it begins behind what was removed before the group was there"


def test_o10_a_checkpoint_that_is_imported_while_keep_unread_is_set_is_refused_if_its_messages_are_gone(
    hubs: tuple[pxrs.Hub, pxrs.Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, other = hubs
    handle, registry = operator.topic("t"), other.registry
    monkeypatch.setattr(handle.log.clock.__class__, "wall_time_us", lambda self: time.time_ns() // 1000 + DAY_US)
    commit, tried = registry.commit, []

    def late(*arguments: Any, **named: Any) -> dict[str, int]:
        if not tried:
            tried.append(True)
            operator.alter_topic("t", keep_unread=True)
            assert handle.retain() == {0: 6}
        return commit(*arguments, **named)

    monkeypatch.setattr(registry, "commit", late)
    with pytest.raises(OffsetTrimmed):
        other.group("late").import_checkpoint(0, "t")
    assert tried


def test_turning_keep_unread_off_lets_retention_go_on_and_deleting_the_topic_leaves_no_keys(
    hubs: tuple[pxrs.Hub, pxrs.Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, member = hubs
    operator.alter_topic("t", keep_unread=True)
    member.consumer("t", "slow").close()
    handle = operator.topic("t")
    monkeypatch.setattr(handle.log.clock.__class__, "wall_time_us", lambda self: time.time_ns() // 1000 + DAY_US)
    assert handle.retain() == {}
    member.alter_topic("t", keep_unread=False)
    assert handle.retain() == {0: 6}
    assert operator.registry.get(gate_key(handle.id)) is not None
    operator.delete_topic("t")
    assert [entry.key for entry in operator.registry.scan("topics/")] == []


# What users meet.


def test_settings_are_changed_through_a_server_and_from_the_command_line(tmp_path: Path) -> None:
    with pxrs.open(tmp_path, upkeep=False) as hub, serving(hub) as url:
        hub.create_topic("orders", partitions=2)
        with pxrs.open(url) as client:
            topic = client.alter_topic("orders", retention=60, keep_unread=True).topic
            assert (topic.retention_s, topic.keep_unread, topic.revision) == (60.0, True, 1)
            assert hub.topic("orders").topic == topic
            with pytest.raises(InvalidTopic, match="pxrs topic copy"):
                client.alter_topic("orders", partitions=4)  # type: ignore[call-arg]
    command = ["topic", "alter", "orders", "--at", str(tmp_path)]
    done = forked.run_text("pxrs.cli", [*command, "--retention", "none", "--segment-bytes", "8192"])
    assert done.stdout.splitlines() == [
        "orders: segment_bytes is 8192 now; it was 67108864",
        "orders: retention is none now; it was 60",
    ], done.stderr
    assert (
        forked.run_text("pxrs.cli", [*command, "--retention", "none"]).stdout == "orders has these settings already\n"
    )
    fixed = forked.run_text("pxrs.cli", [*command, "--partitions", "4"])
    assert fixed.returncode == 2
    assert "`pxrs topic copy`" in fixed.stderr
    assert forked.run_text("pxrs.cli", command).returncode == 2
    assert forked.run_text("pxrs.cli", [*command, "--retention", "soon"]).returncode == 2


def fail_with_one(hub: pxrs.Hub) -> None:
    with hub.transaction() as tx:
        assert tx.take("mail", timeout=10)
        raise ZeroDivisionError


def test_a_queues_policy_and_backoff_are_changed_for_items_that_are_taken_later(tmp_path: Path) -> None:
    with pxrs.open(tmp_path) as hub:
        queue = hub.create_queue("mail")
        for _ in range(3):
            queue.put(b"poison")
            with pytest.raises(ZeroDivisionError):
                fail_with_one(hub)
        assert queue.depth().dead == 0
        done = forked.run_text("pxrs.cli", ["queue", "alter", "mail", "--at", str(tmp_path), "--times", "2"])
        assert done.stdout == "queue mail has policy consume-times (times 2) and backoff none now\n", done.stderr
        changed = hub.alter_queue("mail", backoff=pxrs.FixedBackoff(0))
        assert (changed.policy, changed.backoff) == (pxrs.ConsumeTimes(2), pxrs.FixedBackoff(0))
        while queue.depth().ready:
            with pytest.raises(ZeroDivisionError):
                fail_with_one(hub)
        assert queue.depth().dead == 3
        with pytest.raises(InvalidQueue, match="fifo cannot be changed"):
            hub.alter_queue("mail", fifo=True)  # type: ignore[call-arg]
