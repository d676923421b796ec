"""gRPC's health checking, `grpc.health.v1.Health`: whether the server takes calls.

Known services are the empty name, which stands for the whole server, and Arrow Flight's. The messages have one field
each: HealthCheckRequest 1 service, HealthCheckResponse 1 status (1 serving, 2 not serving, 3 unknown service).
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc

from pxrs.remote import flight

SERVICE: Final = "grpc.health.v1.Health"
WATCHES_MAX: Final = 100
"""How many calls of `Watch` are open at a time."""
_SERVING: Final = b"\x08\x01"
_NOT_SERVING: Final = b"\x08\x02"
_SERVICE_UNKNOWN: Final = b"\x08\x03"
_KNOWN: Final = ("", SERVICE, flight.SERVICE)


class Health(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._stopping = asyncio.Event()
        self._watches = 0
        self._handlers = {
            f"/{SERVICE}/Check": grpc.unary_unary_rpc_method_handler(self._check),
            f"/{SERVICE}/Watch": grpc.unary_stream_rpc_method_handler(self._watch),
        }

    def service(self, handler_call_details: Any) -> Any:
        return self._handlers.get(handler_call_details.method)

    def leave(self) -> None:
        """The server takes no further calls."""
        self._stopping.set()

    async def _check(self, request: bytes, context: Any) -> bytes:
        if await _name(request, context) not in _KNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return _NOT_SERVING if self._stopping.is_set() else _SERVING

    async def _watch(self, request: bytes, context: Any) -> None:
        """The status now, and again when it changes, which it does once. Then the call ends."""
        if self._watches >= WATCHES_MAX:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls of Watch are open")
        self._watches += 1
        try:
            is_known = await _name(request, context) in _KNOWN
            if not self._stopping.is_set():
                await context.write(_SERVING if is_known else _SERVICE_UNKNOWN)
                await self._stopping.wait()
            await context.write(_NOT_SERVING if is_known else _SERVICE_UNKNOWN)
        finally:
            self._watches -= 1


async def _name(request: bytes, context: Any) -> str:
    try:
        return flight.read_result(request).decode(errors="replace")
    except flight.MalformedMessage as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        raise
