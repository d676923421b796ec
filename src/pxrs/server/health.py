"""gRPC's health checking, `grpc.health.v1.Health`: whether the server takes calls.

Known services are the empty name, which stands for the whole server, and Arrow Flight's. The messages have one field
each: HealthCheckRequest 1 service, HealthCheckResponse 1 status (1 serving, 2 not serving, 3 unknown service).

These calls need no token, so what they make the server hold is bounded: it receives at most `REQUESTS_MAX` requests at
a time, each for at most `REQUEST_S`. A call whose request it does not receive is answered for the whole server. As in
`service`, the methods are declared to take a stream of messages: otherwise gRPC would receive all requests at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from pxrs.remote import flight

SERVICE: Final = "grpc.health.v1.Health"
WATCHES_MAX: Final = 100
"""How many calls of `Watch` are open at a time."""
REQUESTS_MAX: Final = 4
REQUEST_S: Final = 2.0
_SERVING: Final = b"\x08\x01"
_NOT_SERVING: Final = b"\x08\x02"
_SERVICE_UNKNOWN: Final = b"\x08\x03"
_KNOWN: Final = ("", SERVICE, flight.SERVICE)


class Health(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._stopping = asyncio.Event()
        self._watches = 0
        self._requests = 0
        """How many requests are being received."""
        self._handlers = {
            f"/{SERVICE}/Check": grpc.stream_stream_rpc_method_handler(self._check),
            f"/{SERVICE}/Watch": grpc.stream_stream_rpc_method_handler(self._watch),
        }

    def service(self, handler_call_details: Any) -> Any:
        return self._handlers.get(handler_call_details.method)

    def leave(self) -> None:
        """The server takes no further calls."""
        self._stopping.set()

    async def _check(self, messages: AsyncIterator[bytes], context: Any) -> None:
        if await self._service(messages, context) not in _KNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        await context.write(_NOT_SERVING if self._stopping.is_set() else _SERVING)

    async def _watch(self, messages: AsyncIterator[bytes], context: Any) -> None:
        """The status now, and again when it changes, which it does once. Then the call ends."""
        if self._watches >= WATCHES_MAX:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many Watch calls are open")
        self._watches += 1
        try:
            is_known = await self._service(messages, context) in _KNOWN
            if not self._stopping.is_set():
                await context.write(_SERVING if is_known else _SERVICE_UNKNOWN)
                await self._stopping.wait()
            await context.write(_NOT_SERVING if is_known else _SERVICE_UNKNOWN)
        finally:
            self._watches -= 1

    async def _service(self, messages: AsyncIterator[bytes], context: Any) -> str:
        """The service that the request names; empty, which stands for the whole server, if it is not received."""
        if self._requests >= REQUESTS_MAX:
            return ""
        self._requests += 1
        try:
            async with asyncio.timeout(REQUEST_S):
                request = await anext(aiter(messages), b"")
            return flight.read_result(request).decode(errors="replace")
        except TimeoutError:
            return ""
        except flight.MalformedMessage as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
        finally:
            self._requests -= 1
