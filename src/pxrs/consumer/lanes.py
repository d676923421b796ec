"""The partitions that a consumer owns, and which of them is read next.

The member's thread adds and removes lanes; the thread that reads asks which of them it may hand out messages of.

Invariants:
- A lane whose `on_assigned` callback has not returned is owned (`position` and `committed` show it) but not readable.
- `readable` begins with another lane each time, so that a partition with many messages does not keep the others
  waiting.
- `Lanes.lock` guards the set of lanes, what is read ahead of them (`ReadAhead`), which offsets are done by a decision
  of several lanes together (`Settling`), and the open readings (`Readings`). It is held for a few steps only: never
  during a call of the source, the registry, the member or a callback.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from pxrs.consumer.partitions import Numbers, PartitionNames
from pxrs.errors import PartitionNotAssigned
from pxrs.group.lane import Lane
from pxrs.model import TopicPartition

AnyNames = PartitionNames[int] | PartitionNames[TopicPartition]


class Lanes:
    """The lanes of one consumer, by partition."""

    def __init__(self, group: str, names: AnyNames | None = None) -> None:
        """names: how errors name the partitions; by default by their numbers."""
        self._group = group
        self.names: AnyNames = Numbers("", 0) if names is None else names
        self.lock = threading.Lock()
        self._owned: dict[int, Lane] = {}
        self.get: Final[Callable[[int], Lane | None]] = self._owned.get
        """The lane of a partition, None if the partition is not owned: a method of the dict itself, because `ack` calls
        it for each message. The caller holds the lock."""
        self._arriving: set[Lane] = set()
        """Lanes whose `on_assigned` callback has not returned yet; nothing of them may be handed out."""
        self._in_order: list[Lane] | None = None
        """The owned lanes by partition number; None if that changed since they were sorted."""
        self._last = -1
        """The partition of the lane that was last served: `readable` begins behind it."""

    # Called for the member, mostly on its thread. These take the lock.

    def add(self, lanes: Iterable[Lane]) -> None:
        """Add the lanes of partitions that were claimed. They become readable by `arrived`."""
        with self.lock:
            self._in_order = None
            for lane in lanes:
                self._owned[lane.partition] = lane
                self._arriving.add(lane)

    def hold_back(self, lane: Lane) -> None:
        """A lane that was to be released stays. It becomes readable again by `arrived`."""
        with self.lock:
            self._arriving.add(lane)

    def arrived(self, lanes: Iterable[Lane]) -> None:
        """The callback `on_assigned` has returned for these."""
        with self.lock:
            self._arriving.difference_update(lanes)

    def stop(self) -> None:
        """Hand out nothing more: the consumer is being closed."""
        with self.lock:
            for lane in self._owned.values():
                lane.is_stopping = True

    # For whoever reads. These take the lock.

    def owned(self) -> list[Lane]:
        """All lanes, by partition number; also those that are paused, or being released."""
        with self.lock:
            return sorted(self._owned.values(), key=lambda lane: lane.partition)

    def readable(self, ends: Mapping[int, int] | None = None) -> list[Lane]:
        """The lanes of which messages may be handed out, in the order of their partition numbers, starting after the
        lane that was last served (`served`). A read that is limited in bytes may leave out the last lanes of the list,
        so every lane must come first at some time.

        ends: with until="end", the offset at which each partition ends; lanes that have reached it are left out."""
        with self.lock:
            if self._in_order is None:
                self._in_order = sorted(self._owned.values(), key=_number)
            # `may_be_read` in line: this is called for each batch.
            last, arriving = self._last, self._arriving
            lanes = [lane for lane in self._in_order if not lane.is_halted and lane not in arriving]
        if ends is not None:
            lanes = [lane for lane in lanes if lane.position < ends[lane.partition]]
        first = bisect_right(lanes, last, key=_number)
        return lanes[first:] + lanes[:first]

    def set_paused(self, partitions: Iterable[int], is_paused: bool) -> None:
        """Pause or resume these partitions, or all if none is given. A partition that a failed message holds up stays
        paused. Raises PartitionNotAssigned if one is not owned; then nothing is changed."""
        chosen = set(partitions)
        with self.lock:
            self.check_assigned(chosen)
            for number in chosen or set(self._owned):
                if not self._owned[number].is_failed:
                    self._owned[number].is_paused = is_paused

    # The caller holds the lock, or asks for one partition only.

    def __getitem__(self, partition: int) -> Lane:
        return self._owned[partition]

    def all(self) -> list[Lane]:
        return list(self._owned.values())

    def is_owned(self, lane: Lane) -> bool:
        """Whether this very lane, and not a later one of the same partition, is owned."""
        return self._owned.get(lane.partition) is lane

    def remove(self, lane: Lane) -> None:
        """The partition was released or lost. If it was claimed again since, the newer lane stays."""
        if self.is_owned(lane):
            del self._owned[lane.partition]
            self._in_order = None

    def may_be_read(self, lane: Lane) -> bool:
        """Whether messages of the lane may be handed out now."""
        return not lane.is_halted and lane not in self._arriving

    def served(self, lane: Lane) -> None:
        """Called by the thread that reads when it gets messages of the lane, or an error of it. The next list of
        `readable` starts after this lane."""
        self._last = lane.partition

    def check_assigned(self, partitions: Iterable[int]) -> None:
        """Raise PartitionNotAssigned if one of the partitions is not owned."""
        missing = sorted(set(partitions) - self._owned.keys())
        if missing:
            named = self.names.named
            raise PartitionNotAssigned(self._group, named(missing), named(sorted(self._owned)))


def _number(lane: Lane) -> int:
    return lane.partition
