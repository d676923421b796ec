"""A subscription to partitions that move from one server to another."""

from __future__ import annotations

import threading
from collections.abc import Collection

from pxrs.log.contract import TopicLog
from pxrs.waiting import Callback, Subscription


class MovingSubscription:
    """One subscription of a `RoutedTopic`, and the subscriptions at the owners that it consists of."""

    def __init__(self, callback: Callback) -> None:
        self.callback = callback
        self._lock = threading.Lock()
        self.handles: dict[int, TopicLog | None] = {}
        """Where each partition is waited for; None: not yet."""
        self._subscriptions: list[Subscription] = []
        self._is_closed = False

    def moved(self, log: TopicLog, partitions: Collection[int]) -> list[int]:
        """Which of these partitions are waited for at another handle."""
        with self._lock:
            known = self.handles
            return [each for each in partitions if each in known and known[each] is not None and known[each] is not log]

    def add(self, log: TopicLog, partitions: Collection[int], subscription: Subscription) -> None:
        with self._lock:
            if not self._is_closed:
                self.handles.update(dict.fromkeys(partitions, log))
                self._subscriptions.append(subscription)
                return
        subscription.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            subscriptions, self._subscriptions = self._subscriptions, []
        for each in subscriptions:
            each.close()
