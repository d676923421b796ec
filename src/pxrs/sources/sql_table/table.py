"""The SQL queries on the table, and the translation of their errors."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pxrs.errors import InvalidRecord, InvalidTopic, ReadFailed
from pxrs.model import EPOCH
from pxrs.sources.sql_table.cells import as_json, key_bytes, micros
from pxrs.sources.sql_table.identity import Resolved, place_of, shown_url, without_secrets
from pxrs.waiting import start_thread

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

FETCH_ROWS: Final = 64
"""How many rows are fetched from the database at a time, so that a page may exceed `page_bytes` by that many rows."""
_ROW_OVERHEAD: Final = 64

# The transactions that hold a writer's lock on the table or on a table that shares its rows by inheritance: an INSERT
# into the parent locks the child late, and the reverse.
_HOLDERS: Final = """
WITH RECURSIVE family(oid) AS (
    SELECT CAST(:relation AS oid)
    UNION
    SELECT CASE WHEN i.inhparent = family.oid THEN i.inhrelid ELSE i.inhparent END
    FROM pg_inherits i JOIN family ON family.oid IN (i.inhparent, i.inhrelid))
SELECT DISTINCT l.virtualtransaction FROM pg_locks l JOIN family ON l.relation = family.oid
WHERE l.locktype = 'relation' AND l.mode = 'RowExclusiveLock' AND l.granted
AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
# The sequence that the id comes from: that of an identity or serial column, or the one named in its default.
_SEQUENCE: Final = """
SELECT s.seqrelid, s.seqcache FROM pg_sequence s, pg_attribute t
WHERE t.attrelid = :relation AND t.attname = :id_column AND (
    EXISTS (SELECT 1 FROM pg_depend d WHERE d.classid = CAST('pg_class' AS regclass) AND d.objid = s.seqrelid
        AND d.refclassid = CAST('pg_class' AS regclass) AND d.refobjid = t.attrelid AND d.refobjsubid = t.attnum
        AND d.deptype IN ('a', 'i'))
    OR EXISTS (SELECT 1 FROM pg_attrdef a JOIN pg_depend d ON d.classid = CAST('pg_attrdef' AS regclass)
        AND d.objid = a.oid AND d.refclassid = CAST('pg_class' AS regclass) AND d.refobjid = s.seqrelid
        WHERE a.adrelid = t.attrelid AND a.adnum = t.attnum))
"""
_LAST_VALUE: Final = """
SELECT CASE WHEN has_sequence_privilege(CAST(:sequence AS oid), 'SELECT, USAGE')
    THEN coalesce(pg_sequence_last_value(CAST(CAST(:sequence AS oid) AS regclass)), 0) END
"""
_SCHEMA_OF: Final = """
SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = :relation
"""
_MAY_ASK: Final = """
SELECT coalesce(has_function_privilege(to_regprocedure('pg_control_system()'), 'EXECUTE'), false)
"""
_DATABASE: Final = """
SELECT s.system_identifier, d.oid FROM pg_control_system() s, pg_database d WHERE d.datname = current_database()
"""
_SQLITE_MADE: Final = "SELECT sql FROM sqlite_master WHERE type = 'table' AND name = :name COLLATE NOCASE"
_SQLITE_LAST: Final = "SELECT max(seq) FROM sqlite_sequence WHERE name = :name COLLATE NOCASE"


class Columns(NamedTuple):
    """The names of the columns, by what they mean."""

    id: str
    key: str | None
    value: str | None
    values: tuple[str, ...]
    timestamp: str | None

    @property
    def read(self) -> tuple[str, ...]:
        """The names of all columns, each once, in the order in which they are selected."""
        named = (self.id, self.key, self.timestamp, self.value, *self.values)
        return tuple(dict.fromkeys(name for name in named if name is not None))


Row = tuple[int, bytes | None, bytes | None, int]
"""Id, key, value and time in microseconds since 1970."""


class Rows(NamedTuple):
    """Rows that were read, the last id that was looked at, and whether rows may follow before the end that was asked
    for."""

    rows: list[Row]
    last: int
    is_cut: bool


