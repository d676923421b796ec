"""What the page may change: each action says first what it would do (`preview`), and is recorded when it is done.

An action is given its arguments as JSON from the browser: everything is checked here, or by the function of the hub
that does the work. Without permission nothing is looked up, so an answer tells nothing about the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from pxrs.errors import InvalidArgument
from pxrs.group.positions import Offsets, To, resolve_offsets
from pxrs.group.records import Starts
from pxrs.hub import Hub
from pxrs.wording import counted

IDS_MAX: Final = 1_000
ROWS_MAX: Final = 1_000

Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Preview:
    """What an action would do, in a sentence, and for a reset partition by partition."""

    text: str
    rows: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Action:
    preview: Callable[[Hub, Arguments], Preview]
    perform: Callable[[Hub, Arguments], str]
    """Returns a sentence about what was done."""


def _text(given: Arguments, name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= 300:
        raise InvalidArgument(f"{name} is missing, or no text of up to 300 characters")
    return value


def _whole(given: Arguments, name: str) -> int:
    value = given.get(name)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise InvalidArgument(f"{name} is missing, or no whole number from 0 on")
    return value


def _force(given: Arguments) -> bool:
    value = given.get("force", False)
    if type(value) is not bool:
        raise InvalidArgument("force is neither true nor false")
    return value


def _ids(given: Arguments) -> list[str] | None:
    """The chosen dead letters; None for all."""
    value = given.get("ids")
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value) or len(value) > IDS_MAX:
        raise InvalidArgument(f"ids is no list of up to {IDS_MAX:,} ids")
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
            f"{text[:50]!r} is neither earliest, latest, an offset, nor a time with a zone such as 2026-01-31T12:00Z"
        )
    return moment


# Groups.


def _paused(hub: Hub, given: Arguments) -> tuple[str, str, int, int]:
    group, topic, partition = _text(given, "group"), _text(given, "topic"), _whole(given, "partition")
    return group, topic, partition, hub.group(group).paused(topic, partition).offset


def _preview_retry(hub: Hub, given: Arguments) -> Preview:
    group, topic, partition, offset = _paused(hub, given)
    return Preview(
        f"Group {group} handles the message at offset {offset} of {topic}/{partition} again. If the handler succeeds, "
        "the partition goes on; if it fails, the partition is paused again.",
        [],
    )


def _retry(hub: Hub, given: Arguments) -> str:
    group, topic, partition, offset = _paused(hub, given)
    hub.group(group).retry(topic, partition)
    return f"group {group} tries offset {offset} of {topic}/{partition} again"


def _preview_skip(hub: Hub, given: Arguments) -> Preview:
    group, topic, partition, offset = _paused(hub, given)
    return Preview(
        f"Group {group} goes on behind offset {offset} of {topic}/{partition}. The message stays in the topic, and "
        "this group never handles it.",
        [],
    )


def _skip(hub: Hub, given: Arguments) -> str:
    group, topic, partition, offset = _paused(hub, given)
    if offset != _whole(given, "offset"):
        raise InvalidArgument(f"{topic}/{partition} is paused at offset {offset} by now: look again, then decide")
    hub.group(group).skip(topic, partition, offset)
    return f"group {group} leaves out offset {offset} of {topic}/{partition}"


def _preview_reset(hub: Hub, given: Arguments) -> Preview:
    group, to = _text(given, "group"), position(_text(given, "to"))
    topic = _text(given, "topic") if given.get("topic") else None
    found = hub.group(group).describe()
    names = [topic] if topic else sorted({each.topic for each in found.topics})
    if len(names) > 1 and isinstance(to, int):
        raise InvalidArgument(f"group {group} reads {', '.join(names)}: choose the topic that the offset is of")
    checkpoints = {(row.topic, row.partition): row.checkpoint for row in found.partitions}
    rows: list[dict[str, Any]] = []
    for name in names:
        source: Offsets = hub.readable(name)
        for number, offset in resolve_offsets(to, source, Starts()).items():
            now = checkpoints.get((name, number))
            moved = 0 if now is None else offset - now
            rows.append(
                {
                    "topic": name,
                    "partition": number,
                    "checkpoint": now,
                    "offset": offset,
                    "repeated": max(0, -moved),
                    "skipped": max(0, moved),
                }
            )
    repeated, skipped = (sum(row[name] for row in rows) for name in ("repeated", "skipped"))
    said = f"{counted(repeated, 'message')} would be handled again, and {counted(skipped, 'message')} never be handled."
    if found.members:
        said += f" The group has {counted(len(found.members), 'member')}: they go on at the new offsets."
    return Preview(f"Set the checkpoints of group {group} to {given['to']}. {said}", rows[:ROWS_MAX])


def _reset(hub: Hub, given: Arguments) -> str:
    group, to = _text(given, "group"), position(_text(given, "to"))
    topic = _text(given, "topic") if given.get("topic") else None
    written = hub.group(group).reset(to, topic, _force(given))
    return f"group {group}: {counted(sum(map(len, written.values())), 'checkpoint')} set to {given['to']}"


def _preview_delete_group(hub: Hub, given: Arguments) -> Preview:
    found = hub.group(_text(given, "group")).describe()
    said = f" Its {counted(len(found.members), 'member')} join again and start anew." if found.members else ""
    return Preview(
        f"Delete group {found.name} and its checkpoints of {counted(len(found.partitions), 'partition')} for good. A "
        f"consumer that uses the name later starts anew.{said}",
        [],
    )


def _delete_group(hub: Hub, given: Arguments) -> str:
    group = _text(given, "group")
    hub.group(group).delete(_force(given))
    return f"group {group} is deleted"


# Queues and topics.


def _letters(given: Arguments, hub: Hub) -> tuple[str, list[str] | None, str]:
    queue, ids = _text(given, "queue"), _ids(given)
    return queue, ids, counted(len(hub.queue(queue).dead_letters()) if ids is None else len(ids), "dead letter")


def _preview_requeue(hub: Hub, given: Arguments) -> Preview:
    queue, _, count = _letters(given, hub)
    return Preview(f"Put {count} of {queue} back into the queue, as if never delivered.", [])


def _requeue(hub: Hub, given: Arguments) -> str:
    queue, ids, _ = _letters(given, hub)
    return f"{counted(hub.queue(queue).dead_letters().retry(ids), 'dead letter')} of {queue} will be tried again"


def _preview_purge(hub: Hub, given: Arguments) -> Preview:
    queue, _, count = _letters(given, hub)
    return Preview(f"Remove {count} of {queue} for good. They cannot be brought back.", [])


def _purge(hub: Hub, given: Arguments) -> str:
    queue, ids, _ = _letters(given, hub)
    return f"removed {counted(hub.queue(queue).dead_letters().purge(ids), 'dead letter')} of {queue}"


def _preview_delete_queue(hub: Hub, given: Arguments) -> Preview:
    queue = _text(given, "queue")
    depth = hub.queue(queue).depth()
    count = counted(depth.ready + depth.delayed + depth.in_flight + depth.dead, "item")
    return Preview(f"Delete the queue {queue} and the {count} in it for good.", [])


def _delete_queue(hub: Hub, given: Arguments) -> str:
    queue = _text(given, "queue")
    hub.delete_queue(queue)
    return f"queue {queue} is deleted"


def _preview_delete_topic(hub: Hub, given: Arguments) -> Preview:
    topic = hub.topic(_text(given, "topic"))
    bounds = topic.bounds(range(topic.partitions)).values()
    count = counted(sum(each.end - each.start for each in bounds), "message")
    return Preview(f"Delete the topic {topic.name} and its {count} for good. Groups that read it lose it.", [])


def _delete_topic(hub: Hub, given: Arguments) -> str:
    topic = _text(given, "topic")
    hub.delete_topic(topic)
    return f"topic {topic} is deleted"


ACTIONS: Final[Mapping[str, Action]] = {
    "retry": Action(_preview_retry, _retry),
    "skip": Action(_preview_skip, _skip),
    "reset": Action(_preview_reset, _reset),
    "delete-group": Action(_preview_delete_group, _delete_group),
    "requeue": Action(_preview_requeue, _requeue),
    "purge": Action(_preview_purge, _purge),
    "delete-queue": Action(_preview_delete_queue, _delete_queue),
    "delete-topic": Action(_preview_delete_topic, _delete_topic),
}
