"""Consecutive numbers for the partitions of several topics: pure, no I/O.

A process that reads several topics as one source (`pxrs.log.joined`) numbers their partitions from 0 on, topic after
topic in a fixed order. The numbers mean nothing outside of the process. Whatever is stored or shown names the topic and
the number of the partition in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

TopicPartition = tuple[str, int]
"""The id of a topic or source, and the number of a partition of it."""


class Numbering:
    """The numbers of the partitions of these topics. Immutable."""

    __slots__ = ("_bases", "_counts", "_ids", "_index", "count")

    def __init__(self, topics: Iterable[TopicPartition]) -> None:
        """topics: the id of each topic, and how many partitions it has. No id may occur twice."""
        given = tuple(topics)
        self._ids = tuple(id for id, _ in given)
        self._counts = tuple(count for _, count in given)
        self._index = {id: at for at, id in enumerate(self._ids)}
        if len(self._index) != len(self._ids):
            raise ValueError(f"a topic occurs twice among {', '.join(self._ids)}")
        bases = [0]
        for count in self._counts:
            bases.append(bases[-1] + count)
        self._bases = tuple(bases[:-1])
        self.count = bases[-1]
        """How many partitions all topics have together; the numbers are those from 0 to `count` - 1."""

    @property
    def topics(self) -> tuple[str, ...]:
        """The ids of the topics, in the order of the numbers."""
        return self._ids

    def place(self, number: int) -> TopicPartition:
        """The partition that has this number. Raises IndexError if there is none."""
        if not 0 <= number < self.count:
            raise IndexError(f"there is no partition {number}: valid numbers are at least 0 and less than {self.count}")
        at = bisect_right(self._bases, number) - 1
        return self._ids[at], number - self._bases[at]

    def number_of(self, topic: str, partition: int) -> int | None:
        """The number of a partition; None if it is not a partition of these topics."""
        at = self._index.get(topic)
        if at is None or not 0 <= partition < self._counts[at]:
            return None
        return self._bases[at] + partition

    def by_topic(self, numbers: Iterable[int]) -> dict[str, list[int]]:
        """The numbers of these partitions in their topics, by topic id, in the order in which they are given."""
        found: dict[str, list[int]] = {}
        for number in numbers:
            topic, partition = self.place(number)
            found.setdefault(topic, []).append(partition)
        return found
