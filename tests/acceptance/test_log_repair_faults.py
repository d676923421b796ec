"""Repairs that are killed, that come too late, or that find more than one file damaged: no message is lost or doubled
by them, no offset is given away twice, and no byte is thrown away."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import pxrs
from pxrs import disk
from pxrs.log.contract import Append
from pxrs.log.directory import published, repair
from pxrs.log.directory.repair import plan
from pxrs.log.directory.reserved import read_reserved
from pxrs.log.directory.topic import DirectoryTopic
from pxrs.log.outcomes import offsets_of
from pxrs.testing.log_contract import records
from tests.acceptance.directory_topics import log_in, new_topic, opened
from tests.acceptance.test_log_damage import Killed, file, flip, positions, segment, send, slots
from tests.acceptance.test_log_repair import (
    COUNT,
    a_topic,
    all_bytes,
    bases,
    findings,
    of_last,
    of_sealed,
    read_on,
    repaired,
    value,
)


def damage_last_frame(topic: DirectoryTopic) -> None:
    flip(of_last(topic), positions(of_last(topic))[-1] + 300)


def misplace_published(topic: DirectoryTopic, path: Path) -> None:
    """Put the file of another topic in its place, as a copy does: processes have the file open."""
    other = new_topic(path, "u")
    send(other, b"x")
    file(topic, "published").write_bytes(file(other, "published").read_bytes())


def test_a_producer_that_is_open_goes_on_behind_a_gap(tmp_path: Path) -> None:
    """Its last batch is lost, so the log cannot know how many it has sent: the producer goes on under a new id."""
    with pxrs.open(tmp_path) as hub:
        hub.create_topic("t", partitions=1)
        with hub.producer("t") as out:
            for number in range(3):
                out.send(value(number))
                out.flush()
            damage_last_frame(opened(tmp_path))
            repaired(tmp_path)
            for number in range(3, 6):
                out.send(value(number))
                out.flush()
    assert read_on(opened(tmp_path)) == {number: value(number) for number in (0, 1, 3, 4, 5)}


KILLED_AT = ("replace", "rename", "pwrite", "ftruncate", "fsync", "fdatasync", "write")


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Die at the call of this number that changes a file."""
    left = iter(range(number, -1, -1))

    def dying(call: Callable[..., object]) -> Callable[..., object]:
        def called(*arguments: object, **named: object) -> object:
            if next(left, 0) == 0:
                raise Killed
            return call(*arguments, **named)

        return called

    for name in KILLED_AT:
        monkeypatch.setattr(os, name, dying(getattr(os, name)))


