"""Pipelines in a real Spark: where rejected rows go, and which rows and lag are reported."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.cli.pipeline.history import run_history
from pxrs.errors import InvalidPipeline
from pxrs.hub import Hub
from pxrs.spark import HubAddress, Pipeline, QueryWatch, TopicProgress, parse_json, pipeline, reject, topics_matching
from pxrs.spark.run import Run
from pxrs.testing.waiting import eventually

pytestmark = pytest.mark.sampled(2, of="module")

pytest.importorskip("pyspark")

PATIENCE_S = 240.0
ORDER = "account STRING NOT NULL, amount INT"
COUNTER = count()
Function = Callable[[Any], Any]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with pxrs.open(tmp_path / "hub") as hub:
        for topic in ("orders", "returns", "totals", "bad"):
            hub.create_topic(topic, partitions=2)
        yield hub


def order(account: str, amount: int | None) -> str:
    return json.dumps({"account": account, "amount": amount})


def send(hub: Hub, *values: str, topic: str = "orders") -> None:
    with hub.producer(topic) as out:
        for number, value in enumerate(values):
            out.send(value, key=f"key-{number}", headers=[("trace", b"7")])


def run(spark: Any, hub: Hub, each: Pipeline, folder: Path) -> dict[str, tuple[str, int, int | None]]:
    """Run a pipeline to the end of what is there. By query: its state or error, its rows and its lag."""
    running = Run(spark, hub, [each], HubAddress(hub.url), folder / "checkpoints", is_once=True)
    running.start()

    def is_over() -> bool:
        running.look()
        return running.is_over

    eventually(is_over, PATIENCE_S, what=lambda: running.queries)
    return {query.name: (query.error or query.state, query.rows_done, query.lag) for query in running.queries}


def run_until_a_batch_is_reported(spark: Any, hub: Hub, each: Pipeline, folder: Path) -> tuple[str, int]:
    """The state and the rows of a pipeline that runs until it is stopped, at the first batch that is seen."""
    running = Run(spark, hub, [each], HubAddress(hub.url), folder / "checkpoints")
    (query,) = running.queries
    running.start()

    def is_reported() -> bool:
        running.look()
        return query.last is not None or running.is_over

    eventually(is_reported, PATIENCE_S, what=lambda: query)
    found = query.state, query.rows_done
    running.stop()
    return found


def values(hub: Hub, topic: str) -> list[str]:
    return sorted(value.decode() for value in hub.topic(topic).to_arrow()["value"].to_pylist())


def dead(hub: Hub) -> dict[str, list[str]]:
    """The reasons of the dead letters in a topic, by the value of the message."""
    found: dict[str, list[str]] = {}
    for number in range(2):
        for message in hub.topic("bad").messages(number):
            headers = dict(message.headers or [])
            assert headers["trace"] == b"7", "those of the message"
            assert message.key is not None
            topic, partition, offset = headers["pxrs-origin"].decode().replace(" offset ", "/").split("/")
            (stored, *_) = hub.topic(topic).messages(int(partition), int(offset))
            assert (stored.key, stored.value, stored.timestamp) == (message.key, message.value, message.timestamp)
            found.setdefault(message.value.decode(), []).append(headers["pxrs-reason"].decode())  # type: ignore[union-attr]
    return found


@pipeline(source=["orders", "returns"], sink="totals", parse=parse_json(ORDER), dead_letters="bad")
def checked(orders: Any) -> Any:
    from pyspark.sql import functions as F

    orders = reject(orders, F.col("amount") <= 0, "amount is not positive")
    orders = orders.withColumn("cents", F.col("amount") * 100)
    orders = reject(orders, "cents > 9900", F.concat(F.lit("too much for "), F.nullif("account", F.lit("eve"))))
    return orders.select(F.concat_ws(" ", "topic", "account").alias("value"))


def test_s4_rows_that_a_function_rejects_are_dead_letters_once_and_name_their_topic(
    spark: Any, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`test_pipelines.py` repeats batches of a pipeline with rejected rows."""
    send(hub, order("ann", 1), order("dan", None), order("bob", -1), order("cid", 100), "no json")
    send(hub, order("ann", 2), order("eve", 100), "none either", topic="returns")
    told = run(spark, hub, checked, tmp_path)
    assert told == {"checked": ("ended", 8, 0), "checked.dead-letters": ("ended", 8, 0)}
    good = ["orders ann", "orders dan", "returns ann"]
    assert values(hub, "totals") == good, "a condition that is null rejects nothing"
    assert dead(hub) == {
        order("bob", -1): ["amount is not positive"],
        order("cid", 100): ["too much for cid"],
        order("eve", 100): ["rejected by the pipeline's function"],
        "no json": ["it is not one JSON document"],
        "none either": ["it is not one JSON document"],
    }

    run_history(spark, [checked], HubAddress(hub.url), {}, 20, is_written=False, as_json=True)
    out, error = capsys.readouterr()
    assert sorted(json.loads(line)["row"]["value"] for line in out.splitlines()) == good
    assert "checked: skipped 5 messages that do not parse or are rejected" in error

    matching = pipeline(topics_matching("ord.*|ret.*"), "totals", parse=checked.parse, name="m")(checked.function)
    bad = matching.bad(matching.messages(spark, HubAddress(hub.url)))
    origins = bad.selectExpr("CAST(element_at(headers, -1).value AS STRING) AS origin").collect()
    assert {row.origin.split("/")[0] for row in origins} == {"orders", "returns"}
    assert Run(spark, hub, [matching], HubAddress(hub.url), tmp_path).queries[0].source == str(matching.source)


