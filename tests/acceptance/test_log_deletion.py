"""Topics that other processes delete, and make again, at any moment of what this process does with them (G7).

`faults.Steps` lets the other process act right before the n-th system call of an operation, for every n. The other
process is a second `DirectoryLog`, which shares nothing with the first one but the directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import shutil
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import pxrs
from pxrs import disk
from pxrs.errors import Closed, LogBusy, LogError, TopicDeleted, TopicExists, UnknownTopic
from pxrs.log.arrivals import wait_for_messages
from pxrs.log.batch import SCHEMA
from pxrs.log.contract import Append, Log
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.directory.topic import DirectoryTopic
from pxrs.log.directory.topic_names import TopicNames
from pxrs.log.memory import MemoryLog
from pxrs.log.outcomes import offsets_of
from pxrs.model import Topic
from pxrs.testing import faults

BOUND_S = 30.0


def described(name: str = "t", partitions: int = 1) -> Topic:
    settings = {"segment_bytes": 4096, "retention_bytes": 6000, "durability": "os"}  # not synced: many are made
    return Topic(name, uuid.uuid4().hex, partitions, **settings)  # type: ignore[arg-type]


def one(value: bytes = b"x" * 1500) -> list[Append]:
    return [Append.encoded(0, pa.RecordBatch.from_pylist([{"value": value, "timestamp": 5}], SCHEMA))]


def make(path: Path, name: str = "t") -> None:
    """A topic of several segments."""
    log = DirectoryLog(path)
    topic = log.create_topic(described(name))
    for _ in range(5):
        offsets_of(topic.append(one()))
    log.close()


def delete(path: Path) -> None:
    log = DirectoryLog(path)
    log.delete_topic("t")
    log.close()


def delete_and_make_again(path: Path) -> None:
    delete(path)
    DirectoryLog(path).create_topic(described())


OPERATIONS: dict[str, Callable[[DirectoryTopic], object]] = {
    "start": lambda topic: topic.start(0),
    "end": lambda topic: topic.end(0),
    "read": lambda topic: topic.read(0, 0),
    "read the tail": lambda topic: topic.read(0, 4),
    "offset_at": lambda topic: topic.offset_at(0, 1),
    "append": lambda topic: offsets_of(topic.append(one())),
    "wait": lambda topic: wait_for_messages(topic, {0: 4}, 0),
    "retain": lambda topic: topic.retain(0),
}


@pytest.mark.parametrize(
    ("is_warm", "act"), [(False, delete_and_make_again), (True, delete)], ids=["first use", "files open"]
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_g7_an_operation_that_meets_the_deletion_of_its_topic_succeeds_or_names_it(
    operation: str, is_warm: bool, act: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "whole")
    at, is_over, refusals = 0, False, 0
    while not is_over:
        at += 1
        path = tmp_path / str(at)
        shutil.copytree(tmp_path / "whole", path, symlinks=True)
        log = DirectoryLog(path)
        topic = log.topic("t")
        assert isinstance(topic, DirectoryTopic)
        if is_warm:
            OPERATIONS["read"](topic)
            OPERATIONS["append"](topic)
        expected = {"offset_at": 0, "start": 0, "wait": {0}}.get(operation)
        with faults.counted(faults.Steps(at, lambda _: act(path))) as steps:  # noqa: B023
            try:
                result = OPERATIONS[operation](topic)
                assert expected is None or result == expected, f"before system call {at}"
            except TopicDeleted:
                refusals += 1
        is_over = steps.count < at
        log.close()
        shutil.rmtree(path)
    assert refusals, "at some of the calls the deletion was noticed"
    assert at > 1


@pytest.mark.parametrize("left", [0, 1], ids=["no name", "some names"])
@pytest.mark.parametrize("operation", ["start", "read", "offset_at", "append", "retain"])
def test_g7_a_folder_that_is_emptied_while_it_is_listed_is_no_retention_and_no_damage(
    operation: str, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel lists a folder in pieces: a deletion meanwhile leaves out any of the names."""
    make(tmp_path)
    topic = DirectoryLog(tmp_path).topic("t")
    assert isinstance(topic, DirectoryTopic)
    topic.end(0)
    listed = os.listdir
    deleted: list[str] = []

    def list_late(folder: Any = ".") -> list[str]:
        names = listed(folder)
        if str(folder).endswith("partition-0") and not deleted:
            deleted.append(str(folder))
            delete(tmp_path)
            return sorted(name for name in names if name.endswith(".log"))[len(names) if not left else -1 :]
        return names

    monkeypatch.setattr(os, "listdir", list_late)
    if operation == "append":
        with pytest.raises(UnknownTopic):
            OPERATIONS["retain"](topic)
    with pytest.raises(UnknownTopic):
        OPERATIONS[operation](topic)
    assert deleted


