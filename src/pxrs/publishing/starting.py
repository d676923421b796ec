"""Where a streaming query begins to read a partition of which its group has no checkpoint (G6)."""

from __future__ import annotations

from collections.abc import Iterable
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

    `starting` counts for the topics with which the group begins. A group that has all checkpoints of one of the topics
    has begun: what it has no checkpoint of was added later, and is read from its first offset, so that none of its
    messages is passed over (G6). So are partitions that the query owns and does not read.

    The first checkpoints are written topic by topic, in several commits if they are many, so some of them may be
    missing after a crash. If that was when a topic was added, the rest of them must not follow `starting` either. If it
    was when the group began, and a topic is complete, the two cannot be told apart: then the others are read from their
    first offsets too, which may be more than was asked for, and never less."""
    has_begun = group_has_begun(registry, options.group, source.parts)
    if not has_begun:
        options.starting.check_topics([part.name for part in source.parts])
    found: list[FirstOffset] = []
    for part in source.parts:
        numbers = range(part.partitions)
        read = numbers if options.only is None else sorted(options.only[part.name])
        starts = boundary_offsets(part, FROM_START, numbers)
        # Once the group has begun, `starting` is not even looked at.
        given = {} if has_begun else boundary_offsets(part, options.starting, read)
        for number in numbers:
            is_given = number in given and options.starting.is_offset_given(part.name, number)
            found.append(FirstOffset(given.get(number, starts[number]), is_given))
    return found


def group_has_begun(registry: Registry, group: str, topics: Iterable[Source]) -> bool:
    """Whether a group has all checkpoints of one of these topics: see `first_offsets`."""
    keys = Keys(group)
    return any(len(registry.scan(keys.checkpoints_of(topic.id))) >= topic.partitions for topic in topics)
