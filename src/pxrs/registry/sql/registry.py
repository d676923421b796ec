"""The registry on a SQL database: SQLite, PostgreSQL or Oracle.

Linearizable because every commit locks all rows that it names before it looks at them (see `commit`), and a read is
one statement. READ COMMITTED is enough for that, and all that is asked for.

A lease ends by a write. An operation that finds a key whose lease is over by the database's clock first ends the lease,
in a transaction of its own that deletes the lease's row and its keys, and then starts again. So a lease ends once, for
all processes, and a database clock that is set back cannot revive a lease that some process has seen ended.

A process that may only read cannot end a lease. It leaves the keys of leases that are over out of what it reads.

A clock that is set back also leaves living leases with an expiry too far ahead. An operation that finds such a lease
sets its expiry to now + ttl: the keys of a dead holder vanish after one more ttl at most, and a living holder has a
whole ttl to renew its lease.

On failure: every operation is bounded by the address's `timeout`. If a connection breaks before COMMIT was sent, it is
replaced and the operation is repeated once; after that RegistryUnavailable is raised. If the reply to COMMIT was lost,
OutcomeUnknown is raised, and nothing is repeated.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol, TypeVar

from pxrs.clock import Clock
from pxrs.errors import AccessDenied, LeaseExpired, RegistryUnavailable
from pxrs.registry.address import Address
from pxrs.registry.contract import Commit, Entry, Limits, Registry, Snapshot, SqlPlace
from pxrs.registry.lease import Lease, id_of, new_secret, not_attached
from pxrs.registry.limit import seconds_left
from pxrs.registry.sql.commit import CommitPlan, LeasesDue
from pxrs.registry.sql.database import ConnectionLost, Database, Row, TransactionAborted
from pxrs.registry.sql.lease import TRUSTED, LeaseTable, SqlLease
from pxrs.registry.sql.schema import DialectName
from pxrs.registry.sql.statements import ALIVE, OVER, Call, Statement, key_range
from pxrs.registry.watch import PrefixWatch

log = logging.getLogger(__name__)

LIMITS: Final = Limits(commit_keys_max=1024, commit_bytes_max=8 << 20, value_bytes_max=1 << 20)
ATTEMPTS_MAX: Final = 40
DUE_LEASES_MAX: Final = 64
"""How many leases one sweep ends or corrects; if there are more, the next sweep is due at once."""
UNENDED_S: Final = 1.0
"""How often a process that may not end leases looks for those that are over."""

T = TypeVar("T")


class Watcher(Protocol):
    """Wakes watches; one for each registry."""

    def add(self, watches: Sequence[PrefixWatch]) -> None:
        """Return when every later change under these prefixes will wake them."""

    def remove(self, watch: PrefixWatch) -> None: ...

    def note_read(self, entries: Iterable[Entry]) -> None:
        """A caller of this handle has read these entries."""

    def close(self) -> None: ...


def open_registry(
    database: Database,
    address: Address,
    clock: Clock,
    *,
    watcher: Callable[[SqlRegistry], Watcher],
    channel: str = "",
) -> SqlRegistry:
    """Make the tables ready, then the handle; close the database if either fails."""
    try:
        database.prepare(address.flag("create", True))
        return SqlRegistry(database, address.namespace, clock=clock, channel=channel, watcher=watcher)
    except (ConnectionLost, TransactionAborted) as error:
        database.close()
        raise RegistryUnavailable(str(error)) from error
    except BaseException:
        database.close()
        raise


class SqlRegistry(Registry):
    """A handle to the registry of one namespace in a database."""

    # Over the limit: a method for each operation of the contract, and those that `borrowed` and the watchers need.

    limits = LIMITS

    def __init__(
        self,
        database: Database,
        namespace: str,
        *,
        clock: Clock,
        channel: str,
        watcher: Callable[[SqlRegistry], Watcher],
    ) -> None:
        """`channel` is where notifications go, or empty if there are none. Takes the database over."""
        super().__init__(database.url, clock=clock)
        self.database, self.timeout_s = database, database.timeout
        self._namespace = namespace
        self._channel = channel
        self.statements = database.statements
        """All statements, for the dialect of this database."""
        self.watched = self._watches
        """The watches that the watcher wakes."""
        self._table = LeaseTable(database, namespace, channel)
        self._may_end_leases = not database.is_read_only
        """False once this process was found not to have the permission for it."""
        self._over: frozenset[str] = frozenset()
        """The leases that the last sweep of a process without that permission found to be over."""
        self._watcher = watcher(self)

    # Reading

    def _get(self, key: str) -> Entry | None:
        call = self.call(self.statements.get, key=key)

        def attempt(deadline: float) -> Entry | None:
            for value, version, lease, state in self._read(call, deadline):
                if self._is_over(lease, state, deadline):
                    return None
                return Entry(key, bytes(value or b""), version)
            return None

        entry = self._patiently(attempt, is_reading=True)
        if entry is not None:
            self._watcher.note_read((entry,))
        return entry

    def _scan(self, prefix: str, after: str | None, limit: int | None) -> list[Entry]:
        entries = self._patiently(lambda deadline: self._try_scan(prefix, after, limit, deadline), is_reading=True)
        self._watcher.note_read(entries)
        return entries

    def _try_scan(self, prefix: str, after: str | None, limit: int | None, deadline: float) -> list[Entry]:
        found: list[Entry] = []
        while True:
            bounds, wanted = key_range(prefix, after), None if limit is None else min(limit - len(found), 2**31 - 1)
            if wanted is None:
                call = self.call(self.statements.scan, **bounds)
            else:
                call = self.call(self.statements.scan_some, limit=wanted, **bounds)
            rows = self._read(call, deadline)
            due = {lease for _, _, _, lease, state in rows if state != ALIVE}
            if due and self._may_end_leases:
                raise LeasesDue(due)
            is_void = not self._may_end_leases and any(row[3] is not None for row in rows) and self._is_void(deadline)
            found += [
                Entry(key, bytes(value or b""), version)
                for key, value, version, lease, state in rows
                if lease is None or not (is_void or state == OVER)
            ]
            if wanted is None or len(rows) < wanted or len(found) == limit:
                return found
            after = rows[-1][0]  # some of them were left out: there may be more behind them

    def _snapshot(self, is_written_once: Callable[[str], bool]) -> Snapshot:
        """One statement. A statement sees one moment: on PostgreSQL and Oracle the moment of its beginning, also under
        READ COMMITTED; on SQLite that of the transaction that a statement alone is."""
        rows = self._patiently(
            lambda deadline: self._read(self.call(self.statements.scan, **key_range("")), deadline), is_reading=True
        )
        entries = tuple(Entry(key, bytes(value or b""), version) for key, value, version, lease, _ in rows if not lease)
        last = max((entry.version for entry in entries), default=0)
        return Snapshot(entries, f"one transaction of {self.dialect}, last version {last}")

    def _is_over(self, lease: str | None, state: int, deadline: float) -> bool:
        """Whether an entry is to be left out because of its lease. Raises LeasesDue if this process may end leases."""
        if self._may_end_leases:
            if lease is not None and state != ALIVE:
                raise LeasesDue([lease])
            return False
        return lease is not None and (state == OVER or self._is_void(deadline))

    def _is_void(self, deadline: float) -> bool:
        with self.database.session(deadline) as session:
            return self.database.are_leases_void(session)

    def versions(self, prefixes: tuple[str, ...]) -> list[list[tuple[str, int]]]:
        """For each prefix, or single key: the keys there and their versions."""
        calls = [
            self.call(self.statements.versions, **key_range(prefix))
            if prefix == "" or prefix.endswith("/")
            else self.call(self.statements.version_of, key=prefix)
            for prefix in prefixes
        ]

        def attempt(deadline: float) -> list[list[tuple[str, int]]]:
            with self.database.session(deadline) as session:
                return [[(key, version) for key, version in session.read(call)] for call in calls]

        return self._patiently(attempt)

    # Writing

    def _commit(self, commit: Commit) -> dict[str, int]:
        self.database.check_writable()
        plan = self.plan(commit)
        versions = self._patiently(lambda deadline: self._try_commit(plan, deadline))
        self._may_end_leases = True  # the refusal has passed, as that of a standby server that became the primary
        return versions

    def _try_commit(self, plan: CommitPlan, deadline: float) -> dict[str, int]:
        with self.database.session(deadline) as session:
            if plan.direct and (results := session.commit_at_once(plan.direct)) is not None:
                return plan.direct_versions(results)
            found = plan.judge(session.begin(plan.locks))
            if found.foreign_leases:
                leases = sorted(found.foreign_leases)
                states = session.ask([self.call(self.statements.lease_state, lease=lease) for lease in leases])
                # No row at all: the lease is being ended, or was lost. Ending it again settles that.
                due = [lease for lease, rows in zip(leases, states, strict=True) if not rows or rows[0][0] != ALIVE]
                if due:
                    raise LeasesDue(due)
            plan.check_versions(found)
            writes = plan.writes(found)
            if writes:
                session.commit(writes)
            else:
                session.rollback()
        return plan.versions(found)

    # Leases

    def _lease(self, ttl: float, renewed: bool) -> Lease:
        self.database.check_writable()
        self.sweep()

        def attempt(deadline: float) -> tuple[str, float]:
            # A new id each time: a lease whose begin was not confirmed has no keys and goes when it expires.
            secret, sent_at = new_secret(), self.clock.now()
            self._table.begin(id_of(secret), ttl, deadline)
            return secret, sent_at + ttl * TRUSTED

        return self._grant(ttl, *self._patiently(attempt))

    def _attach(self, secret: str, renewed: bool) -> Lease:
        self.database.check_writable()
        ttl = self._patiently(lambda deadline: self._table.ttl_of(id_of(secret), deadline))
        if ttl is None:
            raise not_attached()
        lease = self._grant(ttl, secret, float("inf"))
        try:
            lease.deadline = lease.stored.renew()
        except LeaseExpired:
            raise not_attached() from None
        return lease

    def _grant(self, ttl: float, secret: str, deadline: float) -> Lease:
        lease = id_of(secret)
        stored = SqlLease(self._table, self._patiently, self.clock, lease, ttl)
        return Lease(lease, ttl, deadline, secret=secret, stored=stored, on_closed=self._forget_lease, clock=self.clock)

    def sweep(self) -> float | None:
        """End the leases that are due, correct those that expire too far ahead; returns in how many seconds the next
        one is due, None if there is none."""
        # The leases in `_over` stay in the table and are the oldest: new ones come behind them.
        limit = DUE_LEASES_MAX + len(self._over)
        due = self.call(self.statements.due_leases, limit=limit)
        nearest = self.call(self.statements.nearest_expiry)

        def attempt(deadline: float) -> float | None:
            leases = [lease for (lease,) in self._read(due, deadline)]
            if self._may_end_leases:
                try:
                    for lease in leases:
                        self._table.end(lease, deadline, even_if_alive=False)
                except AccessDenied as error:
                    self._leave_leases(error)
            if not self._may_end_leases:
                self._wake_for(leases)
            if len(leases) == limit:
                return 0.0
            ((left_ms,),) = self._read(nearest, deadline)
            left = None if left_ms is None else max(float(left_ms), 0.0) / 1000
            # Leases that are over stay first until another process has ended them.
            return left if left is None or self._may_end_leases else max(left, UNENDED_S)

        return self._patiently(attempt)

    def _leave_leases(self, error: AccessDenied) -> None:
        log.warning(
            "%s: expired leases cannot be ended by this process, so other processes have to: %s", self.url, error
        )
        self._may_end_leases = False

    def _wake_for(self, leases: list[str]) -> None:
        """In a process that may not end leases: wake the watches, because the keys of these leases are left out of what
        is read from now on."""
        if not self._over.issuperset(leases):
            self._wake(None)
        self._over = frozenset(leases)

    # Watching

    def _watch(self, watches: Sequence[PrefixWatch]) -> None:
        self._patiently(lambda _: self._watcher.add(watches))

    def _unwatch(self, watch: PrefixWatch) -> None:
        self._watcher.remove(watch)

    def _close(self) -> None:
        self._watcher.close()
        self.database.close()

    # For statements that run on a connection of the user's: see `borrowed`.

    def call(self, statement: Statement, **values: object) -> Call:
        """A statement with its values, in this registry's namespace."""
        named = {f"the_{name}": value for name, value in values.items()}
        return Call(statement, {"the_namespace": self._namespace, **named})

    @property
    def dialect(self) -> DialectName:
        return self.database.dialect

    def sql_place(self) -> SqlPlace:
        return SqlPlace(self.database.dialect, self._namespace, self._channel)

    def plan(self, commit: Commit) -> CommitPlan:
        """The statements of a commit."""
        return CommitPlan(commit, self._namespace, self.statements, self._channel)

    def read(self, call: Call) -> list[Row]:
        """The rows of a statement that only reads, on a connection of the registry's own. Raises
        RegistryUnavailable."""
        return self._patiently(lambda deadline: self._read(call, deadline))

    # What these share.

    def _read(self, call: Call, deadline: float) -> list[Row]:
        with self.database.session(deadline) as session:
            return session.read(call)

    def _patiently(self, attempt: Callable[[float], T], timeout: float | None = None, *, is_reading: bool = False) -> T:
        """Call the attempt until it succeeds, raises a final error, or the time is over. An attempt is repeated only if
        it had no effect.

        is_reading: if this process may not end leases, the attempt goes on without the keys of those that are over."""
        timeout = seconds_left(self.database.timeout if timeout is None else timeout)
        deadline = time.monotonic() + timeout
        due: list[str] = []
        has_reconnected = False
        last: Exception | None = None
        for count in range(ATTEMPTS_MAX):
            try:
                while due:
                    self._table.end(due[-1], deadline, even_if_alive=False)
                    due.pop()
                return attempt(deadline)
            except LeasesDue as found:
                due = found.leases
            except AccessDenied as error:
                if not due or not is_reading:
                    raise
                self._leave_leases(error)
                due = []
            except TransactionAborted as error:
                last = error
                time.sleep(random.random() * min(0.001 * 2**count, 0.05))
            except ConnectionLost as error:
                last = error
                if has_reconnected:
                    break
                has_reconnected = True
                self.database.drop_connections()
            if time.monotonic() > deadline:
                break
        # The last attempt may have had milliseconds of the whole time, and says so.
        why = f"{last}; given up" if last is not None else f"{self.url}: given up"
        took_s = time.monotonic() - (deadline - timeout)
        raise RegistryUnavailable(f"{why} after {took_s:.3g} s (`timeout` of the address: {timeout:.3g} s)") from last
