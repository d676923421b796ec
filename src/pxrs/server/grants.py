"""The leases that clients have named, as this process's grants of them.

A client names a lease by its secret. To commit under it or renew it, the server needs a grant of its own registry
handle: the one with which it took the lease, or one that it attaches to. The server never renews a lease unless its
client asked (W2). So a grant that nobody renews for its ttl has ended, and is let go, which does nothing to the
lease in the store. What is here is a cache: after a restart of the server, the first call that names a lease attaches
to it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict

from pxrs.errors import LeaseExpired
from pxrs.registry.contract import Registry
from pxrs.registry.lease import Lease


class Grants:
    """By the secret of the lease. Threads share it."""

    def __init__(self, registry: Registry, leases_max: int) -> None:
        self._registry, self._leases_max = registry, leases_max
        self._lock = threading.Lock()
        self._by_secret: OrderedDict[str, Lease] = OrderedDict()
        """The one that was named last comes last."""

    def take(self, ttl: float) -> Lease:
        """A new lease, which this process does not renew."""
        return self._keep(self._registry.lease(ttl, renewed=False))

    def attach(self, secret: str) -> Lease:
        """Attach to a living lease, which renews it once. Raises LeaseExpired."""
        lease = self._registry.attach(secret)
        self._drop(secret)
        return self._keep(lease)

    def find(self, secret: str) -> Lease:
        """The grant of this lease; attached if this process has none. Raises LeaseExpired."""
        with self._lock:
            lease = self._by_secret.get(secret)
            if lease is not None:
                self._by_secret.move_to_end(secret)
        if lease is not None and lease.alive:
            return lease
        # The lease may have been renewed through another server, so that the deadline here is older than the store's.
        return self.attach(secret)

    def renew(self, secret: str) -> Lease:
        """Renew the lease. Raises LeaseExpired."""
        with self._lock:
            lease = self._by_secret.get(secret)
        if lease is None or not lease.alive:
            return self.attach(secret)
        lease.renew()
        return lease

    def end(self, secret: str) -> None:
        """End the lease in the store; no error if it has ended."""
        with contextlib.suppress(LeaseExpired):
            self.find(secret).end()
        self._drop(secret)

    def _keep(self, lease: Lease) -> Lease:
        with self._lock:
            self._by_secret[lease.secret] = lease
            ended = [secret for secret, each in self._by_secret.items() if not each.alive]
            gone = [self._by_secret.pop(secret) for secret in ended]
            while len(self._by_secret) > self._leases_max:
                gone.append(self._by_secret.popitem(last=False)[1])
        for each in gone:
            each.close()
        return lease

    def _drop(self, secret: str) -> None:
        with self._lock:
            lease = self._by_secret.pop(secret, None)
        if lease is not None:
            lease.close()


def seconds_left(lease: Lease, arrived_at: float) -> float:
    """How long the lease lives, counted from the arrival of the request, on the registry's clock (W3). The client adds
    it to the moment at which it sent the request, so its deadline is never later than the one of this grant."""
    return max(0.0, lease.deadline - arrived_at)
