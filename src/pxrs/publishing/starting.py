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
    """The offset at which a partition without a checkpoint is read first."""

    offset: int
    is_given: bool
    """Whether the user has given this number, and neither a word nor a time."""


def first_offsets(source: Source, registry: Registry, options: QueryOptions) -> list[FirstOffset]:
    """For each partition, the offset that its first checkpoint gets if it has none. Raises InvalidOption.

    `starting` applies only to a new group. A group counts as begun if it has the checkpoints of all partitions of at
    least one topic. Partitions without a checkpoint then belong to topics that were added later. They start at their
    first offset, so that no message is skipped (G6). Partitions that the query owns and does not read start there too.

    First checkpoints are written topic by topic, in several commits if there are many, so a crash may leave some of
    them missing. A group that crashed while it began, after the checkpoints of one topic were complete, cannot be told
    from a group to which topics were added. Its other topics then start at their first offsets too: the query may read
    more than `starting` says, but never less."""
    has_begun = group_has_begun(registry, options.group, source.parts)
    if not has_begun:
        options.starting.check_topics([part.name for part in source.parts])
    found: list[FirstOffset] = []
    for part in source.parts:
        numbers = range(part.partitions)
        read = numbers if options.only is None else sorted(options.only[part.name])
        starts = boundary_offsets(part, FROM_START, numbers)
        # `starting` is not resolved for a group that has begun: its offsets and times may no longer be valid.
        given = {} if has_begun else boundary_offsets(part, options.starting, read)
        for number in numbers:
            is_given = number in given and options.starting.is_offset_given(part.name, number)
            found.append(FirstOffset(given.get(number, starts[number]), is_given))
    return found


def group_has_begun(registry: Registry, group: str, topics: Iterable[Source]) -> bool:
    """Whether a group has all checkpoints of one of these topics: see `first_offsets`."""
    keys = Keys(group)
    return any(len(registry.scan(keys.checkpoints_of(topic.id))) >= topic.partitions for topic in topics)
