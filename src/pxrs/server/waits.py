"""The watches and subscriptions of one control stream.

Each is made and closed on a thread of a pool, because both may block; the numbers are reserved on the event loop. A
client may end a wait, or its stream may end, while the wait is still being made. So each has a flag `is_ended`, and
whoever comes second closes it: the thread that has made it, or who has ended it.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Final

from pxrs.errors import InvalidArgument, ServerBusy
from pxrs.registry.watch import Watch
from pxrs.server.given import Given
from pxrs.server.pools import Pools, run
from pxrs.server.served import Served
from pxrs.server.settings import ServerLimits
from pxrs.waiting import Subscription

_logger = logging.getLogger(__name__)

_WATCHES: Final = "watched prefixes"
_SUBSCRIPTIONS: Final = "subscriptions"


class _Wait:
    __slots__ = ("is_ended", "kind", "made", "weight")

    def __init__(self, kind: str, weight: int) -> None:
        self.kind, self.weight = kind, weight
        self.made: Watch | Subscription | None = None
        self.is_ended = False


class Waits:
    """Belongs to the event loop, but `_lock` guards `made` and `is_ended` of each wait."""

    def __init__(self, served: Served, pools: Pools, limits: ServerLimits, note: Callable[[int], None]) -> None:
        """note: called by any thread, with the number of a wait that may have something new"""
        self._served, self._pools, self._note = served, pools, note
        self._most = {_WATCHES: limits.watches_max, _SUBSCRIPTIONS: limits.subscriptions_max}
        self._lock = threading.Lock()
        self._by_number: dict[int, _Wait] = {}
        self._used: Counter[str] = Counter()

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    async def watch(self, given: Given) -> None:
        """Watch prefixes of the registry."""
        prefixes = given.texts("prefixes")
        await self._make(given, _Wait(_WATCHES, max(1, len(prefixes))), functools.partial(self._watch, given, prefixes))

    async def subscribe(self, given: Given) -> None:
        """Subscribe to partitions of a topic."""
        await self._make(given, _Wait(_SUBSCRIPTIONS, 1), functools.partial(self._subscribe, given))

    async def end(self, given: Given) -> None:
        """End the wait of this number. No error if there is none."""
        number = given.whole("number")
        wait = self._by_number.get(number)
        if wait is not None:
            self._forget(number)
            try:
                await run(self._pools.calls, functools.partial(self._close, wait))
            except BaseException:
                # If this task was cancelled, no thread may have begun.
                self._pools.releases.submit(self._close_all, [wait])
                raise

    def release(self) -> None:
        """End all waits, on another thread, which may take its time."""
        waits = list(self._by_number.values())
        self._by_number.clear()
        self._used.clear()
        for wait in waits:  # at once: a thread that is making one sees it
            wait.is_ended = True
        if waits:
            self._pools.releases.submit(self._close_all, waits)

    async def _make(self, given: Given, wait: _Wait, make: Callable[[int], Watch | Subscription]) -> None:
        number, most = given.whole("number"), self._most[wait.kind]
        if number in self._by_number:
            raise InvalidArgument(f"{given.call}: the number {number} is in use; choose another one")
        if self._used[wait.kind] + wait.weight > most:
            raise ServerBusy(
                f"{given.call}: a client may have {most:,} {wait.kind} on this server: share them, or raise the limit"
            )
        self._by_number[number] = wait
        self._used[wait.kind] += wait.weight
        try:
            await run(self._pools.calls, functools.partial(self._keep, wait, functools.partial(make, number)))
        except BaseException:
            if self._by_number.get(number) is wait:
                self._forget(number)
            # If this task was cancelled, the thread may have made the wait or may still be making it.
            wait.is_ended = True
            self._pools.releases.submit(self._close_all, [wait])
            raise

    def _forget(self, number: int) -> None:
        wait = self._by_number.pop(number)
        self._used[wait.kind] -= wait.weight

    # On threads of a pool.

    def _keep(self, wait: _Wait, make: Callable[[], Watch | Subscription]) -> None:
        if wait.is_ended:
            return
        made = make()
        with self._lock:
            wait.made = made
        if wait.is_ended:
            self._close(wait)

    def _close(self, wait: _Wait) -> None:
        wait.is_ended = True
        with self._lock:
            made, wait.made = wait.made, None
        if made is not None:
            made.close()

    def _close_all(self, waits: list[_Wait]) -> None:
        for wait in waits:
            try:
                self._close(wait)
            except Exception:
                _logger.exception("could not close a watch or subscription of a disconnected client")

    def _watch(self, given: Given, prefixes: list[str], number: int) -> Watch:
        self._served.check(given.call, given.found)
        watch = self._served.hub.registry.watch(*prefixes)
        try:
            watch.subscribe(functools.partial(self._note, number))
        except BaseException:
            watch.close()
            raise
        return watch

    def _subscribe(self, given: Given, number: int) -> Subscription:
        topic = self._served.permitted_topic(given)
        return topic.subscribe(given.partitions(), functools.partial(self._note, number))
