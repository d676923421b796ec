"""Transactions that commit out of the order of their ids (X21): no row is passed over."""

from __future__ import annotations

import random
import sys
import threading
import time

import pytest
import sqlalchemy

from pxrs.errors import (
    ReadFailed,
)
from pxrs.hashing import xxh64
from pxrs.log.arrivals import wait_for_messages
from pxrs.sources import sql_table
from pxrs.sources.sql_table import SettledEnd
from pxrs.testing.waiting import PATIENCE_S, aside, eventually
from tests.integration.sql_table.tables import Place, ids_of


class TestCommitsOutOfOrder:
    """PostgreSQL gives out ids before the commit, so that a smaller one may appear later."""

    def test_x21_a_smaller_id_that_commits_later_is_not_lost(self, postgres: Place) -> None:
        source = postgres.open()
        postgres.insert("first")
        assert ids_of(source) == [1]
        slow, fast = postgres.session(), postgres.session()
        slow.execute("INSERT INTO orders (account) VALUES ('slow')")
        fast.execute("INSERT INTO orders (account) VALUES ('fast')")
        fast.commit()
        assert postgres.ids() == [1, 3]
        assert (source.end(0), ids_of(source)) == (2, [1])
        assert wait_for_messages(source, dict.fromkeys(range(4), 2), 0.1) == set()
        slow.commit()
        assert ids_of(source, 2) == [2, 3]

    def test_x21_writers_are_looked_for_when_the_end_is_known(
        self, postgres: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The other way round, one who comes in between with a smaller id would be seen by neither question."""
        source = postgres.open()
        postgres.insert("first")
        slow, fast = postgres.session(), postgres.session()
        holders, looks = source._table.holders, iter(range(1000))

        def holders_and_then_two_more() -> frozenset[str]:
            found = holders()
            if next(looks) == 0:
                slow.execute("INSERT INTO orders (account) VALUES ('slow')")
                fast.execute("INSERT INTO orders (account) VALUES ('fast')")
                fast.commit()
            return found

        monkeypatch.setattr(source._table, "holders", holders_and_then_two_more)
        assert ids_of(source) == [1]
        assert postgres.ids() == [1, 3]
        slow.commit()
        assert ids_of(source, 2) == [2, 3]

    def test_a_rollback_lets_the_others_through(self, postgres: Place) -> None:
        source = postgres.open()
        postgres.insert("first")
        source.end(0)
        slow = postgres.session()
        slow.execute("INSERT INTO orders (account) VALUES ('slow')")
        postgres.insert("fast")
        waiting = aside(lambda: wait_for_messages(source, dict.fromkeys(range(4), 2), PATIENCE_S))
        eventually(lambda: source._ends.settled.is_waiting)
        slow.rollback()
        assert waiting.result() == {xxh64(b"fast") % 4}
        assert ids_of(source, 2) == [3]

    def test_a_writer_that_has_an_id_and_no_transaction_id_yet_is_waited_for(self, postgres: Place) -> None:
        """The oldest transaction id would not do: an id may be drawn before there is one."""
        postgres.do(
            "CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN IF NEW.account = ''held'' THEN PERFORM pg_advisory_xact_lock(1); END IF; RETURN NEW; END'"
        )
        postgres.do("CREATE TRIGGER hold BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION hold()")
        postgres.insert("first")
        source = postgres.open()
        assert source.end(0) == 2
        gate, watcher = postgres.session(), postgres.session()
        watcher.autocommit = True
        gate.execute("SELECT pg_advisory_xact_lock(1)")
        held = aside(lambda: postgres.insert("held"))
        question = "SELECT backend_xid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND wait_event = 'advisory'"
        eventually(lambda: bool(watcher.execute(question).fetchall()))
        assert watcher.execute(question).fetchall() == [(None,)], "this test is about a writer without one"
        postgres.insert("overtakes")
        assert (postgres.ids(), source.end(0)) == ([1, 3], 2)
        gate.rollback()
        assert held.result() is None
        assert ids_of(source, 2) == [2, 3]

    def test_a_prepared_transaction_is_waited_for(self, postgres: Place) -> None:
        postgres.insert("first")
        source = postgres.open()
        assert source.end(0) == 2
        slow = postgres.session()
        slow.tpc_begin(slow.xid(1, "g", "b"))
        slow.execute("INSERT INTO orders (account) VALUES ('slow')")
        postgres.insert("fast")
        assert source.end(0) == 2
        slow.tpc_prepare()
        assert source.end(0) == 2
        slow.tpc_commit()
        assert ids_of(source, 2) == [2, 3]

    def test_a_writer_of_a_part_of_the_table_is_waited_for(self, postgres: Place) -> None:
        postgres.do("DROP TABLE orders")
        postgres.do("CREATE SEQUENCE numbers")
        postgres.do(
            "CREATE TABLE orders (id BIGINT DEFAULT nextval('numbers'), account TEXT, body TEXT) PARTITION BY HASH (id)"
        )
        postgres.do("CREATE TABLE part PARTITION OF orders FOR VALUES WITH (MODULUS 1, REMAINDER 0)")
        postgres.insert("first")
        whole = postgres.open()
        part = sql_table(postgres.url, "part", value_column="body", partitions=4)
        with part:
            assert whole.end(0) == part.end(0) == 2
            for table in ("orders", "part"):
                end = whole.end(0)
                slow = postgres.session()
                slow.execute(f"INSERT INTO {table} (account) VALUES ('slow')".encode())
                postgres.insert("fast")
                assert whole.end(0) == part.end(0) == end
                slow.commit()
                assert whole.end(0) == part.end(0) == end + 2

    def test_writers_of_other_tables_hold_nothing_up(self, postgres: Place) -> None:
        postgres.do("CREATE TABLE other (id BIGINT)")
        source = postgres.open()
        unrelated = postgres.session()
        unrelated.execute("INSERT INTO other VALUES (1)")
        unrelated.execute("SELECT * FROM orders")
        postgres.insert("a")
        assert ids_of(source) == [1]

    def test_a_steady_stream_of_writers_does_not_starve_the_reader(self, postgres: Place) -> None:
        source = postgres.open()
        postgres.insert("first")
        source.end(0)
        sessions = [postgres.session(), postgres.session()]
        for i in range(20):  # at every moment one of them has a transaction open
            sessions[i % 2].execute("INSERT INTO orders (account) VALUES ('k')")
            if i:
                sessions[(i + 1) % 2].commit()
            assert source.end(0) >= i
        sessions[1].commit()

    def test_a_writer_open_all_along_is_an_error_of_the_first_end(
        self, postgres: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys.modules["pxrs.sources.sql_table.source"], "FIRST_END_S_MAX", 0.1)
        slow = postgres.session()
        slow.execute("INSERT INTO orders (account) VALUES ('slow')")
        postgres.insert("fast")
        source = postgres.open()
        with pytest.raises(ReadFailed, match="open"):
            source.end(0)
        assert source.read(0, 0) == []
        slow.commit()
        assert ids_of(source) == [1, 2]

    @pytest.mark.parametrize("seed", range(3))
    def test_x21_nothing_is_lost_with_many_writers(self, place: Place, seed: int) -> None:
        source = place.open(page_bytes=2000)
        writers = 6 if place.kind == "postgresql" else 2
        is_done = threading.Event()

        def write(number: int) -> None:
            chance = random.Random(seed * 100 + number)
            for i in range(40):
                with place.engine.connect() as connection:
                    for j in range(chance.randrange(1, 4)):
                        row = {"account": f"{number}", "body": f"{i}.{j}"}
                        connection.execute(
                            sqlalchemy.text("INSERT INTO orders (account, body) VALUES (:account, :body)"), row
                        )
                        if place.kind == "postgresql":
                            time.sleep(chance.random() * 0.004)
                    if chance.random() < 0.8:
                        connection.commit()

        seen: dict[int, list[int]] = {partition: [] for partition in range(4)}

        def read() -> None:
            positions = dict.fromkeys(range(4), 0)
            while not (is_done.is_set() and all(positions[p] >= source.end(p) for p in positions)):
                for partition in wait_for_messages(source, positions, 0.05) or positions:
                    for batch in source.read(partition, positions[partition]):
                        seen[partition] += batch.offsets.to_pylist()
                        positions[partition] = batch.next_offset

        reading = aside(read)
        writing = [aside(lambda number=number: write(number)) for number in range(writers)]
        outcomes = [each.result() for each in writing]
        is_done.set()
        assert reading.result() is None
        assert outcomes == [None] * writers
        assert sorted(each for ids in seen.values() for each in ids) == place.ids()
        assert all(ids == sorted(ids) for ids in seen.values())


class TestSettledEnd:
    def test_nobody_writing_is_settled_at_once(self) -> None:
        settled = SettledEnd()
        settled.observe(5, frozenset(), 0.0)
        assert (settled.end, settled.is_waiting) == (5, False)

    def test_only_those_of_the_time_are_waited_for(self) -> None:
        settled = SettledEnd()
        settled.observe(5, frozenset({"1/1"}), 0.0)
        settled.observe(9, frozenset({"1/1", "2/1"}), 1.0)
        assert settled.end == 0
        settled.observe(12, frozenset({"2/1"}), 2.0)
        assert (settled.end, settled.is_waiting) == (5, True)
        settled.observe(12, frozenset({"1/2"}), 3.0)
        assert settled.end == 12

    def test_who_prepares_is_waited_for_under_the_new_name_and_later_ones_are_not(self) -> None:
        settled = SettledEnd()
        settled.observe(5, frozenset({"1/1"}), 0.0)
        settled.observe(5, frozenset({"-1/700"}), 1.0)
        assert settled.end == 0
        settled.observe(5, frozenset({"-1/700", "-1/701"}), 2.0)
        assert settled.end == 0
        settled.observe(5, frozenset({"-1/701"}), 3.0)
        assert settled.end == 5

    def test_a_delay_holds_back_what_was_seen(self) -> None:
        settled = SettledEnd(2.0)
        settled.observe(5, frozenset(), 0.0)
        settled.observe(9, frozenset(), 1.9)
        assert settled.end == 0
        settled.observe(9, frozenset(), 2.0)
        assert settled.end == 5
        settled.observe(9, frozenset(), 4.0)
        assert settled.end == 9

    def test_the_end_never_goes_back(self) -> None:
        settled = SettledEnd()
        settled.observe(5, frozenset(), 0.0)
        settled.observe(0, frozenset({"1/1"}), 0.0)
        assert (settled.end, settled.is_waiting) == (5, False)
