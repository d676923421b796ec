"""A ZooKeeper session as kazoo keeps it, and calls through it that end in time.

The problem: kazoo reconnects, and after an expiry makes a new session, by itself and without an end; its calls wait for
ever. Here every call has a bound, kazoo's errors stay inside, and what must be known about a session is known: the
time-out that the server granted, the moment of the last contact, and that it is over.

Invariants:
- Before a connection is there, nothing is handed to kazoo: what it is given while disconnected it may send late.
- An action is done again only after an error that says that it had no effect, or if it only reads.
- kazoo's threads are never blocked: what they tell is put on a queue or sets a flag.

On failure: no connection within the bound is `RegistryUnavailable`. If kazoo's own thread dies (it does when a server
sends an error that it does not know), the next call starts a new client.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kazoo.client import KazooClient
from kazoo.exceptions import (
    AuthFailedError,
    ConnectionDropped,
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
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
from kazoo.protocol.connection import CLOSE_RESPONSE, DELETED_EVENT, ConnectionHandler
from kazoo.protocol.serialization import Watch
from kazoo.protocol.states import KeeperState
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from pxrs.clock import Clock
from pxrs.errors import AccessDenied, Closed, PxrsError, RegistryUnavailable
from pxrs.registry.limit import seconds_left
from pxrs.registry.zookeeper.bulk import NODES_FIRST, NODES_MAX, Found, MultiRead, SetWatches, next_count

log = logging.getLogger(__name__)

# Below this level kazoo logs every request: values, and the password of the session and of the user.
_kazoo_log = logging.getLogger(f"{__name__}.kazoo")
_kazoo_log.setLevel(logging.ERROR)

T = TypeVar("T")

UNSENT_MAX = 160
"""How many requests of one session may wait to be sent. kazoo's pipe holds a byte for some 270."""
IN_FLIGHT_MAX = 100
"""How many requests of one call are under way at a time; each may bring a value of the largest size."""
PAUSE_S = 0.02
"""After a disturbance that left the connection standing; without one, the wait for a connection is the pause."""

CLOSE_S_MAX = 1.0
"""How long a registry's own session may take to be closed. Nothing hangs on it: the server may forget it later."""

LEAVE_S_MAX = 1.0
"""How long `Client.leave` waits for kazoo's thread, which has nothing more to do than to notice."""

DENIED = (NoAuthError, AuthFailedError, InvalidACLError, SessionClosedRequireSaslError)
# The request was not executed: the session was over, or is served by another server now, or the server was too busy.
REFUSED = (SessionExpiredError, SessionMovedError, ThrottledOpError)
_DISTURBED = (*REFUSED, ConnectionLoss, OperationTimeoutError)


class Crowded(KazooException):  # type: ignore[misc]
    """Too many requests wait to be sent; this one is not."""


class TryAgain(Exception):
    """Inside an action: nothing was changed, and the reason is gone."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How to reach an ensemble, and as whom."""

    url: str
    hosts: tuple[str, ...]
    timeout: float
    """The bound of every call, in seconds."""
    login: str | None = field(default=None, repr=False)
    """user:password"""
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    @property
    def acl(self) -> Any:
        return CREATOR_ALL_ACL if self.login else OPEN_ACL_UNSAFE

    @property
    def uses_tls(self) -> bool:
        return bool(self.ca or self.cert)


