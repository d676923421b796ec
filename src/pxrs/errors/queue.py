"""Errors of work queues and their transactions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pxrs.errors.general import InvalidArgument, PxrsError, differing
from pxrs.wording import counted


class QueueError(PxrsError):
    """The base of every error of work queues."""

    code = "queue"


class UnknownQueue(QueueError, KeyError):
    """There is no such queue, or no more. Create it, or correct the name; `choices` are those that exist."""

    code = "queue.unknown"

    def __init__(self, queue: str, choices: Sequence[str] = ()) -> None:
        self.queue, self.choices = queue, tuple(choices)
        known = f"; there are {', '.join(self.choices[:10])}" if self.choices else ""
        super().__init__(f"no queue {self.queue!r}{known}; create it with create_queue or `pxrs queue create`")


class QueueExists(QueueError):
    """A queue of this name is there already. Use it, or choose another name."""

    code = "queue.exists"


class QueueDiffers(QueueExists):
    """`create_queue(exist_ok=True)` found a queue of this name that has other settings. Nothing was changed. Ask for
    the settings that the queue has, or choose another name.

    `differences` names each argument that differs: the queue's value, then the value that was asked for."""

    code = "queue.differs"

    def __init__(self, queue: str, differences: Mapping[str, tuple[object, object]]) -> None:
        self.queue, self.differences = queue, dict(differences)
        super().__init__(differing(f"queue {queue!r}", self.differences))


class InvalidQueue(QueueError, InvalidArgument):
    """A queue's name or setting is not allowed; the message says which and what is."""

    code = "queue.invalid"


class InvalidItem(QueueError, InvalidArgument):
    """An item cannot be put as it is: its type, its size, its priority or delay. Nothing was put."""

    code = "queue.invalid-item"


class DrainLimitReached(QueueError):
    """`pxrs.testing.drain_queue` has made as many deliveries as it may, and the queue has an item that can be taken.

    Look for a handler that puts an item for each one that it takes, or that fails every time on an item which comes
    back at once; the last exception, if there was one, is the cause. Give a larger `deliveries_max` if so many are
    meant."""

    code = "queue.drain-limit-reached"

    def __init__(self, queue: str, deliveries: int, failures: int) -> None:
        self.queue, self.deliveries, self.failures = queue, deliveries, failures
        super().__init__(
            f"queue {queue} still has an item that can be taken after {deliveries:,} deliveries, of which {failures:,} "
            "failed: does the handler put an item for each one, or fail on one that comes back at once? "
            "deliveries_max allows more"
        )


class TransactionTooLarge(QueueError, ValueError):
    """A transaction takes and puts more than the store changes at once. What it had before this call, it still has."""

    code = "queue.transaction-too-large"


class TransactionEnded(QueueError):
    """The transaction was committed or rolled back before this call. Begin another one."""

    code = "queue.transaction-ended"


class TransactionLost(QueueError):
    """The commit was refused, because this process lost its lease or the queue was deleted; nothing of it happened.

    The items that it had taken, `items` by their ids, are given to others, or were."""

    code = "queue.transaction-lost"

    def __init__(self, items: Sequence[str], reason: str) -> None:
        self.items, self.reason = tuple(items), reason
        super().__init__(
            f"the transaction with {counted(len(self.items), 'taken item')} was refused and rolled back: {reason}; "
            "others get its items"
        )
