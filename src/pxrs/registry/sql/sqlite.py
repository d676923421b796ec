"""The registry in a SQLite file, shared by the processes of one machine.

SQLite allows one writer at a time. A transaction begins by taking the write lock (`BEGIN IMMEDIATE`), so nothing that
it has read can change before it commits. Readers do not block writers (write-ahead log). A commit is on disk before it
is acknowledged (`synchronous=FULL`).

Expiries of leases are readings of the machine's clock, which counts from the boot of the machine. So the table of
metadata holds the id of the boot. The first process that opens the file after another boot removes all leases and
their keys, because the processes that held the leases have ended.

The file may be removed, moved or replaced while it is open. SQLite would go on writing to the old file, which other
processes cannot open any more, so commits would be acknowledged and lost. So each session compares the inodes of the
file and of its write-ahead log with those that were opened: before it reads, before COMMIT, and after COMMIT before the
commit is acknowledged.

A process that may read the file, and may write neither the file nor its folder, can get, scan and watch. SQLite allows
this only while the write-ahead log and its index exist: from when the first process opens the file until the last one
has closed it, and also after the last one was killed. Otherwise opening raises AccessDenied.

On failure: a process that is stopped inside a transaction keeps the write lock. Others wait as long as the address
allows and then raise RegistryUnavailable; nothing of theirs was written.
"""

from __future__ import annotations

import errno
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from pxrs import disk
from pxrs.clock import Clock, boot_id
from pxrs.errors import (
    AccessDenied,
    InvalidUrl,
    OutcomeUnknown,
    RegistryCorrupt,
    RegistryError,
    RegistryNotWritable,
    RegistryReplaced,
    RegistryUnavailable,
    SchemaMissing,
    StorageFull,
    UnsupportedPlatform,
    UsedAfterFork,
)
from pxrs.registry.address import Address
from pxrs.registry.contract import Registry
from pxrs.registry.sql.database import TIMEOUT_S, Database, Gate, Inherited, Row, Session
from pxrs.registry.sql.registry import open_registry
from pxrs.registry.sql.schema import Schema
from pxrs.registry.sql.statements import Call, Statement
from pxrs.registry.sql.watching import Poller

POLL_S: Final = 0.05
# SQLite's own wait for the write lock is kept short and is repeated by `SqliteSession.run`. SQLite pauses longer the
# longer it has waited, so under load the session that has waited longest, perhaps to renew a lease, would come last.
_BUSY_MS: Final = 4


def open(address: Address, clock: Clock) -> Registry:
    database = SqliteDatabase(address, clock)
    poll_s = address.seconds("poll", POLL_S)
    return open_registry(database, address, clock, watcher=lambda registry: Poller(registry, poll_s))


T = TypeVar("T")


Identity = tuple[int, int]
"""The device and the inode of a file."""


class _Connection(Inherited, sqlite3.Connection):
    log: Identity
    """The write-ahead log that this connection has open. It lives at least as long as the connection."""
    log_path: str
    """Where SQLite keeps that log."""


# SQLite records in memory which files the process has open and which locks it has on them. A forked child inherits the
# record, but not the locks: it would write without a lock and could lose commits that it has acknowledged. So the child
# refuses a file that was open when the process was forked.
_open_files: dict[Identity, tuple[int, int]] = {}
"""(device, inode) -> the process that has it open, and how often."""
_open_files_lock = threading.Lock()


def _identity(path: str) -> Identity:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _check_not_inherited(path: str) -> None:
    if os.path.exists(path) and _open_files.get(_identity(path), (os.getpid(), 0))[0] != os.getpid():
        raise UsedAfterFork(
            f"{path} was open when this process was forked, and SQLite cannot be used in the child: start processes "
            "with 'spawn' or 'forkserver', or fork before the file is opened"
        )


def _hold(path: str) -> Identity:
    identity = _identity(path)
    with _open_files_lock:
        _, count = _open_files.get(identity, (0, 0))
        _open_files[identity] = (os.getpid(), count + 1)
    return identity