def meddle(path: Path) -> None:
    """What another process does that makes and deletes topics: it also finishes deletions that it finds begun.

    While this one holds the lock of names it does not come to that: it would wait."""
    log = DirectoryLog(path, timeout=0.0)
    log.create_topic(described("more"))
    with contextlib.suppress(LogBusy):
        log.delete_topic("other")
        log.create_topic(described("other"))
    log.close()


def test_delete_topic_succeeds_whatever_others_delete_and_make_meanwhile(tmp_path: Path) -> None:
    at, is_over = 0, False
    while not is_over:
        at += 1
        path = tmp_path / str(at)
        make(path)
        make(path, "other")
        log = DirectoryLog(path)
        identity = log.topic("t").id
        with faults.counted(faults.Steps(at, lambda _: meddle(path))) as steps:  # noqa: B023
            assert log.delete_topic("t") == identity
        is_over = steps.count < at
        assert [topic.name for topic in log.topics()] == (["other"] if is_over else ["more", "other"])
        log.close()
    assert at > 10


def test_one_of_two_who_delete_the_same_topic_succeeds_and_the_other_is_told(tmp_path: Path) -> None:
    at, is_over, refusals = 0, False, 0
    while not is_over:
        at += 1
        path = tmp_path / str(at)
        make(path)
        log = DirectoryLog(path)
        done: list[str] = []

        def act(_: str, path: Path = path, done: list[str] = done) -> None:
            with contextlib.suppress(UnknownTopic, LogBusy):
                done.append(DirectoryLog(path, timeout=0.0).delete_topic("t"))

        with faults.counted(faults.Steps(at, act)) as steps:
            try:
                done.append(log.delete_topic("t"))
            except UnknownTopic:
                refusals += 1
        is_over = steps.count < at
        assert len(done) == 1
        assert log.topics() == []
        assert [file for file in path.rglob("*") if file.name not in ("topics", "logs")] == [], "all files are gone"
        log.close()
    assert refusals


def test_create_topic_returns_its_own_topic_whatever_others_do_with_the_name(tmp_path: Path) -> None:
    at, is_over, others = 0, False, 0
    while not is_over:
        at += 1
        path = tmp_path / str(at)
        make(path, "other")
        log = DirectoryLog(path)
        wanted = described()

        def act(_: str, path: Path = path) -> None:
            other = DirectoryLog(path)
            if any(topic.name == "t" for topic in other.topics()):
                other.delete_topic("t")
            other.create_topic(described())

        with faults.counted(faults.Steps(at, act)) as steps:
            try:
                made = log.create_topic(wanted)
                assert made.id == wanted.id
                offsets_of(made.append(one()))
            except (TopicExists, TopicDeleted):
                others += 1
        is_over = steps.count < at
        assert [topic.name for topic in log.topics()] == ["other", "t"]
        offsets_of(log.topic("t").append(one()))
        log.close()
    assert others


