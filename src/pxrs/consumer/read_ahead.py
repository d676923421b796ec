"""Batches that were read from the source and not handed out yet, for each lane.

The problem: a read of a table or of a log behind a network takes a while, during which the user's thread could handle
messages. But a consumer that waits must not cost a thread (W6), and what is read ahead must be bounded.

So reading happens in two places:
- `fetch`, on the thread that reads: waits for messages of lanes of which nothing is read ahead, and reads them. Nothing
  is read before somebody asks for messages.
- `_fill`, for a source with `has_latency` only, on a thread of its own that is started when less than half of a lane's
  share is left and the last read suggests that more follows, and that ends as soon as it has filled the lanes. It never
  waits for messages. A consumer that has reached the end of its partitions has no such thread. A local log is not read
  like that: decision 0031 has the figures.

While much of one lane is read ahead, neither of the two would read the others. So `look` lets the lanes be read, about
every LOOK_S, of which nothing is read ahead: by `fetch`, or by `_fill` if the source `has_latency`. A partition that is
always behind does not keep back those of a quiet topic.

Bounds: `prefetch_bytes` for all lanes together. Each lane's share is that bound divided by the number of lanes that are
owned. A read returns at least one batch, however large it is.

Invariants:
- What is read ahead of a lane follows its `position` without a hole. A `seek`, a rewind or a loss makes it useless:
  whoever changes `position` in another way than by a hand-out calls `discard`. `take` checks it again, because a `seek`
  may come between the two. `_fill` adds only to what was not discarded meanwhile.
- A lane is read by one thread at a time: `fetch` leaves out the lanes that `_fill` reads (`_Ahead.is_filling`), and
  `_fill` those that `fetch` reads (`_fetching`). `_fill` announces a change when it is through with them.
- An error of one partition is kept with its lane. `take` raises it on the thread that reads, when the lane is the next
  one to be read.

Threads: the thread that reads calls `look`, `take`, `fetch` and `put_back`. `discard` may come from any thread.
`Lanes.lock` guards all fields; it is not held during a read of the source.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import pyarrow as pa

from pxrs.consumer.changes import Changes
from pxrs.consumer.lanes import Lanes
from pxrs.errors import CheckpointOutOfRange, LogError, OffsetOutOfRange, OffsetTrimmed
from pxrs.group.lane import Lane
from pxrs.log.batch import NO_RECORDS, Batch
from pxrs.log.contract import Fetched, Source
from pxrs.waiting import Cancel

_logger = logging.getLogger(__name__)

FILL_SHARE_BYTES_MIN: Final = 256 << 10
"""Lanes with a smaller share are read by `fetch` alone: to start a thread costs more than to read so little."""
LOOK_S: Final = 0.1
"""About how often lanes are read of which nothing is read ahead, while something of others is."""
_NO_OFFSETS: Final = pa.nulls(0, pa.int64())  # `pa.array` would import pandas, if it is installed


class _Ahead:
    """What is read ahead of one lane."""

    __slots__ = ("batches", "bytes", "error", "is_filling", "is_full", "next_offset", "taken")

    def __init__(self, next_offset: int) -> None:
        self.batches: deque[tuple[Batch, int]] = deque()
        """Batches, and how many bytes each of them counts for."""
        self.bytes = 0
        self.taken: tuple[int, int] | None = None
        """Records of the batch that `take` has removed last, and how many bytes it counted for; None before that."""
        self.next_offset = next_offset
        """The offset behind the last batch, where the next read begins."""
        self.error: LogError | None = None
        """Why the partition cannot be read at `next_offset`."""
        self.is_full = False
        """The last read returned about as much as was asked for, so that more may follow."""
        self.is_filling = False
        """`_fill` reads this lane now."""

    def add(self, fetched: Fetched, share: int) -> None:
        before = self.bytes
        for batch in fetched.batches:
            size = int(batch.records.nbytes)
            self.batches.append((batch, size))
            self.bytes += size
            self.next_offset = batch.next_offset
        self.error = fetched.error
        # A quarter: sources count the bytes that they store, which may be more than those of the records.
        self.is_full = self.bytes - before >= share // 4


class ReadAhead:
    """What one consumer has read ahead."""

    def __init__(
        self,
        source: Source,
        group: str,
        lanes: Lanes,
        changes: Changes,
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
        self._source, self._group, self._lanes, self._changes = source, group, lanes, changes
        self._bytes_max, self._skips_trimmed, self._ends = bytes_max, skips_trimmed, ends
        self._ahead: dict[Lane, _Ahead] = {}
        self._ended: dict[Lane, int] = {}
        """Lanes whose source will never have a message at this offset or behind it."""
        self._is_filling = False
        """The thread of `_fill` runs."""
        self._fetching: Collection[int] = ()
        """The partitions that `fetch` is reading; empty between two calls."""
        self._looks_at = 0.0
        """The time, on `time.monotonic`, before which `look` does nothing. Set by each call that is not before it."""
        self._is_look_due = False
        """Whether `_fill` must also read the lanes of which nothing is read ahead. Set by `look`, cleared by
        `_fill`."""
        self.skipped = 0
        """How many messages retention removed before they were read; counted with on_trimmed="skip"."""

    # For the thread that reads.

    def take(self, lane: Lane) -> Batch | None:
        """The batch at the lane's position, from that position on, if it was read ahead; otherwise None. A batch
        without records is a gap: the source has no messages there, or retention has removed them and
        on_trimmed="skip" accepts that. Raises CheckpointOutOfRange, and what the source raises."""
        error: LogError | None = None
        with self._lanes.lock:
            ahead = self._ahead.get(lane)
            if ahead is None:
                return None
            if not ahead.batches:
                if ahead.is_filling:
                    return None
                error = ahead.error
                del self._ahead[lane]
                batch = None
            else:
                batch, size = ahead.batches.popleft()
                ahead.bytes -= size
                ahead.taken = batch.records.num_rows, size
            if batch is not None or error is not None:
                self._lanes.served(lane)
            position = lane.position
            if batch is not None and not batch.base_offset <= position < batch.next_offset:  # read before a `seek`
                self.discard(lane)
                return None
            is_wanted = batch is not None and self._wants_more(lane, ahead)
            is_first = is_wanted and not self._is_filling
            self._is_filling |= is_wanted
        if error is not None:
            return self._gap_of(lane, ahead.next_offset, error)
        if is_first:
            self._start_filling()
        if batch is None:
            return None
        return batch.within(position, self._ends[lane.partition] if self._ends is not None else None)

    def look(self, lanes: Sequence[Lane]) -> None:
        """Read the lanes of which nothing is read ahead, if other lanes have something and LOOK_S have passed since the
        last time. Without this call, they would be read only after everything that is read ahead was handed out. Never
        waits for messages.

        lanes: those that may be handed out, as for `fetch`. Raises what the source raises."""
        now = time.monotonic()
        if now < self._looks_at:
            return
        self._looks_at = now + LOOK_S
        with self._lanes.lock:
            idle = [lane for lane in lanes if lane not in self._ahead]
            # If no lane has anything, the caller calls `fetch` next. If `prefetch_bytes` are used up, a later call
            # reads.
            if len(idle) in (0, len(lanes)) or self._left() <= 0:
                return
            has_latency = self._source.has_latency
            is_first = has_latency and not self._is_filling
            self._is_look_due |= has_latency
            self._is_filling |= is_first
        if not has_latency:
            self.fetch(idle, 0.0)
        elif is_first:
            self._start_filling()

    def fetch(self, lanes: Iterable[Lane], timeout: float | None, cancel: Cancel | None = None) -> None:
        """Wait until there are messages of one of these lanes, and read them ahead. Returns at once if some were read
        ahead meanwhile; otherwise when the time is up, or `cancel` is set.

        lanes: the first ones are read first, if not all of them fit."""
        with self._lanes.lock:
            share = self._share()
            wanted = {lane.partition: lane for lane in lanes if self._ended.get(lane) != lane.position}
            known = [self._ahead[lane] for lane in wanted.values() if lane in self._ahead]
            if any(ahead.batches or not ahead.is_filling for ahead in known):
                return  # `_fill` has finished since the last `take`
            positions = {number: lane.position for number, lane in wanted.items() if lane not in self._ahead}
            # Lanes that have nothing leave their shares to the others; what is read ahead in all stays bounded.
            max_bytes = max(1, min(share * len(positions), self._left()))
            self._fetching = positions.keys()
        found: Mapping[int, Fetched] = {}
        try:
            found = self._source.fetch(positions, max_bytes, timeout, cancel)
        finally:
            with self._lanes.lock:
                self._fetching = ()
                for number, fetched in found.items():
                    lane = wanted[number]
                    if not self._lanes.is_owned(lane) or lane in self._ahead or lane.position != positions[number]:
                        continue  # the lane was lost, or its position was changed by `seek`, during the read
                    if fetched.is_ended:
                        self._ended[lane] = lane.position
                        continue
                    self._ahead[lane] = ahead = _Ahead(positions[number])
                    ahead.add(fetched, share)

    def put_back(self, lane: Lane, batch: Batch) -> None:
        """Keep the batch that `take` has returned last, of which only the first messages were handed out."""
        with self._lanes.lock:
            if self._lanes.is_owned(lane):
                ahead = self._ahead.setdefault(lane, _Ahead(batch.next_offset))
                # Its share of what it counted for before: `nbytes` would take longer than all the rest of a `poll`.
                rows, size = ahead.taken or (batch.records.num_rows, int(batch.records.nbytes))
                size = size * batch.records.num_rows // max(1, rows)
                ahead.batches.appendleft((batch, size))
                ahead.bytes += size

    def check_reachable(self, lane: Lane) -> None:
        """Raise CheckpointOutOfRange if the source cannot have had the messages before the lane's position.

        For a topic, a position behind `end` proves it. For a table it does not: the last rows may have been handled and
        deleted since, or other processes may already know that newer rows are final. Only its `read` can tell."""
        position = lane.position
        if position <= self._source.bounds((lane.partition,))[lane.partition].end:
            return
        try:
            self._source.read(lane.partition, position, 1)
        except OffsetOutOfRange as error:
            raise self._beyond_end(lane, position, error.end) from error

    # For any thread.

    def discard(self, lane: Lane) -> None:
        """Forget what was read ahead of the lane. The caller holds `Lanes.lock`."""
        self._ahead.pop(lane, None)
        self._ended.pop(lane, None)

    def bytes_ahead(self) -> int:
        """How much is read ahead now."""
        with self._lanes.lock:
            return sum(ahead.bytes for ahead in self._ahead.values())

    # Filling in the background.

    def _start_filling(self) -> None:
        try:
            threading.Thread(target=self._fill, name=f"pxrs-read-ahead-{self._group}", daemon=True).start()
        except RuntimeError as error:  # the process has too many threads: `fetch` reads without this one
            _logger.debug("group %s: no thread for reading ahead could be started: %s", self._group, error)
            with self._lanes.lock:
                self._is_filling = False

    def _fill(self) -> None:
        """Read ahead until no lane wants more. On a thread of its own."""
        while True:
            with self._lanes.lock:
                share = self._share()
                idle = self._begin_look() if self._is_look_due else {}
                full = {lane: ahead for lane, ahead in self._ahead.items() if self._wants_more(lane, ahead)}
                filled = {**idle, **full}  # `idle` first: the source leaves out the last ones if they do not fit
                if not filled:
                    self._is_filling = False
                    return
                for ahead in filled.values():
                    ahead.is_filling = True
                positions = {lane.partition: ahead.next_offset for lane, ahead in filled.items()}
                max_bytes = max(1, min(share // 2 * len(positions), self._left()))
            found: Mapping[int, Fetched] = {}
            try:
                found = self._source.fetch(positions, max_bytes, 0.0)
            except Exception as error:  # the thread that reads gets it from its own `fetch`
                _logger.debug("group %s: reading ahead failed: %s", self._group, error, exc_info=error)
            with self._lanes.lock:
                for lane, ahead in filled.items():
                    ahead.is_filling = ahead.is_full = False
                    # A lane that was sought or lost meanwhile has another `_Ahead`, or none: this one is garbage.
                    if (fetched := found.get(lane.partition)) is not None and not fetched.is_ended:
                        ahead.add(fetched, share)
                    elif lane in idle and self._ahead.get(lane) is ahead:
                        del self._ahead[lane]
            self._changes.announce()

    def _begin_look(self) -> dict[Lane, _Ahead]:
        """The lanes of which nothing is read ahead, for `_fill` to read. Clears `_is_look_due`. The caller holds
        the lock."""
        self._is_look_due = False
        idle = {}
        for lane in self._lanes.all():
            is_at_end = self._ended.get(lane) == lane.position or (
                self._ends is not None and lane.position >= self._ends[lane.partition]
            )
            is_read = lane in self._ahead or lane.partition in self._fetching
            if self._lanes.may_be_read(lane) and not is_at_end and not is_read:
                idle[lane] = self._ahead[lane] = _Ahead(lane.position)
        return idle

    def _wants_more(self, lane: Lane, ahead: _Ahead) -> bool:
        """Whether `_fill` is to read more of the lane. The caller holds the lock."""
        if (
            not self._source.has_latency
            or not ahead.is_full
            or ahead.is_filling
            or ahead.error is not None
            or lane.is_stopping
        ):
            return False
        if self._ends is not None and ahead.next_offset >= self._ends[lane.partition]:
            return False
        share = self._share()
        return share >= FILL_SHARE_BYTES_MIN and ahead.bytes < share // 2

    def _share(self) -> int:
        """How many bytes may be read ahead of each lane. The caller holds the lock."""
        return max(1, self._bytes_max // max(1, len(self._lanes.all())))

    def _left(self) -> int:
        """How many bytes may still be read ahead in all. The caller holds the lock."""
        return self._bytes_max - sum(ahead.bytes for ahead in self._ahead.values())

    # Errors of one partition.

    def _gap_of(self, lane: Lane, position: int, error: LogError) -> Batch | None:
        """The messages at `position` that retention has removed, as a gap, if `on_trimmed` says so; otherwise raises.
        None if the lane is not at `position` any more, or is being released.

        A gap, and not `Lane.seek`: messages before it may be in hand, and must not be counted as done."""
        if isinstance(error, OffsetOutOfRange):
            raise self._beyond_end(lane, position, error.end) from error
        if not isinstance(error, OffsetTrimmed):
            raise error
        if not self._skips_trimmed:
            raise CheckpointOutOfRange(
                f"group {self._group} is at offset {position} of {self._place_of(lane)}, but retention has removed the "
                f"messages before {error.first_offset}; reset the group, or consume with on_trimmed='skip' to accept "
                "the loss"
            ) from error
        with self._lanes.lock:
            if lane.position != position or lane.is_stopping:
                return None
            self.skipped += error.first_offset - position
        return Batch(position, NO_RECORDS, _NO_OFFSETS, error.first_offset)

    def _place_of(self, lane: Lane) -> str:
        part, partition = self._source.place(lane.partition)
        return f"{part.name}/{partition}"

    def _beyond_end(self, lane: Lane, position: int, end: int) -> CheckpointOutOfRange:
        return CheckpointOutOfRange(
            f"group {self._group} is at offset {position} of {self._place_of(lane)}, which ends at {end}: check that "
            "this is the right log; if it is, reset the group"
        )
