"""The registry's statements on a connection of the user's, so that they commit together with the user's rows.

The problem: a checkpoint (`pxrs.consumer.transactions`) or an item of a queue (`pxrs.queue.enlist`) is to be committed
in one transaction with the user's own rows. So the registry's statements, which are compiled for the registry's own
driver, run on a SQLAlchemy connection of the user's, whatever driver that has, in the transaction that is open there.

This module is all that other packages need of SQLAlchemy and of the registry's SQL: the types `Engine`, `Connection`
and `DriverError`, the checks of what a user gives (`fault_of_engine`, `fault_of_connection`), and `BorrowedConnection`.

Invariants:
- Nothing here commits or rolls back. `BorrowedConnection.begin` alone begins a transaction; otherwise a driver begins
  by itself what SQLAlchemy has begun.
- No statement that runs here depends on a lease: none of them is given the current time.
- A value is in no text: neither in that of an error, nor in what an engine with `echo` logs. (A driver that copies
  bytes before they are logged, like pg8000, needs the engine's `hide_parameters` for that.)

On failure: an error of the user's driver is raised as SQLAlchemy raises it (`DriverError`).
"""

from __future__ import annotations

import enum
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, Final
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, LargeBinary, TextClause, TwoPhaseTransaction, bindparam, event, text
from sqlalchemy.exc import DBAPIError as DriverError

from pxrs import arguments
from pxrs.errors import RegistryUnavailable
from pxrs.registry.contract import Commit, Registry
from pxrs.registry.sql.borrowable import BehindServer, Borrowable
from pxrs.registry.sql.commit import CommitPlan
from pxrs.registry.sql.database import Row
from pxrs.registry.sql.registry import SqlRegistry
from pxrs.registry.sql.schema import DialectName
from pxrs.registry.sql.sqlite import SqliteDatabase
from pxrs.registry.sql.statements import Call, Statement, Statements

__all__ = [
    "Borrowable",
    "BorrowedConnection",
    "Connection",
    "DriverError",
    "Engine",
    "Fault",
    "LockedCommit",
    "SqlRegistry",
    "borrowable_of",
    "fault_of_connection",
    "fault_of_engine",
    "is_borrowable",
]

DATABASES: Final[tuple[DialectName, ...]] = ("postgresql", "sqlite")
"""The databases whose registry can borrow a connection."""
LOCK_PART: Final = 0.75
"""The part of the registry's `timeout` for which a lock is waited for, as the registry itself does."""
IDLE_PART: Final = 0.4
"""The part of the registry's `timeout` after which the server ends a transaction whose client has stopped. Less than
LOCK_PART, so that transactions that wait for its locks get them."""
_SQLITE_WRITE_LOCK: Final = "UPDATE pxrs_meta SET value = value WHERE name = 'version'"
"""Changes nothing, but takes SQLite's one write lock."""
_TRANSACTION_BEGAN: Final = text("SELECT now()")


# What users give.


def is_borrowable(registry: Registry) -> bool:
    """Whether the registry's statements can run on a connection of the user's."""
    return isinstance(registry, SqlRegistry) and registry.database.dialect in DATABASES


def borrowable_of(engine: object, registry: Registry) -> Borrowable | str:
    """What runs on connections of this engine; or why the registry cannot use them, as far as the types tell. Asks the
    server if the registry is behind one: raises RegistryUnavailable, NotPermitted."""
    if not isinstance(registry, SqlRegistry) and isinstance(engine, Engine):
        place = registry.sql_place()
        if place is not None and place.dialect in DATABASES:
            if engine.dialect.name == place.dialect:
                return BehindServer(registry, place)
            return (
                f"the engine is for {engine.dialect.name}, but the registry behind {registry.url} is in "
                f"{place.dialect}: a transaction cannot span both"
            )
    if fault := fault_of_engine(engine, registry):
        return fault
    assert isinstance(registry, SqlRegistry)
    return registry


def fault_of_engine(engine: object, registry: Registry) -> str:
    """Why the registry cannot use connections of this engine; empty if it can, as far as the types tell."""
    if not isinstance(engine, Engine):
        return (
            f"the engine must be a SQLAlchemy Engine, not {arguments.shown(engine)}; an AsyncEngine has one as "
            "`sync_engine`"
        )
    if not isinstance(registry, SqlRegistry) or not is_borrowable(registry):
        return f"the registry {registry.url} is not a PostgreSQL or SQLite database"
    if engine.dialect.name != registry.database.dialect:
        return (
            f"the engine is for {engine.dialect.name}, but the registry is {registry.url}: a transaction cannot span "
            "both"
        )
    return ""


