"""A lease is a session of its own (R8), with a node that dies with it.

The problem: a session's ephemeral nodes are what a lease promises, but kazoo, when it finds its session expired,
makes another one by itself, and a commit that waits in its queue would go out under that one. So every commit that
names the lease checks in its transaction that the lease's node is there. The first session made the node, and the node
died with that session, so an expired lease is never revived (R3).

Two kinds of sessions:

- `StandingSession`, for a lease that the registry renews: one connection that stays open, and one thread of kazoo's.
  kazoo pings the session only while the lease is alive and not abandoned.
- `VisitingSession`, for a lease that is renewed only on request. A connection touches its session even when nothing is
  sent, because kazoo reconnects by itself. So there is no connection between two calls: a renewal, a commit or the end
  of the lease connects with the session's id and password, does its work, and drops the connection without closing the
  session. It never pings.

Both kinds of connections are counted by `Connections`, and bounded by the option `sessions` of the address.

The secret is a random token with the session's id and password. ZooKeeper computes the password from the session's id,
so that it protects nothing by itself; the name of the lease's node is a hash of the token, and `attach` connects to the
session only if the node of that name belongs to it.

The deadline. ZooKeeper's leader expires a session when it has not heard of it for the granted time. A client's requests
touch the session at the server that it is connected to; a follower passes the touches on when the leader next asks for
them, every half tick. A renewal is a transaction that checks the lease's node and changes nothing. A follower sends it
to the leader behind the answers that it gave before. So when the reply to a renewal is here, the leader knows that the
session was alive at any earlier renewal that was sent at least half a tick before; a quarter of the granted time is as
much, because ZooKeeper grants no less than two ticks. And it was the leader of a quorum then, so that a later leader
begins to count later. The same holds for the moment at which the connection was asked for, because a server asks the
leader before it takes up a session. The deadline is counted from the later of these two moments, less a little,
because the leader does not ask to the millisecond. A ping proves nothing of the kind, for a follower that is cut off
from its leader answers it too; nor does `sync`, for a leader that was deposed and has not noticed answers that.

On failure: while there is no connection, renewal fails and is tried again until the deadline. A server that does not
answer a renewal is left for another one. A lease that was abandoned or is past its deadline sends no more pings, so
that the session expires as if its process had died.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Final, NamedTuple

from kazoo.exceptions import ConnectionLoss, KazooException, NodeExistsError, NoNodeError, SessionExpiredError
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.states import KazooState

from pxrs.clock import Clock
from pxrs.errors import LeaseExpired, RegistryUnavailable
from pxrs.registry.lease import Lease, id_of, new_secret, not_attached
from pxrs.registry.limit import seconds_left
from pxrs.registry.zookeeper.client import Client, Endpoint, Line
from pxrs.registry.zookeeper.layout import Layout, ancestors
from pxrs.registry.zookeeper.session import Session, TryAgain, barrier

log = logging.getLogger(__name__)

SESSIONS_MAX: Final = 256
"""How many connections of leases a handle may have, unless the option `sessions` says otherwise."""

SESSION_S_MIN: Final = 1.0
"""The shortest session time-out to ask for. kazoo also takes it as its time limit to connect."""

MARGIN: Final = 0.05
"""The part of the granted time that the holder does without."""
PATIENCE_S_MIN: Final = 0.25
"""How long a renewal may at least take before the server is left for another."""

END_S_MAX: Final = 2.0
"""How long a session may take to be closed before it is left to expire."""


class Secret(NamedTuple):
    """The parts of `Lease.secret`."""

    token: str
    session_id: int
    password: bytes

    def __repr__(self) -> str:
        return "<Secret>"  # for logs and error messages

    def text(self) -> str:
        return f"{self.token}.{self.session_id & (1 << 64) - 1:x}.{self.password.hex()}"

    @classmethod
    def parse(cls, text: str) -> Secret:
        """Raises `not_attached()` for text that no secret has."""
        try:
            token, session_id, password = text.split(".")
            number = int(session_id, 16)
            secret = cls(token, number - (1 << 64) if number >> 63 else number, bytes.fromhex(password))
        except ValueError:
            raise not_attached() from None
        if secret.text() != text:
            raise not_attached()
        return secret


class Connections:
    """Counts the open connections of a handle's leases. Each is a session's socket and a thread of kazoo's."""

    def __init__(self, url: str, count_max: int) -> None:
        self._url, self.count_max = url, count_max
        self._free = threading.BoundedSemaphore(count_max)

    def take(self, wait_s: float) -> None:
        """Take one. Raises RegistryUnavailable, naming the option, if all stay in use for this number of seconds."""
        if not self._free.acquire(timeout=wait_s):
            raise RegistryUnavailable(
                f"{self._url}: {self.count_max} lease sessions are open, which is the limit of this handle: close "
                "leases, or raise the option sessions=N of the address and maxClientCnxns of the servers"
            )

    def give_back(self) -> None:
        self._free.release()


