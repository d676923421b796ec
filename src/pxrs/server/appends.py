"""`DoPut`: batches into a topic. Each append is answered when it is durable (W1).

An append is the batches of a stream up to the first one without `more`. The server stores an append only when it has
answered the one before it; meanwhile it receives one message, and gRPC's buffers hold what else comes. What all streams
hold together is bounded by `append_bytes_max`: a stream waits until others are stored, and its client is slowed down by
gRPC's flow control. A stream that holds the beginning of an append must get the rest of it within `append_rest_s`: all
others may wait for the room that it takes.

A stream that ends with an error of pxrs has stored nothing of the appends that it has not answered. Clients rely on it.

Nothing that a client sends is trusted (a frame that cannot be decoded would stop every reader at its offset): each
batch is decoded and fully validated before it is stored. Its bytes are stored as they came.
"""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from pxrs.errors import Closed, InvalidRecord, PxrsError, ServerBusy
from pxrs.log.batch import ANONYMOUS, SCHEMA, Origin, Payload
from pxrs.log.contract import Append, TopicLog
from pxrs.log.outcomes import MaybeStored, Outcome, StoredAt
from pxrs.remote import flight, wire
from pxrs.server.budget import Budget
from pxrs.server.given import Given
from pxrs.server.layout import Layout, read_layout
from pxrs.server.pools import Pools, run, take_error
from pxrs.server.served import Send, Served
from pxrs.server.settings import ServerLimits

ABOUT_BYTES_MAX: Final = 4096
"""How long the JSON that comes with a batch may be."""
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
            raise InvalidRecord("since is an offset, which is not negative")
        payload = _payload(self.message, self.layout)
        return Append(self.about.whole("partition"), payload, _origin(self.about), since)


