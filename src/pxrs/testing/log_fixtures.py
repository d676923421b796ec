"""What the tests of a log are given: topics, record batches, origins, and all values of a partition."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from pxrs.log.batch import SCHEMA, Origin
from pxrs.log.contract import Log, TopicLog
from pxrs.model import Topic


def records(
    values: Sequence[bytes | None], timestamps: Sequence[int] | None = None, **columns: Sequence[object]
) -> pa.RecordBatch:
    """A batch of these values; other columns may be given as lists."""
    times = list(range(len(values))) if timestamps is None else list(timestamps)
    given: dict[str, Sequence[object]] = {"key": [None] * len(values), "headers": [None] * len(values), **columns}
    given |= {"value": list(values), "timestamp": times}
    return pa.RecordBatch.from_arrays([pa.array(given[field.name], field.type) for field in SCHEMA], schema=SCHEMA)


def new_topic(name: str = "orders", partitions: int = 2, **settings: Any) -> Topic:
    return Topic(name, uuid.uuid4().hex, partitions, **settings)


def values_from(topic: TopicLog, partition: int, offset: int = 0, max_bytes: int = 1 << 20) -> list[bytes | None]:
    """All values from an offset on; checks on the way that batches follow each other without gaps."""
    values: list[bytes | None] = []
    while batches := topic.read(partition, offset, max_bytes):
        for batch in batches:
            assert batch.base_offset == offset, f"a batch at offset {batch.base_offset}, expected {offset}"
            assert batch.records.schema.equals(SCHEMA)
            values += batch.records.column("value").to_pylist()
            offset = batch.next_offset
    assert offset == topic.end(partition)
    return values


def origin(sequence: int, producer: uuid.UUID, epoch: int = 0) -> Origin:
    return Origin(producer, epoch, sequence)


class LogFixtures:
    """The base of every class of the log's contract suite."""

    @pytest.fixture
    def log(self) -> Iterator[Log]:
        raise NotImplementedError("override `log`: the log under test")

    @pytest.fixture
    def topic(self, log: Log) -> TopicLog:
        return log.create_topic(new_topic())

    @pytest.fixture
    def producer(self) -> uuid.UUID:
        return uuid.uuid4()
