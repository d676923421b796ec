from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

import pxrs
from pxrs.hub import Hub
from pxrs.server.serving import Server, ServerSettings
from pxrs.server.settings import ServerLimits
from tests.integration.server.peer import connect


@dataclass
class Running:
    """A server on a thread of its own, and the hub behind it."""

    hub: Hub
    server: Server
    loop: asyncio.AbstractEventLoop

    @property
    def address(self) -> str:
        return self.server.address

    def ask(self, look: Callable[[Server], Any]) -> Any:
        """What the function says on the event loop of the server."""

        async def run() -> Any:
            return look(self.server)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(30)


Start = Callable[..., Running]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with pxrs.open(tmp_path / "hub") as opened:
        yield opened


@pytest.fixture
def start(hub: Hub) -> Iterator[Start]:
    """Start a server with these limits, which is stopped at the end of the test."""
    with ExitStack() as stack:

        def begin(auth: str | None = None, **limits: Any) -> Running:
            loop = asyncio.new_event_loop()
            settings = ServerSettings(limits=ServerLimits(**{"drain_s": 2.0, **limits}), auth=auth)
            found: list[Running] = []

            async def run() -> None:
                server = Server(hub, settings)
                await server.start()
                found.append(Running(hub, server, loop))

            thread = threading.Thread(target=loop.run_forever, name="server-under-test", daemon=True)
            thread.start()
            asyncio.run_coroutine_threadsafe(run(), loop).result(30)

            def end() -> None:
                asyncio.run_coroutine_threadsafe(found[0].server.stop(), loop).result(30)
                loop.call_soon_threadsafe(loop.stop)
                thread.join(30)
                loop.close()

            stack.callback(end)
            return found[0]

        yield begin


@pytest.fixture
def running(start: Start) -> Running:
    return start()


@pytest.fixture
def channel(running: Running) -> Iterator[grpc.Channel]:
    with connect(running.address) as opened:
        yield opened
