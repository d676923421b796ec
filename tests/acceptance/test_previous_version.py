"""What earlier versions left on disk is opened and goes on: no message, checkpoint, pause or queue item is missing.

Each archive was made by the `make.py` beside it, which shows what it holds: `tests/golden/0.1`, and
`tests/golden/0.2.dev1`, the last state in which the targets of all members of a group were in one key."""

from __future__ import annotations

import sqlite3
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import pxrs
from pxrs import registry
from pxrs.errors import RegistryCorrupt
from pxrs.group.records import Keys, LegacyAssignment
from pxrs.log.directory.check import check

GOLDEN = Path(__file__).parents[1] / "golden"
VERSIONS = ["0.1", "0.2.dev1"]
only_0_2_dev1 = pytest.mark.parametrize("version", ["0.2.dev1"], indirect=True)
"""The archive of 0.1 has no group whose member died."""


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def old(tmp_path: Path, version: str) -> Path:
    with tarfile.open(GOLDEN / version / "old.tar.xz") as packed:
        packed.extractall(tmp_path)  # our own archive; `filter` came with Python 3.11.4
    return tmp_path


@pytest.fixture(params=["file", "sqlite"])
def hub(request: pytest.FixtureRequest, old: Path) -> Iterator[pxrs.Hub]:
    if request.param == "file":
        opened = pxrs.open(old / "hub")
    else:
        opened = pxrs.open(old / "hub-sql", registry=f"sqlite:///{old}/registry.db")
    with opened:
        yield opened


