"""The methods of Arrow Flight's service, and of gRPC's health checking, on `grpc.aio`.

Each method identifies its caller first, by the metadata of the call, and checks what the call touches before it has any
effect (W4). A PxrsError becomes a status of gRPC with the error as trailing metadata.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, Final

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
    TopicExists,
    Unauthenticated,
    UnknownTopic,
)
from pxrs.log.batch import SCHEMA
from pxrs.log.contract import TopicLog
from pxrs.remote import flight, wire
from pxrs.server import calls, staging
from pxrs.server.appends import Budget, appends, check_schema, read_first
from pxrs.server.auth.gate import Caller, unauthenticated
from pxrs.server.control import ControlStream
from pxrs.server.given import Given
from pxrs.server.pools import Pools, run
from pxrs.server.reads import read
from pxrs.server.served import Served
from pxrs.server.settings import ServerLimits

_logger = logging.getLogger(__name__)

HEALTH: Final = "grpc.health.v1.Health"
_SERVING: Final = b"\x08\x01"
_NOT_SERVING: Final = b"\x08\x02"
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


class Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    """All methods of the port."""

    def __init__(self, served: Served, pools: Pools, limits: ServerLimits) -> None:
        self._served, self._pools, self._limits = served, pools, limits
        self._budget = Budget(limits.append_bytes_max)
        self._readers = asyncio.Semaphore(limits.readers_max)
        self._ranges = asyncio.Semaphore(limits.ranges_max)
        self.streams: set[ControlStream] = set()
        self.is_draining = False
        self._open: dict[asyncio.Task[Any], tuple[Caller, Any]] = {}
        """The tasks of the methods that are under way, who called them, and their contexts."""
        self._ending: set[asyncio.Task[None]] = set()
        """Tasks of `_end`: the event loop itself keeps none alive."""
        stream = {"DoGet": self._do_get, "DoAction": self._do_action, "ListActions": self._list_actions}
        stream["ListFlights"] = self._list_flights
        both = {"DoPut": self._do_put, "DoExchange": self._do_exchange}
        single = {"GetFlightInfo": self._get_flight_info, "GetSchema": self._get_schema}
        self._handlers = {
            **{
                f"/{flight.SERVICE}/{name}": grpc.unary_stream_rpc_method_handler(_told(each))
                for name, each in stream.items()
            },
            **{
                f"/{flight.SERVICE}/{name}": grpc.stream_stream_rpc_method_handler(_told(each))
                for name, each in both.items()
            },
            **{
                f"/{flight.SERVICE}/{name}": grpc.unary_unary_rpc_method_handler(_answered(each))
                for name, each in single.items()
            },
            f"/{HEALTH}/Check": grpc.unary_unary_rpc_method_handler(self._check_health),
        }

    def service(self, handler_call_details: Any) -> Any:
        return self._handlers.get(handler_call_details.method)

    async def _by(self, context: Any) -> Served:
        """The hub for the caller of this method. From now on the method is ended when the caller's token is revoked.
        Raises Unauthenticated."""
        metadata = dict(context.invocation_metadata() or ())
        gate, identities = self._served.gate, context.auth_context()
        if gate.may_block(metadata):
            caller = await run(self._pools.calls, functools.partial(gate.identify, metadata, identities))
        else:
            caller = gate.identify(metadata, identities)
        if (task := asyncio.current_task()) is not None:
            self._open[task] = caller, context
            task.add_done_callback(lambda task: self._open.pop(task, None))
        return replace(self._served, caller=caller)

    async def refresh(self) -> None:
        """Read the tokens file again if it has changed, and end what a token has open that is not valid any more."""
        gate = self._served.gate
        await run(self._pools.calls, gate.refresh)
        for task, (caller, context) in list(self._open.items()):
            if not gate.is_valid(caller):
                del self._open[task]
                ending = asyncio.create_task(_end(task, context, is_accepted=gate.is_accepted(caller)))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)

    async def _do_get(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        served = await self._by(context)  # before the wait: who is not accepted takes nobody's place
        ticket = _json(flight.read_ticket(request), "the ticket")
        if staging.is_staged(ticket):
            async with self._ranges:
                async for message in staging.read_staged(served, self._pools, ticket):
                    yield message
            return
        async with self._readers if "positions" in ticket else self._ranges:
            async for message in read(served, self._pools, self._limits, Given("DoGet", ticket)):
                yield message

    async def _do_put(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        served, messages = await self._by(context), aiter(messages)
        first, about = await read_first(messages)
        check_schema(first)
        if staging.is_stage(about):
            answers = staging.stage(served, self._pools, self._budget, about, messages)
        else:
            answers = appends(served, self._pools, self._limits, self._budget, about, messages)
        async for answer in answers:
            yield answer

    async def _do_exchange(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        stream = ControlStream(await self._by(context), self._pools, self._limits)
        self.streams.add(stream)
        try:
            await stream.serve(messages, context.write)
        finally:
            self.streams.discard(stream)
        return
        yield b""  # makes this an asynchronous generator, as the other methods are

    async def _do_action(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        arrived_at = self._served.hub.registry.clock.now()
        name, body = flight.read_action(request)
        if name in calls.WATCHING:
            raise InvalidArgument(f"{name} needs a control stream, DoExchange: see docs/wire.md")
        arguments = _json(body or b"{}", "the body")
        pool = calls.pool_of(self._pools, name)
        found = await run(pool, functools.partial(calls.call, await self._by(context), name, arguments, arrived_at))
        yield flight.result(wire.dumps(found))

    async def _list_actions(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        await self._by(context)
        for name in calls.CALLS:
            yield flight.action_type(name, "see docs/wire.md")

    async def _list_flights(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        served = await self._by(context)
        found = await run(self._pools.calls, self._served.hub.topics)
        for topic in served.gate.topics(served.caller, found, lambda topic: topic.name):
            yield _info(topic.name, topic.partitions, topic.id)

    async def _get_flight_info(self, request: bytes, context: Any) -> bytes:
        given = Given("GetFlightInfo", {"topic": "/".join(flight.read_descriptor(request).path)})
        topic = await run(self._pools.calls, functools.partial(_topic, await self._by(context), given))
        return _info(topic.name, topic.partitions, topic.id)

    async def _get_schema(self, request: bytes, context: Any) -> bytes:
        await self._by(context)
        return flight.result(SCHEMA.serialize())

    async def _check_health(self, request: bytes, context: Any) -> bytes:
        return _NOT_SERVING if self.is_draining else _SERVING


def _topic(served: Served, given: Given) -> TopicLog:
    served.check(given.call, given.found)
    return served.topic(given)


def _info(name: str, partitions: int, identity: str) -> bytes:
    tickets = (
        wire.dumps({"topic": name, "topic_id": identity, "positions": [[partition, 0]]})
        for partition in range(partitions)
    )
    return flight.flight_info(SCHEMA, flight.Descriptor(path=(name,)), tickets)


def _json(data: bytes, what: str) -> dict[str, Any]:
    try:
        return wire.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{what} is not one JSON object: {error}") from error


def _told(method: Callable[[Any, Any], AsyncIterator[bytes]]) -> Callable[[Any, Any], AsyncIterator[bytes]]:
    """The method; an error that it raises ends the call with a status."""

    async def tell(request: Any, context: Any) -> AsyncIterator[bytes]:
        try:
            async for message in method(request, context):
                yield message
        except (PxrsError, flight.MalformedMessage) as error:
            await _abort(context, error)
        except (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError):
            raise
        except Exception:  # noqa: BLE001 - logged; the client gets a status
            await _fail(context)

    return tell


def _answered(method: Callable[[Any, Any], Awaitable[bytes]]) -> Callable[[Any, Any], Awaitable[bytes]]:
    async def answer(request: Any, context: Any) -> bytes:
        try:
            return await method(request, context)
        except (PxrsError, flight.MalformedMessage) as error:
            await _abort(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception:  # noqa: BLE001 - logged; the client gets a status
            await _fail(context)
        return b""

    return answer


async def _end(task: asyncio.Task[Any], context: Any, *, is_accepted: bool) -> None:
    """End a method whose caller's token is not accepted any more; or is, with other permissions than before, so that
    the client is to connect again. gRPC sends no status for a task that was cancelled: the client would wait for
    ever."""
    task.cancel()
    await asyncio.wait((task,))
    # AbortError is how `abort` ends the method that calls it. The others say that the method has ended by itself, or
    # that the client is gone.
    with contextlib.suppress(grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError):
        if is_accepted:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the permissions of the token have changed: connect again")
        await _abort(context, unauthenticated())


async def _abort(context: Any, error: Exception) -> None:
    told = error if isinstance(error, PxrsError) else InvalidArgument(f"a message cannot be read: {error}")
    code = next((code for kind, code in _STATUSES if isinstance(told, kind)), grpc.StatusCode.UNKNOWN)
    metadata = ((wire.ERROR_METADATA, wire.error_to_metadata(told)),)
    await context.abort(code, str(told)[: wire.ERROR_TEXT_MAX], metadata)


async def _fail(context: Any) -> None:
    _logger.exception("a call of a client failed")
    await context.abort(grpc.StatusCode.INTERNAL, "the server failed unexpectedly; its log says why")
