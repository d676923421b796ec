"""The methods of Arrow Flight's service, and of gRPC's health checking, on `grpc.aio`.

Each method identifies its caller first, by the metadata of the call, and checks what the call touches before it has any
effect (W4). A PxrsError becomes a status of gRPC with the error as trailing metadata.

A request is received only after its caller is identified: `grpc.aio` would receive the one message of a method that is
declared to take one before it calls the method, so that a client without a token could make the server hold as many
unfinished messages as it opens calls. So all methods are declared to take a stream of messages, which is the same for
clients.

The methods are coroutines that send by `context.write`, not asynchronous generators: `grpc.aio` does not close a
generator whose call was cancelled, so its `finally` blocks would run at some later time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, Final, Protocol

import grpc

from pxrs.errors import (
    AccessDenied,
    Closed,
    InvalidArgument,
    NotPermitted,
    OffsetOutOfRange,
    OffsetTrimmed,
    PxrsError,
    RegistryUnavailable,
    ServerBusy,
    TopicExists,
    Unauthenticated,
    UnknownTopic,
)
from pxrs.log.batch import SCHEMA
from pxrs.metrics.instruments import SERVER_RECEIVED, SERVER_SENT
from pxrs.remote import flight, wire
from pxrs.server import calls
from pxrs.server.auth.gate import Caller, unauthenticated
from pxrs.server.budget import Budget
from pxrs.server.control import ControlStream
from pxrs.server.counts import CallCounts, CountedMessages, CountedReplies
from pxrs.server.given import Given, parse
from pxrs.server.pools import Pools, run
from pxrs.server.reads import ReadStream, Room
from pxrs.server.served import Served, Stalled
from pxrs.server.settings import ServerLimits
from pxrs.server.staging import PutStream, StagedReadStream, is_staged

_logger = logging.getLogger(__name__)

REQUEST_S: Final = 30.0
"""How long the request of a call that has one may take to arrive."""
DETAILS_MAX: Final = 500
"""How many bytes of an error's text are in the status. With the metadata they must fit into 8 kB."""
_STATUSES: Final = (
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (NotPermitted, grpc.StatusCode.PERMISSION_DENIED),
    (AccessDenied, grpc.StatusCode.PERMISSION_DENIED),
    (UnknownTopic, grpc.StatusCode.NOT_FOUND),
    (TopicExists, grpc.StatusCode.ALREADY_EXISTS),
    (OffsetTrimmed, grpc.StatusCode.OUT_OF_RANGE),
    (OffsetOutOfRange, grpc.StatusCode.OUT_OF_RANGE),
    (InvalidArgument, grpc.StatusCode.INVALID_ARGUMENT),
    (RegistryUnavailable, grpc.StatusCode.UNAVAILABLE),
    (Closed, grpc.StatusCode.UNAVAILABLE),
)

Method = Callable[[Served, AsyncIterator[bytes], Any], Awaitable[None]]
"""Given the hub for the caller, the messages of the client, and the context of gRPC."""


class Stream(Protocol):
    """A stream that is open."""

    @property
    def may_end(self) -> bool:
        """Whether the server, when it stops, need not wait for the stream any longer."""

    def leave(self) -> None:
        """The server will stop: end as soon as what is under way is answered."""

    def finish(self) -> None:
        """End now, in an orderly way."""

    def end(self, why: PxrsError) -> None:
        """End with this error: gRPC sends no status for a task that is only cancelled. May be called again."""


class Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    """All methods of Arrow Flight. Belongs to the event loop."""

    def __init__(self, served: Served, pools: Pools, limits: ServerLimits) -> None:
        self._served, self._pools, self._limits = served, pools, limits
        self.appending = Budget(limits.append_bytes_max, "appends that are not stored yet")
        self.reading = Room(limits)
        self.streams: dict[Stream, Caller] = {}
        """The streams that are open, and who has opened each."""
        self.open = 0
        """How many calls are open."""
        self._open_by_token: Counter[str] = Counter()
        """How many of them there are for each id of a token."""
        self._is_draining = False
        self._away: str | None = None
        """Why clients must use another server for now; None: this one serves."""
        self._counts = CallCounts()
        methods: dict[str, Method] = {
            "DoPut": self._do_put,
            "DoExchange": self._do_exchange,
            "DoGet": _with_request(self._do_get),
            "DoAction": _with_request(self._do_action),
            "ListActions": _with_request(self._list_actions),
            "ListFlights": _with_request(self._list_flights),
            "GetFlightInfo": _with_request(self._get_flight_info),
            "GetSchema": _with_request(self._get_schema),
        }
        self._handlers = {
            f"/{flight.SERVICE}/{name}": grpc.stream_stream_rpc_method_handler(self._guarded(name, method))
            for name, method in methods.items()
        }

    def service(self, handler_call_details: Any) -> Any:
        return self._handlers.get(handler_call_details.method)

    async def refresh(self) -> None:
        """Read the tokens file again if it has changed, and end the streams of tokens that are not valid any more. An
        action ends by itself."""
        gate = self._served.gate
        await run(self._pools.tokens, gate.refresh)
        for stream, caller in list(self.streams.items()):
            if not gate.is_valid(caller):
                # Accepted, with other permissions than before: the client is to connect again.
                changed = Closed("the permissions of the token have changed: connect again")
                stream.end(changed if gate.is_accepted(caller) else unauthenticated())

    def leave(self) -> None:
        """Take no further calls, and tell the open streams that the server will end."""
        self._is_draining = True
        for stream in list(self.streams):
            stream.leave()

    def stand_back(self, why: str | None) -> None:
        """why: refuse further calls and end the open streams for this reason, so that clients connect to another
        server of the address; None: serve again. May be called again."""
        if why == self._away:
            return
        self._away = why
        if why is not None:
            for stream in list(self.streams):
                stream.end(Closed(f"{why}: connect to another server"))

    # The methods.

    async def _do_get(self, served: Served, request: bytes, context: Any) -> None:
        given = Given("DoGet", self._json(flight.read_ticket(request), "the ticket"))
        kind = StagedReadStream if is_staged(given.found) else ReadStream
        stream = kind(served, self._pools, self._limits, self.reading)
        await self._serve(stream, served, stream.serve(given, context.write))

    async def _do_put(self, served: Served, messages: AsyncIterator[bytes], context: Any) -> None:
        stream = PutStream(served, self._pools, self._limits, self.appending)
        await self._serve(stream, served, stream.serve(messages, context.write))

    async def _do_exchange(self, served: Served, messages: AsyncIterator[bytes], context: Any) -> None:
        stream = ControlStream(served, self._pools, self._limits)
        await self._serve(stream, served, stream.serve(messages, context.write))

    async def _serve(self, stream: Stream, served: Served, serving: Awaitable[None]) -> None:
        self.streams[stream] = served.caller
        try:
            await serving
        finally:
            del self.streams[stream]

    async def _do_action(self, served: Served, request: bytes, context: Any) -> None:
        arrived_at = self._served.hub.registry.clock.now()
        name, body = flight.read_action(request)
        if name in calls.WATCHING:
            raise InvalidArgument(f"{name} works only on a control stream (DoExchange): see docs/wire.md")
        arguments = self._json(body or b"{}", "the body")
        pool = calls.pool_of(self._pools, name)
        found = await run(pool, functools.partial(calls.call, served, name, arguments, arrived_at))
        await context.write(flight.result(wire.dumps(found)))

    async def _list_actions(self, served: Served, request: bytes, context: Any) -> None:
        for name in calls.CALLS:
            await context.write(flight.action_type(name, "see docs/wire.md"))

    async def _list_flights(self, served: Served, request: bytes, context: Any) -> None:
        found = await run(self._pools.calls, served.hub.topics)
        for topic in served.gate.topics(served.caller, found, lambda topic: topic.name):
            await context.write(_info(topic.name, topic.partitions, topic.id))

    async def _get_flight_info(self, served: Served, request: bytes, context: Any) -> None:
        path = flight.read_descriptor(request).path
        if len(path) != 1:
            raise InvalidArgument("GetFlightInfo: the descriptor's path must be the name of one topic")
        given = Given("GetFlightInfo", {"topic": path[0]})
        topic = await run(self._pools.calls, functools.partial(served.permitted_topic, given))
        await context.write(_info(topic.name, topic.partitions, topic.id))

    async def _get_schema(self, served: Served, request: bytes, context: Any) -> None:
        await context.write(flight.result(SCHEMA.serialize()))

    def _json(self, data: bytes, what: str) -> dict[str, Any]:
        return parse(data, what, self._limits.request_bytes_max)

    def _guarded(self, name: str, method: Method) -> Callable[[Any, Any], Awaitable[None]]:
        """The method; an error that it raises ends the call with a status."""
        received, sent = SERVER_RECEIVED.of(name), SERVER_SENT.of(name)

        async def call(messages: Any, context: Any) -> None:
            # Counted until the status is sent. gRPC waits for a client that does not take what was sent before.
            counted = contextlib.ExitStack()
            self.open += 1
            try:
                # Otherwise the first message brings it. If that is cancelled while it is sent, `grpc.aio` does not know
                # that the metadata is sent, and can send no status any more: the call would never end.
                await context.send_initial_metadata(())
                with self._counts.call(name):
                    if self._is_draining:
                        raise Closed("the server is stopping: connect again")
                    if self._away is not None:
                        raise Closed(f"{self._away}: connect to another server")
                    if self.open > self._limits.streams_max:
                        raise ServerBusy(f"{self._limits.streams_max:,} streams are open on this server: close some")
                    served = await self._by(context)
                    counted.enter_context(self._counted(served.caller))
                    await method(served, CountedMessages(messages, received), CountedReplies(context, sent))
            except (PxrsError, flight.MalformedMessage) as error:
                await _abort(context, error)
            except Stalled as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except grpc.aio.InternalError:  # the client is gone: gRPC could send nothing to it
                raise asyncio.CancelledError from None
            except Exception:
                if context.cancelled() or context.done():  # the client is gone, so nothing could be sent to it
                    raise asyncio.CancelledError from None
                _logger.exception("a call of a client failed")
                await context.abort(grpc.StatusCode.INTERNAL, "the server failed unexpectedly; its log says why")
            finally:
                counted.close()
                self.open -= 1

        return call

    @contextlib.contextmanager
    def _counted(self, caller: Caller) -> Iterator[None]:
        """Count a call for the token of its caller. Raises ServerBusy if the token has too many."""
        token, most = "" if caller.token is None else caller.token.id, self._limits.token_streams_max
        if token and self._open_by_token[token] >= most:
            raise ServerBusy(f"clients with this token have {most:,} streams open on this server: close some")
        self._open_by_token[token] += 1
        try:
            yield
        finally:
            self._open_by_token[token] -= 1
            if not self._open_by_token[token]:
                del self._open_by_token[token]

    async def _by(self, context: Any) -> Served:
        """The hub for the caller. Raises Unauthenticated."""
        gate, metadata = self._served.gate, dict(context.invocation_metadata() or ())
        identify = functools.partial(gate.identify, metadata, context.auth_context())
        caller = await run(self._pools.calls, identify) if gate.may_block(metadata) else identify()
        return replace(self._served, caller=caller, is_direct=wire.DIRECT_METADATA in metadata)


