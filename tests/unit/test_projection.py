"""A group's readable files: what is in them, and that nothing depends on them (F1, R9)."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pxrs import registry as registries
from pxrs.errors import Closed
from pxrs.group import projection as projections
from pxrs.group.projection import Projection, projection_of, render
from pxrs.group.records import Checkpoint, Keys, Leader, Member, Owner, ReadTopic, Target
from pxrs.registry import Registry
from pxrs.registry.contract import Entry
from pxrs.testing.waiting import eventually

KEYS = Keys("billing")
NOON = 1_761_393_600.25


def entries(values: dict[str, bytes]) -> list[Entry]:
    return [Entry(key, value, 1) for key, value in sorted(values.items())]


def a_group() -> dict[str, bytes]:
    """w1 has partition 0, and is to give partition 1 to w2; the old owner of partition 2 is dead."""
    return {
        KEYS.member("i1"): Member("w1", "t1", "orders", 3, "host", 7, NOON).dump(),
        KEYS.member("i2"): Member("w2", "t1", "orders", 3, "host", 8, NOON + 1).dump(),
        KEYS.leader: Leader("i1", 4).dump(),
        KEYS.target("i1"): Target(8, {"t1": [0]}).dump(),
        KEYS.target("i2"): Target(9, {"t1": [1, 2]}).dump(),
        KEYS.owner("t1", 0): Owner("i1", 5, "w1").dump(),
        KEYS.owner("t1", 1): Owner("i1", 2, "w1").dump(),
        KEYS.owner("t1", 2): Owner("i0", 1, "w0").dump(),
        KEYS.checkpoint("t1", 0): Checkpoint(120, NOON, "w1", 5).dump(),
        KEYS.checkpoint("t1", 1): Checkpoint(0, 0.0, "start").dump(),
    }


# What is in them


def test_f1_offsets_owners_and_members_with_the_names_of_topics() -> None:
    files = render(entries(a_group()), KEYS, {})
    assert sorted(files) == [
        "members.json",
        "offsets/orders/partition-0.offset",
        "offsets/orders/partition-1.offset",
        "owners.json",
    ]
    assert json.loads(files["offsets/orders/partition-0.offset"]) == {
        "offset": 120,
        "when": "2025-10-25T12:00:00.250000Z",
        "by": "w1",
        "epoch": 5,
    }
    assert json.loads(files["offsets/orders/partition-1.offset"]) == {
        "offset": 0,
        "when": None,
        "by": "start",
        "epoch": 0,
    }
    assert json.loads(files["owners.json"]) == {
        "orders": {
            "0": {"owner": "w1", "epoch": 5, "meant_for": "w1"},
            "1": {"owner": "w1", "epoch": 2, "meant_for": "w2"},
        }
    }
    members = json.loads(files["members.json"])
    assert (members["generation"], members["leader"]) == (9, "w1")
    assert [(each["name"], each["pid"], each["topic"]) for each in members["members"]] == [
        ("w1", 7, "orders"),
        ("w2", 8, "orders"),
    ]


def test_f1_a_member_of_several_topics_is_shown_with_all_of_them() -> None:
    both = Member.reading("w3", [ReadTopic("t1", "orders", 3), ReadTopic("t2", "returns", 1)], since=NOON + 2)
    more = {KEYS.member("i3"): both.dump(), KEYS.checkpoint("t2", 0): Checkpoint(7, NOON, "w3", 1).dump()}
    files = render(entries({**a_group(), **more}), KEYS, {})
    members = json.loads(files["members.json"])["members"]
    assert [(member.get("topic"), member.get("topics")) for member in members] == [
        ("orders", None),
        ("orders", None),
        (None, ["orders", "returns"]),
    ]
    assert json.loads(files["offsets/returns/partition-0.offset"])["offset"] == 7


def test_each_partition_and_each_member_has_a_line() -> None:
    files = render(entries(a_group()), KEYS, {})
    assert files["offsets/orders/partition-0.offset"].count("\n") == 1
    assert [line.strip()[:4] for line in files["owners.json"].splitlines()] == ["{", '"ord', '"0":', '"1":', "}", "}"]
    assert sum('"name"' in line for line in files["members.json"].splitlines()) == 2


def test_what_a_deleted_group_leaves_behind_is_no_group() -> None:
    left = {KEYS.leader: Leader("", 5).dump(), KEYS.owner("t1", 0): Owner(None, 6).dump()}
    assert render(entries(left), KEYS, {"t1": "orders"}) == {}
    assert render([], KEYS, {}) == {}


def test_a_topic_that_was_made_again_has_the_name_and_the_old_one_its_id() -> None:
    again = {
        **a_group(),
        KEYS.member("i0"): Member("w0", "t2", "orders", 1).dump(),
        KEYS.checkpoint("t2", 0): Checkpoint(3).dump(),
    }
    files = render(entries(again), KEYS, {"t2": "orders"})
    assert json.loads(files["offsets/orders/partition-0.offset"])["offset"] == 3
    assert json.loads(files["offsets/t1/partition-0.offset"])["offset"] == 120
    assert set(json.loads(files["owners.json"])) == {"orders", "t1"}


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("../../etc", "..%2F..%2Fetc"),
        ("..", "t1"),
        (".", "t1"),
        ("", "t1"),
        ("n" * 300, "t1"),
        ("Büro 7", "B%C3%BCro%207"),
        ("nul\0", "nul%00"),
    ],
)
def test_whatever_a_source_is_called_it_stays_in_its_folder(name: str, folder: str) -> None:
    files = render(entries(a_group()), KEYS, {"t1": name})
    assert f"offsets/{folder}/partition-0.offset" in files


# How they are kept


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with registries.open(tmp_path / "registry") as registry:
        yield registry


@pytest.fixture
def projection(registry: Registry) -> Projection:
    projection = projection_of(registry, KEYS)
    assert projection is not None
    return projection


def folder_of(registry: Registry) -> Path:
    assert registry.folder is not None
    return registry.folder / "consumer-groups" / "billing"


def files_in(folder: Path) -> dict[str, str]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text("utf-8") for path in found}


def test_only_files_have_them() -> None:
    with registries.open("memory:") as registry:
        assert projection_of(registry, KEYS) is None


def test_they_follow_the_registry_and_what_is_not_in_it_goes(registry: Registry, projection: Projection) -> None:
    registry.commit(put=a_group())
    assert projection.refresh()
    folder = folder_of(registry)
    assert files_in(folder) == render(registry.scan(KEYS.root), KEYS, {})
    (folder / "offsets/orders/partition-0.offset").write_text("somebody else's")
    (folder / "offsets/old").mkdir()
    (folder / "offsets/old/partition-0.offset").write_text("of a topic that was")
    (folder / ".new").write_text("left by one that was killed")
    registry.commit(delete=[KEYS.checkpoint("t1", 1)])
    assert projection.refresh()
    assert files_in(folder) == render(registry.scan(KEYS.root), KEYS, {})
    assert not (folder / "offsets/old").exists()
    registry.commit(put={KEYS.checkpoint("t1", 0): Checkpoint(121).dump()})
    kept = (folder / "owners.json").stat().st_ino
    assert projection.refresh()
    assert (folder / "owners.json").stat().st_ino == kept, "what has not changed is not written"
    registry.commit(delete=[entry.key for entry in registry.scan(KEYS.root)])
    assert projection.refresh()
    assert not folder.exists()


def test_r9_an_error_is_logged_once_until_it_works_again(
    registry: Registry, projection: Projection, caplog: pytest.LogCaptureFixture
) -> None:
    registry.commit(put=a_group())
    folder = folder_of(registry)
    folder.parent.mkdir()
    folder.write_text("where the folder should be")
    for _ in range(3):
        assert not projection.refresh()
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING
    folder.unlink()
    assert projection.refresh()
    assert files_in(folder)
    assert len(caplog.records) == 1


def test_one_who_finds_another_writing_does_not_wait_for_long(
    registry: Registry, projection: Projection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projections, "LOCK_WAIT_S", 0.02)
    registry.commit(put=a_group())
    folder = folder_of(registry)
    folder.parent.mkdir()
    lock = os.open(folder.parent / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not projection.refresh()
        assert not folder.exists()
    finally:
        os.close(lock)
    assert projection.refresh()
    assert folder.exists()


def test_one_who_goes_leaves_it_to_the_one_who_leads(registry: Registry) -> None:
    registry.commit(put=a_group())
    folder = folder_of(registry)
    for is_written in (False, True):
        projection = projection_of(registry, KEYS)
        assert projection is not None
        projection.close()
        assert folder.exists() is is_written
        registry.commit(delete=[KEYS.member("i1")])  # the leader


def test_a_registry_that_is_closed_is_no_trouble(
    registry: Registry, projection: Projection, caplog: pytest.LogCaptureFixture
) -> None:
    projection.start()
    registry.close()
    projection.close()
    projection.start()
    with pytest.raises(Closed):
        registry.get("a")
    assert not caplog.records


def test_a_leader_writes_the_files_after_each_change(
    registry: Registry, projection: Projection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projections, "INTERVAL_S", 0.01)
    folder = folder_of(registry)
    offset = folder / "offsets/orders/partition-0.offset"
    registry.commit(put=a_group())
    projection.start()
    projection.start()
    eventually(lambda: offset.exists() and json.loads(offset.read_text())["offset"] == 120)
    for number in range(121, 124):
        registry.commit(put={KEYS.checkpoint("t1", 0): Checkpoint(number).dump()})
        eventually(lambda number=number: json.loads(offset.read_text())["offset"] == number)  # type: ignore[misc]
    projection.close()
    registry.commit(put={KEYS.checkpoint("t1", 0): Checkpoint(200).dump()})
    projection.start()
    assert json.loads(offset.read_text())["offset"] == 123
    assert not registry._watches.prefixes()


def test_a_write_that_failed_is_made_again_without_another_change(
    registry: Registry, projection: Projection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projections, "INTERVAL_S", 0.01)
    registry.commit(put=a_group())
    folder = folder_of(registry)
    folder.parent.mkdir()
    folder.write_text("where the folder should be")
    projection.start()
    eventually(lambda: projection._has_failed)
    folder.unlink()
    eventually(lambda: files_in(folder) == render(registry.scan(KEYS.root), KEYS, {}))
    projection.close()
