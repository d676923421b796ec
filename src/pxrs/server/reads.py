"""`DoGet`: batches of a topic, as messages of Flight.

The two kinds of tickets (docs/wire.md) are read differently. `positions` is one `fetch` of what is there. A range is
read in steps, one step ahead of what is being sent, and ends with an error if a part of it is not there: a reader that
was promised a range must never get other rows, or fewer. So the server holds two steps for a slow reader of a range,
and one message if other readers need the room.

The answer to `positions` is a list of `Outgoing`, which are views of the log's files. The server copies a batch into a
message only when the client has taken the message before it, so it holds one message for a slow reader (W5).

Messages that clients have not taken yet are counted in `Room.budget`, before they are made. Its size is
`read_held_bytes_max`. When it is used up, the server gives up what it has read ahead for clients that pause
(`ReadStream.shrink`), and reads it again later. It ends the streams whose clients have taken nothing for
`read_stalled_s`. So neither can keep others from reading.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import pyarrow as pa

from pxrs.errors import Closed, InvalidArgument, OffsetOutOfRange, OffsetTrimmed, PxrsError, ServerBusy
from pxrs.log.batch import FRAME_BYTES_MAX, Batch, encode
from pxrs.log.contract import TopicLog
from pxrs.remote import flight, wire
from pxrs.server.budget import Budget
from pxrs.server.given import Given
from pxrs.server.pools import Pools, run
from pxrs.server.served import Send, Served
from pxrs.server.settings import ServerLimits

SCHEMA_MESSAGE: Final = flight.flight_data(flight.FlightData(header=flight.SCHEMA_HEADER))
"""The first message of every stream of batches."""
STEP_BYTES: Final = 1 << 20
"""About how many bytes of a range are read at a time, but at least one batch."""
STEP_ROOM: Final = 2 * STEP_BYTES
"""How many bytes of room are taken for a step before its size is known. More is taken before a larger step is encoded.
"""
SMALL_BYTES: Final = 256 << 10
"""Batches below this length are encoded on the event loop: to hand one to a thread takes longer."""
PAUSED_S: Final = 0.1
"""A client that takes nothing for so long pauses. If others need room, what was read ahead for it is given up."""
WAITS_MAX: Final = 3
"""A stream waits this many times `read_stalled_s` for room, and then ends with ServerBusy."""


class Room:
    """What all readers hold, and who has held it for how long. Belongs to the event loop."""

    def __init__(self, limits: ServerLimits) -> None:
        self._stalled_s = limits.read_stalled_s
        self._paused_s = min(PAUSED_S, limits.read_stalled_s)
        self.budget = Budget(limits.read_held_bytes_max, "batches that other clients have not read yet")
        self._sending: dict[ReadStream, float] = {}
        """The streams that are sending, and since when: the one that has waited longest first."""
        self._relieved_at = 0.0
        """When `_relieve` was called last."""

    async def send(self, stream: ReadStream, message: bytes, send: Send) -> None:
        """Send a message. Meanwhile the stream may be shrunk or ended."""
        self._sending[stream] = time.monotonic()
        try:
            await send(message)
        finally:
            del self._sending[stream]

    async def take(self, size: int) -> int:
        """Raises ServerBusy if there is no room for a long time although nobody is stalled."""
        if self.budget.has_room(size):
            return await self.budget.take(size)
        waiting = asyncio.ensure_future(self.budget.take(size, WAITS_MAX * self._stalled_s))
        try:
            while not waiting.done():
                self._relieve()
                await asyncio.wait((waiting,), timeout=self._paused_s)
        except asyncio.CancelledError:
            waiting.cancel()
            waiting.add_done_callback(self._drop)
            raise
        return waiting.result()

    def _drop(self, waiting: asyncio.Future[int]) -> None:
        """A callback: nobody needs the room that was taken."""
        if not waiting.cancelled() and waiting.exception() is None:
            self.budget.give_back(waiting.result())

    def _relieve(self) -> None:
        """Make room: streams whose clients pause hold only the message that is being sent, and those whose clients have
        taken nothing for `read_stalled_s` end. Does nothing if it was called a moment ago."""
        now = time.monotonic()
        if now < self._relieved_at + self._paused_s / 2:
            return
        self._relieved_at = now
        for stream, since in list(self._sending.items()):
            if since > now - self._paused_s:
                break
            stream.shrink()
            if since <= now - self._stalled_s:
                stream.end(
                    ServerBusy(
                        f"the client has read nothing for {self._stalled_s:g} s, and other clients need the memory"
                    )
                )


class Outgoing(NamedTuple):
    """A batch that is to be sent."""

    about: bytes
    """Its `app_metadata`."""
    size: int
    """About how many bytes its message will have."""
    data: pa.Buffer | None
    """The batch as one Arrow IPC message; None if it has yet to be encoded."""
    records: pa.RecordBatch | None
    """What is to be encoded. None if there is nothing to encode: `data` is given, or the batch is a gap."""
    next_offset: int = 0
    """The offset behind the batch."""

    @classmethod
    def of(cls, batch: Batch, partition: int) -> Outgoing:
        """If the stored bytes are known, the records are dropped: those of a compressed batch may be large."""
        about: dict[str, Any] = {"partition": partition, "offset": batch.base_offset}
        records, data = batch.records, batch.encoded
        if batch.next_offset != batch.base_offset + records.num_rows:
            about["next"] = batch.next_offset
        if data is None and records.num_rows:
            if (size := records.nbytes) <= FRAME_BYTES_MAX:
                return cls(wire.dumps(about), size, None, records, batch.next_offset)
            # A part of a compressed batch. Without compression it would be too long for a message.
            data = encode(records, "zstd").data
        return cls(wire.dumps(about), 0 if data is None else data.size, data, None, batch.next_offset)

    def message(self) -> bytes:
        """A gap has metadata alone."""
        data = self.data if self.records is None else self.records.serialize()
        header, body = (b"", b"") if data is None else flight.ipc_message(data)
        return flight.flight_data(flight.FlightData(header, body, self.about))


class ReadStream:
    """Answers one ticket, on the event loop."""

    def __init__(self, served: Served, pools: Pools, limits: ServerLimits, room: Room) -> None:
        self._served, self._pools, self._limits, self._room = served, pools, limits, room
        self._task: asyncio.Task[None] | None = None
        self._why: PxrsError | None = None
        """Why the server ends the stream."""
        self._held: _Held | None = None
        """What the stream holds if it sends a range."""

    may_end = False
    """A read that is under way is finished if there is time."""

    def leave(self) -> None:
        """A read ends by itself."""

    def finish(self) -> None:
        """End the stream: the server stops."""
        self.end(Closed("the server is stopping: connect again"))

    def end(self, why: PxrsError) -> None:
        """End the stream with this error."""
        if self._why is None and self._task is not None:
            self._why = why
            self._task.cancel()

    async def serve(self, given: Given, send: Send) -> None:
        """Send the messages that answer one ticket. Raises PxrsError."""
        self._task = asyncio.current_task()
        try:
            await self._answer(given, send)
        except asyncio.CancelledError:
            if self._why is None or self._task is None:
                raise
            self._task.uncancel()
            raise self._why from None

    async def _answer(self, given: Given, send: Send) -> None:
        if "positions" in given.found:
            await self._send_fetched(given, send)
        else:
            await self._send_range(_Range(self._served, given), send)

    async def _send_fetched(self, given: Given, send: Send) -> None:
        fetched = await run(self._pools.data, functools.partial(_fetch, self._served, self._limits, given))
        await self._send_schema(given, send)
        for each in fetched:
            await self._send_one(each, send)

    async def _send_range(self, asked: _Range, send: Send) -> None:
        held = self._held = _Held(self._room.budget)
        held.add(await self._step(asked.read, asked.start))
        try:
            await self._send_schema(asked.given, send)
            while True:
                if held.next_offset < asked.end and self._room.budget.has_room(STEP_ROOM):
                    held.ahead = asyncio.ensure_future(self._step(asked.read, held.next_offset))
                while held.messages:
                    await self._room.send(self, held.pop(), send)
                held.give_back()
                if held.next_offset >= asked.end:
                    return
                step = await (held.ahead or self._step(asked.read, held.next_offset))
                held.ahead = None
                held.add(step)
        finally:
            held.shrink()
            held.give_back()

    def shrink(self) -> None:
        """Give up what was read ahead of the message that is being sent. It will be read again."""
        if self._held is not None:
            self._held.shrink()

    @staticmethod
    async def _send_schema(given: Given, send: Send) -> None:
        """A client that knows the schema may ask to be spared the message."""
        if given.found.get("schema") is not False:
            await send(SCHEMA_MESSAGE)

    async def _step(self, read: Callable[[int], _Step], start: int) -> _Step:
        """The next messages of a range. They hold room until they are sent."""
        budget = self._room.budget
        taken = await self._room.take(STEP_ROOM)
        try:
            step = await run(self._pools.data, functools.partial(read, start))
            if step.unencoded:
                budget.give_back(taken)
                taken = 0  # if the next line raises an error, there is nothing more to give back
                taken = await self._room.take(sum(each.size for each in step.unencoded))
                step = await run(self._pools.data, step.encoded)
        except BaseException:
            budget.give_back(taken)
            raise
        held = sum(len(message) for message, _ in step.messages)
        return step._replace(taken=budget.exchange(taken, min(taken, held)))

    async def _send_one(self, outgoing: Outgoing, send: Send) -> None:
        taken = await self._room.take(outgoing.size)
        try:
            is_small = outgoing.size < SMALL_BYTES
            message = outgoing.message() if is_small else await run(self._pools.data, outgoing.message)
            await self._room.send(self, message, send)
        finally:
            self._room.budget.give_back(taken)


def _fetch(served: Served, limits: ServerLimits, given: Given) -> list[Outgoing]:
    topic = served.permitted_topic(given)
    asked = given.whole_or_none("max_bytes")
    most = limits.read_bytes_max if asked is None else min(max(1, asked), limits.read_bytes_max)
    found: list[Outgoing] = []
    for partition, fetched in topic.fetch(given.pairs("positions") or {}, most, timeout=0).items():
        found += [Outgoing.of(batch, partition) for batch in fetched.batches]
        if fetched.error is not None:
            about = {"partition": partition, "error": wire.error_to_dict(fetched.error)}
            found.append(Outgoing(wire.dumps(about), 0, None, None))
    return found


class _Step(NamedTuple):
    """A part of a range."""

    messages: list[tuple[bytes, int]]
    """Each with the offset behind it."""
    next_offset: int
    """Where the next step begins."""
    unencoded: list[Outgoing]
    """The batches of a step that needs more than STEP_ROOM, which has no messages yet. Empty otherwise."""
    taken: int = 0
    """How many bytes of the room the messages hold."""

    def encoded(self) -> _Step:
        return _Step([(each.message(), each.next_offset) for each in self.unencoded], self.next_offset, [])


class _Held:
    """What the stream of a range holds: the messages of one step that have yet to be sent, and the step after it."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.messages: deque[tuple[bytes, int]] = deque()
        """As in `_Step`."""
        self.next_offset = 0
        """Where the step after these messages begins."""
        self.ahead: asyncio.Future[_Step] | None = None
        """That step, which is read while these messages are sent."""
        self._sending = b"", 0
        """The message that was taken out last, and the offset behind it."""
        self._taken = 0
        """How many bytes of the room the messages hold, with the one that is being sent."""

    def add(self, step: _Step) -> None:
        """The step holds its room already."""
        self.messages.extend(step.messages)
        self.next_offset, self._taken = step.next_offset, step.taken

    def pop(self) -> bytes:
        """Take out the next message, which is to be sent now."""
        self._sending = self.messages.popleft()
        return self._sending[0]

    def give_back(self) -> None:
        """Nothing is held any more but what is read ahead."""
        self._budget.give_back(self._taken)
        self._sending, self._taken = (b"", 0), 0

    def shrink(self) -> None:
        """Keep nothing but the message that is being sent."""
        message, following = self._sending
        if self.messages:
            self.messages.clear()
            self.next_offset = following
        self._taken = self._budget.exchange(self._taken, min(self._taken, len(message)))
        if self.ahead is not None:
            self.ahead.cancel()
            self.ahead.add_done_callback(self._drop)
            self.ahead = None

    def _drop(self, ahead: asyncio.Future[_Step]) -> None:
        """A callback: what was read ahead is not sent."""
        if not ahead.cancelled() and ahead.exception() is None:
            self._budget.give_back(ahead.result().taken)


