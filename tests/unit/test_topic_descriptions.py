"""Descriptions of topics are remembered: what is remembered is never older than the file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import pxrs
from pxrs.errors import DamagedFrame
from pxrs.log.directory import description
from pxrs.log.directory.description import Descriptions, write_topic
from pxrs.model import Topic
from pxrs.testing.many_groups import add_group

OLD_NS = 10 * 10**9


def age(path: str) -> None:
    """As if the file had been written long ago."""
    then = time.time_ns() - OLD_NS
    os.utime(path, ns=(then, then))


@pytest.fixture
def file(tmp_path: Path) -> str:
    write_topic(tmp_path, Topic("orders", "a" * 32, 1))
    path = str(tmp_path / description.META)
    age(path)
    return path


def parses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the files that are parsed from now on."""
    found: list[str] = []
    parse = description._parsed
    monkeypatch.setattr(description, "_parsed", lambda path, data: (found.append(path), parse(path, data))[1])
    return found


def test_a_file_is_read_again_only_after_it_was_replaced(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known, parsed = Descriptions(), parses(monkeypatch)
    assert [known.read(file).partitions for _ in range(3)] == [1, 1, 1]
    assert len(parsed) == 1
    write_topic(Path(file).parent, Topic("orders", "a" * 32, 2))
    age(file)
    assert known.read(file).partitions == 2


def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later one could have the same inode, size and times."""
    write_topic(tmp_path, Topic("orders", "a" * 32, 1))
    known, parsed = Descriptions(), parses(monkeypatch)
    monkeypatch.setattr(description.time, "time_ns", lambda: os.stat(tmp_path / description.META).st_mtime_ns)
    for _ in range(2):
        known.read(str(tmp_path / description.META))
    assert len(parsed) == 2


def test_what_is_damaged_later_is_found_damaged(file: str) -> None:
    known = Descriptions()
    known.read(file)
    Path(file).write_text(Path(file).read_text().replace("orders", "0rders"))
    age(file)
    with pytest.raises(DamagedFrame):
        known.read(file)


def test_topics_that_are_gone_are_forgotten(file: str) -> None:
    known = Descriptions()
    known.read(file)
    known.keep_only({Path(file).parent.name})
    assert known._known
    known.keep_only(set())
    assert not known._known


def test_another_process_sees_a_changed_and_a_new_topic_of_the_same_name(tmp_path: Path) -> None:
    with pxrs.open(tmp_path / "hub", upkeep=False) as mine, pxrs.open(tmp_path / "hub", upkeep=False) as other:
        first = mine.create_topic("orders", 1, retention=10.0).topic
        age(f"{tmp_path}/hub/logs/{first.id}/topic.json")
        assert other.topics() == mine.topics() == [first]
        mine.alter_topic("orders", retention=20.0)
        assert [topic.retention_s for topic in other.topics()] == [20.0]
        mine.delete_topic("orders")
        second = mine.create_topic("orders", 3).topic
        assert other.topics() == [second]
        assert other.topic("orders").partitions == 3


def test_a_description_of_a_group_lists_the_topics_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pxrs.open(tmp_path / "hub", "memory:", upkeep=False) as hub:
        for number in range(5):
            hub.create_topic(f"t{number}", 1)
        add_group(hub.registry, "g", hub.topics())
        assert hub.parts.events.flush(60)  # the thread that stores events looks topics up, too
        listed: list[int] = []
        look = hub.log._look_up_all  # type: ignore[attr-defined]
        monkeypatch.setattr(hub.log, "_look_up_all", lambda: (listed.append(1), look())[1])
        assert len(hub.group("g").describe().partitions) == 5
        assert len(listed) == 2, "the topics and the damaged topics, however many topics the group reads"
