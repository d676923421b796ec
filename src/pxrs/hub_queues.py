"""The work queues of an open hub: `HubQueues` makes, alters, finds and deletes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pxrs import arguments
from pxrs.errors import InvalidQueue
from pxrs.hub_parts import HubParts

if TYPE_CHECKING:
    from pxrs.queue.handle import QueueHandle
    from pxrs.queue.policy import Backoff, Policy
    from pxrs.queue.transaction import Transaction


class HubQueues:
    """Each call opens the registry and this process's queue store if that was not done before. Threads share it."""

    def __init__(self, parts: HubParts) -> None:
        self._parts = parts

    def create(
        self, name: str, policy: Policy | None, fifo: bool, backoff: Backoff | None, *, exist_ok: bool
    ) -> QueueHandle:
        """Raises QueueExists, QueueDiffers with `exist_ok`, InvalidQueue, OutcomeUnknown."""
        from pxrs.queue.handle import QueueHandle
        from pxrs.queue.policy import AtLeastOnce

        arguments.flag(InvalidQueue, "fifo", fifo)
        arguments.flag(InvalidQueue, "exist_ok", exist_ok)
        store = self._parts.queue_store()
        rule = AtLeastOnce() if policy is None else policy
        return QueueHandle(store, store.catalog.create(name, rule, fifo, backoff, exist_ok=exist_ok))

    def alter(self, name: str, changes: Mapping[str, Any]) -> QueueHandle:
        """changes: `policy`, `backoff` or both. Raises UnknownQueue, InvalidQueue, OutcomeUnknown."""
        from pxrs.queue.handle import QueueHandle

        store = self._parts.queue_store()
        if unknown := sorted(set(changes) - {"policy", "backoff"}):
            raise InvalidQueue(
                f"{name}: {unknown[0]} cannot be changed: create another queue, and move the items there"
            )
        if not changes:
            raise InvalidQueue(f"{name}: name at least one setting to change")
        return QueueHandle(store, store.catalog.alter(name, dict(changes)))

    def find(self, name: str) -> QueueHandle:
        """Raises UnknownQueue."""
        from pxrs.queue.handle import QueueHandle

        store = self._parts.queue_store()
        return QueueHandle(store, store.catalog.queue(name))

    def every(self) -> list[QueueHandle]:
        """All queues, in the order of their names."""
        from pxrs.queue.handle import QueueHandle

        store = self._parts.queue_store()
        return [QueueHandle(store, queue) for queue in store.catalog.queues()]

    def delete(self, name: str) -> None:
        """Raises UnknownQueue."""
        self._parts.queue_store().catalog.delete(name)

    def transaction(self) -> Transaction:
        from pxrs.queue.transaction import Transaction

        return Transaction(self._parts.queue_store())
