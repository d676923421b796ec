"""Spark over a topic, against Spark's own reader and writer of the same rows in the same session.

`python -m benchmarks.spark` prints: reading a topic to nowhere and into an aggregate, against a Python source that
yields one prepared batch again and again, and against a Parquet scan; the same in 64 tasks against 8; streams
(AvailableNow) of large and of smaller batches against the same from Parquet files; writing a topic against a Python
Arrow writer that writes the same batches to synced files, and against Spark's
Parquet writer; and the fixed cost of a micro-batch against Spark's `rate-micro-batch` source.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

import pxrs
from benchmarks.measure import Figure, compare
from benchmarks.ready import ReadySource
from pxrs.spark import session

ROWS = 4_000_000
KEYS = 1_000
PARTITIONS = 8
PIECE = 10_000
VALUE_BYTES = 100
TASKS = 64
BATCHES = 20
"""Micro-batches of the stream of smaller batches: 200,000 rows each."""
WARM = 4
"""How often each is done before it is measured: the JVM compiles what it has seen often."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rows", type=int, default=ROWS)
    arguments.add_argument("--rounds", type=int, default=5)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _fill(folder, given.rows)
        spark = session("bench", "local[2]", {"spark.sql.shuffle.partitions": "2"})
        spark.sparkContext.setLogLevel("ERROR")
        try:
            _run(spark, folder, given.rows, given.rounds)
        finally:
            spark.stop()


def _fill(folder: Path, rows: int) -> None:
    """The rows as a topic of frames of the producer's usual size. Random values: what compresses well says nothing."""
    source = random.Random(7)
    with pxrs.open(folder / "hub") as hub:
        hub.create_topic("in", partitions=PARTITIONS)
        hub.create_topic("out", partitions=PARTITIONS)
        with hub.producer("in", batch_rows=PIECE, batch_bytes=2 << 20) as out:
            for first in range(0, rows, PIECE * PARTITIONS):
                numbers = range(first, min(first + PIECE * PARTITIONS, rows))
                keys = [b"key-%d" % (i % KEYS) for i in numbers]
                values = [source.randbytes(VALUE_BYTES) for _ in numbers]
                out.send_batch(pa.table({"key": keys, "value": values}))


