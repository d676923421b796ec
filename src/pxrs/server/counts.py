"""What a server adds to the metrics of its process: for each call of gRPC, and for each message of a call."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, Final

from pxrs.errors import AccessDenied, Closed, NotPermitted, PxrsError, ServerBusy, Unauthenticated
from pxrs.metrics import instruments
from pxrs.metrics.instruments import Count

REFUSALS: Final = (Unauthenticated, NotPermitted, AccessDenied, ServerBusy, Closed)
"""Errors with which a server refuses what it does otherwise."""


def note_refusal(error: Exception) -> None:
    """Count an error that a client is told, if it is a refusal."""
    if isinstance(error, REFUSALS):
        instruments.SERVER_REFUSED.of(type(error).__name__).add()


class CallCounts:
    """Belongs to the event loop; the gauge is read by other threads."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        instruments.SERVER_STREAMS.watch(self, CallCounts._read)

    def _read(self) -> list[instruments.Read]:
        return [((method,), count) for method, count in self._open.copy().items()]

    @contextmanager
    def call(self, method: str) -> Iterator[None]:
        """Entered for one call of gRPC."""
        self._open[method] += 1
        outcome = "error"
        try:
            yield
            outcome = "ok"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except PxrsError as error:
            note_refusal(error)
            if isinstance(error, REFUSALS):
                outcome = "refused"
            raise
        finally:
            self._open[method] -= 1
            instruments.SERVER_STREAM.of(method, outcome).add()


class CountedMessages:
    """The messages of a client, counted as they are received."""

    def __init__(self, messages: Any, received: Count) -> None:
        self._messages, self._received = aiter(messages), received

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        message: bytes = await anext(self._messages)
        self._received.add(len(message))
        return message


class CountedReplies:
    """The context of a call for its method, which only writes: the messages are counted as they are sent."""

    def __init__(self, context: Any, sent: Count) -> None:
        self._context, self._sent = context, sent

    async def write(self, message: bytes) -> None:
        self._sent.add(len(message))
        await self._context.write(message)
