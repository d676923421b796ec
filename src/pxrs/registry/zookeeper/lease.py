"""A lease is a session of its own (R8), with a node that dies with it.

The problem: a session's ephemeral nodes are what a lease promises, but kazoo, when it finds its session expired,
quietly makes another, and a commit that waits in its queue would go out under that one. So every commit that names
the lease checks in its transaction that the lease's node is there. The first session made it and it died with that
session, so an expired lease is never revived (R3).

The deadline. ZooKeeper's leader expires a session when it has not heard of it for the granted time. A client's requests
touch the session at the server that it is connected to; a follower passes the touches on when the leader next
asks for them, every half tick. A renewal is a transaction that checks the lease's node and changes nothing. A follower
sends it to the leader behind the answers that it gave before. So when its reply is here, the leader knows that the
session was alive at the renewal before it, if the two are at least half a tick apart; and they are, because they
are a quarter of the granted time apart and ZooKeeper grants no less than two ticks. And it was the leader of a quorum
then, so that a later one begins to count later. The deadline is therefore counted from the sending of the renewal
before the last, less a little, because the leader does not ask to the millisecond. A ping proves nothing of the kind,
for a follower that is cut off from its leader answers it too; nor does `sync`, for a leader that was deposed and has
not noticed answers that.

On failure: while there is no connection, renewal fails and is tried again until the deadline. A server that does not
answer a renewal is left for another. A lease that was abandoned or is past its deadline sends no more pings,
so that the session dies as if its process had.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable

from kazoo.exceptions import KazooException, NodeExistsError, NoNodeError, SessionExpiredError
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.states import KazooState

from pxrs.clock import Clock
from pxrs.errors import LeaseExpired, RegistryUnavailable
from pxrs.registry.lease import Lease
from pxrs.registry.limit import seconds_left
from pxrs.registry.zookeeper.layout import Layout, ancestors
from pxrs.registry.zookeeper.session import Client, Endpoint, Line, Session, TryAgain, barrier

log = logging.getLogger(__name__)

SESSION_S_MIN = 1.0
"""kazoo also takes what it asks for as its time to connect, and less than this would not do on a busy machine."""


MARGIN = 0.05
"""The part of the granted time that the holder does without."""
PATIENCE_S_MIN = 0.25
"""How long a renewal may at least take before the server is left for another."""

END_S_MAX = 2.0
"""How long a session may take to be closed before it is left to expire."""


class SessionLease(Lease):
    """A lease that can fall silent: kazoo would go on pinging for a holder that does not renew any more."""

    def __init__(self, session: LeaseSession, deadline: float, on_gone: Callable[[Lease], None]) -> None:
        self.session = session
        super().__init__(
            session.lease_id,
            session.granted_s,
            deadline,
            renew=session.renew,
            end=session.end,
            on_gone=on_gone,
            clock=session.clock,
        )
        session.lease = self

    def abandon(self) -> None:
        self.session.fall_silent()
        super().abandon()


class _LeaseLine(Line):
    """A connection that can fall silent."""

    may_ping: Callable[[], bool] = staticmethod(lambda: True)

    def _send_ping(self, connect_timeout: float) -> None:
        if self.may_ping():
            super()._send_ping(connect_timeout)


class LeaseSession(Session):
    """The session behind one lease, from before it has been granted until after it has ended."""

    def __init__(self, endpoint: Endpoint, layout: Layout, ttl: float, clock: Clock) -> None:
        super().__init__(endpoint, clock)
        self.lease_id = uuid.uuid4().hex
        self.path = layout.lease(self.lease_id)
        self.granted_s = 0.0
        self.lease: SessionLease | None = None
        self.made: dict[str, int] = {}
        """The keys whose nodes live with this session, and the transactions that made them."""
        self._guard = threading.Lock()
        self._is_over = False
        self._is_silent = False
        self._was_shut = False
        self._renewed_at = 0.0
        self._present = Client(endpoint, max(ttl, SESSION_S_MIN), clock, self._on_state, _LeaseLine)
        self._present.line.may_ping = self._may_ping

    def begin(self, on_gone: Callable[[Lease], None]) -> SessionLease:
        """Make the node that stands for the lease; the lease is alive when it is there."""
        try:
            self.attempt(self._make_node, self.bound())
        except LeaseExpired as error:
            raise RegistryUnavailable(f"{self.endpoint.url}: the session expired before the lease began") from error
        finally:
            if not self.granted_s:
                self._shut(0.0)
        return SessionLease(self, self._deadline(self._renewed_at), on_gone)

    def _make_node(self, client: Client, until: float) -> None:
        try:
            self.wait(client.create_async(self.path, b"", ephemeral=True), until)
        except NoNodeError:
            self.make(client, ancestors(self.path), until)
            raise TryAgain from None
        except NodeExistsError:
            pass  # made by a request whose reply was lost; by this session, for none other has been
        self._renewed_at, self.granted_s = client.line.touched_at, client.line.granted_s

    def renew(self) -> float:
        """Prove that the leader knows this session and has a quorum; returns the new deadline."""
        client = self.connected(self.clock.now() + self.granted_s / 4)
        sent_at = self.clock.now()
        # A server that hangs is left early enough to find another one before the deadline.
        patience_s = max(self.granted_s / 8, PATIENCE_S_MIN)
        try:
            (found,) = self.wait(barrier(client, self.path), sent_at + patience_s)
            if isinstance(found, NoNodeError):
                self._expired()
        except SessionExpiredError:
            self._expired()
        except KazooTimeoutError as error:
            client.line.drop()
            raise RegistryUnavailable(f"{self.endpoint.url}: no answer to a renewal") from error
        except KazooException as error:
            raise RegistryUnavailable(f"{self.endpoint.url}: {error!r}") from error
        self._client()
        # To take up a session again, a server asks the leader, which counts from then.
        known_alive_at = max(self._renewed_at, client.line.touched_at)
        self._renewed_at = sent_at
        return self._deadline(known_alive_at)

    def _deadline(self, known_alive_at: float) -> float:
        return known_alive_at + self.granted_s * (1 - MARGIN)

    def end(self) -> None:
        """Close the session, which removes its nodes. Without a connection it is left to expire."""
        with self._guard:
            was_over, self._is_over = self._is_over, True
        is_told = bool(self._present.connected)
        is_told &= self._shut(seconds_left(min(self.endpoint.timeout, END_S_MAX)))
        if not is_told and not was_over:
            raise RegistryUnavailable(f"{self.endpoint.url}: no answer, so the session was left to expire")

    def fall_silent(self) -> None:
        self._is_silent = True

    def expire(self) -> LeaseExpired:
        """The store has said that the lease is gone."""
        self._is_over = True
        if self.lease is not None:
            self.lease.expire()
        return LeaseExpired(f"lease {self.lease_id} has ended; take a new one and claim again")

    def _client(self) -> Client:
        if self._is_over or (self.lease is not None and not self.lease.alive):
            raise LeaseExpired(f"lease {self.lease_id} has ended; take a new one and claim again")
        return self._present

    def _expired(self) -> None:
        raise self.expire()

    def _may_ping(self) -> bool:
        return not self._is_silent and (self.lease is None or self.lease.alive)

    def _on_state(self, state: str) -> None:
        """Called in kazoo's connection thread, before it makes another session."""
        if state != KazooState.LOST:
            return
        with self._guard:
            if self._is_over:
                return
            self._is_over = True
        log.info("%s: the session of lease %s has expired", self.endpoint.url, self.lease_id)
        self.expire()
        self._shut(0.0)

    def _shut(self, wait_s: float) -> bool:
        with self._guard:
            if self._was_shut:
                return True
            self._was_shut = True
        return self._present.shut(wait_s)


def session_of(lease: Lease | None) -> LeaseSession | None:
    assert lease is None or isinstance(lease, SessionLease)
    return None if lease is None else lease.session
