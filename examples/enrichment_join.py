"""Enrichment: each order of a topic is joined with a table of accounts, and sent to another topic with its country.

    python examples/enrichment_join.py [FOLDER]

The table is in Parquet files, and could be in any format that Spark reads. It may change between two runs of the query:
each run reads the table again. Orders of accounts that are not in the table are sent too, without a country. Without
FOLDER the example uses a temporary folder.
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


def main(folder: str | Path, spark: SparkSession | None = None) -> None:
    spark = spark or session("enrichment", "local[2]")
    with pxrs.open(Path(folder, "data")) as hub:
        hub.create_topic("orders", partitions=2)
        hub.create_topic("enriched", partitions=2)
        add_accounts(spark, folder, [("ann", "AT"), ("bob", "BE")])

        send(hub, [("ann", 10), ("bob", 20), ("cid", 30)])
        enrich(spark, folder)
        assert enriched(hub) == [("ann", 10, "AT"), ("bob", 20, "BE"), ("cid", 30, None)]

        add_accounts(spark, folder, [("cid", "CH")])
        send(hub, [("cid", 40)])
        enrich(spark, folder)
        found = enriched(hub)
        assert found == [("ann", 10, "AT"), ("bob", 20, "BE"), ("cid", 30, None), ("cid", 40, "CH")]
        for account, amount, country in found:
            print(f"{account}  {amount}  {country or 'unknown'}")


def add_accounts(spark: SparkSession, folder: str | Path, accounts: list[tuple[str, str]]) -> None:
    table = spark.createDataFrame(accounts, "account STRING, country STRING")
    table.coalesce(1).write.mode("append").parquet(str(Path(folder, "accounts")))


def send(hub: pxrs.Hub, orders: list[tuple[str, int]]) -> None:
    with hub.producer("orders") as out:
        for account, amount in orders:
            out.send(json.dumps({"account": account, "amount": amount}), key=account)


def enrich(spark: SparkSession, folder: str | Path) -> None:
    """Handle the orders that the group has not handled yet. A join with a table keeps no state, so the query could
    share its group."""
    url = str(Path(folder, "data"))
    messages = spark.readStream.format("pxrs").options(url=url, topic="orders", group="enrichment").load()
    fields = F.from_json(F.col("value").cast("string"), "account STRING, amount BIGINT")
    orders = messages.select("key", fields.alias("order")).select("key", "order.*")
    accounts = spark.read.parquet(str(Path(folder, "accounts")))
    joined = orders.join(F.broadcast(accounts), "account", "left")
    rows = joined.select("key", F.to_json(F.struct("account", "amount", "country")).alias("value"))
    sink = {"url": url, "topic": "enriched", "checkpointLocation": str(Path(folder, "checkpoint"))}
    rows.writeStream.format("pxrs").options(**sink).trigger(availableNow=True).start().awaitTermination()


def enriched(hub: pxrs.Hub) -> list[tuple[str, int, str | None]]:
    rows = [json.loads(value) for value in hub.topic("enriched").to_arrow()["value"].to_pylist()]
    return sorted((row["account"], row["amount"], row.get("country")) for row in rows)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="pxrs-", ignore_cleanup_errors=True) as temporary:
        main(sys.argv[1] if len(sys.argv) > 1 else temporary)
