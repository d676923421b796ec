"""Exactly once, from topic to topic: a query is stopped in the middle of a batch and its checkpoint location is lost,
but each message is stored once.

    python examples/exactly_once.py [FOLDER]

One commit makes a batch part of the topic and writes the group's checkpoints. So the next query, which has a new
checkpoint location, continues with the message after the last one that was committed. Without FOLDER the example uses a
temporary folder.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import pxrs
from pxrs.spark import session

MESSAGES = 5_000
BATCH_ROWS = 500


def main(folder: str | Path, spark: SparkSession | None = None) -> None:
    spark = spark or session("exactly-once", "local[2]")
    with pxrs.open(Path(folder, "data")) as hub:
        hub.create_topic("in", partitions=4)
        hub.create_topic("out", partitions=2)
        with hub.producer("in") as producer:
            for number in range(MESSAGES):
                producer.send(str(number), key=f"key-{number % 100}")

        query = start(spark, folder)
        while len(arrived(hub)) < 2 * BATCH_ROWS:
            assert query.isActive, query.exception()
            time.sleep(0.01)
        query.stop()  # in the middle of a batch
        cut = len(arrived(hub))
        assert cut < MESSAGES

        shutil.rmtree(Path(folder, "checkpoint"))  # Spark's checkpoint is gone, the group's is not
        start(spark, folder).awaitTermination()
        found = arrived(hub)
        assert sorted(value for _, value in found) == list(range(MESSAGES)), "each message exactly once"
        for key in {key for key, _ in found}:
            values = [value for its_key, value in found if its_key == key]
            assert values == sorted(values), "in order for each key"
        assert hub.group("copier").describe().lag == 0
        print(f"interrupted after {cut} of {MESSAGES} messages; each message arrived exactly once")


def start(spark: SparkSession, folder: str | Path) -> StreamingQuery:
    """A query that copies the messages that are stored now, a few at a time."""
    url = str(Path(folder, "data"))
    source = {"url": url, "topic": "in", "group": "copier", "maxRowsPerTrigger": str(BATCH_ROWS)}
    rows = spark.readStream.format("pxrs").options(**source).load().select("key", "value")
    sink = {"url": url, "topic": "out", "checkpointLocation": str(Path(folder, "checkpoint"))}
    return rows.writeStream.format("pxrs").options(**sink).trigger(availableNow=True).start()


def arrived(hub: pxrs.Hub) -> list[tuple[bytes, int]]:
    table = hub.topic("out").to_arrow()
    return [
        (key, int(value)) for key, value in zip(*(table[name].to_pylist() for name in ("key", "value")), strict=True)
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="pxrs-", ignore_cleanup_errors=True) as temporary:
        main(sys.argv[1] if len(sys.argv) > 1 else temporary)
