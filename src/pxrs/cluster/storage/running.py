"""Starts and stops a storage node: its directory, its port, its registration, its garbage collector.

Start: bind the port, decide the identity of the directory and open the journal, serve, and only then register the node
as alive. Each step that needs the registry waits for it (`StartWait`). Stop: end the registration first, so that
brokers choose other nodes; then end the calls; then close the journal, which syncs what was accepted; then record the
end of the journal in the registry, by which the next start is proven (C9); then unlock the directory. A node that has
started read-only, because its disk is full, is stopped and started again within the process once there is room; the
port stays open.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pxrs import disk, grpc_fork  # before grpc, which it imports with settings of its own

# isort: split
import grpc

from pxrs.cluster.records import node_key
from pxrs.cluster.storage.collecting import Collector
from pxrs.cluster.storage.identity import FULL, Started, start
from pxrs.cluster.storage.node import NodeSettings, StorageNode
from pxrs.cluster.storage.registration import Registration
from pxrs.cluster.storage.scrub import Scrubber
from pxrs.cluster.storage.service import Standing, StorageService
from pxrs.cluster.storage.settings import StorageLimits
from pxrs.errors import LogError, PxrsError, RegistryError
from pxrs.registry.contract import Registry
from pxrs.registry.outage import StartWait
from pxrs.remote.heap import keep_freed_blocks
from pxrs.server.apart import running_apart
from pxrs.server.auth.gate import Gate
from pxrs.server.auth.names import HubNames
from pxrs.server.grpc_port import bind
from pxrs.server.health import Health
from pxrs.server.serving import grpc_options

_logger = logging.getLogger(__name__)

REFRESH_S: Final = 1.0
"""Interval at which the node checks whether the tokens file has changed."""
_LOOK_S: Final = 0.02
_CLOSE_S: Final = 1.0
_ROOM_BYTES: Final = (1 << 20, 32 << 20)
"""A node that is read-only because its disk is full starts again when a file of so many bytes can be written:
`free_bytes_min`, but at least the first number and at most the second. A start writes the last batch of the journal
again. After a start for which that was not enough, twice as many, up to the second number."""
_ROOM_S_MAX: Final = 30.0
"""The longest pause between two such starts. The first one is REFRESH_S; each is twice as long as the one before."""
_ROOM_FILE: Final = "room.tmp"
"""The name of that file, which exists for a moment only."""
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
    marks: Path | None = None
    """The folder of the node's mark (`mark`): in memory that a process outlives and the machine does not."""
    credentials: Any = None
    """The result of `grpc.ssl_server_credentials`; None for a port without TLS."""


