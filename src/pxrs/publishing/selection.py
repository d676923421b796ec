"""Which topics and partitions are read, and where the reading begins and ends: the choices of a user, as values.

`Topics` says which topics. `Boundary` says at which offset of each partition the reading begins or ends: by a word, by
offsets, or by times. `resolve`, which is pure, turns a boundary into offsets of one topic.
`boundary_offsets` reads from a source what `resolve` needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from pxrs.errors import InvalidOption
from pxrs.log.contract import Source

EARLIEST: Final = -2
LATEST: Final = -1
"""Stand for the first and for the next offset of a partition, as in the JSON of offsets of Spark's Kafka source."""

ByPartition = Mapping[str, Mapping[int, int]]
"""A number for each partition, by the topic's name and the partition's number."""


@dataclass(frozen=True, slots=True)
class Topics:
    """The topics that are read. Exactly one of the fields is given."""

    names: tuple[str, ...] = ()
    pattern: str | None = None
    """A regular expression of Python's `re`, which has to match a whole name."""
    assigned: Mapping[str, tuple[int, ...]] | None = None
    """The partitions that are read, by topic; of the other forms, all partitions are read."""

    @property
    def only(self) -> str | None:
        """The name of the topic, if the user has named one topic; None if more than one may be read, or if the user has
        named partitions."""
        return self.names[0] if len(self.names) == 1 else None

    def among(self, existing: Iterable[str]) -> list[str]:
        """The names of the topics to read. existing: the names of all topics, which only a pattern needs; a name that
        was given is returned whether it exists or not."""
        if self.pattern is None:
            return list(self.names if self.assigned is None else self.assigned)
        matches = re.compile(self.pattern).fullmatch
        return sorted(name for name in existing if matches(name))

    def partitions_of(self, name: str, count: int) -> list[int]:
        """The partitions to read of a topic that has `count` of them. Raises InvalidOption if one of them is not
        there."""
        if self.assigned is None:
            return list(range(count))
        if unknown := [number for number in self.assigned[name] if number >= count]:
            raise InvalidOption(
                "assign", f"{name} has only {_partitions(range(count))}, not {', '.join(map(str, unknown))}"
            )
        return list(self.assigned[name])

    def __str__(self) -> str:
        if self.pattern is not None:
            return f"topics that match {self.pattern}"
        if self.assigned is not None:
            return ", ".join(f"{name}/{number}" for name, numbers in self.assigned.items() for number in numbers)
        return ", ".join(self.names)


@dataclass(frozen=True, slots=True)
class Boundary:
    """Where the reading of each partition begins or ends. At most one of `offsets`, `time_us` and `times_us` is given;
    if none is, `word` counts."""

    option: str
    """The option by which the user gave the boundary, for errors."""
    word: str
    """One of "earliest", "latest" and "committed"."""
    offsets: ByPartition | None = None
    """EARLIEST and LATEST may stand in place of an offset."""
    time_us: int | None = None
    """For all partitions, in microseconds since 1970: the first message of this time or later is meant."""
    times_us: ByPartition | None = None
    """The same, with a time for each partition."""
    must_match: bool = False
    """Whether it is an error if a partition has no message of that time or later. If not, its end is meant."""

    def is_offset_given(self, topic: str, partition: int) -> bool:
        """Whether the user has given a number as the offset of this partition, and neither a word nor a time."""
        return self.offsets is not None and self.offsets.get(topic, {}).get(partition, LATEST) >= 0

    def check_topics(self, names: Collection[str]) -> None:
        """Raise InvalidOption if offsets or times are given by topic, and not for exactly these topics."""
        given = self.offsets if self.offsets is not None else self.times_us
        if given is None:
            return
        if missing := sorted(set(names) - given.keys()):
            raise InvalidOption(self.option, f"it lacks {', '.join(missing)}: name every topic that is read")
        if unknown := sorted(given.keys() - set(names)):
            raise InvalidOption(
                self.option,
                f"it names {', '.join(unknown)}, but the topics that are read are {', '.join(sorted(names))}",
            )


FROM_START: Final = Boundary("startingOffsets", "earliest")
TO_END: Final = Boundary("endingOffsets", "latest")


def boundary_offsets(source: Source, boundary: Boundary, numbers: Iterable[int] | None = None) -> dict[int, int]:
    """The offsets of these partitions of a source, by default of all. "committed" is taken as "earliest". Raises
    InvalidOption."""
    chosen = range(source.partitions) if numbers is None else numbers
    return resolve(boundary, source.name, source.bounds(chosen), source.offset_at)


def resolve(
    boundary: Boundary,
    topic: str,
    extents: Mapping[int, tuple[int, int]],
    offset_at: Callable[[int, int], int],
    is_allowed: Callable[[int], bool] | None = None,
) -> dict[int, int]:
    """The offsets of one topic. Raises InvalidOption if a partition is missing or not read, if an offset is beyond the
    end, or if there is no message of a time and `must_match` is set.

    extents: by partition that is read, its first offset and its end. offset_at: the first offset of a partition whose
    message is of a time or later, its end if there is none. is_allowed: whether an offset beyond the end may be
    given."""
    if boundary.time_us is not None:
        return _at_times(boundary, topic, extents, dict.fromkeys(extents, boundary.time_us), offset_at)
    if boundary.times_us is not None:
        return _at_times(boundary, topic, extents, _complete(boundary, topic, boundary.times_us, extents), offset_at)
    if boundary.offsets is None:
        return {number: extent[boundary.word == "latest"] for number, extent in extents.items()}
    result = {}
    for number, offset in _complete(boundary, topic, boundary.offsets, extents).items():
        first, end = extents[number]
        result[number] = first if offset == EARLIEST else end if offset == LATEST else offset
        if result[number] > end and (is_allowed is None or not is_allowed(offset)):
            raise InvalidOption(boundary.option, f"{topic}/{number} ends at offset {end}, but {offset} is beyond it")
    return result


def _at_times(
    boundary: Boundary,
    topic: str,
    extents: Mapping[int, tuple[int, int]],
    times: Mapping[int, int],
    offset_at: Callable[[int, int], int],
) -> dict[int, int]:
    found = {number: offset_at(number, times[number]) for number in extents}
    unmatched = [number for number, offset in found.items() if offset >= extents[number][1]]
    if boundary.must_match and unmatched:
        raise InvalidOption(
            boundary.option,
            f"{topic} has no message of that time or later in {_partitions(unmatched)}. To begin at the end there, set "
            "startingOffsetsByTimestampStrategy to latest",
        )
    return found


def _complete(boundary: Boundary, topic: str, given: ByPartition, numbers: Collection[int]) -> dict[int, int]:
    """The value given for each of these partitions, in the order of their numbers. Raises InvalidOption if one is
    missing or another one is named."""
    found, expected = given.get(topic, {}), _partitions(numbers)
    if missing := sorted(set(numbers) - found.keys()):
        raise InvalidOption(boundary.option, f"it lacks {_partitions(missing)} of {topic}: name {expected}")
    if unknown := sorted(found.keys() - set(numbers)):
        raise InvalidOption(boundary.option, f"it names {_partitions(unknown)} of {topic}: name only {expected}")
    return {number: found[number] for number in sorted(found)}


def _partitions(numbers: Collection[int]) -> str:
    """For messages: "partition 3", "partitions 0 to 7", "partitions 0, 2"."""
    ordered = sorted(numbers)
    if len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"partitions {ordered[0]} to {ordered[-1]}"
    return f"partition{'' if len(ordered) == 1 else 's'} {', '.join(map(str, ordered))}"
