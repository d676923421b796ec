"""One libpq connection: several statements sent at once, their answers awaited up to a deadline.

The problem: a commit takes half a dozen statements, and each would be a round trip; and libpq waits for ever for a
server that is stopped, or a network that swallows packets. psycopg's cursors can pipeline, but spend ten times as long
on each statement as the server, forget their prepared statements at every ROLLBACK, and have no deadline. So the
statements go straight to libpq, through psycopg's own `pq` module, and the waiting is done here.

Invariants:
- A connection is in pipeline mode for life. `run` sends its commands and one Sync and reads until that Sync is
  answered: between two calls nothing is under way. Without BEGIN they are one transaction of their own.
- After the first command that fails the server skips the rest.
- A statement is taken for prepared only once the server has said so.

On failure: what the server said is in the reply, and the connection is as good as before. If the connection broke, or
the deadline passed (then it is closed here), the reply says so and holds whatever answers came before.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_attempts, conninfo_to_dict, make_conninfo

from pxrs.registry.sql.database import Row
from pxrs.registry.sql.statements import Call

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn, PGresult

_TEXT, _BINARY = int(pq.Format.TEXT), int(pq.Format.BINARY)
_INTEGERS: Final = frozenset({20, 21, 23})
_BYTEA: Final = 17


class Command(NamedTuple):
    """A statement as libpq takes it. Without a label it is not prepared."""

    label: bytes
    query: bytes
    values: Sequence[bytes | None] = ()
    formats: Sequence[int] = ()

    @classmethod
    def of(cls, call: Call) -> Command:
        statement, values = call
        raw: list[bytes | None] = []
        formats: list[int] = []
        for name in statement.parameters:
            value = values[name]
            formats.append(_BINARY if isinstance(value, bytes) else _TEXT)
            raw.append(value if value is None or isinstance(value, bytes) else str(value).encode())
        return cls(statement.name.encode(), statement.text.encode(), raw, formats)

    @classmethod
    def plain(cls, text: str) -> Command:
        return cls(b"", text.encode())


BEGIN: Final = Command(b"begin", b"BEGIN ISOLATION LEVEL READ COMMITTED")
COMMIT: Final = Command(b"commit", b"COMMIT")
ROLLBACK: Final = Command(b"rollback", b"ROLLBACK")


@dataclass(slots=True)
class Reply:
    """What came back."""

    results: list[PGresult] = field(default_factory=list)
    """One for each command that was answered, in order."""
    state: str = ""
    """The SQLSTATE of the first command that failed."""
    message: str = ""
    """What the server said about it, or how the connection broke."""
    is_lost: bool = False
    """Whether the connection broke before all was answered."""

    def has_failed(self) -> bool:
        return self.is_lost or bool(self.state)

    def may_be_done(self, count: int) -> bool:
        """Whether none of the first `count` commands is known to have failed: they were done, or nobody knows."""
        return all(result.status != pq.ExecStatus.FATAL_ERROR for result in self.results[:count])

    def rows(self, index: int) -> list[Row]:
        return _rows(self.results[index])

    def tag(self, index: int) -> str:
        """What the server calls what it did, such as COMMIT; empty if that command was not answered."""
        if index >= len(self.results):
            return ""
        return (self.results[index].command_status or b"").decode()


class ConnectFailed(Exception):
    """No host let us in; libpq gives no codes for that, only words."""

    def __init__(self, message: str, needs_password: bool) -> None:
        self.needs_password = needs_password
        super().__init__(message)


def connect(conninfo: str, deadline: float) -> PGconn:
    """A connection to the first host that gives one, each having its share of the time until the deadline."""
    try:
        attempts = conninfo_attempts(conninfo_to_dict(conninfo))
    except psycopg.Error as error:
        raise ConnectFailed(_one_line(str(error)), False) from error
    failures: dict[str, None] = {}  # in order, each once
    needs_password = False
    for i, attempt in enumerate(attempts):
        now = time.monotonic()
        pgconn = pq.PGconn.connect_start(make_conninfo("", **attempt).encode())
        failure = _establish(pgconn, now + (deadline - now) / (len(attempts) - i))
        if not failure:
            pgconn.nonblocking = 1
            return pgconn
        failures[failure] = None
        needs_password |= pgconn.needs_password
        pgconn.finish()
    raise ConnectFailed("; ".join(failures), needs_password)


def _establish(pgconn: PGconn, deadline: float) -> str:
    """Go through libpq's steps of connecting; why it failed, or nothing."""
    status = pq.PollingStatus.WRITING if pgconn.status != pq.ConnStatus.BAD else pq.PollingStatus.FAILED
    while status != pq.PollingStatus.FAILED:
        events = select.poll()  # anew each time: the socket may be another one
        events.register(pgconn.socket, select.POLLIN if status == pq.PollingStatus.READING else select.POLLOUT)
        if not events.poll(max(deadline - time.monotonic(), 0.0) * 1000):
            return f"no answer in time from {pgconn.host.decode()}"
        status = pq.PollingStatus(pgconn.connect_poll())
        if status == pq.PollingStatus.OK:
            return ""
    return _one_line(pgconn.get_error_message()) or "connection failed"


