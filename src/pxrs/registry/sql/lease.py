"""Leases as rows of the table `pxrs_lease`.

A lease is alive while its row is there and `expires_ms` is ahead of the database's clock. A renewal moves `expires_ms`;
the end of a lease deletes the row and the lease's keys in one transaction. Nothing is held in this process, so any
process that has the secret can renew or end the lease, and the death of a process changes nothing in the table. The
row's id is a hash of the secret.

The deadline: the database's clock may run faster than the holder's, so the holder counts on `TRUSTED` of the ttl, from
before the statement was sent.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from pxrs.clock import Clock
from pxrs.errors import LeaseExpired, OutcomeUnknown
from pxrs.registry.sql.commit import payload
from pxrs.registry.sql.database import ConnectionLost, Database, Session
from pxrs.registry.sql.statements import AHEAD, ALIVE, OVER, Call, Statement

log = logging.getLogger(__name__)

TRUSTED: Final = 0.95
"""The part of a lease that its holder counts on: the database's clock may run faster than ours."""
RENEWAL_S_MIN: Final = 0.1
"""How long a renewal may take at least, however short the lease is."""


T = TypeVar("T")


class Patiently(Protocol):
    """`SqlRegistry` trying an attempt again, until it works or the time is over. An attempt gets its deadline."""

    def __call__(self, attempt: Callable[[float], T], timeout: float | None = None) -> T: ...


class LeaseTable:
    """The leases of one namespace. Each method is one attempt, on one connection, until the deadline that it is given
    on `time.monotonic()`."""

    def __init__(self, database: Database, namespace: str, channel: str) -> None:
        """`channel` is where notifications go, or empty if there are none."""
        self.database = database
        self._namespace, self._channel = namespace, channel

    def begin(self, lease: str, ttl: float, deadline: float) -> None:
        # One more, because the database rounds both when it counts and when it compares.
        call = self._call(self.database.statements.begin_lease, lease=lease, ttl_ms=math.ceil(ttl * 1000) + 1)
        with self.database.session(deadline, "leases") as session:
            session.write(call)

    def ttl_of(self, lease: str, deadline: float) -> float | None:
        """The ttl, in seconds, that the lease began with; None if there is no such lease."""
        call = self._call(self.database.statements.ttl_of_lease, lease=lease)
        with self.database.session(deadline, "leases") as session:
            for (ttl_ms,) in session.read(call):
                return (int(ttl_ms) - 1) / 1000
        return None

    def renew(self, lease: str, deadline: float) -> None:
        """Raises LeaseExpired if the lease is over or has no row any more."""
        call = self._call(self.database.statements.renew_lease, lease=lease)
        with self.database.session(deadline, "leases") as session:
            if session.write(call) == 0:
                raise LeaseExpired(f"lease {lease} has ended")

    def end(self, lease: str, deadline: float, *, even_if_alive: bool) -> None:
        """Delete the lease and its keys in one transaction; unless `even_if_alive`, only if its time is over. If it
        expires further ahead than its ttl instead, correct that."""
        statements = self.database.statements
        locks = [
            self._call(statements.lock_lease_to_end, lease=lease),
            # Nobody can bind a key to the lease any more: that takes a lock on its row.
            self._call(statements.keys_of_lease, lease=lease),
        ]
        if statements.store_version is not None:
            locks.append(self._call(statements.next_version))
        with self.database.session(deadline) as session:
            rows, keys, *version = session.begin(locks)
            state = rows[0][0] if rows else OVER
            if state == AHEAD and not even_if_alive:
                log.warning(
                    "%s: lease %s expires further ahead than its ttl, so the database's clock was set back; it now "
                    "expires one ttl from now",
                    self.database.url,
                    lease,
                )
                _commit_repeatable(session, [self._call(statements.limit_lease, lease=lease)])
                return
            if (state == ALIVE and not even_if_alive) or (not rows and not keys):
                session.rollback()
                return
            changed = [key for (key,) in keys]
            writes = [self._call(statements.delete_key_of_lease, key=key, lease=lease) for key in changed]
            writes.append(self._call(statements.delete_lease, lease=lease))
            if changed and statements.store_version is not None:
                writes.append(Call(statements.store_version, {"the_version": str(version[0][0][0])}))
            if changed and statements.notify is not None and self._channel:
                values = {"the_channel": self._channel, "the_payload": payload(changed)}
                writes.append(Call(statements.notify, values))
            _commit_repeatable(session, writes)

    def _call(self, statement: Statement, **values: object) -> Call:
        named = {f"the_{name}": value for name, value in values.items()}
        return Call(statement, {"the_namespace": self._namespace, **named})


class SqlLease:
    """One lease in the table, see `registry.lease.StoredLease`."""

    def __init__(self, table: LeaseTable, patiently: Patiently, clock: Clock, lease: str, ttl: float) -> None:
        self._table, self._patiently, self._clock = table, patiently, clock
        self._lease, self._ttl = lease, ttl

    def renew(self) -> float:
        def attempt(deadline: float) -> float:
            sent_at = self._clock.now()
            self._table.renew(self._lease, deadline)
            return sent_at + self._ttl * TRUSTED

        # A renewal that hangs must leave time for another one.
        return self._patiently(attempt, min(self._table.database.timeout, max(self._ttl / 3, RENEWAL_S_MIN)))

    def end(self) -> None:
        self._patiently(lambda deadline: self._table.end(self._lease, deadline, even_if_alive=True))

    def let_go(self) -> None:
        """Nothing is held for it."""


def _commit_repeatable(session: Session, writes: list[Call]) -> None:
    """Commit what may safely happen twice, such as the end of a lease: if the reply is lost, it is tried again."""
    try:
        session.commit(writes)
    except OutcomeUnknown as error:
        raise ConnectionLost(str(error)) from error