def test_a_function_is_tested_with_rows_of_any_kind(spark: Any) -> None:
    rows = spark.createDataFrame([("t", "ann", 1), ("t", "bob", -1), ("t", "cid", None)], "topic STRING, " + ORDER)
    assert [row.value for row in checked(rows).collect()] == ["t ann", "t cid"]
    assert [tuple(row) for row in checked.rejected(rows).collect()] == [("t", "bob", -1, "amount is not positive")]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda rows, F: reject(rows.select("account", "amount"), "amount < 0", "x"), "no longer have the message"),
        (lambda rows, F: reject(rows.groupBy("account").count(), "count < 0", "x"), "depend on an aggregation"),
        (lambda rows, F: reject(rows.dropDuplicates(["account"]), "amount < 0", "x"), "depend on dropDuplicates"),
        (lambda rows, F: reject(rows, F.rand() < 0.5, "x"), "depend on a function that is not deterministic"),
        (lambda rows, F: reject(rows.sample(0.5), "amount < 0", "x"), "depend on a sample"),
        (lambda rows, F: reject(rows, F.col("timestamp") > F.now(), "x"), "depend on the current time"),
        (lambda rows, F: reject(rows, F.lit(datetime.now()) > F.col("timestamp"), "x"), "differ between two calls"),
        (
            lambda rows, F: reject(rows.withColumn("n", F.lit(next(COUNTER))), "amount > n", "x"),
            "differ between two calls",
        ),
        (lambda rows, F: (reject(rows, "amount < 0", "x"), rows)[1], "does not use what reject returns"),
        (lambda rows, F: reject(rows, F.hash("*") % 2 == 0, "x"), "reject depends on all columns"),
        (lambda rows, F: reject(rows.na.drop("all"), "amount < 0", "x"), "reject depends on all columns"),
        (lambda rows, F: reject(rows, F.col("amount"), "x"), "is a int, not a boolean"),
        (lambda rows, F: reject(rows, True, "x"), "condition is True"),
        (lambda rows, F: reject(rows, "amount < 0", ""), "reason is ''"),
        (lambda rows, F: reject(rows, "amount < 0", None), "reason is None"),
    ],
)
def test_a_reject_that_could_lose_or_double_rows_is_refused(
    spark: Any, hub: Hub, tmp_path: Path, function: Any, words: str
) -> None:
    from pyspark.sql import functions as F

    options: Any = {"parse": parse_json(ORDER), "dead_letters": "bad", "output_mode": "update", "name": "p"}
    each = pipeline("orders", "totals", **options)(lambda rows: function(rows, F))
    with pytest.raises(InvalidPipeline, match=words):
        Run(spark, hub, [each], HubAddress(hub.url), tmp_path)


def test_a_reject_among_steps_that_spark_numbers_anew_each_time_is_accepted(
    spark: Any, hub: Hub, tmp_path: Path
) -> None:
    """Spark gives other numbers to columns, watermarks and variables when the function is called again."""
    from pyspark.sql import functions as F

    def checked_in_sql(rows: Any) -> Any:
        table = spark.createDataFrame([("ann", 7)], "account STRING, most INT")
        same = F.udf(lambda number: number, "int")
        rows = rows.withWatermark("timestamp", "1 minute").alias("o").withColumn("items", F.array("amount"))
        rows = rows.join(F.broadcast(table), "account", "left").select("*", F.explode("items").alias("item"))
        is_bad = F.exists("items", lambda item: item < 0) | F.col("item").isin(*range(60)) | (same("amount") > 5)
        rows = reject(rows, is_bad, "x")
        reject(rows, "amount = most", "y").createOrReplaceTempView("kept")
        kept = rows.sparkSession.sql("SELECT account, timestamp FROM kept WHERE amount IS NOT NULL")
        return kept.groupBy(F.window("timestamp", "1 hour"), "account").count()

    def joined(rows: Any) -> Any:
        late = rows.withWatermark("timestamp", "1 minute")
        kept = reject(late, "amount < 0", "x")
        return (
            late.alias("a")
            .join(kept.alias("b"), F.expr("a.offset = b.offset AND a.timestamp = b.timestamp"))
            .select("a.account")
        )

    def doubled(rows: Any) -> Any:
        rows = rows.union(rows.filter("amount > 1")).na.drop(subset=["amount"])
        return reject(rows.fillna({"amount": 0}), "amount < 0", "x").select("account")

    shape: Any = {"parse": parse_json(ORDER), "dead_letters": "bad"}
    pipelines = [pipeline("orders", "totals", **shape)(function) for function in (checked_in_sql, joined, doubled)]
    assert len(Run(spark, hub, pipelines, HubAddress(hub.url), tmp_path).queries) == 6


