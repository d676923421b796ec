"""The registry in a PostgreSQL database.

A commit that expects every key it names is one round trip, any other two, however many keys it names: BEGIN and all
locks together, then all writes, the notification and COMMIT together. Reads are one statement and one round trip.
Statements are prepared once for each connection.

If a client stops in the middle of a transaction, the server ends the transaction after
`idle_in_transaction_session_timeout`. That is shorter than the time for which other clients wait for the locked rows,
so one stopped client does not make the calls of others fail.

On failure: a call waits for an answer no longer than until its deadline. If COMMIT was sent and the connection broke
without an answer, the outcome is unknown. If the connection broke before COMMIT was sent, the server rolls back.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Sequence
from typing import Any, Final

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo

from pxrs.clock import Clock
from pxrs.errors import (
    AccessDenied,
    InvalidUrl,
    OutcomeUnknown,
    PxrsError,
    RegistryCorrupt,
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
    Row,
    Session,
    TransactionAborted,
)
from pxrs.registry.sql.listening import Listener
from pxrs.registry.sql.registry import SqlRegistry, Watcher, open_registry
from pxrs.registry.sql.schema import Schema
from pxrs.registry.sql.statements import Call
from pxrs.registry.sql.watching import Poller
from pxrs.registry.sql.wire import BEGIN, COMMIT, ROLLBACK, Command, ConnectFailed, Reply, Wire, connect

POLL_S: Final = 1.0
PORT: Final = 5432
_OWN_OPTIONS: Final = ("create", "timeout", "watch", "poll", "password_file")
# libpq's options that an address may not set: the address has another place for them, or pxrs sets them itself.
_RESERVED: Final = frozenset(
    {"user", "password", "hostaddr", "dbname", "connect_timeout", "client_encoding", "replication"}
    | {"target_session_attrs", "fallback_application_name"}
)
_NOT_AS_EXPECTED: Final = ("22012", "23505")  # a division by zero, by which the direct statements fail; a duplicate key
_IDLE_TOO_LONG: Final = "25P03"  # idle_in_transaction_session_timeout: the server rolled back before it read COMMIT
_CREATION_LOCK: Final = 0x70787273  # "pxrs" in ASCII: a number that other programs are unlikely to use


def open(address: Address, clock: Clock) -> Registry:
    database = PostgresDatabase(address)
    poll_s = address.seconds("poll", POLL_S)
    # A registry that polls sends notifications too, for other processes that listen.
    channel = "pxrs_" + hashlib.sha256(address.namespace.encode()).hexdigest()[:24]

    def watcher(registry: SqlRegistry) -> Watcher:
        return Poller(registry, poll_s) if database.is_pooled else Listener(registry, database, channel)

    return open_registry(database, address, clock, watcher=watcher, channel=channel)


class PostgresDatabase(Database):
    dialect = "postgresql"

    def __init__(self, address: Address) -> None:
        timeout = address.seconds("timeout", TIMEOUT_S)
        self.is_pooled = address.choice("watch", "listen", ("listen", "poll")) == "poll"
        """Whether a connection pooler may run each transaction in another session: then a session keeps no settings,
        prepared statements or LISTEN."""
        self._conninfo, self._hosts_count = _conninfo(address, timeout)
        self._settings = Command.plain(_settings(timeout, local=self.is_pooled))
        super().__init__(address.text, timeout)

    def create_tables(self, deadline: float) -> None:
        schema = Schema("postgresql")
        with self.session(deadline) as session:
            assert isinstance(session, PostgresSession)
            # IF NOT EXISTS alone fails when two sessions create the same table at the same moment.
            session.begin(())
            lock = f"SELECT pg_advisory_xact_lock({_CREATION_LOCK})"
            session.run([Command.plain(text) for text in (lock, *schema.create(if_not_exists=True))])
            insert = self.statements.insert_meta
            session.commit([Call(insert, {"the_name": n, "the_value": v}) for n, v in schema.first_rows().items()])

    def connect_alone(self, timeout: float) -> Wire:
        """A connection that belongs to no pool, for a `Listener`."""
        return self._connect(timeout)

    def _connect(self, timeout: float) -> Wire:
        deadline = time.monotonic() + timeout
        try:
            wire = Wire(connect(self._conninfo, deadline), prepares=not self.is_pooled)
        except ConnectFailed as error:
            raise self._refused(error) from error
        if not self.is_pooled:
            reply = wire.run([self._settings], deadline)
            if reply.has_failed():
                wire.close()
                raise self.translate(reply)
        return wire

    def _session(self, connection: Wire, deadline: float) -> PostgresSession:
        return PostgresSession(self, connection, deadline, [BEGIN, self._settings] if self.is_pooled else [BEGIN])

    def translate(self, reply: Reply) -> PxrsError:
        """The error that a failed reply means, for a call that has written nothing."""
        state, text = reply.state, f"{self.url}: {reply.message}"
        if state in ("40001", "40P01"):
            return TransactionAborted(text)
        if reply.is_lost or not state or state.startswith(("08", "57P")) or state == _IDLE_TOO_LONG:
            return ConnectionLost(text)
        if state == "53100":
            return StorageFull(text)
        if state.startswith("28") or state in ("42501", "25006"):
            return AccessDenied(text)
        if state in ("42P01", "3F000"):
            return SchemaMissing(text)
        if state in ("XX001", "XX002"):
            return RegistryCorrupt(self.url, reply.message)
        # Lock and statement time-outs, too many connections, out of memory, input and output errors.
        if state.startswith(("53", "55", "57", "58")):
            return RegistryUnavailable(text)
        return RegistryError(text)

    def _refused(self, error: ConnectFailed) -> PxrsError:
        """The error that a failed connection means. libpq has no codes for it, so the server's message is searched."""
        text = f"{self.url}: {error}"
        if _MISTAKEN.search(text):
            return InvalidUrl(text)
        if _DENIED.search(text) or error.needs_password:
            return AccessDenied(text)
        # If the address has several hosts, a session that cannot write means that a fail-over is under way.
        if "session is read-only" in text and self._hosts_count == 1:
            return AccessDenied(text)
        return ConnectionLost(text)


