"""What queues add to the metrics of their process: for each take, commit and return, with all of its items at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from pxrs.metrics import instruments
from pxrs.queue.moves import Move
from pxrs.queue.records import Queue
from pxrs.queue.states import ItemState, state_in


class OfQueue(Protocol):
    @property
    def queue(self) -> Queue: ...


def by_queue(items: Iterable[OfQueue]) -> Counter[str]:
    """How many of these there are, by the name of their queue."""
    return Counter(each.queue.name for each in items)


def count_committed(taken: Iterable[OfQueue], puts: Iterable[OfQueue]) -> None:
    """A transaction was committed."""
    for queue, items in by_queue(taken).items():
        instruments.QUEUE_DONE.of(queue).add(items)
    for queue, items in by_queue(puts).items():
        instruments.QUEUE_PUT.of(queue).add(items)


def count_given_back(queue: Queue, returned: Sequence[Move]) -> None:
    """These moves of `moves.give_back_all` were made."""
    dead = sum(each.target is not None and state_in(each.target) is ItemState.DEAD for each in returned)
    if dead:
        instruments.QUEUE_DEAD.of(queue.name).add(dead)
    if len(returned) > dead:
        instruments.QUEUE_RETRIED.of(queue.name).add(len(returned) - dead)
