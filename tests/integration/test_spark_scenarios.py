"""S2, S3, K1, K3: streams as data engineers write them, each to its exact count, distinct values and sum.

Every scenario is one query with one checkpoint location (`through_deaths`). It fails inside a batch, is started again
and reads to the end. Some then repeat a batch that their sink has, as if the driver had died between the commit of the
sink and that of Spark; more rows are sent before, so that the result also shows the state that the repeated batch has
left. `test_spark_chaos.py` kills drivers and executors.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import pxrs
from pxrs.hub import Hub
from pxrs.spark.updates import stream_updates

pyspark = pytest.importorskip("pyspark")

SOAK = bool(os.environ.get("PXRS_SOAK"))
HALF, ALL = 200, 300
"""How many rows there are for the first two runs, and in the end."""
BATCH_ROWS = "110"
KEYS = 7
STEP_MS = 200
"""The time from one row to the next."""
BEGIN_MS = 1_767_225_600_000
END_MS = BEGIN_MS + 1_000_000
"""Of a row that comes last: it moves the watermark past all others."""
CUT = "cut off"


class Streams:
    """Topics with numbered rows, and queries over them."""

    def __init__(self, spark: Any, hub: Hub, folder: Path) -> None:
        self.spark, self.hub, self.location = spark, hub, folder / "checkpoint"

    def create(self, *topics: str) -> None:
        for topic in topics:
            self.hub.create_topic(topic, partitions=3)

    def send(self, topic: str, numbers: Iterable[int], delay_ms: int = 0) -> None:
        """Send a row for each number, with its event time. Every tenth row is sent some rows later than its time."""
        rows = sorted(numbers, key=lambda number: number + 15 * (number % 10 == 3))
        times = [1000 * (BEGIN_MS + number * STEP_MS + delay_ms) for number in rows]
        self._send(topic, [(b"k%d" % (number % KEYS), b"%d" % number) for number in rows], times)

    def send_last(self, topic: str, number: int = -1) -> None:
        self._send(topic, [(b"last", b"%d" % number)], [1000 * END_MS])

    def _send(self, topic: str, rows: list[tuple[bytes, bytes]], times_us: list[int]) -> None:
        keys, values = [key for key, _ in rows], [value for _, value in rows]
        with self.hub.producer(topic) as out:
            out.send_batch(
                pa.table({"key": keys, "value": values, "timestamp": pa.array(times_us, pa.timestamp("us", "UTC"))})
            )

    def read(self, topic: str) -> Any:
        """The rows of a topic, with their numbers."""
        options = {"url": self.hub.url, "topic": topic, "group": f"of-{topic}", "maxRowsPerTrigger": BATCH_ROWS}
        rows = self.spark.readStream.format("pxrs").options(**options).load()
        return rows.selectExpr("key", "CAST(CAST(value AS STRING) AS INT) AS n", "timestamp AS time")

    def write(self, rows: Any, /, **columns: str) -> Any:
        """Start the query: for each row a JSON object of these columns to the topic `out`."""
        fields = ", ".join(f"'{name}', {column}" for name, column in columns.items())
        messages = rows.selectExpr("key", f"to_json(named_struct({fields})) AS value")
        return self.start(messages.writeStream.format("pxrs").options(url=self.hub.url, topic="out"))

    def start(self, writer: Any) -> Any:
        return writer.option("checkpointLocation", str(self.location)).trigger(availableNow=True).start()

    def through_deaths(
        self, start: Callable[[bool], Any], send_more: Callable[[], None], is_repeated: bool = True
    ) -> None:
        """start: start the query; given True, one that fails in a batch after the first (`or_fail`).
        is_repeated: also repeat a batch that the sink has."""
        failing = start(True)
        with pytest.raises(pyspark.errors.StreamingQueryException, match=CUT):
            failing.awaitTermination()
        assert self.batches("commits"), "it failed in the first batch: it has no state yet"
        assert len(self.batches("offsets")) == len(self.batches("commits")) + 1, "it has failed inside of a batch"
        if not is_repeated:
            send_more()
            start(False).awaitTermination()
            return
        start(False).awaitTermination()
        send_more()
        last = self.batches("commits")[-1]
        for name in (f"{last}", f".{last}.crc"):
            (self.location / "commits" / name).unlink(missing_ok=True)
        query = start(False)
        query.awaitTermination()
        assert query.recentProgress[0].batchId == last, "the batch is repeated"

    def batches(self, folder: str) -> list[int]:
        return sorted(int(path.name) for path in (self.location / folder).iterdir() if path.name.isdecimal())

    def found(self) -> list[dict[str, Any]]:
        """The objects in the topic `out`, those of a key in their order."""
        out = self.hub.topic("out")
        return [
            {"key": message.key.decode(), **json.loads(message.value or b"")}
            for number in range(out.partitions)
            for message in out.messages(number)
            if message.key is not None
        ]


def or_fail(is_cut: bool, where: str, column: str) -> str:
    """The column; if `is_cut`, an error in its place where this condition is true."""
    return f"if({where}, raise_error('{CUT}'), {column})" if is_cut else column


@pytest.fixture
def streams(spark: Any, tmp_path: Path) -> Iterator[Streams]:
    spark.conf.set("spark.sql.shuffle.partitions", "2")  # one task fails, and another one stages its rows
    with pxrs.open(tmp_path / "hub") as hub:
        made = Streams(spark, hub, tmp_path)
        made.create("in", "out")
        yield made
    spark.conf.set("spark.sql.shuffle.partitions", "1")


def windows_with_a_watermark_hold_every_row_once(streams: Streams) -> None:
    streams.send("in", range(HALF))

    def start(is_cut: bool) -> Any:
        rows = streams.read("in").withWatermark("time", "10 seconds").selectExpr("*", "window(time, '5 seconds') AS w")
        sums = rows.groupBy("w", "key").agg({"n": "sum", "*": "count"})
        cut = "unix_millis(w.start) = 1767225605000 AND key = 'k2'"
        rows_count = or_fail(is_cut, cut, "`count(1)`")
        return streams.write(sums, start="unix_millis(w.start)", rows=rows_count, sum="`sum(n)`")

    def send_more() -> None:
        streams.send("in", range(HALF, ALL))
        streams.send_last("in")

    streams.through_deaths(start, send_more)
    expected: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for n in range(ALL):
        expected[f"k{n % KEYS}", (BEGIN_MS + n * STEP_MS) // 5000 * 5000].append(n)
    found = streams.found()
    assert len(found) == len(expected)
    assert {(row["key"], row["start"]): (row["rows"], row["sum"]) for row in found} == {
        window: (len(numbers), sum(numbers)) for window, numbers in expected.items()
    }


def join_of_two_streams_has_every_pair_once_and_every_row_without_one(streams: Streams) -> None:
    streams.create("payments")

    def send(numbers: range) -> None:
        streams.send("in", numbers)
        streams.send("payments", (n for n in numbers if n % 3), delay_ms=2_000)

    def start(is_cut: bool) -> Any:
        orders = streams.read("in").withWatermark("time", "10 seconds").alias("o")
        payments = streams.read("payments").withWatermark("time", "10 seconds").alias("p")
        in_time = "o.n = p.n AND p.time BETWEEN o.time AND o.time + INTERVAL 5 SECONDS"
        pairs = orders.join(payments, pyspark.sql.functions.expr(in_time), "leftOuter")
        pairs = pairs.selectExpr("o.key AS key", "o.n AS n", "p.n AS paid")
        return streams.write(pairs, n=or_fail(is_cut, "n = 160", "n"), paid="paid IS NOT NULL")

    def send_more() -> None:
        send(range(HALF, ALL))
        streams.send_last("in")
        streams.send_last("payments", -2)

    send(range(HALF))
    streams.through_deaths(start, send_more)
    found = [(row["n"], row["paid"]) for row in streams.found()]
    assert sorted(found) == [(n, bool(n % 3)) for n in range(ALL)]


def of_repeated_rows_one_is_kept(streams: Streams) -> None:
    """The repeated rows are in the same batch, in later batches, and after a restart."""

    def start(is_cut: bool) -> Any:
        rows = streams.read("in").withWatermark("time", "1 hour").dropDuplicatesWithinWatermark(["n"])
        return streams.write(rows, n=or_fail(is_cut, "n = 190", "n"))

    def send_more() -> None:
        """Rows of the batch that has failed are not sent again: the test fails if the query has lost them."""
        streams.send("in", [*range(HALF // 4), *range(HALF, ALL)])

    streams.send("in", [*range(HALF // 2), *range(HALF // 2)])
    streams.send("in", range(HALF))
    streams.through_deaths(start, send_more, is_repeated=False)
    assert sorted(row["n"] for row in streams.found()) == list(range(ALL))


def state_in_pandas_counts_every_row_once(streams: Streams) -> None:
    pytest.importorskip("pandas")
    from pyspark.sql.streaming.state import GroupStateTimeout

    def count(key: tuple[Any], frames: Iterator[Any], state: Any) -> Iterator[Any]:
        import pandas

        rows, total = state.get if state.exists else (0, 0)
        added = [n for frame in frames for n in frame["n"]]
        rows, total = rows + len(added), total + sum(added)
        state.update((rows, total))
        yield pandas.DataFrame({"key": [key[0]], "added": [len(added)], "rows": [rows], "sum": [total]})

    def start(is_cut: bool) -> Any:
        kinds = "key BINARY, added LONG, rows LONG, sum LONG", "rows LONG, sum LONG"
        keyed = streams.read("in").groupBy("key")
        counts = keyed.applyInPandasWithState(count, *kinds, "append", GroupStateTimeout.NoTimeout)
        rows_count = or_fail(is_cut, "key = 'k2' AND rows > 16", "rows")
        return streams.write(counts, added="added", rows=rows_count, sum="sum")

    streams.send("in", range(HALF))
    streams.through_deaths(start, lambda: streams.send("in", range(HALF, ALL)), is_repeated=False)
    found = streams.found()
    numbers = {f"k{k}": range(k, ALL, KEYS) for k in range(KEYS)}
    assert sum(row["added"] for row in found) == ALL
    last = {row["key"]: (row["rows"], row["sum"]) for row in found}
    assert last == {key: (len(each), sum(each)) for key, each in numbers.items()}


def foreach_batch_into_a_database_has_every_row_once(streams: Streams) -> None:
    """The function keeps the number of each batch with its rows, in one transaction: a batch comes again."""
    place = streams.location.with_name("shop.db")
    with closing(sqlite3.connect(place)) as shop, shop:
        shop.execute("CREATE TABLE batches (number INTEGER PRIMARY KEY)")
        shop.execute("CREATE TABLE orders (n INTEGER)")

    def start(is_cut: bool) -> Any:
        def store(batch: Any, number: int) -> None:
            if number == 1 and is_cut:
                raise RuntimeError(CUT)
            rows = [(row.n,) for row in batch.collect()]
            with closing(sqlite3.connect(place)) as shop, shop:
                if shop.execute("INSERT OR IGNORE INTO batches VALUES (?)", (number,)).rowcount:
                    shop.executemany("INSERT INTO orders VALUES (?)", rows)

        return streams.start(streams.read("in").writeStream.foreachBatch(store))

    streams.send("in", range(HALF))
    streams.through_deaths(start, lambda: streams.send("in", range(HALF, ALL)))
    with closing(sqlite3.connect(place)) as shop:
        assert [n for (n,) in shop.execute("SELECT n FROM orders ORDER BY n")] == list(range(ALL))
    assert streams.hub.group("of-in").describe().lag == 0


def totals_that_change_are_sent_once_each(streams: Streams) -> None:
    """Output mode `update`, into a topic."""

    def start(is_cut: bool) -> Any:
        sums = streams.read("in").groupBy("key").agg({"n": "sum", "*": "count"})
        rows_count = or_fail(is_cut, "key = 'k2' AND `count(1)` > 16", "`count(1)`")
        value = f"to_json(named_struct('rows', {rows_count}, 'sum', `sum(n)`))"
        totals = sums.selectExpr("key", f"{value} AS value")
        return streams.start(stream_updates(totals, url=streams.hub.url, topic="out"))

    streams.send("in", range(HALF))
    streams.through_deaths(start, lambda: streams.send("in", range(HALF, ALL)))
    found = defaultdict(list)
    for row in streams.found():
        found[row["key"]].append((row["rows"], row["sum"]))
    numbers = {f"k{k}": range(k, ALL, KEYS) for k in range(KEYS)}
    assert {key: each[-1] for key, each in found.items()} == {
        key: (len(each), sum(each)) for key, each in numbers.items()
    }
    assert not [key for key, each in found.items() if each != sorted(set(each))], "a change was sent again"
    assert min(map(len, found.values())) == 3


SCENARIOS = {
    each.__name__: each
    for each in (
        windows_with_a_watermark_hold_every_row_once,
        join_of_two_streams_has_every_pair_once_and_every_row_without_one,
        of_repeated_rows_one_is_kept,
        state_in_pandas_counts_every_row_once,
        foreach_batch_into_a_database_has_every_row_once,
        totals_that_change_are_sent_once_each,
    )
}


@pytest.mark.parametrize("scenario", SCENARIOS if SOAK else ["any"])
def test_s2_s3_a_scenario_survives_a_failure(
    scenario: str, streams: Streams, record_property: Callable[[str, object], None]
) -> None:
    """`make test` runs one of them, which the seed chooses. test_recipes.py and test_demo.py have each kind without a
    failure, and test_spark_writes.py repeats a batch of totals."""
    seed = int(os.environ.get("SEED", time.time_ns() % 1_000_000))
    if scenario == "any":
        scenario = random.Random(seed).choice(list(SCENARIOS))
    record_property("chosen", f"{scenario} by SEED={seed}")
    SCENARIOS[scenario](streams)


@pytest.fixture
def remote(connect_url: str) -> Iterator[Any]:
    from pyspark.sql.connect.session import SparkSession

    found = SparkSession.builder.remote(connect_url).create()
    yield found
    found.stop()


@pytest.mark.skipif(not SOAK, reason="test_recipes.py has a stream over Connect; `make soak` has one that fails")
def test_s2_a_stream_over_connect_has_every_row_once(remote: Any, tmp_path: Path) -> None:
    with pxrs.open(tmp_path / "hub") as hub:
        streams = Streams(remote, hub, tmp_path)
        streams.create("in", "out")

        def start(is_cut: bool) -> Any:
            return streams.write(streams.read("in"), n=or_fail(is_cut, "n = 190", "n"))

        streams.send("in", range(HALF))
        streams.through_deaths(start, lambda: streams.send("in", range(HALF, ALL)), is_repeated=False)
        assert sorted(row["n"] for row in streams.found()) == list(range(ALL))
        assert hub.group("of-in").describe().lag == 0
