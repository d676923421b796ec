"""Output mode `update` with a topic as the sink: rows that have changed are sent again, each change exactly once.

Spark lets a sink in Python only append. So a query in this mode gives each of its batches to a function
(`foreachBatch`), which writes it as a batch of that query (`numbered.py`). A repeated batch finds that it is published.

Over Spark Connect, Spark does not pass the query's id to the tasks of such a write, so the caller must give an id
(`app_id`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pxrs.errors import InvalidOption

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter


def stream_updates(
    rows: DataFrame, *, url: str, topic: str | None = None, registry: str | None = None, app_id: str | None = None
) -> DataStreamWriter:
    """Spark's writer of a query in output mode `update` whose changed rows go to a topic, each change exactly once.

        query = stream_updates(counts, url="data", topic="counts").option("checkpointLocation", ...).start()

    topic:  None if the rows have a column `topic`.
    app_id: a name for this query that stays the same when it is started again with its checkpoint location. Needed over
            Spark Connect. With it, the group's checkpoints follow after each batch instead of together with it.
    Raises InvalidOption."""
    if app_id is None and type(rows).__module__.startswith("pyspark.sql.connect"):
        raise InvalidOption(
            "app_id",
            "missing: over Spark Connect, Spark does not pass the id of the query to a batch. Give a name that stays "
            "the same when the query is restarted with its checkpoint location, and that no other query has",
        )
    given = {"url": url, "topic": topic, "registry": registry, "txnAppId": app_id}
    options = {name: value for name, value in given.items() if value is not None}

    def send(batch: DataFrame, number: int) -> None:
        batch.write.format("pxrs").options(**options).option("txnVersion", str(number)).mode("append").save()

    return rows.writeStream.foreachBatch(send).outputMode("update")