def test_a_removed_journal_entry_is_noticed_once_this_version_has_committed(old: Path) -> None:
    """Entries of 0.1 do not say what was synced; the first commit of this version says it for all of them."""
    (directory,) = {path.parents[2] for path in (old / "hub").rglob("generations/*/snapshot")}
    url = f"file:{directory.parent}?namespace={directory.name}"
    with registry.open(url) as handle:
        before = handle.scan("")
        handle.commit(put={"new": b""})
    with registry.open(url) as handle:
        assert {entry.key for entry in handle.scan("")} >= {
            entry.key for entry in before if "/members/" not in entry.key
        }
    entries = sorted(directory.glob("generations/*/[0-9]*"))
    assert len(entries) > 10
    entries[len(entries) // 2].unlink()
    with pytest.raises(RegistryCorrupt):
        registry.open(url)


def values(hub: pxrs.Hub, topic: str) -> list[str]:
    return [value.decode() for value in hub.topic(topic).to_arrow()["value"].to_pylist()]


def test_every_message_is_read_and_more_can_be_sent(hub: pxrs.Hub) -> None:
    for topic in ("orders", "metrics", "kept"):
        expected = [f"{topic}-{number}" for number in range(300)]
        assert sorted(values(hub, topic)) == sorted(expected)
        with hub.producer(topic) as out:
            out.send("one more", key="key-1")
        assert sorted(values(hub, topic)) == sorted([*expected, "one more"])
    assert values(hub, "dead") == []
    assert [finding for checked in check(Path(hub.url)) for finding in checked.findings] == []


def test_topics_have_the_settings_that_they_were_made_with(hub: pxrs.Hub) -> None:
    topics = {topic.name: topic for topic in hub.topics()}
    assert hub.damaged_topics() == []
    assert (topics["kept"].retention_s, topics["kept"].segment_s, topics["kept"].segment_age_s) == (
        86_400,
        None,
        21_600,
    )
    assert (topics["orders"].segment_s, topics["orders"].segment_age_s) == (None, None)


def test_retention_counts_from_the_time_of_the_messages_or_of_their_files(hub: pxrs.Hub) -> None:
    """Whichever is later. The files were unpacked with the times at which they were made."""
    hub.group("careful").delete(force=True)
    topic = hub.topic("kept")
    folder = Path(topic.log.partition_folder(0))  # type: ignore[attr-defined]
    last_written = max(file.stat().st_mtime_ns for file in folder.glob("*.log")) // 1000
    last_sent = max(message.timestamp for message in topic.messages(0))
    youngest = max(last_written, last_sent)
    assert topic.log.retain(youngest) == {}
    assert topic.start(0) == 0
    tick = (
        10_000  # later versions stamp what they store; the times that the kernel gives to files are up to a tick behind
    )
    assert topic.log.retain(youngest + 86_400 * 1_000_000 + tick) == {0: 300}
    assert topic.start(0) == 300
    assert [finding for checked in check(Path(hub.url)) for finding in checked.findings] == []


def test_nothing_unread_is_removed_before_it_is_known_in_which_registry_the_groups_are(
    hub: pxrs.Hub, version: str
) -> None:
    if version == "0.1":
        assert hub.check_registry() is None, "version 0.1 does not write it down"
        with pytest.raises(pxrs.errors.RetentionPostponed):
            hub.topic("kept").retain()
        hub.consumer("kept", group="careful").close()
    hub.topic("kept").retain()
    home = hub.check_registry()
    assert home is not None
    with pxrs.open(hub.url, "memory:") as stranger, pytest.raises(pxrs.errors.WrongRegistry):
        stranger.consumer("kept", group="careful")
    with pxrs.open(hub.url, hub.registry_address) as again:
        assert again.check_registry() == home


def test_a_group_goes_on_at_its_checkpoints(hub: pxrs.Hub) -> None:
    before = hub.group("billing").describe()
    assert before.lag == 168
    with hub.consumer("orders", group="billing", until="end") as inbox:
        found = [(message.partition, message.offset) for message in inbox]
    checkpoints = {row.partition: row.checkpoint for row in before.partitions}
    ends = {row.partition: row.end for row in before.partitions}
    assert sorted(found) == [(p, at) for p in sorted(ends) for at in range(checkpoints[p] or 0, ends[p] or 0)]
    assert hub.group("billing").describe().lag == 0


@only_0_2_dev1
def test_a_group_whose_last_member_died_goes_on_with_a_target_for_each_member(hub: pxrs.Hub) -> None:
    """Its targets were in one key, which the first leader deletes; its owner keys name the dead member."""
    keys = Keys("interrupted")
    former = hub.registry.get(keys.legacy_assignment)
    assert former is not None
    before = hub.group("interrupted").describe()
    assert (before.members, before.generation) == ((), 0)
    owners = [(row.owner, row.epoch) for row in before.partitions]
    assert None not in {owner for owner, _ in owners}
    # The messages, not the lag: the topic's appends are not synced, so that its partitions end with a gap of reserved
    # offsets, unless the machine has not been started again since the archive was made.
    expected = [
        (row.partition, message.offset)
        for row in before.partitions
        for message in hub.topic("metrics").messages(row.partition)
        if message.offset >= (row.checkpoint or 0)
    ]
    assert len(expected) == 275
    with hub.consumer("metrics", group="interrupted", until="end") as inbox:
        found = [(message.partition, message.offset) for message in inbox]
        during = hub.group("interrupted").describe()
    assert sorted(found) == sorted(expected)
    assert [row.epoch for row in during.partitions] == [epoch + 1 for _, epoch in owners]
    assert during.generation > LegacyAssignment.load(former.key, former.value).generation
    assert hub.registry.get(keys.legacy_assignment) is None
    after = hub.group("interrupted").describe()
    assert (after.lag, [row.owner for row in after.partitions]) == (0, [None, None])


@only_0_2_dev1
def test_a_group_of_an_earlier_version_can_be_reset_and_deleted_before_anybody_has_joined(hub: pxrs.Hub) -> None:
    group = hub.group("interrupted")
    assert group.reset("earliest") == {"metrics": {0: 0, 1: 0}}
    group.delete()
    left = {entry.key for entry in hub.registry.scan(Keys("interrupted").root)}
    assert Keys("interrupted").legacy_assignment not in left
    with hub.consumer("metrics", group="interrupted", until="end") as inbox:
        assert len(list(inbox)) == 300


def test_a_paused_partition_is_still_paused_and_can_be_skipped(hub: pxrs.Hub, version: str) -> None:
    (row,) = hub.group("careful").describe().partitions
    assert row.paused is not None
    assert row.paused.offset == 0
    assert "a message that cannot be handled" in row.paused.error
    if version == "0.1":
        assert (row.error_type, row.traceback) == ("", ""), "0.1 kept neither"
    else:
        assert row.error_type == "ValueError"
    assert hub.group("careful").skip("kept", 0) == 0
    with hub.consumer("kept", group="careful", until="end") as inbox:
        assert [message.offset for message in inbox] == list(range(1, 300))


def test_the_items_of_queues_are_there_and_can_be_taken(hub: pxrs.Hub, version: str) -> None:
    depth = hub.queue("mail").depth()
    assert (depth.ready, depth.delayed, depth.dead) == (8, 1, 2)
    taken = []
    for _ in range(8):
        with hub.transaction() as tx:
            item = tx.take("mail", timeout=5)
            assert item is not None
            taken.append(item.value.decode())
    letters = hub.queue("mail").dead_letters().list()
    if version == "0.1":
        assert [(item.error_type, item.traceback) for item in letters] == [("", "")] * 2
    else:
        assert [item.error_type for item in letters] == ["ValueError"] * 2
    assert all(item.error for item in letters)
    dead = [item.value.decode() for item in letters]
    assert sorted([*taken, *dead]) == [f"letter-{number}" for number in range(10)]
    for number in range(5):
        with hub.transaction() as tx:
            item = tx.take("strict", timeout=5)
            assert item is not None
            assert item.value == f"step-{number}".encode()


def test_a_table_can_be_registered_beside_the_topics(hub: pxrs.Hub, old: Path) -> None:
    assert hub.sources() == []
    with sqlite3.connect(old / "shop.db") as shop:
        shop.execute("CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, body TEXT)")
        shop.execute("INSERT INTO events (body) VALUES ('paid')")
    shop.close()
    hub.add_source("events", f"sqlite:///{old}/shop.db", table="events", value_column="body", partitions=2)
    before = hub.group("billing").describe()
    with hub.consumer("events", group="billing", until="end") as inbox:
        assert [message.value for message in inbox] == [b"paid"]
    after = hub.group("billing").describe()
    assert (after.lag, after.is_lag_exact) == (before.lag, True)
    assert [each.topic for each in after.topics] == ["events", "orders"]
