"""Where a streaming query begins to read a partition of which its group has no checkpoint (G6)."""

from __future__ import annotations

from typing import NamedTuple

from pxrs.group.records import Keys
from pxrs.log.contract import Source
from pxrs.publishing.membership import QueryOptions
from pxrs.publishing.selection import FROM_START, boundary_offsets
from pxrs.registry.contract import Registry


class FirstOffset(NamedTuple):
    """Where a partition begins that has no checkpoint."""

    offset: int
    is_given: bool
    """Whether the user has given this number, and neither a word nor a time."""


def first_offsets(source: Source, registry: Registry, options: QueryOptions) -> list[FirstOffset]:
    """Where each partition begins that has no checkpoint. Raises InvalidOption.

    `starting` counts for the topics with which the group begins. A group that has checkpoints of one of the topics has
    begun: a topic of which it has none was added later, and is read from its first offset, so that none of its messages
    is passed over (G6). So are partitions that the query owns and does not read."""
    keys = Keys(options.group)
    known = {part.id: len(registry.scan(keys.checkpoints_of(part.id))) for part in source.parts}
    if not any(known.values()):
        options.starting.check_topics([part.name for part in source.parts])
    found: list[FirstOffset] = []
    for part in source.parts:
        numbers = range(part.partitions)
        read = numbers if options.only is None else sorted(options.only[part.name])
        starts = boundary_offsets(part, FROM_START, numbers)
        # Of a topic that the group reads already, `starting` is not even looked at. The group's first checkpoints are
        # written in several commits if they are many, and some may be missing after a crash.
        is_first = not any(known.values()) or 0 < known[part.id] < part.partitions
        given = boundary_offsets(part, options.starting, read) if is_first else {}
        for number in numbers:
            is_given = number in given and options.starting.is_offset_given(part.name, number)
            found.append(FirstOffset(given.get(number, starts[number]), is_given))
    return found
