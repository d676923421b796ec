"""Reading on the user's own thread: `for message in inbox`, `poll` and `batches`.

In each of them a message is done when the thread that has it asks for more, unless ack="manual". A loop that is left,
by `break`, by an exception or because its iterator is closed or dropped, leaves its last message undone. A loop that
ends because of `stop` has asked for more, so its last message is done.

A loop keeps its consumer alive (`consumer` below): a consumer that nobody refers to leaves its group.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from typing import NamedTuple

import pyarrow as pa

from pxrs.consumer.hand_out import HandOut
from pxrs.consumer.readers import Loop, Reading
from pxrs.consumer.states import Event
from pxrs.log.batch import Batch
from pxrs.model import Message


class ConsumedBatch(NamedTuple):
    """What `batches` yields: records of one partition, with consecutive offsets."""

    topic: str
    partition: int
    offset: int
    records: pa.RecordBatch
    epoch: int
    offsets: pa.Int64Array | None = None
    """The offset of each record, if the source has gaps; otherwise they follow `offset` one by one."""


def messages(hand_out: HandOut, consumer: object) -> Iterator[Message]:
    """Messages one by one.

    This is the loop that users measure: it does in line, for each message, what `HandOut.take_in_hand` and
    `Settling.finish` do."""
    settling, clock, lifetime = hand_out.settling, hand_out.clock.now, hand_out.lifetime
    expects_acks = settling.expects_acks
    reading = Reading("a loop over its messages", is_loop=True)
    try:
        lifetime.check_usable()
        settling.enter(reading)
        settling.begin(Event.LOOP)
        while True:
            settling.check_step(reading, False)
            found = hand_out.next()
            if found is None:
                break
            lane, batch = found
            lease = hand_out.member.lease
            if lease is None:
                continue
            hand_out.counts.received(lane, batch)
            position, seeks = batch.base_offset, lane.seeks
            handed = position
            try:
                for message in hand_out.messages_of(lane, batch):
                    if lane.position != position:
                        break  # `seek` was called
                    lane.handed_at = now = clock()
                    if expects_acks:
                        lane.expect((message[2],))
                    # Write `position`, then read `is_halted`: see `Lane`.
                    lane.position = position = message[2] + 1
                    if lane.is_halted or now >= lease.deadline or lane.seeks != seeks or lifetime.is_stopped:
                        settling.retract(lane, message[2])
                        break
                    lane.handed = handed = position
                    yield message
                    settling.committed_by = None
                    if settling.transaction is not None and settling.is_held(is_through=True):
                        continue
                    if not expects_acks and lane.position == position:
                        lane.done = position
                else:
                    settling.pass_gap(lane, position, batch)
            finally:  # also if the loop is left
                hand_out.counts.handed_out(lane, batch, handed)
            settling.wake_if_drained((lane,))
    finally:
        reading.is_over = True


def poll(hand_out: HandOut, max_messages: int, timeout: float | None) -> list[Message]:
    """Up to `max_messages` messages of one partition; none if the time is up, after `stop`, or at the end with
    until="end"."""
    settling = hand_out.settling
    reading = Reading("`poll`")
    try:
        hand_out.lifetime.check_usable()
        settling.enter(reading)
        settling.begin_poll()
        until = None if timeout is None else time.monotonic() + timeout
        while (found := hand_out.next(None if until is None else until - time.monotonic())) is not None:
            lane, batch = found
            taken = list(hand_out.messages_of(lane, _head(batch, max_messages)))
            end = batch.next_offset if len(taken) == batch.records.num_rows else taken[-1].offset + 1
            if not hand_out.take_in_hand(lane, batch.base_offset, end, batch):
                settling.wake_if_drained((lane,))
                continue
            head = batch
            if end < batch.next_offset:
                hand_out.read_ahead.put_back(lane, batch)
                head = _head(batch, len(taken))
            hand_out.counts.received(lane, head)
            hand_out.counts.handed_out(lane, batch, end)
            settling.note_polled(lane, reading.thread)
            return taken
        return []
    finally:
        reading.is_over = True


def _head(batch: Batch, rows: int) -> Batch:
    """The first records of the batch, so that only those that are handed out are converted to messages."""
    if batch.records.num_rows <= rows:
        return batch
    offsets = None if batch.offsets is None else batch.offsets.slice(0, rows)
    return Batch(batch.base_offset, batch.records.slice(0, rows), offsets)


def batches(hand_out: HandOut, consumer: object) -> Loop[ConsumedBatch]:
    """Record batches, each done when the next is asked for."""

    def begin(reading: Reading) -> Generator[ConsumedBatch, None, None]:
        return _batches(hand_out, consumer, reading)

    return Loop("a loop over its batches", begin, hand_out.settling.check_step)


def _batches(hand_out: HandOut, consumer: object, reading: Reading) -> Generator[ConsumedBatch, None, None]:
    settling = hand_out.settling
    try:
        hand_out.lifetime.check_usable()
        settling.enter(reading)
        settling.begin(Event.LOOP)
        while (found := hand_out.next()) is not None:
            lane, batch = found
            if hand_out.take_in_hand(lane, batch.base_offset, batch.next_offset, batch):
                topic, number = hand_out.names.place(lane.partition)
                hand_out.counts.received(lane, batch)
                hand_out.counts.handed_out(lane, batch, batch.next_offset)
                yield ConsumedBatch(topic, number, batch.base_offset, batch.records, lane.epoch, batch.offsets)
                settling.finish(lane)
            settling.wake_if_drained((lane,))
    finally:
        reading.is_over = True
