"""Replay: a mistake in a pipeline is corrected, the correction is tested on stored messages, and the topic read again.

    python examples/replay_history.py [FOLDER]

A pipeline's function is the same for a stream and for a batch. So the new function first runs as a batch over the
stored messages, which changes no checkpoint. Then the group is reset to an earlier time, and the stream reads the topic
again from there and writes to another topic. Without FOLDER the example uses a temporary folder.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import pxrs
from pxrs.spark import session

DAYS = {datetime(2026, 1, 30, tzinfo=UTC): [100, 250], datetime(2026, 1, 31, tzinfo=UTC): [300, 999]}
"""Prices in cents, by the day on which they were sent."""


def wrong(messages: DataFrame) -> DataFrame:
    """Prices with their tax. It rounds down."""
    taxed = F.col("value").cast("string").cast("int") * 1.19
    return messages.select("key", F.floor(taxed).cast("string").alias("value"))


def right(messages: DataFrame) -> DataFrame:
    taxed = F.col("value").cast("string").cast("int") * 1.19
    return messages.select("key", F.round(taxed).cast("int").cast("string").alias("value"))


def main(folder: str | Path, spark: SparkSession | None = None) -> None:
    spark = spark or session("replay", "local[2]")
    with pxrs.open(Path(folder, "data")) as hub:
        for topic in ("prices", "taxed", "taxed-again"):
            hub.create_topic(topic, partitions=2)
        with hub.producer("prices") as out:
            for day, prices in DAYS.items():
                for price in prices:
                    out.send(str(price), key=f"product-{price}", timestamp=day)

        run(spark, folder, wrong, "taxed")
        assert values(hub, "taxed") == [119, 297, 357, 1188]  # 297.5 and 1188.81 should have become 298 and 1189
        assert hub.group("tax").describe().lag == 0

        # A batch over the last day. The group's checkpoints do not change.
        second = max(DAYS)
        history = spark.read.format("pxrs").options(url=hub.url, topic="prices", startingTimestamp=second.isoformat())
        tried = sorted(int(row.value) for row in right(history.load()).collect())
        assert tried == [357, 1189]
        assert hub.group("tax").describe().lag == 0

        # The stream again, from the beginning of that day. Spark's checkpoint location is kept: the reset counts.
        hub.group("tax").reset(second)
        assert hub.group("tax").describe().lag == 2
        run(spark, folder, right, "taxed-again")
        again = values(hub, "taxed-again")
        assert again == tried
        assert hub.group("tax").describe().lag == 0
        print(f"first run: {values(hub, 'taxed')}; last day replayed: {again}")


def run(spark: SparkSession, folder: str | Path, function: Callable[[DataFrame], DataFrame], sink: str) -> None:
    """Handle the messages that the group has not handled yet, and return."""
    url = str(Path(folder, "data"))
    messages = spark.readStream.format("pxrs").options(url=url, topic="prices", group="tax").load()
    writer = function(messages).writeStream.format("pxrs").options(url=url, topic=sink)
    query = writer.option("checkpointLocation", str(Path(folder, "checkpoint"))).trigger(availableNow=True).start()
    query.awaitTermination()


def values(hub: pxrs.Hub, topic: str) -> list[int]:
    return sorted(int(value) for value in hub.topic(topic).to_arrow()["value"].to_pylist())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="pxrs-", ignore_cleanup_errors=True) as temporary:
        main(sys.argv[1] if len(sys.argv) > 1 else temporary)
