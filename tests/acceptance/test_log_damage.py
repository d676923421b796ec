"""Two things at once: a damaged byte, and a death, a failed sync, another damage, or somebody who wants to deceive."""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pxrs import disk
from pxrs.clock import wall_time_us
from pxrs.errors import AppendFailed, DamagedFrame, UnknownProducer
from pxrs.log.batch import Origin, encode, header_bytes, padding, place_id
from pxrs.log.contract import Append
from pxrs.log.directory.segments.frames import frames
from pxrs.log.directory.topic import DirectoryTopic
from pxrs.log.outcomes import offsets_of
from pxrs.log.producers import PRODUCERS_MAX
from pxrs.testing.log_contract import records
from tests.acceptance.directory_topics import new_topic, opened


def send(topic: DirectoryTopic, *values: bytes) -> None:
    for value in values:
        offsets_of(topic.append([Append.encoded(0, records([value]))]))


def read(topic: DirectoryTopic) -> dict[int, bytes]:
    """What can be read, by offset."""
    found: dict[int, bytes] = {}
    offset = topic.start(0)
    while offset < topic.end(0):
        try:
            batches = topic.read(0, offset)
        except DamagedFrame:
            offset += 1
            continue
        for batch in batches:
            assert batch.base_offset == offset
            found |= enumerate(batch.records.column("value").to_pylist(), offset)
            offset = batch.next_offset
    return found


def file(topic: DirectoryTopic, name: str) -> Path:
    return topic._folder.path / "partitions" / "partition-0" / name


def segment(topic: DirectoryTopic, base: int = 0) -> Path:
    return file(topic, f"{base:020d}.log")


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as opened_file:
        opened_file.seek(position)
        (byte,) = opened_file.read(1)
        opened_file.seek(position)
        opened_file.write(bytes([byte ^ 1]))


def slots(topic: DirectoryTopic) -> tuple[int, int]:
    """Where the older and the newer slot of the published end begin."""
    data = file(topic, "published").read_bytes()
    newer = 0 if data[:8][::-1] > data[64:72][::-1] else 64
    return 64 - newer, newer


def positions(path: Path) -> list[int]:
    data = pa.py_buffer(path.read_bytes())
    return [position for position, _ in frames(data, "", 0, data.size)]


class Killed(BaseException):
    pass


def killed(*arguments: object, **named: object) -> None:
    raise Killed


def test_who_dies_while_the_published_end_is_rebuilt_takes_no_message_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in range(4):
        topic = new_topic(tmp_path / str(at))
        send(topic, b"0", b"1", b"2", b"3")
        flip(file(topic, "published"), slots(topic)[1] + 30)
        writes, write = [0], os.pwrite

        def dying(*arguments: Any, at: int = at, writes: list[int] = writes, write: Any = write) -> int:
            writes[0] += 1
            if writes[0] > at:
                raise Killed
            return write(*arguments)  # type: ignore[no-any-return]

        monkeypatch.setattr(os, "pwrite", dying)
        with contextlib.suppress(Killed):
            opened(tmp_path / str(at)).end(0)
        monkeypatch.undo()
        late = opened(tmp_path / str(at))
        assert list(read(late).values()) == [b"0", b"1", b"2", b"3"]
        assert offsets_of(late.append([Append.encoded(0, records([b"4"]))])) == [4]
        assert list(read(opened(tmp_path / str(at))).values()) == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("which", [0, 1], ids=["the older slot", "the newer slot"])
