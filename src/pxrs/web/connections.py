"""Limits on connections, which uvicorn does not have: how many there are, and how long each may keep the page waiting.

A client that sends a request byte by byte, or does not read its answer, holds a connection and, while the answer is
made, a thread. Without a limit a hundred such clients, each sending one byte a minute, would keep everybody else from
the page, and many thousands would take all file descriptors of the process, which `pxrs serve` needs for the hub.

| from                               | to                                 | at most     |
|------------------------------------|------------------------------------|-------------|
| the connection, or the last answer | the end of the next request's head | `HEAD_S`    |
| the end of a request's head        | the answer is sent                 | `REQUEST_S` |

A connection that takes longer is closed. If there are `CONNECTIONS_MAX`, a further one takes the place of the one that
has waited longest for a request; if all of them have a request, the new one is closed.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS_MAX: Final = 100
HEAD_S: Final = 10.0
REQUEST_S: Final = 60.0


class BoundedProtocol(H11Protocol):
    """One connection."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._timer: asyncio.TimerHandle | None = None
        """Closes the connection when the time for what it does now is over."""
        self._waits_since = 0.0
        """When it began to wait for a request, on the loop's clock."""
        self._answered: object = None
        """The `cycle`, uvicorn's object for a request and its answer, that `_timer` is for; None: for no request."""

    @property
    def has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS_MAX:
            idle = [each for each in self.connections if isinstance(each, BoundedProtocol) and not each.has_request]
            oldest = min((each for each in idle if each is not self), key=lambda each: each._waits_since, default=self)
            oldest._end()
            if oldest is self:
                return
        self._wait_for_request()

    def handle_events(self) -> None:
        super().handle_events()
        if self.has_request and self._answered is not self.cycle:
            self._answered = self.cycle
            self._arm(REQUEST_S)

    def on_response_complete(self) -> None:
        self._answered = None
        self._wait_for_request()
        super().on_response_complete()  # may begin with the next request, if that was sent already

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def _wait_for_request(self) -> None:
        self._waits_since = self.loop.time()
        self._arm(HEAD_S)

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._end)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        """At once: a client that does not read would not let the rest be sent."""
        self._disarm()
        self.connections.discard(self)
        self.transport.abort()
