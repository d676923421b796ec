"""Run by `test_pipelines.py`, in a process of its own: what pipelines make of rows, plans and failures.

    python pipeline_probe.py

It starts Java, and prints the port and the secret by which other processes use the same Java, as programs under
spark-submit do. When it reads the line `probe` it prints what it finds, and ends as `pxrs pipeline run` ends when one
fails. It also ends, and Java with it, when its standard input does.
"""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout
from datetime import UTC, datetime
from json import dumps
from pathlib import Path
from typing import Any

from pyspark import SparkContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import pxrs
from pxrs.cli.app import main
from pxrs.cli.pipeline.history import run_history, show_rows
from pxrs.cli.pipeline.running import stderr_into
from pxrs.errors import InvalidPipeline, SharedState
from pxrs.spark import parquet, parse_json, pipeline, session, stateful_operators
from pxrs.spark.run import Run
from pxrs.spark.sinks import HubAddress

HUB = "probed"
VALUES = [
    "",
    "not json",
    '{"a": "x"',
    '{"a": "x", "n": 1} {}',
    '{"a": "x", "n": 1}] [',
    '{"a": "x", "n": 1}} {',
    "[]",
    "null",
    "{}",
    '{"a": null, "n": 1}',
    '{"a": "x", "n": 1.5}',
    '{"a": "x", "n": 99999999999}',
    '{"a": "x", "o": {"p": "q"}}',
    '{"a": "x", "o": {}}',
    "{'a': 'x'}",
    '{"a": "x", "d": 1e400}',
    '{"a": "x", "d": "NaN"}',
    b"latin: \xe4",
    None,
    '{"a": "x", "n": 1}',
    '\n {"o": {"p": 5}, "a": "y", "more": []} ',
]
SCHEMA = "a STRING NOT NULL, n INT, o STRUCT<p: INT NOT NULL>, d DOUBLE"
FILE = """
from pyspark.sql import functions as F

from pxrs.spark import pipeline


def refuse(value):
    raise ValueError("oops")


@pipeline(source="in", sink="out")
def fails(rows):
    if not rows.isStreaming:
        return rows.select("value", F.timestamp_micros(F.lit(1_700_000_000_123_456)).alias("timestamp"))
    return rows.select(F.udf(refuse, "string")("value").alias("value"))


@pipeline(source="in", sink="out")
def copies(rows):
    return rows
"""


@pipeline(source="in", sink="out", parse=parse_json(SCHEMA))
def parsed(rows: DataFrame) -> DataFrame:
    return rows.select("a", "n", "o.p", "offset")


@pipeline(source="in", sink=parquet("files"))
def archive(rows: DataFrame) -> DataFrame:
    return rows


@pipeline(source="in", sink="out", share_group=True, output_mode="update")
def counts(rows: DataFrame) -> DataFrame:
    return rows.groupBy("key").count()


def tell(found: Any) -> None:
    sys.stdout.write(dumps(found) + "\n")


def tell_of_rows(spark: Any) -> None:
    rows = [
        (None, value.encode() if isinstance(value, str) else value, 0, offset, datetime.now(UTC))
        for offset, value in enumerate(VALUES)
    ]
    messages = spark.createDataFrame(rows, "key BINARY, value BINARY, partition INT, offset LONG, timestamp TIMESTAMP")
    bad = [
        [None if row.value is None else row.value.decode(errors="replace"), row.headers[0].value.decode()]
        for row in parsed.bad(messages).collect()
    ]
    tell(bad)
    tell([list(row) for row in parsed.over(messages.filter(f"offset > {len(bad) - 1}")).collect()])
    tell(parse_json("Key STRING, OFFSET INT").good(messages, "in", True).columns)
    tell(shown(spark.sql("SELECT timestamp_micros(1700000000123456) AS twice, X'61ff' AS twice")))


def shown(rows: DataFrame) -> list[str]:
    """The rows as the table that `pxrs pipeline run --history` prints."""
    with redirect_stdout(io.TextIOWrapper(io.BytesIO())) as out:
        show_rows(parsed, rows, 20, False)
        return out.buffer.getvalue().decode().splitlines()


def tell_of_files(spark: Any, hub: pxrs.Hub) -> None:
    """The folder of a stream, as Spark leaves it, and a checkpoint location that is not that stream's."""
    Path("files", "_spark_metadata").mkdir(parents=True)
    for name in ("8", "9.compact", ".9.compact.crc"):
        Path("files", "_spark_metadata", name).touch()
    for act in (
        lambda: Run(spark, hub, [archive], HubAddress(HUB), Path("checkpoints")),
        lambda: run_history(spark, [archive], HubAddress(HUB), {}, 20, True, False),
    ):
        try:
            act()
        except InvalidPipeline as error:
            tell(str(error))


def tell_of_plans(spark: Any) -> None:
    rows = spark.readStream.format("pxrs").options(url=HUB, topic="in", group="plans").load()
    table = spark.createDataFrame([(b"x", 1)], "key BINARY, n INT")
    late = rows.withWatermark("timestamp", "1 minute")
    queries = {
        "an aggregation": rows.groupBy("key").count(),
        "distinct": rows.distinct(),
        "dropDuplicates": rows.dropDuplicates(["key"]),
        "dropDuplicatesWithinWatermark": late.dropDuplicatesWithinWatermark(["key"]).select("key"),
        "limit": rows.limit(3),
        "a join of two streams": rows.join(rows.select("key"), "key"),
        "a join with a table, which may be aggregated": rows.join(table.groupBy("key").count(), "key"),
        "a filter": late.filter(F.length("value") > 3).select("key"),
        "a batch": table.distinct(),
    }
    tell({name: stateful_operators(query) for name, query in queries.items()})


def probe() -> None:
    with pxrs.open(HUB) as hub:
        for topic in ("in", "out"):
            hub.create_topic(topic, partitions=1)
        with hub.producer("in") as out:
            out.send(b"oops")
        spark = session("probe", "local[2]")
        spark.sparkContext.setLogLevel("OFF")
        tell_of_rows(spark)
        tell_of_plans(spark)
        try:
            Run(spark, hub, [counts], HubAddress(HUB), Path("checkpoints"))
        except SharedState as error:
            tell(str(error))
        tell_of_files(spark, hub)
        spark.stop()
    Path("file.py").write_text(FILE)
    for arguments in (["--history", "fails"], []):
        sys.argv = ["pxrs", "pipeline", "run", "file.py", "--at", HUB, "--master", "local[2]", "--json", *arguments]
        try:
            main()
        except SystemExit as ended:
            sys.stdout.flush()
            if ended.code:
                raise


if __name__ == "__main__":
    with stderr_into(Path("spark.log")):
        spark = session("java", "local[2]")
    spark.stop()  # the Java stays: it has room for one session at a time
    java = SparkContext._gateway.gateway_parameters
    tell([java.port, java.auth_token])
    sys.stdout.flush()
    if sys.stdin.readline() == "probe\n":
        probe()
