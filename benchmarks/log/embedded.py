"""The embedded peer: SQLite with WAL and synchronous=FULL, inserts in transactions of the same size."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

import pxrs
from benchmarks.log.workload import ROWS, Row, pairs, records
from benchmarks.measure import compare
from pxrs.log.contract import Append
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.outcomes import offsets_of

READ_BATCHES = 20


def measure(folder: Path) -> Iterator[Row]:
    rows = [(key, value, index) for index, (key, value) in enumerate(pairs(ROWS))]
    batch = records()
    with pxrs.open(folder / "data") as hub:
        hub.create_topic("embedded", partitions=1)
        log = DirectoryLog(folder / "data")
        topic = log.topic("embedded")
        database = sqlite3.connect(folder / "peer.db", isolation_level=None)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        database.execute("CREATE TABLE message (offset INTEGER PRIMARY KEY, key BLOB, value BLOB, timestamp INTEGER)")

        def insert() -> None:
            database.execute("BEGIN")
            database.executemany("INSERT INTO message (key, value, timestamp) VALUES (?, ?, ?)", rows)
            database.execute("COMMIT")

        write = compare(lambda: offsets_of(topic.append([Append.encoded(0, batch)])), insert, times=5, rounds=7)
        yield Row("append", "SQLite, batched inserts", write.times(ROWS), "3x")
        last = READ_BATCHES * ROWS

        def iterate() -> None:
            for message in hub.topic("embedded").messages(0):
                if message.offset == last - 1:
                    break

        def select() -> None:
            query = "SELECT offset, key, value, timestamp FROM message WHERE offset <= ? ORDER BY offset"
            for _ in database.execute(query, (last,)):
                pass

        def lists() -> None:
            offset = 0
            while offset < last:
                for found in topic.read(0, offset):
                    columns = found.records.select(["key", "value"]).columns
                    for column in (*columns, found.records.column("timestamp").cast(pa.int64())):
                        column.to_pylist()
                    offset = found.next_offset

        read = compare(iterate, select, times=1, rounds=7)
        yield Row("iterate messages", "SQLite, iterating rows", read.times(last), "3x")
        bulk = compare(lists, select, times=1, rounds=7)
        yield Row("read batches, columns as Python lists", "SQLite, iterating rows", bulk.times(last), "3x")
        database.close()
        log.close()
