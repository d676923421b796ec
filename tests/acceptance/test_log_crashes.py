"""The log in a directory under kill -9, failing calls, a new boot, damage and retention (L1-L4, F5, F6, F9)."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import struct
import tempfile
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from pxrs.errors import AppendFailed, DamagedFrame, LogBusy, LogError, OffsetTrimmed, UnknownProducer
from pxrs.log.arrivals import wait_for_messages
from pxrs.log.batch import SCHEMA, Batch, Origin
from pxrs.log.contract import Append
from pxrs.log.directory import published as published_module
from pxrs.log.directory.check import check
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.directory.segments.frames import frames
from pxrs.log.directory.topic import DirectoryTopic
from pxrs.log.outcomes import offsets_of
from pxrs.model import Topic
from pxrs.testing import faults
from tests.acceptance import directory_topics
from tests.acceptance.directory_topics import opened

pytestmark = pytest.mark.sampled(2, of="module")

SOAK = bool(os.environ.get("PXRS_SOAK"))

new_topic = partial(directory_topics.new_topic, segment_bytes=8192)


def records(*values: bytes, timestamp: int = 1) -> pa.RecordBatch:
    rows = len(values)
    columns = [pa.nulls(rows, pa.binary()), pa.array(values, pa.binary())]
    columns += [pa.array([timestamp] * rows, SCHEMA.field(2).type), pa.nulls(rows, SCHEMA.field(3).type)]
    return pa.record_batch(columns, schema=SCHEMA)


def batches(topic: DirectoryTopic, partition: int = 0, offset: int | None = None) -> Iterator[Batch]:
    position = topic.start(partition) if offset is None else offset
    while found := topic.read(partition, position, 20_000):
        yield from found
        position = found[-1].next_offset


def values(topic: DirectoryTopic, partition: int = 0) -> list[bytes]:
    """All values, after checking that their offsets have neither gap nor repeat."""
    found: list[bytes] = []
    for batch in batches(topic, partition):
        assert batch.base_offset == len(found) + topic.start(partition)
        found += batch.records.column("value").to_pylist()
    return found


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def tail_file(topic: DirectoryTopic) -> Path:
    return max((topic._folder.path / "partitions" / "partition-0").glob("*.log"))


def produce(path: Path, told: Path, name: str) -> None:
    """Append for ever, and tell of each acknowledged batch on which partition and offset it is."""
    topic = opened(path)
    out = os.open(told, os.O_WRONLY | os.O_APPEND)
    producer, dice = uuid.uuid4(), random.Random(name)
    sequences = [0, 0]
    while True:
        partition = dice.randrange(2)
        origin = Origin(producer, 0, sequences[partition])
        sent = [f"{name}-{partition}-{origin.sequence}-{i}".encode() for i in range(dice.randint(1, 4))]
        (offset,) = offsets_of(topic.append([Append.encoded(partition, records(*sent), origin)]))
        sequences[partition] += 1
        os.write(out, f"{json.dumps([partition, offset, [v.decode() for v in sent]])}\n".encode())


def follow(path: Path, told: Path) -> None:
    """Read for ever, and tell of everything seen."""
    topic = opened(path)
    out = os.open(told, os.O_WRONLY | os.O_APPEND)
    positions = {0: 0, 1: 0}
    while True:
        for partition in wait_for_messages(topic, positions, 5.0):
            for batch in topic.read(partition, positions[partition]):
                seen = [v.decode() for v in batch.records.column("value").to_pylist()]
                os.write(out, f"{json.dumps([partition, batch.base_offset, seen])}\n".encode())
                positions[partition] = batch.next_offset


def test_f6_kill_9_of_producers_loses_and_doubles_nothing(tmp_path: Path) -> None:
    topic = new_topic(tmp_path, partitions=2)
    acknowledged, seen = tmp_path / "acknowledged", tmp_path / "seen"
    acknowledged.touch()
    seen.touch()
    dice = random.Random(4)
    kills = 120 if SOAK else 20
    with faults.child(lambda: follow(tmp_path, seen)):
        for round_number in range(kills // 2):
            names = [f"{round_number}-{i}" for i in range(3)]
            workers = [faults.child(lambda n=n: produce(tmp_path, acknowledged, n)) for n in names]  # type: ignore[misc]
            size, until = acknowledged.stat().st_size, time.monotonic() + 30
            with workers[0] as one, workers[1] as two, workers[2]:
                while acknowledged.stat().st_size < size + 200 and time.monotonic() < until:  # a few batches
                    time.sleep(0.002)
                time.sleep(dice.uniform(0.0, 0.1))  # to be killed at a random moment
                os.kill(one, signal.SIGKILL)
                time.sleep(dice.uniform(0.0, 0.03))
                os.kill(two, signal.SIGKILL)
    stored = {partition: [v.decode() for v in values(topic, partition)] for partition in (0, 1)}
    told = [json.loads(line) for line in acknowledged.read_text().splitlines()]
    assert len(told) > kills
    for partition, offset, sent in told:
        assert stored[partition][offset : offset + len(sent)] == sent
    for partition in (0, 1):
        assert len(set(stored[partition])) == len(stored[partition]), "stored twice"
    witnessed = [json.loads(line) for line in seen.read_text().splitlines()[:-1]]
    assert witnessed
    for partition, offset, sent in witnessed:
        assert stored[partition][offset : offset + len(sent)] == sent, "seen, and not there afterwards"


def fill(topic: DirectoryTopic, producer: uuid.UUID, count: int = 12, first: int = 0) -> list[bytes]:
    """Whole appends of about 700 bytes: a segment holds eleven of them. first: the number of the first one."""
    sent = [b"old-%d" % i for i in range(first, count)]
    for sequence, value in enumerate(sent, first):
        offsets_of(topic.append([Append.encoded(0, records(value), Origin(producer, 0, sequence))]))
    return sent


@pytest.mark.sampled(2)
@pytest.mark.parametrize("before", [5, 11], ids=["append", "append and roll"])
@pytest.mark.parametrize("act", [faults.kill, faults.fail(errno.EIO), faults.no_space], ids=["kill", "EIO", "ENOSPC"])
def test_a_fault_before_every_system_call_of_an_append(before: int, act: faults.Fault, tmp_path: Path) -> None:
    """Nothing acknowledged is lost, nothing is there in part, and the retry of the same batch is stored once."""
    producer = uuid.uuid4()
    earlier = fill(new_topic(tmp_path / "earlier"), producer, before - 1)
    at = 0
    while True:
        at += 1
        path = tmp_path / str(at)
        shutil.copytree(tmp_path / "earlier", path, symlinks=True)
        topic = opened(path)
        old = earlier + fill(topic, producer, before, before - 1)  # so that this handle has written to the log too
        append = [Append.encoded(0, records(b"new-1", b"new-2"), Origin(producer, 0, before))]
        steps_taken = path / "steps"

        def work(path: Path = path, at: int = at, append: list[Append] = append, told: Path = steps_taken) -> None:
            steps = faults.Steps(at, act)
            late = opened(path)
            try:
                with faults.counted(steps):
                    offsets_of(late.append(append))
                told.write_text(f"acknowledged {steps.count}")
            except LogError:
                told.write_text(f"refused {steps.count}")

        with faults.child(work) as pid:
            code = faults.wait_exit(pid)
        assert code == (-signal.SIGKILL if act is faults.kill and not steps_taken.exists() else 0)
        outcome, _, count = (steps_taken.read_text() if steps_taken.exists() else "killed 0").partition(" ")
        stored = values(topic)
        assert stored in (old, [*old, b"new-1", b"new-2"]), f"call {at}"
        if outcome == "acknowledged":
            assert len(stored) == before + 2, f"call {at}"
        assert offsets_of(topic.append(append)) == [before], f"call {at}"
        assert values(topic) == [*old, b"new-1", b"new-2"], f"call {at}"
        offsets_of(topic.append([Append.encoded(0, records(b"after"), Origin(producer, 0, before + 1))]))
        assert values(opened(path))[-1] == b"after"
        shutil.rmtree(path)
        if outcome == "acknowledged" and int(count) < at:
            assert at > 8
            return


def test_a_stopped_holder_of_the_lock_means_a_bounded_wait_and_a_clear_error(tmp_path: Path) -> None:
    topic = new_topic(tmp_path)
    offsets_of(topic.append([Append.encoded(0, records(b"1"))]))

    def work() -> None:
        late = opened(tmp_path)

        def stop(name: str) -> None:
            if name == "fdatasync":
                faults.stop(name)

        steps = faults.Steps()
        steps.step = stop  # type: ignore[method-assign]
        with faults.counted(steps):
            offsets_of(late.append([Append.encoded(0, records(b"2"))]))

    with faults.child(work) as pid:
        assert faults.wait_stopped(pid)
        impatient = opened(tmp_path, timeout=0.3)
        with pytest.raises(LogBusy, match="append lock"):
            offsets_of(impatient.append([Append.encoded(0, records(b"3"))]))
        assert values(impatient) == [b"1"], "readers do not wait for it"
        os.kill(pid, signal.SIGCONT)
        assert faults.wait_exit(pid) == 0
        offsets_of(impatient.append([Append.encoded(0, records(b"3"))]))
    assert values(topic) == [b"1", b"2", b"3"]


def test_l3_after_a_failed_sync_the_log_goes_on_in_a_new_segment(tmp_path: Path) -> None:
    topic = new_topic(tmp_path)
    offsets_of(topic.append([Append.encoded(0, records(b"1"))]))
    old = tail_file(topic)

    def no_sync(name: str) -> None:
        if name == "fdatasync":
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)

    steps = faults.Steps()
    steps.step = no_sync  # type: ignore[method-assign]
    with faults.counted(steps), pytest.raises(AppendFailed, match="is unknown until the append is tried again"):
        offsets_of(topic.append([Append.encoded(0, records(b"lost"))]))
    other = opened(tmp_path)
    assert values(other) == [b"1"]
    assert offsets_of(other.append([Append.encoded(0, records(b"2"))])) == [1]
    assert tail_file(topic) != old
    assert values(topic) == values(opened(tmp_path)) == [b"1", b"2"]


@pytest.fixture
def reboot(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(published_module, "boot_id", lambda: str(uuid.uuid4()))
    return


@pytest.mark.usefixtures("reboot")
def test_f5_after_a_boot_a_torn_tail_is_cut_at_the_last_whole_frame(tmp_path: Path) -> None:
    topic = new_topic(tmp_path)
    producer = uuid.uuid4()
    old = fill(topic, producer, 5)
    file = tail_file(topic)
    whole = file.read_bytes()
    published = (file.parent / "published").read_bytes()
    offsets_of(topic.append([Append.encoded(0, records(b"torn", b"torn"), Origin(producer, 0, 5))]))
    torn = file.read_bytes()
    for size in range(len(whole), len(torn), 37):
        file.write_bytes(torn[:size])
        (file.parent / "published").write_bytes(published)  # it was not published yet
        recovered = opened(tmp_path)
        assert values(recovered) == old
        assert offsets_of(recovered.append([Append.encoded(0, records(b"again"), Origin(producer, 0, 5))])) == [5]
        assert values(recovered) == [*old, b"again"]
    file.write_bytes(torn)
    assert values(opened(tmp_path)) == [*old, b"torn", b"torn"], "what is whole was perhaps acknowledged"


@pytest.mark.usefixtures("reboot")
def test_f5_after_a_boot_a_damaged_last_append_that_was_published_is_reported_and_never_cut(tmp_path: Path) -> None:
    topic = new_topic(tmp_path)
    old = fill(topic, uuid.uuid4(), 5)
    file = tail_file(topic)
    data = bytearray(file.read_bytes())
    data[-40] ^= 1
    file.write_bytes(data)
    for _ in range(2):
        late = opened(tmp_path)
        with pytest.raises(DamagedFrame):
            offsets_of(late.append([Append.encoded(0, records(b"over it"))]))
        with pytest.raises(DamagedFrame):
            values(late)
    assert len(old) == 5
    assert file.read_bytes() == bytes(data)


@pytest.mark.usefixtures("reboot")
def test_f5_after_a_boot_a_damaged_middle_is_reported_and_never_cut(tmp_path: Path) -> None:
    topic = new_topic(tmp_path)
    fill(topic, uuid.uuid4(), 5)
    file = tail_file(topic)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedFrame) as error:
        opened(tmp_path).read(0, 0)
    assert error.value.file == str(file)
    assert file.read_bytes() == data


def test_damage_is_never_a_wrong_message_and_the_rest_stays_readable(tmp_path: Path) -> None:
    topic = new_topic(tmp_path)
    sent = fill(topic, uuid.uuid4(), 40)
    files = sorted((topic._folder.path / "partitions" / "partition-0").glob("*.log"))
    assert len(files) >= 3
    found_in = {}
    for file in files:
        data = pa.py_buffer(file.read_bytes())
        found_in[file] = [(header, position) for position, header in frames(data, "", 0, data.size)]
    dice = random.Random(9)
    for _ in range(10_000 if SOAK else 700):
        file = dice.choice(files)
        original = file.read_bytes()
        damaged = bytearray(original)
        at = dice.randrange(len(damaged))
        bounds = found_in[file]
        is_short = dice.random() >= 0.8
        if not is_short:
            damaged[at] ^= 1 << dice.randrange(8)
            hit = {header.base_offset for header, begin in bounds if begin <= at < begin + header.frame_bytes}
        else:
            del damaged[at:]
            hit = {header.base_offset for header, begin in bounds if begin + header.frame_bytes > at}
        if dice.random() < 0.3:
            file.with_suffix(".index").unlink(missing_ok=True)
        file.unlink()  # a new inode, as a restore would make it: nobody's map is cut
        file.write_bytes(damaged)
        fresh = opened(tmp_path)
        places: set[str] = set()
        missed: set[int] = set()
        offset = 0
        while offset < len(sent):
            try:
                found = fresh.read(0, offset, dice.choice((1, 1 << 20)))
            except DamagedFrame as error:
                places.add(error.file)
                missed.add(offset)
                offset += 1
                continue
            for batch in found:
                rows = batch.records.column("value").to_pylist()
                if batch.until is not None:  # a gap: the last segment ends too early, as in a copy made under load
                    assert (is_short, file, rows, batch.next_offset) == (True, files[-1], [], len(sent))
                    missed |= set(range(batch.base_offset, batch.next_offset))
                else:
                    assert rows == sent[batch.base_offset : batch.next_offset]
                offset = batch.next_offset
        assert places <= {str(file)}
        assert missed <= hit, f"byte {at} of {file}"
        file.unlink()
        file.write_bytes(original)
        fresh.close()


@pytest.fixture
def fast() -> Iterator[Path]:
    """A place in memory, where a sync costs nothing."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="pxrs-crashes-", dir=place) as folder:
        yield Path(folder)