class _ReadLimit:
    """Ends queries that a database does not answer: libpq waits without a limit for a server that is stopped.

    The limit is for a `with` block, and also holds for the query with which SQLAlchemy checks a pooled connection. When
    it has passed, the sockets of all connections of the engine are shut down, because which one the block waits for is
    not known while SQLAlchemy checks it; they all lead to the same server. The drivers then raise, and SQLAlchemy
    connects anew. Only for an engine that nobody else uses."""

    def __init__(self, engine: Engine, seconds: float) -> None:
        import sqlalchemy

        self._seconds = seconds
        self._driver = engine.dialect.driver
        self._connections: weakref.WeakSet[Any] = weakref.WeakSet()
        """The open connections of psycopg. Guarded by `_lock`."""
        self._lock = threading.Lock()
        sqlalchemy.event.listen(engine, "connect", self._note)

    def _note(self, connection: Any, record: object) -> None:
        if self._driver == "psycopg":
            with self._lock:
                self._connections.add(connection)
        elif self._driver == "oracledb":
            connection.call_timeout = int(self._seconds * 1000)

    @contextmanager
    def applied(self, where: str) -> Iterator[None]:
        """Raises ReadFailed if the block does not end in time. where: begins the error's text."""
        if self._driver != "psycopg":
            yield
            return
        is_late, is_over = threading.Event(), threading.Event()

        def watch() -> None:
            while not is_over.wait(self._seconds):  # again: SQLAlchemy may have connected anew, and be waiting again
                is_late.set()
                self._shut_down()

        try:
            start_thread(watch, "pxrs-table-limit")
        except RuntimeError as error:  # the process has as many threads as it may have
            raise ReadFailed(
                f"{where}: not read, because the query's time limit could not be enforced: {error}"
            ) from error
        try:
            yield
        except Exception as error:
            if not is_late.is_set():
                raise
            raise ReadFailed(
                f"{where}: the database has not answered within {self._seconds:g} s (`read_timeout`): check whether it "
                "is running, and whether queries of this table are slow"
            ) from error
        finally:
            is_over.set()

    def _shut_down(self) -> None:
        import psycopg

        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            # With a copy of the descriptor, so that the end of the inner block leaves the connection's own one open.
            # `fileno` raises if another thread has closed the connection meanwhile.
            with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as opened:
                opened.shutdown(socket.SHUT_RDWR)


