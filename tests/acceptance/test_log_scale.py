"""Many partitions, logs larger than the memory, and long logs: what must not grow with them (X16, L2)."""

from __future__ import annotations

import os
import resource
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
import pytest

import pxrs
from pxrs.log.batch import SCHEMA
from pxrs.log.contract import Append
from pxrs.log.directory import published as published_module
from pxrs.log.directory.crew import HELPERS_MAX
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.outcomes import offsets_of
from pxrs.model import AUDIT_TOPIC, EVENTS_TOPIC, Topic
from pxrs.producer.sending import THREADS_MAX
from pxrs.testing import faults
from pxrs.testing.waiting import eventually
from pxrs.topics import TopicHandle
from tests.acceptance.directory_topics import opened

SOAK = bool(os.environ.get("PXRS_SOAK"))
MEGABYTE = 1 << 20
FILES_PER_PARTITION = 3
"""What an open partition keeps: the published end, the lock, and the tail if it is written to."""


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def in_a_child(work: Callable[[], None]) -> None:
    with faults.child(work) as pid:
        assert faults.wait_exit(pid) == 0, "see the child's stderr"


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells of files and memory")


def count_threads() -> int:
    """The threads of this process, without those that store a hub's events: there is one for each hub and topic of
    events, however many partitions there are, and it ends when it has been idle for some seconds."""
    of_events = tuple(f"pxrs{topic}-" for topic in (AUDIT_TOPIC, EVENTS_TOPIC))
    return sum(not thread.name.startswith(of_events) for thread in threading.enumerate())