class PostgresSession(Session):
    def __init__(self, database: PostgresDatabase, wire: Wire, deadline: float, opening: list[Command]) -> None:
        """opening: the commands that begin a transaction."""
        self._database, self._wire, self._deadline, self._opening = database, wire, deadline, opening

    def read(self, call: Call) -> list[Row]:
        return self.run([Command.of(call)]).rows(0)

    def write(self, call: Call) -> int:
        return self.run([Command.of(call)]).results[0].command_tuples or 0

    def begin(self, calls: Sequence[Call]) -> list[list[Row]]:
        self.in_transaction = True
        reply = self.run([*self._opening, *map(Command.of, calls)])
        skipped = len(self._opening)
        return [reply.rows(skipped + i) for i in range(len(calls))]

    def ask(self, calls: Sequence[Call]) -> list[list[Row]]:
        reply = self.run([Command.of(call) for call in calls])
        return [reply.rows(i) for i in range(len(calls))]

    def commit(self, calls: Sequence[Call]) -> None:
        reply = self._wire.run([*map(Command.of, calls), COMMIT], self._deadline)
        tag = reply.tag(len(calls))
        if tag == "COMMIT":  # whatever happened to the connection after that
            self.in_transaction = False
        elif reply.is_lost and reply.state != _IDLE_TOO_LONG:
            raise OutcomeUnknown(f"{self._database.url}: the answer to COMMIT was lost: {reply.message}")
        elif reply.has_failed():
            raise self._database.translate(reply)
        else:  # an aborted transaction answers COMMIT with ROLLBACK
            raise TransactionAborted(f"{self._database.url}: COMMIT was answered with {tag}")

    def commit_at_once(self, calls: Sequence[Call]) -> list[list[Row]] | None:
        if self._database.is_pooled:
            return None  # the settings must be made in an explicit transaction
        if self._wire.is_stale:
            raise ConnectionLost(f"{self._database.url}: the server has closed the connection")
        reply = self._wire.run([Command.of(call) for call in calls], self._deadline)
        if not reply.has_failed():
            return [reply.rows(i) for i in range(len(calls))]
        if not reply.is_lost and reply.state in _NOT_AS_EXPECTED:
            return None
        # If a statement is known to have failed, the server has rolled back. Otherwise the outcome is unknown.
        if reply.is_lost and reply.may_be_done(len(calls)):
            raise OutcomeUnknown(f"{self._database.url}: the answer to a commit was lost: {reply.message}")
        raise self._database.translate(reply)

    def rollback(self) -> None:
        self.in_transaction = False
        # If ROLLBACK fails, the connection is not idle, so it is closed, and the server rolls back.
        self._wire.run([ROLLBACK], self._deadline)

    @property
    def is_idle(self) -> bool:
        return self._wire.is_idle

    def run(self, commands: list[Command]) -> Reply:
        reply = self._wire.run(commands, self._deadline)
        if reply.has_failed():
            raise self._database.translate(reply)
        return reply


