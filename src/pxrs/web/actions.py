"""What the page may change. Each action says first what it would do, and does that, and nothing else, when confirmed.

To look and to decide takes a person a while, and the hub goes on meanwhile. So an action is given its arguments once,
as JSON from the browser, and becomes a `Plan`: what would be done in words, and the exact offsets, ids and names that
were found. `perform` does what was shown, or raises if that is not there any more: a topic, a queue or a paused message
that has another of the same name in its place is not touched, a message or a dead letter that came later stays, and a
group that has members by now is left alone. Without permission nothing is looked up, so an answer tells nothing about
the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from pxrs.errors import InvalidArgument
from pxrs.group.positions import To
from pxrs.group.records import Paused
from pxrs.hub import Hub
from pxrs.wording import counted

IDS_MAX: Final = 1_000
"""How many dead letters a visitor may choose."""
LETTERS_MAX: Final = 10_000
"""How many dead letters one action moves or removes, if all are meant."""

Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """What an action would do, in a sentence, and for a reset partition by partition."""

    text: str
    perform: Callable[[], str]
    """Does it. Returns a sentence about what was done. Raises InvalidArgument if something else would be done than
    `text` says, and what the hub raises."""
    rows: list[dict[str, Any]] = field(default_factory=list)


def _text(given: Arguments, name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= 300:
        raise InvalidArgument(f"{name} must be a string of 1 to 300 characters")
    return value


def _whole(given: Arguments, name: str) -> int:
    value = given.get(name)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise InvalidArgument(f"{name} must be an integer of at least 0")
    return value


def _ids(given: Arguments) -> list[str] | None:
    """The chosen dead letters; None for all."""
    value = given.get("ids")
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value) or len(value) > IDS_MAX:
        raise InvalidArgument(f"ids must be a list of at most {IDS_MAX:,} ids")
    return value


def position(text: str) -> To:
    """Where a reset goes: earliest, latest, an offset, or a time with a zone. Raises InvalidArgument."""
    if text == "earliest" or text == "latest":
        return "earliest" if text == "earliest" else "latest"
    if text.isascii() and text.isdecimal() and len(text) < 19:
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise InvalidArgument(
            f"{text[:50]!r}: give earliest, latest, an offset, or a time with a zone such as 2026-01-31T12:00Z"
        )
    return moment


def _changed(what: str) -> InvalidArgument:
    return InvalidArgument(f"{what}: nothing was changed. Review the current state and try again")


# Groups.


def _paused(hub: Hub, given: Arguments) -> tuple[str, str, str, int, Paused]:
    """The group, the id of the topic, the partition in words, its number, and the pause."""
    group, topic, partition = _text(given, "group"), _text(given, "topic"), _whole(given, "partition")
    rows = [
        row
        for row in hub.group(group).describe().partitions
        if topic in (row.topic_id, row.topic) and row.partition == partition and row.paused is not None
    ]
    if len(rows) != 1 or rows[0].paused is None:
        raise _changed(f"partition {partition} of {topic} is not paused in group {group}")
    return group, rows[0].topic_id, f"{rows[0].topic}/{partition}", partition, rows[0].paused


def _decision(
    hub: Hub, given: Arguments, would: str, done: str, decide: Callable[[str, str, int, int], object]
) -> Plan:
    """About the message that a partition is paused at. decide: is given group, topic id, partition and offset."""
    group, topic, place, partition, paused = _paused(hub, given)
    if "offset" in given and _whole(given, "offset") != paused.offset:
        raise _changed(f"{place} is now paused at offset {paused.offset}")

    def perform() -> str:
        if hub.group(group).paused(topic, partition) != paused:
            raise _changed(f"{place} has been paused again since then")
        decide(group, topic, partition, paused.offset)
        return done.format(group=group, place=place, offset=paused.offset)

    return Plan(would.format(group=group, place=place, offset=paused.offset), perform)


def _retry(hub: Hub, given: Arguments) -> Plan:
    return _decision(
        hub,
        given,
        "Group {group} will retry the message at offset {offset} of {place}. If the handler succeeds, the partition "
        "resumes; if it fails, the partition is paused again.",
        "group {group} retries offset {offset} of {place}",
        lambda group, topic, partition, offset: hub.group(group).retry(topic, partition, offset),
    )


def _skip(hub: Hub, given: Arguments) -> Plan:
    return _decision(
        hub,
        given,
        "Group {group} will skip offset {offset} of {place}. The message stays in the topic, but this group never "
        "handles it.",
        "group {group} skipped offset {offset} of {place}",
        lambda group, topic, partition, offset: hub.group(group).skip(topic, partition, offset),
    )


def _reset(hub: Hub, given: Arguments) -> Plan:
    group, to = _text(given, "group"), position(_text(given, "to"))
    topic = _text(given, "topic") if given.get("topic") else None
    handle = hub.group(group)
    found = handle.describe()
    planned = handle.preview_reset(to, topic)
    checkpoints = {(row.topic_id, row.partition): row.checkpoint for row in found.partitions}
    rows = [
        _moved(name, number, checkpoints.get((id, number)), offset)
        for name, id, offsets in planned
        for number, offset in offsets.items()
    ]
    repeated, skipped = (sum(row[name] for row in rows) for name in ("repeated", "skipped"))
    said = f"{counted(repeated, 'message')} will be handled again, {counted(skipped, 'message')} will be skipped."
    if found.members:
        said += f" The group has {counted(len(found.members), 'member')}; they continue at the new offsets."
    elif to == "latest":
        said += " Messages that arrive from now on will be handled."

    def perform() -> str:
        for name, id, _ in planned:
            if hub.readable(name).id != id:
                raise _changed(f"{name} was deleted and created again")
        count = 0
        for name, _, offsets in planned:
            written = hub.group(group).reset(offsets, name, force=bool(found.members))
            count += sum(map(len, written.values()))
        return f"group {group}: {counted(count, 'checkpoint')} set to {given['to']}"

    return Plan(f"Set the checkpoints of group {group} to {given['to']}. {said}", perform, rows)


def _moved(topic: str, partition: int, checkpoint: int | None, offset: int) -> dict[str, Any]:
    by = 0 if checkpoint is None else offset - checkpoint
    return {
        "topic": topic,
        "partition": partition,
        "checkpoint": checkpoint,
        "offset": offset,
        "repeated": max(0, -by),
        "skipped": max(0, by),
    }


def _delete_group(hub: Hub, given: Arguments) -> Plan:
    found = hub.group(_text(given, "group")).describe()
    said = f" Its {counted(len(found.members), 'member')} will rejoin without checkpoints." if found.members else ""

    def perform() -> str:
        hub.group(found.name).delete(force=bool(found.members))
        return f"deleted group {found.name}"

    return Plan(
        f"Delete group {found.name} and its checkpoints of {counted(len(found.partitions), 'partition')} for good. A "
        f"consumer that joins it later starts without checkpoints.{said}",
        perform,
    )


# Queues and topics.


def _check_queue(hub: Hub, name: str, id: str) -> None:
    if hub.queue(name).settings.id != id:
        raise _changed(f"the queue {name} was deleted and created again")


def _letters(hub: Hub, given: Arguments, would: str, done: str, act: Callable[[str, list[str]], int]) -> Plan:
    """About dead letters: those that there are now. act: is given the queue and their ids; returns how many."""
    queue, chosen = hub.queue(_text(given, "queue")), _ids(given)
    name, id = queue.name, queue.settings.id
    there = [item.id for item in queue.dead_letters().list(LETTERS_MAX)]
    total = len(there) if len(there) < LETTERS_MAX else len(queue.dead_letters())
    ids = there if chosen is None else sorted(set(chosen) & set(there))
    if not ids:
        raise _changed(f"{name} no longer has any of these dead letters")
    count = counted(len(ids), "dead letter")
    if chosen is None and total > len(ids):
        count = f"the oldest {count} of {total:,}"

    def perform() -> str:
        _check_queue(hub, name, id)
        return done.format(count=counted(act(name, ids), "dead letter"), queue=name)

    return Plan(would.format(count=count, queue=name), perform)


def _requeue(hub: Hub, given: Arguments) -> Plan:
    return _letters(
        hub,
        given,
        "Put {count} of {queue} back into the queue, as if never delivered.",
        "{count} of {queue} will be retried",
        lambda queue, ids: hub.queue(queue).dead_letters().retry(ids),
    )


def _purge(hub: Hub, given: Arguments) -> Plan:
    return _letters(
        hub,
        given,
        "Remove {count} of {queue} for good. They cannot be brought back.",
        "removed {count} of {queue}",
        lambda queue, ids: hub.queue(queue).dead_letters().purge(ids),
    )


def _delete_queue(hub: Hub, given: Arguments) -> Plan:
    queue = hub.queue(_text(given, "queue"))
    name, id, depth = queue.name, queue.settings.id, queue.depth()
    count = counted(depth.ready + depth.delayed + depth.in_flight + depth.dead, "item")

    def perform() -> str:
        _check_queue(hub, name, id)
        hub.delete_queue(name)
        return f"deleted queue {name}"

    return Plan(f"Delete the queue {name} and the {count} in it for good.", perform)


def _delete_topic(hub: Hub, given: Arguments) -> Plan:
    topic = hub.topic(_text(given, "topic"))
    name, id = topic.name, topic.id
    count = counted(sum(each.end - each.start for each in topic.log.glance()), "message")

    def perform() -> str:
        if hub.topic(name).id != id:
            raise _changed(f"the topic {name} was deleted and created again")
        hub.delete_topic(name)
        return f"deleted topic {name}"

    return Plan(f"Delete the topic {name} and its {count} for good. Groups can no longer read it.", perform)


ACTIONS: Final[Mapping[str, Callable[[Hub, Arguments], Plan]]] = {
    "retry": _retry,
    "skip": _skip,
    "reset": _reset,
    "delete-group": _delete_group,
    "requeue": _requeue,
    "purge": _purge,
    "delete-queue": _delete_queue,
    "delete-topic": _delete_topic,
}
