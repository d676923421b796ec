"""Bytes that may be held at a time. Whoever wants to hold more waits until others give some back."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from pxrs.errors import ServerBusy


class Budget:
    """Belongs to the event loop. Those who wait are served in the order in which they came, so that a large request is
    not passed by small ones for ever."""

    def __init__(self, bytes_max: int, what: str) -> None:
        """what: names what is held, for the error of those who wait too long."""
        self._left = self._bytes_max = bytes_max
        self._what = what
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held(self) -> int:
        """How many bytes are held now."""
        return self._bytes_max - self._left

    def has_room(self, size: int) -> bool:
        """Whether `take` would not wait."""
        return not self._waiting and self._left >= min(size, self._bytes_max)

    async def take(self, size: int, timeout_s: float | None = None) -> int:
        """Wait until there is room, for no longer than this: then ServerBusy is raised. A request that alone is larger
        than the whole budget takes all of it. Returns what was taken, to be given back."""
        size = min(size, self._bytes_max)
        if self.has_room(size):
            self._left -= size
            return size
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = size, granted
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(timeout_s):
                await granted
        except BaseException as error:
            if granted.cancelled():
                with contextlib.suppress(ValueError):  # `_grant` may have removed it
                    self._waiting.remove(entry)
                self._grant()
            else:  # granted in the moment in which the wait ended
                self.give_back(size)
            if isinstance(error, TimeoutError):
                raise ServerBusy(f"the server holds {self._bytes_max:,} bytes of {self._what}: try later") from None
            raise
        return size

    def give_back(self, size: int) -> None:
        self._left += size
        self._grant()

    def exchange(self, taken: int, size: int) -> int:
        """Give back what was taken, and take this much instead without waiting, for something that is held already.
        Returns what was taken."""
        self._left -= size
        self.give_back(taken)
        return size

    def _grant(self) -> None:
        while self._waiting and (self._waiting[0][1].done() or self._left >= self._waiting[0][0]):
            size, granted = self._waiting.popleft()
            if not granted.done():
                self._left -= size
                granted.set_result(None)