class Wire:
    """Owns a connection and speaks through it."""

    def __init__(self, pgconn: PGconn, *, prepares: bool) -> None:
        """`prepares` is False where a pooler stands between, whose sessions keep nothing."""
        self._pgconn = pgconn
        self._prepares = prepares
        self._prepared: set[bytes] = set()
        self._is_waiting = False
        self._events = select.poll()
        self._fileno = self._pgconn.socket
        self._events.register(self._fileno, select.POLLIN)
        self._pgconn.enter_pipeline_mode()

    @property
    def is_idle(self) -> bool:
        """Whether it is well, with no transaction open and no answer outstanding."""
        return (
            not self._is_waiting
            and self._pgconn.status == pq.ConnStatus.OK
            and self._pgconn.transaction_status == pq.TransactionStatus.IDLE
        )

    @property
    def is_stale(self) -> bool:
        """Whether something has come that nobody asked for: between two calls that is the end of the connection."""
        return bool(self._events.poll(0))

    def fileno(self) -> int:
        return self._fileno

    def close(self) -> None:
        self._pgconn.finish()

    def run(self, commands: Sequence[Command], deadline: float) -> Reply:
        """Send the commands together and wait for their answers, until the deadline on `time.monotonic()`."""
        reply = Reply()
        self._is_waiting = True  # also if an interrupt gets us out of here
        try:
            preparing = self._send(commands)
            self._flush(deadline)
            self._collect(reply, preparing, deadline)
            self._is_waiting = False
        except psycopg.Error as error:
            reply.is_lost = True
            reply.message = reply.message or _one_line(str(error))
        except TimeoutError:
            reply.is_lost = True
            reply.message = "no answer in time"
            self.close()
        return reply

    def notifications(self) -> list[str]:
        """The payloads of the notifications that have come; raises psycopg.Error if the connection broke."""
        self._pgconn.consume_input()
        payloads = []
        while (notify := self._pgconn.notifies()) is not None:
            payloads.append(notify.extra.decode())
        return payloads

    def _send(self, commands: Sequence[Command]) -> list[bytes]:
        """Queue the commands; for each answer to come, the label if it is one to a preparation, else nothing."""
        pgconn, known = self._pgconn, self._prepared.copy()
        answers: list[bytes] = []
        for label, query, values, formats in commands:
            if not label or not self._prepares:
                pgconn.send_query_params(query, values, param_formats=formats, result_format=_BINARY)
            else:
                if label not in known:
                    known.add(label)
                    answers.append(label)
                    pgconn.send_prepare(label, query)
                pgconn.send_query_prepared(label, values, formats, _BINARY)
            answers.append(b"")
        pgconn.pipeline_sync()
        return answers

    def _flush(self, deadline: float) -> None:
        if not self._pgconn.flush():
            return
        # The server may stop reading while it waits for us to read.
        self._events.modify(self._fileno, select.POLLIN | select.POLLOUT)
        try:
            while True:
                if self._wait(deadline) & select.POLLIN:
                    self._pgconn.consume_input()
                if not self._pgconn.flush():
                    return
        finally:
            self._events.modify(self._fileno, select.POLLIN)

    def _collect(self, reply: Reply, preparing: list[bytes], deadline: float) -> None:
        pgconn = self._pgconn
        awaited = iter(preparing)
        is_between = False
        while True:
            while pgconn.is_busy():
                self._wait(deadline)
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is None:  # the end of one command's answer; twice in a row, of everything
                if is_between:
                    raise psycopg.OperationalError("the server closed the connection")
                is_between = True
                continue
            is_between = False
            if result.status == pq.ExecStatus.PIPELINE_SYNC:
                return
            if result.status == pq.ExecStatus.FATAL_ERROR and not reply.has_failed():
                reply.state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
                reply.message = _one_line(result.get_error_message())
                reply.is_lost = not reply.state  # libpq says this, not the server
            label = next(awaited, b"")
            if not label:
                reply.results.append(result)
            elif result.status == pq.ExecStatus.COMMAND_OK:
                self._prepared.add(label)

    def _wait(self, deadline: float) -> int:
        """Wait until the socket can be used; which events it has."""
        left = deadline - time.monotonic()
        events = self._events.poll(left * 1000) if left > 0 else []
        if not events:
            raise TimeoutError
        return events[0][1]


def _rows(result: PGresult) -> list[Row]:
    """The rows of a result that is in binary format: integers, bytes, and text."""
    if not result.ntuples:
        return []
    columns = [(i, result.ftype(i)) for i in range(result.nfields)]
    rows = []
    for r in range(result.ntuples):
        row: list[Any] = []
        for i, oid in columns:
            raw = result.get_value(r, i)
            if raw is None or oid == _BYTEA:
                row.append(raw)
            elif oid in _INTEGERS:
                row.append(int.from_bytes(raw, "big", signed=True))
            else:
                row.append(raw.decode())
        rows.append(tuple(row))
    return rows


def _one_line(text: str) -> str:
    return " ".join(text.split())
