"""The subscriptions of one open log to topics on the server.

A reader that waits subscribes, looks, sleeps and ends its subscription, again and again. To ask the server each time
would cost each wait two round trips. So readers of the same partitions share one subscription on the server, and it is
kept when the last of them has gone: a later reader uses it at once. One that nobody waits for is given up when an event
comes for it, which shows that the topic is being written to while nobody waits; when there are more than IDLE_MAX; or
if the server refuses it after a reconnect, because the topic was deleted, say.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Final

from pxrs.errors import Closed
from pxrs.remote.client.arming import Armed
from pxrs.remote.client.connection import Connection
from pxrs.waiting import Callback, Subscription, call_all

IDLE_MAX: Final = 100
"""How many subscriptions are kept on the server that nobody waits for."""

Key = tuple[str, str, frozenset[int]]
"""The name and the id of a topic, and partitions of it."""


class _Shared:
    """One subscription on the server, and who waits for it."""

    def __init__(self) -> None:
        self.armed: Armed | None = None
        self.callbacks: dict[int, Callback] = {}


class TopicSubscriptions:
    """Threads share it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._tokens = itertools.count()
        self._shared: dict[Key, _Shared] = {}
        """The ones that nobody waits for come first, in the order in which they were last used."""
        self._is_closed = False
        self._local: dict[int, Callback] = {}
        """Callbacks that concern no partition: only `close` calls them."""

    def add(
        self, topic: str, topic_id: str, partitions: Iterable[int], callback: Callback, timeout_s: float
    ) -> Subscription:
        """Call the callback after each change in these partitions. Raises what the server answers; Unanswered;
        Closed."""
        key = topic, topic_id, frozenset(partitions)
        token = next(self._tokens)
        if not key[2]:
            self._local[token] = callback
            return Subscription(lambda: self._local.pop(token, None))
        with self._lock:
            if self._is_closed:  # it would stay on the connection, which others may use
                raise Closed(f"the log of {topic} was closed")
            shared = self._shared.pop(key, None) or _Shared()
            self._shared[key] = shared  # now the last one
            shared.callbacks[token] = callback
            if shared.armed is None:
                arguments = {"topic": topic, "topic_id": topic_id, "partitions": sorted(key[2])}
                shared.armed = self._connection.arm(
                    "topic.subscribe", "topic.unsubscribe", arguments, self._waker(key, shared)
                )
            armed = shared.armed
        try:
            self._connection.wait_armed(armed, timeout_s)
        except BaseException:
            with self._lock:
                shared.callbacks.pop(token, None)
            self._give_up(key, shared, is_idle=armed.failure is None)
            raise
        return Subscription(lambda: self._remove(key, shared, token))

    def close(self) -> None:
        """Call every callback once more, and end all subscriptions."""
        with self._lock:
            self._is_closed = True
            everything = list(self._shared.values())
            self._shared.clear()
            callbacks = [*self._local.values(), *(each for shared in everything for each in shared.callbacks.values())]
        for shared in everything:
            if shared.armed is not None:
                self._connection.disarm(shared.armed)
        call_all(callbacks)

    def _waker(self, key: Key, shared: _Shared) -> Callable[[], None]:
        def wake() -> None:
            with self._lock:
                callbacks = list(shared.callbacks.values())
            if callbacks:
                call_all(callbacks)
            else:
                self._give_up(key, shared, is_idle=True)

        return wake

    def _remove(self, key: Key, shared: _Shared, token: int) -> None:
        with self._lock:
            shared.callbacks.pop(token, None)
            is_refused = shared.armed is not None and shared.armed.is_refused
            idle = [(each, found) for each, found in self._shared.items() if not found.callbacks]
        if is_refused:
            self._give_up(key, shared, is_idle=True)
        for each, found in idle[: max(0, len(idle) - IDLE_MAX)]:
            self._give_up(each, found, is_idle=True)

    def _give_up(self, key: Key, shared: _Shared, *, is_idle: bool = False) -> None:
        """End the subscription on the server. is_idle: only if nobody waits for it."""
        with self._lock:
            if is_idle and shared.callbacks:
                return
            if self._shared.get(key) is shared:
                del self._shared[key]
            armed = shared.armed
        if armed is not None:
            self._connection.disarm(armed)
