"""Items put by the user's own database transaction (Z10), on real databases: order, refusals, dead processes.

Run as a program it is a process that puts and never commits: python test_queue_enlist.py REGISTRY ENGINE
"""

from __future__ import annotations

import itertools
import logging
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session

import pxrs
from pxrs.errors import Closed, InvalidItem, UnknownQueue
from pxrs.hub import Hub
from pxrs.queue.handle import Depth, QueueHandle
from pxrs.queue.head import Head
from pxrs.testing.servers import PostgresServer

pytestmark = pytest.mark.sampled(2, of="module")

PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="module")
def database(server: PostgresServer) -> str:
    return server.create_database(f"d{uuid.uuid4().hex[:12]}")


@dataclass
class Place:
    """A registry with the user's table beside it, and a queue `q`."""

    registry: str
    engine_url: str
    exits: ExitStack
    is_fifo: bool = False
    engine: Engine = field(init=False)
    hub: Hub = field(init=False)
    queue: QueueHandle = field(init=False)

    def __post_init__(self) -> None:
        self.engine = self.connect()
        self.hub = self.open()
        self.queue = self.hub.create_queue("q", fifo=self.is_fifo)
        with self.engine.begin() as db:
            db.execute(text("CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY)"))
            db.execute(text("DELETE FROM orders"))

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    def connect(self, **options: Any) -> Engine:
        engine = create_engine(self.engine_url, **options)
        self.exits.callback(engine.dispose)
        return engine

    def open(self) -> Hub:
        return self.exits.enter_context(pxrs.open("memory:", registry=self.registry))

    def orders(self) -> list[str]:
        with self.engine.connect() as db:
            return [row[0] for row in db.execute(text("SELECT id FROM orders ORDER BY 1"))]

    def values(self) -> list[bytes]:
        return [item.value for item in self.queue.peek(1000)]

    def entries(self) -> int:
        """How many keys there are that belong to items, whatever they are."""
        return len(self.hub.registry.scan("items/"))

    def waiting(self, server: PostgresServer) -> int:
        """How many sessions wait for a lock."""
        return int(server.sql("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")[0][0])


def place_on(kind: str, tmp_path: Path, database: str, exits: ExitStack, **options: Any) -> Place:
    is_fifo = options.pop("fifo", False)
    options = {"namespace": uuid.uuid4().hex[:12], **options}
    url = engine_url = f"sqlite:///{tmp_path}/registry.db"
    if kind == "postgresql":
        url, engine_url = database, database.replace("postgresql:", "postgresql+psycopg:")
    return Place(f"{url}?{'&'.join(f'{k}={v}' for k, v in options.items())}", engine_url, exits, is_fifo)


@pytest.fixture
def exits() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path, database: str, exits: ExitStack) -> Place:
    return place_on(request.param, tmp_path, database, exits)


@pytest.fixture(params=["sqlite", "postgresql"])
def strict(request: pytest.FixtureRequest, tmp_path: Path, database: str, exits: ExitStack) -> Place:
    return place_on(request.param, tmp_path, database, exits, fifo=True)


@pytest.fixture
def postgresql(tmp_path: Path, database: str, exits: ExitStack) -> Place:
    return place_on("postgresql", tmp_path, database, exits)


@pytest.fixture
def strict_postgresql(tmp_path: Path, database: str, exits: ExitStack) -> Place:
    return place_on("postgresql", tmp_path, database, exits, fifo=True)


@pytest.fixture
def sqlite(tmp_path: Path, database: str, exits: ExitStack) -> Place:
    return place_on("sqlite", tmp_path, database, exits)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def order(db: Connection, name: str) -> None:
    db.execute(text("INSERT INTO orders VALUES (:id)"), {"id": name})


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "it did not come true"
        time.sleep(0.005)


