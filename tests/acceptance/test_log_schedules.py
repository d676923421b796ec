"""Schedules and damage that once broke the log in a directory, each brought about on purpose (L2-L4, F3, F5, X15)."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from pxrs.errors import (
    AppendFailed,
    AppendUnknown,
    Closed,
    DamagedFrame,
    LogBusy,
    LogError,
    OffsetTrimmed,
    PxrsError,
    UnknownProducer,
    UnknownTopic,
)
from pxrs.inotify import Notifier
from pxrs.log.batch import SCHEMA, Origin
from pxrs.log.contract import Append
from pxrs.log.directory import partition as partition_module
from pxrs.log.directory import reading, tailing
from pxrs.log.directory.check import check
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.directory.sealed import Sealed
from pxrs.log.directory.topic import DirectoryTopic
from pxrs.log.outcomes import MaybeStored, Outcome, offsets_of
from pxrs.log.producers import PRODUCERS_MAX
from pxrs.model import Topic
from pxrs.producer.producer import Producer
from pxrs.testing import faults, power

if TYPE_CHECKING:
    from tests.acceptance.conftest import WallTime

BOUND_S = 20.0
SECOND = 1_000_000


def records(*values: bytes, timestamp: int = 1) -> pa.RecordBatch:
    rows = len(values)
    columns = [pa.nulls(rows, pa.binary()), pa.array(values, pa.binary())]
    columns += [pa.array([timestamp] * rows, SCHEMA.field(2).type), pa.nulls(rows, SCHEMA.field(3).type)]
    return pa.record_batch(columns, schema=SCHEMA)


def one(value: bytes, producer: uuid.UUID | None = None, sequence: int = 0, timestamp: int = 1) -> list[Append]:
    batch = records(value, timestamp=timestamp)
    return [Append.encoded(0, batch) if producer is None else Append.encoded(0, batch, Origin(producer, 0, sequence))]


def new_topic(path: Path, **options: Any) -> DirectoryTopic:
    options = {"segment_bytes": 8192, **options}
    topic = DirectoryLog(path).create_topic(Topic("t", uuid.uuid4().hex, 1, **options))
    assert isinstance(topic, DirectoryTopic)
    return topic


def opened(path: Path, timeout: float = 10.0) -> DirectoryTopic:
    """A handle of its own, with files and locks of its own, as another process has."""
    topic = DirectoryLog(path, timeout).topic("t")
    assert isinstance(topic, DirectoryTopic)
    return topic


def fill(topic: DirectoryTopic, count: int, producer: uuid.UUID | None = None, timestamp: int = 1) -> list[bytes]:
    """Appends of about 700 bytes: a segment holds eleven of them. Their times are a second apart."""
    sent = [b"old-%d" % number for number in range(count)]
    for number, value in enumerate(sent):
        assert offsets_of(topic.append(one(value, producer, number, timestamp + number * SECOND))) == [number]
    return sent


def values(topic: DirectoryTopic, offset: int | None = None) -> list[bytes]:
    """All values, after checking that their offsets have neither gap nor repeat."""
    found: list[bytes] = []
    position = topic.start(0) if offset is None else offset
    while batches := topic.read(0, position, 20_000):
        for batch in batches:
            assert batch.base_offset == position
            found += batch.records.column("value").to_pylist()
            position = batch.next_offset
    return found


def segments(path: Path) -> list[Path]:
    return sorted((path / "topics/t/partitions/partition-0").glob("*.log"))


def findings(path: Path) -> list[str]:
    return [f"{finding.file} {finding.what}" for checked in check(path) for finding in checked.findings]


def flip(file: Path, position: int, bit: int = 0) -> None:
    """Damage one bit, in a new file, as a restore would make it: nobody's map is changed."""
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.unlink()
    file.write_bytes(data)


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


# A sync that fails.


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
    waiting, told = in_a_thread(lambda: topic.wait({0: 1}, None))
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
        topic.wait({0: 1}, BOUND_S)
    monkeypatch.undo()
    assert topic.wait({0: 1}, 0.0) == set()
    assert topic.wait({0: 0}, BOUND_S) == {0}


# Damage.


@pytest.mark.parametrize("position", [20, 730], ids=["first frame", "a later frame"])
def test_f5_no_time_is_believed_of_a_damaged_segment_without_an_index(
    position: int, tmp_path: Path, wall: WallTime
) -> None:
    topic = new_topic(tmp_path, retention_s=1000.0)
    wall.us = 5000 * SECOND
    fill(topic, 40, timestamp=5000 * SECOND)
    before = segments(tmp_path)
    flip(before[0], position)
    before[0].with_suffix(".index").unlink()
    with pytest.raises(DamagedFrame) as error:
        opened(tmp_path).offset_at(0, 5005 * SECOND)
    assert os.path.realpath(error.value.file) == os.path.realpath(before[0])
    assert opened(tmp_path).retain(5100 * SECOND) == {}
    assert opened(tmp_path).retain(5100 * SECOND) == {}, "nor by what the first one may have left"
    assert segments(tmp_path) == before