def test_no_flipped_bit_of_the_published_end_takes_a_message_away(fast: Path) -> None:
    sent = fill(new_topic(fast / "whole"), uuid.uuid4(), 5)
    size = (tail_file(opened(fast / "whole")).parent / "published").stat().st_size
    for position in range(size):
        place = fast / str(position)
        shutil.copytree(fast / "whole", place, symlinks=True)
        before = opened(place)
        assert before.end(0) == 5
        path = tail_file(before).parent / "published"
        flip(path, position)
        found = [finding.file for checked in check(place) for finding in checked.findings]
        assert found in ([], [os.path.realpath(path)]), f"byte {position}"
        late = opened(place)
        assert values(late) == sent, f"byte {position}"
        assert offsets_of(late.append([Append.encoded(0, records(b"after"))])) == [5], f"byte {position}"
        for topic in (before, late):
            assert values(topic) == [*sent, b"after"], "also for one that had it open"
            topic.close()
        shutil.rmtree(place)


def test_no_flipped_bit_of_a_topics_description_is_believed(tmp_path: Path) -> None:
    topic = new_topic(tmp_path, partitions=6)
    path = topic._folder.path / "topic.json"
    whole = path.read_bytes()
    for position in range(len(whole)):
        flip(path, position, position % 7)
        log = DirectoryLog(tmp_path)
        with contextlib.suppress(DamagedFrame):  # else it was no more than a blank
            assert log.topics() == [log.topic("t").topic] == [topic.topic], f"byte {position}"
        path.write_bytes(whole)


