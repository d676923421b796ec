"""The names of partitions that a consumer shows to its user and puts into messages.

Inside a consumer a partition is the number that its source has for it. A consumer of one topic shows the same number. A
consumer of several topics reads them through a `JoinedSource`, which numbers the partitions of all topics
consecutively; it shows a `TopicPartition` and never that number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from pxrs import arguments
from pxrs.errors import InvalidGroup
from pxrs.log.joined import JoinedSource
from pxrs.model import TopicPartition

P = TypeVar("P", int, TopicPartition)
"""The type of a partition's name: its number, or its topic and number."""


class PartitionNames(ABC, Generic[P]):
    """Converts between the source's numbers of a consumer's partitions and the names that the user sees. Immutable."""

    numbers: Mapping[tuple[str, int], int] | None = None
    """The source's number of each partition, by topic name and number in the topic; None if these are the same."""

    @abstractmethod
    def named(self, numbers: Iterable[int]) -> list[P]:
        """The names of the partitions with these numbers."""

    @abstractmethod
    def number(self, partition: int | tuple[str, int]) -> int:
        """The number of a partition whose name comes from `named`, such as those in the `partitions` of an error."""

    @abstractmethod
    def checked(self, given: object) -> int:
        """The number of a partition that a user has named. Raises InvalidGroup if it is no name of a partition."""

    @abstractmethod
    def place(self, number: int) -> tuple[str, int]:
        """The topic's name and the partition's number in that topic: `Message.topic` and `Message.partition`."""


class Numbers(PartitionNames[int]):
    """For one topic or source: the name of a partition is its number."""

    def __init__(self, topic: str, partitions: int) -> None:
        self._topic, self._partitions = topic, partitions

    def named(self, numbers: Iterable[int]) -> list[int]:
        return list(numbers)

    def number(self, partition: int | tuple[str, int]) -> int:
        assert isinstance(partition, int)
        return partition

    def checked(self, given: object) -> int:
        return arguments.partition(InvalidGroup, self._topic, given, self._partitions)

    def place(self, number: int) -> tuple[str, int]:
        return self._topic, number


class TopicPartitions(PartitionNames[TopicPartition]):
    """For several topics: the name of a partition is a `TopicPartition`."""

    def __init__(self, source: JoinedSource) -> None:
        self._partitions = {part.name: part.partitions for part in source.parts}
        self._places = source.named(range(source.partitions))
        self._numbers: dict[tuple[str, int], int] = {place: number for number, place in enumerate(self._places)}
        self.numbers = self._numbers

    def named(self, numbers: Iterable[int]) -> list[TopicPartition]:
        return [self._places[number] for number in numbers]

    def number(self, partition: int | tuple[str, int]) -> int:
        assert not isinstance(partition, int)
        return self._numbers[partition]

    def checked(self, given: object) -> int:
        if not isinstance(given, tuple) or len(given) != 2 or not isinstance(given[0], str):
            raise InvalidGroup(
                f"{arguments.shown(given)} is not a partition of several topics: give a TopicPartition, such as "
                f"{self._places[0]!r}"
            )
        topic, partition = given
        if topic not in self._partitions:
            raise InvalidGroup(f"this consumer does not read {topic!r}; it reads {', '.join(self._partitions)}")
        number = arguments.partition(InvalidGroup, topic, partition, self._partitions[topic])
        return self._numbers[TopicPartition(topic, number)]

    def place(self, number: int) -> tuple[str, int]:
        return self._places[number]
