"""kazoo's client and connection, with what kazoo keeps to itself or does without a bound.

kazoo reconnects, and after an expiry makes a new session, by itself and without an end. `Client` adds: a bound on
requests that wait to be sent, so that no caller hangs in kazoo's pipe; an end with or without closing the session
(`shut`, `leave`); one thread for each session instead of three. `Line` adds what must be known about a connection: the
time-out that the server granted, and the moment at which the connection was asked for.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionDropped, KazooException
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import CLOSE_RESPONSE, DELETED_EVENT, ConnectionHandler
from kazoo.protocol.serialization import Watch
from kazoo.protocol.states import KeeperState
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from pxrs.clock import Clock
from pxrs.registry.limit import seconds_left

log = logging.getLogger(__name__)

# Below this level kazoo logs every request: values, and the password of the session and of the user.
_kazoo_log = logging.getLogger(f"{__name__}.kazoo")
_kazoo_log.setLevel(logging.ERROR)

UNSENT_MAX = 160
"""How many requests of one session may wait to be sent. kazoo's pipe holds a byte for some 270."""
UNSENT_PAUSE_S = 0.02
"""How long a request waits before it looks again whether there is room to be sent."""
_LEFT = "this process has left the ZooKeeper session to expire and makes no further connection"
LEAVE_S_MAX = 1.0
"""How long `Client.leave` waits for kazoo's thread, which has nothing more to do than to notice."""


class Crowded(KazooException):  # type: ignore[misc]
    """Too many requests wait to be sent. The request that raised this was not sent."""


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
        """kazoo wakes its connection thread by one byte in a pipe for each request, and blocks for ever if the pipe is
        full, because the thread hangs and has not read it. So at most UNSENT_MAX requests wait to be sent. A caller
        that finds no room in time gets `Crowded`, and its request is not sent."""
        until = self._clock.now() + seconds_left(self._patience_s)
        while True:
            with self._one_by_one:
                if len(self._queue) < UNSENT_MAX:
                    return super()._call(request, async_object)
            if self._clock.now() >= until:
                raise Crowded(f"{UNSENT_MAX} requests are already waiting to be sent")
            time.sleep(UNSENT_PAUSE_S)

    def ask(self, request: Any) -> Any:
        """Send a request that kazoo has no method for."""
        result = self.handler.async_result()
        self._call(request, result)
        return result

    def _told(self, state: str, on_state: Callable[[str], None]) -> None:
        self.was_refused |= self.client_state == KeeperState.AUTH_FAILED
        on_state(state)

    def shut(self, wait_s: float) -> bool:
        """Close the session and free everything; True if the server confirmed it in time. Otherwise the connection is
        dropped, and the session ends in the server when it expires."""

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
        When this returns, nothing touches the session any more, unless kazoo is connecting just now to a host that does
        not answer: if that host answers later, the session is touched once, and the connection dropped."""
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
    """kazoo's connection, with what kazoo does not tell about it."""

    clock: Clock
    granted_s: float = 0.0
    """The session time-out that the server granted; known once a request was answered."""
    touched_at: float = 0.0
    """The moment before the present connection was asked for. The leader grants it, and counts the session's time-out
    from then or later."""
    has_ended = False
    is_left = False
    """Set by `Client.leave`: no further connection is made."""
    on_event: Callable[[str, bool], None] = staticmethod(lambda path, is_gone: None)
    """Called with the path of the node that has changed, and whether the node is gone, in the order in which the server
    sent events and answers. kazoo's own callbacks are called later, and only for watches that kazoo has set."""

    def _connect(self, host: str, hostip: str, port: int) -> Any:
        if self.is_left:
            raise ConnectionDropped(_LEFT)
        began = self.clock.now()
        read_timeout_ms, connect_timeout_ms = super()._connect(host, hostip, port)
        if self.is_left:
            raise ConnectionDropped(_LEFT)
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
        """Break the connection, so that kazoo connects to another server."""
        if self._socket is not None:
            with suppress(OSError):  # it may be gone already
                # Not the method of a TLS socket, which would switch encryption off while kazoo uses the socket.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def zk_loop(self) -> None:
        try:
            super().zk_loop()
        except Exception:
            log.exception("kazoo's connection thread has died; the next call starts another")
        finally:
            self.has_ended = True