def _let_go(identity: Identity) -> None:
    with _open_files_lock:
        pid, count = _open_files[identity]
        if pid == os.getpid() and count > 1:
            _open_files[identity] = (pid, count - 1)
        elif pid == os.getpid():
            del _open_files[identity]


class SqliteDatabase(Database):
    dialect = "sqlite"

    def __init__(self, address: Address, clock: Clock) -> None:
        address.refuse_unknown_options(("create", "timeout", "poll"))
        super().__init__(address.text, address.seconds("timeout", TIMEOUT_S))
        self._clock = clock
        self._creates = address.flag("create", True)
        self.path = str(_path(address, self._creates))
        self._refusal = disk.write_refusal(self.path)
        self.is_read_only = self._refusal is not None
        self._held: Identity | None = None
        """The file that the first connection has opened."""

    def close(self) -> None:
        super().close()
        held, self._held = self._held, None
        if held is not None:
            _let_go(held)

    def prepare(self, create: bool) -> None:
        super().prepare(create and not self.is_read_only)
        if not self.is_read_only:
            self._forget_other_boots()

    def check_writable(self) -> None:
        if self._refusal is not None:
            raise _not_writable(self.url, self._refusal)

    def are_leases_void(self, session: Session) -> bool:
        """For a process that may not remove the leases of another boot, see `_forget_other_boots`."""
        return session.read(Call(self.statements.read_meta, {"the_name": "boot"})) != [(boot_id(),)]

    def create_tables(self, deadline: float) -> None:
        schema = Schema("sqlite")
        insert = self.statements.insert_meta
        with self.session(deadline) as session:
            assert isinstance(session, SqliteSession)
            session.begin(())
            session.run(lambda c: [c.execute(statement) for statement in schema.create(if_not_exists=True)])
            session.commit([Call(insert, {"the_name": n, "the_value": v}) for n, v in schema.first_rows().items()])

    def gate(self) -> Gate:
        return _Gate(self)

    def _forget_other_boots(self) -> None:
        """Remove the leases of another boot of this machine, or of another machine, and their keys."""
        statements = self.statements
        boot = {"the_name": "boot"}
        with self.session(time.monotonic() + self.timeout) as session:
            if session.read(Call(statements.read_meta, boot)) == [(boot_id(),)]:
                return
            # Read again under the write lock: another process may have opened the file at the same time.
            if session.begin([Call(statements.read_meta, boot)]) == [[(boot_id(),)]]:
                session.rollback()
                return
            session.commit(
                [
                    Call(statements.drop_bound_entries, {}),
                    Call(statements.drop_leases, {}),
                    Call(statements.insert_meta, {**boot, "the_value": boot_id()}),
                    Call(statements.write_meta, {**boot, "the_value": boot_id()}),
                ]
            )

    def check_in_place(self, connection: _Connection | None = None) -> None:
        """Raise RegistryReplaced unless the file, and the connection's log, are those that are open."""
        if self._held is None:
            return  # nothing is open yet
        path = self.path
        try:
            if _identity(path) == self._held:
                if connection is None:
                    return
                path = connection.log_path
                if _identity(path) == connection.log:
                    return
        except (FileNotFoundError, NotADirectoryError):
            pass
        except PermissionError as error:
            raise AccessDenied(f"{self.url}: {disk.explain(error, path)}") from error
        except OSError as error:
            raise RegistryUnavailable(f"{self.url}: {disk.explain(error, path)}") from error
        raise RegistryReplaced(
            f"{self.url}: {path} was removed, moved or replaced by another file while it was open; put the original "
            "back, or open the registry again to use what is there now"
        )

    def _connect(self, timeout: float) -> _Connection:
        _check_not_inherited(self.path)
        self.check_in_place()  # otherwise SQLite would create a new, empty file
        mode = "rwc" if self._creates and self._held is None else "rw"
        if self.is_read_only:
            mode = "ro"
        until = time.monotonic() + timeout
        while True:
            connection = None
            try:
                connection = sqlite3.connect(
                    f"{Path(self.path).as_uri()}?mode={mode}",
                    uri=True,
                    isolation_level=None,
                    check_same_thread=False,
                    timeout=_BUSY_MS / 1000,
                    factory=_Connection,
                )
                journal = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
                connection.execute("PRAGMA synchronous=FULL")
                connection.execute("SELECT count(*) FROM sqlite_master").fetchone()  # opens the write-ahead log
                # SQLite follows symbolic links: the log is beside the file that the path leads to.
                file = connection.execute("PRAGMA database_list").fetchone()[2]
                break
            except sqlite3.Error as error:
                if connection is not None:
                    connection.close()
                if not _is_busy(error) or time.monotonic() > until:
                    raise self._refused(error) from error
                time.sleep(0.001)
        if journal != "wal":
            connection.close()
            raise UnsupportedPlatform(f"{self.url}: this file system does not allow SQLite's write-ahead log")
        try:
            connection.log_path = f"{file}-wal"
            connection.log = _identity(connection.log_path)
            if self._held is None:
                self._held = _hold(self.path)
            self.check_in_place(connection)
        except OSError as error:
            connection.close()
            raise RegistryUnavailable(
                f"{self.url}: the file was removed while this process opened it; try again: {error}"
            ) from error
        except RegistryError:
            connection.close()
            raise
        return connection

    def _session(self, connection: Any, deadline: float) -> SqliteSession:
        return SqliteSession(self, connection, deadline)

    def now_ms(self) -> int:
        return int(self._clock.now() * 1000)

    def translate(self, error: sqlite3.Error) -> RegistryError:
        """What an error means for a call that has written nothing."""
        code, text = _code(error), f"{self.url}: {error}"
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return RegistryUnavailable(f"{self.url}: another process kept it locked for {self.timeout:g} s")
        if code == sqlite3.SQLITE_FULL:
            return StorageFull(text)
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
            return AccessDenied(text)
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return RegistryCorrupt(self.path, str(error))
        if code == sqlite3.SQLITE_ERROR and "no such table" in str(error):
            return SchemaMissing(text)
        if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM):
            return RegistryUnavailable(text)
        return RegistryError(text)

    def _refused(self, error: sqlite3.Error) -> RegistryError | InvalidUrl:
        code = _code(error)
        if code == sqlite3.SQLITE_NOTADB:
            return InvalidUrl(f"{self.url}: the file is not a SQLite database")
        if self.is_read_only and code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            return AccessDenied(
                f"{self.url}: without write permission {self.path} can be read only while {self.path}-wal and "
                f"{self.path}-shm exist, which SQLite removes when the last process closes the file: keep a process "
                "with write permission running, or run this one as a user that may write"
            )
        if code == sqlite3.SQLITE_CANTOPEN:
            if not os.path.exists(self.path) and not self._creates:
                return SchemaMissing(f"{self.url}: the file does not exist and was not to be created")
            return AccessDenied(f"{self.url}: {error}")
        return self.translate(error)


