"""`JoinedSource`: several sources as one. A member of a group that reads several topics reads from it.

The partitions of all parts are numbered consecutively, in the order of the parts (`Numbering`): with topics of 4 and 2
partitions, the partitions 4 and 5 of the joined source are the partitions 0 and 1 of the second topic. `place` and
`number_of` convert.

Invariants:
- A call makes at most one such call of each part, however many partitions it names. `fetch` is the exception: if the
  positions that it is given alternate between parts, it reads a part several times, in the order of the positions. That
  order decides which partitions are left out if not all of them fit.
- Waiting needs no thread: a wait subscribes to each part.
- An error of one partition is raised as its part raises it, and names the part and the partition in it. An error that
  concerns a whole part, such as TopicDeleted, concerns the whole source.

The caller that opened the parts closes them: a joined source has nothing to close.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final

from pxrs.errors import InvalidRecord, InvalidTopic
from pxrs.log.batch import Batch
from pxrs.log.contract import READ_BYTES_DEFAULT, Bounds, Fetched, Source
from pxrs.log.numbering import Numbering
from pxrs.model import TopicPartition
from pxrs.waiting import Callback, Cancel, Subscription, wait_for

PARTS_MAX: Final = 1_000
"""How many topics can be read as one source: the record of a member names them all."""


class JoinedSource(Source):
    """Sources whose partitions are numbered consecutively, in the order in which the sources are given."""

    def __init__(self, parts: Sequence[Source]) -> None:
        """Raises InvalidTopic if there are no parts, too many, or two with the same id or the same name."""
        self._parts = tuple(each for part in parts for each in part.parts)
        if not 1 <= len(self._parts) <= PARTS_MAX:
            raise InvalidTopic(f"{len(self._parts)} topics cannot be read together; give 1 to {PARTS_MAX:,}")
        ids, names = [part.id for part in self._parts], [part.name for part in self._parts]
        for which in (ids, names):
            again = [name for at, name in enumerate(names) if which[at] in which[:at]]
            if again:
                raise InvalidTopic(f"the topic {again[0]!r} is named twice; name each topic once")
        self.numbering = Numbering((part.id, part.partitions) for part in self._parts)
        self._by_id = dict(zip(ids, self._parts, strict=True))
        self.name, self.id = ", ".join(names), "+".join(ids)
        self.partitions = self.numbering.count
        self.has_gaps = any(part.has_gaps for part in self._parts)
        self.has_latency = any(part.has_latency for part in self._parts)
        self.keeps_unread = any(part.keeps_unread for part in self._parts)

    @property
    def parts(self) -> tuple[Source, ...]:
        return self._parts

    def place(self, number: int) -> tuple[Source, int]:
        """Raises InvalidRecord if there is no such partition."""
        try:
            id, partition = self.numbering.place(number)
        except IndexError:
            raise InvalidRecord(
                f"{self.name} together have no partition {number}; they have 0 to {self.partitions - 1}"
            ) from None
        return self._by_id[id], partition

    def number_of(self, source_id: str, partition: int) -> int:
        """The number of a partition of the part with this id. Raises InvalidRecord if there is none."""
        number = self.numbering.number_of(source_id, partition)
        if number is None:
            raise InvalidRecord(f"{self.name} have no partition {partition} of a topic with the id {source_id}")
        return number

    def named(self, numbers: Iterable[int]) -> list[TopicPartition]:
        return [TopicPartition(part.name, partition) for part, partition in map(self.place, numbers)]

    # Calls for several partitions: each part is called once, with its own partitions.

    def _split(self, numbers: Iterable[int]) -> dict[str, dict[int, int]]:
        """By part id: the partition numbers in the part, each with its number in this source. The parts are in the
        order in which `numbers` first names one of their partitions."""
        found: dict[str, dict[int, int]] = {}
        for number in numbers:
            part, partition = self.place(number)
            found.setdefault(part.id, {})[partition] = number
        return found

    def _positions(self, positions: Mapping[int, int]) -> list[tuple[Source, dict[int, int]]]:
        """Each part with its positions, by the partition's number in the part; last the parts that have none."""
        split = self._split(positions)
        found = {id: {each: positions[number] for each, number in some.items()} for id, some in split.items()}
        found |= {id: {} for id in self._by_id if id not in found}
        return [(self._by_id[id], places) for id, places in found.items()]

    def bounds(self, partitions: Iterable[int]) -> dict[int, Bounds]:
        chosen = list(partitions)
        found: dict[int, Bounds] = {}
        for id, numbers in self._split(chosen).items():
            bounds = self._by_id[id].bounds(numbers)
            found |= {numbers[partition]: each for partition, each in bounds.items()}
        return {number: found[number] for number in chosen}

    def fetch(
        self,
        positions: Mapping[int, int],
        max_bytes: int = READ_BYTES_DEFAULT,
        timeout: float | None = 0.0,
        cancel: Cancel | None = None,
    ) -> dict[int, Fetched]:
        return wait_for(
            lambda: self._fetch_parts(positions, max_bytes),
            lambda callback: self.subscribe(positions, callback),
            timeout,
            cancel,
            lambda: self.look_again_s(positions),
        )

    def _fetch_parts(self, positions: Mapping[int, int], max_bytes: int) -> dict[int, Fetched]:
        """What can be read now, in the order of `positions`. Each part gets a share of the bytes for each of its
        partitions that can be read.

        Nothing is read behind a partition that did not fit: a caller that begins behind the partitions that it was
        given would never come to it."""
        # All parts, also those without a position: a part that was closed or deleted raises.
        readable = set(self.readable(positions))
        chosen = [(number, *self.place(number)) for number in positions if number in readable]
        waiting, left, found = len(chosen), max(1, max_bytes), dict[int, Fetched]()
        for part, run in groupby(chosen, key=itemgetter(1)):
            if left <= 0:
                break
            numbers = {partition: number for number, _, partition in run}
            share = max(1, left * len(numbers) // waiting)
            waiting -= len(numbers)
            fetched = part.fetch({each: positions[number] for each, number in numbers.items()}, share)
            found |= {numbers[each]: got for each, got in fetched.items()}
            if waiting:
                size = sum(batch.records.nbytes for got in fetched.values() for batch in got.batches)
                left -= size
                if size >= share and len(fetched) < len(numbers):
                    break
        return found

    def readable(self, positions: Mapping[int, int]) -> Collection[int]:
        return [
            self.number_of(part.id, partition)
            for part, places in self._positions(positions)
            for partition in part.readable(places)
        ]

    def look_again_s(self, positions: Mapping[int, int]) -> float | None:
        pauses = [part.look_again_s(places) for part, places in self._positions(positions) if places]
        return min((pause for pause in pauses if pause is not None), default=None)

    def subscribe(self, partitions: Iterable[int], callback: Callback) -> Subscription:
        chosen = self._split(partitions)
        subscriptions: list[Subscription] = []

        def end() -> None:
            for each in subscriptions:
                each.close()

        try:
            for part in self._parts:
                subscriptions.append(part.subscribe(tuple(chosen.get(part.id, ())), callback))
        except BaseException:
            end()
            raise
        return Subscription(end)

    def ends(self) -> list[int]:
        return [end for part in self._parts for end in part.ends()]

    def extents(self) -> list[tuple[int, int]]:
        return [extent for part in self._parts for extent in part.extents()]

    def ends_problem(self) -> str | None:
        problems = [f"{part.name}: {problem}" for part in self._parts if (problem := part.ends_problem()) is not None]
        return "; ".join(problems) or None

    # Calls for one partition: passed on to its part.

    def read(self, partition: int, offset: int, max_bytes: int = READ_BYTES_DEFAULT) -> list[Batch]:
        part, number = self.place(partition)
        return part.read(number, offset, max_bytes)

    def is_ended(self, partition: int, offset: int) -> bool:
        part, number = self.place(partition)
        return part.is_ended(number, offset)

    def start(self, partition: int) -> int:
        part, number = self.place(partition)
        return part.start(number)

    def end(self, partition: int) -> int:
        part, number = self.place(partition)
        return part.end(number)

    def was_given_out(self, partition: int, offset: int) -> bool:
        part, number = self.place(partition)
        return part.was_given_out(number, offset)

    def offset_at(self, partition: int, timestamp: int) -> int:
        part, number = self.place(partition)
        return part.offset_at(number, timestamp)