@pytest.mark.parametrize("frame", [0, 1], ids=["first frame", "last frame"])
def test_a_repair_that_is_killed_at_any_step_loses_nothing_that_is_appended_then(
    frame: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(100):
        path = tmp_path / str(number)
        topic = new_topic(path, segment_bytes=4_096)  # stays open, as in another process
        send(topic, value(0), value(1))  # the segment has room for two more
        last = segment(topic)
        flip(last, positions(last)[frame] + 300)
        before = all_bytes(path)
        (step,) = plan(path, findings(path))
        is_done = False
        with monkeypatch.context() as patch:
            kill_at(patch, number)
            try:
                step.perform()
                is_done = True
            except Killed:
                pass
        stored = {}
        for more in range(2, 6):  # fills that segment, and more
            try:
                (at,) = offsets_of(topic.append([Append.encoded(0, records([value(more)]))]))
            except pxrs.errors.DamagedFrame:  # until the repair is finished, it may refuse to append
                continue
            stored[at] = value(more)
        while findings(path):
            assert [step.perform() for step in plan(path, findings(path))]
        now = tuple(all_bytes(path))  # the producer may have appended to the damaged file
        assert all(any(each.startswith(content) for each in now) for content in before), "bytes were thrown away"
        assert read_on(opened(path)) == {1 - frame: value(1 - frame)} | stored
        send(opened(path), b"more")
        assert findings(path) == []
        if is_done:
            assert number > 5, "the repair was never killed"
            return
    raise AssertionError("the repair never ended")


def test_offsets_that_a_power_loss_may_have_taken_are_not_given_away_after_a_repair(
    tmp_path: Path, boot: Callable[[], None]
) -> None:
    topic = a_topic(tmp_path, durability="os")
    reserved = read_reserved(str(segment(topic).parent), topic._partition(0)._place_id)
    last = of_last(topic)
    places = positions(last)
    flip(last, places[0] + 300)
    os.truncate(last, places[-1])
    boot()
    repaired(tmp_path)
    assert findings(tmp_path) == []
    assert opened(tmp_path).end(0) >= reserved >= COUNT


@pytest.mark.parametrize("kind", ["misplaced", "newer slot damaged", "both slots damaged"])
def test_a_last_frame_that_may_be_acknowledged_is_not_cut_while_the_end_is_found(kind: str, tmp_path: Path) -> None:
    topic = a_topic(tmp_path)
    damage_last_frame(topic)
    if kind == "misplaced":
        misplace_published(topic, tmp_path)
    else:
        for slot in slots(topic) if kind.startswith("both") else slots(topic)[1:]:
            flip(file(topic, "published"), slot + 20)
    before = all_bytes(tmp_path)
    (step,) = plan(tmp_path, findings(tmp_path))
    assert step.lost > 0
    step.perform()
    assert findings(tmp_path) == []
    assert before <= all_bytes(tmp_path), "bytes were thrown away"
    for each in (opened(tmp_path), topic):
        assert read_on(each) == {number: value(number) for number in range(COUNT - 1)}
        assert each.end(0) > COUNT - 1, "a consumer may have read the last message"
    send(topic, b"more")
    assert findings(tmp_path) == []


def test_segments_behind_an_older_published_end_stay(tmp_path: Path) -> None:
    topic = new_topic(tmp_path, segment_bytes=1 << 20)
    send(topic, *map(value, range(4)))
    older = file(topic, "published").read_bytes()
    send(topic, *map(value, range(4, COUNT)))
    file(topic, "published").write_bytes(older)
    flip(segment(topic), positions(segment(topic))[1] + 300)
    repaired(tmp_path)
    assert findings(tmp_path) == []
    assert read_on(opened(tmp_path)) == {number: value(number) for number in range(COUNT) if number != 1}


@pytest.mark.parametrize("is_booted", [True, False])
def test_a_partition_without_any_segment_goes_on_behind_a_gap(
    is_booted: bool, tmp_path: Path, boot: Callable[[], None]
) -> None:
    topic = a_topic(tmp_path)
    for base in bases(topic):
        os.unlink(segment(topic, base))
    if is_booted:
        boot()
    repaired(tmp_path)
    assert findings(tmp_path) == []
    assert read_on(opened(tmp_path)) == {}
    send(opened(tmp_path), b"more")
    assert read_on(opened(tmp_path)) == {COUNT: b"more"}


def test_a_full_disk_leaves_the_damaged_reservation_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the file `reserved` a power loss would let offsets be given away twice."""
    topic = a_topic(tmp_path, durability="os")
    path = file(topic, "reserved")
    flip(path, 20)
    damaged = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (step,) = plan(tmp_path, findings(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(repair, "replace_file", full)
        with pytest.raises(OSError, match="No space"):
            step.perform()
    assert path.read_bytes() == damaged
    repaired(tmp_path)
    assert findings(tmp_path) == []
    assert damaged in all_bytes(tmp_path)


def test_the_repair_of_a_segment_keeps_the_damaged_published_end_too(tmp_path: Path) -> None:
    """As if the disk had been full at the step for `published`, which comes first."""
    topic = a_topic(tmp_path)
    flip(of_last(topic), positions(of_last(topic))[0] + 300)
    flip(file(topic, "published"), slots(topic)[1] + 20)
    damaged = file(topic, "published").read_bytes()
    _, step = plan(tmp_path, findings(tmp_path))
    assert str(of_last(topic).resolve()) == step.finding.file
    step.perform()
    assert damaged in all_bytes(tmp_path)
    assert findings(tmp_path) == []


def test_one_run_reports_all_files_beside_a_misplaced_published_end(tmp_path: Path) -> None:
    topic = a_topic(tmp_path, durability="os")
    misplace_published(topic, tmp_path)
    flip(file(topic, "reserved"), 20)
    assert {os.path.basename(each.file) for each in findings(tmp_path)} == {"published", "reserved"}


def test_a_step_that_comes_after_the_file_was_made_again_does_nothing(tmp_path: Path) -> None:
    topic = a_topic(tmp_path)
    index = of_sealed(topic).with_suffix(".index")
    flip(index, 20)
    (step,) = plan(tmp_path, findings(tmp_path))
    read_on(opened(tmp_path))  # makes it again
    made = index.read_bytes()
    assert step.perform().startswith("nothing")
    assert index.read_bytes() == made


def test_a_step_does_nothing_to_another_topic_that_got_the_name(tmp_path: Path) -> None:
    topic = a_topic(tmp_path)
    os.unlink(of_sealed(topic))
    (step,) = plan(tmp_path, findings(tmp_path))
    log_in(tmp_path).delete_topic("t")
    again = new_topic(tmp_path)
    with pytest.raises(FileNotFoundError):
        step.perform()
    assert findings(tmp_path) == []
    send(again, b"first")
    assert read_on(again) == {0: b"first"}


def test_a_step_does_nothing_where_retention_has_removed_the_segment(tmp_path: Path) -> None:
    topic = a_topic(tmp_path)
    flip(segment(topic), positions(segment(topic))[0] + 300)
    (step,) = plan(tmp_path, findings(tmp_path))
    topic.trim({0: bases(topic)[1]})
    assert "retention has removed it" in step.perform()
    assert not segment(topic).exists()


def test_the_plan_says_where_the_damaged_file_is_kept(tmp_path: Path) -> None:
    topic = a_topic(tmp_path)
    flip(of_sealed(topic), positions(of_sealed(topic))[0] + 300)
    (step,) = plan(tmp_path, findings(tmp_path))
    assert "the damaged file is kept beside it" in step.action


def test_what_is_left_of_a_torn_first_frame_is_kept_when_the_end_is_found(tmp_path: Path) -> None:
    topic = a_topic(tmp_path)
    last = of_last(topic)
    os.truncate(last, 200)
    left = last.read_bytes()
    send(opened(tmp_path), b"more")
    assert left in all_bytes(tmp_path)


def test_a_segment_that_was_not_synced_is_synced_before_a_repair_seals_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With durability "os" a power loss may take a part of the last segment, and of no other one."""
    topic = a_topic(tmp_path, durability="os")
    damage_last_frame(topic)
    (step,) = plan(tmp_path, findings(tmp_path))
    synced: list[str] = []
    sync = disk.sync_data

    def noting(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    last = str(of_last(topic).resolve())
    monkeypatch.setattr(disk, "sync_data", noting)
    step.perform()
    assert last in synced


def test_the_published_end_is_replaced_in_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies between two writes would leave neither the file of the other topic nor an end."""
    topic = a_topic(tmp_path)
    misplace_published(topic, tmp_path)
    damage_last_frame(topic)
    writes = []
    write = os.pwrite
    monkeypatch.setattr(published.os, "pwrite", lambda *given: writes.append(given) or write(*given))
    repaired(tmp_path)
    assert len(writes) == 1
