"""A lease in the registry behind a server (W2, W3).

The server renews no lease by itself: it passes each renewal on to its registry, and answers for how long the lease
lives, counted from when the request arrived. The deadline here is counted from before the request was sent, so it is
never later. The server holds nothing that its death would lose: another one attaches to the lease by its secret.
"""

from __future__ import annotations

from pxrs.clock import Clock
from pxrs.errors import RegistryUnavailable
from pxrs.registry.lease import RENEWALS_PER_TTL
from pxrs.registry.limit import seconds_left
from pxrs.remote.client.connection import Connection
from pxrs.remote.client.faults import Unanswered


class RemoteLease:
    """See `registry.lease.StoredLease`."""

    def __init__(self, connection: Connection, secret: str, ttl: float, clock: Clock) -> None:
        self._connection, self._secret, self._ttl, self._clock = connection, secret, ttl, clock

    def renew(self) -> float:
        timeout_s = seconds_left(min(self._ttl / RENEWALS_PER_TTL, self._connection.settings.timeout_s))
        sent_at = self._clock.now()
        try:
            found = self._connection.call("registry.renew", {"secret": self._secret}, timeout_s, is_renewal=True)
        except Unanswered as error:
            raise RegistryUnavailable(f"{self._connection.settings.shown}: {error}") from error
        return sent_at + float(found["left_s"])

    def end(self) -> None:
        timeout_s = seconds_left(min(self._ttl, self._connection.settings.timeout_s))
        try:
            self._connection.ask("registry.end", {"secret": self._secret}, timeout_s)
        except Unanswered as error:
            raise RegistryUnavailable(f"{self._connection.settings.shown}: {error}") from error

    def let_go(self) -> None:
        """Nothing is held for it."""
