"""Somebody else's table as a topic (X21): rows, partitions, gaps in the ids, a restart."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from pxrs.errors import (
    InvalidRecord,
    OffsetOutOfRange,
)
from pxrs.hashing import murmur2, xxh64
from pxrs.log.arrivals import wait_for_messages
from pxrs.sources import sql_table
from pxrs.testing.servers import PostgresServer
from pxrs.testing.waiting import PATIENCE_S
from tests.integration.sql_table.tables import Place, by_partition, ids_of, rows_from


class TestPartitions:
    def test_x21_every_row_is_read_once_and_in_order_for_each_key(self, place: Place) -> None:
        place.insert(*(f"account-{i % 17}" for i in range(500)))
        read = by_partition(place.open())
        assert sorted(row["id"] for rows in read.values() for row in rows) == place.ids()
        of_key: dict[bytes, list[int]] = {}
        partitions: dict[bytes, set[int]] = {}
        for partition, rows in read.items():
            assert rows, "a partition without a row: 17 keys should reach all four"
            for row in rows:
                of_key.setdefault(row["key"], []).append(int(row["value"]))
                partitions.setdefault(row["key"], set()).add(partition)
        assert len(of_key) == 17
        assert all(values == sorted(values) for values in of_key.values())
        assert all(len(each) == 1 for each in partitions.values())

    @pytest.mark.parametrize(("partitioner", "hash_of"), [("xxh64", xxh64), ("murmur2", murmur2)])
    def test_x2_a_key_lies_where_a_topic_would_put_it(self, place: Place, partitioner: str, hash_of: Any) -> None:
        place.insert("account-7", "ä", "")
        read = by_partition(place.open(partitioner=partitioner, partitions=8))
        found = {row["key"]: partition for partition, rows in read.items() for row in rows}
        assert found == {key: hash_of(key) % 8 for key in (b"account-7", "ä".encode(), b"")}

    def test_keys_are_numbers_text_or_bytes_and_null_goes_by_the_id(self, place: Place) -> None:
        rows = [{"number": 7, "token": b"\x00\xff", "body": "a"}, {"number": None, "token": None, "body": "b"}]
        place.do("INSERT INTO orders (number, token, body) VALUES (:number, :token, :body)", *rows)
        for column, keys in (("number", [b"7", None]), ("token", [b"\x00\xff", None])):
            read = by_partition(place.open(key_column=column, partitions=64))
            found = {row["id"]: (partition, row["key"]) for partition, rows in read.items() for row in rows}
            first = keys[0]
            assert first is not None
            assert found == {1: (xxh64(first) % 64, first), 2: (xxh64(b"2") % 64, None)}

    def test_without_a_key_column_rows_are_spread_by_id(self, place: Place) -> None:
        place.insert(*["same"] * 100)
        read = by_partition(place.open(key_column=None))
        assert all(row["key"] is None for rows in read.values() for row in rows)
        assert all(len(rows) >= 10 for rows in read.values())

    def test_a_key_that_can_be_none_is_refused(self, place: Place) -> None:
        place.do("ALTER TABLE orders ADD COLUMN price FLOAT")
        place.do("INSERT INTO orders (price) VALUES (1.5)")
        source = place.open(key_column="price")
        with pytest.raises(InvalidRecord, match="price has the type float"):
            source.read(0, 1)

    def test_values_are_text_bytes_or_json(self, place: Place) -> None:
        place.do("INSERT INTO orders (account, number, token, body) VALUES ('ä', 7, :token, NULL)", {"token": b"\x01"})

        def value(**columns: Any) -> Any:
            read = by_partition(place.open(value_column=None, **columns))
            return next(row["value"] for rows in read.values() for row in rows)

        assert value(value_columns=["account", "number", "body"]) == '{"account":"ä","number":7,"body":null}'.encode()
        assert json.loads(value(value_columns=["token"])) == {"token": "AQ=="}

    def test_a_single_value_of_any_type(self, place: Place) -> None:
        place.do("INSERT INTO orders (number, token, body) VALUES (7, :token, NULL)", {"token": b"\x01"})
        for column, expected in (("number", b"7"), ("token", b"\x01"), ("body", None)):
            read = by_partition(place.open(value_column=column))
            assert [row["value"] for rows in read.values() for row in rows] == [expected]


class TestGaps:
    def test_rolled_back_and_deleted_ids_are_passed_over(self, place: Place) -> None:
        place.insert(*(f"k{i}" for i in range(50)))
        place.do("DELETE FROM orders WHERE id % 3 = 0 OR id < 10")
        source = place.open()
        assert ids_of(source) == place.ids()
        assert source.start(0) == place.ids()[0] == 10
        assert source.end(0) == place.ids()[-1] + 1

    def test_small_reads_get_everything_too(self, place: Place) -> None:
        place.insert(*(f"k{i % 5}" for i in range(300)))
        assert ids_of(place.open(page_bytes=1, cache_bytes=1), max_bytes=1) == place.ids()
        assert ids_of(place.open(page_bytes=1000, cache_bytes=3000), max_bytes=100) == place.ids()

    def test_an_empty_table_has_nothing(self, place: Place) -> None:
        source = place.open()
        assert (source.start(0), source.end(0), source.read(0, 0)) == (0, 0, [])
        assert wait_for_messages(source, {0: 0}, 0) == set()

    def test_a_quiet_partition_gets_on(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys.modules["pxrs.sources.sql_table.partitioned"], "SKIP_S", 600.0)
        source = place.open(page_bytes=2000, cache_bytes=1)
        place.insert(*["busy"] * 500)
        quiet = (xxh64(b"busy") % 4 + 1) % 4
        for _ in range(100):  # each look at the table loads one page at most, of about twenty
            assert source.readable({quiet: 0}) == [], "no message, and not far behind"
        offset, calls = 0, 0
        while offset < source.end(quiet):
            (batch,) = source.read(quiet, offset)
            assert batch.records.num_rows == 0
            offset, calls = batch.next_offset, calls + 1
        assert offset == 501
        assert source.read(quiet, offset) == []
        assert calls == 1, "the looks have seen that there is nothing"

    def test_a_position_far_behind_is_worth_a_read(self, place: Place) -> None:
        place.insert("busy")
        place.do("INSERT INTO orders (id, account) VALUES (20000, 'busy')")
        quiet = (xxh64(b"busy") % 4 + 1) % 4
        source = place.open()
        assert wait_for_messages(source, {quiet: 0}, PATIENCE_S) == {quiet}
        (batch,) = source.read(quiet, 0)
        assert (batch.records.num_rows, batch.next_offset) == (0, 20001)
        assert wait_for_messages(source, {quiet: 20001}, 0) == set()

    def test_an_emptied_table_keeps_its_place(self, place: Place) -> None:
        place.insert("a", "b", "c")
        place.do("DELETE FROM orders")
        source = place.open()
        assert source.read(0, 4) == []
        assert wait_for_messages(source, dict.fromkeys(range(4), 4), 0) == set()
        place.insert("d")
        assert ids_of(source, 4) == [4]

    def test_g7_ids_that_begin_anew_are_an_error_and_no_silence(self, place: Place) -> None:
        place.insert("a", "b", "c")
        running = place.open()
        assert ids_of(running) == [1, 2, 3]
        if place.kind == "sqlite":
            place.do("DELETE FROM orders")
            place.do("DELETE FROM sqlite_sequence")
        else:
            place.do("TRUNCATE orders RESTART IDENTITY")
        place.insert("d")
        for source in (running, place.open()):
            assert wait_for_messages(source, {0: 4}, PATIENCE_S) == {0}
            with pytest.raises(OffsetOutOfRange):
                source.read(0, 4)

    def test_sqlite_without_autoincrement_gives_ids_again_which_is_an_error(self, sqlite: Place) -> None:
        sqlite.do("DROP TABLE orders")
        sqlite.do("CREATE TABLE orders (id INTEGER PRIMARY KEY, account TEXT, body TEXT)")
        sqlite.insert("a", "b")
        source = sqlite.open()
        assert ids_of(source) == [1, 2]
        assert source.read(0, 3) == []
        sqlite.do("DELETE FROM orders WHERE id = 2")
        with pytest.raises(OffsetOutOfRange):
            source.read(0, 3)

    def test_a_partition_that_is_not_there_is_an_error(self, place: Place) -> None:
        source = place.open()
        for call in (
            source.start,
            source.end,
            lambda p: source.read(p, 0),
            lambda p: wait_for_messages(source, {p: 0}, 0),
        ):
            with pytest.raises(InvalidRecord, match="0 to 3"):
                call(4)


class TestRestart:
    def test_a_new_process_goes_on_at_the_checkpoints(self, place: Place) -> None:
        place.insert(*(f"k{i}" for i in range(100)))
        with place.open() as source:
            before = {p: source.read(p, 0, max_bytes=300)[0] for p in range(4)}
        place.insert(*(f"k{i}" for i in range(100)))
        again = place.open()
        seen = [i for batch in before.values() for i in batch.offsets.to_pylist()]
        for partition, batch in before.items():
            seen += [row["id"] for row in rows_from(again, partition, batch.next_offset)]
        assert sorted(seen) == place.ids()

    def test_x21_the_old_global_checkpoint_is_a_position_of_every_partition(self, place: Place) -> None:
        place.insert(*(f"k{i}" for i in range(100)))
        last_id = 41
        assert ids_of(place.open(), last_id + 1) == list(range(42, 101))

    def test_g7_processes_agree_on_id_and_partitions(self, place: Place) -> None:
        place.insert(*(f"k{i}" for i in range(30)))
        source = place.open()
        code = (
            "import sys; from pxrs.sources import sql_table\n"
            "with sql_table(sys.argv[1], 'orders', key_column='account', value_column='body', partitions=4) as s:\n"
            "    ids = [b.offsets.to_pylist() for p in range(4) for b in s.read(p, 0)]\n"
            "    print(s.id, ids)"
        )
        done = subprocess.run([sys.executable, "-c", code, place.url], capture_output=True, text=True, check=True)
        ids = [batch.offsets.to_pylist() for p in range(4) for batch in source.read(p, 0)]
        assert done.stdout == f"{source.id} {ids}\n"

    def test_g7_the_id_is_of_the_table_and_what_its_offsets_mean(self, place: Place) -> None:
        place.do("CREATE TABLE others (id BIGINT PRIMARY KEY, account TEXT, body TEXT)")
        base = place.open().id
        assert place.open(name="mine", poll_s=1.0, value_column="account").id == base
        others = {
            place.open(partitions=8).id,
            place.open(partitioner="murmur2").id,
            place.open(key_column="number").id,
            place.open(key_column=None).id,
            place.open(identity="queue").id,
            sql_table(place.engine, "others", key_column="account", value_column="body", partitions=4).id,
        }
        assert len(others | {base}) == 7

    def test_g7_the_id_does_not_depend_on_credentials(self, postgres: Place, server: PostgresServer) -> None:
        postgres.do("DROP ROLE IF EXISTS reader")
        postgres.do("CREATE ROLE reader LOGIN PASSWORD 'other'")
        postgres.do("GRANT SELECT ON orders TO reader")
        postgres.insert("a", "b")
        database = postgres.url.rpartition("/")[2]
        url = f"postgresql://reader:other@{server.host}:{server.port}/{database}"
        with sql_table(url, "orders", key_column="account", value_column="body", partitions=4) as source:
            assert source.id == postgres.open().id
            assert ids_of(source) == [1, 2], "permission to read the table is all it takes"
            assert source.read(0, 3) == []
        postgres.do("DROP OWNED BY reader")
        postgres.do("DROP ROLE reader")