class TestOutcome:
    def test_z10_the_item_is_there_when_the_transaction_commits(self, place: Place) -> None:
        with place.engine.begin() as db:
            order(db, "a")
            item = place.queue.put(b"\0a\xff", key="k", priority=3, connection=db)
            assert place.entries() == 0
        assert place.orders() == ["a"]
        (found,) = place.queue.peek(10)
        assert (found.id, found.value, found.key, found.priority) == (item, b"\0a\xff", b"k", 3)
        with place.hub.transaction() as tx:
            taken = tx.take("q", timeout=0)
            assert taken is not None
            assert taken.id == item
        assert place.queue.depth() == Depth(0, 0, 0, 0)

    @pytest.mark.parametrize("fifo", [False, True])
    @pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
    def test_z10_the_item_is_not_there_if_it_rolls_back(
        self, kind: str, fifo: bool, tmp_path: Path, database: str, exits: ExitStack
    ) -> None:
        place = place_on(kind, tmp_path, database, exits, fifo=fifo)
        with place.engine.connect() as db:
            order(db, "a")
            place.queue.put("a", connection=db)
            db.rollback()
        assert (place.orders(), place.entries()) == ([], 0)
        place.queue.put("b")
        assert place.values() == [b"b"]

    def test_z10_a_savepoint_that_is_rolled_back_undoes_the_put(self, strict: Place) -> None:
        with strict.engine.begin() as db:
            order(db, "a")
            strict.queue.put("a", connection=db)
            savepoint = db.begin_nested()
            strict.queue.put("b", connection=db)
            savepoint.rollback()
            with db.begin_nested():
                strict.queue.put("c", connection=db)
        assert strict.values() == [b"a", b"c"]

    def test_a_connection_that_is_closed_before_commit_leaves_nothing(self, strict: Place) -> None:
        db = strict.engine.connect()
        strict.queue.put("a", connection=db)  # begins, as any statement does
        assert db.in_transaction()
        db.close()
        assert strict.entries() == 0
        with strict.engine.connect() as db:
            strict.queue.put("b", connection=db)
            db.commit()
        assert strict.values() == [b"b"]

    def test_z10_a_process_that_is_killed_before_commit_leaves_nothing(self, strict: Place) -> None:
        command = [sys.executable, __file__, strict.registry, strict.engine_url]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"put\n"
            process.kill()
        with strict.engine.begin() as db:  # waits, if need be, until the server has noticed
            strict.queue.put("b", connection=db)
        assert strict.values() == [b"b"]

    def test_the_orm_has_a_connection_too(self, place: Place) -> None:
        with Session(place.engine) as session:
            session.execute(text("INSERT INTO orders VALUES ('a')"))
            place.queue.put("a", connection=session.connection())
            with session.begin_nested():
                place.queue.put("b", connection=session.connection())
            session.commit()
        assert (place.orders(), place.values()) == (["a"], [b"a", b"b"])

    def test_a_delay_is_kept(self, place: Place) -> None:
        with place.engine.begin() as db:
            place.queue.put("late", delay=3600, connection=db)
            place.queue.put("soon", delay=0.05, connection=db)
        assert place.queue.depth() == Depth(0, 2, 0, 0)
        with place.hub.transaction() as tx:
            taken = tx.take("q", timeout=PATIENCE_S)
            assert taken is not None
            assert taken.value == b"soon"
        assert place.queue.depth() == Depth(0, 1, 0, 0)

    def test_versions_are_drawn_as_the_registry_draws_them(self, place: Place) -> None:
        """Nobody may get a version that a transaction has used."""
        with place.engine.begin() as db:
            place.queue.put("a", connection=db)
        (entry,) = place.hub.registry.scan(place.queue.settings.ready)
        assert place.hub.registry.commit(put={"other": b""})["other"] > entry.version

    def test_a_listener_that_begins_on_sqlite_is_worked_with(self, sqlite: Place) -> None:
        engine = sqlite.connect()
        event.listen(engine, "connect", lambda raw, _: setattr(raw, "isolation_level", None))
        event.listen(engine, "begin", lambda db: db.exec_driver_sql("BEGIN"))
        with engine.begin() as db:
            with db.begin_nested():
                sqlite.queue.put("a", connection=db)
            assert sqlite.values() == []
            db.rollback()
        assert sqlite.entries() == 0
        with engine.begin() as db:
            sqlite.queue.put("b", connection=db)
        assert sqlite.values() == [b"b"]