class _LeaseLine(Line):
    """A connection that pings only while its session says so."""

    session: LeaseSession

    def _send_ping(self, connect_timeout: float) -> None:
        if self.session.may_ping():
            super()._send_ping(connect_timeout)


class LeaseSession(Session):
    """The session behind one lease, from before it has been granted until after it has ended; a `StoredLease`."""

    def __init__(
        self,
        endpoint: Endpoint,
        layout: Layout,
        clock: Clock,
        connections: Connections,
        ttl: float,
        secret: Secret | None = None,
    ) -> None:
        """`secret` is that of a session to take up again; then `ttl` is the time that was granted to it."""
        super().__init__(endpoint, clock)
        token = new_secret() if secret is None else secret.token
        self.secret = Secret(token, 0, b"") if secret is None else secret
        self.lease_id = id_of(token)
        self.path = layout.lease(self.lease_id)
        self.granted_s = 0.0 if secret is None else ttl
        self.lease: Lease | None = None
        """The grant that this session is of, once there is one."""
        self.made: dict[str, int] = {}
        """The keys whose nodes live with this session, and the transactions that made them."""
        self._asked_s = max(ttl, SESSION_S_MIN) if secret is None else ttl
        self._connections = connections
        self._takes_up = secret is not None
        """Whether a connection takes up a session that another connection has made."""
        self._guard = threading.Lock()
        """Guards the fields below."""
        self._present: Client | None = None
        self._is_over = False
        self._renewed_at = float("-inf")
        """When the last renewal was sent that is later than the one before it by a quarter of the granted time."""
        self._known_alive_at = float("-inf")
        """The latest moment at which the leader is known to have heard of the session."""

    # What both kinds do

    def begin(self) -> float:
        """Make the session and the node that stands for the lease; returns the deadline."""
        try:
            with self.opened(self.bound()):
                self.attempt(self._make_node, self.bound())
        except LeaseExpired as error:
            raise RegistryUnavailable(f"{self.endpoint.url}: the session expired before the lease began") from error
        finally:
            if not self.granted_s:
                self._discard()
        return self._deadline()

    def _make_node(self, client: Client, until: float) -> None:
        granted_s = client.line.granted_s
        try:
            granted_ms = b"%d" % round(granted_s * 1000)
            self.wait(client.create_async(self.path, granted_ms, ephemeral=True), until)
        except NoNodeError:
            self.make(client, ancestors(self.path), until)
            raise TryAgain from None
        except NodeExistsError:
            pass  # made by a request whose reply was lost; by this session, for none other has been
        if client.client_id is None:
            raise TryAgain  # the connection was lost after the reply; the next attempt finds the node
        session_id, password = client.client_id
        self.secret = self.secret._replace(session_id=session_id, password=password)
        self._began()
        with self._guard:
            self._renewed_at = self._known_alive_at = client.line.touched_at
        self.granted_s = granted_s

    def renew(self) -> float:
        """Prove that the leader knows this session and has a quorum; returns the new deadline."""
        until = self.clock.now() + self.granted_s / 4
        with self.opened(until):
            try:
                client = self.connected(until)
            except ConnectionLoss as error:
                raise RegistryUnavailable(f"{self.endpoint.url}: {error}") from error
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
            return self._renewed(sent_at, client.line.touched_at)

    def _renewed(self, sent_at: float, touched_at: float) -> float:
        with self._guard:
            if sent_at - self._renewed_at >= self.granted_s / 4:
                self._known_alive_at = max(self._known_alive_at, self._renewed_at)
                self._renewed_at = sent_at
            self._known_alive_at = max(self._known_alive_at, touched_at)
        return self._deadline()

    def _deadline(self) -> float:
        return self._known_alive_at + self.granted_s * (1 - MARGIN)

    def expire(self) -> LeaseExpired:
        """The store has said that the lease has ended."""
        self._is_over = True
        if self.lease is not None:
            self.lease.expire()
        return LeaseExpired(f"lease {self.lease_id} has ended; take a new one and claim again")

    def connected(self, until: float) -> Client:
        """As `Session.connected`. If the server does not take up the session that was asked for, because it has expired
        or the password is wrong, kazoo connects with a new one and tells nobody: under that one nothing is sent."""
        client = super().connected(until)
        if self._takes_up:
            if (found := client.client_id) is None:
                raise ConnectionLoss("the connection was lost again")
            if found[0] != self.secret.session_id:
                raise self.expire()
        return client

    def _client(self) -> Client:
        if self._is_over or self._present is None or (self.lease is not None and not self.lease.alive):
            raise LeaseExpired(f"lease {self.lease_id} has ended; take a new one and claim again")
        return self._present

    def _expired(self) -> None:
        raise self.expire()

    def _connect(self) -> Client:
        """A client for the session. Called with a place taken from `_connections`."""
        session = (self.secret.session_id, self.secret.password) if self.granted_s else None
        client = Client(self.endpoint, self._asked_s, self.clock, self._on_state, _LeaseLine, session)
        client.line.session = self
        client.begin()
        return client

    def _on_state(self, state: str) -> None:
        """Called in kazoo's connection thread, before it makes another session."""
        if state != KazooState.LOST:
            return
        with self._guard:  # held while `_present` is being set
            if self._is_over or self._present is None or self._present.line.is_left:
                return
            self._is_over = True
        log.info("%s: the session of lease %s has expired", self.endpoint.url, self.lease_id)
        self.expire()
        self._discard()

    # What each kind does in its own way

    def _began(self) -> None:
        """The session was made by the connection that is open now."""

    def may_ping(self) -> bool:
        raise NotImplementedError

    def opened(self, until: float) -> contextlib.AbstractContextManager[None]:
        """There is a client for the session while this is entered."""
        raise NotImplementedError

    def end(self) -> None:
        raise NotImplementedError

    def let_go(self) -> None:
        """Free what this process holds; see `StoredLease.let_go`."""
        raise NotImplementedError

    def _discard(self) -> None:
        """Free what this process holds, of a session that has expired or never had a lease."""
        raise NotImplementedError


