"""Databases and consumers that cannot have rows and checkpoint in one transaction; and SQLite's ways."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import OperationalError

import pxrs
from pxrs.errors import InvalidGroup
from pxrs.registry import Lease
from pxrs.testing.servers import PostgresServer
from pxrs.testing.waiting import aside
from tests.integration.transactions.bookings import PATIENCE_S, Place, book, loop_on, place_on, transactions


class TestRefusals:
    def test_the_engine_of_another_database_is_refused(
        self, place: Place, tmp_path: Path, server: PostgresServer, exits: ExitStack
    ) -> None:
        place.send(1)
        inbox = place.consumer()
        if place.engine.dialect.name == "sqlite":
            others = [f"sqlite:///{tmp_path}/other.db"]
        else:
            others = [server.create_database(f"d{uuid.uuid4().hex[:12]}").replace("postgresql:", "postgresql+psycopg:")]
        # With tables of its own, and the same group in them, it is still another one.
        (tmp_path / "twin").mkdir()
        twin = place_on(place.engine.dialect.name, tmp_path / "twin", server, exits)
        twin.send(1)
        twin.consumer()
        for url in (*others, twin.engine_url):
            engine = create_engine(url)
            with pytest.raises(InvalidGroup, match="does not access the tables"):
                transactions(inbox, engine)
            engine.dispose()

    def test_another_kind_of_database_or_registry_is_refused(self, sqlite: Place, tmp_path: Path) -> None:
        sqlite.send(1)
        with pytest.raises(InvalidGroup, match="span"):
            transactions(sqlite.consumer(), create_engine("postgresql+psycopg://nobody@localhost/x"))
        with pxrs.open(tmp_path / "plain") as hub:
            hub.create_topic("t", partitions=1)
            with pytest.raises(InvalidGroup, match="not a PostgreSQL or SQLite"):
                transactions(hub.consumer("t", "g"), sqlite.engine)

    def test_an_engine_that_commits_by_itself_is_refused(self, postgresql: Place) -> None:
        postgresql.send(1)
        engine = create_engine(postgresql.engine_url, isolation_level="AUTOCOMMIT")
        with pytest.raises(InvalidGroup, match="AUTOCOMMIT"):
            transactions(postgresql.consumer(), engine)
        engine.dispose()

    def test_manual_acknowledgement_and_bad_sizes_are_refused(self, sqlite: Place) -> None:
        sqlite.send(1)
        with pytest.raises(InvalidGroup, match="acknowledges"):
            transactions(sqlite.consumer(ack="manual"), sqlite.engine)
        with pytest.raises(InvalidGroup, match="max_messages"):
            transactions(sqlite.consumer(), sqlite.engine, 0)

    @pytest.mark.parametrize("on_error", ["retry", "dead-letter"])
    def test_what_only_run_can_do_with_a_failed_message_is_refused(self, sqlite: Place, on_error: str) -> None:
        sqlite.send(1)
        sqlite.hub.create_topic("dead", partitions=1)
        letters = {"dead_letters": "dead"} if on_error == "dead-letter" else {}
        inbox = sqlite.consumer(on_error=on_error, **letters)
        with pytest.raises(InvalidGroup, match=f"on_error='{on_error}' is for `run`") as caught:
            transactions(inbox, sqlite.engine)
        assert "savepoint" in str(caught.value)

    @pytest.mark.parametrize("on_error", ["pause", "raise"])
    def test_what_a_loop_does_anyway_and_the_default_are_accepted(self, sqlite: Place, on_error: str) -> None:
        sqlite.send(1)
        inbox = sqlite.consumer(on_error=on_error)
        loop = transactions(inbox, sqlite.engine)
        batch, db = next(loop)
        book(batch, db)
        loop.close()  # as after an error of the body
        assert sqlite.sum == 0
        batch, _ = next(transactions(inbox, sqlite.engine))
        assert len(batch) == 1, "it is handed out again"

    @pytest.mark.parametrize("what", ["commit", "rollback"])
    def test_a_body_that_ends_the_transaction_is_refused(self, place: Place, what: str) -> None:
        place.send(10)
        inbox = place.consumer()
        loop = transactions(inbox, place.engine)
        batch, db = next(loop)
        book(batch, db)
        if what == "rollback":
            db.rollback()
        with pytest.raises(InvalidGroup, match="the loop"):
            db.commit() if what == "commit" else next(loop)
        loop.close()
        assert place.sum == 0
        assert [each.offset for each in place.checkpoints()] == [0]

    def test_acknowledging_in_the_body_is_refused(self, postgresql: Place) -> None:
        postgresql.send(10)
        inbox = postgresql.consumer(commit_interval=60)
        loop = transactions(inbox, postgresql.engine)
        batch, db = next(loop)
        book(batch, db)
        with pytest.raises(InvalidGroup, match="transaction"):
            inbox.ack(batch[0])


class TestSqlite:
    def test_leases_are_renewed_beside_a_loop_that_nearly_always_writes(self, sqlite: Place, tmp_path: Path) -> None:
        place = sqlite
        total = place.send(80, 2)
        lost: list[int] = []
        is_over = threading.Event()

        def renew(lease: Lease) -> int:
            """Renew the lease until the loop is over; how often."""
            for count in itertools.count():
                if is_over.wait(0.3):
                    return count
                lease.renew()
            raise AssertionError

        with pxrs.open(place.folder / "data", registry=place.registry) as hub:
            renewing = aside(lambda: renew(hub.registry.lease(20)))
            try:
                for batch, db in transactions(place.consumer(lease_ttl=20, on_lost=lost.extend), place.engine, 1):
                    book(batch, db)
                    time.sleep(0.05)  # under the write lock
            finally:
                is_over.set()
            assert renewing.result() >= 4
        assert not lost
        assert place.sum == total

    def test_a_wait_for_the_member_does_not_lock_up(self, sqlite: Place) -> None:
        """The member's thread waits for the write lock with its own in hand, while the body has the write lock."""
        place = sqlite
        total = place.send(10)
        inbox = place.consumer()
        loop = transactions(inbox, place.engine)
        book(*next(loop))
        has_mutex = threading.Event()

        def write_as_the_member() -> None:
            with inbox._member.session.mutex:
                has_mutex.set()
                place.hub.registry.commit(put={"x": b""})

        writing = threading.Thread(target=write_as_the_member)
        writing.start()
        assert has_mutex.wait(PATIENCE_S)
        began = time.monotonic()
        assert not list(loop_on(loop))
        assert time.monotonic() - began < 8.0, "it waited for a lock until the registry's timeout"
        writing.join()
        assert place.sum == total

    def test_the_write_lock_is_taken_before_the_body_reads(self, sqlite: Place) -> None:
        """What somebody else writes behind a read would make SQLite refuse the body's own writes."""
        sqlite.send(10)
        impatient = create_engine(sqlite.engine_url, connect_args={"timeout": 0})
        loop = transactions(sqlite.consumer(), sqlite.engine)
        next(loop)
        with pytest.raises(OperationalError, match="locked"), impatient.begin() as connection:
            connection.execute(text("UPDATE balance SET balance = 1"))
        loop.close()
        impatient.dispose()

    def test_a_transaction_that_a_listener_has_begun_is_used(self, sqlite: Place) -> None:
        from sqlalchemy import event

        engine = create_engine(sqlite.engine_url)

        @event.listens_for(engine, "connect")
        def leave_transactions_to_us(raw: Any, _: object) -> None:
            raw.isolation_level = None

        @event.listens_for(engine, "begin")
        def begin(connection: Connection) -> None:
            connection.exec_driver_sql("BEGIN")

        total = sqlite.send(10)
        for batch, db in transactions(sqlite.consumer(), engine, 3):
            book(batch, db)
        assert sqlite.sum == total
        engine.dispose()
