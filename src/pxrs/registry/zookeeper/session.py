"""Calls through a ZooKeeper session, each of which ends in time.

The problem: kazoo's calls wait without a bound, and kazoo reports a lost connection, an expired session and a refused
request by many errors. Here every call has a bound, and no error of kazoo's leaves this package.

Invariants:
- A request is handed to kazoo only while there is a connection: kazoo may send a request late that it was given while
  it was disconnected.
- An action is repeated only after an error that proves that it had no effect, or if it only reads.
- No callback blocks kazoo's threads: each puts an item on a queue or sets a flag.

On failure: no connection within the bound is `RegistryUnavailable`. If kazoo's own thread dies (it does when a server
sends an error that it does not know), the next call starts a new client.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from kazoo.exceptions import (
    AuthFailedError,
    ConnectionLoss,
    InvalidACLError,
    KazooException,
    NoAuthError,
    NoNodeError,
    OperationTimeoutError,
    SessionClosedRequireSaslError,
    SessionExpiredError,
    SessionMovedError,
    ThrottledOpError,
    UnimplementedError,
)
from kazoo.handlers.threading import KazooTimeoutError

from pxrs.clock import Clock
from pxrs.errors import AccessDenied, Closed, PxrsError, RegistryUnavailable
from pxrs.registry.limit import seconds_left
from pxrs.registry.zookeeper.bulk import NODES_FIRST, NODES_MAX, Found, MultiRead, SetWatches, next_count
from pxrs.registry.zookeeper.client import Client, Endpoint, Line

log = logging.getLogger(__name__)

T = TypeVar("T")

IN_FLIGHT_MAX = 100
"""How many requests of one call are under way at a time; each may bring a value of the largest size."""
PAUSE_S = 0.02
"""How long `attempt` waits before it repeats an action on the same connection."""

CLOSE_S_MAX = 1.0
"""How long a registry's own session may take to be closed. No node depends on it, so it may as well expire."""

DENIED = (NoAuthError, AuthFailedError, InvalidACLError, SessionClosedRequireSaslError)
# The request was not executed: the session was over, or is served by another server now, or the server was too busy.
REFUSED = (SessionExpiredError, SessionMovedError, ThrottledOpError)
_DISTURBED = (*REFUSED, ConnectionLoss, OperationTimeoutError)


class TryAgain(Exception):
    """Raised by an action that has changed nothing and whose next attempt may succeed."""


