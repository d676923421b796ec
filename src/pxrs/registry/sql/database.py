"""What the registry asks of a database, whichever it is: sessions out of a bounded pool, and errors with a meaning.

A transaction has two phases. `begin` opens it and runs the statements that lock and read; `commit` runs the ones that
write, and ends it. That is all the registry needs, and what a driver can send in two round trips.

Invariants:
- An error is translated here, at the edge. Above it there are `pxrs.errors` and the two below, which mean "nothing
  was written": `ConnectionLost`, worth one try on a new connection, and `TransactionAborted`, worth a few more.
- Only `commit` raises OutcomeUnknown, and only once the word COMMIT was sent and no answer came.
- Connections are bounded. Renewals of leases have a lane of their own, so that commits cannot keep them waiting.
- A connection goes back to its lane only if it is idle and well; else it is closed, and the server rolls back.
- A connection belongs to the process that made it: a forked child neither uses nor closes it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, Literal

from pxrs.errors import RegistryUnavailable, SchemaMissing
from pxrs.registry.sql.schema import LAYOUT, DialectName
from pxrs.registry.sql.statements import Call, Statements, statements_for

TIMEOUT_S: Final = 10.0
"""How long an operation may take unless the address says otherwise."""

Lane = Literal["work", "leases"]
CONNECTIONS_MAX: Final[dict[Lane, int]] = {"work": 8, "leases": 2}

Row = tuple[Any, ...]


class ConnectionLost(RegistryUnavailable):
    """The connection broke before COMMIT was sent. The server rolls back; a new connection may work."""


class TransactionAborted(RegistryUnavailable):
    """The database gave this transaction up in favour of another, and rolled it back. It may be tried again."""


class Session(ABC):
    """One connection for the length of one operation. Leaving it without `commit` rolls back."""

    in_transaction = False

    @abstractmethod
    def read(self, call: Call) -> list[Row]:
        """The rows of one statement outside a transaction."""

    @abstractmethod
    def write(self, call: Call) -> int:
        """Run and commit one statement that may safely happen twice; returns how many rows it changed."""

    @abstractmethod
    def begin(self, calls: Sequence[Call]) -> list[list[Row]]:
        """Open a transaction and run the statements in this order; the rows of each."""

    @abstractmethod
    def ask(self, calls: Sequence[Call]) -> list[list[Row]]:
        """Run more statements in the open transaction."""

    @abstractmethod
    def commit(self, calls: Sequence[Call]) -> None:
        """Run the statements and commit. OutcomeUnknown if the answer to COMMIT does not come."""

    def commit_at_once(self, calls: Sequence[Call]) -> list[list[Row]] | None:
        """Run the statements as a transaction, sent with its end; the rows of each. None if one has not found what it
        expects, or this session cannot do that: nothing was written. OutcomeUnknown if the answer does not come."""
        return None

    @abstractmethod
    def rollback(self) -> None: ...

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether the connection is well and in no transaction, so that another operation may have it."""


class Gate(ABC):
    """Tells a poller cheaply whether there can be anything new."""

    @abstractmethod
    def look(self) -> tuple[bool, bool]:
        """Since the last look: whether anything was written at all, and whether any entry was."""

    @abstractmethod
    def close(self) -> None: ...


class _Lane:
    """A bounded stack of connections. Taking one waits, or connects, no longer than the caller's deadline."""

    def __init__(self, connect: Callable[[float], Any], size: int) -> None:
        self._connect = connect
        self._slots = threading.BoundedSemaphore(size)
        self._idle: list[Any] = []
        self._generation = 0

    def take(self, deadline: float) -> tuple[Any, int]:
        """A connection, and the generation to give it back with; TimeoutError if all are busy."""
        if not self._slots.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            raise TimeoutError
        generation = self._generation
        try:
            # The last one given back: a load that needs few connections opens few.
            return self._idle.pop(), generation
        except IndexError:
            pass
        try:
            return self._connect(deadline), generation
        except BaseException:
            self._slots.release()
            raise

    def give_back(self, connection: Any, generation: int, *, is_idle: bool) -> None:
        try:
            if not is_idle or generation != self._generation:
                connection.close()
                return
            self._idle.append(connection)
            if generation != self._generation:  # dropped by another thread at this very moment
                self._close_idle()
        finally:
            self._slots.release()

    def drop(self) -> None:
        """Close what is idle, and what is busy when it is given back."""
        self._generation += 1
        self._close_idle()

    def _close_idle(self) -> None:
        while self._idle:
            with suppress(IndexError):
                self._idle.pop().close()


