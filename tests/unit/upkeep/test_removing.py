"""What a round removes: deleted topics, staged files, readable files of groups."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

import pxrs
from pxrs.errors import RegistryUnavailable
from pxrs.group.projection import FOLDER
from pxrs.publishing.staging.directory import DirectoryStaging
from tests.unit.upkeep.hubs import DAY_S, HOUR_S, Place


def test_a_deletion_that_was_cut_short_is_finished(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = place.hub()
    hub.create_topic("gone", partitions=1)
    assert hub.parts.events.flush(10)  # to create a topic, such as `_audit`, also finishes deletions
    with monkeypatch.context() as killed:
        killed.setattr(hub.log, "finish_deletions", lambda: None)  # the process dies before that
        hub.delete_topic("gone")
    assert list(place.folder.glob("topics/.deleted-*"))
    assert hub.run_upkeep().errors == {}
    assert not list(place.folder.glob("topics/.deleted-*"))
    assert {each.name for each in place.folder.glob("logs/*")} == {topic.id for topic in hub.topics(internal=True)}


def keys_of_topics(place: Place) -> list[str]:
    return [entry.key.rpartition("/")[2] for entry in place.registry().scan("topics/")]


@pytest.mark.parametrize("way", ["the registry is away", "killed before", "killed after"])
def test_keys_of_a_deleted_topic_are_removed_though_its_deletion_was_cut_short(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    registry = place.registry()
    hub, other = place.hub(registry), place.hub()
    for name in ("unread", "stays"):
        hub.create_topic(name, partitions=1, retention=HOUR_S, keep_unread=True)
        hub.consumer(name, f"of {name}".replace(" ", "-")).close()
    assert keys_of_topics(place) == ["gate", "gate"]
    with monkeypatch.context() as cut_short:
        if way == "the registry is away":

            def reach() -> None:
                raise RegistryUnavailable("no answer")

            registry.reach = reach
            hub.delete_topic("unread")
            registry.reach = lambda: None
            assert "no answer" in caplog.text
        else:
            cut_short.setattr(
                hub.log, "delete_topic" if way == "killed before" else "finish_deletions", lambda *_: 1 // 0
            )
            with pytest.raises(ZeroDivisionError):
                hub.delete_topic("unread")
    assert keys_of_topics(place) == ["gate", "gate"]
    assert other.run_upkeep().errors == {}
    if way == "killed before":
        assert keys_of_topics(place) == ["gate", "gate"], "the topic is there: nothing of it may go"
        other.delete_topic("unread")
    assert keys_of_topics(place) == ["gate"], "that of the topic that stays"
    (place.folder / "deleted" / "READ ME").write_text("")
    assert other.run_upkeep().errors == {}
    assert [path.name for path in (place.folder / "deleted").iterdir()] == ["READ ME"]


def test_a_damaged_topic_that_is_deleted_leaves_no_keys(place: Place) -> None:
    hub = place.hub()
    hub.create_topic("unread", partitions=1, retention=HOUR_S, keep_unread=True)
    hub.consumer("unread", "g2").close()
    (place.folder / "topics" / "unread" / "topic.json").write_text("{}")
    place.hub().delete_topic("unread")
    assert keys_of_topics(place) == []


def test_a_topic_is_deleted_though_the_registry_cannot_be_asked_for_its_manifests(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    registry = place.registry()
    hub = place.hub(registry)
    identity = hub.topic("t").id
    file = staged(place.folder, identity, 1, 60.0)
    hub.registry.commit(put={f"spark/{identity}/query": json.dumps({"batch": 1, "files": [file.name]}).encode()})

    def reach() -> None:
        raise RegistryUnavailable("no answer")

    registry.reach = reach
    hub.delete_topic("t")
    registry.reach = lambda: None
    assert "no answer" in caplog.text
    assert hub.topics() == []
    assert file.exists(), "by it the janitor finds the manifests a day later"


def staged(folder: Path, topic_id: str, batch: int, age_s: float) -> Path:
    file = folder / "staging" / topic_id / "query" / str(batch) / "00000-x.arrow"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"rows")
    for path in (file, file.parent):
        os.utime(path, (time.time() - age_s, time.time() - age_s))
    return file


def test_staged_files_that_no_manifest_names_are_removed_after_a_day(place: Place) -> None:
    hub = place.hub()
    identity = hub.topic("t").id
    old, needed, young = (staged(place.folder, identity, *each) for each in ((1, 2 * DAY_S), (2, 2 * DAY_S), (3, 60.0)))
    hub.registry.commit(put={f"spark/{identity}/query": json.dumps({"batch": 2, "files": ["00000-x.arrow"]}).encode()})
    assert hub.run_upkeep().errors == {}
    assert [file.exists() for file in (old, needed, young)] == [False, True, True]
    gone = staged(place.folder, "0" * 32, 1, 2 * DAY_S)
    os.utime(gone.parents[2], (0, 0))
    os.utime(gone.parents[1], (0, 0))
    assert hub.run_upkeep().errors == {}
    assert not gone.parents[2].exists(), "of a topic that was deleted"


def test_what_was_committed_for_a_deleted_topic_a_short_while_ago_stays(place: Place) -> None:
    """The driver that has committed it may be about to finish it, and to tell that the topic is gone."""
    hub = place.hub()
    gone = staged(place.folder, "0" * 32, 1, 2 * DAY_S)
    for path in (gone.parents[1], gone.parents[2]):
        os.utime(path, (0, 0))
    written = {"batch": 1, "files": [gone.name], "at": time.time()}
    hub.registry.commit(put={f"spark/{'0' * 32}/query": json.dumps(written).encode()})
    assert hub.run_upkeep().errors == {}
    assert gone.exists()


def test_staged_files_stay_while_it_is_not_on_record_which_registry_has_the_manifests(tmp_path: Path) -> None:
    """A driver has committed its batch in a registry that this process does not know."""
    place = Place(tmp_path / "data")
    hub = place.hub()
    hub.create_topic("t", partitions=1)
    file = staged(place.folder, hub.topic("t").id, 1, 2 * DAY_S)
    assert hub.run_upkeep().errors == {}
    assert file.exists()
    hub.consumer("t", "g").close()  # which records its registry
    assert hub.run_upkeep().errors == {}
    assert not file.exists()
    place.close()


def test_staged_files_stay_if_the_hub_was_given_to_another_registry_since_the_round_began(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, other = place.hub(), Place(place.folder)
    file = staged(place.folder, hub.topic("t").id, 1, 2 * DAY_S)
    finish = hub.log.finish_deletions

    def adopted_meanwhile() -> None:
        finish()
        other.hub().adopt_registry()

    monkeypatch.setattr(hub.log, "finish_deletions", adopted_meanwhile)
    assert "sweeping staged files" in hub.run_upkeep().errors
    assert file.exists()
    other.close()


def test_a_file_of_somebody_else_in_the_staging_folder_stops_nobody(place: Place) -> None:
    hub = place.hub()
    identity = hub.topic("t").id
    old = staged(place.folder, identity, 1, 2 * DAY_S)
    strange = [old.parents[2] / ".DS_Store", old.parents[1] / ".DS_Store", place.folder / "staging" / "README"]
    for path in strange:
        path.write_text("")
    assert hub.run_upkeep().errors == {}
    assert not old.exists()
    DirectoryStaging(str(place.folder)).clear(identity, "query", 7)
    assert all(path.exists() for path in strange)


def test_a_janitor_that_was_frozen_after_it_read_the_manifests_removes_nothing_staged_since(tmp_path: Path) -> None:
    """It wakes up two days later; a manifest names the file by then, and is not published yet."""
    file = staged(tmp_path, "a" * 32, 1, 1.5 * DAY_S)
    DirectoryStaging(str(tmp_path)).sweep("a" * 32, {}, now=time.time() - 2 * DAY_S)
    assert file.exists()
    DirectoryStaging(str(tmp_path)).sweep("a" * 32, {}, now=time.time())
    assert not file.exists()


def test_readable_files_of_a_group_that_is_gone_are_removed(tmp_path: Path) -> None:
    with pxrs.open(tmp_path, upkeep=False) as hub:
        hub.create_topic("t", partitions=1)
        hub.consumer("t", "g").close()
        assert hub.registry.folder is not None
        files = hub.registry.folder / FOLDER
        (files / "gone").mkdir()
        (files / "gone" / "members.json").write_text("{}")
        (files / "g" / "owners.json").unlink()
        assert hub.run_upkeep().errors == {}
        assert not (files / "gone").exists()
        assert (files / "g" / "owners.json").exists()