class Client(KazooClient):  # type: ignore[misc]
    """kazoo's client with the `Line` below."""

    def __init__(
        self,
        endpoint: Endpoint,
        session_s: float,
        clock: Clock,
        on_state: Callable[[str], None],
        line: type[Line],
        session: tuple[int, bytes] | None = None,
    ) -> None:
        """`session`: the id and the password of a session to take up again; None makes a new one."""
        self._clock, self._patience_s = clock, endpoint.timeout
        self._one_by_one = threading.Lock()
        super().__init__(
            hosts=",".join(endpoint.hosts),
            timeout=session_s,
            client_id=session,
            handler=_Handler(session_s / len(endpoint.hosts)),
            default_acl=endpoint.acl,
            auth_data=[("digest", endpoint.login)] if endpoint.login else None,
            connection_retry=KazooRetry(max_tries=-1, delay=0.05, max_delay=0.5),
            command_retry=KazooRetry(max_tries=0),
            logger=_kazoo_log,
            use_ssl=endpoint.uses_tls,
            check_hostname=endpoint.uses_tls,
            ca=endpoint.ca,
            certfile=endpoint.cert,
            keyfile=endpoint.key,
        )
        self.line = self._connection = line(self, self._conn_retry.copy(), logger=_kazoo_log)
        self.line.clock = clock
        self.add_listener(lambda state: self._told(state, on_state))
        self.was_refused = False
        self.is_connected = threading.Event()

    def begin(self) -> None:
        """Start the thread that connects, and stays connected until `shut` or `leave`."""
        self.is_connected = self.start_async()

    def _call(self, request: Any, async_object: Any) -> Any:
        """kazoo wakes its connection by a byte in a pipe, and waits for ever if that is full of bytes that a hanging
        connection has not read, one for each request that it has not sent. So there are never so many of them; who
        finds no room in time is told, and nothing is sent."""
        until = self._clock.now() + seconds_left(self._patience_s)
        while True:
            with self._one_by_one:
                if len(self._queue) < UNSENT_MAX:
                    return super()._call(request, async_object)
            if self._clock.now() >= until:
                raise Crowded(f"{UNSENT_MAX} requests wait to be sent")
            time.sleep(PAUSE_S)

    def ask(self, request: Any) -> Any:
        """Send a request that kazoo has no method for."""
        result = self.handler.async_result()
        self._call(request, result)
        return result

    def _told(self, state: str, on_state: Callable[[str], None]) -> None:
        self.was_refused |= self.client_state == KeeperState.AUTH_FAILED
        on_state(state)

    def shut(self, wait_s: float) -> bool:
        """End the session and free everything; True if the server said so in time. After that the connection is
        dropped, and the server is left to find out."""

        def run() -> None:
            try:
                self.stop()
                self.close()
            except Exception:
                log.exception("kazoo could not be stopped")

        thread = threading.Thread(target=run, name="pxrs-zookeeper-stop", daemon=True)
        thread.start()
        thread.join(wait_s)
        if not thread.is_alive():
            return True
        self.line.drop()
        return False

    def leave(self) -> None:
        """Drop the connection and free everything. The server is told nothing and keeps the session until it expires.
        When this returns, the session is not touched any more."""
        self.line.is_left = True
        self._stopped.set()
        self.line.drop()
        if self.line.connection_stopped.wait(LEAVE_S_MAX):
            self.line.stop()
            self.close()
        else:  # it waits for a host that accepts no connection; `Line` drops the connection if one is made
            log.warning("the connection thread of a session has not ended within %g s", LEAVE_S_MAX)
            threading.Thread(target=self._free, name="pxrs-zookeeper-stop", daemon=True).start()

    def _free(self) -> None:
        self.line.stop()
        self.close()


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo would give a single silent host the whole session's time to accept a connection. And it would start two
    threads for callbacks, for each session: without them it makes callbacks on the connection's own thread, which is as
    good, because ours only set a flag or put an item on a queue."""

    def __init__(self, connect_s_max: float) -> None:
        super().__init__()
        self._connect_s_max = connect_s_max

    def start(self) -> None:
        """Start no thread; what is not `running` makes callbacks at once."""

    def create_connection(self, *args: Any, **options: Any) -> Any:
        options["timeout"] = min(options["timeout"], self._connect_s_max)
        return super().create_connection(*args, **options)


class Line(ConnectionHandler):  # type: ignore[misc]
    """kazoo's connection, and what kazoo keeps to itself about it."""

    clock: Clock
    granted_s: float = 0.0
    """The session time-out that the server granted; known once a request was answered."""
    touched_at: float = 0.0
    """Before the connection was asked for that stands now. The leader itself grants it, and counts from then."""
    has_ended = False
    is_left = False
    """Set by `Client.leave`: no further connection is made."""
    on_event: Callable[[str, bool], None] = staticmethod(lambda path, is_gone: None)
    """Told of the path of what has changed, and whether it is gone, in the order in which the server sent events and
    answers. Kazoo calls back from another thread, and only for watches that it has set itself."""

    def _connect(self, host: str, hostip: str, port: int) -> Any:
        if self.is_left:
            raise ConnectionDropped("the session was left")
        began = self.clock.now()
        read_timeout_ms, connect_timeout_ms = super()._connect(host, hostip, port)
        if self.is_left:
            raise ConnectionDropped("the session was left")
        self.granted_s = round(read_timeout_ms * 1.5) / 1000  # kazoo waits for two thirds of it
        self.touched_at = began
        return read_timeout_ms, connect_timeout_ms

    def _read_socket(self, read_timeout: float) -> Any:
        # What TLS has already decrypted does not make the socket readable: a second reply would wait for a third.
        answer = super()._read_socket(read_timeout)
        while answer != CLOSE_RESPONSE and hasattr(self._socket, "pending") and self._socket.pending():
            answer = super()._read_socket(read_timeout)
        return answer

    def _read_watch_event(self, buffer: bytes, offset: int) -> None:
        event, _ = Watch.deserialize(buffer, offset)
        self.on_event(event.path, event.type == DELETED_EVENT)
        super()._read_watch_event(buffer, offset)

    def drop(self) -> None:
        """Let kazoo find the connection broken, so that it looks for another server."""
        if self._socket is not None:
            with suppress(OSError):  # it may be gone already
                # Not the method of a TLS socket, which would first stop encrypting under kazoo's hands.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def zk_loop(self) -> None:
        try:
            super().zk_loop()
        except Exception:
            log.exception("kazoo's connection thread has died; the next call starts another")
        finally:
            self.has_ended = True


