"""Finding the next messages and taking them in hand: what every way of reading is made of.

`loops` (loops, `poll`, `batches`), `runner` (`run`) and `transactions` do the same three things: find a lane with
messages (`next`, or `next_for` for several lanes at once), take some of them in hand (`take_in_hand`), and count them
as done in their own way (`settling`).

Invariants:
- Nothing is handed out past the lease's deadline (G8), which is checked before every message: a process that was
  stopped for a minute wakes up in the middle of a batch, and others may own the partition by then.
- Nothing is handed out of a lane that is halted: `take_in_hand` writes `position`, then reads `is_halted` (see `Lane`).
- After `stop`, `next` returns None, and `Loops.messages` hands out no further message of the batch that it has.
- With until="end", `next` otherwise returns None only if every partition is read up to its end here, or is another
  member's.

Threads: `next` and `next_for` are for the thread that reads. `take_in_hand` is for the thread that has the lane: that
thread, or the handler's thread in `run`. No lock is held while the source is read or waited for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from pxrs.clock import Clock
from pxrs.consumer.changes import Changes
from pxrs.consumer.counts import ConsumerCounts
from pxrs.consumer.lanes import AnyNames, Lanes
from pxrs.consumer.lifetime import Lifetime
from pxrs.consumer.read_ahead import ReadAhead
from pxrs.consumer.settling import Settling
from pxrs.errors import PartitionsPaused, ReadFailed
from pxrs.group.lane import Lane
from pxrs.group.member import GroupMember
from pxrs.log.batch import Batch
from pxrs.log.contract import Source
from pxrs.log.messages import messages_of
from pxrs.model import Message
from pxrs.waiting import Cancel
from pxrs.wording import paused_advice

_logger = logging.getLogger(__name__)


class HandOut:
    """The parts of one consumer that the ways of reading share."""

    def __init__(
        self,
        source: Source,
        names: AnyNames,
        member: GroupMember,
        clock: Clock,
        lifetime: Lifetime,
        *,
        is_manual: bool,
        prefetch_bytes: int,
        skips_trimmed: bool,
        ends: Mapping[int, int] | None,
        place: Sequence[str] = (),
    ) -> None:
        """The keyword arguments are those of `Settling` and `ReadAhead`.

        place: the options that name the hub on the command line, for messages.
        ends: with until="end", the offset at which each partition ends; otherwise None."""
        self.source, self.member, self.clock, self.lifetime = source, member, clock, lifetime
        self.group, self.names, self.place = member.keys.group, names, place
        self.lanes, self.changes = Lanes(self.group, names), Changes()
        self.read_ahead = ReadAhead(
            source,
            self.group,
            self.lanes,
            self.changes,
            bytes_max=prefetch_bytes,
            skips_trimmed=skips_trimmed,
            ends=ends,
        )
        self.settling = Settling(self.group, self.lanes, self.read_ahead, member, is_manual=is_manual)
        self.counts = ConsumerCounts(self.group, names.place)
        self._ends = ends

    def messages_of(self, lane: Lane, batch: Batch) -> Iterator[Message]:
        """The messages of a batch of this lane, made as they are asked for."""
        return messages_of(batch, *self.names.place(lane.partition), lane.epoch)

    def next(self, timeout: float | None = None) -> tuple[Lane, Batch] | None:
        """A lane, and messages from its position on. None when the time is up, after `stop`, or when all is read with
        until="end"."""
        began = time.monotonic()
        try:
            return self._next(timeout)
        finally:
            self.counts.poll.observe(time.monotonic() - began)

    def _next(self, timeout: float | None) -> tuple[Lane, Batch] | None:
        self.settling.begin_hand_out()
        until = None if timeout is None else time.monotonic() + timeout
        has_fetched = False
        while True:
            change = self.changes.next_change  # before anything is looked at, also whether the consumer is closed
            if self.lifetime.is_stopped:  # before `_check`: what another thread closes after `stop` ends normally
                return None
            self._check()
            if self.member.is_away:
                self.member.come_back()
            lanes = self.readable()
            self.read_ahead.look(lanes)
            for lane in lanes:
                batch = self._take(lane)
                if batch is not None:
                    return lane, batch
            if self._is_at_end():
                return None
            left = None if until is None else max(0.0, until - time.monotonic())
            if left == 0.0 and has_fetched:
                return None
            self._fetch(lanes, left, change)
            has_fetched = True

    def next_for(self, busy: Collection[Lane], count: int, change: Cancel) -> list[tuple[Lane, Batch]] | None:
        """Up to `count` lanes that are not busy, with their messages; none after a wait. None at the end with
        until="end".

        change: `changes.next_change` as it was before `busy` was read. If a lane has ceased to be busy since then,
                `change` is set, so that this call does not wait for something else to happen."""
        self._check()
        if self.member.is_away and not any(lane.is_lost for lane in busy):
            self.member.come_back()
        # Compare the numbers: a partition that was lost and claimed again waits for the handler that has a message of
        # the old lane.
        numbers = {lane.partition for lane in busy}
        lanes = [lane for lane in self.readable() if lane.partition not in numbers] if count > 0 else []
        self.read_ahead.look(lanes)
        found: list[tuple[Lane, Batch]] = []
        for lane in lanes:
            batch = self._take(lane) if len(found) < count else None
            if batch is not None:
                found.append((lane, batch))
        if found:
            return found
        if not busy and self._is_at_end():
            return None
        began = time.monotonic()
        try:
            self._fetch(lanes, None, change)
        finally:
            self.counts.poll.observe(time.monotonic() - began)
        return []

    def _fetch(self, lanes: Iterable[Lane], timeout: float | None, change: Cancel) -> None:
        """Wait for messages. Raises what the source raises; but after `stop`, which has no use for messages, the
        failure of a read is logged, so that a loop whose server does not answer ends normally."""
        try:
            self.read_ahead.fetch(lanes, timeout, change)
        except ReadFailed as error:
            if not self.lifetime.is_stopped:
                raise
            _logger.warning("group %s: a read failed after `stop`: %s", self.group, error, extra={"group": self.group})

    def readable(self) -> list[Lane]:
        """The lanes of which messages may be handed out now; none past the lease's deadline."""
        if self.clock.now() >= self.member.deadline:
            return []
        return self.lanes.readable(self._ends)

    def take_in_hand(self, lane: Lane, offset: int, end: int, batch: Batch | None = None) -> bool:
        """Take the messages from `offset` to `end` in hand; False if the lane must not be handed out, or was sought.

        `Loops.messages` does the same in line, for each message.

        batch: with ack="manual", the batch that holds them, whose offsets will be acknowledged one by one."""
        seeks = lane.seeks
        if lane.position != offset:
            return False
        if batch is not None and self.settling.expects_acks:
            lane.expect(number for number in _offsets(batch) if number < end)
        lane.handed_at = now = self.clock.now()
        # Write `position`, then read `is_halted`: see `Lane`.
        lane.position = end
        if lane.is_halted or now >= self.member.deadline or lane.seeks != seeks:
            self.settling.retract(lane, offset)
            return False
        lane.handed = end
        return True

    def _check(self) -> None:
        self.lifetime.check_usable()
        self.member.check()

    def _take(self, lane: Lane) -> Batch | None:
        """Messages from the lane's position on, if there are any now."""
        batch = self.read_ahead.take(lane)
        if batch is None or batch.records.num_rows:
            return batch
        self.settling.pass_gap(lane, batch.base_offset, batch)
        return None

    def _is_at_end(self) -> bool:
        """With until="end": whether all is read. Raises PartitionsPaused if only partitions that a failed message holds
        up are left."""
        if self._ends is None:
            return False
        owned = {lane.partition: lane for lane in self.lanes.owned()}
        for partition, lane in owned.items():  # `readable` leaves these out, so that no read has checked them
            if lane.position > self._ends[partition]:
                self.read_ahead.check_reachable(lane)
        short = [lane for number, lane in owned.items() if not lane.is_lost and lane.position < self._ends[number]]
        if not all(lane.is_failed for lane in short):
            return False
        others = [number for number in range(self.source.partitions) if number not in owned]
        if not self.member.session.are_meant_for_others(others):
            return False
        if short:
            paused = sorted(lane.partition for lane in short)
            advice = paused_advice(self.group, [self.names.place(number) for number in paused], self.place)
            raise PartitionsPaused(self.group, self.names.named(paused), advice)
        return True


def _offsets(batch: Batch) -> Iterable[int]:
    if batch.offsets is not None:
        return batch.offsets.to_pylist()  # type: ignore[no-any-return]
    return range(batch.base_offset, batch.next_offset)
