"""Word count: lines go into a topic, and Spark counts their words. After a restart the counts continue.

    python examples/word_count.py [FOLDER]

The query is a member of the group "counter". The group's checkpoints and lag show its progress; Spark's checkpoint
location holds the counts. Without FOLDER the example uses a temporary folder.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import pxrs
from pxrs.spark import session

MORNING = ["the cat sat on the mat", "the dog sat on the cat"]
EVENING = ["the mat is gone"]


def main(folder: str | Path, spark: SparkSession | None = None) -> None:
    spark = spark or session("word-count", "local[2]", {"spark.sql.shuffle.partitions": "2"})
    with pxrs.open(Path(folder, "data")) as hub:
        lines = hub.create_topic("lines", partitions=2)

        send(hub, MORNING)
        assert count(spark, folder) == {"the": 4, "cat": 2, "sat": 2, "on": 2, "mat": 1, "dog": 1}
        assert hub.group("counter").describe().lag == 0

        send(hub, EVENING)
        assert hub.group("counter").describe().lag == 1  # known also while no query runs
        words = count(spark, folder)
        assert words == {"the": 5, "cat": 2, "sat": 2, "on": 2, "mat": 2, "dog": 1, "is": 1, "gone": 1}
        assert hub.group("counter").describe().lag == 0

        print(f"{sum(lines.end(number) for number in range(2))} lines:")
        for word, number in sorted(words.items(), key=lambda found: (-found[1], found[0])):
            print(f"{number:3} {word}")


def send(hub: pxrs.Hub, texts: list[str]) -> None:
    with hub.producer("lines") as out:
        for text in texts:
            out.send(text)


def count(spark: SparkSession, folder: str | Path) -> dict[str, int]:
    """Count the new lines, and return all counts."""
    lines = spark.readStream.format("pxrs").options(url=str(Path(folder, "data")), topic="lines", group="counter")
    text = F.col("value").cast("string")
    words = lines.load().select(F.explode(F.split(text, " ")).alias("word"))
    counts = words.groupBy("word").count().writeStream.outputMode("complete").format("memory").queryName("counts")
    query = counts.option("checkpointLocation", str(Path(folder, "checkpoint"))).trigger(availableNow=True).start()
    query.awaitTermination()
    return {row["word"]: row["count"] for row in spark.table("counts").collect()}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="pxrs-", ignore_cleanup_errors=True) as temporary:
        main(sys.argv[1] if len(sys.argv) > 1 else temporary)
