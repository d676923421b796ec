"""The connection of this process to a server, shared by all logs and registries that have the same address.

    Connection ── Link ── ControlStream ── Channel      one at a time: connects again by itself
        │           └──── Arms                          what the server must be asked for again after a break
        ├── call, ask                                   small requests, over the control stream
        └── channel                                     for reads and appends, which are streams of their own

A connection costs a process three threads, whatever is done over it (W6): one of gRPC's, gRPC's sending thread of the
control stream, and the reader. Each idle stream of appends (`appends`) is one more, and while appends or ranges are
under way, so is the thread that ends those without progress (`limits`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

from pxrs import grpc_fork
from pxrs.errors import Closed
from pxrs.remote.client.appends import PutStreams
from pxrs.remote.client.arming import Armed, Arms
from pxrs.remote.client.channel import Channel
from pxrs.remote.client.control import ControlStream, Hello
from pxrs.remote.client.faults import AWAY, NothingListens, Refused, Unanswered
from pxrs.remote.client.limits import Limits
from pxrs.remote.client.link import Link
from pxrs.remote.client.settings import AWAY_S, LOST_S, Settings
from pxrs.remote.heap import keep_freed_blocks
from pxrs.waiting import Callback

CALLS_MAX: Final = 200
"""How many calls may be unanswered at a time; further ones wait. Fewer than a server reads at a time, so that the
server always reads the next renewal of a lease."""
PAUSE_S_MIN, PAUSE_S_MAX = 0.02, 0.5


class Connection:
    """Made by `acquire`. Threads share it."""

    def __init__(self, settings: Settings) -> None:
        keep_freed_blocks()
        self.settings = settings
        self.users = 0
        """How many logs and registries use it. Guarded by the lock of this module."""
        self._arms = Arms()
        self.limits = Limits()
        self.puts = PutStreams(self.limits)
        # Of a cluster's broker: its partitions move to others, which a reader that waits must find.
        on_loss = self._arms.lose_stream if settings.is_direct else _nothing
        self._link = Link(settings, self._arms.take_event, self._arms.take_stream, self.puts.end_idle, on_loss)
        self._places = threading.BoundedSemaphore(CALLS_MAX)

    @property
    def patience_s(self) -> float:
        """How long reads and appends wait for a server. Until the first server has answered, this is the timeout: an
        address that leads nowhere is told soon."""
        return self.settings.patience_s if self._link.was_connected else self.settings.timeout_s

    def given_up(self, seconds: float) -> str:
        """For the error of a call that waited for so long: which limit has ended it, and what to do."""
        is_patience = self._link.was_connected and seconds > self.settings.timeout_s
        limit = "patience" if is_patience else "timeout"
        return f"given up after {seconds:g} s (`{limit}` of the address): ask the server with `pxrs ping`"

    @property
    def last_hello(self) -> Hello | None:
        """What the last server that answered has said; None if none ever has."""
        return self._link.last_hello

    def hello(self, timeout_s: float) -> Hello:
        """What the server has said last when this process connected to it. Connects if needed."""
        return self._link.take(time.monotonic() + timeout_s).hello

    def await_first(self, until: float) -> None:
        """If no server has ever answered, wait until one does, also while connections are refused. Raises Unanswered at
        this moment of the monotonic clock, Closed, and why the server refuses this client."""
        if not self._link.was_connected:
            self._link.take(until, is_patient=True)

    def call(
        self, name: str, arguments: Mapping[str, Any], timeout_s: float, *, is_renewal: bool = False
    ) -> dict[str, Any]:
        """Make a call. It is sent at most once. Raises the error that the server answers with; Unanswered; Closed.

        is_renewal: it does not wait for other calls, and if nothing comes from the server until the time is over, the
                    connection is taken for dead and made anew: a lease can be renewed again before it has expired."""
        until = time.monotonic() + timeout_s
        if is_renewal:
            return self._call(name, arguments, until, is_renewal)
        if not self._places.acquire(timeout=timeout_s):
            raise Unanswered(f"{CALLS_MAX} calls of this process wait already", was_sent=False)
        try:
            return self._call(name, arguments, until, is_renewal)
        finally:
            self._places.release()

    def _call(self, name: str, arguments: Mapping[str, Any], until: float, is_renewal: bool) -> dict[str, Any]:
        while True:
            stream = self._take(until)
            try:
                request = stream.send(name, arguments)
            except Unanswered:
                if time.monotonic() >= until:
                    raise
                time.sleep(PAUSE_S_MIN)  # the stream has just ended; the link will notice
                continue
            try:
                return stream.wait(request, until)
            except Unanswered:
                if is_renewal and stream.is_silent_since(request):
                    stream.end("the server did not answer a renewal in time")
                raise

    def _take(self, until: float) -> ControlStream:
        """The control stream, once there is one. Raises Unanswered, Closed, and why the server refuses this client."""
        if self.settings.is_direct:
            until = min(until, time.monotonic() + (LOST_S if self._link.was_connected else AWAY_S))
        return self._link.take(until)

    def ask(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """As `call`, for a call that may be made twice: it is made again until an answer comes or the time is over."""
        until = time.monotonic() + timeout_s
        pause_s = PAUSE_S_MIN
        while True:
            try:
                return self.call(name, arguments, max(0.0, until - time.monotonic()))
            except (NothingListens, Refused):
                raise
            except (Unanswered, *AWAY) as error:
                self.check_open()
                if time.monotonic() + pause_s >= until:
                    if isinstance(error, Unanswered):
                        raise
                    raise Unanswered(str(error), was_sent=False) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def check_answers(self) -> None:
        """Ask the server whether it is there. If nothing comes from it in time, the connection is taken for dead and
        made anew, to the next server of the address."""
        with suppress(Unanswered, *AWAY):
            self.call("server.ping", {}, self.settings.timeout_s, is_renewal=True)

    @contextmanager
    def channel(self, until: float) -> Iterator[Channel]:
        """The channel to the server that is connected, for a stream that begins and ends within the block. Raises
        Unanswered if there is none at this moment of the monotonic clock, Closed."""
        channel = self._take(until).channel
        with channel.used():
            yield channel

    # Watches and subscriptions.

    def arm(self, call: str, undo: str, arguments: Mapping[str, Any], wake: Callback) -> Armed:
        """Have the server call back after each change. Call `wait_armed` next, and `disarm` in the end.

        wake: called by the reader, which must not wait, and after each break of the connection"""
        self._link.need()
        return self._arms.add(call, undo, arguments, wake)

    def wait_armed(self, armed: Armed, timeout_s: float) -> None:
        """Return when every later change will wake it. Raises what the server answers; Unanswered; Closed."""
        until = time.monotonic() + timeout_s
        self._take(until)  # raises at once if the server refuses this client
        self._arms.wait(armed, until)

    def disarm(self, armed: Armed) -> None:
        """Idempotent."""
        if self._arms.remove(armed):
            self._link.release()

    @property
    def is_closed(self) -> bool:
        return self._link.is_closed

    def check_open(self) -> None:
        if self.is_closed:
            raise Closed(f"the connection to {self.settings.shown} was closed")

    def close(self) -> None:
        """End every call and stream. Idempotent."""
        self._arms.close()
        self.puts.close()
        self.limits.close()
        self._link.close()


def _nothing() -> None:
    """A client of one server waits until that server is back, and looks then."""


_lock = threading.Lock()
_connections: dict[tuple[int, Settings], Connection] = {}
"""The connections of this process, by its id: a forked child must not use those of its parent."""


def acquire(settings: Settings) -> Connection:
    """The connection of this process to this server; `release` it. Raises UsedAfterFork in a child that cannot use
    gRPC. Does not connect."""
    grpc_fork.check(settings.shown)
    key = os.getpid(), settings
    with _lock:
        found = _connections.get(key)
        if found is None:
            found = _connections[key] = Connection(settings)
        found.users += 1
        return found


def release(connection: Connection) -> None:
    """The counterpart of `acquire`: the last one closes the connection."""
    with _lock:
        connection.users -= 1
        if connection.users:
            return
        _connections.pop((os.getpid(), connection.settings), None)
    connection.close()
