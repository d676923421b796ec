"""`DoPut`: batches into a topic. Each append is answered when it is durable (W1).

An append is the batches of a stream up to the first one without `more`. While the server stores an append, it receives
and decodes the next one, if there is room; it stores that one only when it has answered the first. What else the client
sends waits in gRPC's buffers. The bytes of all appends that are received and not stored yet are bounded by
`append_bytes_max`: a stream waits until the appends of others are stored, and gRPC's flow control slows its client
down. The rest of an append must come within `append_rest_s` of its beginning, because other streams may wait for the
room that the beginning takes.

A stream that ends with an error of pxrs has stored nothing of the appends that it has not answered. Clients rely on it.
So a stream whose client does not take an answer ends without such an error (`Stalled`).

Nothing that a client sends is trusted (a frame that cannot be decoded would stop every reader at its offset): each
batch is decoded and fully validated before it is stored. Its bytes are stored as they came.
"""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa

from pxrs.errors import Closed, InvalidRecord, PxrsError, ServerBusy
from pxrs.log.batch import ANONYMOUS, SCHEMA, Origin, received_payload
from pxrs.log.contract import Append, TopicLog
from pxrs.log.outcomes import MaybeStored, Outcome, StoredAt
from pxrs.remote import flight, wire
from pxrs.server.budget import Budget
from pxrs.server.given import Given
from pxrs.server.layout import Layout, read_layout
from pxrs.server.pools import Pools, run
from pxrs.server.served import Send, Served, Stalled
from pxrs.server.settings import ServerLimits

T = TypeVar("T")
ABOUT_BYTES_MAX: Final = 4096
"""How long the JSON that comes with a batch may be."""
SCHEMA_BYTES_MAX: Final = 64 << 10
"""How long the schema at the beginning of a stream may be, which is decoded on the event loop. The log's has 1 kB."""
SMALL_BYTES: Final = 64 << 10
"""Appends below this size are decoded on the event loop."""
_EPOCH_MAX: Final = (1 << 32) - 1
_SEQUENCE_MAX: Final = (1 << 63) - 1
_INVALID: Final = (pa.ArrowException, OSError, EOFError, ValueError, TypeError, OverflowError)
"""What pyarrow raises for bytes that are no Arrow data."""


class Received(NamedTuple):
    """A batch as it came. `append` checks it."""

    about: Given
    """What came with it as `app_metadata`."""
    message: flight.FlightData
    layout: Layout

    @property
    def has_more(self) -> bool:
        return self.about.flag("more")

    def append(self) -> Append:
        """Decode and check the batch. Raises InvalidRecord, InvalidArgument."""
        since = self.about.whole_or_none("since")
        if since is not None and since < 0:
            raise InvalidRecord("since is negative; it must be an offset")
        payload = received_payload(flight.encapsulated(self.message.header, self.message.body), self.layout.codec)
        return Append(self.about.whole("partition"), payload, _origin(self.about), since)


def receive(message: bytes, decoded_bytes_max: int) -> Received:
    """Read what costs little. Raises InvalidRecord, also if it would take too much memory to decode the batch."""
    data = flight.read_flight_data(message)
    if len(data.app_metadata) > ABOUT_BYTES_MAX:
        raise InvalidRecord(f"the app_metadata of a batch is longer than {ABOUT_BYTES_MAX:,} bytes")
    try:
        about = Given("an append", wire.loads(data.app_metadata))
    except (ValueError, RecursionError) as error:
        raise InvalidRecord(f"the app_metadata of a batch is not a JSON object: {str(error)[:200]}") from error
    layout = read_layout(data.header, data.body)
    if layout.decoded_bytes > decoded_bytes_max:
        raise InvalidRecord(
            f"the batch has {layout.decoded_bytes:,} bytes when decompressed; the maximum is {decoded_bytes_max:,}"
        )
    return Received(about, data, layout)


def _origin(given: Given) -> Origin:
    producer = given.text_or_none("producer")
    if producer is None:
        return ANONYMOUS
    epoch, sequence = given.whole_or_none("epoch") or 0, given.whole("sequence")
    try:
        identity = uuid.UUID(hex=producer)
    except ValueError as error:
        raise InvalidRecord("producer is not 32 hexadecimal digits") from error
    if not 0 <= epoch <= _EPOCH_MAX or not 0 <= sequence <= _SEQUENCE_MAX:
        raise InvalidRecord("epoch or sequence is out of range")
    return Origin(identity, epoch, sequence)


