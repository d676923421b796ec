"""Totals of each account in each hour, from a topic of orders into a topic of totals.

    python examples/account_totals.py [FOLDER]

Orders come late, and out of order. An hour is over when one comes that is ten minutes younger than its end: then its
totals are sent, each once and for good. What comes still later is not counted. Without FOLDER it works in a temporary
one.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import pxrs
from pxrs.spark import session

ORDERS = [
    ("ann", "10.50", "10:05"),
    ("bob", "1.00", "10:15"),
    ("ann", "5.00", "11:05"),  # the next hour, and ten is not over
    ("ann", "2.25", "10:55"),  # late, in time
    ("bob", "7.00", "12:11"),  # ends ten and eleven
]
TOO_LATE = [("ann", "99.00", "10:59"), ("bob", "0.50", "13:15")]


def main(folder: str | Path, spark: SparkSession | None = None) -> None:
    spark = spark or session("account-totals", "local[2]", {"spark.sql.shuffle.partitions": "2"})
    with pxrs.open(Path(folder, "data")) as hub:
        hub.create_topic("orders", partitions=2)
        hub.create_topic("totals", partitions=2)

        send(hub, ORDERS)
        run(spark, folder)
        found = totals(hub)
        assert found == {("ann", "10:00"): "12.75", ("bob", "10:00"): "1.00", ("ann", "11:00"): "5.00"}

        send(hub, TOO_LATE)
        run(spark, folder)
        found = totals(hub)
        assert found == {
            ("ann", "10:00"): "12.75",
            ("bob", "10:00"): "1.00",
            ("ann", "11:00"): "5.00",
            ("bob", "12:00"): "7.00",
        }
        for (account, hour), total in sorted(found.items()):
            print(f"{hour}  {account}  {total:>6}")


def send(hub: pxrs.Hub, orders: list[tuple[str, str, str]]) -> None:
    with hub.producer("orders") as out:
        for account, amount, time in orders:
            order = {"account": account, "amount": amount, "at": f"2026-01-31T{time}:00Z"}
            out.send(json.dumps(order), key=account)


def run(spark: SparkSession, folder: str | Path) -> None:
    """Work off what is new."""
    url = str(Path(folder, "data"))
    messages = spark.readStream.format("pxrs").options(url=url, topic="orders", group="totals").load()
    fields = F.from_json(F.col("value").cast("string"), "account STRING, amount DECIMAL(12, 2), at TIMESTAMP")
    orders = messages.select(fields.alias("order")).select("order.*").withWatermark("at", "10 minutes")
    sums = orders.groupBy(F.window("at", "1 hour").alias("hour"), "account").agg(F.sum("amount").alias("total"))
    hour = F.date_format("hour.start", "HH:mm").alias("hour")
    rows = sums.select(F.col("account").alias("key"), F.to_json(F.struct("account", hour, "total")).alias("value"))
    sink = {"url": url, "topic": "totals", "checkpointLocation": str(Path(folder, "checkpoint"))}
    rows.writeStream.format("pxrs").options(**sink).trigger(availableNow=True).start().awaitTermination()


def totals(hub: pxrs.Hub) -> dict[tuple[str, str], str]:
    rows = [json.loads(value, parse_float=str) for value in hub.topic("totals").to_arrow()["value"].to_pylist()]
    found = {(row["account"], row["hour"]): row["total"] for row in rows}
    assert len(found) == len(rows), "each is sent once"
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="pxrs-", ignore_cleanup_errors=True) as temporary:
        main(sys.argv[1] if len(sys.argv) > 1 else temporary)
