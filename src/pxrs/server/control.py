"""One control stream: the calls, watches and subscriptions of one client process (W6).

    reader (one task)                          reads a message, waits for a free place, starts a call
    calls (one task each)                      run on a pool, and put their answer into `_answers`
    callbacks of watches and subscriptions     on threads of the registry and the log: put a number into `_noted`
    writer (one task)                          sends answers and events, in turns, as fast as the client reads

Bounds. `calls_max` calls, or `control_bytes_max` bytes of calls, are unanswered: then the reader reads no further
message, so that the client is slowed down by gRPC's flow control. `answer_bytes_max` bytes of answers are not sent yet:
then no further call is run. A number of a watch or subscription is at most once in `_changed`. So a client that reads
slowly costs a bounded amount of memory, and slows down itself alone (W5). Renewals of leases do not wait for answers.

How a stream ends:

| who | how |
|---|---|
| the client ends its half | its calls are answered; the status is OK |
| the client is gone, or cancels | its calls run to their end, unanswered; its watches and subscriptions are closed |
| the client breaks the protocol | the status is an error |
| the token is revoked | `end`; calls that are under way are not answered; the status is an error |
| the server stops | `leave` says goodbye, `finish` answers what is under way; the status is OK |
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from pxrs import __version__
from pxrs.errors import Closed, InvalidArgument, PxrsError, WireMismatch
from pxrs.remote import flight, wire
from pxrs.server import calls
from pxrs.server.budget import Budget
from pxrs.server.counts import note_refusal
from pxrs.server.given import Given, parse
from pxrs.server.pools import Pools, run
from pxrs.server.served import Send, Served
from pxrs.server.settings import ServerLimits
from pxrs.server.waits import Waits

_logger = logging.getLogger(__name__)

ANSWER_BYTES: Final = 512 << 10
"""What the answer to a call is counted as while the call runs."""
FAREWELL_S: Final = 0.5
"""How long a stream that was told goodbye must be without a call before the server ends it."""


class ControlStream:
    """Runs one stream. All of it runs on the event loop, but `_note` is called by any thread."""

    def __init__(self, served: Served, pools: Pools, limits: ServerLimits) -> None:
        self._served, self._pools, self._limits = served, pools, limits
        self._loop = asyncio.get_running_loop()
        self._places = asyncio.Semaphore(limits.calls_max)
        self._asked = Budget(limits.control_bytes_max, "calls of this client")
        self._told = Budget(limits.answer_bytes_max, "answers for this client")
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_greeted = False
        """Whether the client's hello has come."""
        self._answers: deque[tuple[bytes, Callable[[], None]]] = deque()
        """Messages to send, and what to do once each is sent."""
        self._noted: dict[int, None] = {}
        """The numbers that threads have noted and the event loop has not seen yet."""
        self._is_note_scheduled = False
        self._changed: dict[int, None] = {}
        """The numbers of watches and subscriptions of which an event is to be sent, in order."""
        self._wake = asyncio.Event()
        self._waits = Waits(served, pools, limits, self._note)
        self._task: asyncio.Task[None] | None = None
        self._why: PxrsError | None = None
        """Why the server ends the stream."""
        self._reader: asyncio.Task[None] | None = None
        self._is_last = False
        """No further message is read: the writer ends once everything is answered."""
        self._used_at = time.monotonic()

    async def serve(self, messages: AsyncIterator[bytes], send: Send) -> None:
        """Serve the stream until the client ends it, or `finish` is called. Raises PxrsError for a client that does not
        keep to the protocol."""
        self._task = asyncio.current_task()
        writer = asyncio.create_task(self._write(send))
        reader = self._reader = asyncio.create_task(self._read(messages))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            if reader.done() and not reader.cancelled():
                reader.result()
            self._is_last = True
            self._wake.set()
            await writer
        except asyncio.CancelledError:
            if self._why is None or self._task is None:
                raise
            self._task.uncancel()
            raise self._why from None
        finally:
            for task in (reader, writer, *self._tasks):
                task.cancel()
            self._waits.release()
            await asyncio.gather(reader, writer, *self._tasks, return_exceptions=True)

    def leave(self) -> None:
        """Tell the client that the server will end. A stream whose hello has not come yet ends at once: the server's
        hello must be its first message, and a client that got it would use the stream."""
        if not self._is_greeted:
            self.end(Closed("the server is stopping: connect again"))
            return
        self._answer({"goodbye": {"reason": "the server is stopping"}})

    def finish(self) -> None:
        """Read no further message, answer what is under way, and end the stream."""
        if self._reader is not None:
            self._reader.cancel()

    def end(self, why: PxrsError) -> None:
        """End the stream with this error. The outcome of calls that are under way is unknown to the client."""
        if self._why is None and self._task is not None:
            self._why = why
            self._task.cancel()

    @property
    def may_end(self) -> bool:
        """Whether every call is answered, and the client has made none for a moment."""
        return not self._tasks and not self._answers and time.monotonic() - self._used_at > FAREWELL_S

    # Reading.

    async def _read(self, messages: AsyncIterator[bytes]) -> None:
        is_begun = False
        async for message in messages:
            arrived_at = self._served.hub.registry.clock.now()
            self._used_at = time.monotonic()
            try:
                data = flight.read_flight_data(message)
            except flight.MalformedMessage as error:
                raise InvalidArgument(f"a control message cannot be read: {error}") from error
            if not is_begun and bytes(data.command or b"") != wire.CONTROL:
                raise InvalidArgument(f"the descriptor's command must be {wire.CONTROL.decode()}: see docs/wire.md")
            is_begun = True
            if not len(data.app_metadata):
                continue  # the message that only has the descriptor
            # Not on a thread: that would hold the GIL for as long, and a message could wait there behind calls that
            # block.
            found = parse(data.app_metadata, "a control message", self._limits.request_bytes_max)
            if not self._is_greeted:
                self._greet(found)
                self._is_greeted = True
                continue
            await self._begin(found, arrived_at, len(message))

    def _greet(self, found: dict[str, Any]) -> None:
        hello = found.get("hello")
        version = hello.get("wire") if isinstance(hello, dict) else None
        if type(version) is not int:
            raise InvalidArgument("the first control message must be a hello: see docs/wire.md")
        if version < wire.VERSION_MIN:
            raise WireMismatch(version, wire.VERSION_MIN, wire.VERSION)
        limits = self._served.hub.registry.limits
        self._answer(
            {
                "hello": {
                    "wire": min(version, wire.VERSION),
                    "server": f"pxrs {__version__}",
                    "instance": self._served.instance,
                    "limits": {name: getattr(limits, name) for name in limits.__dataclass_fields__},
                    "calls_max": self._limits.calls_max,
                    "append_batches_max": self._limits.append_batches_max,
                    "append_bytes_max": self._limits.append_bytes_max,
                    "cluster": self._served.hub.log.keeps_copies,
                }
            }
        )

    async def _begin(self, found: dict[str, Any], arrived_at: float, size: int) -> None:
        """Start a call as soon as there is room for it."""
        await self._places.acquire()
        size = await self._asked.take(size)
        task = asyncio.create_task(self._serve_call(found, arrived_at, size))
        self._tasks.add(task)
        task.add_done_callback(self._end_task)

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._wake.set()

    async def _serve_call(self, found: dict[str, Any], arrived_at: float, size: int) -> None:
        number, name = found.get("id"), found.get("call")
        taken = 0
        try:
            if type(number) is not int or not isinstance(name, str):
                number = number if type(number) is int else None
                raise InvalidArgument("a control message needs an id (an integer) and a call (a string)")
            if name not in calls.RENEWALS:
                taken = await self._told.take(ANSWER_BYTES)
            answer = {"result": await self._result(name, found, arrived_at)}
        except PxrsError as error:
            note_refusal(error)
            answer = {"error": wire.error_to_dict(error)}
        except Exception:
            _logger.exception("a call of a client failed: %s", str(name)[:100])
            answer = {"error": wire.error_to_dict(PxrsError("the server failed unexpectedly; its log says why"))}
        self._asked.give_back(size)
        message = _message({"id": number, **answer})
        if taken:
            taken = self._told.exchange(taken, len(message))
        self._send_later(message, functools.partial(self._end_call, taken))

    def _end_call(self, taken: int) -> None:
        self._told.give_back(taken)
        self._places.release()

    async def _result(self, name: str, found: dict[str, Any], arrived_at: float) -> dict[str, Any]:
        match name:
            case "registry.watch":
                await self._waits.watch(Given(name, found))
                return {}
            case "topic.subscribe":
                await self._waits.subscribe(Given(name, found))
                return {}
            case "registry.unwatch" | "topic.unsubscribe":
                given = Given(name, found)
                self._changed.pop(given.whole("number"), None)
                await self._waits.end(given)
                return {}
        pool = calls.pool_of(self._pools, name)
        return await run(pool, functools.partial(calls.call, self._served, name, found, arrived_at))

    # Events.

    def _note(self, number: int) -> None:
        """Called on a thread of the registry or the log: the number has something new."""
        # Write `_noted`, then read `_is_note_scheduled`. The event loop clears the flag, then reads `_noted`. So at
        # least one of the two sees the other's write.
        self._noted[number] = None
        if not self._is_note_scheduled:
            self._is_note_scheduled = True
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(self._take_notes)

    def _take_notes(self) -> None:
        self._is_note_scheduled = False
        while self._noted:
            number, _ = self._noted.popitem()
            if number in self._waits:
                self._changed[number] = None
        self._wake.set()

    # Writing.

    def _answer(self, message: dict[str, Any]) -> None:
        self._send_later(_message(message), _nothing)

    def _send_later(self, message: bytes, on_sent: Callable[[], None]) -> None:
        self._answers.append((message, on_sent))
        self._wake.set()

    async def _write(self, send: Send) -> None:
        while True:
            while self._answers or self._changed:
                if self._answers:
                    message, on_sent = self._answers[0]
                    await send(message)
                    self._answers.popleft()
                    on_sent()
                    self._used_at = time.monotonic()
                if self._changed:
                    number = next(iter(self._changed))
                    del self._changed[number]
                    await send(_message({"event": number}))
            if self._is_last and not self._tasks:
                return
            self._wake.clear()
            await self._wake.wait()


def _nothing() -> None:
    """After a message that answers no call."""


def _message(found: dict[str, Any]) -> bytes:
    return flight.flight_data(flight.FlightData(app_metadata=wire.dumps(found)))
