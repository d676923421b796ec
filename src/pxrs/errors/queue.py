"""Errors of work queues and their transactions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pxrs.errors.general import InvalidArgument, PxrsError, differing
from pxrs.wording import counted, existing


class QueueError(PxrsError):
    """The base of every error of work queues."""

    code = "queue"


class UnknownQueue(QueueError, KeyError):
    """The queue does not exist, or was deleted. Create it, or correct the name; `choices` has the existing queues."""

    code = "queue.unknown"

    def __init__(self, queue: str, choices: Sequence[str] = ()) -> None:
        self.queue, self.choices = queue, tuple(choices)
        known = f"; {existing(choices)}" if choices else ""
        super().__init__(f"no queue {self.queue!r}{known}; create it with create_queue or `pxrs queue create`")


class QueueExists(QueueError):
    """A queue of this name already exists. Use it, or choose another name."""

    code = "queue.exists"


class QueueDiffers(QueueExists):
    """`create_queue(exist_ok=True)` found a queue of this name with other settings. Nothing was changed. Request the
    settings of the existing queue, or choose another name.

    `differences` maps each argument that differs to the queue's value and the requested value."""

    code = "queue.differs"

    def __init__(self, queue: str, differences: Mapping[str, tuple[object, object]]) -> None:
        self.queue, self.differences = queue, dict(differences)
        super().__init__(differing(f"queue {queue!r}", self.differences))


class InvalidQueue(QueueError, InvalidArgument):
    """The name or a setting of a queue is invalid; the message says which, and what is allowed."""

    code = "queue.invalid"


class InvalidItem(QueueError, InvalidArgument):
    """An item cannot be put because of its type, size, priority or delay. Nothing was put."""

    code = "queue.invalid-item"


class DrainLimitReached(QueueError):
    """`pxrs.testing.drain_queue` has made `deliveries_max` deliveries, and the queue still has ready items.

    Look for a handler that puts an item for each item that it takes, or that always fails on an item that is returned
    without a delay; the last exception, if there was one, is the cause. Pass a larger `deliveries_max` if the handler
    needs that many deliveries."""

    code = "queue.drain-limit-reached"

    def __init__(self, queue: str, deliveries: int, failures: int) -> None:
        self.queue, self.deliveries, self.failures = queue, deliveries, failures
        super().__init__(
            f"queue {queue} still has ready items after {deliveries:,} deliveries, of which {failures:,} failed: does "
            "the handler put an item for each item that it takes, or always fail on an item that is returned without a "
            "delay? Pass a larger deliveries_max to allow more"
        )


class TransactionTooLarge(QueueError, ValueError):
    """A transaction takes and puts more than the store can change in one commit. The transaction stays as it was before
    this call."""

    code = "queue.transaction-too-large"


class TransactionEnded(QueueError):
    """The transaction was committed or rolled back before this call. Begin a new one."""

    code = "queue.transaction-ended"


class TransactionLost(QueueError):
    """The commit was refused, because this process lost its lease or the queue was deleted; it had no effect.

    The items that it had taken (`items` has their ids) go to other takers, or already went."""

    code = "queue.transaction-lost"

    def __init__(self, items: Sequence[str], reason: str) -> None:
        self.items, self.reason = tuple(items), reason
        super().__init__(
            f"the transaction with {counted(len(self.items), 'taken item')} was refused and rolled back: {reason}; its "
            "items go to other takers"
        )