class Session(ABC):
    """What the long-lived session of a registry and that of a lease share."""

    def __init__(self, endpoint: Endpoint, clock: Clock) -> None:
        self.endpoint, self.clock = endpoint, clock

    @abstractmethod
    def _client(self) -> Client:
        """The present client, or an error if there is to be none."""

    @abstractmethod
    def _expired(self) -> None:
        """The server said that the session is over. Raises if that is final."""

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
        raise RegistryUnavailable(f"{self.endpoint.url}: no server could be reached in time")

    def attempt(self, action: Callable[[Client, float], T], until: float) -> T:
        """Do the action on a standing connection, again if it was disturbed before it had an effect."""
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
            raise ConnectionLoss(f"kazoo could not read an answer: {error!r}") from error

    def gather(self, ask: Callable[[str], Any], paths: Iterable[str]) -> Iterator[Any]:
        """The answers to a request for each path, in order, None where there is no node. The bound is that of each
        answer: there may be many of them."""
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
        """Have an event come to `Line.on_event` when one of these keys is written or removed, or if it is not there."""
        for start in range(0, len(paths), NODES_MAX):
            self.wait(client.ask(SetWatches(tuple(paths[start : start + NODES_MAX]))), self.bound())

    def make(self, client: Client, folders: Iterable[str], until: float) -> None:
        """Make the folders that are not there, the highest first. Others may be doing the same."""
        wanted = sorted(set(folders), key=lambda path: (path.count("/"), path))
        # Asked before they are made: to make one that is there takes a right on its parent that we may not have.
        found = self.gather(client.exists_async, wanted)
        missing = [path for path, stat in zip(wanted, list(found), strict=True) if stat is None]
        results = [client.create_async(path, acl=self.endpoint.acl) for path in missing]
        for result in results:
            result.wait(max(0.0, until - self.clock.now()))
            error = result.exception
            if isinstance(error, (*DENIED, *_DISTURBED)):
                raise error


def barrier(client: Client, path: str) -> Any:
    """A transaction that changes nothing. What is asked behind it sees all that was committed before it. Its one answer
    tells whether the node is there.

    `sync` does not do that: to a client of the leader it means nothing, and the leader tells its followers of a
    commit before it has applied it itself, so that a reader there can miss what a writer elsewhere was told is done.
    And a leader that was deposed and has not noticed answers `sync`, and cannot answer this.
    """
    transaction = client.transaction()
    transaction.check(path, -1)
    return transaction.commit_async()


def denied(endpoint: Endpoint, error: Exception) -> PxrsError:
    login = "the credentials given do" if endpoint.login else "a client without credentials does"
    return AccessDenied(f"{endpoint.url}: {login} not have the right to this ({_say(error)})")


def _say(error: Exception) -> str:
    return str(error) or type(error).__name__


class LastingSession(Session):
    """A registry's own session. It holds no node, so losing it costs nothing but the watches: another one follows."""

    def __init__(
        self,
        endpoint: Endpoint,
        clock: Clock,
        on_state: Callable[[str], None],
        on_event: Callable[[str, bool], None],
    ) -> None:
        super().__init__(endpoint, clock)
        # Short enough that a server that hangs is given up, and another one found, within the bound of a call.
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
        log.info("%s: the session has expired, a new one follows", self.endpoint.url)

    def _start(self) -> Client:
        client = Client(self.endpoint, self._session_s, self.clock, self._on_state, Line)
        client.line.on_event = self._on_event
        client.begin()
        return client
