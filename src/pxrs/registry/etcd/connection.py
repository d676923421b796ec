"""A connection to one member of an etcd cluster.

The problem: a gRPC channel makes connections, replaces them and queues calls by itself, so that after a failure it is
not known whether a request was sent. So a channel is used here for one connection only: it is used from the first
answer until `is_sound` becomes False, and then never again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from pyetcd import etcdrpc as rpc

from pxrs.registry.etcd.faults import Proof, fault_of

Metadata = tuple[tuple[str, str], ...]

# A member without a leader then says so at once, instead of keeping the request until it times out.
HAS_LEADER: Metadata = (("hasleader", "true"),)

_CHANNEL_OPTIONS = (
    ("grpc.enable_retries", 0),
    # Otherwise gRPC gives a new channel the socket of the old one, and its waiting time after a failure.
    ("grpc.use_local_subchannel_pool", 1),
    # etcd hangs up on a client that pings more often than every 5 s, or with no call under way.
    ("grpc.keepalive_time_ms", 7_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),  # the same for newer versions of gRPC, where it is a minute otherwise
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
)


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files for TLS: the authority to trust, if not those that gRPC ships, and our own certificate, if any."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None = field(repr=False)


class Connection:
    """A channel to one member, with etcd's methods. `is_sound` from `prove` until it is seen to have ended."""

    def __init__(self, target: str, certificates: Certificates | None) -> None:
        self.target = target
        self.is_sound = False
        if certificates is None:
            self._channel = grpc.insecure_channel(target, options=_CHANNEL_OPTIONS)
        else:
            credentials = grpc.ssl_channel_credentials(certificates.ca, certificates.key, certificates.cert)
            self._channel = grpc.secure_channel(target, credentials, options=_CHANNEL_OPTIONS)
        keys, leases = rpc.KVStub(self._channel), rpc.LeaseStub(self._channel)
        self.range, self.txn = keys.Range, keys.Txn
        self.grant, self.revoke, self.time_to_live = leases.LeaseGrant, leases.LeaseRevoke, leases.LeaseTimeToLive
        self.authenticate = rpc.AuthStub(self._channel).Authenticate
        self.watch = rpc.WatchStub(self._channel).Watch
        self._keep_alive = leases.LeaseKeepAlive
        self._ended = threading.Event()

    def prove(self, timeout: float) -> None:
        """Get any answer from the member: it is there, speaks etcd, takes our certificate and has a leader."""
        try:
            self.range(rpc.RangeRequest(key=b"/", serializable=True), timeout=timeout, metadata=HAS_LEADER)
        except grpc.RpcError as error:
            if fault_of(error).proof in (Proof.LOST, Proof.REFUSED):
                raise
        self._post_sentinel()

    def keep_alive(self, request: Any, timeout: float, metadata: Metadata) -> Any:
        """Renew a lease: one request and one answer, on a stream of their own."""
        answers = self._keep_alive(iter((request,)), timeout=timeout, metadata=metadata)
        try:
            for answer in answers:
                return answer
        finally:
            answers.cancel()
        raise _Unanswered

    def close(self) -> None:
        """End every call and stream on it."""
        self._notice_end()
        self._channel.close()

    def _post_sentinel(self) -> None:
        """Keep a stream open on which nothing is sent. It ends when the connection ends, or when the member has no
        leader; and while it is open gRPC sends pings, which notice a connection that broke without a message."""
        self.is_sound = True
        self._sentinel = self.watch(self._silence(), metadata=HAS_LEADER)  # kept: gRPC cancels what nobody holds
        if not self._sentinel.add_callback(self._notice_end):
            self._notice_end()

    def _silence(self) -> Iterator[Any]:
        self._ended.wait()
        yield from ()

    def _notice_end(self) -> None:
        self.is_sound = False
        self._ended.set()


class _Unanswered(grpc.RpcError):  # type: ignore[misc]
    """The member ended a stream without an answer."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "the stream ended without an answer"
