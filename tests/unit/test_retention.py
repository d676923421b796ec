"""Retention and those who have yet to read."""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
import xxhash

import pxrs
from pxrs import clock
from pxrs.errors import CheckpointOutOfRange, InvalidTopic, OffsetTrimmed, PxrsError, RegistryUnavailable
from pxrs.group.records import gate_key
from pxrs.log.batch import _LAYOUTS, MAGIC, SCHEMA, encode
from pxrs.log.contract import Append, RetentionPlan, TopicLog
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.outcomes import offsets_of
from pxrs.model import Topic
from pxrs.producer.producer import Producer

LAST_WEEK = 7 * 86_400 * 1_000_000


@pytest.mark.parametrize("place", ["memory:", "directory"])
def test_what_a_group_has_yet_to_read_is_kept_if_the_topic_says_so(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pxrs.open("memory:" if place == "memory:" else tmp_path, upkeep=False) as hub:
        topics = [
            hub.create_topic(name, partitions=1, retention=3600, segment_bytes=4096, keep_unread=name == "kept")
            for name in ("kept", "gone")
        ]
        for topic in topics:
            with hub.producer(topic.name, linger_s=0) as out:
                for number in range(10):
                    out.send(b"%d" % number + b"x" * 4096).result()
            for group, count in (("fast", 8), ("slow", 3)):
                with hub.consumer(topic.name, group) as inbox:
                    for _ in range(count):
                        inbox.poll(1)
                    inbox.commit()
        kept, gone = topics
        now = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: now() + 7200 * 10**9)
        assert gone.retain() == {0: 10}
        assert kept.retain() == {0: 3}
        assert next(kept.messages(0, 3)).value[:1] == b"3"  # type: ignore[index]
        hub.group("slow").delete()
        assert kept.retain() == {0: 8}
        for group in hub.groups():
            hub.group(group).delete(force=True)
        assert kept.retain() == {0: 10}


def test_retention_that_cannot_ask_who_reads_takes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pxrs.open("memory:", upkeep=False) as hub:
        topic = hub.create_topic("t", partitions=1, retention=1e-6, keep_unread=True)

        def away(*arguments: object) -> None:
            raise RegistryUnavailable("away")

        with hub.producer("t", linger_s=0) as out:
            out.send(b"a", timestamp=LAST_WEEK).result()
            out.send(b"b", timestamp=LAST_WEEK).result()
        with caplog.at_level(logging.WARNING), monkeypatch.context() as outage:
            outage.setattr(type(hub.registry), "_scan", away)
            report = hub.run_upkeep()
        assert "retention of t is blocked: away" in caplog.text
        assert report.errors == {"retention of t": "away", "recording owners": "away"}
        assert (topic.start(0), topic.end(0)) == (0, 2)
        assert hub.run_upkeep().removed == {"t": {"0": 2}}, "and it would have been allowed to"


def test_a_retention_that_fails_at_every_try_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RegistryUnavailable("away")

    with pxrs.open("memory:", upkeep=False) as hub, caplog.at_level(logging.WARNING):
        log = hub.create_topic("t", partitions=1, retention=1e-6).log
        monkeypatch.setattr(log, "retain", fail)
        for _ in range(20):
            assert hub.run_upkeep().errors == {"retention of t": "away"}
    assert [record.getMessage() for record in caplog.records] == ["retention of t is blocked: away; will try again"]
    assert caplog.records[0].subject == "retention of t"  # type: ignore[attr-defined]