class SqliteSession(Session):
    def __init__(self, database: SqliteDatabase, connection: _Connection, deadline: float) -> None:
        self._database, self._connection, self._deadline = database, connection, deadline

    def read(self, call: Call) -> list[Row]:
        self._database.check_in_place(self._connection)
        return self.run(lambda c: c.execute(call.statement.text, self._values(*call)).fetchall())

    def write(self, call: Call) -> int:
        self.begin(())
        changed: int = self.run(lambda c: c.execute(call.statement.text, self._values(*call)).rowcount)
        try:
            self.commit(())
        except OutcomeUnknown as error:
            raise RegistryUnavailable(str(error)) from error
        return changed

    def begin(self, calls: Sequence[Call]) -> list[list[Row]]:
        self.run(lambda c: c.execute("BEGIN IMMEDIATE"))
        self.in_transaction = True
        self._database.check_in_place(self._connection)
        return self.ask(calls)

    def ask(self, calls: Sequence[Call]) -> list[list[Row]]:
        return self.run(lambda c: [c.execute(call.statement.text, self._values(*call)).fetchall() for call in calls])

    def commit(self, calls: Sequence[Call]) -> None:
        self.ask(calls)
        self._database.check_in_place(self._connection)
        self.in_transaction = False
        try:
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            # If the disk is full, the last page of the commit is not in the log. After any other error it may be there.
            if _code(error) == sqlite3.SQLITE_FULL:
                raise self._database.translate(error) from error
            raise OutcomeUnknown(f"{self._database.url}: COMMIT failed: {error}") from error
        try:
            self._database.check_in_place(self._connection)
        except RegistryError as error:  # whatever it is: COMMIT may have taken effect
            raise OutcomeUnknown(f"{error}; a commit was in progress at that moment") from error

    def rollback(self) -> None:
        self.in_transaction = False
        if self._connection.in_transaction:  # SQLite rolls back by itself after some errors
            try:
                self._connection.execute("ROLLBACK")
            except sqlite3.Error:
                return  # the connection is not idle, so it is closed, which rolls back

    @property
    def is_idle(self) -> bool:
        return not self._connection.in_transaction

    def run(self, action: Callable[[sqlite3.Connection], T]) -> T:
        """Call `action`; while another process has the lock, call it again, until the deadline."""
        while True:
            try:
                return action(self._connection)
            except sqlite3.Error as error:
                if self.in_transaction or not _is_busy(error) or time.monotonic() > self._deadline:
                    raise self._database.translate(error) from error
            time.sleep(random.uniform(0.0002, 0.002))

    def _values(self, statement: Statement, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**values, "now_ms": self._database.now_ms()} if statement.is_timed else values