def test_f5_no_flipped_bit_of_an_index_is_believed(tmp_path: Path, wall: WallTime) -> None:
    topic = new_topic(tmp_path, retention_s=1000.0)
    wall.us = 5000 * SECOND
    sent = fill(topic, 40, timestamp=5000 * SECOND)
    index = segments(tmp_path)[1].with_suffix(".index")
    whole = index.read_bytes()
    first = int(index.stem)
    for position in range(len(whole)):
        index.write_bytes(whole)
        flip(index, position, position % 8)
        damaged = opened(tmp_path)
        assert damaged.offset_at(0, (5000 + first + 2) * SECOND) == first + 2, f"byte {position}"
        assert damaged.retain(5100 * SECOND) == {}, f"byte {position}"
        assert values(damaged, first) == sent[first:], f"byte {position}"
        damaged.close()


def test_f5_after_a_boot_a_damaged_tail_leaves_the_sealed_segments_readable(
    tmp_path: Path, boot: Callable[[], None]
) -> None:
    topic = new_topic(tmp_path)
    sent = fill(topic, 40)
    tail = segments(tmp_path)[-1]
    first = int(tail.stem)
    flip(tail, 730)
    boot()
    late = opened(tmp_path)
    stored: list[bytes] = []
    while len(stored) < first:
        (batch,) = late.read(0, len(stored), 1)
        stored += batch.records.column("value").to_pylist()
    assert stored == sent[:first]
    for action in (lambda: late.read(0, first), lambda: offsets_of(late.append(one(b"not behind damage")))):
        with pytest.raises(DamagedFrame):
            action()


def test_f5_a_torn_append_that_holds_a_copy_of_an_older_frame_is_cut(tmp_path: Path, boot: Callable[[], None]) -> None:
    """Such as a message that is a part of a log. The copy is no proof that what is before it was synced."""
    topic = new_topic(tmp_path, segment_bytes=1 << 20)
    assert offsets_of(topic.append(one(b"acknowledged"))) == [0]
    (file,) = segments(tmp_path)
    frame = file.read_bytes()
    published = (file.parent / "published").read_bytes()
    copies = b"".join(bytes(shift) + frame + bytes(32 - shift) for shift in range(0, 32, 8))  # one will be aligned
    offsets_of(topic.append([Append.encoded(0, records(b"." * 6000, copies))]))
    torn = bytearray(file.read_bytes())
    torn[len(frame) : 4096] = bytes(4096 - len(frame))  # its first block has not reached the medium
    file.unlink()
    file.write_bytes(torn)
    (file.parent / "published").write_bytes(published)  # it was not published yet
    boot()
    late = opened(tmp_path)
    assert values(late) == [b"acknowledged"]
    assert offsets_of(late.append(one(b"next"))) == [1]
    assert values(opened(tmp_path)) == [b"acknowledged", b"next"]
    assert findings(tmp_path) == []


@pytest.mark.parametrize("harm", ["missing", "damaged", "empty"])
def test_l4_a_lost_state_of_producers_is_found_again_in_the_segments(harm: str, tmp_path: Path) -> None:
    topic, silent, producer = new_topic(tmp_path), uuid.uuid4(), uuid.uuid4()
    assert offsets_of(topic.append(one(b"once", silent))) == [0]
    for sequence in range(30):
        offsets_of(topic.append(one(b"%d" % sequence, producer, sequence)))
    offsets_of(
        topic.append(one(b"x" * 7000, producer, 30))
    )  # one segment more, so that the retry is in none but sealed ones
    offsets_of(topic.append(one(b"y" * 7000, producer, 31)))
    state = segments(tmp_path)[-1].with_suffix(".producers")
    if harm == "damaged":
        flip(state, state.stat().st_size // 2)
    else:
        state.unlink()
        if harm == "empty":
            state.touch()
    late = opened(tmp_path)
    assert offsets_of(late.append(one(b"once", silent))) == [0]
    assert [offsets_of(late.append(one(b"again", producer, sequence))) for sequence in (28, 30, 31)] == [
        [29],
        [31],
        [32],
    ]
    assert offsets_of(late.append(one(b"next", producer, 32))) == [33]
    assert late.end(0) == 34


def test_l4_a_silent_producer_is_forgotten_at_a_roll_and_found_in_the_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_module, "SILENT_S_MAX", -3600.0)
    topic, silent, other = new_topic(tmp_path), uuid.uuid4(), uuid.uuid4()
    offsets_of(topic.append(one(b"before")))
    assert offsets_of(topic.append(one(b"once", silent))) == [1]
    for _ in range(3):
        offsets_of(topic.append(one(b"x" * 7000)))
    assert len(segments(tmp_path)) > 2
    retry, begin = one(b"once", silent)[0], one(b"begin", other)[0]
    for log in (topic, opened(tmp_path)):
        for since in (None, 0, 1):
            if since is None:
                with pytest.raises(UnknownProducer):
                    offsets_of(log.append([retry]))
            else:
                assert offsets_of(log.append([retry._replace(since=since)])) == [1]
    assert offsets_of(topic.append([begin._replace(since=topic.end(0))])) == [5]
    for path in segments(tmp_path)[0].parent.glob(f"{segments(tmp_path)[0].stem}.*"):
        path.unlink()  # as retention does
    with pytest.raises(UnknownProducer):
        offsets_of(opened(tmp_path).append([retry._replace(since=1)]))
    assert topic.end(0) == 6


