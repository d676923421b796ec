"""Topics of a directory log, filled, damaged and read for the tests of schedules."""

from __future__ import annotations

import uuid
from functools import partial
from pathlib import Path

import pyarrow as pa

from pxrs.log.batch import SCHEMA, Origin
from pxrs.log.contract import Append
from pxrs.log.directory.check import check
from pxrs.log.directory.topic import DirectoryTopic
from pxrs.log.outcomes import offsets_of
from tests.acceptance import directory_topics

SECOND = 1_000_000


def records(*values: bytes, timestamp: int = 1) -> pa.RecordBatch:
    rows = len(values)
    columns = [pa.nulls(rows, pa.binary()), pa.array(values, pa.binary())]
    columns += [pa.array([timestamp] * rows, SCHEMA.field(2).type), pa.nulls(rows, SCHEMA.field(3).type)]
    return pa.record_batch(columns, schema=SCHEMA)


def one(value: bytes, producer: uuid.UUID | None = None, sequence: int = 0, timestamp: int = 1) -> list[Append]:
    batch = records(value, timestamp=timestamp)
    return [Append.encoded(0, batch) if producer is None else Append.encoded(0, batch, Origin(producer, 0, sequence))]


new_topic = partial(directory_topics.new_topic, segment_bytes=8192)


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
