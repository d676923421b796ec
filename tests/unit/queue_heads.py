"""What the tests of queues ask the head of a queue, which the product does not need to tell."""

from __future__ import annotations

from pxrs.hub import Hub
from pxrs.testing.hooked import store_of


def is_waiting(hub: Hub, queue: str) -> bool:
    """Whether a thread of this hub has found the queue empty and waits for items."""
    return any(head.queue.name == queue and head._waiting.locked() for head in store_of(hub)._heads.values())