def test_a_listing_beside_deletions_holds_whole_topics(tmp_path: Path) -> None:
    at, is_over = 0, False
    while not is_over:
        at += 1
        path = tmp_path / str(at)
        make(path)
        make(path, "other")
        log = DirectoryLog(path)
        with faults.counted(faults.Steps(at, lambda _: delete_and_make_again(path))) as steps:  # noqa: B023
            names = [topic.name for topic in log.topics()]
        is_over = steps.count < at
        assert names in (["other", "t"], ["other"])
        log.close()


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_who_holds_a_topic_that_was_made_again_is_told_so_and_what_to_do(kind: str, tmp_path: Path) -> None:
    log: Log = MemoryLog() if kind == "memory" else DirectoryLog(tmp_path)
    old = log.create_topic(described())
    offsets_of(old.append(one()))
    log.delete_topic("t")
    with pytest.raises(TopicDeleted, match=r"'t' was deleted; create it") as error:
        old.end(0)
    assert not error.value.is_made_again
    new = log.create_topic(described())
    offsets_of(new.append(one()))
    for act in (
        lambda: old.end(0),
        lambda: offsets_of(old.append(one())),
        lambda: wait_for_messages(old, {0: 0}, 0),
        lambda: old.read(0, 0),
    ):
        with pytest.raises(TopicDeleted, match=r"deleted and created again.*open it again") as error:
            act()
        assert (error.value.topic, error.value.id, error.value.is_made_again) == ("t", old.id, True)
        assert "create it" not in str(error.value)
        copy = pickle.loads(pickle.dumps(error.value))  # an executor sends it to its driver
        assert (str(copy), copy.id) == (str(error.value), old.id)
    assert log.topic("t").end(0) == 1
    log.close()


def test_a_handle_of_a_topic_that_another_process_made_again_stays_that_of_the_old_one(tmp_path: Path) -> None:
    with pxrs.open(tmp_path) as hub:
        old = hub.create_topic("t", partitions=1)
        sent = hub.producer("t", linger_s=0)
        sent.send(b"a", partition=0).result(BOUND_S)
        delete_and_make_again(tmp_path)
        assert hub.topic("t").end(0) == 0, "the present one is opened, and closes the old one's files"
        with pytest.raises(TopicDeleted):
            old.end(0)
        receipt = sent.send(b"b", partition=0)
        with pytest.raises(TopicDeleted):
            receipt.result(BOUND_S)
        with pytest.raises(TopicDeleted):
            sent.flush()
        sent.close()


def test_a_hub_closes_without_error_after_its_topics_were_deleted_elsewhere(tmp_path: Path) -> None:
    hub = pxrs.open(tmp_path)
    hub.create_topic("t", partitions=1)
    with hub.producer("t") as sent:
        sent.send(b"a")
    idle = hub.producer("t")
    inbox = hub.consumer("t", "g")
    assert len(inbox.poll(timeout=BOUND_S)) == 1
    delete_and_make_again(tmp_path)
    hub.topic("t")
    with pytest.raises(TopicDeleted):
        inbox.poll(timeout=BOUND_S)
    hub.close()
    idle.close()


def test_a_closed_log_says_closed_and_not_deleted(tmp_path: Path) -> None:
    log = DirectoryLog(tmp_path)
    topic = log.create_topic(described())
    offsets_of(topic.append(one()))
    log.close()
    for act in (lambda: topic.end(0), lambda: offsets_of(topic.append(one())), lambda: topic.read(0, 0)):
        with pytest.raises(Closed):
            act()


def test_a_thread_that_appends_while_another_one_deletes_is_told_of_the_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = DirectoryLog(tmp_path)
    topic = log.create_topic(described())
    offsets_of(topic.append(one()))
    assert isinstance(topic, DirectoryTopic)
    may_go_on, is_waiting = threading.Event(), threading.Event()
    partition = topic._opened(0)

    def held(number: int) -> Any:
        is_waiting.set()
        assert may_go_on.wait(BOUND_S)
        return partition

    monkeypatch.setattr(topic, "_opened", held)
    told: list[BaseException] = []

    def work(act: Callable[[], object]) -> None:
        try:
            act()
        except LogError as error:
            told.append(error)
        except Closed as error:
            told.append(error)

    acts: list[Callable[[], object]] = [lambda: offsets_of(topic.append(one())), lambda: topic.end(0)]
    threads = [threading.Thread(target=work, args=(act,), daemon=True) for act in acts]
    for thread in threads:
        thread.start()
    assert is_waiting.wait(BOUND_S)
    log.delete_topic("t")
    may_go_on.set()
    for thread in threads:
        thread.join(BOUND_S)
    assert [type(error) for error in told] == [TopicDeleted, TopicDeleted]