def test_a_lock_that_was_removed_keeps_nobody_out_and_is_an_error(tmp_path: Path) -> None:
    topic = new_topic(tmp_path)
    offsets_of(topic.append([Append.encoded(0, records(b"1"))]))
    (tail_file(topic).parent / "lock").unlink()
    for _ in range(2):
        with pytest.raises(DamagedFrame, match="lock"):
            offsets_of(topic.append([Append.encoded(0, records(b"2"))]))
        offsets_of(opened(tmp_path).append([Append.encoded(0, records(b"other"))]))
    assert values(opened(tmp_path)) == [b"1", b"other", b"other"]


def test_l2_a_reader_that_holds_a_map_survives_retention(tmp_path: Path) -> None:
    log = DirectoryLog(tmp_path)
    topic = log.create_topic(Topic("t", uuid.uuid4().hex, 1, segment_bytes=8192, retention_bytes=9000))
    assert isinstance(topic, DirectoryTopic)
    sent = fill(topic, uuid.uuid4(), 60)
    reader = opened(tmp_path)
    held = next(batches(reader))
    moved = topic.retain(now=0)
    assert 0 < moved[0] < 60
    assert held.records.column("value").to_pylist() == sent[:1], "its memory is still there"
    with pytest.raises(OffsetTrimmed) as error:
        opened(tmp_path).read(0, 0)
    assert error.value.first_offset == moved[0] == opened(tmp_path).start(0)
    assert values(opened(tmp_path)) == sent[moved[0] :]