def fault_of_connection(connection: object, registry: SqlRegistry) -> str:
    """Why the registry cannot use this connection; empty if it can, as far as the types tell."""
    if not isinstance(connection, Connection):
        return (
            f"{type(connection).__name__} is not a SQLAlchemy Connection; get one from Session.connection() or "
            "Engine.connect(), or inside AsyncConnection.run_sync()"
        )
    if connection.closed:
        return "the connection is closed"
    if connection.dialect.name != registry.database.dialect:
        return (
            f"the connection is to {connection.dialect.name}, but the registry is {registry.url}: a transaction cannot "
            "span both"
        )
    if isinstance(connection.get_transaction(), TwoPhaseTransaction):
        return "a two-phase transaction cannot send notifications: use an ordinary transaction"
    return ""


# Errors of the user's driver.


class Fault(enum.Enum):
    """What an error of the user's driver means."""

    ABORTED = "aborted"
    """The database rolled the transaction back because of another one: it may be tried again."""
    BUSY = "busy"
    """Another transaction held SQLite's write lock for longer than the driver waits."""
    MISSING = "missing"
    """The registry's tables are not there, or the user's role may not use them."""
    LOST = "lost"
    """The connection broke, or the database did not say what became of the statement. After COMMIT was sent, the
    outcome is unknown."""
    OTHER = "other"
    """Anything else: the statement was refused."""


# What runs on the connection.


