"""A lease: proof, renewed by its holder alone, that the holder is alive.

The problem: a holder cannot know that its lease lives, only that it lived when the store last said
so. So it keeps a *deadline* on its own clock, counted from before the request that renewed it was
sent: past it, the store may have given the lease away, and the holder acts as if it had.

Invariants:
- The deadline is never later than the store's own view of the expiry.
- An expired lease is never revived: once the deadline has passed, a renewal that comes back is refused,
  because somebody may already have seen the holder gone.
- Renewal runs on a thread of its own and takes no lock that user code or a commit can hold (R6).
- A lease is renewed until it or its registry is closed, or nobody has either any more: the registry keeps its leases,
  and the renewing thread holds the lease only while it renews.

On failure: while the store cannot be reached, renewal is tried again until the deadline; then the
lease is lost, `lost` is set, and every commit that names it is refused.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Self

from pxrs.clock import Clock
from pxrs.errors import LeaseExpired, UsedAfterFork
from pxrs.registry.limit import seconds_left

log = logging.getLogger(__name__)

RENEWALS_PER_TTL = 4
"""With four, one lost renewal and a second of starvation by other threads still leave room."""


LEASE_TTL_MIN = 0.05
"""In seconds. A holder could not renew a shorter one in time."""


JOIN_S_MAX = 5.0
"""How long closing waits for a renewal that is under way."""


class Lease:
    """What `Registry.lease(ttl)` returns. Its keys vanish when it is closed or expires.

    The registry keeps it: a lease that is dropped without `close` is renewed until the registry is closed."""

    def __init__(
        self,
        lease_id: str,
        ttl: float,
        deadline: float,
        *,
        renew: Callable[[], float],
        end: Callable[[], None],
        on_gone: Callable[[Lease], None],
        clock: Clock,
    ) -> None:
        """`renew` returns the new deadline, or raises LeaseExpired (final) or another RegistryError (try again);
        `end` tells the store and frees what the lease held here, also after it has expired; `on_gone` is called once,
        when this object is done with."""
        self.id = lease_id
        self.ttl = ttl
        """The time to live that the store granted, which may be more than was asked for."""
        self.lost = threading.Event()
        """Set when the lease has ended, for whatever reason."""
        self.deadline = deadline
        """On the clock's scale, the moment from which this holder must act as if it were gone."""
        self._renew, self._end, self._on_gone = renew, end, on_gone
        self._clock = clock
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._stop = threading.Event()
        self._abandoned = False
        self._closed = False
        self._pause = ttl / RENEWALS_PER_TTL
        """How long until the next renewal is tried."""
        name, given = f"pxrs-lease-{lease_id}", (weakref.ref(self), self._stop, clock)
        self._thread = threading.Thread(target=_keep_renewed, args=given, name=name, daemon=True)
        self._thread.start()

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
        if os.getpid() != self._pid:
            raise UsedAfterFork(f"lease {self.id} was taken before a fork: it is the parent's")
        if not self.alive:
            raise LeaseExpired(f"lease {self.id} has ended; take a new one and claim again")

    def expire(self) -> None:
        """The store has said that the lease is gone: so it is, whatever the deadline says."""
        self.lost.set()
        self.deadline = float("-inf")
        self._stop.set()

    def abandon(self) -> None:
        """Stop renewing and tell nobody: the store sees what it sees when a holder crashes."""
        self._abandoned = True

    def close(self) -> None:
        """End the lease now, and with it its keys. If the store cannot be reached they go when the lease expires."""
        if os.getpid() != self._pid:
            return  # it is the parent's
        with self._guard:
            if self._closed:
                return
            self._closed = True
        self.expire()
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds_left(min(self.ttl, JOIN_S_MAX)))
        try:
            self._end()
        except Exception as error:  # noqa: BLE001 - a lease that is not ended expires; closing goes on
            log.warning("lease %s was not ended in the store, it will expire there: %s", self.id, error)
        finally:
            self._on_gone(self)

    def _next_look(self) -> float:
        """The moment, on the lease's clock, at which to renew it or to see that its deadline has passed."""
        return min(self._clock.now() + self._pause, self.deadline)

    def _renew_once(self) -> bool:
        """False if there is nothing more to renew."""
        if not self.alive:
            log.warning("lease %s could not be renewed before its deadline", self.id)
            return False
        if self._abandoned:
            return True
        try:
            self._accept(self._renew())
            self._pause = self.ttl / RENEWALS_PER_TTL
        except LeaseExpired as error:
            log.warning("lease %s has expired in the store: %s", self.id, error)
            self.expire()
            return False
        except Exception as error:  # noqa: BLE001 - whatever it is, the deadline decides
            log.info("lease %s: renewal failed, will try again: %s", self.id, error)
            self._pause = self.ttl / (RENEWALS_PER_TTL * 4)
        return True

    def _accept(self, deadline: float) -> None:
        # A renewal that returns after the old deadline proves nothing to those who saw the lease end.
        if self.alive:
            self.deadline = max(self.deadline, deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Lease {self.id} ttl={self.ttl:g}s {'alive' if self.alive else 'ended'}>"


def _keep_renewed(lease_of: weakref.ref[Lease], stop: threading.Event, clock: Clock) -> None:
    """The renewing thread. Between two renewals it has no reference to the lease, nor by it to the registry."""
    while (lease := lease_of()) is not None:
        until = lease._next_look()
        del lease
        if clock.wait(stop, until):
            return
        lease = lease_of()
        if lease is None or not lease._renew_once():
            return
        del lease