def test_two_who_make_a_topic_whose_folder_was_removed_by_hand_leave_one_that_stays(tmp_path: Path) -> None:
    at, is_over = 0, False
    while not is_over:
        at += 1
        path = tmp_path / str(at)
        make(path)
        shutil.rmtree((path / "topics/t").resolve())
        log, made = DirectoryLog(path), list[str]()

        def act(_: str, path: Path = path, made: list[str] = made) -> None:
            with contextlib.suppress(TopicExists, LogBusy):
                made.append(DirectoryLog(path, timeout=0.0).create_topic(described()).id)

        with faults.counted(faults.Steps(at, act)) as steps, contextlib.suppress(TopicExists):
            made.append(log.create_topic(described()).id)
        is_over = steps.count < at
        assert made == [log.topic("t").id]
        log.close()


def test_an_interrupt_of_create_topic_takes_no_message_that_another_process_has_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    symlink = os.symlink

    def interrupted(*arguments: Any) -> None:
        symlink(*arguments)
        other = DirectoryLog(tmp_path)
        offsets_of(other.topic("t").append(one(b"acknowledged")))
        other.close()
        raise KeyboardInterrupt

    log = DirectoryLog(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "symlink", interrupted)
        with pytest.raises(KeyboardInterrupt):
            log.create_topic(described())
    assert [batch.records["value"].to_pylist() for batch in log.topic("t").read(0, 0)] == [[b"acknowledged"]]
    with pytest.raises(TopicExists):
        log.create_topic(described())


def test_an_interrupt_at_any_moment_of_create_topic_leaves_a_whole_topic_or_nothing(tmp_path: Path) -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    at, is_over, kept = 0, False, set()
    while not is_over:
        at += 1
        path = tmp_path / str(at)
        make(path, "other")
        log = DirectoryLog(path)
        with faults.counted(faults.Steps(at, interrupt)) as steps, contextlib.suppress(KeyboardInterrupt):
            log.create_topic(described())
        is_over = steps.count < at
        names = [topic.name for topic in log.topics()]
        kept.add("t" in names)
        if "t" in names:
            assert offsets_of(log.topic("t").append(one())) == [0]
        assert len(os.listdir(path / "logs")) == len(names), "no folder is left over"
        assert log.damaged_topics() == []
        log.close()
    assert kept == {False, True}


def test_a_topic_that_appears_during_a_look_up_is_whole(tmp_path: Path) -> None:
    at, is_over = 0, False
    while not is_over:
        at += 1
        path = tmp_path / str(at)
        make(path, "other")
        log = DirectoryLog(path)
        with faults.counted(faults.Steps(at, lambda _: make(path))) as steps, contextlib.suppress(UnknownTopic):  # noqa: B023
            assert log.topic("t").start(0) == 0
        is_over = steps.count < at
        log.close()
    assert at > 3


def append_if_free(path: Path) -> None:
    """What another process appends, unless this one holds the append lock."""
    with contextlib.suppress(LogBusy):
        offsets_of(DirectoryLog(path, timeout=0.0).topic("t").append(one()))


def test_the_first_append_during_a_look_at_the_start_is_no_damage(tmp_path: Path) -> None:
    at, is_over, ends = 0, False, set[int]()
    while not is_over:
        at += 1
        path = tmp_path / str(at)
        log = DirectoryLog(path)
        topic = log.create_topic(described())
        with faults.counted(faults.Steps(at, lambda _: append_if_free(path))) as steps:  # noqa: B023
            assert topic.start(0) == 0
        is_over = steps.count < at
        ends.add(topic.end(0))
        log.close()
    assert ends == {0, 1}, "at some of the calls the other one could append"


def test_nothing_of_a_deleted_topic_is_removed_before_its_deletion_would_survive_a_power_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that deletes has moved the topic's link and not synced that yet, and another one removes the files.
    A power loss could bring the link back."""
    make(tmp_path)
    TopicNames(tmp_path, BOUND_S).release("t")
    log = DirectoryLog(tmp_path)

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    def segments() -> int:
        return len(list(tmp_path.glob("logs/*/partitions/*/*.log")))

    before = segments()
    with monkeypatch.context() as failing:
        failing.setattr(disk, "sync_folder", fail)
        log.finish_deletions()
    assert segments() == before > 1
    log.finish_deletions()
    assert segments() == 0
    assert not list(tmp_path.glob("topics/.deleted-*"))
    log.close()
