"""What `SqlRegistry` needs of any database: sessions from a bounded pool of connections, and translated errors.

A transaction has two phases. `begin` opens it and runs the statements that lock and read; `commit` runs the ones that
write, and commits. A driver that pipelines statements needs one round trip for each phase.

Invariants:
- A driver's errors are translated below this interface. Callers see `pxrs.errors` and the two classes below, which
  mean that nothing was written: after `ConnectionLost` the caller retries once on a new connection, after
  `TransactionAborted` up to `ATTEMPTS_MAX` times.
- Only `commit` and `commit_at_once` raise OutcomeUnknown, and only if COMMIT was sent and no answer came.
- The number of connections is bounded for each pool. Renewals of leases have a pool of their own, so that they do not
  wait for connections that commits use.
- A connection is returned to its pool only if it works and is in no transaction; otherwise it is closed, and the server
  rolls back.
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

PoolName = Literal["work", "leases"]
CONNECTIONS_MAX: Final[dict[PoolName, int]] = {"work": 8, "leases": 2}

Row = tuple[Any, ...]


class ConnectionLost(RegistryUnavailable):
    """The connection broke before COMMIT was sent. The server rolls back; a new connection may work."""


class TransactionAborted(RegistryUnavailable):
    """The database rolled this transaction back because of another one (a deadlock, say). It may be tried again."""


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
        """Run the statements and commit in one round trip; the rows of each. Returns None, and has written nothing, if
        a statement has not found the version that it expects, or if this kind of session has no such round trip.
        Raises OutcomeUnknown if the answer does not come."""
        return None

    @abstractmethod
    def rollback(self) -> None: ...

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether the connection works and is in no transaction, so that another operation may use it."""


class Gate(ABC):
    """Lets a `Poller` find out cheaply whether anything was written since its last round."""

    @abstractmethod
    def look(self) -> tuple[bool, bool]:
        """Since the last look: whether anything was written at all, and whether any entry was."""

    @abstractmethod
    def close(self) -> None: ...


class _Pool:
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
            # The one that was returned last, so that few connections are opened under a small load.
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
            if generation != self._generation:  # another thread called `drop` after the comparison above
                self._close_idle()
        finally:
            self._slots.release()

    def drop(self) -> None:
        """Close the idle connections now, and those in use when they are returned."""
        self._generation += 1
        self._close_idle()

    def _close_idle(self) -> None:
        while self._idle:
            with suppress(IndexError):
                self._idle.pop().close()


class Database(ABC):
    """One database, reached through bounded pools of connections."""

    dialect: DialectName
    is_read_only = False
    """This process is known to have no permission to write."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url = url
        self.timeout = timeout
        self.statements: Statements = statements_for(self.dialect)
        self._pools: dict[PoolName, _Pool] = {
            pool: _Pool(self._connect_in_time, size) for pool, size in CONNECTIONS_MAX.items()
        }
        self._is_closed = False

    @contextmanager
    def session(self, deadline: float, pool: PoolName = "work") -> Iterator[Session]:
        """A connection of the pool, until the deadline on `time.monotonic()`."""
        try:
            connection, generation = self._pools[pool].take(deadline)
        except TimeoutError as error:
            raise RegistryUnavailable(
                f"{self.url}: all connections of this process were busy for {self.timeout:g} s (`timeout` of the "
                "address): try again, give a longer timeout, or use fewer threads"
            ) from error
        session = self._session(connection, deadline)
        try:
            yield session
        except Exception:
            if session.in_transaction:
                session.rollback()
            raise
        finally:
            is_idle = session.is_idle and not self._is_closed
            self._pools[pool].give_back(connection, generation, is_idle=is_idle)

    def drop_connections(self) -> None:
        """Close all connections: after a restart of the server none of them works."""
        for pool in self._pools.values():
            pool.drop()

    def close(self) -> None:
        self._is_closed = True
        self.drop_connections()

    # What each database implements.

    @abstractmethod
    def _connect(self, timeout: float) -> Any:
        """A new connection of the driver, ready for use; raises errors of `pxrs.errors`."""

    @abstractmethod
    def _session(self, connection: Any, deadline: float) -> Session:
        """A session on the connection that keeps the deadline."""

    @abstractmethod
    def create_tables(self, deadline: float) -> None:
        """Create the tables that are missing. Other processes may be doing the same at the same time."""

    def prepare(self, create: bool) -> None:
        """Check that the tables exist with the layout of this version; create them if they are missing and `create`."""
        deadline = time.monotonic() + self.timeout
        layout = self._layout(deadline)
        if layout is None:
            if not create:
                raise SchemaMissing(
                    f"{self.url}: the registry's tables do not exist; run what `pxrs registry ddl --dialect "
                    f"{self.dialect}` prints"
                )
            self.create_tables(deadline)
            layout = self._layout(deadline)
        if layout != str(LAYOUT):
            raise SchemaMissing(
                f"{self.url}: the tables have layout {layout}, but this version of pxrs supports layout {LAYOUT}"
            )

    def check_writable(self) -> None:  # noqa: B027 - a server refuses the write itself
        """Raise RegistryNotWritable if it is known that this process may not write."""

    def are_leases_void(self, session: Session) -> bool:
        """Whether every lease is over, whatever its expiry says, because the machine was restarted since."""
        return False

    def gate(self) -> Gate | None:
        """A new `Gate`; None if this database has no cheap way to find out."""
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
            raise RegistryUnavailable(
                f"{self.url}: could not connect within {self.timeout:g} s (`timeout` of the address): check that the "
                "database is reachable, or give a longer timeout"
            )
        return self._connect(left)


class Inherited:
    """Mixed into a driver's connection: a forked child never closes its copy of the connection.

    Closing it would end the parent's session, over the socket that both share, or drop the parent's file locks.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._made_by = os.getpid()
        super().__init__(*arguments, **options)

    def __del__(self) -> None:
        if getattr(self, "_made_by", None) != os.getpid():
            # Add a reference that is never released, so that the child's copy is not deallocated.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            return
        finalize: Callable[[], None] | None = getattr(super(), "__del__", None)
        if finalize is not None:
            finalize()
