"""`DoPut`: batches into a topic. Each append is answered when it is durable (W1).

An append is the batches of a stream up to the first one without `more`. The server stores an append only when it has
answered the one before it; gRPC's buffers hold what comes meanwhile. What all streams hold together is bounded by
`append_bytes_max`: a stream waits until others are stored, and its client is slowed down by gRPC's flow control.

Nothing that a client sends is trusted (a frame that cannot be decoded would stop every reader at its offset): each
batch is decoded and fully validated before it is stored. Its bytes are stored as they came.
"""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import AsyncIterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from pxrs.errors import InvalidRecord, ServerBusy
from pxrs.log.batch import ANONYMOUS, SCHEMA, Origin, Payload
from pxrs.log.contract import Append, TopicLog
from pxrs.log.outcomes import MaybeStored, Outcome, StoredAt
from pxrs.model import CODECS
from pxrs.remote import flight, wire
from pxrs.server.given import Given
from pxrs.server.pools import Pools, run
from pxrs.server.served import Served
from pxrs.server.settings import ServerLimits

MORE_S_MAX: Final = 30.0
"""How long a stream that holds the beginning of an append waits for room for the rest of it."""
_EPOCH_MAX: Final = (1 << 32) - 1
_SEQUENCE_MAX: Final = (1 << 63) - 1


class Budget:
    """Bytes that may be held at a time. Belongs to the event loop."""

    def __init__(self, bytes_max: int) -> None:
        self._left = self._bytes_max = bytes_max
        self._changed = asyncio.Condition()

    async def take(self, size: int, timeout_s: float | None) -> int:
        """Wait until there is room, for no longer than this: then ServerBusy is raised. A batch that alone is larger
        than the whole budget takes all of it. Returns what was taken, to be given back."""
        size = min(size, self._bytes_max)
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(lambda: self._left >= size)
            except TimeoutError:
                raise ServerBusy(
                    f"the server holds {self._bytes_max:,} bytes of appends that are not stored yet"
                ) from None
            self._left -= size
        return size

    async def give_back(self, size: int) -> None:
        async with self._changed:
            self._left += size
            self._changed.notify_all()


def read_append(message: flight.FlightData) -> tuple[Append, bool]:
    """One batch of an append, and whether more belong to it. Raises InvalidRecord, InvalidArgument."""
    try:
        given = Given("an append", wire.loads(message.app_metadata))
    except (ValueError, RecursionError) as error:
        raise InvalidRecord(f"a batch has no JSON object as app_metadata: {error}") from error
    append = Append(given.whole("partition"), _payload(message, given), _origin(given), given.whole_or_none("since"))
    return append, given.flag("more")


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


def _payload(message: flight.FlightData, given: Given) -> Payload:
    data = flight.encapsulated(message.header, message.body)
    try:
        records = pa.ipc.read_record_batch(data, SCHEMA)
        records.validate(full=True)
    except (pa.ArrowException, OSError, EOFError, ValueError, TypeError) as error:
        raise InvalidRecord(f"the batch is no Arrow record batch of the log's columns: {error}") from error
    times = records.column("timestamp")
    if not records.num_rows or times.null_count:
        raise InvalidRecord("the batch is empty, or a record has no timestamp")
    bounds = pc.min_max(times.cast(pa.int64())).as_py()
    address = times.buffers()[1].address
    is_plain = data.address <= address < data.address + data.size
    codec = 0 if is_plain else _codec(given)
    return Payload(data, xxhash.xxh3_64_intdigest(data), records.num_rows, bounds["min"], bounds["max"], codec)


def _codec(given: Given) -> int:
    """The codec of a compressed batch, by the name that the client gave."""
    name = given.text("codec")
    if name not in CODECS[1:]:
        raise InvalidRecord(f"codec is {name[:20]!r}: send one of {', '.join(CODECS[1:])} with a compressed batch")
    return CODECS.index(name)


def encode_outcome(outcome: Outcome) -> bytes:
    """The `PutResult` of one batch."""
    found: dict[str, Any]
    if isinstance(outcome, StoredAt):
        found = {"offset": outcome.offset, **({"duplicate": True} if outcome.is_duplicate else {})}
    else:
        error = outcome.error
        found = {"error": wire.any_error_to_dict(error), "maybe": isinstance(outcome, MaybeStored)}
    return flight.result(wire.dumps(found))


async def read_first(messages: AsyncIterator[bytes]) -> tuple[flight.FlightData, dict[str, Any]]:
    """The first message of a stream, and what its descriptor says. Raises InvalidRecord."""
    first = flight.read_flight_data(await anext(messages, b""))
    try:
        return first, wire.loads(first.command or b"")
    except (ValueError, RecursionError) as error:
        raise InvalidRecord("the descriptor's command must be a JSON object that names the topic") from error


async def appends(
    served: Served,
    pools: Pools,
    limits: ServerLimits,
    budget: Budget,
    about: dict[str, Any],
    messages: AsyncIterator[bytes],
) -> AsyncIterator[bytes]:
    """The answers to one stream, after its first message. about: what the descriptor says. Raises PxrsError."""
    given = Given("DoPut", about)
    await run(pools.data, functools.partial(_topic, served, given))
    group: list[Append] = []
    taken = 0
    try:
        async for message in messages:
            # A stream that holds the beginning of an append must not wait for ever: all others may do the same.
            taken += await budget.take(len(message), None if not group else MORE_S_MAX)
            append, has_more = await _read(pools, message)
            group.append(append)
            if len(group) > limits.append_batches_max:
                raise InvalidRecord(f"an append may have {limits.append_batches_max:,} batches; send fewer with `more`")
            if has_more:
                continue
            outcomes = await run(pools.data, functools.partial(_store, served, given, group))
            for outcome in outcomes:
                yield encode_outcome(outcome)
            await budget.give_back(taken)
            group, taken = [], 0
    finally:
        await budget.give_back(taken)


async def _read(pools: Pools, message: bytes) -> tuple[Append, bool]:
    """Small batches are checked here: to hand one to a thread takes longer than to check it."""
    data = flight.read_flight_data(message)
    if len(data.body) < 64 << 10:
        return read_append(data)
    return await run(pools.data, functools.partial(read_append, data))


def _store(served: Served, given: Given, group: list[Append]) -> list[Outcome]:
    return _topic(served, given).append(group)


def _topic(served: Served, given: Given) -> TopicLog:
    """For each append anew: the token may have been revoked, or the topic deleted."""
    served.check(given.call, given.found)
    return served.topic(given)


def check_schema(first: flight.FlightData) -> None:
    """Raise InvalidRecord if the first message of a stream does not have the schema of topics."""
    try:
        schema = pa.ipc.read_schema(flight.encapsulated(first.header, b""))
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        raise InvalidRecord("the first message of the stream has no schema") from error
    if not schema.equals(SCHEMA):
        raise InvalidRecord(f"the columns are {schema.to_string()}; they must be {SCHEMA.to_string()}")