def test_l4_an_unknown_producer_is_refused_also_after_a_roll(tmp_path: Path) -> None:
    topic = new_topic(tmp_path)
    producer = uuid.uuid4()
    fill(topic, producer, 25)
    other = opened(tmp_path)
    assert offsets_of(other.append([Append.encoded(0, records(b"old-24"), Origin(producer, 0, 24))])) == [24]
    with pytest.raises(UnknownProducer):
        offsets_of(other.append([Append.encoded(0, records(b"x"), Origin(uuid.uuid4(), 0, 3))]))
    assert other.end(0) == 25


def test_the_published_end_is_read_whole_while_it_is_being_written(tmp_path: Path) -> None:
    file = published_module.PublishedFile(str(tmp_path / "published"), 1)
    last = None
    for end in range(1, 50):
        last = file.write(last, 0, end * 10, end)
        assert file.read() == last
    slot = last.counter % 2 * 64
    data = bytearray((tmp_path / "published").read_bytes())
    data[slot : slot + 8] = struct.pack("<Q", 999)  # torn: the counter is new, the rest is not
    (tmp_path / "published").write_bytes(data)
    assert file.read() is None, "it may be the newer one: whoever has the lock finds the truth"
    found = file.whole()
    assert found is not None
    assert found.end == 48
    assert file.read() is None
    assert file.rebuild(0, 490, 49) == file.read()
