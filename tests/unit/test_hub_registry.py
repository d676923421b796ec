"""A hub belongs to one registry: who has another one may not apply `keep_unread`, nor coordinate there."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

import pxrs
from pxrs import clock
from pxrs.errors import DamagedFrame, GroupUnavailable, LogBusy, LogError, RetentionPostponed, WrongRegistry
from pxrs.group.records import Keys
from pxrs.hub_record import HubRecordFile
from pxrs.testing.waiting import eventually

HOUR_S = 3600


@pytest.fixture
def place(tmp_path: Path) -> Iterator[pxrs.Hub]:
    """A hub whose registry is in SQLite, with ten old messages of which a group has read two."""
    with pxrs.open(tmp_path / "data", f"sqlite:///{tmp_path}/reg.db", upkeep=False) as hub:
        hub.create_topic("t", partitions=1, retention=HOUR_S, segment_bytes=4096, keep_unread=True)
        hub.consumer("t", "slow").close()  # so that nothing is removed while it is sent
        fill(hub)
        read(hub, 2)
        yield hub


def fill(hub: pxrs.Hub, count: int = 10, topic: str = "t") -> None:
    """Messages that were stored a week ago."""
    with pytest.MonkeyPatch.context() as patch, hub.producer(topic, linger_s=0) as out:
        patch.setattr(clock, "wall_time_us", lambda: (time.time_ns() - 7 * 86_400 * 10**9) // 1000)
        for _ in range(count):
            out.send(b"x" * 4096).result()


def read(hub: pxrs.Hub, count: int, group: str = "slow") -> None:
    with hub.consumer("t", group) as inbox:
        for _ in range(count):
            assert inbox.poll(1, timeout=30)
        inbox.commit()


def raises_wrong_registry(inbox: pxrs.Consumer) -> bool:
    try:
        inbox.poll(1, timeout=0.01)
    except WrongRegistry:
        return True
    return False


def record_of(hub: pxrs.Hub) -> HubRecordFile:
    assert hub.parts.belonging is not None
    return hub.parts.belonging.record


def other(hub: pxrs.Hub) -> pxrs.Hub:
    """The same directory as a process sees it that was given no registry."""
    return pxrs.open(hub.url, upkeep=False)


def test_a_process_with_another_registry_does_not_retain_what_a_group_has_yet_to_read(place: pxrs.Hub) -> None:
    with other(place) as stranger:
        with pytest.raises(WrongRegistry) as refusal:
            stranger.topic("t").retain()
        assert stranger.topic("t").start(0) == 0
    assert "reg.db" in refusal.value.recorded
    assert refusal.value.given.endswith("data/registry")
    assert "pxrs registry adopt" in str(refusal.value)
    assert not Path(place.url, "registry").exists(), "a look must leave no empty registry behind"
    assert place.topic("t").retain() == {0: 2}


def test_a_process_with_another_registry_warns_once_and_removes_nothing(
    place: pxrs.Hub, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), other(place) as stranger:
        fill(stranger, 3)
        for _ in range(3):
            assert "belongs to the registry" in stranger.run_upkeep().errors["retention of t"]
        assert stranger.topic("t").start(0) == 0
    assert len([record for record in caplog.records if "retention of t" in record.message]) == 1
    assert "belongs to the registry" in caplog.text


def test_a_process_with_another_registry_neither_joins_groups_nor_changes_them_nor_has_queues(place: pxrs.Hub) -> None:
    with other(place) as stranger:
        for use in (
            lambda: stranger.consumer("t", "slow"),
            lambda: stranger.group("slow").reset("latest"),
            lambda: stranger.group("slow").import_checkpoint(5, "t"),
            lambda: stranger.group("slow").delete(),
            lambda: stranger.group("slow").retry("t", 0),
            lambda: stranger.group("slow").skip("t", 0),
            lambda: stranger.create_queue("mail"),
            stranger.queues,
            stranger.transaction,
        ):
            with pytest.raises(WrongRegistry):
                use()
        stranger.create_topic("more")
        with stranger.producer("more") as out:
            out.send(b"whoever sends needs no registry").result()
        assert [row.checkpoint for row in place.group("slow").describe().partitions] == [2]


def test_a_topic_without_keep_unread_is_retained_by_any_process(place: pxrs.Hub) -> None:
    place.create_topic("plain", partitions=1, retention=HOUR_S, segment_bytes=4096)
    with other(place) as stranger:
        fill(stranger, 3, "plain")
        stranger.topic("plain").retain()
        assert stranger.topic("plain").start(0) == 3
        assert not Path(place.url, "registry").exists()


def test_an_operator_gives_the_hub_to_another_registry(place: pxrs.Hub) -> None:
    with other(place) as new:
        before, after = new.adopt_registry()
        assert "reg.db" in before
        assert after.endswith("data/registry")
        read(new, 5)
        assert new.topic("t").retain() == {0: 5}
        with pytest.raises(WrongRegistry):
            place.topic("t").retain()
        with pytest.raises(WrongRegistry):
            place.consumer("t", "slow")


def test_a_member_of_the_old_registry_ends_when_the_hub_is_given_away(place: pxrs.Hub) -> None:
    with place.consumer("t", "slow", commit_interval=0.05) as inbox, other(place) as new:
        assert inbox.poll(1, timeout=30)
        new.adopt_registry()
        with pytest.raises(WrongRegistry):
            inbox.commit()
        assert eventually(lambda: raises_wrong_registry(inbox))


def test_a_database_transaction_writes_no_checkpoint_once_the_hub_is_given_away(
    place: pxrs.Hub, tmp_path: Path
) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/reg.db")
    with engine.begin() as db:
        db.execute(text("CREATE TABLE seen (at INTEGER)"))
    with (
        place.consumer("t", "slow", commit_interval=HOUR_S) as inbox,
        contextlib.closing(inbox.transactions(engine, 1)) as loop,
    ):
        messages, db = next(loop)
        db.execute(text("INSERT INTO seen VALUES (:at)"), {"at": messages[0].offset})
        with other(place) as new:
            new.adopt_registry()
        with pytest.raises(WrongRegistry):
            next(loop)
    assert [row.checkpoint for row in place.group("slow").describe().partitions] == [2]
    with engine.begin() as db:
        assert db.execute(text("SELECT * FROM seen")).all() == []
    engine.dispose()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), LogError("hub.record: Too many open files")])
def test_a_member_outlasts_a_record_that_cannot_be_read_for_a_moment(
    place: pxrs.Hub, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    is_away, failed = threading.Event(), threading.Event()
    record = record_of(place)
    read_record = record.read

    def read_or_fail() -> object:
        if not is_away.is_set():
            return read_record()
        if threading.current_thread().name.startswith("pxrs-member"):
            failed.set()
        raise error

    monkeypatch.setattr(record, "read", read_or_fail)
    with place.consumer("t", "slow", commit_interval=0.01) as inbox:
        assert [message.offset for message in inbox.poll(1, timeout=30)] == [2]
        is_away.set()
        with pytest.raises(GroupUnavailable, match="record cannot be read"):
            inbox.commit()
        assert failed.wait(30)
        is_away.clear()
        assert eventually(lambda: [row.checkpoint for row in place.group("slow").describe().partitions] == [3])
        assert [message.offset for message in inbox.poll(1, timeout=30)] == [3]


def test_a_new_hub_needs_its_registry_only_for_a_topic_that_keeps_the_unread(tmp_path: Path) -> None:
    unreachable = "postgresql://nobody@127.0.0.1:1/none?timeout=0.2"
    with pxrs.open(tmp_path, unreachable) as hub:
        hub.create_topic("plain", retention=HOUR_S)
        with pytest.raises(pxrs.errors.RegistryError):
            hub.create_topic("kept", retention=HOUR_S, keep_unread=True)
        assert [topic.name for topic in hub.topics()] == ["plain"]
        hub.create_topic("for-good", keep_unread=True)
    with pxrs.open(tmp_path, f"sqlite:///{tmp_path}/a.db") as hub:
        hub.create_topic("kept", partitions=1, retention=HOUR_S, keep_unread=True)
        assert hub.topic("kept").retain() == {}
    with pxrs.open(tmp_path) as stranger, pytest.raises(WrongRegistry):
        stranger.topic("kept").retain()


def test_a_hub_of_the_previous_version_retains_nothing_until_a_member_has_joined(place: pxrs.Hub) -> None:
    for file in Path(place.url).glob("hub.*"):
        file.unlink()  # as version 0.1 leaves it
    place.registry.commit(delete=[Keys("slow").home])
    url = place.registry_address
    with pxrs.open(place.url, url, upkeep=False) as hub:
        topic = hub.topic("t")
        with pytest.raises(RetentionPostponed, match="pxrs registry adopt"):
            topic.retain()
        hub.create_topic("kept", retention=HOUR_S, keep_unread=True)
        with pytest.raises(RetentionPostponed):
            topic.retain()
        assert topic.start(0) == 0
        read(hub, 1, "slow")
        assert topic.retain() == {0: 3}


def test_a_registry_in_memory_never_becomes_the_hubs_own(tmp_path: Path) -> None:
    for _ in range(2):
        with pxrs.open(tmp_path, "memory:", upkeep=False) as hub:
            if not hub.topics():
                hub.create_topic("t", partitions=1, retention=HOUR_S, segment_bytes=4096, keep_unread=True)
                fill(hub)
            read(hub, 3)
            with pytest.raises(RetentionPostponed):
                hub.topic("t").retain()
            with pytest.raises(pxrs.errors.InvalidUrl):
                hub.adopt_registry()
    with pxrs.open(tmp_path, upkeep=False) as hub:
        read(hub, 4)
        assert hub.topic("t").retain() == {0: 4}
    with pxrs.open(tmp_path, "memory:") as hub, pytest.raises(WrongRegistry):
        hub.consumer("t", "slow")


def test_what_was_decided_is_not_removed_once_the_hub_is_given_away(
    place: pxrs.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process sleeps between its commit of the new start and the removal, and the hub is given away meanwhile."""
    topic = place.topic("t")
    locked = HubRecordFile.locked
    with other(place) as new:

        def after_the_commit(record: HubRecordFile) -> contextlib.AbstractContextManager[None]:
            monkeypatch.undo()
            new.adopt_registry()
            return locked(record)

        monkeypatch.setattr(HubRecordFile, "locked", after_the_commit)
        with pytest.raises(WrongRegistry):
            topic.retain()
        assert topic.start(0) == 0


