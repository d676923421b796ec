"""What a reader holds stays as it is, byte for byte, whatever other processes do to the log meanwhile (L2, G7).

Batches of sealed segments are maps of their files: had anybody cut such a file, the reader would be killed by SIGBUS.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from pxrs.errors import LogError, OffsetTrimmed
from pxrs.log.batch import SCHEMA, Batch
from pxrs.log.contract import Append
from pxrs.log.directory.check import check
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.directory.topic import DirectoryTopic
from pxrs.log.outcomes import offsets_of
from pxrs.testing import faults
from tests.acceptance import directory_topics
from tests.acceptance.directory_topics import opened

BOUND_S = 30.0
ROWS = 47
Act = Callable[[Path], None]

new_topic = partial(directory_topics.new_topic, segment_bytes=16_384, retention_bytes=20_000)


def value(number: int, name: bytes = b"old") -> bytes:
    return b"%s %d " % (name, number) + b"." * 900


def records(number: int, name: bytes = b"old") -> pa.RecordBatch:
    columns = [pa.nulls(1, pa.binary()), pa.array([value(number, name)], pa.binary())]
    columns += [pa.array([number], SCHEMA.field(2).type), pa.nulls(1, SCHEMA.field(3).type)]
    return pa.record_batch(columns, schema=SCHEMA)


def append(path: Path, numbers: range, name: bytes = b"old") -> None:
    topic = opened(path)
    for number in numbers:
        assert offsets_of(topic.append([Append.encoded(0, records(number, name))])) == [number]


def held_by(topic: DirectoryTopic) -> list[Batch]:
    held: list[Batch] = []
    while batches := topic.read(0, held[-1].next_offset if held else 0, 5_000):
        held += batches
    return held


def checksum(held: list[Batch]) -> str:
    """Of every byte in every buffer."""
    digest = hashlib.sha256()
    for batch in held:
        for column in batch.records.columns:
            for buffer in column.buffers():
                if buffer is not None:
                    digest.update(memoryview(buffer))
    return digest.hexdigest()


def in_a_child(work: Callable[[], None], code: int = 0) -> None:
    with faults.child(work) as pid:
        assert faults.wait_exit(pid) == code


def crash_and_recover(path: Path) -> None:
    """One process dies with its append written and not published, torn besides; another one cuts it off and goes on."""

    def crash() -> None:
        topic = opened(path)
        steps = faults.Steps()
        names: list[str] = []

        def die(name: str) -> None:
            names.append(name)
            if name == "fdatasync" and "pwritev" in names:
                tail = max((topic._folder.path / "partitions" / "partition-0").glob("*.log"))
                os.truncate(tail, tail.stat().st_size - 100)
                faults.kill(name)

        steps.step = die  # type: ignore[method-assign]
        with faults.counted(steps):
            offsets_of(topic.append([Append.encoded(0, records(ROWS))]))

    in_a_child(crash, -signal.SIGKILL)
    in_a_child(lambda: append(path, range(ROWS, ROWS + 3)))


def roll(path: Path) -> None:
    in_a_child(lambda: append(path, range(ROWS, 2 * ROWS)))


def retain(path: Path) -> None:
    def work() -> None:
        append(path, range(ROWS, 2 * ROWS))
        assert opened(path).retain(now=0)[0] > ROWS, "all that the reader holds is gone from the folder"

    in_a_child(work)


def delete(path: Path) -> None:
    in_a_child(lambda: DirectoryLog(path).delete_topic("t"))


def delete_and_make_again(path: Path) -> None:
    def work() -> None:
        DirectoryLog(path).delete_topic("t")
        new_topic(path)
        append(path, range(ROWS), b"new")

    in_a_child(work)


def read_or_refuse(topic: DirectoryTopic, offset: int) -> list[bytes] | LogError:
    try:
        return [v for batch in topic.read(0, offset) for v in batch.records.column("value").to_pylist()]
    except LogError as error:
        return error


def check_next_reads(topic: DirectoryTopic, act: Act) -> None:
    """From the start, and from where it ended: what was sent to this very topic, or an error that says why not."""
    for offset in (0, ROWS // 2, ROWS):
        found = read_or_refuse(topic, offset)
        if isinstance(found, LogError):
            assert act not in (crash_and_recover, roll), found
            assert act is not retain or isinstance(found, OffsetTrimmed), found
        else:
            assert found == [value(number) for number in range(offset, offset + len(found))], "of another topic"
            assert found or offset == ROWS
            assert found or act in (delete, delete_and_make_again), "there is more"


@contextlib.contextmanager
def reader(path: Path, act: Act) -> Iterator[Callable[[], int]]:
    """A process that holds all batches when this begins; what is given lets it look at them again: its exit code."""
    (ready_out, ready_in), (go_out, go_in) = os.pipe(), os.pipe()

    def work() -> None:
        os.close(go_in)  # so that it ends with its parent
        topic = opened(path)
        held = held_by(topic)
        assert len(held) == ROWS
        before = checksum(held)
        os.write(ready_in, b"!")
        os.read(go_out, 1)
        assert checksum(held) == before
        assert [v for b in held for v in b.records.column("value").to_pylist()] == [value(n) for n in range(ROWS)]
        check_next_reads(topic, act)

    def look_again() -> int:
        os.write(go_in, b"!")
        return faults.wait_exit(pid)

    try:
        with faults.child(work) as pid:
            os.close(ready_in)
            assert select.select([ready_out], [], [], BOUND_S)[0], "the reader never got there"
            assert os.read(ready_out, 1), "the reader has died"
            yield look_again
    finally:
        for descriptor in (ready_out, go_out, go_in):
            os.close(descriptor)


@pytest.mark.parametrize("act", [crash_and_recover, roll, retain, delete, delete_and_make_again])
def test_l2_what_a_reader_holds_is_untouched(act: Act, tmp_path: Path) -> None:
    topic = new_topic(tmp_path)
    append(tmp_path, range(ROWS))
    assert len(list((topic._folder.path / "partitions" / "partition-0").glob("*.log"))) > 3, "sealed ones, and a tail"
    with reader(tmp_path, act) as look_again:
        act(tmp_path)
        assert look_again() == 0
    assert [finding for checked in check(tmp_path) for finding in checked.findings] == []


def test_g7_a_writer_of_a_deleted_topic_writes_nothing_into_its_namesake(tmp_path: Path) -> None:
    """Nor is it told that its messages are stored: they would be gone with the files."""
    old = new_topic(tmp_path)
    for number in range(ROWS):
        offsets_of(old.append([Append.encoded(0, records(number))]))
    delete_and_make_again(tmp_path)
    refused = 0
    for number in range(ROWS):  # through a roll, which makes files by their path
        try:
            offsets_of(old.append([Append.encoded(0, records(number, b"late"))]))
        except LogError:
            refused += 1
    stored = [v for batch in held_by(opened(tmp_path)) for v in batch.records.column("value").to_pylist()]
    assert stored == [value(number, b"new") for number in range(ROWS)]
    assert [finding for checked in check(tmp_path) for finding in checked.findings] == []
    files = sorted((tmp_path / "topics" / "t" / "partitions" / "partition-0").glob("*.log"))
    assert int(files[-1].stem) < ROWS, "a segment that is none of its own"
    assert refused == ROWS, "acknowledged, and nowhere"
