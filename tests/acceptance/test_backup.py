"""V5: backups and restorations: interrupted, damaged, brought up to date; the restored hub is another one."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import pxrs
from pxrs.backup.keys import is_item, keys_at_one_moment
from pxrs.backup.making import Progress
from pxrs.backup.rebirth import EPOCH_STEP, reborn
from pxrs.backup.restoring import restore, verify
from pxrs.backup.target import read_manifest
from pxrs.errors import (
    BackupDamaged,
    BackupError,
    BackupIncomplete,
    InvalidUrl,
    RestoreRefused,
    StorageFull,
    WrongRegistry,
)
from pxrs.group.records import Home, Keys, Owner
from pxrs.hub_record import HubRecordFile
from pxrs.registry.contract import Entry
from pxrs.registry.memory import MemoryRegistry
from pxrs.registry.values import Snapshot
from pxrs.testing.command import Call, run_here
from pxrs.testing.transfer import rows_of
from tests.acceptance.backup_steps import Between, Interrupted, a_hub, back_up, read, restored, send


def test_an_interrupted_backup_is_none_and_the_next_run_copies_what_is_missing(tmp_path: Path) -> None:
    def tell(progress: Progress) -> None:
        if progress.done_bytes > 8_000:
            raise Interrupted

    with a_hub(tmp_path / "hub") as hub:
        with pytest.raises(Interrupted):
            back_up(hub, tmp_path / "b", tell)
        with pytest.raises(BackupIncomplete, match="interrupted: run it again"):
            verify(tmp_path / "b", lambda progress: None)
        resumed = back_up(hub, tmp_path / "b")
        assert resumed.kept_bytes > 4_000
        assert resumed.kept_bytes + resumed.copied_bytes == resumed.manifest.bytes
        rows = rows_of(hub.topic("orders"))
    with restored(tmp_path / "b", tmp_path / "new") as copy:
        assert rows_of(copy.topic("orders")) == rows


def test_a_backup_is_brought_up_to_date_and_the_last_one_stays_whole_until_then(tmp_path: Path) -> None:
    with a_hub(tmp_path / "hub") as hub:
        back_up(hub, tmp_path / "b")
        before = rows_of(hub.topic("orders"))
        send(hub, 60)

        def tell(progress: Progress) -> None:
            if progress.stage == "writing the manifest":
                raise Interrupted

        with pytest.raises(Interrupted):
            back_up(hub, tmp_path / "b", tell)
        with restored(tmp_path / "b", tmp_path / "first") as copy:
            assert rows_of(copy.topic("orders")) == before
        made = back_up(hub, tmp_path / "b")
        assert made.kept_bytes > 8_000, "sealed segments are copied once"
        named = {file.path for file in made.manifest.files}
        there = {str(each.relative_to(tmp_path / "b")) for each in (tmp_path / "b").rglob("*") if each.is_file()}
        assert there - named == {"backup.json", "backup.lock"}, "what the last backup alone had is removed"
        with restored(tmp_path / "b", tmp_path / "second") as copy:
            assert rows_of(copy.topic("orders")) == rows_of(hub.topic("orders"))


def test_a_backup_of_another_hub_is_not_overwritten(tmp_path: Path) -> None:
    with a_hub(tmp_path / "hub") as hub, a_hub(tmp_path / "other") as other:
        back_up(hub, tmp_path / "b")
        with pytest.raises(BackupError, match="another hub"):
            back_up(other, tmp_path / "b")
        with pytest.raises(InvalidUrl, match="lie in each other"):
            back_up(hub, tmp_path / "hub" / "b")


@pytest.mark.parametrize("harm", ["a flipped bit", "a cut file", "a missing file", "the manifest"])
def test_a_damaged_backup_is_refused_before_anything_is_written(harm: str, tmp_path: Path) -> None:
    with a_hub(tmp_path / "hub") as hub:
        back_up(hub, tmp_path / "b")
    file = (
        tmp_path / "b" / (next(each for each in read_manifest(tmp_path / "b").files if each.path.endswith(".log"))).path
    )
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    match harm:
        case "a flipped bit":
            file.write_bytes(data)
        case "a cut file":
            os.truncate(file, 100)
        case "a missing file":
            file.unlink()
        case "the manifest":
            file = tmp_path / "b" / "backup.json"
            file.write_text(file.read_text().replace("orders", "prders"))
    with pytest.raises(BackupDamaged) as raised:
        restored(tmp_path / "b", tmp_path / "new")
    assert raised.value.file == str(file)
    assert not (tmp_path / "new").exists()


def test_a_restoration_needs_an_empty_directory_and_an_empty_registry(tmp_path: Path) -> None:
    with a_hub(tmp_path / "hub") as hub:
        back_up(hub, tmp_path / "b")
        before = sorted(map(str, (tmp_path / "hub").rglob("*")))
        with pytest.raises(RestoreRefused, match="not empty"):
            restored(tmp_path / "b", tmp_path / "hub")
        hub.create_queue("jobs")
        with pytest.raises(RestoreRefused, match=r"the registry .* is not empty"):
            restore(tmp_path / "b", read_manifest(tmp_path / "b"), tmp_path / "new", hub.registry, "x", lambda _: None)
        assert not (tmp_path / "new").exists()
        assert {each for each in before if "registry" not in each} <= set(map(str, (tmp_path / "hub").rglob("*")))


def test_a_restoration_that_fails_leaves_no_topics_and_says_what_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **named: object) -> None:
        raise StorageFull("no room")

    with a_hub(tmp_path / "hub") as hub:
        hub.create_queue("jobs")
        back_up(hub, tmp_path / "b")
    registry = MemoryRegistry()
    monkeypatch.setattr(registry, "commit", full)
    with pytest.raises(StorageFull) as raised:
        restore(tmp_path / "b", read_manifest(tmp_path / "b"), tmp_path / "new", registry, "x", lambda progress: None)
    assert "remove what is there" in raised.value.__notes__[0]
    with pxrs.open(tmp_path / "new", "memory:") as copy:
        assert copy.topics() == []


def test_g7_the_restored_hub_is_another_one_and_the_two_are_not_confused(tmp_path: Path) -> None:
    with a_hub(tmp_path / "hub") as hub:
        with hub.consumer("orders", group="g", start="earliest") as member:
            message = member.poll(1, timeout=10)[0]
            back_up(hub, tmp_path / "b")
        old = HubRecordFile(tmp_path / "hub").read()
        with restored(tmp_path / "b", tmp_path / "new") as copy:
            new = HubRecordFile(tmp_path / "new").read()
            assert old is not None
            assert new is not None
            assert {old.hub, old.registry}.isdisjoint({new.hub, new.registry})
            described = copy.group("g").describe()
            assert not described.members, "leases and ephemeral keys are not restored"
            # The member of the copied hub lives on there, and does not keep the restored group from going on at once.
            found = read(copy, 60)
            assert len(found) == 60
            assert all(each.epoch > message.epoch + 1_000 for each in found)
        with pxrs.open(tmp_path / "new", tmp_path / "hub" / "registry") as wrong, pytest.raises(WrongRegistry):
            wrong.consumer("orders", group="g")
        with pxrs.open(tmp_path / "hub", tmp_path / "new" / "registry") as wrong, pytest.raises(WrongRegistry):
            wrong.consumer("orders", group="g")


def test_topics_that_come_and_go_while_the_backup_is_made(tmp_path: Path) -> None:
    with a_hub(tmp_path / "hub") as hub:
        hub.create_topic("gone", partitions=2)
        send(hub, 2, "gone")
        read(hub, 1, topic="gone")
        former = hub.topic("gone").id

        def between() -> None:
            hub.delete_topic("gone")
            hub.create_topic("new", partitions=2)

        made = back_up(hub, tmp_path / "b", registry=Between(hub.registry, between))
        assert former in made.manifest.deleted
        with restored(tmp_path / "b", tmp_path / "new") as copy:
            assert {topic.name for topic in copy.topics()} == {"orders", "new"}
            assert len(read(copy, 60)) == 60


@pytest.mark.parametrize("keep_unread", [True, False])
def test_o10_retention_that_outruns_the_backup_takes_nothing_from_a_group(keep_unread: bool, tmp_path: Path) -> None:
    """The group reads on and retention removes what it has read, after the registry was copied."""
    with a_hub(tmp_path / "hub", retention_bytes=4_096, keep_unread=keep_unread) as hub:
        read(hub, 1)
        if keep_unread:
            hub.run_upkeep()
        count = 0

        def between() -> None:
            nonlocal count
            count += 1
            if count == 1:
                send(hub, 80)
                read(hub, 100 if keep_unread else 139)
                hub.run_upkeep()
                send(hub, 4)

        made = back_up(hub, tmp_path / "b", registry=Between(hub.registry, between))
        assert count == 2, "the registry was copied a second time"
        assert any(part.start for topic in made.manifest.topics for part in topic.partitions)
        with restored(tmp_path / "b", tmp_path / "new") as copy:
            lag = copy.group("g").describe().lag
            assert lag
            assert len(read(copy, lag)) == lag


def test_what_the_copied_hub_lacks_is_a_gap_in_the_restored_one(tmp_path: Path) -> None:
    """A hub that is itself a copy that was made under load (decision 0013)."""
    with a_hub(tmp_path / "hub") as hub:
        folder = tmp_path / "hub" / "logs" / hub.topic("orders").id / "partitions" / "partition-0"
        last = max(folder.glob("*.log"))
        os.truncate(last, last.stat().st_size - 40)
    with pxrs.open(tmp_path / "hub", upkeep=False) as hub:
        back_up(hub, tmp_path / "b")
        with restored(tmp_path / "b", tmp_path / "new") as copy:
            assert copy.topic("orders").end(0) == 30
            assert len(rows_of(copy.topic("orders"))) == 58
            send(copy, 2)
            assert copy.topic("orders").end(0) == 31


def test_items_that_moved_while_the_keys_were_read_are_looked_up_by_id() -> None:
    """As on ZooKeeper, which lists the keys of a moment and is asked for the values of new ones after it."""
    registry = MemoryRegistry()
    registry.commit(put={"items/q/inflight/5000.b.1~tx~taker": b"{}\nb", "a": b""})
    ready, moved = "items/q/ready/5000.a.0", "items/q/ready/5000.b.0"

    class Unsteady:
        url = "memory:"
        scan = registry.scan
        calls = 0

        def snapshot(self, is_written_once: Callable[[str], bool]) -> Snapshot:
            self.calls += 1
            assert is_written_once(ready)
            unread = (ready, moved) if self.calls == 2 else (ready, "items/q/ready/5000.gone.0")
            seen = {"items/q/delayed/00~5000.a.1": b"{}\na"}
            return Snapshot((Entry("a", b"", 1),), "now", unread, seen)

    store = Unsteady()
    keys, _ = keys_at_one_moment(store)  # type: ignore[arg-type]
    assert keys == {"a": b"", ready: b"{}\na", moved: b"{}\nb"}
    assert store.calls == 2, "an item that is gone altogether needs another moment"
    assert not is_item("items/q/turn")


def test_the_keys_of_the_restored_hub_name_the_new_hub() -> None:
    ours, other = Keys("ours"), Keys("theirs")
    found, left_out = reborn(
        {
            "spark/registry": b"the old id",
            "upkeep/old/janitor": b"{}",
            ours.home: Home("old", "there").dump(),
            ours.owner("t", 0): Owner("me", 7, "w").dump(),
            ours.owner("t", 1): Owner("me", 5_000_000).dump(),
            ours.checkpoint("t", 1): b"{}",
            ours.checkpoint("t", 2): b"{}",
            other.home: Home("another", "elsewhere").dump(),
            other.owner("t", 0): Owner("me", 7).dump(),
            other.checkpoint("t", 1): b"{}",
            "spark/routed/old.query": b"{}",
            "spark/t/query": b"{}",
            "queues/jobs": b"{}",
        },
        "old",
        "new",
        "here",
        4_000_000,
    )
    assert found == {
        ours.home: Home("new", "here").dump(),
        ours.owner("t", 0): Owner("me", 4_000_000, "w").dump(),
        ours.owner("t", 1): Owner("me", 5_000_000 + EPOCH_STEP).dump(),
        ours.owner("t", 2): Owner(None, 4_000_000).dump(),
        ours.checkpoint("t", 1): b"{}",
        ours.checkpoint("t", 2): b"{}",
        "spark/routed/new.query": b"{}",
        "spark/t/query": b"{}",
        "queues/jobs": b"{}",
    }
    assert left_out == ("theirs",)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    return lambda *arguments: run_here(monkeypatch, capsys, tuple(map(str, arguments)))


def test_the_commands_back_up_verify_and_restore_into_another_kind_of_registry(command: Call, tmp_path: Path) -> None:
    with a_hub(tmp_path / "hub") as hub:
        read(hub, 10)
        hub.create_queue("jobs").put(b"one")
    (made,) = command("backup", "--at", tmp_path / "hub", tmp_path / "b", "--json").rows()
    assert (made["topics"], made["messages"], made["kept_bytes"]) == (1, 60, 0)
    assert oct((tmp_path / "b" / "registry").glob("*").__next__().stat().st_mode)[-3:] == "600"
    (again,) = command("backup", "--at", tmp_path / "hub", tmp_path / "b", "--json").rows()
    assert again["kept_bytes"] > again["copied_bytes"]
    assert command("restore", tmp_path / "b", "--verify").out.startswith(f"{tmp_path / 'b'} is whole")
    store = f"sqlite:///{tmp_path / 'r.db'}"
    done = command("restore", tmp_path / "b", "--at", tmp_path / "new", "--registry", store)
    assert done.code == 0, done.errors
    with pxrs.open(tmp_path / "new", store) as copy:
        assert copy.group("g").describe().lag == 50
        assert [item.value for item in copy.queue("jobs").peek()] == [b"one"]
        assert [event.name for event in copy.audit()][-2:] == ["audit.backup", "audit.restore"]
    refused = command("restore", tmp_path / "b", "--at", tmp_path / "new", "--registry", store)
    assert (refused.code, "(RestoreRefused)" in refused.errors) == (1, True)
    inside = command("restore", tmp_path / "b", "--at", tmp_path / "b" / "new")
    assert (inside.code, "lie in each other" in inside.errors, (tmp_path / "b" / "new").exists()) == (2, True, False)
    nothing = command("restore", tmp_path / "hub", "--at", tmp_path / "none")
    assert (nothing.code, "(BackupIncomplete)" in nothing.errors) == (1, True)


def test_a_damaged_topic_is_left_out_and_said_so(command: Call, tmp_path: Path) -> None:
    with a_hub(tmp_path / "hub") as hub:
        hub.create_topic("sound")
        folder = tmp_path / "hub" / "logs" / hub.topic("orders").id
    (folder / "topic.json").write_text("{}")
    made = command("backup", "--at", tmp_path / "hub", tmp_path / "b", "--json")
    assert made.code == 1
    assert list(json.loads(made.out)["left_out"]) == ["orders"]
    assert {topic.name for topic in read_manifest(tmp_path / "b").topics} >= {"sound"}


def test_the_page_about_backups_runs_and_prints_what_it_says(
    command: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "backup.md").read_text()
    monkeypatch.chdir(tmp_path)
    printed = {}
    for line in re.findall(r"^\$ (.+)$", page, re.MULTILINE):
        text, _, given = line.rpartition("pxrs ")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("".join(shlex.split(text)[1:2]).encode())))
        done = command(*shlex.split(given))
        assert done.code == 0, f"{line}: {done.errors}"
        printed[given.split()[0]] = done.out
    assert "one order" in printed["tail"]
    shown = re.search(r"^backups/data holds a backup of data: (.+), [0-9,]+ bytes$", page, re.MULTILINE)
    assert shown is not None
    assert shown[1] in printed["backup"]
