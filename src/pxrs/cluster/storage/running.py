"""Starts and stops a storage node: its directory, its port, its registration, its garbage collector.

Start: bind the port, decide the identity of the directory and open the journal, serve, and only then register the node
as alive. Stop: end the registration first, so that brokers choose other nodes; then end the calls; then close the
journal, which syncs what was accepted; then unlock the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pxrs import grpc_fork  # before grpc, which it imports with settings of its own

# isort: split
import grpc

from pxrs.cluster.storage.collecting import Collector
from pxrs.cluster.storage.identity import Started, start
from pxrs.cluster.storage.node import NodeSettings, StorageNode
from pxrs.cluster.storage.registration import Registration
from pxrs.cluster.storage.service import Standing, StorageService
from pxrs.cluster.storage.settings import StorageLimits
from pxrs.errors import CannotListen, PxrsError
from pxrs.registry.contract import Registry
from pxrs.remote.heap import keep_freed_blocks
from pxrs.server.apart import running_apart
from pxrs.server.auth.gate import Gate
from pxrs.server.auth.names import HubNames
from pxrs.server.health import Health
from pxrs.server.serving import grpc_options

_logger = logging.getLogger(__name__)

REFRESH_S: Final = 1.0
"""Interval at which the node checks whether the tokens file has changed."""
_LOOK_S: Final = 0.02
_CLOSE_S: Final = 1.0
_EXTRA_CALLS: Final = 200
"""gRPC calls permitted beyond `streams_max`: health checks, and calls that are being refused."""


@dataclass(frozen=True, slots=True)
class StorageSettings:
    """How a storage node runs. `pxrs storage` has an option for each."""

    directory: Path
    listen: str = "127.0.0.1:0"
    """Host and port; port 0 selects a free port."""
    advertise: str | None = None
    """The address under which brokers reach the node; by default the one on which it listens."""
    limits: StorageLimits = field(default_factory=StorageLimits)
    auth: str | None = None
    """The path of the tokens file; None permits everything to everybody."""
    credentials: Any = None
    """The result of `grpc.ssl_server_credentials`; None for a port without TLS."""


class StorageServer:
    """One running storage node. Belongs to the event loop that started it. The registry belongs to the caller."""

    def __init__(self, registry: Registry, settings: StorageSettings) -> None:
        grpc_fork.freeze_in_children()
        keep_freed_blocks()
        self._registry, self._settings = registry, settings
        self._health = Health()
        limits = settings.limits
        self._grpc = grpc.aio.server(
            options=grpc_options(limits.connections_max, limits.keepalive_s, limits.keepalive_timeout_s),
            maximum_concurrent_rpcs=limits.streams_max + _EXTRA_CALLS,
        )
        self._started: Started | None = None
        self._service: StorageService | None = None
        self._registration: Registration | None = None
        self._collector: Collector | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self.address = ""
        """Host and port under which brokers reach the node; set when it listens."""
        self.replaced: asyncio.Future[PxrsError] = asyncio.get_running_loop().create_future()
        """Done when this process must stop because it is no longer the node (`Registration`)."""

    @property
    def node(self) -> StorageNode:
        assert self._started is not None
        return self._started.node

    async def start(self) -> None:
        """Start to serve. Raises CannotListen, NodeFormatUnsupported, InvalidArgument, RegistryError, OSError."""
        settings, limits = self._settings, self._settings.limits
        port = self._bind()
        self.address = settings.advertise or f"{settings.listen.rpartition(':')[0]}:{port}"
        try:
            kept = NodeSettings(limits.segment_bytes, limits.free_bytes_min)
            begin = functools.partial(start, settings.directory, self._registry, self.address, kept)
            started = self._started = await asyncio.to_thread(begin)
            gate = Gate(settings.auth, HubNames(lambda: (), self._registry.get))
            self._collector = Collector(self._registry, started.node, started.cluster, started.starts, limits)
            self._service = StorageService(
                started.node, Standing(started.cluster, started.starts), gate, limits, self._collect
            )
            self._grpc.add_generic_rpc_handlers((self._service, self._health))
            await self._grpc.start()
            loop = asyncio.get_running_loop()

            def tell(error: PxrsError) -> None:
                loop.call_soon_threadsafe(functools.partial(self._note_replaced, error))

            self._registration = Registration(self._registry, started.node, started.starts, self.address, limits, tell)
            await asyncio.to_thread(self._registration.start)
        except BaseException:
            await self.stop()
            raise
        self._collector.start()
        if settings.auth is not None:
            self._refreshing = asyncio.create_task(self._refresh())

    def _bind(self) -> int:
        listen, credentials = self._settings.listen, self._settings.credentials
        try:
            if credentials is None:
                port: int = self._grpc.add_insecure_port(listen)
            else:
                port = self._grpc.add_secure_port(listen, credentials)
        except RuntimeError as error:
            advice = "" if credentials is None else "; are the files of the certificate and its key valid PEM?"
            raise CannotListen(f"cannot listen on {listen}: {error}{advice}") from error
        if not port:
            raise CannotListen(f"cannot listen on {listen}: is the port in use?")
        return port

    def _note_replaced(self, error: PxrsError) -> None:
        if not self.replaced.done():
            self.replaced.set_result(error)

    def _collect(self) -> dict[str, Any]:
        assert self._collector is not None
        return self._collector.collect()._asdict()

    async def _refresh(self) -> None:
        assert self._service is not None
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self._service.refresh()
            except Exception:
                _logger.exception("the tokens file could not be checked; the next try is in %g s", REFRESH_S)

    async def stop(self) -> None:
        """Stop the node, also after a start that failed."""
        if self._refreshing is not None:
            self._refreshing.cancel()
        self._health.leave()
        if self._collector is not None:
            await asyncio.to_thread(self._collector.close)
        if self._registration is not None:
            await asyncio.to_thread(self._registration.close)
        if self._service is not None:
            self._service.leave()
            loop = asyncio.get_running_loop()
            until = loop.time() + self._settings.limits.drain_s
            while self._service.open and loop.time() < until:
                await asyncio.sleep(_LOOK_S)
        await self._grpc.stop(grace=_CLOSE_S)
        if self._service is not None:
            await asyncio.to_thread(self._service.pool.shutdown)
        if self._started is not None:
            await asyncio.to_thread(self._started.node.close)
            self._started.directory.close()


@contextlib.contextmanager
def storing(registry: Registry, settings: StorageSettings) -> Iterator[StorageServer]:
    """Run a storage node on a thread of its own for the duration of the block. For tests, and for clusters in one
    process."""
    with running_apart("pxrs-storage", lambda: StorageServer(registry, settings)) as server:
        yield server
