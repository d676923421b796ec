"""A topic whose description is damaged: the others can be used, it is told of, and it can be deleted and made again."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pxrs
from pxrs.cli.app import app
from pxrs.errors import DamagedFrame, LogError, TopicExists, UnknownTopic
from pxrs.group.projection import FOLDER, projection_of
from pxrs.group.records import Keys
from pxrs.log.directory.check import check
from pxrs.spark.options import WriteOptions

BOUND_S = 30.0


def flip(file: Path) -> None:
    file.write_text(file.read_text().replace('"partitions": 2', '"partitions": 3'))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:40])


def remove(file: Path) -> None:
    file.unlink()


def make_unreadable(file: Path) -> None:
    file.unlink()
    file.mkdir()


def make_that_of_another(file: Path) -> None:
    shutil.copy(file.parents[2] / "topics/b/topic.json", file)


DAMAGES: list[Callable[[Path], None]] = [flip, cut, remove, make_unreadable, make_that_of_another]


@pytest.fixture(params=DAMAGES, ids=lambda damage: damage.__name__)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Three topics, each read by the group g, of which the first is damaged."""
    with pxrs.open(tmp_path) as hub:
        for name in "abc":
            hub.create_topic(name, partitions=2)
            with hub.producer(name) as out:
                out.send(f"of {name}", partition=0)
            with hub.consumer(name, "g") as inbox:
                assert len(inbox.poll(timeout=BOUND_S)) == 1
                inbox.commit()
    request.param((tmp_path / "topics/a").resolve() / "topic.json")
    return tmp_path


def run(*arguments: str) -> tuple[int, list[str]]:
    """The exit code and what was printed; the error that ends a command is raised."""
    result = CliRunner().invoke(app, [*arguments], catch_exceptions=False)
    return result.exit_code, result.stdout.splitlines()


def test_the_others_are_listed_and_used_and_the_damaged_one_is_told_of(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pxrs.open(place) as hub, caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert [topic.name for topic in hub.topics()] == ["b", "c"]
        (damaged,) = hub.damaged_topics()
        assert (damaged.name, damaged.id) == ("a", (place / "topics/a").resolve().name)
        assert isinstance(damaged.error, DamagedFrame)
        assert damaged.error.file.endswith("/topic.json")
        assert [record.topic for record in caplog.records] == ["a"], "it is logged once"  # type: ignore[attr-defined]
        for ask in (hub.topic, hub.producer, lambda name: hub.consumer(name, "h")):
            with pytest.raises(DamagedFrame, match=r"topic\.json"):
                ask("a")
        with pytest.raises(UnknownTopic) as unknown:
            hub.topic("x")
        assert unknown.value.choices == ("b", "c")
        with hub.producer("b") as out:
            out.send("more", partition=0)
        with hub.consumer("b", "g") as inbox:
            assert [message.value for message in inbox.poll(timeout=BOUND_S)] == [b"more"]


def test_groups_are_described_and_their_files_are_written(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pxrs.open(place) as hub:
        description = hub.group("g").describe()
        rows = {(row.topic, row.partition): (row.checkpoint, row.end, row.lag) for row in description.partitions}
        assert {name for name, _ in rows} == {"a", "b", "c"}, "the damaged one keeps its name"
        assert rows["a", 0] == (1, None, None)
        assert rows["b", 0] == (1, 1, 0)
        with pytest.raises(DamagedFrame):
            hub.group("g").reset("earliest")
        with pytest.raises(DamagedFrame):
            hub.group("g").reset("earliest", topic="a")
        assert hub.group("g").reset("earliest", topic="b") == {"b": {0: 0, 1: 0}}
        assert hub.registry.folder is not None
        files = hub.registry.folder / FOLDER
        shutil.rmtree(files)
        projection = projection_of(hub.registry, Keys("g"), hub._topics.names)
        assert projection is not None
        with caplog.at_level(logging.WARNING):
            assert projection.refresh()
        assert "could not be written" not in caplog.text
        assert (files / "g/offsets/a/partition-0.offset").is_file()


def test_the_command_line_shows_a_row_for_it_and_ends_with_1(place: Path) -> None:
    code, lines = run("topic", "list", "--at", str(place))
    assert code == 1
    assert len(lines) == 4
    assert "topic.json" in lines[1]
    assert lines[2].split() == ["b", "2", "1"]
    code, lines = run("topic", "list", "--at", str(place), "--json")
    damaged, sound, _ = map(json.loads, lines)
    assert (code, damaged["topic"], damaged["messages"]) == (1, "a", None)
    assert "topic.json" in damaged["damage"]
    assert sound == {"topic": "b", "partitions": 2, "messages": 1}
    assert run("group", "list", "--at", str(place))[0] == 0
    assert run("group", "describe", "g", "--at", str(place))[0] == 0
    with pytest.raises(DamagedFrame):
        run("topic", "describe", "a", "--at", str(place))
    code, lines = run("check", str(place))
    assert code == 1
    assert [line for line in lines if "topic.json" in line]


def test_it_is_deleted_by_its_name_and_can_then_be_made_again(place: Path) -> None:
    with pxrs.open(place) as hub:
        with pytest.raises(TopicExists, match=r"damaged: delete it first.*topic\.json"):
            hub.create_topic("a")
        identity = hub.damaged_topics()[0].id
    code, lines = run("topic", "delete", "a", "--yes", "--at", str(place))
    assert (code, lines) == (0, ["removed a and all its messages (they cannot be counted)"])
    with pxrs.open(place) as hub:
        assert hub.damaged_topics() == []
        assert not (place / "logs" / str(identity)).exists()
        assert hub.create_topic("a").end(0) == 0
        assert [topic.name for topic in hub.topics()] == ["a", "b", "c"]
    assert [finding for checked in check(place) for finding in checked.findings] == []


def test_a_topic_with_a_damaged_partition_is_listed_too(tmp_path: Path) -> None:
    with pxrs.open(tmp_path) as hub:
        for name in "ab":
            hub.create_topic(name, partitions=1)
            with hub.producer(name) as out:
                out.send("x")
    for file in (tmp_path / "topics/a").resolve().glob("partitions/*/*.log"):
        file.unlink()
    code, lines = run("topic", "list", "--at", str(tmp_path), "--json")
    damaged, sound = map(json.loads, lines)
    assert (code, damaged["topic"], damaged["partitions"], damaged["messages"]) == (1, "a", 1, None)
    assert damaged["damage"]
    assert sound == {"topic": "b", "partitions": 1, "messages": 1}


def test_a_folder_in_the_place_of_a_link_is_not_deleted(tmp_path: Path) -> None:
    with pxrs.open(tmp_path) as hub:
        hub.create_topic("a", partitions=1)
        link = tmp_path / "topics/a"
        target = link.resolve()
        link.unlink()
        shutil.copytree(target, link)
        with pytest.raises(LogError, match="topics/a"):
            hub.delete_topic("a")
        assert link.is_dir()


def test_what_spark_staged_for_a_damaged_topic_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be published once the description is restored."""
    publishers = pytest.importorskip("pxrs.spark.publishers")
    known: list[set[str]] = []
    monkeypatch.setattr(publishers, "forget_deleted_topics", lambda registry, staging, ids: known.append(set(ids)))
    with pxrs.open(tmp_path) as hub:
        ids = {hub.create_topic(name, partitions=1).id for name in "ab"}
        cut((tmp_path / "topics/a").resolve() / "topic.json")
        publishers._first_publisher(hub, WriteOptions(str(tmp_path), None, "b"), hub.topic("b").log)
    assert known == [ids]
