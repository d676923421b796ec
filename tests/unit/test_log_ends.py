"""The ends of a topic's partitions, read again only where the kernel tells of a change."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pxrs.errors import Closed, ReadFailed, UnknownTopic
from pxrs.inotify import News, Notifier
from pxrs.log.contract import Append
from pxrs.log.directory import tailing
from pxrs.log.directory.ends import Ends
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.directory.tailing import Tailer
from pxrs.log.directory.topic import DirectoryTopic
from pxrs.log.outcomes import offsets_of
from pxrs.testing.log_contract import new_topic, records
from pxrs.testing.waiting import aside

PARTITIONS = 50


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[DirectoryTopic]:
    """A handle as another process has it."""
    log = DirectoryLog(tmp_path)
    log.create_topic(new_topic("orders", PARTITIONS))
    topic = log.topic("orders")
    assert isinstance(topic, DirectoryTopic)
    yield topic
    log.close()


@pytest.fixture
def topic(tmp_path: Path, writer: DirectoryTopic) -> Iterator[DirectoryTopic]:
    log = DirectoryLog(tmp_path)
    found = log.topic("orders")
    assert isinstance(found, DirectoryTopic)
    yield found
    log.close()


class Reads(Counter[int]):
    """Counts how often the end of each partition is read."""

    def __init__(self, topic: DirectoryTopic) -> None:
        super().__init__()
        self._end_of = topic._ends._end_of
        topic._ends._end_of = self.end_of

    def end_of(self, number: int) -> int:
        self[number] += 1
        return self._end_of(number)


def append(topic: DirectoryTopic, number: int) -> None:
    offsets_of(topic.append([Append.encoded(number, records([b"v"]))]))


def test_only_what_has_changed_is_read_again(topic: DirectoryTopic, writer: DirectoryTopic) -> None:
    assert topic.ends() == [0] * PARTITIONS
    reads = Reads(topic)
    for _ in range(3):
        assert topic.ends() == [0] * PARTITIONS
    assert not reads
    for number in (7, 7, 3):
        append(writer, number)
    assert topic.ends() == [{7: 2, 3: 1}.get(number, 0) for number in range(PARTITIONS)]
    assert dict(reads) == {3: 1, 7: 1}
    append(topic, 3)  # in this process
    assert topic.ends()[3] == 2
    assert dict(reads) == {3: 2, 7: 1}


def test_what_is_published_before_the_watch_is_there_is_seen(
    topic: DirectoryTopic, writer: DirectoryTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Notifier.add

    def late(notifier: Notifier, folder: str, mask: int) -> int | None:
        append(writer, 0)
        return add(notifier, folder, mask)

    monkeypatch.setattr(Notifier, "add", late)
    assert topic.ends()[0] == writer.end(0) - (PARTITIONS - 1), "what comes after its watch is told by it"
    monkeypatch.undo()
    assert topic.ends()[0] == writer.end(0) == PARTITIONS


def test_what_the_kernel_has_too_much_to_tell_of_is_read_whole(
    topic: DirectoryTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic.ends()
    reads = Reads(topic)
    with monkeypatch.context() as patch:
        patch.setattr(Notifier, "take", lambda *given: News(overflow=True))
        topic.ends()
    assert set(reads) == set(range(PARTITIONS))
    reads.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Notifier, "take", lambda *given: News(changed=frozenset([-1])))
        topic.ends()
    assert set(reads) == set(range(PARTITIONS))


@pytest.mark.parametrize("call", ["__init__", "add"])
def test_without_watches_every_end_is_read_each_time_and_that_is_said_once(
    topic: DirectoryTopic,
    writer: DirectoryTopic,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    def refuse(*given: Any) -> int | None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tailing.Notifier, call, refuse)
    for count in range(1, 4):
        append(writer, 5)
        assert topic.ends()[5] == count
    assert len([record for record in caplog.records if "max_user_watches" in record.getMessage()]) == 1


def test_an_end_that_could_not_be_read_is_read_again(topic: DirectoryTopic, writer: DirectoryTopic) -> None:
    topic.ends()
    append(writer, 9)
    end_of = topic._ends._end_of

    def fail(number: int) -> int:
        raise ReadFailed("the disk")

    topic._ends._end_of = fail
    for _ in range(2):
        with pytest.raises(ReadFailed):
            topic.ends()
    topic._ends._end_of = end_of
    assert topic.ends()[9] == 1


def test_a_topic_that_is_deleted_or_closed_says_so(
    tmp_path: Path, topic: DirectoryTopic, writer: DirectoryTopic
) -> None:
    topic.ends()
    # As a deletion does it first; it may be stopped before it removes the files.
    (tmp_path / "logs" / topic.id).rename(tmp_path / "logs" / f".deleted-{topic.id}")
    with pytest.raises(UnknownTopic):
        topic.ends()
    writer.close()
    with pytest.raises(Closed):
        writer.ends()


def descriptors(folder: Path) -> list[str]:
    """What this process has open in the folder, and its instances of inotify. Descriptors of earlier tests may be
    closed at any moment, with the objects that they belong to."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(each for each in found if each.startswith(str(folder)) or "inotify" in each)


def test_nothing_is_left_open(tmp_path: Path, writer: DirectoryTopic) -> None:
    gc.collect()
    before = descriptors(tmp_path)
    for _ in range(3):
        log = DirectoryLog(tmp_path)
        log.topic("orders").ends()
        log.close()
    assert descriptors(tmp_path) == before
    tailer = Tailer()
    closed = Ends(tailer, 1, lambda number: 0, lambda number: str(tmp_path))
    closed.close()
    tailer.close()
    assert closed.look() == [0]
    assert descriptors(tmp_path) == before


def test_a_file_that_is_made_again_is_watched_again(tmp_path: Path) -> None:
    path = tmp_path / "end"
    path.write_text("1")
    tailer = Tailer()
    ends = Ends(tailer, 1, lambda number: int(path.read_text() or 0), lambda number: str(path))
    assert ends.look() == [1]
    path.unlink()
    path.write_text("2")
    assert ends.look() == [2]
    path.write_text("3")
    assert ends.look() == [3], "the kernel has ended the watch with the file"
    tailer.close()


def test_a_partition_that_is_slow_to_read_holds_up_no_other(tmp_path: Path) -> None:
    """As one that is being recovered, while another process holds its lock."""
    is_reading, may_go_on = threading.Event(), threading.Event()

    def end_of(number: int) -> int:
        if number == 0:
            is_reading.set()
            assert may_go_on.wait(30)
        return 7

    tailer = Tailer()
    ends = Ends(tailer, 2, end_of, lambda number: str(tmp_path))
    slow = aside(lambda: ends.of(0))
    assert is_reading.wait(30)
    assert aside(lambda: ends.of(1)).result(30) == 7
    may_go_on.set()
    assert slow.result(30) == 7
    tailer.close()
