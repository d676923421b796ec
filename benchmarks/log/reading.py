"""The way out, from page cache: Arrow batches of sealed segments and of the tail, and messages one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

import pxrs
from benchmarks.log.workload import ROWS, Row, pairs, records
from benchmarks.measure import compare
from pxrs.log.contract import Append
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.outcomes import offsets_of
from pxrs.model import Message
from pxrs.topics import TopicHandle

BATCHES = 150
"""Two sealed segments of 64 MiB, and a tail of about 50 MB."""


def measure(folder: Path) -> Iterator[Row]:
    with pxrs.open(folder / "data") as hub:
        hub.create_topic("read", partitions=1)
        _fill(folder)
        topic = hub.topic("read")
        paths = sorted((folder / "data/topics/read/partitions/partition-0").glob("*.log"))
        tail = int(paths[-1].stem)
        for what, files, begin, end in (
            ("sealed segments", paths[:-1], 0, tail),
            ("the unsealed tail", paths[-1:], tail, topic.end(0)),
        ):
            yield _arrow(topic, what, files, begin, end)
            yield _messages(topic, what, begin, min(end, begin + 20 * ROWS))


def _fill(folder: Path) -> None:
    log = DirectoryLog(folder / "data")
    batch = records()
    for _ in range(BATCHES):
        offsets_of(log.topic("read").append([Append.encoded(0, batch)]))
    log.close()


def _arrow(topic: TopicHandle, what: str, files: list[Path], begin: int, end: int) -> Row:
    """The reference's files stay mapped, as those of sealed segments do in ours."""
    mapped = [pa.memory_map(str(path)).read_buffer() for path in files]
    numbers = [pa.Array.from_buffers(pa.int64(), data.size // 8, [None, data]) for data in mapped]

    def ours() -> None:
        offset = begin
        while offset < end:
            for batch in topic.read(0, offset):
                offset = batch.next_offset

    def by_hand() -> None:
        for each in numbers:
            pc.sum(each)

    figure = compare(ours, by_hand, times=3, rounds=11)
    return Row(f"read Arrow batches, {what}", "sum of the mapped bytes", figure.times(end - begin), "0.5x")


def _messages(topic: TopicHandle, what: str, begin: int, end: int) -> Row:
    count = end - begin
    keys, values = zip(*pairs(count), strict=True)
    times = list(range(count))

    def ours() -> None:
        for message in topic.messages(0, begin):
            if message.offset == end - 1:
                break

    def by_hand() -> None:
        for row, (key, value, time_us) in enumerate(zip(keys, values, times, strict=True)):
            message = Message("read", 0, row, key, value, time_us, None, 0)
            if message.offset == count:
                break

    figure = compare(ours, by_hand, times=1, rounds=11)
    return Row(f"iterate messages, {what}", "bare loop: the same tuples from lists", figure.times(count), "0.5x")
