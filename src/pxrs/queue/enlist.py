"""An item put by the user's own database transaction, where the registry is that database (Z10).

    with engine.begin() as db:
        db.execute(...)
        queue.put(b"an order", connection=db)   # there when this transaction commits, and not if it does not

The problem: rows and an item that are committed apart are lost or doubled when something happens in between. So the
registry's own statements for a put run on the user's connection. Then the database sees to all or nothing, and its
notifications, which come with COMMIT, wake the takers; on SQLite they poll.

Invariants:
- The connection leads to the registry's tables, not to a copy of them: the server, the database and the tables are
  compared, or on SQLite the files; and the queue's own row is read there.
- That row is shared with other puts until the transaction ends: a queue is deleted before a put or after it, and what
  was put into it is deleted with it.
- A strict queue's number is read from its row in the transaction that writes the next one, with the row locked until
  COMMIT. So numbers are in the order of the commits, and the number that the store remembers is not asked.
- A put is a savepoint of its own. If it fails, the transaction is as it was before, placeholder rows and settings
  included, and may go on.

On failure: what is refused is refused before anything is written. An error of the driver's is raised as it is: a
serialization failure, a deadlock, or a lock that was waited for in vain, which the registry's own `timeout` bounds
where the user has set no bound (on SQLite the driver has one). What becomes of COMMIT is the user's to find out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Final
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, TwoPhaseTransaction, text

from pxrs.errors import InvalidItem, RegistryUnavailable
from pxrs.queue.items import Put
from pxrs.queue.records import Queue, first_key, in_sequence, load_number
from pxrs.queue.store import QueueStore
from pxrs.registry.contract import ABSENT, Commit, Registry
from pxrs.registry.sql.borrowed import DATABASES, SQLITE_WRITE_LOCK, is_autocommit, is_in_transaction, run
from pxrs.registry.sql.commit import CommitPlan
from pxrs.registry.sql.registry import SqlRegistry
from pxrs.registry.sql.sqlite import SqliteDatabase
from pxrs.registry.sql.statements import Call, Statement, Statements

LOCK_PART: Final = 0.75
"""How much of the registry's `timeout` a lock is waited for, as by the registry itself."""


def put_in(connection: Connection, store: QueueStore, put: Put) -> None:
    """Put it when the connection's transaction commits. Raises InvalidItem, UnknownQueue, and errors of the driver."""
    registry = _check_kinds(connection, store.registry)
    if isinstance(registry.database, SqliteDatabase):
        registry.database.check_in_place()
        _enter_sqlite(connection, registry, registry.database.path)
    else:
        _enter_postgresql(connection, registry)
    with connection.begin_nested(), _bounded_waits(connection, registry):
        _check_queue(connection, store, registry, put.queue)
        _write(connection, registry, put)


# What is refused.


def _check_kinds(connection: Connection, registry: Registry) -> SqlRegistry:
    if not isinstance(registry, SqlRegistry) or registry.database.dialect not in DATABASES:
        raise InvalidItem(f"the registry {registry.url} is no PostgreSQL or SQLite database: put without connection=")
    if not isinstance(connection, Connection):
        raise InvalidItem(
            f"{type(connection).__name__} is no SQLAlchemy Connection; a Session has one as `connection()`, an Engine "
            "opens one by `connect()`, and an AsyncConnection lends one to a function by `run_sync`"
        )
    if connection.closed:
        raise InvalidItem("the connection is closed")
    if connection.dialect.name != registry.database.dialect:
        raise InvalidItem(
            f"the connection is one to {connection.dialect.name}, and the registry is {registry.url}: a transaction "
            "cannot span the two"
        )
    if isinstance(connection.get_transaction(), TwoPhaseTransaction):
        raise InvalidItem("the transaction is one in two phases, which cannot notify: use an ordinary one")
    registry._check_usable()
    return registry


def _enter_sqlite(connection: Connection, registry: SqlRegistry, path: str) -> None:
    """Take the write lock, after which nothing that is read can change until the end of the transaction."""
    files = [file for _, name, file in connection.exec_driver_sql("PRAGMA database_list") if name == "main"]
    if not _is_same_file(files[0], path):
        raise _elsewhere(registry)
    connection.exec_driver_sql(SQLITE_WRITE_LOCK)
    if not is_in_transaction(connection):
        raise InvalidItem(_AUTOCOMMIT)


