"""The history of the owners of partitions, rebuilt from events. No I/O.

The epoch of an owner key rises by one with every change of it: claim, release, fence, reset. So the history of a
partition is one owner for each epoch. An event of a change names the new owner and epoch, and, as `past`, the owners of
the epochs before it. An epoch may so be named by several events; it has the same owner in all of them. An epoch whose
own event was lost with the process that made the change is known from `past` of a later event.

If the hub is given to another registry (`pxrs registry adopt`), the epochs are those of that registry, and may begin at
1 again. The event of that, ADOPTED_REGISTRY, ends the history: what earlier events tell does not belong to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pxrs.events.model import Event, Json
from pxrs.events.names import ADOPTED_REGISTRY


class Place(NamedTuple):
    """A partition of a topic as one group reads it."""

    group: str
    topic_id: str
    partition: int


class Tenure(NamedTuple):
    """The owner of a partition during one epoch."""

    epoch: int
    incarnation: str | None
    """None if nobody owned the partition."""
    member: str
    at: int | None
    """When the epoch began, in microseconds since 1970; None if only later events tell of it."""
    event: str | None
    """The name of the event that began it; None if only later events tell of it."""


def owners(events: Iterable[Event]) -> dict[Place, list[Tenure]]:
    """The owners of each partition, in the order of their epochs, in the registry that the hub belongs to. Events of
    other things are passed over."""
    found: dict[Place, dict[int, Tenure]] = {}
    for event in events:
        if event.name == ADOPTED_REGISTRY:
            found.clear()
        if not event.name.startswith("partition.") or "past" not in event.fields:
            continue
        place = _place(event)
        if place is None:
            continue
        mine = found.setdefault(place, {})
        for epoch, incarnation, member in _past(event.fields["past"]):
            mine.setdefault(epoch, Tenure(epoch, incarnation, member, None, None))
        new = event.fields.get("epoch")
        is_exact = event.name != "partition.observed"  # upkeep does not know when it happened
        if type(new) is int and (new not in mine or (mine[new].at is None and is_exact)):
            owner, member = event.fields.get("incarnation"), str(event.fields.get("member") or "")
            owner = owner if isinstance(owner, str) else None
            began = (event.at, event.name) if is_exact else (None, None)
            mine[new] = Tenure(new, owner, member, *began)
    return {place: [mine[epoch] for epoch in sorted(mine)] for place, mine in found.items()}


def last_epochs(events: Iterable[Event], known: dict[Place, int]) -> None:
    """Note in `known` the highest epoch of each partition that the events tell of."""
    for event in events:
        if event.name == ADOPTED_REGISTRY:
            known.clear()
        place = _place(event) if event.name.startswith("partition.") and "past" in event.fields else None
        epoch = event.fields.get("epoch")
        if place is not None and type(epoch) is int:
            known[place] = max(epoch, known.get(place, 0))


def _place(event: Event) -> Place | None:
    group, topic, partition = (event.fields.get(name) for name in ("group", "topic_id", "partition"))
    if not isinstance(group, str) or not isinstance(topic, str) or type(partition) is not int:
        return None
    return Place(group, topic, partition)


def _past(past: Json) -> Iterator[tuple[int, str | None, str]]:
    for each in past if isinstance(past, list) else ():
        if isinstance(each, list | tuple) and len(each) == 3 and type(each[0]) is int:
            yield each[0], each[1], str(each[2] or "")
