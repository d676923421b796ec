"""One gRPC connection to one server.

The problem: a gRPC channel makes connections, replaces them and queues calls by itself, so that after a failure it is
not known whether a request was sent. So a channel is used here for one connection only: from the hello of its control
stream until that stream has ended, and then never again. After a break it is closed, and every stream on it fails at
once. After a goodbye of the server, and after an error with which it ended the control stream, the other streams may
finish: the channel is closed when the last of them has ended.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc

from pxrs.remote import flight, wire
from pxrs.remote.client.settings import Settings

HEALTH_CHECK: Final = "/grpc.health.v1.Health/Check"
"""gRPC's health check: the one call that needs no token."""
DRAIN_S_MAX: Final = 10.0
"""How long streams may go on after the server has said goodbye, or has ended the control stream."""
_OPTIONS: Final = (
    ("grpc.enable_retries", 0),
    # Otherwise gRPC gives a new channel the socket of the old one, and its waiting time after a failure.
    ("grpc.use_local_subchannel_pool", 1),
    # Pings notice a connection that is cut without a message. The control stream is a call that is always under way.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # the same for newer versions of gRPC, where it is a minute otherwise
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", wire.MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", wire.MESSAGE_BYTES_MAX),
    ("grpc.enable_http_proxy", 0),
)


class Channel:
    """The methods of Flight that the client uses, and the health check. Messages are bytes in both directions. Threads
    share it."""

    def __init__(self, target: str, settings: Settings) -> None:
        token = settings.token()
        self.target = target
        self.metadata = (
            *(() if token is None else ((wire.TOKEN_METADATA, f"Bearer {token}"),)),
            *(((wire.DIRECT_METADATA, "1"),) if settings.is_direct else ()),
        )
        if settings.certificates is None:
            self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        else:
            ca, cert, key = settings.certificates.ca, settings.certificates.cert, settings.certificates.key
            credentials = grpc.ssl_channel_credentials(ca, key, cert)
            self._channel = grpc.secure_channel(target, credentials, options=_OPTIONS)
        self.get: Any = self._channel.unary_stream(f"/{flight.SERVICE}/DoGet")
        self.put: Any = self._channel.stream_stream(f"/{flight.SERVICE}/DoPut")
        self.exchange: Any = self._channel.stream_stream(f"/{flight.SERVICE}/DoExchange")
        self.health: Any = self._channel.unary_unary(HEALTH_CHECK)
        # Reentrant: the garbage collector may end a generator that reads a stream, while this thread has the lock.
        self._lock = threading.RLock()
        self._users = 0
        self._is_retired = False
        self._timer: threading.Timer | None = None

    @contextmanager
    def used(self) -> Iterator[None]:
        """A stream is open on this channel during the block."""
        pid = os.getpid()
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            # Not in a forked child: a thread that does not exist there may hold the lock.
            if os.getpid() == pid:
                with self._lock:
                    self._users -= 1
                    is_last = self._is_retired and not self._users
                if is_last:
                    self.close()

    def retire(self) -> None:
        """Close it when no stream is open on it any more, in DRAIN_S_MAX at the latest."""
        with self._lock:
            if self._is_retired:
                return
            self._is_retired = True
            if self._users:
                self._timer = threading.Timer(DRAIN_S_MAX, self._channel.close)
                self._timer.daemon = True
                self._timer.start()
                return
        self.close()

    def close(self) -> None:
        """End every stream on it. Idempotent."""
        with self._lock:
            self._is_retired = True
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        self._channel.close()
