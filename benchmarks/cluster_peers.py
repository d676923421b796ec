"""NATS JetStream as a cluster of three servers on loopback, which keeps three replicas of a stream."""

from __future__ import annotations

import asyncio
import sysconfig
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import nats
from nats.js.api import StorageType

from benchmarks.log.servers import NatsServer
from pxrs.launching import HOST, free_ports

REPLICAS = 3
WINDOW = 1_000
"""How many messages are fetched at a time."""


class _Member(NatsServer):
    """One of the servers."""

    def __init__(self, number: int, routes: list[int], *, is_synced: bool) -> None:
        super().__init__()
        self._number, self._routes, self._is_synced = number, routes, is_synced

    def _command(self, folder: Path) -> list[str]:
        others = ", ".join(f"nats://{HOST}:{port}" for port in self._routes)
        stored = f'store_dir: "{folder / "data"}"' + (", sync_interval: always" if self._is_synced else "")
        (folder / "conf").write_text(
            f"""
            server_name: n{self._number}
            listen: {HOST}:{self.port}
            jetstream {{ {stored} }}
            cluster {{ name: bench, listen: {HOST}:{self._routes[self._number]}, routes: [{others}] }}
            """
        )
        return [str(Path(sysconfig.get_path("scripts"), "nats-server")), "-c", str(folder / "conf")]


class NatsCluster:
    """The servers, and a client that publishes the same messages and fetches them."""

    def __init__(self, given: list[tuple[bytes, bytes]], *, is_synced: bool) -> None:
        """is_synced: each server syncs each write; otherwise every two minutes, as is NATS's default."""
        self._given, self._is_synced = given, is_synced
        self._stack = ExitStack()
        self._readers = iter(range(1_000))
        self._connection: Any = None
        self._stream: Any = None

    def __enter__(self) -> NatsCluster:
        routes = free_ports(REPLICAS)
        servers = [_Member(number, routes, is_synced=self._is_synced) for number in range(REPLICAS)]
        try:
            for server in servers:
                self._stack.callback(server.close)
                server.start(wait=False)
            for server in servers:
                server.wait_until_ready()
            self._runner = self._stack.enter_context(asyncio.Runner())
            self._runner.run(self._connect(servers[0].url))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            self._runner.run(connection.close())
        self._stack.close()

    async def _connect(self, url: str) -> None:
        self._connection = await nats.connect(url)
        self._stream = self._connection.jetstream(publish_async_max_pending=4_000)
        for _ in range(100):  # until the servers have elected a leader
            try:
                await self._stream.add_stream(
                    name="bench", subjects=["bench.>"], storage=StorageType.FILE, num_replicas=REPLICAS
                )
                return
            except Exception:  # noqa: BLE001 - the last error is raised below
                await asyncio.sleep(0.1)
        await self._stream.add_stream(
            name="bench", subjects=["bench.>"], storage=StorageType.FILE, num_replicas=REPLICAS
        )

    def publish(self) -> None:
        self._runner.run(self._publish())

    def fetch(self) -> None:
        self._runner.run(self._fetch())

    async def _publish(self) -> None:
        for key, value in self._given:
            await self._stream.publish_async(f"bench.{key.decode()}", value)
        await self._stream.publish_async_completed()

    async def _fetch(self) -> None:
        durable = f"reader-{next(self._readers)}"
        subscription = await self._stream.pull_subscribe("bench.>", durable=durable, stream="bench")
        left = len(self._given)
        while left > 0:
            for message in await subscription.fetch(min(WINDOW, left), timeout=30):
                await message.ack()
                left -= 1
        await self._connection.flush()
        await subscription.unsubscribe()