class BorrowedConnection:
    """A connection of the user's, and the registry whose statements run on it. For one thread, and one transaction."""

    def __init__(self, connection: Connection, registry: Borrowable) -> None:
        """Raises Closed or UsedAfterFork if the registry may not be used."""
        registry.check_usable()
        self.connection, self._registry = connection, registry
        self.is_sqlite = registry.dialect == "sqlite"

    def begin(self) -> None:
        """Begin a transaction; on SQLite with the write lock, because a transaction that has read without the lock may
        not be able to write. Raises DriverError: Fault.BUSY if others have the write lock."""
        self.connection.begin()
        if not self.is_sqlite:
            return
        if self.is_begun_on_sqlite:  # an event listener of the user's has begun it
            self.take_write_lock()
        else:
            self.connection.exec_driver_sql("BEGIN IMMEDIATE")

    def take_write_lock(self) -> None:
        """On SQLite: take the write lock, after which nothing that is read can change until the transaction ends."""
        self.connection.exec_driver_sql(_SQLITE_WRITE_LOCK)

    @property
    def is_begun_on_sqlite(self) -> bool:
        """On SQLite: whether the driver is in a transaction, whatever SQLAlchemy assumes. False elsewhere."""
        return bool(getattr(self.connection.connection.driver_connection, "in_transaction", False))

    def is_autocommit(self) -> bool:
        """Whether each statement is a transaction of its own. On SQLite, ask after `take_write_lock`; PostgreSQL's
        server is asked, because it alone knows."""
        if self.is_sqlite:
            return not self.is_begun_on_sqlite
        moments = {self.connection.execute(_TRANSACTION_BEGAN).scalar_one() for _ in range(2)}
        return len(moments) > 1

    def leads_elsewhere(self) -> bool:
        """Whether the connection leads to other tables than the registry's, which this process has open: to another
        server, database or schema, or to another file. Raises RegistryUnavailable if the registry's own tables cannot
        be looked at."""
        registry = self._registry
        assert isinstance(registry, SqlRegistry)
        if isinstance(registry.database, SqliteDatabase):
            registry.database.check_in_place()
            attached = self.connection.exec_driver_sql("PRAGMA database_list")
            file = next(file for _, name, file in attached if name == "main")
            return not _is_same_file(file, registry.database.path)
        found = self._run([_WHEREABOUTS])
        if found == _known.get(registry):
            return False
        # Read again even if it was read before: the registry's server may be another one since a fail-over.
        known = _known[registry] = [registry.read(_WHEREABOUTS)]
        return found != known

    def get(self, key: str, *, is_shared: bool = False) -> tuple[bytes, int] | None:
        """The value and version of a key, None if it is not there.

        is_shared: lock the key, so that no other transaction changes or deletes it until this one ends; others may
                   read it and share the lock."""
        statements = self._registry.statements
        call = self._registry.call(_get_shared(statements) if is_shared else statements.get, key=key)
        for value, version, *_ in self._run([call])[0]:
            return bytes(value), version
        return None

    def lock(self, key: str) -> int | None:
        """Lock a key until the transaction ends; its version, None if it is not there. Also takes a new version, to
        fail here if the user's role may not."""
        registry = self._registry
        calls = [
            registry.call(registry.statements.lock_entry, key=key),
            registry.call(registry.statements.next_version),
        ]
        found, _ = self._run(calls)
        return found[0][0] if found else None

    def lock_or_create(self, key: str) -> tuple[bytes, int]:
        """Lock a key that may not be there; its value, and its version or ABSENT.

        A key that is not there has no row to lock. So a placeholder is inserted, which the database allows to one
        transaction; the others wait for the end of that one (see `planning`)."""
        registry, statements = self._registry, self._registry.statements
        steps = (statements.insert_placeholder, statements.lock_entry, statements.get)
        *_, rows = self._run([registry.call(step, key=key) for step in steps])
        if not rows:
            raise RegistryUnavailable(f"{key} was deleted while its row was locked")
        value, version, *_ = rows[0]
        return bytes(value or b""), version

    def lock_commit(
        self, expect: Mapping[str, int], put: Mapping[str, bytes], *, is_quiet: bool = False
    ) -> LockedCommit:
        """Lock all keys of a commit until the transaction ends, in the order of the keys, as every commit does.

        is_quiet: watches are not woken."""
        plan = self._registry.plan(Commit(dict(expect), dict(put), {}, frozenset(), None, quiet=is_quiet))
        return LockedCommit(self._run, plan)

    def limit_waits(self) -> None:
        """On PostgreSQL, until the transaction ends, which must be near: wait for a lock no longer than LOCK_PART of
        the registry's `timeout`; let the server end the transaction if this client stops; make COMMIT durable."""
        if not self.is_sqlite:
            self.connection.execute(_SETTINGS, _limits_ms(self._registry.timeout_s))

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """A savepoint, in which no lock is waited for without end: if the user has set no bound, the registry's
        `timeout` gives one. If the body raises, the transaction is as it was before, settings included."""
        with self.connection.begin_nested():
            if self.is_sqlite:
                yield  # SQLite's driver bounds the wait by its own `timeout`
                return
            # At least 1: for PostgreSQL, 0 means no limit.
            lock_ms = str(max(1, int(self._registry.timeout_s * LOCK_PART * 1000)))
            is_set = self.connection.execute(_SET_IF_ENDLESS, {"lock_ms": lock_ms}).first() is not None
            yield
            if is_set:
                self.connection.execute(_SET, {"lock_ms": "0"})

    def before_commit(self, check: Callable[[], None]) -> Callable[[], None]:
        """Call `check` before every COMMIT of the connection; if it raises, nothing is committed. Returns a function
        that ends this."""

        def call(_: Connection) -> None:
            check()

        def end() -> None:
            if event.contains(self.connection, "commit", call):  # when the interpreter ends, SQLAlchemy has removed it
                event.remove(self.connection, "commit", call)

        event.listen(self.connection, "commit", call)
        return end

    def fault_of(self, error: DriverError) -> Fault:
        """What an error of the driver means."""
        original: Any = error.orig
        if self.is_sqlite:
            return _fault_of_sqlite(original)
        state = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
        if state is None and original is not None and original.args and isinstance(original.args[0], dict):
            state = original.args[0].get("C")  # pg8000
        if not state or state.startswith(("08", "57P", "25P03")):
            return Fault.LOST
        if state in ("40001", "40P01"):
            return Fault.ABORTED
        return Fault.MISSING if state in ("42P01", "3F000", "42501") else Fault.OTHER

    def _run(self, calls: Sequence[Call]) -> list[list[Row]]:
        """Run the statements in this order; the rows of each."""
        results = []
        for statement, values in calls:
            result = self.connection.execute(_clause(statement), _values(statement, values))
            results.append([tuple(row) for row in result] if result.returns_rows else [])
        return results


