"""X21: a registered source in Spark: what is planned, and what its tasks do, in this process instead of Spark's."""

from __future__ import annotations

import json
import pickle
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import pxrs
from pxrs.cli.app import app
from pxrs.errors import (
    CheckpointOutOfRange,
    IdentityChanged,
    InvalidOption,
    InvalidPipeline,
    InvalidTopic,
    OffsetOutOfRange,
    SourceChanged,
    UnknownTopic,
    WrongMachine,
    WrongSource,
)
from pxrs.group.records import Checkpoint, Keys, SourceRead
from pxrs.hashing import xxh64
from pxrs.hub import Hub

pytest.importorskip("pyspark")

from pyspark.serializers import CloudPickleSerializer
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, StructType

from pxrs.publishing.planning import IdRange
from pxrs.sources.sql_table import SqlTable
from pxrs.sources.sql_table.table import Table
from pxrs.spark import pipeline, place, reader
from pxrs.spark.columns import BATCH_ROWS, row_schema
from pxrs.spark.options import read_options, stream_options
from pxrs.spark.reader import BatchReader, StreamReader
from pxrs.spark.run import check_topics
from pxrs.spark.source import PxrsSource
from pxrs.spark.table import TableSlice
from pxrs.spark.tasks import TaskReader

PARTITIONS = 5
SECRET = "7319465"
"""Given as the size of SQLite's cache of statements: an option that may be a secret for all that pxrs knows."""