class _Range:
    """A range that a client has asked for. It is of the topic that is found first, also if another one gets its name
    while the range is read."""

    def __init__(self, served: Served, given: Given) -> None:
        """Raises InvalidArgument."""
        self._served, self.given = served, given
        self._partition, self.start, self.end = given.whole("partition"), given.whole("start"), given.whole("end")
        if not 0 <= self.start <= self.end:
            raise InvalidArgument(
                f"DoGet: start is {self.start} and end is {self.end}: they must satisfy 0 <= start <= end"
            )
        self._topic: TopicLog | None = None

    def read(self, start: int) -> _Step:
        """Read the batches from this offset on, and encode them unless they need more than STEP_ROOM. Runs on a thread
        of the pool. The first call has returned when the next one begins."""
        if self._topic is None:
            self._topic = self._served.permitted_topic(self.given)
        else:
            self._served.check(self.given.call, self.given.found)  # the token may have been revoked since the last step
        topic, partition = self._topic, self._partition
        if start >= self.end:
            topic.bounds((partition,))  # raises an error if there is no such partition
            return _Step([], start, [])
        batches = topic.read(partition, start, STEP_BYTES)
        if not batches:
            raise OffsetOutOfRange(f"{topic.name}/{partition}", self.end, start)
        if batches[0].base_offset != start:
            raise OffsetTrimmed(f"{topic.name}/{partition}", start, batches[0].base_offset)
        chosen = [batch.within(start, self.end) for batch in batches if batch.base_offset < self.end]
        step = _Step([], chosen[-1].next_offset, [Outgoing.of(batch, partition) for batch in chosen])
        return step.encoded() if sum(each.size for each in step.unencoded) <= STEP_ROOM else step
