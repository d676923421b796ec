"""Begins a copy, or goes on with one: from where to where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from pxrs import arguments
from pxrs.copying.copier import Copied, Copier
from pxrs.errors import CopyFailed, InvalidArgument
from pxrs.log.contract import Bounds, TopicLog
from pxrs.model import microseconds_of
from pxrs.registry.contract import Registry

Place = int | datetime | None
"""Where a copy begins or ends in each partition: an offset, or the first message of a time."""


def copy(
    source: TopicLog,
    target: TopicLog,
    registry: Registry,
    start: Place = None,
    end: Place = None,
    *,
    may_add: bool = False,
    on_progress: Callable[[Copied], None] | None = None,
) -> Copied:
    """Copy a topic: see `Hub.copy_topic`. registry: that of the target's hub."""
    begins, until = _checked("start", start), _checked("end", end)
    if (problem := source.ends_problem()) is not None:  # asked before the ends are read
        raise CopyFailed(f"the copy might lack messages of {source.name}: {problem}")
    bounds = source.bounds(range(source.partitions))
    copier = Copier(source, target, registry, on_progress)
    text = None if begins is None else _text(begins)
    record = copier.begin(text, lambda: _at(source, 0 if begins is None else begins, bounds), may_add=may_add)
    ends = {number: each.end for number, each in bounds.items()} if until is None else _at(source, until, bounds)
    return copier.run(record, ends)


def _checked(name: str, place: Place) -> Place:
    if place is None:
        return None
    if isinstance(place, datetime):
        if place.tzinfo is None:
            raise InvalidArgument(f"{name} is {place}, which has no time zone: add one, such as tzinfo=UTC")
        return place
    return arguments.whole(InvalidArgument, name, place, 0)


def _text(place: int | datetime) -> str:
    return place.astimezone(UTC).isoformat() if isinstance(place, datetime) else f"offset {place}"


def _at(source: TopicLog, place: int | datetime, bounds: Mapping[int, Bounds]) -> dict[int, int]:
    """The offset in each partition, moved into what is there."""
    if isinstance(place, datetime):
        time = microseconds_of(place)
        return {number: max(each.start, source.offset_at(number, time)) for number, each in bounds.items()}
    return {number: min(max(place, each.start), each.end) for number, each in bounds.items()}