@needs_proc
def test_thousands_of_partitions_take_no_threads_and_few_files_each(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    partitions = min(5_000 if SOAK else 1_500, (limit - open_files() - 100) // (2 * FILES_PER_PARTITION))
    if partitions < 100:
        pytest.skip(f"{limit} files may be open, too few for many partitions")
    threads, files = count_threads(), open_files()
    with pxrs.open(tmp_path) as hub, pxrs.open(tmp_path) as other:
        topic = hub.create_topic("t", partitions=partitions)
        with hub.producer("t") as producer:
            receipts = [producer.send(b"%d" % number, partition=number) for number in range(partitions)]
            producer.flush()
            assert [receipt.result(0) for receipt in receipts] == [(number, 0) for number in range(partitions)]
            assert count_threads() - threads <= THREADS_MAX + HELPERS_MAX, "the producer's, and those who sync"
            assert open_files() - files <= FILES_PER_PARTITION * partitions + 10
            reader = other.topic("t")  # with files of its own, as another process would have
            assert reader.wait(dict.fromkeys(range(partitions), 0), 0) == set(range(partitions))
            assert [next(reader.messages(number)).value for number in range(partitions)] == [
                b"%d" % number for number in range(partitions)
            ]
            woken: list[set[int]] = []
            waiting = threading.Thread(
                target=lambda: woken.append(reader.wait(dict.fromkeys(range(partitions), 1), 60))
            )
            waiting.start()
            producer.send(b"wake up", partition=partitions - 1).result(60)
            waiting.join(60)
            assert woken == [{partitions - 1}]
            assert count_threads() - threads <= THREADS_MAX + HELPERS_MAX + 1, "and the tailer of the log that waits"
            assert open_files() - files <= 2 * FILES_PER_PARTITION * partitions + 10
            assert topic.end(partitions - 1) == 2
    eventually(lambda: open_files() <= files + 5)  # all are closed with the hub
    eventually(lambda: threading.active_count() <= threads)


def anonymous_bytes() -> int:
    """This process's memory that no file holds: a mapped segment is the kernel's to drop, and does not count. Nor does
    what Arrow's allocator keeps for later use, which varies from run to run."""
    pa.default_memory_pool().release_unused()
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def fill_large(path: Path, codec: str, is_compressible: bool, total_bytes: int) -> int:
    """A log of so many bytes before compression; how many messages it has."""
    with pxrs.open(path) as hub:
        hub.create_topic("t", partitions=1, codec=codec, segment_bytes=16 * MEGABYTE)
        count = total_bytes // 4_000
        with hub.producer("t") as producer:
            for number in range(count):
                noise = bytes(3_980) if is_compressible else os.urandom(3_980)
                producer.send(b"%019d " % number + noise, b"key")
    return count


def read_batches(topic: TopicHandle, look: Callable[[], None]) -> int:
    offset = 0
    while batches := topic.read(0, offset):
        for batch in batches:
            assert batch.base_offset == offset
            offset = batch.next_offset
        look()
    return offset


def read_messages(topic: TopicHandle, look: Callable[[], None]) -> int:
    offset = 0
    for message in topic.messages(0):
        assert message.offset == offset
        offset += 1
        if offset % 500 == 1:
            look()
    return offset


@needs_proc
@pytest.mark.sampled(3)
@pytest.mark.parametrize("read", [read_batches, read_messages])
@pytest.mark.parametrize(("codec", "is_compressible"), [("none", False), ("lz4", False), ("zstd", True)])
def test_a_log_larger_than_the_memory_is_read(
    codec: str, is_compressible: bool, read: Callable[[TopicHandle, Callable[[], None]], int], tmp_path: Path
) -> None:
    total = 4_096 * MEGABYTE if SOAK else 256 * MEGABYTE
    most = 64 * MEGABYTE
    count = fill_large(tmp_path, codec, is_compressible, total)

    def work() -> None:
        with pxrs.open(tmp_path) as hub:
            topic = hub.topic("t")
            topic.end(0)
            before, peak = anonymous_bytes(), 0

            def look() -> None:
                nonlocal peak
                peak = max(peak, anonymous_bytes() - before)

            assert read(topic, look) == count
            assert peak < most, f"{peak / MEGABYTE:.0f} MB more than before, of a log of {total / MEGABYTE:.0f} MB"

    in_a_child(work)


def records(first: int, rows: int) -> pa.RecordBatch:
    columns = [pa.nulls(rows, pa.binary()), pa.array([b"%0100d" % n for n in range(first, first + rows)], pa.binary())]
    columns += [pa.array(range(first, first + rows), SCHEMA.field(2).type), pa.nulls(rows, SCHEMA.field(3).type)]
    return pa.record_batch(columns, schema=SCHEMA)


SMALL, LARGE, ROWS = 12, 600, 60


def fill_segments(path: Path, appends: int) -> int:
    """A log of `appends` frames of about 8 kB, four in a segment; how many messages it has."""
    log = DirectoryLog(path)
    topic = log.create_topic(Topic("t", uuid.uuid4().hex, 1, segment_bytes=40_000))
    for number in range(appends):
        offsets_of(topic.append([Append.encoded(0, records(number * ROWS, ROWS))]))
    assert len(list(path.glob("topics/t/partitions/partition-0/*.log"))) > appends // 6
    log.close()
    return appends * ROWS


class Work:
    """Counts what a block of code does, the same on a busy machine as on an idle one: calls, and bytes it reads."""

    def __init__(self) -> None:
        self.calls = 0
        self.bytes = 0

    def __enter__(self) -> Work:
        self.bytes = -self._bytes_read()
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self.bytes += self._bytes_read()

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        self.calls += event in ("call", "c_call")

    @staticmethod
    def _bytes_read() -> int:
        with open("/proc/self/io") as file:
            (line,) = (line for line in file if line.startswith("rchar"))
        return int(line.split()[1])


def find_end(path: Path, total: int) -> Work:
    with Work() as work:
        topic = opened(path)
        assert topic.end(0) == total
    topic.close()
    return work


def find_end_after_a_boot(path: Path, total: int) -> Work:
    """Only the last segment is looked through."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published_module, "boot_id", lambda: str(uuid.uuid4()))
        return find_end(path, total)


def read_anywhere(path: Path, total: int) -> Work:
    """The mean of many places in an open log; the map of each segment is made anew."""
    topic = opened(path)
    topic.read(0, 0, 1)
    with Work() as work:
        for step in range(20):
            offset = step * 7_919 * ROWS // 3 % total
            (batch,) = topic.read(0, offset, 1)
            assert batch.base_offset == offset
            assert batch.records.column("value")[0].as_py() == b"%0100d" % offset
    topic.close()
    return work


def find_times(path: Path, total: int) -> Work:
    topic = opened(path)
    assert topic.offset_at(0, total) == total  # what it learns of all segments, it may learn once
    with Work() as work:
        for step in range(20):
            offset = step * 7_919 * ROWS // 3 % total
            assert topic.offset_at(0, offset) == offset
    topic.close()
    return work


def append_one(path: Path, total: int) -> Work:
    topic = opened(path)
    with Work() as work:
        assert offsets_of(topic.append([Append.encoded(0, records(total, 1))])) == [total]
    topic.close()
    return work


@needs_proc
@pytest.mark.parametrize("find", [find_end, find_end_after_a_boot, read_anywhere, find_times, append_one])
def test_finding_a_place_takes_no_more_in_a_log_fifty_times_longer(
    find: Callable[[Path, int], Work], tmp_path: Path
) -> None:
    small, large = (find(tmp_path / str(n), fill_segments(tmp_path / str(n), n)) for n in (SMALL, LARGE))
    if find is find_end_after_a_boot:
        # The names of the segments are listed once in a boot; what is read of them must not grow.
        assert large.bytes < 2 * small.bytes + 4_096, (large.bytes, small.bytes)
        return
    assert large.calls < 2 * small.calls, (large.calls, small.calls)
    assert large.bytes < 2 * small.bytes + 4_096, (large.bytes, small.bytes)
