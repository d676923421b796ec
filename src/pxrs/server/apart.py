"""Runs a server of `asyncio` on a thread of its own, for a block of code that is not asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar


class Startable(Protocol):
    """A server that belongs to the event loop in which it was made."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


S = TypeVar("S", bound=Startable)


@contextmanager
def running_apart(name: str, make: Callable[[], S]) -> Iterator[S]:
    """Make and start a server in an event loop on a new thread of this name; stop it when the block ends. Raises what
    making or starting it raises."""
    started: list[S | BaseException] = []
    is_started = threading.Event()
    stops: list[Callable[[], object]] = []

    async def run() -> None:
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()
        stops.append(lambda: loop.call_soon_threadsafe(stopped.set))
        server = make()
        await server.start()
        started.append(server)
        is_started.set()
        await stopped.wait()
        await server.stop()

    def serve() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            if started:
                raise
            started.append(error)  # raised below, on the caller's thread
        finally:
            is_started.set()

    thread = threading.Thread(target=serve, name=name, daemon=True)
    thread.start()
    is_started.wait()
    (found,) = started
    if isinstance(found, BaseException):
        thread.join()
        raise found
    try:
        yield found
    finally:
        for stop in stops:
            stop()
        thread.join()
