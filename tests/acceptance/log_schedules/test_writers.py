"""Schedules of writers, forks and waiting readers that once broke the log in a directory (L3, L4, F3, X15)."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pxrs.errors import (
    AppendUnknown,
    Closed,
    LogBusy,
    LogError,
    PxrsError,
    UnknownTopic,
)
from pxrs.inotify import Notifier
from pxrs.log.arrivals import wait_for_messages
from pxrs.log.contract import Append
from pxrs.log.directory import reading, tailing
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.directory.sealed import Sealed
from pxrs.log.directory.topic import DirectoryTopic
from pxrs.log.outcomes import MaybeStored, offsets_of
from pxrs.model import Topic
from pxrs.testing import faults
from tests.acceptance.directory_topics import opened

if TYPE_CHECKING:
    from tests.acceptance.conftest import WallTime

from tests.acceptance.log_schedules.topics import SECOND, fill, findings, new_topic, one, segments, values

BOUND_S = 20.0


@contextlib.contextmanager
def before_each(call: str, act: Callable[[str], None]) -> Iterator[None]:
    """Act before each system call of this name."""

    def step(name: str) -> None:
        if name == call:
            act(name)

    steps = faults.Steps()
    steps.step = step  # type: ignore[method-assign]
    with faults.counted(steps):
        yield


def outcome(action: Callable[[], object], told: list[object]) -> None:
    try:
        told.append(action())
    except BaseException as error:  # noqa: BLE001 - looked at by the test
        told.append(error)


def in_a_thread(action: Callable[[], object], name: str | None = None) -> tuple[threading.Thread, list[object]]:
    """Running already; what it returned or raised comes into the list."""
    told: list[object] = []
    thread = threading.Thread(target=outcome, args=(action, told), name=name, daemon=True)
    thread.start()
    return thread, told


# A writer that dies.


@pytest.mark.parametrize("is_booted", [False, True], ids=["same boot", "another boot"])
def test_l3_a_writer_dies_in_a_roll_and_a_smaller_batch_comes_next(
    is_booted: bool, tmp_path: Path, boot: Callable[[], None]
) -> None:
    """It would have fitted into the old segment, whose successor is there already."""
    topic = new_topic(tmp_path)
    sent = fill(topic, 10)

    def work() -> None:
        late = opened(tmp_path)
        late.is_name_durable = True  # else the sync of the topic's name would be the first one
        with before_each("fsync", faults.kill):  # the new segment is made, its name is not synced yet
            offsets_of(late.append(one(b"x" * 2000)))

    with faults.child(work) as pid:
        assert faults.wait_exit(pid) == -signal.SIGKILL
    assert len(segments(tmp_path)) == 2
    assert segments(tmp_path)[0].stat().st_size + 710 < 8192, "there is room for a small one"
    assert offsets_of(topic.append(one(b"small"))) == [10]
    if is_booted:
        boot()
    late = opened(tmp_path)
    assert values(late) == [*sent, b"small"]
    large = [b"%d" % number * 3000 for number in range(3)]
    assert [offsets_of(late.append(one(value))) for value in large] == [[11], [12], [13]]
    boot()
    assert values(opened(tmp_path)) == [*sent, b"small", *large]
    assert findings(tmp_path) == []


def fail_sync(topic: DirectoryTopic, append: list[Append]) -> None:
    with before_each("fdatasync", faults.fail(errno.EIO)):
        (outcome,) = topic.append(append)
    assert isinstance(outcome, MaybeStored), "the system may have written it, and may show it after a start"
    assert isinstance(outcome.error, AppendUnknown)


@pytest.mark.parametrize("is_same", [True, False], ids=["same handle", "another handle"])
def test_l4_the_retry_after_a_failed_sync_is_stored_once(is_same: bool, tmp_path: Path) -> None:
    topic, producer = new_topic(tmp_path), uuid.uuid4()
    sent = fill(topic, 5, producer)
    fail_sync(topic, one(b"again", producer, 5))
    retrying = topic if is_same else opened(tmp_path)
    assert [offsets_of(retrying.append(one(b"again", producer, 5))) for _ in range(2)] == [[5], [5]]
    assert offsets_of(retrying.append(one(b"next", producer, 6))) == [6]
    assert offsets_of(opened(tmp_path).append(one(b"old-4", producer, 4))) == [4], "remembered through the roll"
    assert values(topic) == values(opened(tmp_path)) == [*sent, b"again", b"next"]
    assert findings(tmp_path) == []


def test_l4_a_failed_sync_of_one_producer_makes_nobody_forget_another(tmp_path: Path) -> None:
    topic, other, producer = new_topic(tmp_path), opened(tmp_path), uuid.uuid4()
    assert offsets_of(topic.append(one(b"once", producer))) == [0]
    fail_sync(other, one(b"other"))
    assert offsets_of(other.append(one(b"other"))) == [1]
    assert offsets_of(topic.append(one(b"once", producer))) == [0], "its acknowledgement was lost, say"
    assert values(opened(tmp_path)) == [b"once", b"other"]


def test_l3_the_segment_that_a_failed_sync_ends_is_indexed_whole(tmp_path: Path, wall: WallTime) -> None:
    """Also by a handle that has not seen its last frames: an index of a part would let retention take the rest."""
    topic = new_topic(tmp_path, retention_s=1000.0, segment_s=1e6)
    wall.us = 1 * SECOND
    offsets_of(topic.append(one(b"old", timestamp=1 * SECOND)))
    other = opened(tmp_path)
    wall.us = 5000 * SECOND
    offsets_of(other.append(one(b"new", timestamp=5000 * SECOND)))
    fail_sync(other, one(b"lost", timestamp=5000 * SECOND))
    assert offsets_of(topic.append(one(b"later", timestamp=9000 * SECOND))) == [2]
    assert len(segments(tmp_path)) == 2
    late = opened(tmp_path)
    assert late.offset_at(0, 5000 * SECOND) == 1
    assert late.retain(5100 * SECOND) == {}
    assert values(late) == [b"old", b"new", b"later"]
    assert findings(tmp_path) == []


# Threads, forks and those who wait.


def test_l3_closing_during_an_append_gives_the_lock_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = DirectoryLog(tmp_path)
    topic = log.create_topic(Topic("t", uuid.uuid4().hex, 1))
    offsets_of(topic.append(one(b"first")))
    is_writing, may_write = threading.Event(), threading.Event()
    original = os.pwritev

    def slow(*arguments: Any) -> int:
        if threading.current_thread().name == "appends":
            is_writing.set()
            may_write.wait(BOUND_S)
        return original(*arguments)

    monkeypatch.setattr(os, "pwritev", slow)
    appending, appended = in_a_thread(lambda: offsets_of(topic.append(one(b"from the thread"))), "appends")
    assert is_writing.wait(BOUND_S)
    closing, _ = in_a_thread(log.close)
    closing.join(0.2)  # it may wait for the append, or not
    stored = {0: b"first"}
    with contextlib.suppress(LogBusy):
        stored[offsets_of(opened(tmp_path, timeout=0.2).append(one(b"from another")))[0]] = b"from another"
    may_write.set()
    for thread in (appending, closing):
        thread.join(BOUND_S)
        assert not thread.is_alive()
    if isinstance(appended[0], list):
        assert appended[0][0] not in stored, "two were told the same place"
        stored[appended[0][0]] = b"from the thread"
    stored[len(stored)] = b"last"
    assert offsets_of(opened(tmp_path).append(one(b"last"))) == [len(stored) - 1]
    assert dict(enumerate(values(opened(tmp_path)))) == stored
    assert findings(tmp_path) == []
    assert isinstance(appended[0], list | PxrsError)


def test_f3_a_fork_while_a_thread_maps_segments_does_not_hang_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread holds a lock that nobody will ever release in the child."""
    topic = new_topic(tmp_path)
    sent = fill(topic, 250)
    assert len(segments(tmp_path)) > reading.MAPPED_MAX + 1, "some must be let go again"
    is_mapping, may_go_on = threading.Event(), threading.Event()
    reader = opened(tmp_path)

    def slow(*arguments: Any) -> Sealed:
        if threading.current_thread().name == "reads" and arguments[1] == int(segments(tmp_path)[-2].stem):
            is_mapping.set()
            may_go_on.wait(BOUND_S)
        return Sealed(*arguments)

    monkeypatch.setattr(reading, "Sealed", slow)
    thread, read = in_a_thread(lambda: values(reader), "reads")
    assert is_mapping.wait(BOUND_S)
    alive_out, alive_in = os.pipe()

    def work() -> None:
        assert values(opened(tmp_path)) == sent
        with pytest.raises(PxrsError):
            reader.read(0, 0)

    with faults.child(work) as pid:
        os.close(alive_in)
        has_ended = bool(select.select([alive_out], [], [], BOUND_S)[0])  # the child had the other end
        os.close(alive_out)
        may_go_on.set()
        assert has_ended, "the child hangs"
        assert faults.wait_exit(pid) == 0
    thread.join(BOUND_S)
    assert read == [sent]


