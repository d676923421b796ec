"""Damage that once broke the log in a directory, brought about on purpose; and retention (L2, L4, F5)."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pxrs.errors import (
    AppendFailed,
    DamagedFrame,
    LogError,
    OffsetTrimmed,
    UnknownProducer,
    UnknownTopic,
)
from pxrs.log.arrivals import wait_for_messages
from pxrs.log.contract import Append
from pxrs.log.directory import partition as partition_module
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.directory.topic import DirectoryTopic
from pxrs.log.outcomes import Outcome, offsets_of
from pxrs.log.producers import PRODUCERS_MAX
from pxrs.model import Topic
from pxrs.producer.producer import Producer
from pxrs.testing import power
from tests.acceptance.directory_topics import opened

if TYPE_CHECKING:
    from tests.acceptance.conftest import WallTime

from tests.acceptance.log_schedules.topics import (
    SECOND,
    fill,
    findings,
    new_topic,
    one,
    records,
    segments,
    values,
)


def flip(file: Path, position: int, bit: int = 0) -> None:
    """Damage one bit, in a new file, as a restore would make it: nobody's map is changed."""
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.unlink()
    file.write_bytes(data)


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
    shutil.rmtree(topic._folder.path)
    assert DirectoryLog(tmp_path).topics() == []
    assert offsets_of(new_topic(tmp_path).append(one(b"b"))) == [0]


def test_a_topic_that_was_deleted_is_unknown_in_the_same_process_too(tmp_path: Path) -> None:
    log = DirectoryLog(tmp_path)
    topic = log.create_topic(Topic("t", uuid.uuid4().hex, 1))
    offsets_of(topic.append(one(b"a")))
    log.delete_topic("t")
    for act in (
        lambda: topic.end(0),
        lambda: offsets_of(topic.append(one(b"b"))),
        lambda: wait_for_messages(topic, {0: 0}, 1.0),
    ):
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
