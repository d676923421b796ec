"""One group, two kinds of members: a Spark query and a Python worker share a topic, and hand its partitions over.

    python examples/shared_group.py [FOLDER]

At first the query is the only member. A worker joins and claims half of the partitions, each as soon as the query has
finished its micro-batch and released it. When the worker leaves, the query claims them again. Each message is handled
by one of the two. Queries that keep state cannot share a group, because their state cannot move to another member.
Without FOLDER the example uses a temporary folder.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import pxrs
from pxrs.spark import session


def main(folder: str | Path, spark: SparkSession | None = None) -> None:
    spark = spark or session("shared-group", "local[2]")
    with pxrs.open(Path(folder, "data")) as hub:
        jobs = hub.create_topic("jobs", partitions=4)
        hub.create_topic("done-by-spark", partitions=1)

        query = start(spark, folder)
        send(hub, 0, 1_000)
        wait_for(lambda: len(by_spark(hub)) == 1_000, query)

        by_python: list[int] = []
        with hub.consumer("jobs", group="workers", name="worker") as inbox:
            wait_for(lambda: len(inbox.assignment) == 2, query)  # handed over by Spark
            send(hub, 1_000, 2_000)
            while hub.group("workers").describe().lag:
                by_python += [int(message.value or b"0") for message in inbox.poll(100, timeout=0.1)]
                inbox.commit()

        wait_for(lambda: owners(hub).isdisjoint({"worker", None}), query)  # handed back
        send(hub, 2_000, 3_000)
        wait_for(lambda: len(by_spark(hub)) + len(by_python) == 3_000, query)
        query.stop()

        assert sorted(by_spark(hub) + by_python) == list(range(3_000)), "each job is done exactly once"
        assert by_python
        assert all(1_000 <= number < 2_000 for number in by_python), "the worker handled jobs of its time only"
        assert hub.group("workers").describe().lag == 0
        print(f"{jobs.partitions} partitions: Spark handled {len(by_spark(hub))} jobs, the worker {len(by_python)}")


def start(spark: SparkSession, folder: str | Path) -> StreamingQuery:
    url = str(Path(folder, "data"))
    source = {"url": url, "topic": "jobs", "group": "workers", "shareGroup": "true"}
    rows = spark.readStream.format("pxrs").options(**source).load().select("key", "value")
    sink = {"url": url, "topic": "done-by-spark", "checkpointLocation": str(Path(folder, "checkpoint"))}
    return rows.writeStream.format("pxrs").options(**sink).start()


def send(hub: pxrs.Hub, first: int, end: int) -> None:
    with hub.producer("jobs") as out:
        for number in range(first, end):
            out.send(str(number), key=f"key-{number % 100}")


def by_spark(hub: pxrs.Hub) -> list[int]:
    return [int(value) for value in hub.topic("done-by-spark").to_arrow()["value"].to_pylist()]


def owners(hub: pxrs.Hub) -> set[str | None]:
    return {partition.owner for partition in hub.group("workers").describe().partitions}


def wait_for(is_so: Callable[[], bool], query: StreamingQuery) -> None:
    until = time.monotonic() + 120
    while not is_so():
        assert query.isActive, query.exception()
        assert time.monotonic() < until
        time.sleep(0.05)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="pxrs-", ignore_cleanup_errors=True) as temporary:
        main(sys.argv[1] if len(sys.argv) > 1 else temporary)