class Table:
    """Runs the queries on one table. Raises ReadFailed and InvalidTopic in place of errors of the driver."""

    def __init__(
        self, engine: Engine, table: str, columns: Columns, name: str, read_timeout_s: float | None = None
    ) -> None:
        """read_timeout_s: how long the calls of one query may take; None: as long as the engine lets them."""
        import sqlalchemy

        self.engine, self._columns, self._name = engine, columns, name
        self.dialect: str = engine.dialect.name
        self.address = shown_url(engine.url)
        self._sa = sqlalchemy
        schema, _, bare = table.rpartition(".")
        self._schema, self._bare = schema or None, bare
        self._from = sqlalchemy.table(bare, *map(sqlalchemy.column, columns.read), schema=schema or None)
        self._id = self._from.c[columns.id]
        self._relation: int | None = None
        self._sequence: int | None = None
        self._limit = None if read_timeout_s is None else _ReadLimit(engine, read_timeout_s)

    def check(self, settle_s: float | None) -> tuple[bool, Resolved]:
        """Check the table. Returns whether the database reports who is writing, and which table the name stands for.
        Raises InvalidTopic if the table cannot be a source."""
        with self._connection() as connection:
            inspector = self._sa.inspect(connection)
            try:
                found = {column["name"]: column["type"] for column in inspector.get_columns(self._bare, self._schema)}
            except self._sa.exc.NoSuchTableError:
                raise InvalidTopic(f"{self.address}: table {self._full_name!r} does not exist") from None
            for name in self._columns.read:
                if name not in found:
                    raise InvalidTopic(f"{self._full_name}: no column {name!r}; existing: {', '.join(found)}")
            kind = found[self._columns.id]
            if not isinstance(kind, (self._sa.Integer, self._sa.Numeric)) or isinstance(kind, self._sa.Float):
                raise InvalidTopic(f"{self._full_name}: {self._columns.id} is {kind}, but must be an integer")
            if self.dialect == "postgresql":
                return self._check_postgresql(connection, settle_s)
        mark = None
        if self.dialect == "sqlite" and (path := place_of(self.engine.url)[3]) not in (None, "", ":memory:"):
            mark = f"sqlite {path} {self._bare.lower()}"
        return self.dialect == "sqlite", Resolved(mark, (self._full_name,))

    def _check_postgresql(self, connection: Connection, settle_s: float | None) -> tuple[bool, Resolved]:
        text = self._sa.text
        quoted = self._quoted(self._bare, self._schema)
        question = "SELECT c.oid, c.relkind, pg_is_in_recovery() FROM pg_class c WHERE c.oid = to_regclass(:name)"
        oid, kind, is_standby = connection.execute(text(question), {"name": quoted}).one()
        given = {"relation": oid, "id_column": self._columns.id}
        sequence = connection.execute(text(_SEQUENCE), given).first()
        doubt = None
        if is_standby:
            doubt = "this server is a standby, which cannot tell which transactions are writing"
        elif kind not in ("r", "p"):
            doubt = "this is not a plain table, so it is not known which transactions are writing to it"
        elif sequence is not None and sequence[1] > 1:
            doubt = f"its sequence has CACHE {sequence[1]}, so sessions reserve ids for later"
        if doubt and not settle_s:
            raise InvalidTopic(
                f"{self._full_name}: {doubt}: rows could become visible behind the reader and be missed; set settle_s"
            )
        self._relation = None if doubt else oid
        self._sequence = None if sequence is None or is_standby else sequence[0]
        return True, self._resolve_postgresql(connection, oid)

    def _resolve_postgresql(self, connection: Connection, oid: int) -> Resolved:
        """The names of the table, and its identity as PostgreSQL reports it: the system identifier of the server, and
        the oids of the database and the table."""
        text = self._sa.text
        schema: str = connection.execute(text(_SCHEMA_OF), {"relation": oid}).scalar_one()
        bare = connection.execute(text("SELECT CAST(to_regclass(:name) AS oid)"), {"name": self._quoted(self._bare)})
        full = f"{schema}.{self._bare}"
        names = (self._bare, full) if bare.scalar() == oid else (full,)
        if not connection.execute(text(_MAY_ASK)).scalar():
            return Resolved(None, names)
        system, database = connection.execute(text(_DATABASE)).one()
        return Resolved(f"postgresql {system} {database} {oid}", names)

    def _quoted(self, bare: str, schema: str | None = None) -> str:
        return self.engine.dialect.identifier_preparer.format_table(self._sa.table(bare, schema=schema))

    def visible_end(self) -> int:
        with self._connection() as connection:
            last = connection.execute(self._sa.select(self._sa.func.max(self._id))).scalar()
        return 0 if last is None else max(int(last) + 1, 0)

    def first_id(self) -> int | None:
        with self._connection() as connection:
            first = connection.execute(self._sa.select(self._sa.func.min(self._id))).scalar()
        if first is not None and first < 0:
            raise InvalidRecord(f"{self._full_name}: {self._columns.id} {first} is negative; such rows cannot be read")
        return None if first is None else int(first)

    def holders(self) -> frozenset[str]:
        """The transactions that hold a writer's lock; empty if the database does not report them."""
        if self._relation is None:
            return frozenset()
        with self._connection() as connection:
            return frozenset(connection.execute(self._sa.text(_HOLDERS), {"relation": self._relation}).scalars())

    def drawn_end(self, visible_end: int) -> int | None:
        """The id behind the last one that was ever given out, though its row may be deleted; None if not known."""
        text = self._sa.text
        with self._connection() as connection:
            if self._sequence is not None:
                last = connection.execute(text(_LAST_VALUE), {"sequence": self._sequence}).scalar()
                return None if last is None else max(int(last) + 1, visible_end)
            if self.dialect != "sqlite":
                return None
            made = connection.execute(text(_SQLITE_MADE), {"name": self._bare}).scalar()
            if made is None or "AUTOINCREMENT" not in made.upper():
                return visible_end  # SQLite gives out the ids of deleted rows again
            last = connection.execute(text(_SQLITE_LAST), {"name": self._bare}).scalar()
            return max(int(last or 0) + 1, visible_end)

    def rows(self, start: int, end: int, bytes_max: int) -> Rows:
        """The rows with these ids, until they exceed this number of bytes."""
        columns = self._columns
        wanted = self._sa.select(self._from).where(self._id >= start, self._id < end).order_by(self._id)
        rows: list[Row] = []
        size = 0
        with self._connection() as connection:
            result = connection.execution_options(yield_per=FETCH_ROWS).execute(wanted)
            for part in result.mappings().partitions():
                for row in part:
                    key = None if columns.key is None else key_bytes(row[columns.key], columns.key)
                    value = self._value_bytes(row)
                    moment = 0 if columns.timestamp is None else micros(row[columns.timestamp], columns.timestamp)
                    rows.append((int(row[columns.id]), key, value, moment))
                    size += _ROW_OVERHEAD + len(key or b"") + len(value or b"")
                if size >= bytes_max:
                    result.close()
                    return Rows(rows, rows[-1][0], True)
        return Rows(rows, end - 1, False)

    def first_id_since(self, timestamp: int, end: int) -> int | None:
        assert self._columns.timestamp is not None
        column, name = self._from.c[self._columns.timestamp], self._columns.timestamp
        moment: datetime = EPOCH + timedelta(microseconds=timestamp)
        with self._connection() as connection:
            sample = connection.execute(self._sa.select(column).where(column.is_not(None)).limit(1)).scalar()
            if sample is None:
                return None
            if isinstance(sample, datetime):
                bound = moment if sample.tzinfo is not None else moment.replace(tzinfo=None)
                wanted = self._sa.select(self._sa.func.min(self._id)).where(column >= bound, self._id < end)
                found = connection.execute(wanted).scalar()
                return None if found is None else int(found)
            # Times that are text: their order is only known once they are parsed.
            every = self._sa.select(self._id, column).where(self._id < end).order_by(self._id)
            for row in connection.execution_options(yield_per=FETCH_ROWS).execute(every):
                if micros(row[1], name) >= timestamp:
                    return int(row[0])
        return None

    def listen(self, channel: str) -> Any:
        """A psycopg connection that listens to the channel. It is taken from the pool for good."""
        if self.engine.dialect.driver != "psycopg":
            raise InvalidTopic(f"{self._full_name}: notify_channel needs PostgreSQL and its driver psycopg")
        from psycopg import sql

        with self._translated(), self._limited():
            pooled = self.engine.raw_connection()
            connection: Any = pooled.driver_connection
            pooled.detach()
            try:
                connection.rollback()
                connection.autocommit = True
                connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
            except BaseException:
                connection.close()
                raise
        return connection

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        """A connection for one query. Its transaction ends with it, so that the next query sees new rows."""
        with self._translated(), self._limited(), self.engine.connect() as connection:
            if self.dialect == "postgresql":
                # A server-side cursor needs a transaction, also if the engine is in autocommit mode.
                connection = connection.execution_options(isolation_level="READ COMMITTED", postgresql_readonly=True)
            yield connection

    def _limited(self) -> AbstractContextManager[None]:
        return nullcontext() if self._limit is None else self._limit.applied(f"{self.address}: {self._full_name}")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        drivers = (self._sa.exc.SQLAlchemyError, self.engine.dialect.loaded_dbapi.Error)
        try:
            yield
        except drivers as error:
            text = str(getattr(error, "orig", None) or error)
            text = without_secrets(text, self.engine.url)
            raise ReadFailed(f"{self.address}: {self._full_name}: {text}") from None

    def _value_bytes(self, row: Any) -> bytes | None:
        if self._columns.value is None:
            return as_json({name: row[name] for name in self._columns.values})
        value = row[self._columns.value]
        if value is None:
            return None
        if isinstance(value, str):
            return value.encode()
        return bytes(value) if isinstance(value, (bytes, bytearray, memoryview)) else as_json(value)

    @property
    def _full_name(self) -> str:
        return self._bare if self._schema is None else f"{self._schema}.{self._bare}"
