"""Totals of each account in each hour, from a topic of orders into a topic of totals.

    python examples/account_totals.py [FOLDER]

Orders may arrive late and out of order. Spark closes an hour when an order arrives whose time is more than ten minutes
after the end of that hour (the watermark). Then the query sends the totals of that hour, each of them once. Orders of
that hour which arrive later are not counted. Without FOLDER the example uses a temporary folder.
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
    ("ann", "5.00", "11:05"),  # in the next hour; hour 10 is still open
    ("ann", "2.25", "10:55"),  # late, but hour 10 is still open
    ("bob", "7.00", "12:11"),  # closes hours 10 and 11
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
    """Handle the orders that the group has not handled yet, and return."""
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
    assert len(found) == len(rows), "each total is sent once"
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="pxrs-", ignore_cleanup_errors=True) as temporary:
        main(sys.argv[1] if len(sys.argv) > 1 else temporary)