class StandingSession(LeaseSession):
    """A session that stays connected from `begin` to `end`."""

    def may_ping(self) -> bool:
        return self.lease is None or (self.lease.alive and not self.lease.is_abandoned)

    @contextlib.contextmanager
    def opened(self, until: float) -> Iterator[None]:
        if self._present is None:
            self._connections.take(0.0)
            try:
                with self._guard:
                    self._present = self._connect()
            except BaseException:
                self._connections.give_back()
                raise
        yield

    def end(self) -> None:
        """Close the session, which removes its nodes. Without a connection it is left to expire."""
        with self._guard:
            was_over, self._is_over = self._is_over, True
            client = self._present
        is_told = client is not None and bool(client.connected)
        is_told &= self._shut(seconds_left(min(self.endpoint.timeout, END_S_MAX)))
        self._is_unconfirmed |= not is_told and not was_over
        if self._is_unconfirmed:
            raise RegistryUnavailable(f"{self.endpoint.url}: no answer, so the session was left to expire")

    def let_go(self) -> None:
        if (client := self._take_client()) is not None:
            try:
                client.leave()
            finally:
                self._connections.give_back()

    def _discard(self) -> None:
        self._shut(0.0)

    def _shut(self, wait_s: float) -> bool:
        if (client := self._take_client()) is None:
            return True
        try:
            return client.shut(wait_s)
        finally:
            self._connections.give_back()

    def _take_client(self) -> Client | None:
        """The client, for the one call that frees it; None for all others."""
        with self._guard:
            was_freed, self._was_freed = self._was_freed, True
        return None if was_freed else self._present

    _was_freed = False
    _is_unconfirmed = False
    """Whether `end` was called and the server did not confirm that it closed the session."""


class VisitingSession(LeaseSession):
    """A session that is connected only during a call. Calls that overlap share the connection."""

    _visitors = 0
    """How many calls use `_present` now."""

    def _began(self) -> None:
        self._takes_up = True

    def may_ping(self) -> bool:
        return False

    @contextlib.contextmanager
    def opened(self, until: float) -> Iterator[None]:
        self._enter(until)
        try:
            yield
        finally:
            self._leave()

    def _enter(self, until: float) -> None:
        while not self._join():
            self._connections.take(max(0.0, until - self.clock.now()))
            with self._guard:
                if not self._visitors:
                    try:
                        self._present = self._connect()
                    except BaseException:
                        self._connections.give_back()
                        raise
                    self._visitors = 1
                    return
            self._connections.give_back()  # another call has connected meanwhile

    def _join(self) -> bool:
        with self._guard:
            if self._visitors:
                self._visitors += 1
            return self._visitors > 0

    def _leave(self) -> None:
        with self._guard:
            self._visitors -= 1
            if self._visitors:
                return
            client, self._present = self._present, None
        try:
            if client is not None and self._is_over:
                client.shut(0.0)  # also the session that kazoo has made in place of the expired one
            elif client is not None:
                client.leave()
        finally:
            self._connections.give_back()

    def end(self) -> None:
        """Connect to the session once more and close it, which removes its nodes."""
        if self._is_over:
            return
        until = self.clock.now() + seconds_left(self.endpoint.timeout)
        lease, self.lease = self.lease, None  # it is past its deadline by now, and would refuse the connection
        try:
            with self.opened(until):
                client = self.connected(until)
                if not client.shut(seconds_left(min(self.endpoint.timeout, END_S_MAX))):
                    raise RegistryUnavailable(f"{self.endpoint.url}: no answer, so the session was left to expire")
        except LeaseExpired:
            pass  # it had ended already
        except ConnectionLoss as error:
            raise RegistryUnavailable(f"{self.endpoint.url}: {error}, so the session was left to expire") from error
        finally:
            self.lease = lease
        self._is_over = True

    def let_go(self) -> None:
        """Nothing is held between two calls."""

    def _discard(self) -> None:
        """The call that is under way frees the client."""


def session_of(lease: Lease | None) -> LeaseSession | None:
    """The session of a lease that a handle has given out."""
    if lease is None:
        return None
    assert isinstance(lease.stored, LeaseSession)
    return lease.stored