def test_history_is_written_once_by_a_function_that_rejects_rows_which_are_no_messages_any_more(
    spark: Any, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    """There are no dead letters, so it need not have the messages. The count of what was left out used to fail after
    the rows were written, and who repeated the command wrote them twice."""

    @pipeline(source="orders", sink="totals", parse=parse_json(ORDER, on_bad="drop"))
    def sums(rows: Any) -> Any:
        return reject(rows.groupBy("account").agg({"amount": "sum"}), "`sum(amount)` < 0", "x").selectExpr(
            "account AS value"
        )

    send(hub, order("ann", 1), order("bob", -1), order("bob", -2), "no json")
    run_history(spark, [sums], HubAddress(hub.url), {}, 20, is_written=True, as_json=True)
    assert values(hub, "totals") == ["ann"]
    assert "sums: skipped 2 messages" in capsys.readouterr().err


def test_dead_letters_without_a_parse_step_are_those_that_the_function_rejects(
    spark: Any, hub: Hub, tmp_path: Path
) -> None:
    shape: Any = {"dead_letters": "bad", "options": {"columns": "key,value"}}

    @pipeline(source="orders", sink="totals", **shape)
    def keyed(rows: Any) -> Any:
        assert rows.columns[:2] == ["key", "value"], "others are for the dead letters alone"
        assert not {"headers", "offset"} & set(rows.columns)
        return reject(rows, "key = 'key-1'", "it is the second")

    send(hub, "a", "b", "c")
    run(spark, hub, keyed, tmp_path)
    assert (values(hub, "totals"), dead(hub)) == (["a", "c"], {"b": ["it is the second"]})

    def nothing(rows: Any) -> Any:
        return rows

    with pytest.raises(InvalidPipeline, match="nothing: dead_letters is given, but no message can become"):
        Run(spark, hub, [pipeline("orders", "totals", **shape)(nothing)], HubAddress(hub.url), tmp_path)
    messages = checked.messages(spark, HubAddress(hub.url))
    with pytest.raises(InvalidPipeline, match="has no parse step, and its function does not call reject"):
        pipeline("orders", "totals")(nothing).bad(messages)


def test_without_dead_letters_a_rejected_row_ends_the_pipeline_and_names_its_message(
    spark: Any, hub: Hub, tmp_path: Path
) -> None:
    parses = {"fails": None, "fails_too": parse_json(ORDER), "drops": parse_json(ORDER, on_bad="drop")}

    def made(name: str) -> Pipeline:
        def refuse(rows: Any) -> Any:
            return reject(rows, "timestamp is not null", "it has a time").select("key", "timestamp")

        return pipeline("orders", "totals", name=name, parse=parses[name])(refuse)

    send(hub, order("ann", 1))
    (place,) = [number for number in range(2) if hub.topic("orders").end(number)]
    assert run(spark, hub, made("fails"), tmp_path) == {"fails": (f"orders/{place} offset 0: it has a time", 0, 1)}
    assert run_until_a_batch_is_reported(spark, hub, made("drops"), tmp_path) == ("running", 1)
    assert hub.group("drops").describe().lag == 0
    messages = checked.messages(spark, HubAddress(hub.url))
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException, match=f"orders/{place} offset 0: it has a time"):
        made("fails_too").over(messages).count()
    assert values(hub, "totals") == []


def test_a_stream_outside_of_a_pipeline_is_not_rejected_from(spark: Any) -> None:
    """Nothing would keep the rows, also if the function calls it in a thread of its own."""
    with pytest.raises(InvalidPipeline, match="outside of a pipeline's function"):
        reject(spark.readStream.format("rate").load(), "value > 1", "x")


def test_a_watch_has_the_error_of_a_query_that_fails_after_its_first_batch(
    spark: Any, hub: Hub, tmp_path: Path
) -> None:
    """`docs/spark-recipes.md` has one of a query that ends well."""
    with hub.producer("orders") as out:
        for value in ("1", "1", "1", "2"):
            out.send(value, partition=0)
    told = []
    options = {"url": hub.url, "topic": "orders", "group": "g", "maxRowsPerTrigger": "3"}
    rows = spark.readStream.format("pxrs").options(**options).load()
    rows = rows.selectExpr("IF(CAST(value AS STRING) = '2', raise_error('oops'), value) AS value")
    writer = rows.writeStream.format("pxrs").options(url=hub.url, topic="totals").queryName("fails")
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
    with QueryWatch(spark, on_report=told.append) as watch:
        failed = watch.ended(writer.start().runId, PATIENCE_S)
    assert (failed.name, failed.rows, failed.error) == ("fails", 3, "oops")
    (batch,) = failed.batches
    assert (batch.number, batch.rows, batch.lag) == (0, 3, 1)
    assert batch.topics == {"orders": TopicProgress(3, 1)}
    assert batch.duration_ms >= batch.phases_ms["addBatch"] > 0
    assert [(report.rows, report.is_ended) for report in told] == [(3, False), (3, True)]