def receive(message: bytes, decoded_bytes_max: int) -> Received:
    """Read what costs little. Raises InvalidRecord, also if it would take too much memory to decode the batch."""
    data = flight.read_flight_data(message)
    if len(data.app_metadata) > ABOUT_BYTES_MAX:
        raise InvalidRecord(f"the app_metadata of a batch is longer than {ABOUT_BYTES_MAX:,} bytes")
    try:
        about = Given("an append", wire.loads(data.app_metadata))
    except (ValueError, RecursionError) as error:
        raise InvalidRecord(f"a batch has no JSON object as app_metadata: {str(error)[:200]}") from error
    layout = read_layout(data.header, data.body)
    if layout.decoded_bytes > decoded_bytes_max:
        raise InvalidRecord(
            f"the batch has {layout.decoded_bytes:,} bytes decompressed, and {decoded_bytes_max:,} is the most"
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


def _payload(message: flight.FlightData, layout: Layout) -> Payload:
    data = flight.encapsulated(message.header, message.body)
    try:
        records = pa.ipc.read_record_batch(data, SCHEMA)
        records.validate(full=True)
    except _INVALID as error:
        raise InvalidRecord(f"the batch is no Arrow record batch of the log's columns: {str(error)[:500]}") from error
    times = records.column("timestamp")
    if not records.num_rows or times.null_count:
        raise InvalidRecord("the batch is empty, or a record has no timestamp")
    _check_headers(records.column("headers"))
    bounds = pc.min_max(times.cast(pa.int64())).as_py()
    return Payload(data, xxhash.xxh3_64_intdigest(data), records.num_rows, bounds["min"], bounds["max"], layout.codec)


def _check_headers(headers: pa.ListArray) -> None:
    """`validate` does not look for nulls in columns that may have none."""
    if headers.null_count == len(headers):
        return
    pairs = headers.flatten()
    if pairs.null_count or pairs.field("key").null_count:
        raise InvalidRecord("a header is null, or has no key")


def encode_outcome(outcome: Outcome) -> bytes:
    """The `PutResult` of one batch."""
    found: dict[str, Any]
    if isinstance(outcome, StoredAt):
        found = {"offset": outcome.offset, **({"duplicate": True} if outcome.is_duplicate else {})}
    else:
        error = outcome.error
        found = {"error": wire.any_error_to_dict(error), "maybe": isinstance(outcome, MaybeStored)}
    return flight.result(wire.dumps(found))


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
        self._ahead: asyncio.Future[bytes | None] | None = None
        """The next message, which is received while an append is stored."""

    may_end = True
    """An append that is under way is answered before the stream ends."""

    def leave(self) -> None:
        """End the stream: the server stops."""
        self.end(Closed("the server is stopping: connect again; nothing that it has not answered was stored"))

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
        group: list[Received] = []
        taken = decoded = 0
        try:
            while (message := await self._next(messages, is_rest=bool(group))) is not None:
                received = receive(message, self._limits.append_decoded_bytes_max)
                group.append(received)
                if len(group) > self._limits.append_batches_max:
                    raise InvalidRecord(
                        f"an append may have {self._limits.append_batches_max:,} batches; send fewer with `more`"
                    )
                # The batches are decoded one after another.
                size = len(message) + max(0, received.layout.decoded_bytes - decoded)
                decoded = max(decoded, received.layout.decoded_bytes)
                if len(group) > 1 and taken + size > self._limits.append_bytes_max:  # it would wait for itself
                    raise InvalidRecord(
                        f"an append may have {self._limits.append_bytes_max:,} bytes, decompressed ones counted; send "
                        "fewer batches with `more`, or smaller ones"
                    )
                # A stream that holds the beginning of an append must not wait for ever: all others may do the same.
                rest_s = self._limits.append_rest_s if len(group) > 1 else None
                taken += await self._budget.take(size, rest_s)
                if received.has_more:
                    continue
                if self._budget.has_room(size):  # the next batch comes while this one is stored
                    self._ahead = asyncio.ensure_future(_received(messages))
                outcomes = await run(self._pools.data, functools.partial(store, group))
                # Before the answers are sent: a client that does not read them must not hold room.
                self._budget.give_back(taken)
                group, taken, decoded = [], 0, 0
                for outcome in outcomes:
                    await send(encode_outcome(outcome))
            if group:
                raise InvalidRecord("the stream ended after a batch with `more`; nothing of this append was stored")
        finally:
            self._budget.give_back(taken)
            if self._ahead is not None:
                self._ahead.cancel()
                self._ahead.add_done_callback(take_error)

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
        _check_schema(first)
        return Given("DoPut", about)

    async def _next(self, messages: AsyncIterator[bytes], *, is_rest: bool = False) -> bytes | None:
        """The next message; None if the client has ended the stream.

        is_rest: whether the message belongs to an append that has begun"""
        if self._why is not None:
            raise self._why
        self._is_waiting = True
        try:
            async with asyncio.timeout(self._limits.append_rest_s if is_rest else None):
                if self._ahead is None:
                    return await anext(messages, None)
                message = await self._ahead
                self._ahead = None
                return message
        except TimeoutError:
            raise ServerBusy(
                f"the rest of an append did not come within {self._limits.append_rest_s:g} s; nothing of it was stored"
            ) from None
        except asyncio.CancelledError:
            if self._why is None or self._task is None:
                raise
            self._task.uncancel()
            raise self._why from None
        finally:
            self._is_waiting = False


async def _received(messages: AsyncIterator[bytes]) -> bytes | None:
    return await anext(messages, None)


def _store(served: Served, given: Given, topic: TopicLog, group: list[Received]) -> list[Outcome]:
    served.check(given.call, given.found)  # for each append anew: the token may have been revoked
    return topic.append([received.append() for received in group])


def _check_schema(first: flight.FlightData) -> None:
    try:
        schema = pa.ipc.read_schema(flight.encapsulated(first.header, b""))
    except _INVALID as error:
        raise InvalidRecord("the first message of the stream has no schema") from error
    if not schema.equals(SCHEMA):
        raise InvalidRecord(f"the columns are {schema.to_string()[:500]}; they must be {SCHEMA.to_string()}")
