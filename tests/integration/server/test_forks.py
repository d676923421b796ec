"""Processes that fork after they have run a server, or while they read from one."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.errors import UsedAfterFork
from pxrs.hub import Hub
from pxrs.remote.client.channel import Channel
from pxrs.server.serving import Server, ServerSettings
from pxrs.testing import faults
from tests.integration.server.conftest import Running
from tests.integration.server.test_limits import fill

PATIENCE_S = 20.0


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


def test_r11_a_forked_child_cannot_go_on_with_a_range_that_its_parent_reads(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for ever for messages that only the parent gets, or for a lock of the stream that a thread of gRPC
    held when the child was forked: gRPC takes it to cancel a stream, and to free one."""
    streams: list[Any] = []
    make = Channel.__init__

    def noting(channel: Channel, *given: Any) -> None:
        make(channel, *given)
        get = channel.get
        channel.get = lambda *ticket, **options: streams.append(get(*ticket, **options)) or streams[-1]

    monkeypatch.setattr(Channel, "__init__", noting)
    fill(running.hub, 8)
    with pxrs.open(f"pxrs://{running.address}") as hub:
        batches = hub.topic("t").batches(0)
        next(batches)
        used = streams[-1]._state.condition
        held, may_let_go = threading.Event(), threading.Event()

        def hold() -> None:
            with used:
                held.set()
                may_let_go.wait(PATIENCE_S)

        def read_on() -> None:
            streams.clear()
            with pytest.raises(UsedAfterFork):
                next(batches)

        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(PATIENCE_S)
        with faults.child(read_on) as pid:
            watchdog = threading.Timer(PATIENCE_S, os.kill, (pid, signal.SIGKILL))
            watchdog.start()
            assert faults.wait_exit(pid) == 0
            watchdog.cancel()
        may_let_go.set()
        holder.join()
        # Not read to its end: the server is in this process too, and gRPC does not promise that both survive a fork.
        batches.close()