def test_l3_damage_does_not_make_a_failed_sync_good(
    which: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = new_topic(tmp_path)
    send(topic, b"0", b"1", b"2")

    def no_sync(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(disk, "sync_data", no_sync)
    with pytest.raises(AppendFailed):
        send(topic, b"suspect")
    monkeypatch.undo()
    flip(file(topic, "published"), slots(topic)[which] + 9)
    late = opened(tmp_path)
    found = list(read(late).values())
    assert found[:3] == [b"0", b"1", b"2"]
    assert offsets_of(late.append([Append.encoded(0, records([b"next"]))])) == [len(found)]
    assert segment(late, len(found)).exists(), "in a new segment: what the old one has behind is not believed"
    if which == 0:
        assert len(found) == 3


@pytest.mark.parametrize("is_sealed", [False, True], ids=["tail", "sealed"])
def test_a_frame_that_somebody_sent_as_a_message_is_never_taken_for_one(is_sealed: bool, tmp_path: Path) -> None:
    forged = encode(records([b"forged", b"forged"]))
    tried = 0
    for base in (1, 2):
        for shift in range(0, 32, 8):
            topic = new_topic(tmp_path / f"{base}-{shift}", segment_bytes=1 << 20)
            header = header_bytes(forged, base, place=place_id(topic.id, 0), stored_at=0)
            copy = header + forged.data.to_pybytes() + padding(forged)
            send(topic, b"0", b"\0" * shift + copy, b"2")
            if segment(topic).read_bytes().find(copy) % 32:
                continue
            tried += 1
            if is_sealed:
                send(topic, b"x" * (1 << 20))
                segment(topic).with_suffix(".index").unlink()
            flip(segment(topic), positions(segment(topic))[1] + 20)
            found = read(opened(tmp_path / f"{base}-{shift}"))
            assert (found.get(0), found.get(1), found.get(2)) == (b"0", None, b"2")
    assert tried >= 2


@pytest.mark.parametrize("is_sealed", [False, True], ids=["tail", "sealed"])
def test_two_damaged_frames_cost_no_more_than_a_look_at_each_frame(is_sealed: bool, tmp_path: Path) -> None:
    topic = new_topic(tmp_path)
    count = 4_000
    offsets_of(topic.append([Append.encoded(0, records([b"%d" % number])) for number in range(count)]))
    if is_sealed:
        topic._partition(0).seal(1 << 62)
    starts = positions(segment(topic))
    before = time.process_time()  # of this process alone: others may keep the machine busy
    assert len(read(opened(tmp_path))) == count
    whole_s = time.process_time() - before
    if is_sealed:
        segment(topic).with_suffix(".index").unlink()
    for number in (5, count - 5):
        flip(segment(topic), starts[number] + 20)
    late = opened(tmp_path)
    before = time.process_time()
    for offset in (0, count // 2, count - 3):
        try:
            late.read(0, offset)
        except DamagedFrame:
            assert offset == count // 2
    assert time.process_time() - before < 20 * whole_s + 1
    found = read(late)
    assert set(range(count)) - found.keys() == set(range(5, count - 4)), "what leads to another damage is not certain"


def test_what_a_stored_index_leads_to_stays_readable_after_somebody_met_the_damage(tmp_path: Path) -> None:
    topic = new_topic(tmp_path, retention_s=1000.0)
    count = 1_500
    offsets_of(
        topic.append([Append.encoded(0, records([b"%d" % number + b"x" * 300], [number])) for number in range(count)])
    )
    topic._partition(0).seal(1 << 62)
    starts = positions(segment(topic))
    for number in (100, 1300):
        flip(segment(topic), starts[number] + 20)
    late = opened(tmp_path)
    for _ in range(2):
        assert late.read(0, 700, 1)[0].base_offset == 700
        assert late.read(0, 1400, 1)[0].base_offset == 1400
        for offset in (100, 1300):
            with pytest.raises(DamagedFrame):
                late.read(0, offset)
    assert late.retain(wall_time_us() + 10**12) == {0: count}, "the index tells how old it is"


def test_l4_damage_between_a_producers_first_try_and_its_next_is_no_answer(tmp_path: Path) -> None:
    topic = new_topic(tmp_path)
    since, producer = topic.end(0), uuid.uuid4()
    mine = Append.encoded(0, records([b"mine"]), Origin(producer, 0, 0), since)
    offsets_of(topic.append([mine]))
    offsets_of(
        topic.append(
            [Append.encoded(0, records([b"x"]), Origin(uuid.uuid4(), 0, 0), since) for _ in range(PRODUCERS_MAX)]
        )
    )
    topic._partition(0).seal(1 << 62)
    flip(segment(topic), positions(segment(topic))[5] + 20)
    with pytest.raises(UnknownProducer) as refused:
        offsets_of(topic.append([mine]))
    assert refused.value.stored is None


# Topics whose appends are not synced.


def test_os_nothing_is_cut_in_the_boot_in_which_it_was_published(tmp_path: Path) -> None:
    topic = new_topic(tmp_path, durability="os")
    send(topic, *(b"%d" % number + b"x" * 500 for number in range(40)))
    size = segment(topic).stat().st_size
    flip(segment(topic), positions(segment(topic))[3] + 200)
    flip(file(topic, "published"), slots(topic)[1] + 9)
    with pytest.raises(DamagedFrame):
        opened(tmp_path).end(0)
    assert segment(topic).stat().st_size == size


def test_os_a_reservation_counts_only_when_its_name_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = new_topic(tmp_path, durability="os")
    topic.end(0)
    monkeypatch.setattr(disk, "sync_folder", killed)
    with pytest.raises(Killed):
        send(topic, b"a")
    monkeypatch.undo()
    synced: list[str] = []
    sync = disk.sync_folder
    monkeypatch.setattr(disk, "sync_folder", lambda folder: (synced.append(str(folder)), sync(folder)))
    send(opened(tmp_path), b"b")
    *names, partition = synced
    assert str(tmp_path / "topics") in names, "first what makes the topic's name durable"
    assert partition == str(file(topic, "published").parent), "by the finder, before it gives an offset away"


def test_os_no_flipped_bit_of_a_reservation_is_believed(tmp_path: Path, boot: Callable[[], None]) -> None:
    topic = new_topic(tmp_path, durability="os")
    send(topic, b"a")
    path = file(topic, "reserved")
    whole = path.read_bytes()
    boot()
    for position in range(len(whole) - 1):
        flip(path, position)
        with pytest.raises(DamagedFrame, match="reserved"):
            opened(tmp_path).end(0)
        path.write_bytes(whole)
    assert opened(tmp_path).end(0) == 65_537


def test_os_a_segment_whose_sync_failed_is_written_anew_before_it_is_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = new_topic(tmp_path, durability="os", segment_bytes=4096)
    values = [b"%d" % number + b"x" * 300 for number in range(3)]
    send(topic, *values)
    before = segment(topic).stat().st_ino
    sync, calls = disk.sync_data, [0]

    def fails_once(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    monkeypatch.setattr(disk, "sync_data", fails_once)
    with pytest.raises(AppendFailed):
        send(topic, b"large" * 500)
    other = opened(tmp_path)
    send(other, b"large" * 500)
    assert segment(topic).stat().st_ino != before, "its pages may be lost, and called clean"
    assert list(read(opened(tmp_path)).values()) == [*values, b"large" * 500]
