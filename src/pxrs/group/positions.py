"""Where a group is to go on: what an administrator asks for, as an offset of each partition.

Nothing is translated that could pass over a message of which nobody says that it was read. Of a topic that keeps what
is unread, no offset lies before `Starts`: what lies there may be removed at any moment, though it can still be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Literal, Protocol

from pxrs.errors import CheckpointOutOfRange, InvalidGroup, OffsetOutOfRange, OffsetTrimmed
from pxrs.group.records import Starts
from pxrs.log.contract import Bounds, Source
from pxrs.model import microseconds_of

To = Literal["earliest", "latest"] | int | datetime | Mapping[int, int]


class Offsets(Protocol):
    """What is needed of a topic. A `Source` has it, and so has a `TopicHandle`."""

    name: str
    id: str
    partitions: int
    has_gaps: bool
    keeps_unread: bool

    def bounds(self, partitions: Iterable[int]) -> Mapping[int, Bounds]: ...

    def offset_at(self, partition: int, timestamp: int) -> int: ...


def resolve_offsets(to: To, source: Offsets, starts: Starts) -> dict[int, int]:
    """The offset for each partition. Raises if one is not in the log, or before `starts`, which retention has moved."""
    numbers = range(source.partitions)
    check_starts(source, {number: starts.of(number) for number in numbers})
    match to:
        case "earliest":
            # Files from before `starts` may be removed at any moment.
            return {number: max(found.start, starts.of(number)) for number, found in source.bounds(numbers).items()}
        case "latest":
            return {number: found.end for number, found in source.bounds(numbers).items()}
        case datetime():
            if to.tzinfo is None:
                raise InvalidGroup(f"reset to {to}: the time has no time zone; give one, such as tzinfo=UTC")
            at = microseconds_of(to)
            return {number: max(source.offset_at(number, at), starts.of(number)) for number in numbers}
        case Mapping():
            if not to:
                raise InvalidGroup("no partition is named: give offsets by partition, such as {0: 120}")
            for number in to:
                if not _is_count(number) or number >= source.partitions:
                    raise InvalidGroup(
                        f"{source.name} has no partition {number!r}; it has 0 to {source.partitions - 1}"
                    )
            return _checked(dict(sorted(to.items())), source, starts)
        case int():
            return _checked(dict.fromkeys(numbers, to), source, starts)
    raise InvalidGroup(f"reset to {to!r}: use 'earliest', 'latest', an offset, a time, or offsets by partition")


def resolve_position(offset: int, source: Offsets, starts: Starts, group: str) -> dict[int, int]:
    """A single position of an old consumer, for all partitions. Raises InvalidGroup where it means nothing.

    group: the name of the group, to say what to do instead."""
    if not _is_count(offset):
        raise InvalidGroup(f"{offset!r} is not an offset: give a whole number, 0 or larger")
    if source.has_gaps:  # as it is: rows that were handled may be gone from the table, and say nothing of the others
        return dict.fromkeys(range(source.partitions), _checked({0: offset}, source, starts)[0])
    if source.partitions == 1:
        check_starts(source, {0: starts.of(0)})
        return _checked({0: offset}, source, starts)
    raise InvalidGroup(
        f"{source.name} has {source.partitions} partitions, and each counts its offsets from 0: a single position, "
        f"{offset}, does not say how far each of them was read. Give an offset for each partition, with --partition "
        "0=OFFSET --partition 1=OFFSET ... or import_checkpoint({0: OFFSET, ...}); or start the group at a time, with "
        f"`pxrs group reset {group} --to TIME` if the group exists, or with a consumer with start=TIME if it is new"
    )


def check_start(source: Offsets, partition: int, start: int) -> None:
    """Check one offset: see `check_starts`."""
    check_starts(source, {partition: start})


def check_starts(source: Offsets, starts: Mapping[int, int]) -> None:
    """Raise CheckpointOutOfRange if a start that retention has committed lies beyond the end of its partition.

    Then the log is an older copy than the registry. A checkpoint at `start` would pass over messages that are yet to
    come, and one before it would not keep retention from removing them unread."""
    if source.has_gaps:
        return
    for partition, (_, end) in source.bounds([number for number, start in starts.items() if start]).items():
        if starts[partition] > end:
            raise CheckpointOutOfRange(
                f"{source.name}/{partition} ends at offset {end}, but according to the registry retention has removed "
                f"everything before {starts[partition]}: the log is an older copy than the registry. Restore both from "
                "the same time, or give the hub a new registry with `pxrs registry adopt`"
            )


def _checked(offsets: dict[int, int], source: Offsets, starts: Starts) -> dict[int, int]:
    """The offsets, by partition. Raises if one is not in the log, or lies before `starts`."""
    for partition, offset in offsets.items():
        if not _is_count(offset):
            raise InvalidGroup(
                f"{source.name}/{partition}: {offset!r} is not an offset; give a whole number, 0 or larger"
            )
    if source.has_gaps:
        for partition, offset in offsets.items():
            # Members would be refused there too, when they read.
            if isinstance(source, Source) and not source.was_given_out(partition, offset):
                raise OffsetOutOfRange(f"{source.name}/{partition}", offset, source.extents()[partition][1])
        return offsets
    for partition, (start, end) in source.bounds(offsets).items():
        first = max(start, starts.of(partition))
        if offsets[partition] > end:
            raise OffsetOutOfRange(f"{source.name}/{partition}", offsets[partition], end)
        if offsets[partition] < first:
            raise OffsetTrimmed(f"{source.name}/{partition}", offsets[partition], first)
    return offsets


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
