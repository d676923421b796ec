"""What the log costs: 100-byte values, 1,000 keys, 8 partitions, durable, against references in the same run."""

from __future__ import annotations

import mmap
import os
import sqlite3
import tempfile
import time
import uuid
from pathlib import Path

import pyarrow as pa
from rich.console import Console
from rich.table import Table

from benchmarks.measure import Figure, compare
from pxrs.log.batch import SCHEMA, encode
from pxrs.log.contract import Append, TopicLog
from pxrs.log.directory import DirectoryLog
from pxrs.model import Topic

ROWS, PARTITIONS = 10_000, 8


def records() -> pa.RecordBatch:
    keys = pa.array([b"key-%03d" % (i % 1000) for i in range(ROWS)], pa.binary())
    values = pa.array([b"%0100d" % i for i in range(ROWS)], pa.binary())
    times = pa.array(range(ROWS), SCHEMA.field(2).type)
    return pa.record_batch([keys, values, times, pa.nulls(ROWS, SCHEMA.field(3).type)], schema=SCHEMA)


def append(topic: TopicLog, folder: Path) -> Figure:
    """A batch of ready Arrow records, against writing and syncing the same bytes to a plain file."""
    batch = records()
    data = encode(batch).data
    descriptor = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    at = 0

    def ours() -> None:
        nonlocal at
        at = (at + 1) % PARTITIONS
        topic.append([Append(at, batch)])

    def by_hand() -> None:
        os.write(descriptor, data)
        os.fdatasync(descriptor)

    figure = compare(ours, by_hand, times=20, rounds=11)
    os.close(descriptor)
    return _rows(figure)


def read(topic: TopicLog, folder: Path) -> Figure:
    """All batches of a partition from page cache, against summing the bytes of its mapped segments."""
    segments = sorted((folder / "data/topics/bench/partitions/partition-0").glob("*.log"))
    total = topic.end(0)

    def ours() -> None:
        offset = 0
        while offset < total:
            for batch in topic.read(0, offset):
                offset = batch.next_offset

    def by_hand() -> None:
        for path in segments:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                view = memoryview(mapped)
                pa.compute.sum(pa.Array.from_buffers(pa.int64(), len(view) // 8, [None, pa.py_buffer(view)]))
                del view

    figure = compare(ours, by_hand, times=5, rounds=11)
    return Figure(figure.ratio, figure.ours_per_s * total, figure.reference_per_s * total)


def against_sqlite(topic: TopicLog, folder: Path) -> tuple[Figure, Figure]:
    """The embedded peer: WAL, synchronous=FULL, inserts in transactions of the same size; then reading all back."""
    batch = records()
    rows = [(row["key"], row["value"], index) for index, row in enumerate(batch.select(["key", "value"]).to_pylist())]
    database = sqlite3.connect(folder / "peer.db", isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    database.execute("CREATE TABLE message (offset INTEGER PRIMARY KEY, key BLOB, value BLOB, timestamp INTEGER)")

    def insert() -> None:
        database.execute("BEGIN")
        database.executemany("INSERT INTO message (key, value, timestamp) VALUES (?, ?, ?)", rows)
        database.execute("COMMIT")

    write = _rows(compare(lambda: topic.append([Append(0, batch)]), insert, times=5, rounds=7))
    count = database.execute("SELECT count(*) FROM message").fetchone()[0]
    total = topic.end(0)
    began = time.perf_counter()
    for _ in database.execute("SELECT offset, key, value, timestamp FROM message"):
        pass
    theirs = count / (time.perf_counter() - began)
    began, offset = time.perf_counter(), 0
    while offset < total:
        for found in topic.read(0, offset):
            found.records.select(["key", "value", "timestamp"]).column("value").to_pylist()
            offset = found.next_offset
    ours = total / (time.perf_counter() - began)
    database.close()
    return write, Figure(ours / theirs, ours, theirs)


def _rows(figure: Figure) -> Figure:
    return Figure(figure.ratio, figure.ours_per_s * ROWS, figure.reference_per_s * ROWS)


def main() -> None:
    table = Table("what", "reference", title="the log in a directory, rows a second", header_style="bold")
    for column in ("ours", "reference", "ratio", "wanted"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = DirectoryLog(folder / "data")
        topic = log.create_topic(Topic("bench", uuid.uuid4().hex, PARTITIONS, segment_bytes=8 << 20))
        results = [("append Arrow batches", "write + fdatasync", append(topic, folder), "0.5x")]
        results.append(("read Arrow batches", "sum of the mapped bytes", read(topic, folder), "0.5x"))
        write, back = against_sqlite(topic, folder)
        results.append(("append", "SQLite, batched inserts", write, "3x"))
        results.append(("read values as Python bytes", "SQLite, iterating rows", back, "3x"))
        log.close()
    for what, reference, figure, wanted in results:
        ours, theirs = f"{figure.ours_per_s:,.0f}", f"{figure.reference_per_s:,.0f}"
        table.add_row(what, reference, ours, theirs, f"{figure.ratio:.2f}x", wanted)
    Console().print(table)


if __name__ == "__main__":
    main()
