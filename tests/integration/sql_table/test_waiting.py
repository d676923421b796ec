"""Waiting for rows, memory, times, and errors of a table that is read as a topic."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy

from pxrs.errors import (
    Closed,
    InvalidRecord,
    InvalidTopic,
    InvalidUrl,
    MissingDependency,
    PxrsError,
    ReadFailed,
    UsedAfterFork,
)
from pxrs.hashing import xxh64
from pxrs.log.arrivals import wait_for_messages
from pxrs.sources import sql_table
from pxrs.sources import sql_table as the_function
from pxrs.testing.servers import PostgresServer
from pxrs.testing.waiting import PATIENCE_S, aside, eventually
from pxrs.waiting import Cancel
from tests.integration.sql_table.tables import Place, by_partition, ids_of, wait_aside


class TestWaiting:
    def test_a_new_row_ends_a_wait(self, place: Place) -> None:
        source = place.open()
        waiting = aside(lambda: wait_for_messages(source, dict.fromkeys(range(4), 0), PATIENCE_S))
        place.insert("a")
        assert waiting.result() == {xxh64(b"a") % 4}

    def test_time_is_kept(self, place: Place) -> None:
        source = place.open(poll_s=60.0)
        begun = time.monotonic()
        assert wait_for_messages(source, {0: 0}, 0.1) == set()
        assert 0.1 <= time.monotonic() - begun < 10

    def test_a_cancelled_wait_ends_and_finds_nothing(self, place: Place) -> None:
        source, cancel = place.open(poll_s=600.0), Cancel()
        waiting = wait_aside(source, {0: 0}, cancel)
        cancel.set()
        assert waiting.result() == set()

    def test_close_ends_a_wait(self, place: Place) -> None:
        source = place.open(poll_s=600.0)
        waiting = wait_aside(source, {0: 0})
        source.close()
        source.close()
        assert isinstance(waiting.exception(), Closed)
        with pytest.raises(Closed):
            source.read(0, 0)

    @pytest.fixture
    def announced(self, postgres: Place) -> Place:
        postgres.do(
            "CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS "
            """'BEGIN PERFORM pg_notify(''New "orders"'', ''''); RETURN NULL; END'"""
        )
        postgres.do("CREATE TRIGGER tell AFTER INSERT ON orders FOR EACH STATEMENT EXECUTE FUNCTION tell()")
        return postgres

    def test_x15_a_notification_ends_a_wait(self, announced: Place) -> None:
        source = announced.open(poll_s=600.0, notify_channel='New "orders"')
        positions = dict.fromkeys(range(4), 0)
        for i in range(1, 6):
            waiting = wait_aside(source, positions)
            announced.insert("a")
            assert waiting.result() == {xxh64(b"a") % 4}
            positions = dict.fromkeys(range(4), i + 1)

    def test_a_lost_connection_is_a_doubt_and_is_made_anew(
        self, announced: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = announced.open(poll_s=600.0, notify_channel='New "orders"')
        looks: list[str] = []
        visible_end = source._table.visible_end

        def counted_visible_end() -> int:
            looks.append(threading.current_thread().name)
            return visible_end()

        monkeypatch.setattr(source._table, "visible_end", counted_visible_end)
        waiting = wait_aside(source, dict.fromkeys(range(4), 0))
        announced.do(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE query LIKE 'LISTEN%' AND datname = current_database()"
        )
        eventually(lambda: looks.count("pxrs-table-poller") >= 2)  # when it was lost, and when it was back
        announced.insert("a")
        assert waiting.result() == {xxh64(b"a") % 4}

    def test_a_rollback_that_nobody_announces_ends_a_wait_all_the_same(
        self, announced: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys.modules["pxrs.sources.sql_table.source"], "NOTIFIED_POLL_S", 600.0)
        source = announced.open(poll_s=0.02, notify_channel='New "orders"')
        announced.insert("first")
        assert source.end(0) == 2
        slow = announced.session()
        slow.execute("INSERT INTO orders (account) VALUES ('slow')")
        announced.insert("fast")
        positions = dict.fromkeys(range(4), 2)
        assert wait_for_messages(source, positions, 0.5) == set()  # so that what was announced so far has been heard
        waiting = wait_aside(source, positions)
        slow.rollback()
        assert waiting.result() == {xxh64(b"fast") % 4}

    def test_a_channel_needs_postgresql(self, sqlite: Place) -> None:
        with pytest.raises(InvalidTopic, match="notify_channel"):
            sqlite.open(notify_channel="new")


class TestMemory:
    ROWS, BYTES = 20_000, 1_000

    @pytest.fixture
    def large(self, place: Place) -> Place:
        numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {self.ROWS})"
        values = f"SELECT 'k' || (i % 1000), '{'x' * self.BYTES}' FROM n"
        place.do(f"INSERT INTO orders (account, body) {numbers} {values}")
        return place

    def test_x16_a_large_table_is_read_in_bounded_memory_and_once_for_all_partitions(self, large: Place) -> None:
        page_bytes, cache_bytes = 1 << 18, 1 << 20
        queries = 0

        def count(_c: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
            nonlocal queries
            queries += "ORDER BY" in statement

        sqlalchemy.event.listen(large.engine, "before_cursor_execute", count)
        settings = {"page_bytes": page_bytes, "cache_bytes": cache_bytes}
        source = sql_table(
            large.engine,
            "orders",
            key_column="account",
            value_column="body",
            partitions=8,
            **settings,
        )
        before, peak, seen = pa.total_allocated_bytes(), 0, 0
        positions = dict.fromkeys(range(8), 0)
        while ready := wait_for_messages(source, positions, 0):
            for partition in ready:
                for batch in source.read(partition, positions[partition], 1 << 16):
                    seen += batch.records.num_rows
                    positions[partition] = batch.next_offset
            peak = max(peak, pa.total_allocated_bytes() - before)
            assert source._rows.cached_bytes <= cache_bytes
        assert seen == self.ROWS
        assert peak < 3 * cache_bytes, f"{peak:,} bytes for a table of {self.ROWS * self.BYTES:,}"
        pages = self.ROWS * self.BYTES / page_bytes
        assert queries < 2 * pages, f"{queries} queries for a table of {pages:.0f} pages"

    def test_a_partition_far_behind_gets_its_turn(self, large: Place) -> None:
        source = large.open(page_bytes=1 << 16, cache_bytes=1 << 17)
        positions = {0: 10_000, 1: 1}
        for _ in range(20):
            assert wait_for_messages(source, positions, 0) == {0, 1}
            positions[0] = source.read(0, positions[0])[-1].next_offset


class TestTimes:
    def test_offsets_by_time(self, place: Place) -> None:
        rows = [{"made": f"2026-01-01T00:00:0{i}+00:00"} for i in range(5)]
        made = "CAST(:made AS timestamptz)" if place.kind == "postgresql" else ":made"
        place.do(f"INSERT INTO orders (made) VALUES ({made})", *rows)
        source = place.open(timestamp_column="made")
        second = 1_767_225_600_000_000
        assert [source.offset_at(0, second + i * 1_000_000) for i in (-1, 0, 3, 9)] == [1, 1, 4, 6]
        assert source.offset_at(0, second + 2_500_000) == 4
        times = {row["id"]: row["timestamp"] for rows in by_partition(source).values() for row in rows}
        assert {i: int(each.timestamp()) for i, each in times.items()} == {i + 1: second // 10**6 + i for i in range(5)}

    def test_a_time_without_a_zone_is_utc(self, postgres: Place) -> None:
        postgres.do("ALTER TABLE orders ADD COLUMN local TIMESTAMP")
        postgres.do("ALTER DATABASE " + postgres.url.rpartition("/")[2] + " SET timezone = 'Asia/Tokyo'")
        postgres.engine.dispose()
        postgres.do("INSERT INTO orders (local) VALUES (NULL), ('2026-01-01 00:00:00')")
        source = postgres.open(timestamp_column="local")
        assert source.offset_at(0, 1_767_225_600_000_000) == 2
        assert source.offset_at(0, 1_767_225_600_000_001) == 3
        assert ids_of(source) == [1, 2]

    def test_without_a_column_there_are_no_offsets_by_time(self, place: Place) -> None:
        place.insert("a")
        with pytest.raises(InvalidTopic, match="timestamp_column"):
            place.open().offset_at(0, 0)


class TestErrors:
    def test_the_function_is_not_hidden_by_its_module(self) -> None:
        import pxrs.sources
        import pxrs.sources.sql_table

        assert callable(pxrs.sources.sql_table)
        assert pxrs.sources.sql_table is the_function

    @pytest.mark.parametrize(
        ("settings", "match"),
        [
            ({"id_column": "nothing"}, "no column 'nothing'; existing: id, account"),
            ({"id_column": "body"}, "must be an integer"),
            ({"key_column": "nothing"}, "no column"),
            ({"value_column": None}, "either value_column or value_columns"),
            ({"value_columns": ["id"]}, "either value_column or value_columns"),
            ({"value_column": None, "value_columns": "id"}, "list of names"),
            ({"partitions": 0}, "0 partitions"),
            ({"partitioner": "crc"}, "crc"),
            ({"name": "a b"}, "a b"),
            ({"poll_s": 0}, "poll_s"),
            ({"page_bytes": 0}, "page_bytes"),
            ({"settle_s": -1}, "settle_s"),
        ],
    )
    def test_what_cannot_be_is_refused_at_once(self, sqlite: Place, settings: dict[str, Any], match: str) -> None:
        with pytest.raises(InvalidTopic, match=match):
            sqlite.open(**settings)

    def test_an_unknown_table_is_named(self, place: Place) -> None:
        with pytest.raises(InvalidTopic, match="table 'nothing' does not exist"):
            sql_table(place.url, "nothing", value_column="body")

    @pytest.mark.parametrize(
        "url", ["sqlite://", "sqlite:///:memory:", "nonsense", "nosuch://u:secret@h/d", "a:b:secret@"]
    )
    def test_an_address_that_cannot_be_is_refused_without_its_password(self, url: str) -> None:
        with pytest.raises(InvalidUrl) as refused:
            sql_table(url, "orders", value_column="body")
        assert "secret" not in str(refused.value)
        assert refused.value.__cause__ is None

    def test_a_missing_driver_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "oracledb", None)
        with pytest.raises(MissingDependency, match=r"oracledb: pip install '.\[oracle\]'"):
            sql_table("oracle://u:secret@h/d", "orders", value_column="body")

    def test_passwords_are_never_shown(self, postgres: Place, server: PostgresServer) -> None:
        assert server.password not in repr(postgres.open())
        wrong = postgres.url.replace(server.password, "hunter2hunter2")
        for url in (wrong, wrong.replace(f":{server.port}/", ":1/")):
            with pytest.raises(ReadFailed) as failed:
                sql_table(url, "orders", value_column="body")
            assert "hunter2" not in str(failed.value)
            assert "hunter2" not in repr(failed.value.__cause__)

    def test_a_table_that_goes_away_is_a_typed_error_and_may_come_back(self, place: Place) -> None:
        source = place.open()
        place.do("ALTER TABLE orders RENAME TO hidden")
        with pytest.raises(ReadFailed, match="orders"):
            source.read(0, 0)
        place.do("ALTER TABLE hidden RENAME TO orders")
        assert source.read(0, 0) == []

    def test_what_makes_ids_unsafe_is_refused_unless_there_is_a_delay(self, postgres: Place) -> None:
        postgres.do("CREATE VIEW seen AS SELECT * FROM orders")
        with pytest.raises(InvalidTopic, match="settle_s"):
            sql_table(postgres.url, "seen", value_column="body")
        sql_table(postgres.url, "seen", value_column="body", settle_s=0.1).close()
        postgres.do("ALTER TABLE orders ALTER COLUMN id SET CACHE 50")
        with pytest.raises(InvalidTopic, match="CACHE 50"):
            postgres.open()
        postgres.insert("a")
        source = postgres.open(settle_s=0.1)
        assert ids_of(source) == [1]

    def test_a_delay_holds_rows_back(self, place: Place) -> None:
        place.insert("a")
        source = place.open(settle_s=600.0)
        assert source.read(xxh64(b"a") % 4, 0) == []
        assert wait_for_messages(source, dict.fromkeys(range(4), 0), 0.1) == set()

    def test_negative_ids_are_an_error(self, place: Place) -> None:
        place.do("INSERT INTO orders (id) VALUES (-5)")
        with pytest.raises(InvalidRecord, match="negative"):
            place.open().start(0)

    def test_a_given_engine_stays_open_and_may_commit_by_itself(self, postgres: Place) -> None:
        postgres.insert("a", "b")
        engine = postgres.engine.execution_options(isolation_level="AUTOCOMMIT")
        with sql_table(engine, "orders", value_column="body", partitions=2) as source:
            assert ids_of(source) == [1, 2]
        assert postgres.ids() == [1, 2]
        assert postgres.engine.pool.checkedout() == 0

    def test_a_forked_child_is_told(self, sqlite: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        source = sqlite.open()
        monkeypatch.setattr(source, "_pid", -1)
        calls: list[Callable[[], Any]] = [
            lambda: source.end(0),
            lambda: source.read(0, 0),
            lambda: wait_for_messages(source, {0: 0}),
        ]
        for call in calls:
            with pytest.raises(UsedAfterFork):
                call()

    def test_every_error_is_of_pxrs(self, postgres: Place, server: PostgresServer) -> None:
        source = postgres.open()
        postgres.engine.dispose()
        postgres.do("DROP TABLE orders")
        for call in (lambda: source.start(0), lambda: source.end(0), lambda: wait_for_messages(source, {0: 0}, 0)):
            with pytest.raises(PxrsError):
                call()
