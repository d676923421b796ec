"""The registry in an Oracle database.

Oracle has no INSERT that skips a row that exists. So a duplicate-key error counts as success; like the INSERT, it comes
only after the transaction that inserted the row has ended. Statements are sent one by one. Each session sets the sort
order of keys to that of their bytes, whatever the database's language is.

On failure: the driver's call time-out bounds every round trip. The rows that a stopped client has locked stay locked
until the database ends its session, after a time that is a setting of the database (see the DDL). Until then calls that
need these rows raise RegistryUnavailable.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import oracledb

from pxrs.clock import Clock
from pxrs.errors import (
    AccessDenied,
    InvalidUrl,
    OutcomeUnknown,
    PxrsError,
    RegistryError,
    RegistryUnavailable,
    SchemaMissing,
    StorageFull,
)
from pxrs.registry.address import Address
from pxrs.registry.contract import Registry
from pxrs.registry.sql.database import (
    TIMEOUT_S,
    ConnectionLost,
    Database,
    Inherited,
    Row,
    Session,
    TransactionAborted,
)
from pxrs.registry.sql.registry import open_registry
from pxrs.registry.sql.schema import Schema
from pxrs.registry.sql.statements import Call, Statement
from pxrs.registry.sql.watching import Poller

POLL_S: Final = 1.0
PORT: Final = 1521

_DUPLICATE_KEY, _NAME_IN_USE = 1, 955
_ABORTED: Final = frozenset({60, 8177})
_DENIED: Final = frozenset({1017, 1031, 1045, 28000, 28001, 16000})
_FULL: Final = frozenset({1536, 1652, 1653, 1654, 1688, 1691, 30036, 257, 19809})
_NO_TABLE: Final = frozenset({942, 2289})
_TIMED_OUT: Final = frozenset({51, 54, 1013, 30006})
_LOST: Final = frozenset(
    {28, 1012, 1033, 1034, 1089, 1090, 1092, 2396, 3113, 3114, 3135, 3136, 12170, 12514, 12528, 12537, 12541, 12547}
)


def open(address: Address, clock: Clock) -> Registry:
    database = OracleDatabase(address)
    poll_s = address.seconds("poll", POLL_S)
    return open_registry(database, address, clock, watcher=lambda registry: Poller(registry, poll_s))


class _Connection(Inherited, oracledb.Connection):
    def close(self) -> None:
        with suppress(oracledb.Error):  # the connection is broken already
            super().close()


class OracleDatabase(Database):
    dialect = "oracle"

    def __init__(self, address: Address) -> None:
        timeout = address.seconds("timeout", TIMEOUT_S)
        self._options = _options(address)
        super().__init__(address.text, timeout)

    def create_tables(self, deadline: float) -> None:
        schema = Schema("oracle")
        with self.session(deadline) as session:
            assert isinstance(session, OracleSession)
            for statement in schema.create(if_not_exists=True):
                session.run(statement)
            session.begin(())
            insert = self.statements.insert_meta
            session.commit([Call(insert, {"the_name": n, "the_value": v}) for n, v in schema.first_rows().items()])

    def _connect(self, timeout: float) -> _Connection:
        try:
            connection = oracledb.connect(
                conn_class=_Connection, tcp_connect_timeout=timeout, retry_count=0, **self._options
            )
        except oracledb.Error as error:
            raise self.translate(error) from error
        except OSError as error:  # the host name could not be resolved
            raise ConnectionLost(f"{self.url}: {error}") from error
        assert isinstance(connection, _Connection)
        try:
            connection.call_timeout = max(1, int(timeout * 1000))
            connection.outputtypehandler = _values_as_bytes
            with connection.cursor() as cursor:
                cursor.execute("ALTER SESSION SET NLS_COMP=BINARY NLS_SORT=BINARY")
        except oracledb.Error as error:
            connection.close()
            raise self.translate(error) from error
        return connection

    def _session(self, connection: Any, deadline: float) -> OracleSession:
        return OracleSession(self, connection, deadline)

    def translate(self, error: oracledb.Error) -> PxrsError:
        """The error of pxrs that an error of the driver means, for a call that has written nothing."""
        code, text = _code(error), f"{self.url}: {' '.join(str(error).split())}"
        if _is_lost(error):
            return ConnectionLost(text)
        if code in _ABORTED:
            return TransactionAborted(text)
        if code in _FULL:
            return StorageFull(text)
        if code in _DENIED:
            return AccessDenied(text)
        if code in _NO_TABLE:
            return SchemaMissing(text)
        if code in _TIMED_OUT:
            return RegistryUnavailable(text)
        return RegistryError(text)


class OracleSession(Session):
    def __init__(self, database: OracleDatabase, connection: oracledb.Connection, deadline: float) -> None:
        self._database, self._connection, self._deadline = database, connection, deadline
        self._is_lost = False
        self._is_busy = False
        """Whether a call of the driver is running, or was left by an interrupt."""

    def read(self, call: Call) -> list[Row]:
        return self._execute(call)[0]

    def write(self, call: Call) -> int:
        self.in_transaction = True
        changed = self._execute(call)[1]
        try:
            self.commit(())
        except OutcomeUnknown as error:
            raise ConnectionLost(str(error)) from error
        return changed

    def begin(self, calls: Sequence[Call]) -> list[list[Row]]:
        self.in_transaction = True
        return self.ask(calls)

    def ask(self, calls: Sequence[Call]) -> list[list[Row]]:
        return [self._execute(call)[0] for call in calls]

    def run(self, text: str) -> None:
        """Run one statement of DDL; an object that exists already is left as it is."""
        try:
            self._set_timeout()
            with self._connection.cursor() as cursor:
                cursor.execute(text)
        except oracledb.Error as error:
            if _code(error) != _NAME_IN_USE:
                raise self._translate(error) from error

    def commit(self, calls: Sequence[Call]) -> None:
        self.ask(calls)
        self._is_busy = True
        try:
            self._set_timeout()
            self._connection.commit()
            self._is_busy = False
        except oracledb.Error as error:
            self._is_busy = False
            # The driver cannot tell whether the server received COMMIT before the call ended.
            if _is_lost(error) or _code(error) in _TIMED_OUT:
                self._is_lost = True
                raise OutcomeUnknown(f"{self._database.url}: the answer to COMMIT was lost: {error}") from error
            raise self._translate(error) from error
        self.in_transaction = False

    def rollback(self) -> None:
        if self._is_lost:
            return
        self._is_busy = True
        try:
            self._connection.rollback()
            self._is_busy = self.in_transaction = False
        except oracledb.Error:
            self._is_lost = True

    @property
    def is_idle(self) -> bool:
        return not self._is_lost and not self._is_busy and not self.in_transaction

    def _execute(self, call: Call) -> tuple[list[Row], int]:
        statement, values = call
        self._is_busy = True
        try:
            result = self._execute_now(statement, values)
        except oracledb.Error as error:
            self._is_busy = False
            if statement.forgives_duplicates and _code(error) == _DUPLICATE_KEY:
                return [], 0
            raise self._translate(error) from error
        self._is_busy = False
        return result

    def _execute_now(self, statement: Statement, values: Mapping[str, Any]) -> tuple[list[Row], int]:
        self._set_timeout()
        with self._connection.cursor() as cursor:
            if "the_value" in values and isinstance(values["the_value"], bytes):
                # Python's bytes would be bound as RAW, which holds at most 32 KiB.
                cursor.setinputsizes(the_value=oracledb.DB_TYPE_LONG_RAW)
            cursor.execute(statement.text, dict(values))
            return (cursor.fetchall(), 0) if statement.returns_rows else ([], cursor.rowcount)

    def _set_timeout(self) -> None:
        self._connection.call_timeout = max(1, int((self._deadline - time.monotonic()) * 1000))

    def _translate(self, error: oracledb.Error) -> PxrsError:
        translated = self._database.translate(error)
        self._is_lost |= isinstance(translated, ConnectionLost)
        return translated


def _options(address: Address) -> dict[str, Any]:
    known = ("service_name", "protocol", "wallet_location", "ssl_server_dn_match")
    address.refuse_unknown_options(("create", "timeout", "poll", "password_file", *known))
    if address.path:
        raise InvalidUrl(f"{address.text}: write oracle://USER@HOST:{PORT}/?service_name=NAME")
    if not address.options.get("service_name"):
        raise InvalidUrl(f"{address.text}: the service name is missing; add ?service_name=NAME")
    hosts = address.hosts(PORT)
    if len(hosts) != 1:
        raise InvalidUrl(f"{address.text}: give one host; its name may resolve to several addresses")
    ((host, port),) = hosts
    user, password = address.credentials()
    options: dict[str, Any] = {"user": user, "password": password, "host": host, "port": port}
    options["service_name"] = address.options["service_name"]
    options["protocol"] = address.choice("protocol", "tcp", ("tcp", "tcps"))
    if "wallet_location" in address.options:
        options["wallet_location"] = address.options["wallet_location"]
    if "ssl_server_dn_match" in address.options:
        options["ssl_server_dn_match"] = address.flag("ssl_server_dn_match", True)
    return options


def _values_as_bytes(cursor: oracledb.Cursor, metadata: oracledb.FetchInfo) -> Any:
    """Fetch values as bytes together with their row. As BLOBs, each would need a round trip of its own."""
    if metadata.type_code is oracledb.DB_TYPE_BLOB:
        return cursor.var(oracledb.DB_TYPE_LONG_RAW, arraysize=cursor.arraysize)
    return None


def _code(error: oracledb.Error) -> int:
    """The number of an ORA- error, 0 for the driver's own."""
    (detail, *_) = error.args or (None,)
    return getattr(detail, "code", 0) or 0


def _is_lost(error: oracledb.Error) -> bool:
    (detail, *_) = error.args or (None,)
    driver_code = getattr(detail, "full_code", "") or ""
    # The driver's 4011 and 4024: the connection was closed, the call timed out. 6000 and above: cannot connect.
    lost = driver_code in ("DPY-4011", "DPY-4024", "DPY-1001") or driver_code.startswith("DPY-6")
    return lost or bool(getattr(detail, "isrecoverable", False)) or _code(error) in _LOST
