"""The log contract on a local directory."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pxrs.errors import AppendFailed, AppendUnknown, InvalidRecord
from pxrs.log.batch import Header, Origin
from pxrs.log.contract import Append, Log, TopicLog
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.directory.tail import Tail
from pxrs.log.outcomes import MaybeStored, NotStored, StoredAt, offsets_of
from pxrs.testing.log_contract import LogContract, new_topic, records, values_from


class TestDirectory(LogContract):
    @pytest.fixture
    def log(self, tmp_path: Path) -> Iterator[Log]:
        log = DirectoryLog(tmp_path / "data")
        yield log
        log.close()


class TestDirectoryLeftToTheSystem(TestDirectory):
    @pytest.fixture
    def topic(self, log: Log) -> TopicLog:
        return log.create_topic(new_topic(durability="os"))


# What only a disk can do: fail at one step of an append, of one partition.


def failing_for(monkeypatch: pytest.MonkeyPatch, name: str, partition: int, times: int = 1) -> None:
    """Have a call of `os`, whose first argument is a descriptor, fail for the files of one partition."""
    call, left = getattr(os, name), [times]

    def fail(descriptor: int, *arguments: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if left[0] and f"/partition-{partition}/" in path:
            left[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return call(descriptor, *arguments)

    monkeypatch.setattr(os, name, fail)


def two(producer: uuid.UUID) -> list[Append]:
    return [Append.encoded(number, records([b"%d" % number]), Origin(producer, 0, 0)) for number in (0, 1)]


@pytest.mark.parametrize("calls", [["fdatasync"], ["fdatasync", "pwrite"], ["pwritev", "ftruncate"], ["pwrite"]])
def test_w1_a_batch_that_a_start_of_the_machine_may_show_is_maybe_stored_and_a_resend_is_stored_once(
    calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sync failed; so did the mark of that; what was written could not be cut off; its end was not published."""
    topic = DirectoryLog(tmp_path).create_topic(new_topic())
    assert offsets_of(topic.append([Append.encoded(number, records([b"first"])) for number in (0, 1)])) == [0, 0]
    appends = two(uuid.uuid4())
    for call in calls:
        failing_for(monkeypatch, call, 1)
    stored, unknown = topic.append(appends)
    assert stored == StoredAt(1)
    assert isinstance(unknown, MaybeStored)
    assert isinstance(unknown.error, AppendUnknown)
    assert topic.ends() == [2, 1], "no reader sees what may be undone"
    again = topic.append(appends)
    assert again == [StoredAt(1, is_duplicate=True), StoredAt(1)]
    assert [values_from(topic, number) for number in (0, 1)] == [[b"first", b"0"], [b"first", b"1"]]


def test_w1_a_batch_that_could_not_be_written_and_was_cut_off_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = DirectoryLog(tmp_path).create_topic(new_topic())
    failing_for(monkeypatch, "pwritev", 0)
    appends = two(uuid.uuid4())
    refused, stored = topic.append(appends)
    assert isinstance(refused, NotStored)
    assert isinstance(refused.error, AppendFailed)
    assert not isinstance(refused.error, AppendUnknown)
    assert stored == StoredAt(0)
    assert offsets_of(topic.append(appends)) == [0, 0]


def test_a_partition_whose_files_cannot_be_opened_now_is_tried_again_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = DirectoryLog(tmp_path).create_topic(new_topic())
    opened = os.open

    def too_many(path: Any, *arguments: Any, **named: Any) -> int:
        if "/partition-1/" in str(path):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return opened(path, *arguments, **named)

    appends = two(uuid.uuid4())
    with monkeypatch.context() as full:
        full.setattr(os, "open", too_many)
        stored, refused = topic.append(appends)
    assert stored == StoredAt(0)
    assert isinstance(refused, NotStored)
    assert isinstance(refused.error, AppendFailed), "which a producer tries again"
    assert f"{topic.name}/1: " in str(refused.error)
    assert topic.append(appends) == [StoredAt(0, is_duplicate=True), StoredAt(0)]
    with pytest.raises(InvalidRecord, match="has no partition 7"):
        topic.append([*appends, appends[0]._replace(partition=7)])


def test_a_defect_in_one_partition_hides_nothing_about_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = DirectoryLog(tmp_path).create_topic(new_topic())
    write = Tail.note

    def broken(tail: Tail, headers: list[Header]) -> int:
        if "/partition-1/" in tail.segment.path:
            raise ZeroDivisionError("a defect")
        return write(tail, headers)

    monkeypatch.setattr(Tail, "note", broken)
    stored, unknown = topic.append(two(uuid.uuid4()))
    assert stored == StoredAt(0)
    assert isinstance(unknown, MaybeStored)
    assert isinstance(unknown.error, ZeroDivisionError)