class Session(ABC):
    """What the long-lived session of a registry and that of a lease share."""

    def __init__(self, endpoint: Endpoint, clock: Clock) -> None:
        self.endpoint, self.clock = endpoint, clock

    @abstractmethod
    def _client(self) -> Client:
        """The present client, or an error if there is to be none."""

    @abstractmethod
    def _expired(self) -> None:
        """The server has said that the session expired. Raises if no other session may take its place."""

    def bound(self) -> float:
        """When a call that begins now must end."""
        return self.clock.now() + seconds_left(self.endpoint.timeout)

    def connected(self, until: float) -> Client:
        client = self._client()
        if client.is_connected.is_set() or client.is_connected.wait(max(0.0, until - self.clock.now())):
            return client
        if client.was_refused:
            raise AccessDenied(f"{self.endpoint.url}: the server refused the credentials")
        self._client()
        raise RegistryUnavailable(f"{self.endpoint.url}: no server could be reached within {self.endpoint.timeout:g} s")

    def attempt(self, action: Callable[[Client, float], T], until: float) -> T:
        """Call the action with a connected client; again if it was interrupted before it had an effect."""
        while True:
            try:
                return action(self.connected(until), until)
            except TryAgain:
                reason = "its keys kept changing"
            except _DISTURBED as error:
                reason = _say(error)
                if isinstance(error, SessionExpiredError):
                    self._expired()
                time.sleep(PAUSE_S)
            except DENIED as error:
                raise denied(self.endpoint, error) from error
            except KazooTimeoutError as error:
                raise RegistryUnavailable(
                    f"{self.endpoint.url}: no answer within {self.endpoint.timeout:g} s"
                ) from error
            except KazooException as error:
                raise RegistryUnavailable(f"{self.endpoint.url}: {_say(error)}") from error
            if self.clock.now() >= until:
                raise RegistryUnavailable(f"{self.endpoint.url}: {reason} for {self.endpoint.timeout:g} s")

    def wait(self, result: Any, until: float) -> Any:
        """The answer to a request, or its error, or kazoo's own time-out error."""
        try:
            return result.get(timeout=max(0.0, until - self.clock.now()))
        except (KazooException, KazooTimeoutError):
            raise
        except Exception as error:
            raise ConnectionLoss(f"a reply of ZooKeeper could not be decoded: {error!r}") from error

    def gather(self, ask: Callable[[str], Any], paths: Iterable[str]) -> Iterator[Any]:
        """The answers to a request for each path, in order, None where there is no node. Each answer has a bound of its
        own, because there may be many of them."""
        waiting: deque[Any] = deque()
        for path in paths:
            if len(waiting) == IN_FLIGHT_MAX:
                yield self._found(waiting.popleft())
            waiting.append(ask(path))
        while waiting:
            yield self._found(waiting.popleft())

    def _found(self, result: Any) -> Any:
        try:
            return self.wait(result, self.bound())
        except NoNodeError:
            return None

    def read(self, client: Client, paths: Iterable[str]) -> Iterator[Found | None]:
        """The values and stats of many nodes, in order, None where there is no node, by as few requests as may be."""
        rest, count = list(paths), NODES_FIRST
        while rest:
            some, rest = rest[:count], rest[count:]
            try:
                answer = self.wait(client.ask(MultiRead(tuple(some))), self.bound())
            except UnimplementedError:  # a server before 3.6
                yield from self.gather(client.get_async, [*some, *rest])
                return
            for each in answer:
                if isinstance(each, Exception):
                    raise each
            yield from answer
            count = next_count(answer)

    def watch(self, client: Client, paths: Sequence[str]) -> None:
        """Register watches, so that `Line.on_event` gets an event when one of these keys is written or removed, or
        created if it does not exist."""
        for start in range(0, len(paths), NODES_MAX):
            self.wait(client.ask(SetWatches(tuple(paths[start : start + NODES_MAX]))), self.bound())

    def make(self, client: Client, folders: Iterable[str], until: float) -> None:
        """Make the folders that are not there, the highest first. Others may be doing the same."""
        wanted = sorted(set(folders), key=lambda path: (path.count("/"), path))
        # Look before creating: to create a node that is there takes a right on its parent that we may not have.
        found = self.gather(client.exists_async, wanted)
        missing = [path for path, stat in zip(wanted, list(found), strict=True) if stat is None]
        results = [client.create_async(path, acl=self.endpoint.acl) for path in missing]
        for result in results:
            result.wait(max(0.0, until - self.clock.now()))
            error = result.exception
            if isinstance(error, (*DENIED, *_DISTURBED)):
                raise error


def barrier(client: Client, path: str) -> Any:
    """A transaction that changes nothing. A request that is sent after it sees everything that was committed before it.
    Its one answer tells whether the node is there.

    `sync` does not do that: at the leader it has no effect, and the leader tells its followers of a commit before it
    has applied the commit itself, so that a reader at the leader can miss a commit that was acknowledged to a client of
    a follower. And a deposed leader that has not noticed it answers `sync`, but cannot answer this transaction.
    """
    transaction = client.transaction()
    transaction.check(path, -1)
    return transaction.commit_async()


def denied(endpoint: Endpoint, error: Exception) -> PxrsError:
    login = "the credentials do" if endpoint.login else "a client without credentials does"
    return AccessDenied(f"{endpoint.url}: {login} not have the permission for this ({_say(error)})")


def _say(error: Exception) -> str:
    return str(error) or type(error).__name__


class LastingSession(Session):
    """A registry's own session. It has no ephemeral nodes, so that another session can take its place when it expires;
    only the watches must then be armed again."""

    def __init__(
        self,
        endpoint: Endpoint,
        clock: Clock,
        on_state: Callable[[str], None],
        on_event: Callable[[str, bool], None],
    ) -> None:
        super().__init__(endpoint, clock)
        # Short enough that kazoo leaves a server that hangs, and finds another one, within the bound of a call.
        self._session_s = max(1.0, endpoint.timeout * 0.6)
        self._on_state, self._on_event = on_state, on_event
        self._guard = threading.Lock()
        self._is_closed = False
        self._present = self._start()

    def close(self) -> None:
        with self._guard:
            self._is_closed = True
            client = self._present
        client.shut(CLOSE_S_MAX)

    def _client(self) -> Client:
        with self._guard:
            if self._is_closed:
                raise Closed(f"the registry {self.endpoint.url} was closed")
            if self._present.line.has_ended:
                self._present.shut(0.0)
                self._present = self._start()
            return self._present

    def _expired(self) -> None:
        log.info("%s: the session has expired; a new one will be opened", self.endpoint.url)

    def _start(self) -> Client:
        client = Client(self.endpoint, self._session_s, self.clock, self._on_state, Line)
        client.line.on_event = self._on_event
        client.begin()
        return client