def _conninfo(address: Address, timeout: float) -> tuple[str, int]:
    """The connection string for libpq, and the number of hosts in it."""
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()} - _RESERVED
    address.refuse_unknown_options({*_OWN_OPTIONS, *known})
    options: dict[str, Any] = {
        # Let the kernel notice a connection that broke without an error.
        "keepalives_idle": 30,
        "keepalives_interval": 10,
        "keepalives_count": 3,
        "tcp_user_timeout": int(timeout * 1000),
        "application_name": "pxrs",
        **{name: value for name, value in address.options.items() if name in known},
        "client_encoding": "utf8",
        "target_session_attrs": "read-write",
    }
    has_host = bool(address.rest[2:].partition("/")[0].rpartition("@")[2])
    if not has_host and "host" in options:
        options.setdefault("port", PORT)  # a folder with a Unix socket
    elif "host" in options or "port" in options:
        raise InvalidUrl(
            f"{address.text}: write host and port before the path; ?host= is only for the directory of a Unix socket"
        )
    else:
        hosts = address.hosts(PORT)
        options["host"] = ",".join(host for host, _ in hosts)
        options["port"] = ",".join(str(port) for _, port in hosts)
    user, password = address.credentials()
    options |= {"user": user, "password": password, "dbname": address.path or None}
    try:
        conninfo = make_conninfo(**{name: value for name, value in options.items() if value is not None})
    except psycopg.ProgrammingError as error:
        raise InvalidUrl(f"{address.text}: {error}") from error
    return conninfo, str(options["host"]).count(",") + 1


def _settings(timeout: float, *, local: bool) -> str:
    """The statement that makes the settings of a session, or if `local` those of a transaction.

    lock_timeout ends a wait for a lock before the operation's deadline, so that the client gets a definite answer.
    idle_in_transaction_session_timeout is shorter, so that clients that wait for the rows of a stopped client get them.
    statement_timeout is longer than the deadline: it ends statements whose client is gone, and must not end a COMMIT
    that waits for a replica.
    """
    timeouts = {
        "lock_timeout": 0.75 * timeout,
        "idle_in_transaction_session_timeout": 0.4 * timeout,
        "statement_timeout": timeout + 1,
    }
    settings = {name: f"'{int(seconds * 1000)}'" for name, seconds in timeouts.items()}
    # With `off`, a commit is acknowledged before it is on disk. Other values are kept.
    now = "current_setting('synchronous_commit')"
    settings["synchronous_commit"] = f"CASE {now} WHEN 'off' THEN 'on' ELSE {now} END"
    settings["default_transaction_isolation"] = "'read committed'"  # for transactions without BEGIN
    parts = [f"set_config('{name}', {value}, {str(local).lower()})" for name, value in settings.items()]
    return f"SELECT {', '.join(parts)}"


_DENIED: Final = re.compile(
    r"authentication failed|no password supplied|pg_hba\.conf|permission denied|not permitted to log in"
    r'|role "[^"]*" does not exist|requires a valid client certificate',
    re.IGNORECASE,
)
_MISTAKEN: Final = re.compile(
    r'database "[^"]*" does not exist|invalid \S+ value|certificate file "[^"]*" does not exist', re.IGNORECASE
)
