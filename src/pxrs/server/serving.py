"""Starts and stops a server.

Stopping drains it: clients are told to come back, calls and appends that are under way are answered, then the port is
closed. What is not answered within `drain_s` has an unknown outcome for its client, as if the server had been killed.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from pxrs import grpc_fork  # first: it imports gRPC in its own way

# isort: split
import grpc

from pxrs.hub import Hub
from pxrs.publishing.staging.places import staging_of
from pxrs.remote import wire
from pxrs.remote.heap import keep_freed_blocks
from pxrs.server.apart import running_apart
from pxrs.server.auth.gate import Gate
from pxrs.server.auth.issuing import Issuer
from pxrs.server.auth.names import HubNames
from pxrs.server.grants import Grants
from pxrs.server.grpc_port import bind
from pxrs.server.health import Health
from pxrs.server.pools import Pools
from pxrs.server.reads import ReadStream
from pxrs.server.served import Served
from pxrs.server.service import Service, Stream
from pxrs.server.settings import ServerLimits

_logger = logging.getLogger(__name__)

REFRESH_S: Final = 1.0
"""How often the server looks whether the tokens file has changed."""
_LOOK_S: Final = 0.02
_READS_S: Final = 2.0
"""How long a server that stops waits for reads: they can be made again at no loss."""
_CLOSE_S: Final = 1.0
"""How long clients may take to close their connections when all calls have ended."""
_IDLE_CONNECTION_S: Final = 3600
_EXTRA_CALLS: Final = 200
"""Calls of gRPC beyond `streams_max`: health checks, and calls that are being refused."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How a server listens. `pxrs serve` has an option for each."""

    listen: str = "127.0.0.1:0"
    """Host and port; port 0 chooses a free one."""
    limits: ServerLimits = field(default_factory=ServerLimits)
    auth: str | None = None
    """The path of the tokens file; None: everything is permitted to everybody."""
    credentials: Any = None
    """What `grpc.ssl_server_credentials` returns; None for a port without TLS."""


class Server:
    """One running server. Belongs to the event loop that started it. The hub belongs to the caller."""

    def __init__(self, hub: Hub, settings: ServerSettings) -> None:
        grpc_fork.freeze_in_children()
        keep_freed_blocks()
        self._settings = settings
        self.pools = Pools(settings.limits)
        gate = Gate(
            settings.auth,
            HubNames(lambda: hub.topics(internal=True), hub.registry.get),
            issuer=Issuer(lambda: hub.registry),
        )
        grants = Grants(hub.registry, settings.limits.leases_max)
        served = Served(hub, grants, uuid.uuid4().hex, gate, staging_of(hub.log))
        self.grants = served.grants
        self.service = Service(served, self.pools, settings.limits)
        self._health = Health()
        self._grpc = grpc.aio.server(
            options=grpc_options(
                settings.limits.connections_max, settings.limits.keepalive_s, settings.limits.keepalive_timeout_s
            ),
            maximum_concurrent_rpcs=settings.limits.streams_max + _EXTRA_CALLS,
        )
        self._grpc.add_generic_rpc_handlers((self.service, self._health))
        self._refreshing: asyncio.Task[None] | None = None
        self.address = ""
        """Host and port, once it listens."""

    async def start(self) -> None:
        """Listen. Raises CannotListen if the port cannot be had."""
        listen = self._settings.listen
        port = bind(self._grpc, listen, self._settings.credentials)
        self.address = f"{listen.rpartition(':')[0]}:{port}"
        await self._grpc.start()
        if self._settings.auth is not None:
            self._refreshing = asyncio.create_task(self._refresh())

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self.service.refresh()
            except Exception:
                _logger.exception("the tokens file was not looked at; the next try is in %g s", REFRESH_S)

    async def stop(self) -> None:
        """Drain, then close the port."""
        if self._refreshing is not None:
            self._refreshing.cancel()
        loop = asyncio.get_running_loop()
        began, drain_s = loop.time(), self._settings.limits.drain_s
        self._health.leave()
        self.service.leave()
        streams = self.service.streams
        while not all(stream.may_end for stream in streams) and loop.time() < began + drain_s:
            if loop.time() > began + _READS_S and all(stream.may_end or _is_read(stream) for stream in streams):
                break
            await asyncio.sleep(_LOOK_S)
        for stream in list(streams):
            stream.finish()
        while self.service.open and loop.time() < began + drain_s:
            await asyncio.sleep(_LOOK_S)
        if streams:
            _logger.warning("%d streams were not answered before the server stopped", len(streams))
        # gRPC waits until clients close their connections, which a frozen one does not, and then cuts them.
        await self._grpc.stop(grace=_CLOSE_S)
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self.pools.close()
        self.grants.close()


def _is_read(stream: Stream) -> bool:
    return isinstance(stream, ReadStream)


def grpc_options(connections_max: int, keepalive_s: float, keepalive_timeout_s: float) -> list[tuple[str, int]]:
    """The options of gRPC for a server; the arguments are as in `ServerLimits`."""
    return [
        ("grpc.max_send_message_length", wire.MESSAGE_BYTES_MAX),
        ("grpc.max_receive_message_length", wire.MESSAGE_BYTES_MAX),
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", connections_max),
        ("grpc.max_connection_idle_ms", _IDLE_CONNECTION_S * 1000),
        ("grpc.keepalive_time_ms", int(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive_timeout_s * 1000)),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # clients may ask that often
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # gRPC also pings to measure the connection. While such a ping is unanswered, it sends no other one: its time
        # limit is this one, by default a minute.
        ("grpc.http2.ping_timeout_ms", int(keepalive_timeout_s * 1000)),
    ]


@contextmanager
def serving(hub: Hub, settings: ServerSettings | None = None) -> Iterator[str]:
    """Run a server in front of this hub on a thread of its own, for the block. Gives its address, `pxrs://h:p`.

    For tests, and for programs that serve a hub that they use themselves."""
    with running_apart("pxrs-serve", lambda: Server(hub, settings or ServerSettings())) as server:
        yield f"pxrs://{server.address}"