def encode_outcomes(outcomes: Sequence[Outcome]) -> bytes:
    """The `PutResult` of one append: the outcome of each of its batches."""
    return flight.result(wire.dumps({"outcomes": [_outcome_to_dict(each) for each in outcomes]}))


def _outcome_to_dict(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, StoredAt):
        return {"offset": outcome.offset, **({"duplicate": True} if outcome.is_duplicate else {})}
    return {"error": wire.any_error_to_dict(outcome.error), "maybe": isinstance(outcome, MaybeStored)}


@dataclass(slots=True)
class _Group:
    """The batches of one append, as they come."""

    batches: list[Received] = field(default_factory=list)
    taken: int = 0
    """How many bytes of the budget it holds."""
    decoded: int = 0
    """How many bytes its largest batch has once decompressed: the batches are decoded one after another."""
    appends: list[Append] = field(default_factory=list)
    """The batches, checked."""

    def decode(self) -> list[Append]:
        """Check the batches, and drop the messages in which they came. Raises InvalidRecord, InvalidArgument."""
        batches, self.batches = self.batches, []
        return [each.append() for each in batches]


class AppendStream:
    """Runs one stream, on the event loop."""

    def __init__(
        self,
        served: Served,
        pools: Pools,
        limits: ServerLimits,
        budget: Budget,
    ) -> None:
        self._served, self._pools, self._limits, self._budget = served, pools, limits, budget
        self._task: asyncio.Task[None] | None = None
        self._is_waiting = False
        """Whether the stream waits for a message of the client, and so may be ended."""
        self._why: PxrsError | None = None
        """Why the server ends the stream."""
        self._is_stored = asyncio.Event()
        """Set while no append of this stream is being stored."""
        self._is_stored.set()

    may_end = True
    """An append that is under way is answered before the stream ends."""

    def leave(self) -> None:
        """End the stream: the server stops."""
        self.end(Closed("the server is stopping: connect again; appends without an answer were not stored"))

    def finish(self) -> None:
        """`leave` ends the stream."""

    def end(self, why: PxrsError) -> None:
        """End the stream with this error, once the append that is under way is answered: an append must not be stored
        although the client is told that nothing was done."""
        if self._why is None:
            self._why = why
            if self._is_waiting and self._task is not None:
                self._task.cancel()

    async def serve(self, messages: AsyncIterator[bytes], send: Send) -> None:
        """Answer the appends of the stream until the client ends it. Raises PxrsError."""
        self._task = asyncio.current_task()
        messages = aiter(messages)
        await self._serve_begun(self._begin(await self._next(messages)), messages, send)

    async def _serve_begun(self, given: Given, messages: AsyncIterator[bytes], send: Send) -> None:
        """given: what the descriptor says. The stream appends to no other topic than the one that it names now, and if
        that is deleted, the log refuses each append."""
        topic = await run(self._pools.data, functools.partial(self._served.permitted_topic, given))
        store = functools.partial(_store, self._served, given, topic)
        group: _Group | None = None
        ahead = asyncio.ensure_future(self._receive(messages))
        try:
            while (group := await self._unless_ended(ahead)) is not None:
                self._is_stored.clear()
                ahead = asyncio.ensure_future(self._receive(messages))  # the next append comes while this one is stored
                outcomes = await run(self._pools.data, functools.partial(store, group.appends))
                # Before the answer is sent: a client that does not read it must not hold room.
                self._give_back(group)
                self._is_stored.set()
                await self._answer(outcomes, send)
        finally:
            self._give_back(group)
            ahead.cancel()
            ahead.add_done_callback(self._drop)

    async def _answer(self, outcomes: Sequence[Outcome], send: Send) -> None:
        """Raises Stalled if the client does not take the answer in time: the append that was received ahead would hold
        its room for ever."""
        try:
            async with asyncio.timeout(self._limits.append_rest_s):
                await send(encode_outcomes(outcomes))
        except TimeoutError:
            raise Stalled(f"the answer to an append was not read within {self._limits.append_rest_s:g} s") from None

    async def _receive(self, messages: AsyncIterator[bytes]) -> _Group | None:
        """The batches of the next append, checked; None if the client has ended the stream."""
        if not self._budget.has_room(1):
            # The room for a message can be taken only when its size is known. So if there is none, no stream may hold
            # a message beside the append that it stores.
            await self._is_stored.wait()
        message = await anext(messages, None)
        if message is None:
            return None
        group = _Group()
        try:
            if await self._add(group, message):
                async with self._in_time():
                    while await self._add(group, await anext(messages, None)):
                        pass
            # To hand a small append to a thread takes longer than to decode it.
            is_small = group.taken < SMALL_BYTES
            group.appends = group.decode() if is_small else await run(self._pools.data, group.decode)
        except BaseException:
            self._give_back(group)
            raise
        return group

    async def _add(self, group: _Group, message: bytes | None) -> bool:
        """Add a batch to the group. Returns whether another one follows."""
        if message is None:
            raise InvalidRecord("the stream ended after a batch with `more`; nothing of this append was stored")
        received = receive(message, self._limits.append_decoded_bytes_max)
        group.batches.append(received)
        await self._take_room(group, len(message), received.layout.decoded_bytes)
        return received.has_more

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Within it, the rest of what a client has begun to send is received. It must not take for ever, because other
        streams may wait for the room that the beginning takes."""
        try:
            async with asyncio.timeout(self._limits.append_rest_s):
                yield
        except TimeoutError:
            raise ServerBusy(
                f"the rest of an append did not arrive within {self._limits.append_rest_s:g} s, or the server had no "
                "memory left for it; nothing of it was stored"
            ) from None

    async def _take_room(self, group: _Group, size: int, decoded: int) -> None:
        """Take room for the batch that has come as the last of the group. Raises InvalidRecord, ServerBusy."""
        limits, is_first = self._limits, len(group.batches) == 1
        if len(group.batches) > limits.append_batches_max:
            raise InvalidRecord(f"an append has {limits.append_batches_max:,} batches at most; send fewer with `more`")
        size += max(0, decoded - group.decoded)
        group.decoded = max(decoded, group.decoded)
        if not is_first and group.taken + size > limits.append_bytes_max:  # it would wait for itself
            raise InvalidRecord(
                f"an append has {limits.append_bytes_max:,} bytes at most, when decompressed; send fewer batches with "
                "`more`, or smaller ones"
            )
        if not self._budget.has_room(size):
            # This stream may hold room for the append that it stores. It takes more only when that is given back, so
            # that other streams can complete the appends that they have begun.
            await self._is_stored.wait()
        group.taken += await self._budget.take(size)

    def _give_back(self, group: _Group | None) -> None:
        if group is not None:
            self._budget.give_back(group.taken)
            group.taken = 0

    def _drop(self, ahead: asyncio.Future[_Group | None]) -> None:
        """A callback: what was received ahead is not stored."""
        if not ahead.cancelled() and ahead.exception() is None:
            self._give_back(ahead.result())

    def _begin(self, message: bytes | None) -> Given:
        """Check the first message. Returns what its descriptor says."""
        first = flight.read_flight_data(message or b"")
        command = first.command or b""
        try:
            if len(command) > ABOUT_BYTES_MAX:
                raise ValueError("too long")
            about = wire.loads(command)
        except (ValueError, RecursionError) as error:
            raise InvalidRecord("the descriptor's command must be a JSON object that names the topic") from error
        if len(first.header) > SCHEMA_BYTES_MAX:
            raise InvalidRecord(f"the schema of the stream is longer than {SCHEMA_BYTES_MAX:,} bytes")
        _check_schema(first)
        return Given("DoPut", about)

    async def _next(self, messages: AsyncIterator[bytes]) -> bytes | None:
        """The next message; None if the client has ended the stream. `end` may end the wait."""
        return await self._unless_ended(asyncio.ensure_future(_message(messages)))

    async def _unless_ended(self, coming: asyncio.Future[T]) -> T:
        """Wait for what comes from the client. Raises the error of `end`, which may end the wait."""
        if self._why is not None:
            coming.cancel()
            raise self._why
        self._is_waiting = True
        try:
            return await coming
        except asyncio.CancelledError:
            if self._why is None or self._task is None:
                raise
            self._task.uncancel()
            raise self._why from None
        finally:
            self._is_waiting = False


async def _message(messages: AsyncIterator[bytes]) -> bytes | None:
    return await anext(messages, None)


def _store(served: Served, given: Given, topic: TopicLog, appends: list[Append]) -> list[Outcome]:
    served.check(given.call, given.found)  # for each append anew: the token may have been revoked
    return topic.append(appends)


def _check_schema(first: flight.FlightData) -> None:
    try:
        schema = pa.ipc.read_schema(flight.encapsulated(first.header, b""))
    except _INVALID as error:
        raise InvalidRecord("the first message of the stream has no schema") from error
    if not schema.equals(SCHEMA):
        raise InvalidRecord(f"the columns are {schema.to_string()[:500]}; they must be {SCHEMA.to_string()}")
