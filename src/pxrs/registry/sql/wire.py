"""One libpq connection: several statements sent at once, their answers awaited up to a deadline.

The problem: a commit takes half a dozen statements, and each would be a round trip. And libpq waits without a limit
for a server that is stopped or a network that drops packets. psycopg's cursors can pipeline, but need ten times as long
for each statement as the server, forget their prepared statements at every ROLLBACK, and have no deadline. So this
module calls libpq through psycopg's `pq` module, and waits for the socket itself.

Invariants:
- A connection is always in pipeline mode. `run` sends its commands and one Sync, and reads until the Sync is answered:
  between two calls no answer is outstanding. Commands without BEGIN are one implicit transaction.
- After the first command that fails the server skips the rest.
- A statement counts as prepared only after the server has confirmed it.

On failure: the reply has the server's error, and the connection can be used again. If the connection broke or the
deadline passed, `Reply.is_lost` is True, and the reply has the answers that came before. `run` closes a connection
whose deadline has passed.
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
    """The answers to the commands of one `Wire.run`."""

    results: list[PGresult] = field(default_factory=list)
    """One for each command that was answered, in order."""
    state: str = ""
    """The SQLSTATE of the first command that failed."""
    message: str = ""
    """The server's error message, or how the connection broke."""
    is_lost: bool = False
    """Whether the connection broke, or the deadline passed, before everything was answered."""

    def has_failed(self) -> bool:
        return self.is_lost or bool(self.state)

    def may_be_done(self, count: int) -> bool:
        """Whether none of the first `count` commands is known to have failed: they may have taken effect."""
        return all(result.status != pq.ExecStatus.FATAL_ERROR for result in self.results[:count])

    def rows(self, index: int) -> list[Row]:
        return _rows(self.results[index])

    def tag(self, index: int) -> str:
        """The server's command tag, such as COMMIT; empty if that command was not answered."""
        if index >= len(self.results):
            return ""
        return (self.results[index].command_status or b"").decode()


class ConnectFailed(Exception):
    """No host accepted a connection. libpq has a message for that, and no code."""

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
    """Connect with libpq's non-blocking calls. Returns why that failed, or an empty string."""
    began = time.monotonic()
    status = pq.PollingStatus.WRITING if pgconn.status != pq.ConnStatus.BAD else pq.PollingStatus.FAILED
    while status != pq.PollingStatus.FAILED:
        events = select.poll()  # made anew each time, because libpq may have opened another socket
        events.register(pgconn.socket, select.POLLIN if status == pq.PollingStatus.READING else select.POLLOUT)
        if not events.poll(max(deadline - time.monotonic(), 0.0) * 1000):
            return f"no answer within {deadline - began:.3g} s from {pgconn.host.decode()}"
        status = pq.PollingStatus(pgconn.connect_poll())
        if status == pq.PollingStatus.OK:
            return ""
    return _one_line(pgconn.get_error_message()) or "connection failed"


class Wire:
    """A connection that this object owns and closes. One thread uses it at a time."""

    def __init__(self, pgconn: PGconn, *, prepares: bool) -> None:
        """prepares: False behind a connection pooler, whose sessions keep no prepared statements."""
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
        """Whether the connection works, with no transaction open and no answer outstanding."""
        return (
            not self._is_waiting
            and self._pgconn.status == pq.ConnStatus.OK
            and self._pgconn.transaction_status == pq.TransactionStatus.IDLE
        )

    @property
    def is_stale(self) -> bool:
        """Whether the socket has unread input. Between two calls of `run` that means that the server has closed it."""
        return bool(self._events.poll(0))

    def fileno(self) -> int:
        return self._fileno

    def close(self) -> None:
        self._pgconn.finish()

    def run(self, commands: Sequence[Command], deadline: float) -> Reply:
        """Send the commands together and wait for their answers, until the deadline on `time.monotonic()`."""
        reply, began = Reply(), time.monotonic()
        self._is_waiting = True  # stays True if an interrupt leaves this method, so that the connection is closed
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
            reply.message = f"no answer within {deadline - began:.3g} s"
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
        """Queue the commands. Returns an item for each expected answer: the label if it answers the preparation of a
        statement, otherwise empty."""
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
        # The server stops reading while its own answers cannot be sent, so read them while sending.
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
            if result is None:  # ends the answer to one command; two in a row mean that there are no more answers
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
                reply.is_lost = not reply.state  # an error without a SQLSTATE is one of libpq, not of the server
            label = next(awaited, b"")
            if not label:
                reply.results.append(result)
            elif result.status == pq.ExecStatus.COMMAND_OK:
                self._prepared.add(label)

    def _wait(self, deadline: float) -> int:
        """Wait until the socket has events; returns them. Raises TimeoutError at the deadline."""
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