def test_giving_a_hub_away_waits_for_a_removal_within_a_bound(place: pxrs.Hub) -> None:
    record_of(place).timeout = 0.1
    with other(place) as new, record_of(place).locked():
        record_of(new).timeout = 0.1
        with pytest.raises(LogBusy, match=r"hub\.lock"):
            new.adopt_registry()
        with pytest.raises(LogBusy):
            place.topic("t").retain()
    assert place.topic("t").start(0) == 0
    assert place.topic("t").retain() == {0: 2}, "the start that was committed is removed by the next retention"


def test_a_damaged_record_stops_what_needs_it_and_is_mended_by_adopt(place: pxrs.Hub) -> None:
    record = Path(place.url) / "hub.record"
    data = bytearray(record.read_bytes())
    data[-5] ^= 1
    record.write_bytes(data)
    with pxrs.open(place.url, place.registry_address) as hub:
        with pytest.raises(DamagedFrame, match=r"hub\.record.*pxrs registry adopt"):
            hub.consumer("t", "slow")
        with pytest.raises(DamagedFrame):
            hub.topic("t").retain()
        hub.adopt_registry()
        read(hub, 1)  # although the id of the hub is another one now
        assert hub.topic("t").retain() == {0: 3}


def test_a_password_is_neither_shown_nor_stored(tmp_path: Path) -> None:
    with pxrs.open(tmp_path, "postgresql://me:secret@127.0.0.1:1/none?timeout=0.2&namespace=prod") as hub:
        assert hub.registry_address == "postgresql://me:***@127.0.0.1:1/none?namespace=prod"
