"""One control stream: the calls, watches and subscriptions of one client process (W6).

    reader (the coroutine of the stream)       reads a message, waits for a free place, starts a call on a pool
    calls (one task each)                      put their answer into `_answers`
    callbacks of watches and subscriptions     on threads of the registry and the log: put a number into `_changed`
    writer (one task)                          sends answers and events, in turns, as fast as the client reads

Bounds: `calls_max` unanswered calls, after which the reader reads no further message, so that the client is slowed down
by gRPC's flow control; a number of a watch or subscription is at most once in `_changed`. So a client that reads slowly
costs a bounded amount of memory, and slows down itself alone (W5).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from pxrs import __version__
from pxrs.errors import InvalidArgument, PxrsError, ServerBusy, WireMismatch
from pxrs.registry.watch import Watch
from pxrs.remote import flight, wire
from pxrs.server import calls
from pxrs.server.given import Given
from pxrs.server.pools import Pools, run
from pxrs.server.served import Served
from pxrs.server.settings import ServerLimits
from pxrs.waiting import Subscription

_logger = logging.getLogger(__name__)

Send = Callable[[bytes], Awaitable[None]]


class ControlStream:
    """Runs one stream. All of it runs on the event loop, but `_note` is called by any thread."""

    def __init__(self, served: Served, pools: Pools, limits: ServerLimits) -> None:
        self._served, self._pools, self._limits = served, pools, limits
        self._loop = asyncio.get_running_loop()
        self._places = asyncio.Semaphore(limits.calls_max)
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers: deque[tuple[bytes, bool]] = deque()
        """Messages to send, and whether each answers a call, whose place is free once it is sent."""
        self._changed: dict[int, None] = {}
        """The numbers of watches and subscriptions of which an event is to be sent, in order."""
        self._wake = asyncio.Event()
        self._watches: dict[int, Watch] = {}
        self._subscriptions: dict[int, Subscription] = {}
        self._reserved: dict[int, str] = {}
        """The numbers of watches and subscriptions that are there or being made, and what each is."""
        self._is_over = False

    async def serve(self, messages: AsyncIterator[bytes], send: Send) -> None:
        """Serve the stream until the client ends it. Raises PxrsError for a client that does not keep to the
        protocol."""
        writer = asyncio.create_task(self._write(send))
        reader = asyncio.create_task(self._read(messages))
        try:
            done, _ = await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._is_over = True
            for task in (reader, writer, *self._tasks):
                task.cancel()
            await asyncio.gather(reader, writer, *self._tasks, return_exceptions=True)
            await run(self._pools.calls, self._release)

    def say_goodbye(self, reason: str) -> None:
        """Tell the client that the server will end."""
        self._answer({"goodbye": {"reason": reason}})

    @property
    def is_idle(self) -> bool:
        """Whether every call is answered, and every answer is sent."""
        return not self._tasks and not self._answers

    # Reading.

    async def _read(self, messages: AsyncIterator[bytes]) -> None:
        is_greeted = False
        async for message in messages:
            arrived_at = self._served.hub.registry.clock.now()
            try:
                data = flight.read_flight_data(message)
                if not len(data.app_metadata):
                    continue  # the message that only has the descriptor
                found = wire.loads(data.app_metadata)
            except (ValueError, flight.MalformedMessage, RecursionError) as error:
                raise InvalidArgument(f"a control message is not one JSON object: {error}") from error
            if not is_greeted:
                self._greet(found)
                is_greeted = True
                continue
            await self._places.acquire()
            task = asyncio.create_task(self._serve_call(found, arrived_at))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _greet(self, found: dict[str, Any]) -> None:
        hello = found.get("hello")
        version = hello.get("wire") if isinstance(hello, dict) else None
        if not isinstance(version, int):
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
                }
            }
        )

    async def _serve_call(self, found: dict[str, Any], arrived_at: float) -> None:
        try:
            answer = {"result": await self._result(found, arrived_at)}
        except PxrsError as error:
            answer = {"error": wire.error_to_dict(error)}
        except Exception:
            _logger.exception("a call of a client failed: %s", str(found.get("call"))[:100])
            answer = {"error": wire.error_to_dict(PxrsError("the server failed unexpectedly; its log says why"))}
        self._answer({"id": found.get("id"), **answer}, is_call=True)

    async def _result(self, found: dict[str, Any], arrived_at: float) -> dict[str, Any]:
        name = found.get("call")
        if not isinstance(name, str) or not isinstance(found.get("id"), int):
            raise InvalidArgument("a control message must have an id, which is an integer, and a call, which is text")
        match name:
            case "registry.watch":
                return await self._make(Given(name, found), "watch", self._limits.watches_max, self._watch)
            case "topic.subscribe":
                return await self._make(
                    Given(name, found), "subscription", self._limits.subscriptions_max, self._subscribe
                )
            case "registry.unwatch" | "topic.unsubscribe":
                return await self._end(Given(name, found))
        return await run(
            calls.pool_of(self._pools, name), functools.partial(calls.call, self._served, name, found, arrived_at)
        )

    # Watches and subscriptions.

    async def _make(self, given: Given, kind: str, most: int, make: Callable[[Given, int], None]) -> dict[str, Any]:
        number = given.whole("number")
        if number in self._reserved:
            raise InvalidArgument(f"{given.call}: the number {number} is in use; choose another one")
        if sum(each == kind for each in self._reserved.values()) >= most:
            raise ServerBusy(f"one client may have {most:,} {kind}s on this server; share them, or raise the limit")
        self._reserved[number] = kind
        try:
            await run(self._pools.calls, functools.partial(make, given, number))
        except BaseException:
            self._reserved.pop(number, None)
            raise
        return {}

    def _watch(self, given: Given, number: int) -> None:
        self._served.check(given.call, given.found)
        watch = self._served.hub.registry.watch(*given.texts("prefixes"))
        watch.subscribe(functools.partial(self._note, number))
        self._watches[number] = watch
        self._release_if_over()

    def _subscribe(self, given: Given, number: int) -> None:
        self._served.check(given.call, given.found)
        topic = self._served.topic(given)
        self._subscriptions[number] = topic.subscribe(given.wholes("partitions"), functools.partial(self._note, number))
        self._release_if_over()

    def _release_if_over(self) -> None:
        # `serve` sets `_is_over`, then releases all that is there. A thread adds what it made, then reads `_is_over`.
        # So one of the two releases it.
        if self._is_over:
            self._release()

    async def _end(self, given: Given) -> dict[str, Any]:
        number = given.whole("number")
        made = self._watches.pop(number, None) or self._subscriptions.pop(number, None)
        self._changed.pop(number, None)
        if made is not None:
            await run(self._pools.calls, made.close)
            self._reserved.pop(number, None)
        return {}

    def _release(self) -> None:
        while self._watches or self._subscriptions:
            for made in (self._watches, self._subscriptions):
                with contextlib.suppress(KeyError):
                    made.popitem()[1].close()

    def _note(self, number: int) -> None:
        """Called on a thread of the registry or the log: the number has something new."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._note_here, number)

    def _note_here(self, number: int) -> None:
        if number in self._reserved:
            self._changed[number] = None
            self._wake.set()

    # Writing.

    def _answer(self, message: dict[str, Any], *, is_call: bool = False) -> None:
        self._answers.append((_message(message), is_call))
        self._wake.set()

    async def _write(self, send: Send) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._answers or self._changed:
                if self._answers:
                    message, is_call = self._answers[0]
                    await send(message)
                    self._answers.popleft()
                    if is_call:
                        self._places.release()
                if self._changed:
                    number = next(iter(self._changed))
                    del self._changed[number]
                    await send(_message({"event": number}))


def _message(found: dict[str, Any]) -> bytes:
    return flight.flight_data(flight.FlightData(app_metadata=wire.dumps(found)))