def _run(spark: Any, folder: Path, rows: int, rounds: int) -> None:
    hub = str(folder / "hub")
    parquet = str(folder / "parquet")

    def read(**options: str) -> Any:
        return spark.read.format("pxrs").options(url=hub, topic="in", **options).load()

    topic, needed, tasks = read(), read(columns="key,value,offset"), read(minPartitions=str(TASKS))
    topic.write.parquet(parquet)
    files = spark.read.parquet(parquet)

    def show(what: str, figure: Figure, wanted: str) -> None:
        print(
            f"{what:54} {figure.ratio:5.2f}x  ({figure.ours_per_s:12,.1f}/s against {figure.reference_per_s:12,.1f}/s;"
            f" wanted {wanted})",
            flush=True,
        )

    def noop(frame: Any) -> None:
        frame.write.format("noop").mode("overwrite").save()

    def aggregate(frame: Any) -> None:
        frame.selectExpr("sum(length(value)) AS bytes", "max(offset)", "count(key)").collect()

    spark.dataSource.register(ReadySource)
    ready, ready_needed = (
        spark.read.format("ready")
        .options(columns=",".join(frame.columns), rows=str(rows), tasks=str(PARTITIONS), batch=str(PIECE))
        .options(valueBytes=str(VALUE_BYTES))
        .load()
        for frame in (topic, needed)
    )
    for _ in range(WARM):
        for frame in (topic, files, ready, tasks):
            noop(frame)
        for frame in (topic, needed, files, ready_needed):
            aggregate(frame)
    both: dict[str, Any] = {"times": 1, "rounds": rounds}

    def show_batch(what: str, ours: Any, reference: Any, wanted: str, work: Any = noop) -> None:
        show(what, compare(lambda: work(ours), lambda: work(reference), **both).times(rows), wanted)

    show_batch("batch to noop, of a source of ready batches", topic, ready, "0.95x")
    show_batch("batch to noop, of Parquet's scan", topic, files, "0.85x")
    show_batch(f"batch to noop, {TASKS} tasks of {PARTITIONS}", tasks, topic, "0.77x")
    show_batch("aggregate, option columns, of ready batches", needed, ready_needed, "0.95x", aggregate)
    # Spark reads from Parquet only the columns that the aggregate needs. Of a Python source it takes what it is given.
    show_batch("aggregate, option columns, of Parquet's scan", needed, files, "0.85x", aggregate)
    show_batch("aggregate, all columns, of Parquet's scan", topic, files, "reported", aggregate)

    count = iter(range(1_000_000))

    def stream(frame: Any, sink: str = "noop", **options: str) -> None:
        number = next(count)
        out = frame.writeStream.format(sink).options(checkpointLocation=str(folder / f"checkpoint-{number}"), **options)
        out.trigger(availableNow=True).start().awaitTermination()

    def topic_stream(batches: int) -> Any:
        reader = spark.readStream.format("pxrs").options(url=hub, topic="in", group=f"g-{next(count)}")
        return reader.options(maxRowsPerTrigger=str(rows // batches)).load()

    def file_stream(path: str, batch_files: int) -> Any:
        reader = spark.readStream.schema(files.schema).option("maxFilesPerTrigger", str(batch_files))
        return reader.parquet(path)

    in_batches = str(folder / "parquet-batches")
    files.repartition(BATCHES).write.parquet(in_batches)
    for batches, path, batch_files in ((2, parquet, 4), (BATCHES, in_batches, 1)):
        figure = compare(
            lambda: stream(topic_stream(batches)),  # noqa: B023
            lambda: stream(file_stream(path, batch_files)),  # noqa: B023
            times=1,
            rounds=max(1, rounds // 2),
        )
        show(f"stream to noop, {batches} batches, of Parquet's", figure.times(rows), "0.5x")

    pairs = files.select("key", "value")

    def write_topic() -> None:
        pairs.write.format("pxrs").options(url=hub, topic="out").mode("append").save()

    def write_parquet() -> None:
        pairs.write.mode("overwrite").parquet(str(folder / "written"))
        shutil.rmtree(folder / "written")

    def write_arrow() -> None:
        (folder / "arrow").mkdir()
        pairs.write.format(ArrowFiles.name()).option("folder", str(folder / "arrow")).mode("append").save()
        shutil.rmtree(folder / "arrow")

    spark.dataSource.register(ArrowFiles)
    for _ in range(WARM // 2):
        for write in (write_topic, write_arrow, write_parquet):
            write()
    for what, reference, wanted in (
        ("a Python Arrow writer to synced files", write_arrow, "0.8x"),
        ("Parquet's writer", write_parquet, "reported"),
    ):
        figure = compare(write_topic, reference, times=1, rounds=max(1, rounds // 2))
        show(f"batch write, of {what}", figure.times(rows), wanted)
    _fixed_cost(spark, hub, folder, show)


class ArrowFiles(DataSource):  # type: ignore[misc]
    """What a sink in Python costs at least: the batches that Spark gives to a task, written to a synced file."""

    @classmethod
    def name(cls) -> str:
        return "arrow-files"

    def writer(self, schema: StructType, overwrite: bool) -> ArrowFileWriter:
        return ArrowFileWriter(self.options["folder"])


class ArrowFileWriter(DataSourceArrowWriter):  # type: ignore[misc]
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        path = f"{self.folder}/{uuid.uuid4().hex}.arrow"
        first = next(iterator, None)
        with pa.OSFile(path, "wb") as file:
            if first is not None:
                with pa.ipc.new_file(file, first.schema) as out:
                    for batch in itertools.chain([first], iterator):
                        out.write_batch(batch)
        descriptor = os.open(path, os.O_RDONLY)
        os.fdatasync(descriptor)
        os.close(descriptor)
        return WriterCommitMessage()

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None: ...

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None: ...


def _fixed_cost(spark: Any, hub: str, folder: Path, show: Any) -> None:
    """Micro-batches of a few rows: the median time of the warm ones."""

    def median_s(frame: Any, name: str) -> float:
        query = frame.writeStream.format("noop").option("checkpointLocation", str(folder / name)).start()
        while query.isActive and (query.lastProgress is None or query.lastProgress.batchId < 40):
            time.sleep(0.05)
        query.stop()
        times = [p.batchDuration for p in query.recentProgress if p.batchId >= 15 and p.numInputRows]
        return float(statistics.median(times)) / 1000

    ratios = []
    for number in range(4):
        reader = spark.readStream.format("pxrs").options(url=hub, topic="in", group=f"fixed-{number}")
        ours = median_s(reader.options(maxRowsPerTrigger="8").load(), f"ours-{number}")
        rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", "8").load()
        theirs = median_s(rate, f"rate-{number}")
        if number:  # the first of each warms up
            ratios.append((ours / theirs, ours, theirs))
    ratio, ours, theirs = sorted(ratios)[len(ratios) // 2]
    print(
        f"{'fixed cost of a micro-batch, of rate to noop':44} {ratio:5.2f}x  ({ours * 1000:.0f} ms against "
        f"{theirs * 1000:.0f} ms; wanted at most 1.5x)"
    )


if __name__ == "__main__":
    main()
