"""Batches that were read from the source and not handed out yet, for each lane.

Reading ahead is bounded by `prefetch_bytes` for all partitions together: each lane's share is that bound divided by the
number of lanes that are owned. A read returns at least one batch, however large it is.

What is read ahead of a lane lies at its `position` and behind it. A `seek`, a rewind or a loss makes it useless:
whoever changes `position` in another way than by a hand-out calls `discard`. `take` checks it again, because a `seek`
may come between the two.

Threads: the thread that reads calls `take` and `put_back`. `discard` may come from any thread. `Lanes.lock` guards the
batches; it is not held during a read of the source.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from pxrs.consumer.lanes import Lanes
from pxrs.errors import CheckpointOutOfRange, OffsetOutOfRange, OffsetTrimmed
from pxrs.group.lane import Lane
from pxrs.log.batch import Batch
from pxrs.log.contract import Source


class ReadAhead:
    """What one consumer has read ahead."""

    def __init__(
        self,
        source: Source,
        group: str,
        lanes: Lanes,
        *,
        bytes_max: int,
        skips_trimmed: bool,
        ends: Mapping[int, int] | None,
    ) -> None:
        """
        bytes_max:     how much is read ahead, for all partitions together.
        skips_trimmed: on_trimmed="skip".
        ends:          with until="end", the offset at which each partition ends; nothing behind it is handed out.
        """
        self._source, self._group, self._lanes = source, group, lanes
        self._bytes_max, self._skips_trimmed, self._ends = bytes_max, skips_trimmed, ends
        self._batches: dict[Lane, deque[Batch]] = {}
        self.skipped = 0
        """How many messages retention removed before they were read; counted with on_trimmed="skip"."""

    def take(self, lane: Lane) -> Batch | None:
        """The batch at the lane's position, from that position on; None if there is none now. A batch without records
        is a gap of the source. Raises CheckpointOutOfRange, and what the source raises."""
        batch = self._pop(lane)
        if batch is None:
            batch = self._read(lane)
        if batch is None:
            return None
        position = lane.position
        if not batch.base_offset <= position < batch.next_offset:  # read before a `seek`
            with self._lanes.lock:
                self.discard(lane)
            return None
        return batch.within(position, self._ends[lane.partition] if self._ends is not None else None)

    def put_back(self, lane: Lane, batch: Batch) -> None:
        """Keep a batch of which only the first messages were handed out."""
        with self._lanes.lock:
            if self._lanes.is_owned(lane):
                self._batches.setdefault(lane, deque()).appendleft(batch)

    def discard(self, lane: Lane) -> None:
        """Forget what was read ahead of the lane. The caller holds `Lanes.lock`."""
        self._batches.pop(lane, None)

    def bytes_ahead(self) -> int:
        """How much is read ahead now."""
        with self._lanes.lock:
            return sum(batch.records.nbytes for batches in self._batches.values() for batch in batches)

    def check_reachable(self, lane: Lane) -> None:
        """Raise CheckpointOutOfRange if the source cannot have had the messages before the lane's position.

        For a topic, a position behind `end` proves it. For a table it does not: the last rows may have been handled and
        deleted since, or other processes may already know that newer rows are final. Only its `read` can tell."""
        position = lane.position
        if position <= self._source.end(lane.partition):
            return
        try:
            self._source.read(lane.partition, position, 1)
        except OffsetOutOfRange as error:
            raise self._beyond_end(lane, error.end) from error

    def _pop(self, lane: Lane) -> Batch | None:
        with self._lanes.lock:
            batches = self._batches.get(lane)
            return batches.popleft() if batches else None

    def _read(self, lane: Lane) -> Batch | None:
        """Read the lane's share from its position on; the first batch. The rest is kept."""
        with self._lanes.lock:
            share = max(1, self._bytes_max // max(1, len(self._lanes.all())))
        try:
            batches = self._source.read(lane.partition, lane.position, share)
        except OffsetTrimmed as error:
            self._pass_trimmed(lane, error)
            return None
        except OffsetOutOfRange as error:
            raise self._beyond_end(lane, error.end) from error
        if not batches:
            return None
        with self._lanes.lock:
            if self._lanes.is_owned(lane):
                self._batches[lane] = deque(batches[1:])
        return batches[0]

    def _pass_trimmed(self, lane: Lane, error: OffsetTrimmed) -> None:
        """Go on at the first message that is left, or raise CheckpointOutOfRange, as `on_trimmed` says."""
        if not self._skips_trimmed:
            raise CheckpointOutOfRange(
                f"group {self._group} is at offset {lane.position} of {self._source.name}/{lane.partition}, and "
                f"retention has removed what is before {error.first_offset}; reset the group, or consume with "
                "on_trimmed='skip' to accept the loss"
            ) from error
        self.skipped += error.first_offset - lane.position
        lane.seek(error.first_offset)

    def _beyond_end(self, lane: Lane, end: int) -> CheckpointOutOfRange:
        return CheckpointOutOfRange(
            f"group {self._group} is at offset {lane.position} of {self._source.name}/{lane.partition}, which ends at "
            f"{end}; is this the same log? Reset the group if it is"
        )