def close_it(log: DirectoryLog, path: Path) -> None:
    log.close()


def delete_it(log: DirectoryLog, path: Path) -> None:
    DirectoryLog(path).delete_topic("t")


@pytest.mark.parametrize(("act", "expected"), [(close_it, Closed), (delete_it, UnknownTopic)])
def test_x15_who_waits_without_a_bound_hears_of_the_end(
    act: Callable[[DirectoryLog, Path], None],
    expected: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = DirectoryLog(tmp_path)
    topic = log.create_topic(Topic("t", uuid.uuid4().hex, 1))
    offsets_of(topic.append(one(b"seen")))
    is_waiting = threading.Event()
    original = Notifier.sleep

    def sleep(self: Notifier, timeout: float | None) -> None:
        is_waiting.set()
        original(self, timeout)

    monkeypatch.setattr(Notifier, "sleep", sleep)
    waiting, told = in_a_thread(lambda: wait_for_messages(topic, {0: 1}, None))
    assert is_waiting.wait(BOUND_S)
    act(log, tmp_path)
    waiting.join(BOUND_S)
    assert not waiting.is_alive(), "it waits for ever"
    assert isinstance(told[0], expected)


def test_x15_more_waiters_than_the_system_allows_get_an_error_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = new_topic(tmp_path)
    offsets_of(topic.append(one(b"seen")))

    def no_more() -> Notifier:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(tailing, "Notifier", no_more)
    with pytest.raises(LogError):
        wait_for_messages(topic, {0: 1}, BOUND_S)
    monkeypatch.undo()
    assert wait_for_messages(topic, {0: 1}, 0.0) == set()
    assert wait_for_messages(topic, {0: 0}, BOUND_S) == {0}