class Shop:
    """A table `orders` in a file, registered as `events` in a hub."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        self.file, self.hub = folder / "shop.db", hub
        self.address = f"sqlite:///{self.file}"
        self.do("CREATE TABLE orders (id INTEGER PRIMARY KEY AUTOINCREMENT, account TEXT, body TEXT, made TEXT)")

    def do(self, statement: str, *rows: tuple[Any, ...]) -> None:
        with closing(sqlite3.connect(self.file)) as connection, connection:
            if rows:
                connection.executemany(statement, rows)
            else:
                connection.execute(statement)

    def fill(self, count: int, size: int = 1) -> None:
        rows = [
            (f"a{i % 17}" if i % 5 else None, f"{i}".rjust(size), f"2026-01-01 00:00:{i % 60:02}") for i in range(count)
        ]
        self.do("INSERT INTO orders (account, body, made) VALUES (?, ?, ?)", *rows)

    def register(self, **more: Any) -> None:
        settings = {"key_column": "account", "value_column": "body", "timestamp_column": "made", **more}
        self.hub.add_source("events", self.address, table="orders", partitions=PARTITIONS, **settings)

    def plan(self, **options: str) -> list[TableSlice]:
        given = read_options({"url": self.hub.url, "topic": "events", **options})
        found = BatchReader(given).partitions()
        assert all(isinstance(each, TableSlice) for each in found)
        return found

    def read(self, **options: str) -> pa.Table:
        return read(self.plan(**options))

    def offsets(self, **options: str) -> list[int]:
        found: list[int] = self.read(**options)["offset"].to_pylist()
        return found


def read(parts: list[TableSlice]) -> pa.Table:
    """What tasks give, one after the other, when Spark has unpickled what it sent to them."""
    batches = [batch for part in parts for batch in TaskReader().read(pickle.loads(pickle.dumps(part)))]
    return pa.Table.from_batches(batches) if batches else pa.table({"offset": pa.array([], pa.int64())})


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with pxrs.open(tmp_path / "hub") as hub:
        yield Shop(tmp_path, hub)


def test_x21_a_table_is_read_as_a_topic_is_with_the_partitions_that_groups_see(shop: Shop) -> None:
    shop.fill(500)
    shop.register()
    found = shop.read(includeHeaders="true").to_pylist()
    groups = [
        {
            "key": row["key"],
            "value": row["value"],
            "partition": partition,
            "offset": offset,
            "timestamp": row["timestamp"],
            "headers": None,
        }
        for partition in range(PARTITIONS)
        for batch in shop.hub.source("events").read(partition, 0)
        for offset, row in zip(batch.offsets.to_pylist(), batch.records.to_pylist(), strict=True)  # type: ignore[union-attr]
    ]
    assert [row["offset"] for row in found] == list(range(1, 501))
    assert sorted(groups, key=lambda row: row["offset"]) == found
    assert found[2]["partition"] == xxh64(b"a2") % PARTITIONS


@pytest.mark.parametrize("columns", ["key,value,partition,offset,timestamp,headers", "offset", "value,partition"])
def test_x21_columns_have_the_types_that_spark_was_promised(shop: Shop, columns: str) -> None:
    shop.fill(20)
    shop.register()
    names = columns.split(",")
    promised = to_arrow_schema(row_schema(names), timezone="UTC")
    for part in shop.plan(columns=columns, includeHeaders="true", minPartitions="3"):
        for batch in TaskReader().read(part):
            assert batch.schema.equals(promised)


def test_x21_a_row_is_read_once_whatever_the_number_of_partitions_and_tasks(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.fill(1_000, size=200)
    shop.register()
    read_rows: list[int] = []
    rows = Table.rows

    def counted(self: Table, *given: Any) -> Any:
        found = rows(self, *given)
        read_rows.extend(row[0] for row in found.rows)
        return found

    monkeypatch.setattr(Table, "rows", counted)
    assert sorted(shop.offsets(minPartitions="7")) == sorted(read_rows) == list(range(1, 1_001))


def test_x21_a_task_holds_a_page_at_a_time(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.fill(2_000, size=1_000)
    shop.register()
    (part,) = shop.plan()
    opened = SqlTable.__init__
    monkeypatch.setattr(
        SqlTable, "__init__", lambda self, *given, **more: opened(self, *given, **{**more, "page_bytes": 100_000})
    )
    sizes = [batch.nbytes for batch in TaskReader().read(part)]
    assert len(sizes) >= 2_000_000 // 200_000
    assert max(sizes) < 250_000
    monkeypatch.undo()
    shop.fill(BATCH_ROWS + 1)
    rows = [batch.num_rows for part in shop.plan(minPartitions="1") for batch in TaskReader().read(part)]
    assert sum(rows) == 2_000 + BATCH_ROWS + 1
    assert max(rows) <= BATCH_ROWS


def test_x21_rows_that_come_after_planning_are_not_read(shop: Shop) -> None:
    shop.fill(100)
    shop.register()
    parts = shop.plan(minPartitions="3")
    shop.fill(50)
    assert read(parts)["offset"].to_pylist() == list(range(1, 101))
    assert len(shop.offsets()) == 150


def test_x21_offsets_are_ids_and_bound_each_partition(shop: Shop) -> None:
    shop.fill(200)
    shop.register()
    everything = shop.read().select(["partition", "offset"]).to_pylist()
    starts = {0: 50, 1: 10, 2: -2, 3: 0, 4: 201}
    ends = {0: 60, 1: 150, 2: 20, 3: 40, 4: -1}
    found = shop.read(startingOffsets=json.dumps(starts), endingOffsets=json.dumps(ends), minPartitions="4")
    expected = [
        row
        for row in everything
        if starts[row["partition"]] <= row["offset"] < (ends[row["partition"]] if row["partition"] != 4 else 201)
    ]
    assert len(expected) > 20
    assert found.select(["partition", "offset"]).to_pylist() == expected
    assert shop.offsets(startingOffsets="earliest", endingOffsets="latest") == list(range(1, 201))
    with pytest.raises(InvalidOption, match="option endingOffsets: events/0 ends at offset 201, but 202 is beyond it"):
        shop.plan(endingOffsets='{"0": 202, "1": -1, "2": -1, "3": -1, "4": -1}')
    with pytest.raises(InvalidOption, match="option startingOffsets: events/0 ends at offset 201, but 300 is"):
        shop.plan(startingOffsets='{"0": 300, "1": 0, "2": 0, "3": 0, "4": 0}')
    with pytest.raises(InvalidOption, match="it lacks partitions 1 to 4 of events: name partitions 0 to 4"):
        shop.plan(startingOffsets='{"0": 3}')


def test_x21_a_start_behind_rows_that_were_deleted_reads_nothing_yet(shop: Shop) -> None:
    """As a job gives it that goes on where its last run ended, when the newest rows have been deleted since."""
    shop.fill(100)
    shop.register()
    shop.do("DELETE FROM orders WHERE id > 90")
    from_101 = '{"0": 101, "1": 101, "2": 101, "3": 101, "4": 101}'
    assert shop.plan(startingOffsets=from_101) == []
    shop.fill(3)
    assert shop.offsets(startingOffsets=from_101) == [101, 102, 103]


def test_x21_times_bound_a_batch_if_the_table_has_them(shop: Shop) -> None:
    shop.fill(60)
    shop.register()
    found = shop.offsets(startingTimestamp="2026-01-01T00:00:20+00:00", endingTimestamp="2026-01-01T00:00:30+00:00")
    assert found == list(range(21, 31))
    shop.hub.remove_source("events")
    shop.register(timestamp_column=None)
    with pytest.raises(InvalidTopic, match="timestamp_column"):
        shop.plan(startingTimestamp="0")


def test_x21_an_empty_table_has_no_tasks(shop: Shop) -> None:
    shop.register()
    assert shop.plan() == []
    assert shop.plan(minPartitions="4") == []


def test_x21_a_batch_begins_at_the_checkpoints_of_a_group(shop: Shop) -> None:
    shop.fill(100)
    shop.register()
    committed = {"startingOffsets": "committed", "group": "billing"}
    assert shop.offsets(**committed) == list(range(1, 101)), "a group that has none begins at the beginning"
    shop.hub.group("billing").import_checkpoint(42, topic="events")
    assert shop.offsets(**committed) == list(range(42, 101))
    shop.do("DELETE FROM orders WHERE id > 40")
    assert shop.plan(**committed) == [], "the id 42 was given out, though its row is gone"
    shop.do("DELETE FROM orders")
    shop.do("DELETE FROM sqlite_sequence")
    shop.fill(5)
    with pytest.raises(CheckpointOutOfRange, match=r"billing is at offset 42 of events/0, .* its ids restarted"):
        shop.plan(**committed)


def test_x21_checkpoints_that_mean_other_rows_are_refused(shop: Shop) -> None:
    shop.fill(100)
    shop.register()
    shop.hub.group("billing").import_checkpoint(42, topic="events")
    committed = {"startingOffsets": "committed", "group": "billing"}
    id = shop.hub.sources()[0].id
    shop.hub.remove_source("events")
    shop.register(key_column=None, id=id)
    with pytest.raises(SourceChanged, match="key column account"):
        shop.plan(**committed)
    shop.hub.remove_source("events")
    shop.register(id="another")
    with pytest.raises(IdentityChanged, match=id):
        shop.plan(**committed)


def test_x21_a_table_that_counts_anew_after_planning_is_an_error_and_no_gap(shop: Shop) -> None:
    shop.fill(100)
    shop.register()
    parts = shop.plan(minPartitions="2")
    shop.do("DELETE FROM orders")
    assert read(parts).num_rows == 0, "deleted rows are gaps"
    shop.do("DELETE FROM sqlite_sequence")
    shop.fill(60)
    for part in parts:
        with pytest.raises(OffsetOutOfRange, match="events: offset 101 is beyond the end, 61"):
            read([part])


def test_x21_the_address_given_as_an_option_goes_to_the_tasks_of_this_table_alone(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shop.fill(10)
    shop.register()
    given = f"{shop.address}?cached_statements={SECRET}"
    monkeypatch.setenv("PXRS_SOURCE_EVENTS", "sqlite:////nowhere/shop.db")
    source = PxrsSource(
        CaseInsensitiveDict({"url": shop.hub.url, "topic": "events", "sourceUrl": given, "minPartitions": "2"})
    )
    made = source.reader(source.schema())
    sent = bytes(CloudPickleSerializer().dumps((lambda: (source, made), StructType())))
    assert SECRET.encode() not in sent, "what every task of the query is given"
    parts = made.partitions()
    assert all(SECRET.encode() in pickle.dumps(part) for part in parts)
    assert SECRET not in repr(parts) + str(parts) + repr(read_options(source.options))
    assert read(parts)["offset"].to_pylist() == list(range(1, 11))
    with pytest.raises(WrongSource) as caught:
        shop.plan(sourceUrl=f"sqlite:///{tmp_path}/other.db?cached_statements={SECRET}")
    assert SECRET not in str(caught.value)
    assert "sourceUrl" in str(caught.value)
    shop.hub.create_topic("topic", partitions=1)
    with pytest.raises(InvalidOption, match="option sourceUrl: topic has none; only a table that is") as refused:
        BatchReader(read_options({"url": shop.hub.url, "topic": "topic", "sourceUrl": given})).partitions()
    assert SECRET not in str(refused.value)


def test_x21_without_the_option_each_process_takes_the_address_as_all_do(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shop.fill(10)
    shop.register()
    monkeypatch.setenv("PXRS_SOURCE_EVENTS", f"{shop.address}?cached_statements={SECRET}")
    parts = shop.plan()
    assert SECRET.encode() not in pickle.dumps(parts), "Spark's processes have an environment of their own"
    assert len(read(parts)) == 10
    monkeypatch.setenv("PXRS_SOURCE_EVENTS", f"sqlite:///{tmp_path}/other.db")
    with pytest.raises(WrongSource):
        read(parts)


def test_a_relative_file_is_that_of_the_process_that_plans(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.fill(10)
    shop.register()
    monkeypatch.chdir(shop.file.parent)
    parts = shop.plan(sourceUrl="sqlite:///shop.db")
    monkeypatch.chdir("/")
    assert len(read(parts)) == 10


def test_k5_a_task_on_another_machine_says_so(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.fill(10)
    shop.register()
    parts = shop.plan()
    monkeypatch.setattr(place, "boot_id", lambda: "elsewhere")
    with pytest.raises(WrongMachine, match="not the driver's machine"):
        read(parts)


def test_x21_a_topic_comes_before_a_source_of_its_name(shop: Shop, tmp_path: Path) -> None:
    shop.fill(10)
    shop.register()
    with (
        pxrs.open(shop.hub.url, registry=tmp_path / "other") as other,
        other.producer(other.create_topic("events", partitions=1).name) as out,
    ):
        out.send("of the topic").result()
    (part,) = BatchReader(read_options({"url": shop.hub.url, "topic": "events"})).partitions()
    assert not isinstance(part, TableSlice)


def test_x21_a_table_is_read_by_itself_and_its_rows_may_name_it(shop: Shop) -> None:
    shop.fill(3)
    shop.register()
    assert shop.read(columns="topic,offset").to_pylist() == [{"topic": "events", "offset": n} for n in (1, 2, 3)]
    shop.hub.create_topic("orders", partitions=1)
    for given in ({"subscribe": "orders,events"}, {"assign": '{"events": [0]}'}):
        with pytest.raises(InvalidOption, match="events is a registered source: read it by itself"):
            BatchReader(read_options({"url": shop.hub.url, **given})).partitions()


def test_x21_a_stream_of_a_table_is_refused_with_what_to_use_instead(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_stop_on_sigterm", lambda: None)  # this is not a process of Spark's
    shop.register()
    stream = StreamReader(stream_options({"url": shop.hub.url, "topic": "events", "group": "g"}))
    says = r"option topic: events is a registered source.*spark\.read.*hub\.consumer.*pxrs worker"
    with pytest.raises(InvalidOption, match=says):
        stream.initialOffset()
    with pytest.raises(InvalidOption, match=says):
        stream.reportLatestOffset()
    stream.stop()
    with pytest.raises(UnknownTopic):
        StreamReader(stream_options({"url": shop.hub.url, "topic": "none", "group": "g"})).initialOffset()


def test_x21_a_write_to_a_table_is_refused_with_what_to_use_instead(shop: Shop) -> None:
    shop.register()
    source = PxrsSource(CaseInsensitiveDict({"url": shop.hub.url, "topic": "events"}))
    schema = StructType().add("value", BinaryType())
    for make in (source.writer, source.streamWriter):
        with pytest.raises(InvalidOption, match=r"option topic: events is a registered source.* only read.*topic"):
            make(schema, False)


def test_x21_a_pipeline_over_a_table_is_refused_with_what_to_use_instead(shop: Shop) -> None:
    shop.register()
    shop.hub.create_topic("out", partitions=1)

    @pipeline(source="events", sink="out")
    def copied(rows: Any) -> Any:
        return rows

    with pytest.raises(InvalidPipeline, match=r"copied: events is a registered source.*pxrs worker"):
        check_topics(shop.hub, [copied])


def test_x21_a_pipeline_over_a_table_makes_no_topic_in_its_place(shop: Shop, tmp_path: Path) -> None:
    shop.register()
    (tmp_path / "jobs.py").write_text(
        "from pxrs.spark import pipeline\n\n"
        "@pipeline(source='events', sink='out')\ndef copied(rows):\n    return rows\n"
    )
    command = ["pipeline", "run", str(tmp_path / "jobs.py"), "--at", shop.hub.url, "--create-topics"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "copied: events is a registered source" in result.output
    assert shop.hub.topics() == []


def test_what_a_task_is_given_is_small(shop: Shop) -> None:
    shop.fill(10)
    shop.register()
    (part,) = shop.plan()
    assert part.ids == IdRange(1, 11)
    assert len(pickle.dumps(part)) < 2_000


def test_checkpoints_of_version_0_1_are_read_too(shop: Shop) -> None:
    """Version 0.1 wrote no record of the source beside them."""
    shop.fill(100)
    shop.register()
    keys, id = Keys("old"), shop.hub.sources()[0].id
    shop.hub.registry.commit(put={keys.checkpoint(id, n): Checkpoint(90 + n, by="m").dump() for n in range(PARTITIONS)})
    assert not [SourceRead.load(each.key, each.value) for each in shop.hub.registry.scan(keys.sources)]
    found = shop.read(startingOffsets="committed", group="old").select(["partition", "offset"]).to_pylist()
    assert found
    assert all(row["offset"] >= 90 + row["partition"] for row in found)
