"""Who owned which partition of a group when, for the picture on the group's page. No I/O.

The events of owner keys give one owner for each epoch (`pxrs.events.timeline`). Events are written a moment after the
change, by another thread or by the next process that changes the key, so the newest epoch may be in the registry only:
the description of the group adds it. Beside the bars of owners there are marks: hand-overs, take-overs, fences, refused
checkpoints, pauses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pxrs.events import Event
from pxrs.events.names import text_of
from pxrs.events.timeline import Place, Tenure, owners
from pxrs.group.description import GroupDescription
from pxrs.log.numbering import TopicPartition

MARKS: Final = (
    "partition.claimed",
    "partition.handed_over",
    "partition.taken_over",
    "partition.released",
    "partition.fenced",
    "partition.freed",
    "partition.lost",
    "partition.refused",
    "partition.paused",
    "partition.retried",
    "partition.skipped",
    "message.dead_lettered",
    "message.skipped",
)
MARKS_MAX: Final = 2_000
EVENTS_MAX: Final = 500
LANES_MAX: Final = 200
"""How many partitions the picture has. If there are more, those with the newest changes."""
BARS_MAX: Final = 2_000
"""How many owners the picture has, about. If there were more, it begins later."""
Seen = Mapping[TopicPartition, tuple[int, int]]
"""By topic id and partition: an epoch, and when it was first seen, in microseconds since 1970."""


def timeline(
    found: GroupDescription | None, seen: Seen, events: Sequence[Event], since_us: int, now_us: int
) -> dict[str, Any]:
    """The rows of the picture, a row for each partition: bars of owners and marks; and the newest events as text.

    seen: when this process first saw the epoch that each partition has now."""
    names = _names(found, events)
    history = {place: list(tenures) for place, tenures in owners(events).items()}
    if found is not None:
        _add_current(history, found, seen)
    total = len(history)
    history = _newest(history)
    changes = sorted(tenure.at for tenures in history.values() for tenure in tenures if tenure.at is not None)
    if len(changes) > BARS_MAX:
        since_us = max(since_us, changes[-BARS_MAX])
    rows = [
        {
            "topic": names.get(place.topic_id, place.topic_id),
            "partition": place.partition,
            "bars": list(_bars(tenures, since_us, now_us)),
        }
        for place, tenures in sorted(history.items(), key=lambda each: (names.get(each[0].topic_id, ""), each[0]))
    ]
    marked = [event for event in events if event.name in MARKS and event.at >= since_us]
    return {
        "since": since_us / 1e6,
        "now": now_us / 1e6,
        "rows": rows,
        "partitions": total,
        "marks": [_mark(event) for event in marked[-MARKS_MAX:]],
        "events": [_line(event) for event in events[-EVENTS_MAX:]][::-1],
    }


def _newest(history: dict[Place, list[Tenure]]) -> dict[Place, list[Tenure]]:
    """At most `LANES_MAX` partitions."""
    if len(history) <= LANES_MAX:
        return history
    newest = sorted(history.items(), key=lambda each: max((tenure.at or 0 for tenure in each[1]), default=0))
    return dict(newest[-LANES_MAX:])


def _names(found: GroupDescription | None, events: Iterable[Event]) -> dict[str, str]:
    """The names of topics by their ids."""
    names = {str(event.fields.get("topic_id")): str(event.fields.get("topic")) for event in events}
    if found is not None:
        names |= {row.topic_id: row.topic for row in found.partitions}
    return names


def _add_current(history: dict[Place, list[Tenure]], found: GroupDescription, seen: Seen) -> None:
    """Add the owners of now, where no event has told of their epoch yet."""
    for row in found.partitions:
        known = history.setdefault(Place(found.name, row.topic_id, row.partition), [])
        if row.epoch and (not known or known[-1].epoch < row.epoch):
            epoch, at = seen.get((row.topic_id, row.partition), (0, None))
            known.append(Tenure(row.epoch, row.owner, row.owner_name or "", at if epoch == row.epoch else None, None))


def _bars(tenures: Sequence[Tenure], since_us: int, now_us: int) -> Iterable[dict[str, Any]]:
    """The times during which the partition had an owner. If it is not known when a tenure began, because its event was
    lost, it is taken to have begun with the next one that is known."""
    begins = [tenure.at for tenure in tenures]
    if begins and begins[0] is None:
        begins[0] = since_us
    following = now_us
    for number in reversed(range(len(begins))):
        following = begins[number] = following if (at := begins[number]) is None else at
    for number, tenure in enumerate(tenures):
        begin, end = begins[number] or since_us, (begins[number + 1] if number + 1 < len(begins) else None) or now_us
        if tenure.incarnation is not None and end >= since_us:
            yield {
                "epoch": tenure.epoch,
                "member": tenure.member,
                "incarnation": tenure.incarnation,
                "from": max(begin, since_us) / 1e6,
                "to": max(end, begin) / 1e6,
                "event": tenure.event,
            }


def _mark(event: Event) -> dict[str, Any]:
    fields = event.fields
    return {
        "at": event.at / 1e6,
        "name": event.name,
        "topic": fields.get("topic"),
        "partition": fields.get("partition"),
        "epoch": fields.get("epoch"),
        "text": text_of(event.name, fields.items()),
    }


def _line(event: Event) -> dict[str, Any]:
    return {"at": event.at / 1e6, "name": event.name, "text": text_of(event.name, event.fields.items())}