class LockedCommit:
    """A commit of the registry whose keys are locked on a borrowed connection, so that their versions cannot change."""

    def __init__(self, run: Callable[[Sequence[Call]], list[list[Row]]], plan: CommitPlan) -> None:
        self._run, self._plan = run, plan
        self._found = plan.judge(run(plan.locks))

    @property
    def versions(self) -> Mapping[str, int]:
        """The versions of the keys that exist."""
        return self._found.versions

    def write(self) -> int | None:
        """Write, as a part of the user's transaction; the new version of what was put, None if nothing was. Raises
        Conflict, with nothing written, if a key has not the version that is expected."""
        self._plan.check_versions(self._found)
        self._run(self._plan.writes(self._found))
        return self._found.next_version


def _fault_of_sqlite(error: BaseException | None) -> Fault:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Fault.BUSY
    if "no such table" in str(error):
        return Fault.MISSING
    return Fault.OTHER if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_CONSTRAINT) else Fault.LOST


# Statements and settings.

_SET: Final = text("SELECT set_config('lock_timeout', :lock_ms, true)")
_SET_IF_ENDLESS: Final = text(f"{_SET.text} WHERE current_setting('lock_timeout') = '0'")
_SETTINGS: Final = text(
    "SELECT set_config('lock_timeout', :lock_ms, true), "
    "set_config('idle_in_transaction_session_timeout', :idle_ms, true), "
    "set_config('synchronous_commit', CASE current_setting('synchronous_commit') "
    "WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, true)"
)
# Identifies the start of the server, the database and the tables that a statement refers to. As text, because all
# drivers return text in the same form. Tables that do not exist are left out.
_WHEREABOUTS: Final = Call(
    Statement(
        name="whereabouts",
        text=(
            "SELECT concat_ws(' ', CAST(EXTRACT(epoch FROM pg_postmaster_start_time()) * 1000000 AS BIGINT), "
            "(SELECT oid FROM pg_database WHERE datname = current_database()), "
            "CAST(to_regclass('pxrs_entry') AS oid), CAST(to_regclass('pxrs_version') AS oid))"
        ),
        parameters=(),
        returns_rows=True,
        is_timed=False,
        forgives_duplicates=False,
    ),
    {},
)
_known: Final[WeakKeyDictionary[SqlRegistry, list[list[Row]]]] = WeakKeyDictionary()
"""For each registry, the last result of `_WHEREABOUTS` on a connection of its own."""


def _limits_ms(timeout_s: float) -> dict[str, str]:
    return {"lock_ms": str(int(LOCK_PART * 1000 * timeout_s)), "idle_ms": str(int(IDLE_PART * 1000 * timeout_s))}


def _is_same_file(path: str | None, other: str) -> bool:
    """Whether two paths lead to one file. A database in memory has no path."""
    try:
        return bool(path) and os.path.samefile(str(path), other)
    except OSError:
        return False


@cache
def _get_shared(statements: Statements) -> Statement:
    """`get` with a shared lock on the row: other transactions can read it, and cannot change or delete it."""
    get = statements.get
    if statements.dialect == "sqlite":
        return get  # SQLite has one writer at a time
    return replace(get, name="get_shared", text=f"{get.text} FOR KEY SHARE")


class _Hidden(bytes):
    """A value that a driver takes as bytes, and whose `repr` does not show it, so that no log does."""

    def __repr__(self) -> str:
        return f"<{len(self)} bytes>"


def _values(statement: Statement, values: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(values)
    if statement.is_timed:
        found["now_ms"] = 0  # the time matters for leases only, and no statement here depends on one
    if "the_value" in found:
        found["the_value"] = _Hidden(found["the_value"])
    return found


@cache
def _clause(statement: Statement) -> TextClause:
    """A compiled statement for any driver of its database: its numbered parameters become names again."""
    # In brackets: a cast may follow, and SQLAlchemy would take its colons for a part of the name.
    named = re.sub(r"\$(\d+)", lambda found: f"(:{statement.parameters[int(found[1]) - 1]})", statement.text)
    clause = text(named)
    return clause.bindparams(bindparam("the_value", type_=LargeBinary())) if ":the_value" in named else clause