class StorageServer:
    """One running storage node. Belongs to the event loop that started it. The registry belongs to the caller."""

    def __init__(self, registry: Registry, settings: StorageSettings, wait: StartWait | None = None) -> None:
        """wait: for how long `start` waits for the registry."""
        grpc_fork.freeze_in_children()
        keep_freed_blocks()
        self._registry, self._settings, self._wait = registry, settings, wait or StartWait()
        self._health = Health()
        limits = settings.limits
        self._grpc = grpc.aio.server(
            options=grpc_options(limits.connections_max, limits.keepalive_s, limits.keepalive_timeout_s),
            maximum_concurrent_rpcs=limits.streams_max + _EXTRA_CALLS,
        )
        self._calls = _Calls()
        self._started: Started | None = None
        self._service: StorageService | None = None
        self._registration: Registration | None = None
        self._collector: Collector | None = None
        self._scrubber: Scrubber | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._awaiting_room: asyncio.Task[None] | None = None
        self._is_stopping = asyncio.Event()
        self.address = ""
        """Host and port under which brokers reach the node; set when it listens."""
        self.is_serving = False
        """Whether the node serves and is registered as alive; False while one that was read-only starts again."""
        self.replaced: asyncio.Future[PxrsError] = asyncio.get_running_loop().create_future()
        """Done when this process must stop: because it is no longer the node (`Registration`), or because a node that
        was read-only could not be started again."""

    @property
    def node(self) -> StorageNode:
        assert self._started is not None
        return self._started.node

    async def start(self) -> None:
        """Start to serve. Raises CannotListen, NodeFormatUnsupported, InvalidArgument, RegistryError, OSError."""
        settings = self._settings
        port = bind(self._grpc, settings.listen, settings.credentials)
        self.address = settings.advertise or f"{settings.listen.rpartition(':')[0]}:{port}"
        self._grpc.add_generic_rpc_handlers((self._calls, self._health))
        try:
            await self._begin()
        except BaseException:
            await self.stop()
            raise
        if settings.auth is not None:
            self._refreshing = asyncio.create_task(self._refresh())
        if self._started is not None and self._started.is_read_only:
            self._awaiting_room = asyncio.create_task(self._await_room())

    async def _begin(self) -> None:
        """Start the node of the directory, serve it, and register it as alive."""
        self.is_serving = False
        settings, limits = self._settings, self._settings.limits
        kept = NodeSettings(limits.segment_bytes, limits.free_bytes_min)
        begin = functools.partial(
            start, settings.directory, self._registry, self.address, kept, wait=self._wait, marks=settings.marks
        )
        started = self._started = await asyncio.to_thread(begin)
        gate = Gate(settings.auth, HubNames(lambda: (), self._registry.get))
        self._collector = Collector(self._registry, started.node, started.cluster, started.starts, limits)
        self._service = self._calls.service_now = StorageService(
            started.node, Standing(started.cluster, started.starts), gate, limits, self._collect
        )
        await self._grpc.start()
        loop = asyncio.get_running_loop()

        def tell(error: PxrsError) -> None:
            loop.call_soon_threadsafe(functools.partial(self._note_replaced, error))

        self._registration = Registration(
            self._registry, started.node, started.starts, self.address, limits, tell, self._wait
        )
        await asyncio.to_thread(self._registration.start)
        if not started.is_read_only:  # garbage cannot be removed without a record of that
            self._collector.start()
            self._scrubber = Scrubber(started.node, settings.directory, limits.scrub_bytes_s, limits.scrub_round_s)
            self._scrubber.start()
        self.is_serving = True

    async def _await_room(self) -> None:
        """Once the disk of a node that is read-only has room, end the node, and start it as it should be."""
        least = max(_ROOM_BYTES[0], min(self._settings.limits.free_bytes_min, _ROOM_BYTES[1]))
        pause_s = REFRESH_S
        while self._started is not None and self._started.is_read_only:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_stopping.wait(), pause_s)
                return
            try:
                if not await asyncio.to_thread(self._has_room, least):
                    continue
                # While the registry does not answer, the node serves what it has, and does not wait for the registry.
                await asyncio.to_thread(self._registry.get, node_key(self.node.id))
            except (OSError, RegistryError) as error:
                _logger.warning("the node stays read-only: %s", error)
                continue
            _logger.warning("the disk has room again, at least %s bytes: the node starts anew", f"{least:,}")
            # If that is not enough either, wait for more, and do not end the calls of the node every second.
            least, pause_s = min(2 * least, _ROOM_BYTES[1]), min(2 * pause_s, _ROOM_S_MAX)
            try:
                await self._leave()
                await asyncio.to_thread(self._close)
                await self._begin()
            except PxrsError as error:
                self._note_replaced(error)
                return
            except Exception as error:  # noqa: BLE001 - nobody else would notice that the node is gone
                why = disk.explain(error) if isinstance(error, OSError) else repr(error)
                failed = LogError(f"the storage node cannot start again: {why}")
                failed.__cause__ = error
                self._note_replaced(failed)
                return

    def _has_room(self, size: int) -> bool:
        """Whether a file of this length can be written to the directory. The number of free bytes does not tell: the
        file system may lack inodes, or the user's quota may be used up. Raises OSError."""
        directory = self._settings.directory
        found = os.statvfs(directory)
        if found.f_bavail * found.f_frsize < size:
            return False
        path = directory / _ROOM_FILE
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if hasattr(os, "posix_fallocate"):  # not on macOS
                    os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return False
        finally:
            path.unlink(missing_ok=True)
        return True

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
        self._is_stopping.set()
        self._wait.stop()
        if self._awaiting_room is not None:
            await self._awaiting_room  # not cancelled: its thread may be starting the node again
        self._health.leave()
        await self._leave()
        await self._grpc.stop(grace=_CLOSE_S)
        await asyncio.to_thread(self._close)

    async def _leave(self) -> None:
        """End the registration and the calls of the present node."""
        if self._scrubber is not None:
            await asyncio.to_thread(self._scrubber.close)
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

    def _close(self) -> None:
        """Close the present node, record that it has stopped, and unlock its directory."""
        if self._service is not None:
            self._service.pool.shutdown()
        if self._started is not None:
            self._started.node.close()
            if self._registration is not None and not self._started.is_read_only:
                self._registration.record_stop()
            if self._started.mark is not None:
                self._started.mark.close()
            self._started.directory.close()


class _Calls(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Passes each call to the service of the node that runs now: a node that was read-only is replaced."""

    def __init__(self) -> None:
        self.service_now: StorageService | None = None

    def service(self, handler_call_details: Any) -> Any:
        return None if self.service_now is None else self.service_now.service(handler_call_details)


@contextlib.contextmanager
def storing(registry: Registry, settings: StorageSettings) -> Iterator[StorageServer]:
    """Run a storage node on a thread of its own for the duration of the block. For tests, and for clusters in one
    process."""
    with running_apart("pxrs-storage", lambda: StorageServer(registry, settings)) as server:
        yield server
