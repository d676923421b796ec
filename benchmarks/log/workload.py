"""The messages that all of it is measured with, and a row of the tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from benchmarks.measure import Figure
from pxrs.log.batch import SCHEMA
from pxrs.producer.producer import Producer

ROWS, PARTITIONS, KEYS = 10_000, 8, 1_000


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    reference: str
    figure: Figure
    wanted: str = ""


def pairs(count: int) -> list[tuple[bytes, bytes]]:
    """Keys and values."""
    return [(b"key-%03d" % (i % KEYS), b"%0100d" % i) for i in range(count)]


def records(count: int = ROWS) -> pa.RecordBatch:
    """The same as the log stores them."""
    keys, values = zip(*pairs(count), strict=True)
    columns = [pa.array(keys, pa.binary()), pa.array(values, pa.binary()), pa.array(range(count), SCHEMA.field(2).type)]
    return pa.record_batch([*columns, pa.nulls(count, SCHEMA.field(3).type)], schema=SCHEMA)


def send_all(producer: Producer, given: Sequence[tuple[bytes, bytes]]) -> Callable[[], None]:
    """Work that sends these keys and values one by one, and waits until they are stored."""

    def work() -> None:
        send = producer.send
        for key, value in given:
            send(value, key)
        producer.flush()

    return work