def _with_request(method: Callable[[Served, bytes, Any], Awaitable[None]]) -> Method:
    """The method, called with the only message of the client."""

    async def call(served: Served, messages: AsyncIterator[bytes], context: Any) -> None:
        try:
            async with asyncio.timeout(REQUEST_S):
                request = await anext(aiter(messages), None)
        except TimeoutError:
            raise InvalidArgument(f"the request of the call did not arrive within {REQUEST_S:g} s") from None
        if request is None:
            raise InvalidArgument("the call came without a request: send one message")
        await method(served, request, context)

    return call


def _info(name: str, partitions: int, identity: str) -> bytes:
    tickets = (
        wire.dumps({"topic": name, "topic_id": identity, "positions": [[partition, 0]]})
        for partition in range(partitions)
    )
    return flight.flight_info(SCHEMA, flight.Descriptor(path=(name,)), tickets)


async def _abort(context: Any, error: Exception) -> None:
    told = error if isinstance(error, PxrsError) else InvalidArgument(f"a message cannot be read: {error}")
    code = next((code for kind, code in _STATUSES if isinstance(told, kind)), grpc.StatusCode.UNKNOWN)
    # ASCII: gRPC writes each other byte as three, and does not take every text of Python.
    details = str(told).encode("ascii", "backslashreplace")[:DETAILS_MAX].decode()
    await context.abort(code, details, ((wire.ERROR_METADATA, wire.error_to_metadata(told)),))