def old_segment(path: Path, last_time_us: int, written_s: float) -> TopicLog:
    """A topic with a sealed segment of format 1, whose message has this time and whose file was written then."""
    log = DirectoryLog(path)
    topic = log.create_topic(Topic("t", uuid.uuid4().hex, 1, retention_s=100.0))
    records = pa.RecordBatch.from_pylist([{"value": b"x", "timestamp": last_time_us}], SCHEMA)
    payload = encode(records, "none")
    header = _LAYOUTS[1].pack(
        MAGIC, 1, 0, 96, -(-(96 + payload.data.size) // 32) * 32, 1, 0, last_time_us, last_time_us, bytes(16), 0, 0, 0,
        payload.checksum, payload.data.size, 0, 0,
    )  # fmt: skip
    fixed = header[:-8]  # without the checksum, which is its last field
    frame = fixed + xxhash.xxh3_64_intdigest(fixed).to_bytes(8, "little") + payload.data.to_pybytes()
    segment = Path(topic.partition_folder(0)) / f"{0:020d}.log"  # type: ignore[attr-defined]
    segment.write_bytes(frame + bytes(-len(frame) % 32))
    os.utime(segment, (written_s, written_s))
    return topic


@pytest.mark.parametrize("is_sealed", [False, True], ids=["tail", "sealed"])
@pytest.mark.parametrize(("last_time_s", "written_s"), [(1, 5000), (5000, 1)], ids=["old messages", "old file"])
def test_a_segment_without_stored_times_is_as_young_as_its_file_or_its_messages(
    last_time_s: int, written_s: int, is_sealed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = old_segment(tmp_path, last_time_s * 1_000_000, written_s)
    assert topic.end(0) == 1
    os.utime(Path(topic.partition_folder(0)) / f"{0:020d}.log", (written_s, written_s))  # type: ignore[attr-defined]
    if is_sealed:
        monkeypatch.setattr(clock, "wall_time_us", lambda: 5050 * 1_000_000)
        next_record = pa.RecordBatch.from_pylist([{"value": b"y", "timestamp": 0}], SCHEMA)
        assert offsets_of(topic.append([Append.encoded(0, next_record)])) == [1]
        assert len(list(tmp_path.glob("logs/*/partitions/*/*.log"))) == 2, "it takes no appends of another format"
    assert topic.retain(5099 * 1_000_000) == {}
    assert topic.retain(5101 * 1_000_000) == {0: 1}


def test_the_settings_of_a_segment_are_kept_and_checked(tmp_path: Path) -> None:
    with pxrs.open(tmp_path) as hub:
        hub.create_topic("given", segment_s=timedelta(minutes=5), retention=3600)
        hub.create_topic("quarter", retention=3600)
        hub.create_topic("never")
        with pytest.raises(InvalidTopic, match="segment_s"):
            hub.create_topic("bad", segment_s=0)
    with pxrs.open(tmp_path) as hub:
        ages = {topic.name: (topic.segment_s, topic.segment_age_s) for topic in hub.topics()}
    assert ages == {"given": (300.0, 300.0), "quarter": (None, 900.0), "never": (None, None)}


@pytest.fixture(params=["memory:", "directory"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[pxrs.Hub]:
    """A topic that keeps what is unread, with ten old messages, and no group."""
    with pxrs.open("memory:" if request.param == "memory:" else tmp_path, upkeep=False) as hub:
        hub.create_topic("t", partitions=1, retention=3600, segment_bytes=4096, keep_unread=True)
        with Producer(hub.topic("t").log, linger_s=0) as out:
            for _ in range(10):
                out.send(b"x" * 4096).result()
        now = time.time_ns
        with pytest.MonkeyPatch.context() as later:
            later.setattr(time, "time_ns", lambda: now() + 7200 * 10**9)
            yield hub


def offsets_read(hub: pxrs.Hub, group: str) -> list[int]:
    with hub.consumer("t", group, until="end") as inbox:
        return [message.offset for message in inbox]


@pytest.mark.parametrize("way", ["pin", "import", "reset"])
def test_o10_a_checkpoint_that_is_given_while_retention_decides_is_kept(
    kept: pxrs.Hub, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "reset":
        kept.group("new").import_checkpoint(10, "t")
    ways = {
        "pin": lambda: kept.consumer("t", "new").close(),
        "import": lambda: kept.group("new").import_checkpoint(3, "t"),
        "reset": lambda: kept.group("new").reset(3),
    }
    topic = kept.topic("t")
    plan = topic.log.plan_retention

    def interrupted(now: int, unread: Mapping[int, int] | None = None) -> RetentionPlan:
        monkeypatch.undo()
        found = plan(now, unread)
        assert found.starts == {0: 10}, "nobody has yet to read anything when retention decides"
        ways[way]()
        return found

    monkeypatch.setattr(topic.log, "plan_retention", interrupted)
    first = 0 if way == "pin" else 3
    assert topic.retain() == ({0: 3} if first else {})
    assert offsets_read(kept, "new") == list(range(first, 10))


@pytest.mark.parametrize("way", ["pin", "import", "reset"])
def test_o10_no_checkpoint_is_put_before_a_start_that_is_committed_and_not_yet_removed(
    kept: pxrs.Hub, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The process that retains is stopped between its commit and the removal."""
    topic = kept.topic("t")
    kept.group("old").import_checkpoint(6, "t")
    monkeypatch.setattr(topic.log, "trim", lambda starts: {})
    assert topic.retain() == {}
    monkeypatch.undo()
    assert topic.start(0) == 0
    if way == "import":
        with pytest.raises(OffsetTrimmed, match="the first remaining offset is 6"):
            kept.group("new").import_checkpoint(3, "t")
        kept.group("new").import_checkpoint(6, "t")
    elif way == "reset":
        with pytest.raises(OffsetTrimmed, match="the first remaining offset is 6"):
            kept.group("old").reset(3)
        assert kept.group("old").reset(datetime.fromtimestamp(0, UTC)) == {"t": {0: 6}}
        assert kept.group("old").reset("earliest") == {"t": {0: 6}}
    group = "old" if way == "reset" else "new"
    with kept.consumer("t", group, until="end") as inbox:
        assert topic.retain() == {0: 6}, "the next retention removes what the last one has committed"
        assert [message.offset for message in inbox] == list(range(6, 10))


def test_a_retention_that_failed_after_it_wrote_the_start_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start is in the registry and in the partition's folder, and the segments before it are still there."""

    def segments() -> list[int]:
        return sorted(int(file.stem) for file in tmp_path.glob("topics/t/partitions/*/*.log"))

    def fail(path: object, *arguments: object, **named: object) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    with pxrs.open(tmp_path, upkeep=False) as hub:
        topic = hub.create_topic("t", partitions=1, retention=3600, segment_bytes=4096, keep_unread=True)
        with Producer(topic.log, linger_s=0) as out:
            for _ in range(10):
                out.send(b"x" * 4096).result()
        hub.group("g").import_checkpoint(6, "t")
        now = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: now() + 7200 * 10**9)
        with pytest.MonkeyPatch.context() as failing:
            failing.setattr(os, "unlink", fail)
            with pytest.raises(PxrsError, match="may not write"):
                topic.retain()
        assert (topic.start(0), segments()[0]) == (6, 0)
        assert topic.retain() == {0: 6}
        assert segments()[0] == 6
        assert topic.retain() == {}


def test_no_checkpoint_is_given_while_the_committed_start_lies_beyond_the_end_of_an_older_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start it would pass over messages that are yet to come; before it, retention would remove them unread."""
    now = time.time_ns
    with pxrs.open(tmp_path / "data", tmp_path / "registry", upkeep=False) as hub:
        topic = hub.create_topic("t", partitions=1, retention=3600, segment_bytes=4096, keep_unread=True)
        hub.group("g").import_checkpoint(0, "t")
        with hub.producer("t", linger_s=0) as out:
            for number in range(10):
                if number == 5:
                    shutil.copytree(tmp_path / "data", tmp_path / "copy", symlinks=True)
                out.send(b"x" * 4096).result()
        hub.group("g").reset("latest")
        monkeypatch.setattr(time, "time_ns", lambda: now() + 7200 * 10**9)
        assert topic.retain() == {0: 10}
    with pxrs.open(tmp_path / "copy", tmp_path / "registry") as hub:
        for to in ("earliest", "latest", 5, {0: 5}, datetime.fromtimestamp(0, UTC)):
            with pytest.raises(CheckpointOutOfRange, match=r"t/0 ends at offset 5, .* before 10"):
                hub.group("g").reset(to)
        with pytest.raises(CheckpointOutOfRange):
            hub.group("new").import_checkpoint(5, "t")
        with pytest.raises(CheckpointOutOfRange):
            hub.consumer("t", "new")
    with pxrs.open(tmp_path / "copy", tmp_path / "another") as hub:
        hub.adopt_registry()
        assert offsets_read(hub, "new") == list(range(5))


def test_o10_a_start_that_moves_while_a_group_begins_is_read_again(
    kept: pxrs.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = kept.topic("t")
    start = topic.log.start
    monkeypatch.setattr(topic.log, "start", lambda partition: (start(partition), monkeypatch.undo(), topic.retain())[0])
    with kept.consumer("t", "new", until="end") as inbox:
        assert list(inbox) == [], "all was removed before the group was there, and nothing is missing in its eyes"
    assert topic.start(0) == 10


def test_o10_checkpoints_of_owners_do_not_touch_the_gate(kept: pxrs.Hub) -> None:
    key = gate_key(kept.topic("t").id)
    with kept.consumer("t", "g") as inbox:
        before = kept.registry.get(key)
        assert before is not None
        for _ in range(3):
            assert inbox.poll(1, timeout=30)
            inbox.commit()
    assert kept.registry.get(key) == before
    kept.create_topic("plain", partitions=1, retention=3600)
    kept.consumer("plain", "g").close()
    assert kept.registry.get(gate_key(kept.topic("plain").id)) is None, "only where retention asks the groups"


def test_a_deleted_topic_leaves_neither_start_nor_gate_behind(kept: pxrs.Hub) -> None:
    kept.consumer("t", "g").close()
    kept.group("g").reset("latest")
    assert kept.topic("t").retain() == {0: 10}
    identity = kept.topic("t").id
    assert len(kept.registry.scan(f"topics/{identity}/")) == 2
    kept.delete_topic("t")
    assert kept.registry.scan(f"topics/{identity}/") == []
