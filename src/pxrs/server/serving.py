"""Starts and stops a server.

Stopping drains it: clients are told to come back, calls and appends that are under way are answered, then the port is
closed. What is not answered within `drain_s` has an unknown outcome for its client, as if the server had been killed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from pxrs.errors import InvalidArgument, PxrsError
from pxrs.hub import Hub
from pxrs.remote import wire
from pxrs.server.auth.gate import Gate
from pxrs.server.auth.issuing import Issuer
from pxrs.server.auth.names import HubNames
from pxrs.server.grants import Grants
from pxrs.server.pools import Pools
from pxrs.server.served import Served
from pxrs.server.service import Service
from pxrs.server.settings import ServerLimits
from pxrs.server.staging import staging_of

_logger = logging.getLogger(__name__)

REFRESH_S: Final = 1.0
"""How often the server looks whether the tokens file has changed."""
_LOOK_S: Final = 0.05
_KEEPALIVE: Final = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


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
        self._settings = settings
        self._pools = Pools(settings.limits)
        gate = Gate(settings.auth, HubNames(hub.topics, hub.registry.get), issuer=Issuer(lambda: hub.registry))
        grants = Grants(hub.registry, settings.limits.leases_max)
        served = Served(hub, grants, uuid.uuid4().hex, gate, staging_of(hub))
        self._service = Service(served, self._pools, settings.limits)
        self._grpc = grpc.aio.server(
            options=[
                ("grpc.max_send_message_length", wire.MESSAGE_BYTES_MAX),
                ("grpc.max_receive_message_length", wire.MESSAGE_BYTES_MAX),
                ("grpc.so_reuseport", 0),
                *_KEEPALIVE,
            ],
            maximum_concurrent_rpcs=settings.limits.streams_max,
        )
        self._grpc.add_generic_rpc_handlers((self._service,))
        self._refreshing: asyncio.Task[None] | None = None
        self.address = ""
        """Host and port, once it listens."""

    async def start(self) -> None:
        """Listen. Raises InvalidArgument if the port cannot be had."""
        listen, credentials = self._settings.listen, self._settings.credentials
        try:
            if credentials is None:
                port = self._grpc.add_insecure_port(listen)
            else:
                port = self._grpc.add_secure_port(listen, credentials)
        except RuntimeError as error:
            raise InvalidArgument(f"cannot listen on {listen}: {error}") from error
        if not port:
            raise InvalidArgument(f"cannot listen on {listen}: is the port in use?")
        self.address = f"{listen.rpartition(':')[0]}:{port}"
        await self._grpc.start()
        if self._settings.auth is not None:
            self._refreshing = asyncio.create_task(self._refresh())

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            await self._service.refresh()

    async def stop(self) -> None:
        """Drain, then close the port."""
        if self._refreshing is not None:
            self._refreshing.cancel()
        self._service.is_draining = True
        for stream in list(self._service.streams):
            stream.say_goodbye("the server is stopping")
        until = asyncio.get_running_loop().time() + self._settings.limits.drain_s
        while not all(stream.is_idle for stream in self._service.streams):
            if asyncio.get_running_loop().time() > until:
                _logger.warning("some calls were not answered before the server stopped")
                break
            await asyncio.sleep(_LOOK_S)
        await self._grpc.stop(grace=max(0.0, min(1.0, until - asyncio.get_running_loop().time())))
        await asyncio.get_running_loop().run_in_executor(None, self._pools.close)


@contextmanager
def serving(hub: Hub, settings: ServerSettings | None = None) -> Iterator[str]:
    """Run a server in front of this hub on a thread of its own, for the block. Gives its address, `pxrs://h:p`.

    For tests, and for programs that serve a hub that they use themselves."""
    started: list[str | BaseException] = []
    is_started, loop = threading.Event(), asyncio.new_event_loop()
    stopped = asyncio.Event()

    async def run() -> None:
        try:
            server = Server(hub, settings or ServerSettings())
            await server.start()
        except BaseException as error:
            started.append(error)
            raise
        else:
            started.append(f"pxrs://{server.address}")
        finally:
            is_started.set()
        await stopped.wait()
        await server.stop()

    def serve() -> None:
        try:
            loop.run_until_complete(run())
        except PxrsError:
            pass  # raised below, on the caller's thread
        finally:
            loop.close()

    thread = threading.Thread(target=serve, name="pxrs-serve", daemon=True)
    thread.start()
    is_started.wait()
    (found,) = started
    if isinstance(found, BaseException):
        thread.join()
        raise found
    try:
        yield found
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join()