class TestWaking:
    def test_z10_a_taker_that_waits_is_woken_by_the_commit(
        self, place: Place, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        is_waiting, wait = threading.Event(), Head.wait

        def noticed(head: Head, *arguments: Any) -> None:
            is_waiting.set()
            wait(head, *arguments)

        monkeypatch.setattr(Head, "wait", noticed)
        other = place.open()

        def take() -> tuple[bytes, float]:
            with other.transaction() as tx:
                item = tx.take("q", timeout=PATIENCE_S)
                assert item is not None
                return item.value, time.monotonic()

        taken: Future[tuple[bytes, float]] = threads.submit(take)
        assert is_waiting.wait(PATIENCE_S)
        with place.engine.begin() as db:
            place.queue.put("a", connection=db)
            assert not taken.done()
        committed = time.monotonic()
        value, at = taken.result(PATIENCE_S)
        assert value == b"a"
        assert at - committed < PATIENCE_S / 3


class TestStrictOrder:
    def test_z10_the_order_is_that_of_the_commits(self, strict: Place) -> None:
        with strict.engine.connect() as first, strict.engine.connect() as second:
            first.execute(text("SELECT count(*) FROM orders"))
            strict.queue.put("1", connection=second)
            strict.queue.put("2", connection=second)
            second.commit()
            strict.queue.put("3", connection=first)
            first.commit()
            strict.queue.put("4")
            strict.queue.put("5", connection=second)
            second.commit()
            strict.queue.put("6")  # the number that was remembered is an old one
        assert strict.values() == [b"1", b"2", b"3", b"4", b"5", b"6"]

    @pytest.mark.parametrize("is_first_ever", [True, False])
    @pytest.mark.parametrize("commits", [True, False])
    def test_z10_the_second_waits_for_the_end_of_the_first(
        self,
        strict_postgresql: Place,
        server: PostgresServer,
        threads: ThreadPoolExecutor,
        is_first_ever: bool,
        commits: bool,
    ) -> None:
        place = strict_postgresql
        before = [] if is_first_ever else [b"0"]
        if not is_first_ever:
            place.queue.put("0")

        def put_second() -> None:
            with place.engine.begin() as db:
                place.queue.put("2", connection=db)

        with place.engine.connect() as db:
            place.queue.put("1", connection=db)
            second = threads.submit(put_second)
            eventually(lambda: place.waiting(server) == 1)
            assert not second.done()
            db.commit() if commits else db.rollback()
        second.result(PATIENCE_S)
        assert place.values() == [*before, *([b"1"] if commits else []), b"2"]
        place.queue.put("3")
        assert place.values()[-1] == b"3"
        assert all(entry.version > 0 for entry in place.hub.registry.scan("items/"))

    def test_z10_first_items_ever_from_many_connections_at_once(
        self, strict: Place, threads: ThreadPoolExecutor
    ) -> None:
        together = threading.Barrier(4)

        def put(name: int) -> None:
            together.wait(PATIENCE_S)
            for number in range(5):
                with strict.engine.begin() as db:
                    strict.queue.put(f"{name}-{number}", connection=db)

        for done in [threads.submit(put, name) for name in range(4)]:
            done.result(PATIENCE_S)
        found = [value.decode() for value in strict.values()]
        assert sorted(found) == [f"{name}-{number}" for name in range(4) for number in range(5)]
        for name in range(4):
            assert [each for each in found if each.startswith(f"{name}-")] == [f"{name}-{i}" for i in range(5)]

    @pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
    def test_a_snapshot_that_is_too_old_is_refused_by_the_database(self, strict_postgresql: Place, level: str) -> None:
        place = strict_postgresql
        engine = place.engine.execution_options(isolation_level=level)
        with engine.connect() as db:
            db.execute(text("SELECT count(*) FROM orders"))
            place.queue.put("1")
            with pytest.raises(DBAPIError) as caught:
                place.queue.put("2", connection=db)
            assert caught.value.orig.sqlstate == "40001"  # type: ignore[union-attr]
            db.rollback()
            place.queue.put("2", connection=db)
            db.commit()
        assert place.values() == [b"1", b"2"]

    @pytest.mark.parametrize("own_timeout", ["", "50ms"])
    def test_a_lock_is_not_waited_for_without_end(
        self, tmp_path: Path, database: str, exits: ExitStack, own_timeout: str
    ) -> None:
        place = place_on("postgresql", tmp_path, database, exits, fifo=True, timeout=10 if own_timeout else 0.2)
        with place.engine.connect() as first, place.engine.connect() as second:
            if own_timeout:
                second.execute(text(f"SET LOCAL lock_timeout = '{own_timeout}'"))
            second.execute(text("SET LOCAL statement_timeout = '5s'"))  # so that this test ends in any case
            order(second, "a")
            place.queue.put("1", connection=first)
            with pytest.raises(OperationalError, match="lock timeout"):
                place.queue.put("2", connection=second)
            first.commit()
            place.queue.put("3", connection=second)  # the transaction is as it was
            assert second.execute(text("SHOW lock_timeout")).scalar() == (own_timeout or "0")
            second.commit()
        assert (place.orders(), place.values()) == (["a"], [b"1", b"3"])

    def test_a_lock_on_sqlite_is_waited_for_as_long_as_the_engine_says(
        self, tmp_path: Path, database: str, exits: ExitStack
    ) -> None:
        place = place_on("sqlite", tmp_path, database, exits, fifo=True)
        hasty = place.connect(connect_args={"timeout": 0.01})
        with place.engine.connect() as first, hasty.connect() as second:
            place.queue.put("1", connection=first)
            with pytest.raises(OperationalError, match="locked"):
                place.queue.put("2", connection=second)
            first.commit()
            place.queue.put("3", connection=second)
            second.commit()
        assert place.values() == [b"1", b"3"]


class TestTheUsersTransaction:
    def test_an_exception_at_any_statement_leaves_the_transaction_as_it_was(self, strict: Place) -> None:
        """What Python raises in the middle does not make the database give the transaction up: no row may be left."""
        strict.queue.put("0")
        before = strict.hub.registry.scan("items/")
        for step in itertools.count(1):
            with strict.engine.connect() as db:
                order(db, f"{step:02}")
                if self.put_or_fail(strict.queue, db, step):
                    break
                if not strict.is_sqlite:
                    assert db.execute(text("SHOW lock_timeout")).scalar() == "0"
                db.commit()
            assert strict.hub.registry.scan("items/") == before
        assert step > 10
        assert strict.orders() == [f"{number:02}" for number in range(1, step)]

    def put_or_fail(self, queue: QueueHandle, db: Connection, step: int) -> bool:
        """False if there was a statement of that number: an exception was raised before it."""
        numbers = itertools.count(1)

        def fail(_: Any, __: Any, statement: str, *___: Any) -> None:
            # The last one is the end of the savepoint, and then all of it is there.
            if next(numbers) == step and not statement.startswith("RELEASE"):
                raise MemoryError

        event.listen(db, "before_cursor_execute", fail)
        try:
            queue.put("1", connection=db)
            return True
        except MemoryError:
            return False
        finally:
            event.remove(db, "before_cursor_execute", fail)

    def test_settings_are_left_as_they_were(self, postgresql: Place) -> None:
        show = text("SELECT name, setting FROM pg_settings ORDER BY 1")
        with postgresql.engine.connect() as db:
            before = db.execute(show).all()
            postgresql.queue.put("a", connection=db)
            assert db.execute(show).all() == before
            db.commit()
            assert db.execute(show).all() == before

    def test_values_are_not_logged(self, place: Place, caplog: pytest.LogCaptureFixture) -> None:
        engine = place.connect(echo=True)
        with caplog.at_level(logging.DEBUG), engine.connect() as db:
            place.queue.put("secret-of-mine", connection=db)
            db.rollback()
        assert "pxrs_entry" in caplog.text
        assert "secret-of-mine" not in caplog.text
        assert "put_at" not in caplog.text  # nor the first bytes, which is as far as some drivers' own texts go

    def test_values_are_not_in_errors(self, place: Place) -> None:
        with place.engine.connect() as db:

            def fail(_: Any, cursor: Any, statement: str, *__: Any) -> None:
                if statement.startswith("UPDATE pxrs_entry"):
                    cursor.execute("SELECT * FROM no_such_table")

            order(db, "a")
            event.listen(db.engine, "before_cursor_execute", fail)
            with pytest.raises(DBAPIError) as caught:
                place.queue.put("secret-of-mine", connection=db)
            event.remove(db.engine, "before_cursor_execute", fail)
            assert "secret-of-mine" not in str(caught.value)
            db.commit()
        assert (place.orders(), place.entries()) == (["a"], 0)

    def test_a_queue_is_deleted_before_or_after_a_put_and_never_meanwhile(
        self, strict_postgresql: Place, server: PostgresServer, threads: ThreadPoolExecutor
    ) -> None:
        place = strict_postgresql
        with place.engine.connect() as db:
            place.queue.put("1", connection=db)
            deleted = threads.submit(place.open().delete_queue, "q")
            eventually(lambda: place.waiting(server) == 1)
            db.commit()
            deleted.result(PATIENCE_S)
            assert place.entries() == 0
            with pytest.raises(UnknownQueue):
                place.queue.put("2", connection=db)
            db.commit()
        assert place.entries() == 0


class TestRefusals:
    def refused(self, place: Place, connection: Any, match: str) -> None:
        with pytest.raises(InvalidItem, match=match):
            place.queue.put("a", connection=connection)
        assert place.entries() == 0

    def test_z10_another_database_is_refused_and_its_transaction_goes_on(
        self, place: Place, tmp_path: Path, server: PostgresServer, exits: ExitStack
    ) -> None:
        (tmp_path / "other").mkdir()
        other = place_on("sqlite" if place.is_sqlite else "postgresql", tmp_path / "other", server.url, exits)
        empty = "sqlite://" if place.is_sqlite else server.create_database(f"d{uuid.uuid4().hex[:12]}")
        nowhere = create_engine(empty.replace("postgresql:", "postgresql+psycopg:"))
        exits.callback(nowhere.dispose)
        for engine in (other.engine, nowhere):
            with engine.begin() as db:
                db.execute(text("CREATE TABLE mine (id TEXT)"))
                self.refused(place, db, "does not access the tables")
            with engine.begin() as db:
                assert db.execute(text("SELECT count(*) FROM mine")).scalar() == 0
                db.execute(text("DROP TABLE mine"))

    def test_z10_a_copy_of_the_database_is_refused(
        self, place: Place, tmp_path: Path, server: PostgresServer, exits: ExitStack
    ) -> None:
        """It has the same queue, in a row of the same version."""
        if place.is_sqlite:
            with place.engine.connect() as db:
                db.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
            shutil.copy(tmp_path / "registry.db", tmp_path / "copy.db")
            url = f"sqlite:///{tmp_path}/copy.db"
        else:
            url = server.create_database(f"d{uuid.uuid4().hex[:12]}").replace("postgresql:", "postgresql+psycopg:")
            exits.enter_context(pxrs.registry.open(url.replace("+psycopg", "")))
        copy = create_engine(url)
        exits.callback(copy.dispose)
        if not place.is_sqlite:
            with place.engine.connect() as db:
                rows = [row._asdict() for row in db.execute(text("SELECT * FROM pxrs_entry"))]
            with copy.begin() as db:
                insert = "INSERT INTO pxrs_entry VALUES (:namespace, :key, :value, :version, :lease)"
                db.execute(text(insert), rows)
        with copy.connect() as db:
            self.refused(place, db, "does not access the tables")

    def test_another_schema_is_refused(self, postgresql: Place) -> None:
        with postgresql.engine.connect() as db:
            db.execute(text("CREATE SCHEMA other"))
            db.execute(text("CREATE TABLE other.pxrs_entry (LIKE pxrs_entry)"))
            db.execute(text("SET LOCAL search_path = other, public"))
            self.refused(postgresql, db, "does not access the tables")

    def test_z10_another_kind_of_database_is_refused(self, place: Place, sqlite: Place, postgresql: Place) -> None:
        other = postgresql if place.is_sqlite else sqlite
        with other.engine.connect() as db:
            self.refused(place, db, "cannot span")

    def test_z10_other_registries_are_refused(self, sqlite: Place, tmp_path: Path) -> None:
        for url in ("memory:", tmp_path / "files"):
            with pxrs.open(url) as hub, sqlite.engine.connect() as db:
                queue = hub.create_queue("q")
                with pytest.raises(InvalidItem, match="not a PostgreSQL or SQLite"):
                    queue.put("a", connection=db)
                assert queue.depth() == Depth(0, 0, 0, 0)

    @pytest.mark.parametrize("fifo", [False, True])
    @pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
    def test_z10_autocommit_is_refused(
        self, kind: str, fifo: bool, tmp_path: Path, database: str, exits: ExitStack
    ) -> None:
        place = place_on(kind, tmp_path, database, exits, fifo=fifo)
        with place.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
            self.refused(place, db, "AUTOCOMMIT")
            db.execute(text("SELECT 1"))
            self.refused(place, db, "AUTOCOMMIT")

    def test_what_is_no_open_connection_is_refused(self, place: Place) -> None:
        class AsyncConnection:
            """SQLAlchemy's is no Connection either; to import it takes a library more."""

        with place.engine.connect() as db, Session(place.engine) as session:
            for other in (AsyncConnection(), session, place.engine, "text"):
                self.refused(place, other, "not a SQLAlchemy Connection")
        self.refused(place, db, "closed")

    def test_two_phases_are_refused(self, postgresql: Place) -> None:
        with postgresql.engine.connect() as db, db.begin_twophase():
            self.refused(postgresql, db, "two-phase transaction")

    def test_a_queue_that_the_transaction_cannot_see_is_told_for_what_it_is(self, postgresql: Place) -> None:
        engine = postgresql.engine.execution_options(isolation_level="REPEATABLE READ")
        with engine.connect() as db:
            db.execute(text("SELECT count(*) FROM orders"))
            new = postgresql.hub.create_queue("new")
            with pytest.raises(InvalidItem, match="began before"):
                new.put("a", connection=db)

    def test_a_queue_that_was_deleted_is_unknown(self, place: Place) -> None:
        other = place.open()
        with place.engine.connect() as db:
            place.hub.queue("q")  # remembered for a while
            other.delete_queue("q")
            with pytest.raises(UnknownQueue):
                place.queue.put("a", connection=db)
            db.rollback()
            other.create_queue("q")
            place.queue.put("b", connection=db)  # the handle stands for the name
            db.commit()
        assert place.values() == [b"b"]

    def test_a_closed_hub_puts_nothing(self, place: Place) -> None:
        other = place.open()
        queue = other.queue("q")
        other.close()
        with place.engine.begin() as db, pytest.raises(Closed):
            queue.put("a", connection=db)
        assert place.entries() == 0


def put_and_wait(registry: str, engine_url: str) -> None:
    with pxrs.open("memory:", registry=registry) as hub, create_engine(engine_url).begin() as db:
        order(db, "never")
        hub.queue("q").put("never", connection=db)
        sys.stdout.write("put\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    put_and_wait(*sys.argv[1:])