class _Gate(Gate):
    """SQLite counts, for each connection, the commits of other connections. The last version in the table of metadata
    tells whether any of them wrote entries."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database
        self._connection = database._connect(database.timeout)
        self._seen: tuple[object, object] = (None, None)

    def look(self) -> tuple[bool, bool]:
        self._database.check_in_place(self._connection)
        try:
            writes = self._connection.execute("PRAGMA data_version").fetchone()
            if writes == self._seen[0]:
                return False, False
            text = self._database.statements.next_version.text
            before, version = self._seen[1], self._connection.execute(text).fetchone()
        except sqlite3.Error as error:
            raise self._database.translate(error) from error
        self._seen = writes, version
        return True, version != before

    def close(self) -> None:
        self._connection.close()


def _path(address: Address, creates: bool) -> Path:
    """The file. Made absolute, because a program may change its directory before the next connection is opened."""
    if not address.rest.startswith("///"):
        raise InvalidUrl(f"{address.text}: write sqlite:///FILE, or sqlite:////FILE for an absolute path")
    name = address.rest[3:]
    if not name or name == ":memory:":
        raise InvalidUrl(f"{address.text}: a file is needed; for a registry in memory write memory:")
    path = Path(name).absolute()
    try:
        if path.is_dir():
            raise InvalidUrl(f"{address.text}: that is a directory, not a file")
        if not path.parent.is_dir():
            raise InvalidUrl(f"{address.text}: the directory {path.parent} does not exist")
    except PermissionError as error:
        raise AccessDenied(f"{address.text}: {disk.explain(error, path)}") from error
    refusal = disk.write_refusal(path if path.exists() else path.parent)
    if refusal is not None and not path.exists():
        raise _not_writable(address.text, refusal)
    if not disk.may(path if path.exists() else path.parent, os.R_OK):
        refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        raise AccessDenied(f"{address.text}: {disk.explain(refused)}")
    if refusal is not None and disk.may(path.parent, os.W_OK):
        # SQLite would create a write-ahead log that belongs to this user, which other users could not write to.
        raise _not_writable(address.text, refusal)
    if not creates and not path.exists():
        raise SchemaMissing(f"{address.text}: the file does not exist and was not to be created")
    disk.refuse_network_file_system(path.parent)
    return path


def _not_writable(url: str, refusal: OSError) -> RegistryNotWritable:
    lacking = disk.denied(refusal)
    assert lacking is not None, "it is one of `disk.write_refusal`"
    return RegistryNotWritable(lacking.path, f"{url}: {lacking.what}")


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary result code."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def _is_busy(error: sqlite3.Error) -> bool:
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