def test_l4_a_forgotten_producer_goes_on_though_another_partition_fails_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = DirectoryLog(tmp_path).create_topic(Topic("t", uuid.uuid4().hex, 2))
    assert isinstance(topic, DirectoryTopic)
    for error in (AppendFailed("for a moment"), DamagedFrame("file", 0, "for a moment")):
        with contextlib.suppress(DamagedFrame), Producer(topic, linger_s=60) as out:
            for round_number in range(2):
                for number in (0, 1):
                    out.send(b"%d" % round_number, partition=number)
                out.flush()
                crowd = [one(b"crowd", uuid.uuid4())[0]._replace(since=0) for _ in range(PRODUCERS_MAX)]
                offsets_of(topic.append(crowd))
                failing = topic._partition(1)
                stored = failing.append

                def fail_once(
                    batches: Any, failing: Any = failing, stored: Any = stored, error: Exception = error
                ) -> list[Outcome]:
                    monkeypatch.setattr(failing, "append", stored)
                    raise error

                monkeypatch.setattr(failing, "append", fail_once)
    assert [value for value in values(topic) if value != b"crowd"] == [b"0", b"1", b"0", b"1"]


@pytest.mark.parametrize("action", ["retain", "append", "end"])
def test_an_interrupt_while_others_appends_are_learnt_forgets_none_of_them(
    action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boot: Callable[[], None]
) -> None:
    topic, producer = new_topic(tmp_path, retention_s=1000.0), uuid.uuid4()
    offsets_of(topic.append(one(b"0", producer)))
    other = opened(tmp_path)
    assert offsets_of(other.append(one(b"1", producer, 1))) == [1]

    def interrupted(*arguments: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    if action == "end":
        boot()
        topic = opened(tmp_path)
    monkeypatch.setattr("pxrs.log.producers.Producers.note_all", interrupted)
    acts = {
        "retain": lambda: topic.retain(SECOND),
        "append": lambda: offsets_of(topic.append(one(b"x"))),
        "end": lambda: topic.end(0),
    }
    with pytest.raises(KeyboardInterrupt):
        acts[action]()
    assert offsets_of(topic.append(one(b"1", producer, 1))) == [1], "stored once"
    offsets_of(topic.append(one(b"y" * 9000)))  # rolls, and writes down what it knows
    offsets_of(topic.append(one(b"z")))
    assert offsets_of(opened(tmp_path).append(one(b"1", producer, 1))) == [1]


def test_a_refused_append_costs_no_look_at_the_whole_tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = new_topic(tmp_path)
    offsets_of(topic.append(one(b"0")))
    tail = topic._partition(0)._tail
    with pytest.raises(UnknownProducer):
        offsets_of(topic.append(one(b"1", uuid.uuid4(), 3)))
    assert topic._partition(0)._tail is tail


def test_a_link_whose_folder_was_removed_by_hand_is_no_topic_and_leaves_the_name_free(tmp_path: Path) -> None:
    topic = new_topic(tmp_path)
    offsets_of(topic.append(one(b"a")))
    shutil.rmtree(topic._folder)
    assert DirectoryLog(tmp_path).topics() == []
    assert offsets_of(new_topic(tmp_path).append(one(b"b"))) == [0]


def test_a_topic_that_was_deleted_is_unknown_in_the_same_process_too(tmp_path: Path) -> None:
    log = DirectoryLog(tmp_path)
    topic = log.create_topic(Topic("t", uuid.uuid4().hex, 1))
    offsets_of(topic.append(one(b"a")))
    log.delete_topic("t")
    for act in (lambda: topic.end(0), lambda: offsets_of(topic.append(one(b"b"))), lambda: topic.wait({0: 0}, 1.0)):
        with pytest.raises(UnknownTopic):
            act()


def test_a_partition_that_cannot_be_opened_leaks_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_topic(tmp_path)
    topic = opened(tmp_path)
    open_file = os.open

    def none_left(path: Any, *arguments: Any, **named: Any) -> int:
        if str(path).endswith("/lock"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return open_file(path, *arguments, **named)

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "open", none_left)
    for _ in range(3):
        with pytest.raises(LogError, match="Too many open files"):
            topic.end(0)
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert topic.end(0) == 0


def test_messages_of_a_quiet_partition_go_when_they_are_old(tmp_path: Path, wall: WallTime) -> None:
    topic = new_topic(tmp_path, retention_s=1000.0)
    wall.us = 5002 * SECOND
    fill(topic, 3, timestamp=5000 * SECOND)
    assert topic.retain(5900 * SECOND) == {}
    assert topic.retain(6003 * SECOND) == {0: 3}
    assert (topic.start(0), topic.end(0)) == (3, 3)
    assert topic.retain(9000 * SECOND) == {}
    assert offsets_of(topic.append(one(b"next", timestamp=9000 * SECOND))) == [3]
    assert values(opened(tmp_path), 3) == [b"next"]
    assert findings(tmp_path) == []


def test_f5_a_missing_tail_is_an_error_and_never_an_end(tmp_path: Path) -> None:
    topic = new_topic(tmp_path)
    sent = fill(topic, 40)
    tail = segments(tmp_path)[-1]
    first = int(tail.stem)
    tail.unlink()
    late = opened(tmp_path)
    for offset in (first, first + 1):
        with pytest.raises(LogError) as error:
            late.read(0, offset)
        assert not isinstance(error.value, OffsetTrimmed), "nothing was trimmed"
    with pytest.raises(LogError):
        offsets_of(late.append(one(b"not behind a gap")))
    assert late.read(0, 0, 1)[0].records.column("value").to_pylist() == sent[:1], "the rest stays readable"


# Retention.


def test_l2_two_who_retain_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one removes what the first one is about to look at."""
    topic = new_topic(tmp_path, retention_bytes=9000)
    sent = fill(topic, 60)
    first, second = opened(tmp_path), opened(tmp_path)
    partition = first._partition(0).reader
    original = partition._refresh_bases
    moved: list[dict[int, int]] = []

    def slow() -> None:
        original()
        if not moved:
            moved.append(second.retain(0))

    monkeypatch.setattr(partition, "_refresh_bases", slow)
    assert first.retain(0) in ({}, moved[0])
    assert moved[0][0] > 0
    assert first.start(0) == opened(tmp_path).start(0) == moved[0][0]
    assert values(first) == sent[moved[0][0] :]


def test_l2_a_reader_of_the_tail_is_told_when_a_roll_and_retention_were_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = new_topic(tmp_path, retention_bytes=4096)
    fill(topic, 5)
    reader = opened(tmp_path)
    partition = reader._partition(0).reader
    original = partition._base_of

    def slow(*arguments: Any) -> int:
        base = original(*arguments)
        monkeypatch.undo()
        for _ in range(30):  # what it is about to open is sealed, and removed
            offsets_of(topic.append(one(b"new")))
        assert topic.retain(0)[0] > 5
        return base

    monkeypatch.setattr(partition, "_base_of", slow)
    for _ in range(2):
        with pytest.raises(OffsetTrimmed) as error:
            reader.read(0, 0)
        assert error.value.first_offset == topic.start(0)


@pytest.fixture
def fast() -> Iterator[Path]:
    """A place in memory: what is synced is simulated."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="pxrs-schedules-", dir=place) as folder:
        yield Path(folder)


def test_l2_a_power_loss_during_retention_leaves_no_gap(fast: Path, boot: Callable[[], None]) -> None:
    """Each removal that is not synced may be undone on its own, at every moment."""
    root, state = fast / "run", fast / "state"
    root.mkdir()
    topic = new_topic(root, retention_bytes=9000)
    sent = fill(topic, 60)
    with power.recorded(root) as tape:
        assert topic.retain(0)[0] > 22, "several segments"
    boot()
    for at in range(len(tape.events) + 1):
        lost, changes = 0, 1
        while lost < changes:
            asked: list[int] = []

            def choose(possibilities: int, lost: int = lost, asked: list[int] = asked) -> int:
                asked.append(possibilities)
                return 0 if len(asked) - 1 == lost else possibilities - 1

            tape.restore(at, choose, state)
            late = opened(state)
            assert values(late) == sent[late.start(0) :], f"moment {at}, without change {lost}"
            assert findings(state) == [], f"moment {at}, without change {lost}"
            late.close()
            shutil.rmtree(state)
            lost, changes = lost + 1, len(asked)