class Database(ABC):
    """One database, reached through bounded lanes of connections."""

    dialect: DialectName
    is_read_only = False
    """This process is known to have no permission to write."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url = url
        self.timeout = timeout
        self.statements: Statements = statements_for(self.dialect)
        self._lanes: dict[Lane, _Lane] = {
            lane: _Lane(self._connect_in_time, size) for lane, size in CONNECTIONS_MAX.items()
        }
        self._is_closed = False

    @contextmanager
    def session(self, deadline: float, lane: Lane = "work") -> Iterator[Session]:
        """A connection of the lane, until the deadline on `time.monotonic()`."""
        try:
            connection, generation = self._lanes[lane].take(deadline)
        except TimeoutError as error:
            raise RegistryUnavailable(f"{self.url}: all connections were busy for {self.timeout:g} s") from error
        session = self._session(connection, deadline)
        try:
            yield session
        except Exception:
            if session.in_transaction:
                session.rollback()
            raise
        finally:
            is_idle = session.is_idle and not self._is_closed
            self._lanes[lane].give_back(connection, generation, is_idle=is_idle)

    def drop_connections(self) -> None:
        """Let go of all connections: after a restart of the server they are all dead."""
        for lane in self._lanes.values():
            lane.drop()

    def close(self) -> None:
        self._is_closed = True
        self.drop_connections()

    # What each database does in its own way.

    @abstractmethod
    def _connect(self, timeout: float) -> Any:
        """A new connection of the driver, ready for use; raises errors of `pxrs.errors`."""

    @abstractmethod
    def _session(self, connection: Any, deadline: float) -> Session:
        """A session on the connection that keeps the deadline."""

    @abstractmethod
    def create_tables(self, deadline: float) -> None:
        """Make what is missing, also when other processes do the same at this moment."""

    def prepare(self, create: bool) -> None:
        """Check that the tables are there and as we know them; make them if they are not and we may."""
        deadline = time.monotonic() + self.timeout
        layout = self._layout(deadline)
        if layout is None:
            if not create:
                raise SchemaMissing(
                    f"{self.url}: no tables; run what `pxrs registry ddl --dialect {self.dialect}` prints"
                )
            self.create_tables(deadline)
            layout = self._layout(deadline)
        if layout != str(LAYOUT):
            raise SchemaMissing(f"{self.url}: the tables have layout {layout}, and this version of pxrs knows {LAYOUT}")

    def check_writable(self) -> None:  # noqa: B027 - a server tells by its answer
        """Raise RegistryNotWritable if it is known that this process may not write."""

    def are_leases_void(self, session: Session) -> bool:
        """Whether no lease counts, whatever its expiry says: all are of another start of the machine."""
        return False

    def gate(self) -> Gate | None:
        """What lets a poller skip a round; None where there is no such thing."""
        return None

    def _layout(self, deadline: float) -> str | None:
        try:
            with self.session(deadline) as session:
                rows = session.read(Call(self.statements.read_meta, {"the_name": "layout"}))
        except SchemaMissing:
            return None
        return str(rows[0][0]) if rows else None

    def _connect_in_time(self, deadline: float) -> Any:
        left = deadline - time.monotonic()
        if left <= 0:
            raise RegistryUnavailable(f"{self.url}: no connection within {self.timeout:g} s")
        return self._connect(left)


class Inherited:
    """Mixed into a driver's connection: the copy that a fork makes is never closed.

    Closing it would end the parent's session, over the socket that both share, or drop the parent's file locks.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._made_by = os.getpid()
        super().__init__(*arguments, **options)

    def __del__(self) -> None:
        if getattr(self, "_made_by", None) != os.getpid():
            # A reference that nobody ever gives back: the child's copy is left alone until the child ends.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            return
        finalize: Callable[[], None] | None = getattr(super(), "__del__", None)
        if finalize is not None:
            finalize()
