"""Output mode `update` over Spark Connect, in a process of its own, because a process cannot have both a classic and a
Connect session.

    python connect_updates.py HUB CHECKPOINT

Counts the messages of the topic `in` by key into the topic `counts`, and ends."""

from __future__ import annotations

import os
import sys

from pxrs.spark import stream_updates
from pxrs.spark.home import quick_home
from pxrs.spark.java import java_home


def main(url: str, checkpoint: str) -> None:
    os.environ["JAVA_HOME"] = str(java_home())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    with quick_home("local[2]"):  # Spark waits 10 s for a Python process that runs foreachBatch
        spark = SparkSession.builder.remote("local[2]").config("spark.sql.shuffle.partitions", "1").getOrCreate()
    rows = spark.readStream.format("pxrs").options(url=url, topic="in", group="counter").load()
    counts = rows.groupBy("key").count().selectExpr("key", "CAST(count AS STRING) AS value")
    updates = stream_updates(counts, url=url, topic="counts", app_id="counts").option("checkpointLocation", checkpoint)
    for _ in range(2):
        query = updates.trigger(availableNow=True).start()
        query.awaitTermination()
        if (error := query.exception()) is not None:
            raise error
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