def _enter_postgresql(connection: Connection, registry: SqlRegistry) -> None:
    if is_autocommit(connection):
        raise InvalidItem(_AUTOCOMMIT)
    found = run(connection, [_WHEREABOUTS])
    if found != _known.get(registry):
        # Read again also if it is known: the registry may have moved to another server since.
        known = _known[registry] = [registry._patiently(lambda deadline: registry._read(_WHEREABOUTS, deadline))]
        if found != known:
            raise _elsewhere(registry)


def _is_same_file(path: str | None, other: str) -> bool:
    """A database in memory has no path."""
    try:
        return bool(path) and os.path.samefile(str(path), other)
    except OSError:
        return False


def _elsewhere(registry: SqlRegistry) -> InvalidItem:
    return InvalidItem(
        f"the connection does not lead to the tables of the registry {registry.url}: use the same database, schema "
        "and file"
    )


def _check_queue(connection: Connection, store: QueueStore, registry: SqlRegistry, queue: Queue) -> None:
    """That the queue is there, and stays until the transaction ends."""
    call = registry._call(_get_shared(registry._statements), key=queue.key)
    for value, *_ in run(connection, [call])[0]:
        if Queue.load(queue.key, bytes(value)).id == queue.id:
            return
    store.check_exists(queue)
    raise InvalidItem(f"the transaction began before queue {queue.name} was created: begin another one")


@cache
def _get_shared(statements: Statements) -> Statement:
    """`get` with a lock on the row that keeps away only who wants to change or delete it."""
    get = statements.get
    if statements.dialect == "sqlite":
        return get  # nobody else writes
    return replace(get, name="get_shared", text=f"{get.text} FOR KEY SHARE")


# What is written.


def _write(connection: Connection, registry: SqlRegistry, put: Put) -> None:
    queue, record, delay_s = put
    expect: dict[str, int] = {}
    values: dict[str, bytes] = {}
    if queue.is_fifo:
        number, expect[queue.sequence] = _lock_number(connection, registry, queue)
        values[queue.sequence] = str(number + 1).encode()
        record = in_sequence(record, number + 1)
    key = first_key(queue, record, delay_s, registry.clock.wall_time_us() / 1e6)
    expect[key], values[key] = ABSENT, record.dump()
    commit = Commit(expect, values, {}, frozenset(), None, quiet=False)
    plan = CommitPlan(commit, registry._namespace, registry._statements, registry._channel)
    found = plan.judge(run(connection, plan.locks))
    plan.check_versions(found)
    run(connection, plan.writes(found))


def _lock_number(connection: Connection, registry: SqlRegistry, queue: Queue) -> tuple[int, int]:
    """The last number of a strict queue and the version of its key, which nobody else can change any more.

    Before the first item there is no row to lock. So a placeholder is made, which the database lets one transaction
    have; the others wait for that one's end (see `planning`)."""
    statements = registry._statements
    steps = (statements.insert_placeholder, statements.lock_entry, statements.get)
    *_, rows = run(connection, [registry._call(step, key=queue.sequence) for step in steps])
    if not rows:
        raise RegistryUnavailable(f"{registry.url}: {queue.sequence} was deleted while its row was locked")
    value, version, *_ = rows[0]
    return (0 if version == ABSENT else load_number(queue.sequence, bytes(value))), version


@contextmanager
def _bounded_waits(connection: Connection, registry: SqlRegistry) -> Iterator[None]:
    """Let no lock be waited for without end. The savepoint undoes this if it fails."""
    if isinstance(registry.database, SqliteDatabase):
        yield  # the driver's own `timeout` is never without end
        return
    lock_ms = str(max(1, int(registry.database.timeout * LOCK_PART * 1000)))  # 0 would be without end
    is_set = connection.execute(_SET_IF_ENDLESS, {"lock_ms": lock_ms}).first() is not None
    yield
    if is_set:
        connection.execute(_SET, {"lock_ms": "0"})


_SET: Final = text("SELECT set_config('lock_timeout', :lock_ms, true)")
_SET_IF_ENDLESS: Final = text(f"{_SET.text} WHERE current_setting('lock_timeout') = '0'")
_AUTOCOMMIT: Final = "the connection is in AUTOCOMMIT mode: an item can only be put by a transaction"
# Which start of which server, which database, and which tables a statement means there. As text, because drivers read
# text alike. What does not exist is left out.
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
_known: Final[WeakKeyDictionary[SqlRegistry, list[list[tuple[str, ...]]]]] = WeakKeyDictionary()
"""Where registries are, as last seen."""
