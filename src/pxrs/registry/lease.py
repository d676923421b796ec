"""A lease: proof that its holder is alive, which the store takes back when nobody renews it.

The problem: a holder cannot know that its lease lives, only that it lived when the store last said so. So the holder
keeps a *deadline* on its own clock, counted from before the request that renewed the lease was sent. Past the deadline
the store may have ended the lease, and the holder acts as if it had.

A `Lease` is a grant: an id, a ttl, a deadline, a secret, and the calls `renew` and `end`. It has no thread. What keeps
a grant alive is separate: `Renewer` in `registry/renewal.py`, one for each open registry, renews the leases that were
taken with `lease(ttl)`. A lease that was taken with `lease(ttl, renewed=False)`, or attached with `attach(secret)`, is
renewed only when somebody calls `renew`.

Invariants:
- The deadline is never later than the store's own view of the expiry.
- An expired lease is never revived (R3): once the deadline has passed, `renew` is refused here, and a renewal whose
  reply arrives after the deadline is ignored, because another process may already have seen the holder gone.
- `renew` takes no lock that user code or a commit can hold (R6).
- The secret is never logged and not part of `repr`. Except on etcd the id is a hash of the secret, so that whoever
  reads ids in logs, keys or tables cannot attach.

Who ends what:

    call                        renewed by the registry     not renewed by the registry
    --------------------------  --------------------------  ------------------------------------------
    `end()`                     ends in the store           ends in the store
    `close()`, registry.close() ends in the store           stays in the store until its expiry
    the process is killed       ends: at once on files,     stays in the store until its expiry
                                else at its expiry

On failure: while the store cannot be reached, `renew` raises RegistryUnavailable and the deadline stays as it was. At
the deadline the lease is lost: `lost` is set by whoever looks first, and every commit that names it is refused.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Protocol, Self

from pxrs.clock import Clock
from pxrs.errors import LeaseExpired, RegistryUnavailable, UsedAfterFork
from pxrs.registry.limit import seconds_left

log = logging.getLogger(__name__)

LEASE_TTL_MIN: Final = 0.05
"""In seconds. A holder could not renew a shorter one in time."""

RENEWALS_PER_TTL: Final = 4
"""How often a lease is renewed within its ttl. With four, one lost renewal and a second in which other threads keep the
renewing thread from running still leave time for another renewal."""

RENEWAL_WAIT_S_MAX: Final = 5.0
"""How long `close`, and a second caller of `renew`, wait for a renewal of the same lease that is under way."""

_SECRET_BYTES: Final = 32
_ID_LENGTH: Final = 32
_HEX_DIGITS: Final = frozenset("0123456789abcdef")


class StoredLease(Protocol):
    """A lease as one store keeps it: what `Lease` calls, implemented once for each backend."""

    def renew(self) -> float:
        """Renew the lease in the store; returns the new deadline on the holder's clock. LeaseExpired means that the
        lease has ended in the store; any other RegistryError, that it is not known whether it was renewed."""

    def end(self) -> None:
        """End the lease in the store, with its keys, and free what this process holds for it. Called again after a
        failure. No error if the lease has ended already."""

    def let_go(self) -> None:
        """Free what this process holds for the lease, and leave the lease in the store as it is."""


class Renewal(Protocol):
    """The renewals of one lease, as `Renewer.add` returns them."""

    def stop(self, wait_s: float) -> None:
        """Make no further renewal. Waits for one that is under way for at most this number of seconds."""


class Lease:
    """What `Registry.lease(ttl)` and `Registry.attach(secret)` return. The table above says who ends it.

    The registry keeps the leases that it renews: one that is dropped without `close` is renewed until the registry is
    closed. It does not keep the others alive."""

    def __init__(
        self,
        lease_id: str,
        ttl: float,
        deadline: float,
        *,
        secret: str,
        stored: StoredLease,
        on_closed: Callable[[Lease], None],
        clock: Clock,
    ) -> None:
        """`on_closed` is called once, when `close` or `end` has finished with this object."""
        self.id = lease_id
        self.ttl = ttl
        """The time to live that the store granted, which may be more than was asked for."""
        self.secret = secret
        """With this, `Registry.attach` gives a grant for the same lease to another handle or process. Keep it secret:
        whoever has it can commit as the holder, renew the lease and end it."""
        self.lost = threading.Event()
        """Set when the lease has ended, for whatever reason. Of a lease that the registry renews it is set at the
        deadline at the latest; of another one, when `alive` is asked after the deadline."""
        self.deadline = deadline
        """The moment, on the registry's clock, from which this holder must act as if the lease had ended."""
        self.stored = stored
        """The lease in its store. Tests of failures replace it, or call it behind the back of this object."""
        self.renewal: Renewal | None = None
        """Set by `Renewer.add`; None if this lease is not renewed by the registry."""
        self.is_abandoned = False
        self.is_ended = False
        """Set at the beginning of `end` and `close`: whoever calls them knows that the lease ends. The Renewer does not
        report a renewal that is under way then as an expiry."""
        self._on_closed, self._clock = on_closed, clock
        self._pid = os.getpid()
        self._guard = threading.Lock()
        """Guards `_is_closed`, and changes of `deadline`. Never held during a call of the store."""
        self._renewing = threading.Lock()
        """Held during a renewal: the calls of two threads could otherwise finish in the wrong order."""
        self._is_closed = False

    @property
    def is_renewed(self) -> bool:
        """Whether the registry renews this lease in the background."""
        return self.renewal is not None

    @property
    def alive(self) -> bool:
        """Whether the deadline is still ahead. Once False, False for ever; in a forked child always."""
        if os.getpid() != self._pid:
            return False
        if not self.lost.is_set() and self._clock.now() >= self.deadline:
            self.lost.set()
        return not self.lost.is_set()

    def check(self) -> None:
        """Raise LeaseExpired unless the lease is alive."""
        self._check_process()
        if not self.alive:
            raise LeaseExpired(f"lease {self.id} has ended; take a new one and claim again")

    def renew(self) -> float:
        """Renew the lease once, now; returns the new deadline. Threads may call it at any time.

        Raises LeaseExpired if the lease has ended, here or in the store, and another RegistryError if the store did not
        answer: the lease may have been renewed or not, and the deadline stays as it was."""
        self.check()
        if not self._renewing.acquire(timeout=seconds_left(RENEWAL_WAIT_S_MAX)):
            raise RegistryUnavailable(f"lease {self.id}: another renewal of it has been running for too long")
        try:
            self.check()  # again: the lease may have ended while this thread waited
            deadline = self.stored.renew()
        except LeaseExpired:
            self.expire()
            raise
        finally:
            self._renewing.release()
        with self._guard:
            if self.is_ended:
                raise LeaseExpired(f"lease {self.id} was ended while it was being renewed")
            # Another process may have seen the lease end at the old deadline.
            if not self.alive:
                raise LeaseExpired(f"lease {self.id}: the reply to its renewal came after its deadline")
            self.deadline = max(self.deadline, deadline)
            return self.deadline

    def end(self) -> None:
        """End the lease in the store now, and with it its keys.

        Raises an error if the store did not confirm that. Then the lease ends there at its expiry at the latest; here
        it has ended in any case, and `end` may be called again."""
        self._check_process()
        self.is_ended = True
        self.expire()
        self._stop_renewals()
        self.stored.end()
        if self._begin_to_close():
            self._on_closed(self)

    def close(self) -> None:
        """Stop using this object. A lease that the registry renews ends in the store, with its keys; if the store
        cannot be reached, that is logged, and the lease ends at its expiry. Another lease stays in the store until its
        expiry."""
        if os.getpid() != self._pid or not self._begin_to_close():
            return  # the lease is the parent process's, or it was closed before
        self.is_ended = True
        self.expire()
        try:
            if self.is_renewed:
                self._stop_renewals()
                self.stored.end()
            else:
                self.stored.let_go()
        except Exception as error:  # noqa: BLE001 - the lease ends in the store at its expiry; closing goes on
            log.warning("lease %s could not be ended in the store and will expire there: %s", self.id, error)
        finally:
            self._on_closed(self)

    def expire(self) -> None:
        """Act as if the deadline had passed: the store has said that the lease has ended, or this object is closed."""
        with self._guard:  # otherwise a renewal that is returning could set a deadline again
            self.lost.set()
            self.deadline = float("-inf")

    def abandon(self) -> None:
        """Make no further renewal and do not tell the store, which sees the same as if the holder had crashed. For
        tests, and for holders that want their lease to expire."""
        self.is_abandoned = True

    def _stop_renewals(self) -> None:
        if self.renewal is not None:
            self.renewal.stop(seconds_left(min(self.ttl, RENEWAL_WAIT_S_MAX)))

    def _begin_to_close(self) -> bool:
        with self._guard:
            was_closed, self._is_closed = self._is_closed, True
        return not was_closed

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsedAfterFork(f"lease {self.id} was taken before a fork: it belongs to the parent process")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Lease {self.id} ttl={self.ttl:g}s {'alive' if self.alive else 'ended'}>"


def new_secret() -> str:
    """A secret for a new lease, of 256 random bits."""
    return secrets.token_hex(_SECRET_BYTES)


def id_of(secret: str) -> str:
    """The id of the lease that has this secret: a hash, from which the secret cannot be found."""
    return hashlib.sha256(secret.encode()).hexdigest()[:_ID_LENGTH]


def is_id(text: str) -> bool:
    """Whether this has the form of what `id_of` returns. The ids of version 0.1 had the same form."""
    return len(text) == _ID_LENGTH and set(text) <= _HEX_DIGITS


def not_attached() -> LeaseExpired:
    """The error of `attach`, the same for a lease that has ended and for a secret that no lease ever had: a caller who
    guesses secrets learns nothing from it."""
    return LeaseExpired("no live lease has this secret; take a new one and claim again")
