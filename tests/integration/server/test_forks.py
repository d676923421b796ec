"""Processes that fork after they have run a server."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from pathlib import Path

import pxrs
from pxrs.hub import Hub
from pxrs.server.serving import Server, ServerSettings
from pxrs.testing import faults

PATIENCE_S = 30.0


async def leave_as_garbage(hub: Hub) -> None:
    """A server that has been stopped, and that only the garbage collector frees."""
    server = Server(hub, ServerSettings())
    await server.start()
    await server.stop()
    cycle: list[object] = [server]
    cycle.append(cycle)


def test_a_child_that_collects_garbage_does_not_wait_for_the_threads_of_a_stopped_server(tmp_path: Path) -> None:
    """The finalizer of a server of `grpc.aio` waits for a thread that only the parent has."""
    gc.collect()
    gc.disable()
    try:
        with pxrs.open(tmp_path / "hub") as hub:
            asyncio.run(leave_as_garbage(hub))
        with faults.child(lambda: (gc.collect(), None)[1]) as pid:
            watchdog = threading.Timer(PATIENCE_S, os.kill, (pid, signal.SIGKILL))
            watchdog.start()
            assert faults.wait_exit(pid) == 0
            watchdog.cancel()
    finally:
        gc.enable()
