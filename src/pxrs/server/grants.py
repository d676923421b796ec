"""The leases that clients have named, as this process's grants of them.

A client names a lease by its secret. To commit under it or renew it, the server needs a grant of its own registry
handle: the one with which it took the lease, or one that it attaches to. The server renews a lease only in a call in
which the client of that lease names it (W2): by `registry.renew` and `registry.attach`; and attaching, which the first
commit after a restart of the server needs too, renews it once. So a grant that nobody renews for its ttl has ended, and
is let go, which does nothing to the lease in the store. What is here is a cache: after a restart of the server, or if
there were too many, the next call that names a lease attaches to it again.

A grant is closed only while no call uses it: a commit under a grant that is closed meanwhile would be refused with
LeaseExpired, although the lease lives.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from pxrs.errors import LeaseExpired
from pxrs.registry.contract import Registry
from pxrs.registry.lease import Lease

SWEEP_S: Final = 5.0
"""How often the grants of ended leases are looked for, if calls come."""


class _Grant:
    """The fields but `attaching` are guarded by the lock of `Grants`."""

    __slots__ = ("attaching", "lease", "users")

    def __init__(self, lease: Lease | None) -> None:
        self.lease = lease
        """None until it is attached to."""
        self.users = 0
        """How many calls use it now."""
        self.attaching = threading.Lock()
        """Held by the thread that attaches, so that one lease has one grant."""


class Grants:
    """By the secret of the lease. Threads share it."""

    def __init__(self, registry: Registry, leases_max: int) -> None:
        self._registry, self._leases_max = registry, leases_max
        self._lock = threading.Lock()
        self._by_secret: OrderedDict[str, _Grant] = OrderedDict()
        """The one that was named last comes last."""
        self._swept_at = registry.clock.now()

    def __len__(self) -> int:
        return len(self._by_secret)

    def take(self, ttl: float) -> Lease:
        """A new lease, which this process does not renew."""
        lease = self._registry.lease(ttl, renewed=False)
        with self._lock:
            self._by_secret[lease.secret] = _Grant(lease)
        self._tidy()
        return lease

    @contextlib.contextmanager
    def using(self, secret: str, *, is_renewed: bool = False) -> Iterator[Lease]:
        """The grant of this lease, for the block; attached to if this process has none that lives. Raises LeaseExpired.

        is_renewed: renew the lease too"""
        with self._lock:
            grant = self._by_secret.setdefault(secret, _Grant(None))
            self._by_secret.move_to_end(secret)
            grant.users += 1
        try:
            lease, was_attached = self._living(grant, secret)
            if is_renewed and not was_attached:
                lease = self._renewed(grant, lease, secret)
            yield lease
        finally:
            with self._lock:
                grant.users -= 1
                is_over = not grant.users and (grant.lease is None or not grant.lease.alive)
                if is_over and self._by_secret.get(secret) is grant:
                    del self._by_secret[secret]
            if is_over and grant.lease is not None:
                grant.lease.close()
            self._tidy()

    def end(self, secret: str) -> None:
        """End the lease in the store; no error if it has ended."""
        with contextlib.suppress(LeaseExpired), self.using(secret) as lease:
            lease.end()

    def close(self) -> None:
        """Let all grants go. The leases stay in the store."""
        with self._lock:
            grants = list(self._by_secret.values())
            self._by_secret.clear()
        for grant in grants:
            if grant.lease is not None:
                grant.lease.close()

    def _renewed(self, grant: _Grant, lease: Lease, secret: str) -> Lease:
        try:
            lease.renew()
        except LeaseExpired:
            # By the deadline of this grant, perhaps, which is too early if the lease was renewed through another server
            # since. Attaching asks the store, which does not revive a lease that has ended.
            lease, _ = self._living(grant, secret)
        return lease

    def _living(self, grant: _Grant, secret: str) -> tuple[Lease, bool]:
        """The lease of the grant, and whether it was attached to now, which renews it."""
        lease = grant.lease
        if lease is not None and lease.alive:
            return lease, False
        with grant.attaching:
            lease = grant.lease
            if lease is not None and lease.alive:
                return lease, False
            # The lease may have been renewed through another server, so that the deadline here is older than the
            # store's. Who uses the old grant is refused in any case, so it may be closed.
            if lease is not None:
                lease.close()
            lease = self._registry.attach(secret)
            with self._lock:
                grant.lease = lease
            return lease, True

    def _tidy(self) -> None:
        """Let go of what nobody uses: the grants of ended leases, and the oldest ones if there are too many."""
        with self._lock:
            now = self._registry.clock.now()
            is_due = now >= self._swept_at + SWEEP_S
            excess = len(self._by_secret) - self._leases_max
            if not is_due and excess <= 0:
                return
            self._swept_at = now
            unused = [(secret, grant) for secret, grant in self._by_secret.items() if not grant.users]
            chosen = [each for each in unused if each[1].lease is None or not each[1].lease.alive]
            excess -= len(chosen)
            if excess > 0:
                living = [each for each in unused if each[1].lease is not None and each[1].lease.alive]
                # More than needed: each look at all grants takes time.
                chosen += living[: excess + self._leases_max // 10]
            for secret, _ in chosen:
                del self._by_secret[secret]
        for _, grant in chosen:
            if grant.lease is not None:
                grant.lease.close()


def seconds_left(lease: Lease, arrived_at: float) -> float:
    """How long the lease lives, counted from the arrival of the request, on the registry's clock (W3). The client adds
    it to the moment at which it sent the request, so its deadline is never later than the one of this grant."""
    return max(0.0, lease.deadline - arrived_at)
