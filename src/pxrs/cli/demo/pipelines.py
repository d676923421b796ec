"""The pipelines of the demo: a file for `pxrs pipeline run`, as a user would write it."""

import os

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pxrs.spark import parquet, parse_json, pipeline

ORDER = "account STRING NOT NULL, amount DECIMAL(12, 2) NOT NULL, at TIMESTAMP NOT NULL"
LEASE = {"leaseTtl": 30}  # a query whose lease expires ends: long enough for a machine with much else to do
GROUP = os.environ.get("PXRS_DEMO_GROUP", "demo")


def by_window(orders: DataFrame) -> DataFrame:
    """The total of each account in each half hour of the orders' own time."""
    windows = orders.withWatermark("at", "1 day").groupBy(F.window("at", "30 minutes").alias("window"), "account")
    sums = windows.agg(F.sum("amount").alias("total"), F.count("*").alias("orders"))
    return sums.select("account", F.col("window.start").alias("begin"), "total", "orders")


@pipeline(
    source="orders",
    sink="totals",
    group=f"{GROUP}-totals",
    parse=parse_json(ORDER),
    dead_letters="orders.dead-letters",
    output_mode="update",
    every="2 seconds",
    options=LEASE,
)
def totals(orders: DataFrame) -> DataFrame:
    """Sends a total to the topic whenever it changes."""
    return by_window(orders).withColumn("key", F.col("account"))


@pipeline(
    source="orders",
    sink=parquet("archive"),
    group=f"{GROUP}-archive",
    parse=parse_json(ORDER, on_bad="drop"),
    every="2 seconds",
    options=LEASE,
)
def archive(orders: DataFrame) -> DataFrame:
    """Writes each total once, when no more orders of its window can come."""
    return by_window(orders)
