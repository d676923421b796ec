"""`DoGet`: batches of a topic, as messages of Flight.

The two kinds of tickets (docs/wire.md) are read differently. `positions` is one `fetch` of what is there. A range is
read in steps, one ahead of what is being sent, and ends with an error if a part of it is not there: a reader that was
promised a range must never get other rows, or fewer.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from typing import Any, Final

from pxrs.errors import OffsetOutOfRange, OffsetTrimmed
from pxrs.log.batch import SCHEMA, Batch
from pxrs.log.contract import TopicLog
from pxrs.remote import flight, wire
from pxrs.server.given import Given
from pxrs.server.pools import Pools, run
from pxrs.server.served import Served
from pxrs.server.settings import ServerLimits

_SCHEMA_HEADER: Final = bytes(flight.ipc_message(SCHEMA.serialize())[0])
SCHEMA_MESSAGE: Final = flight.flight_data(flight.FlightData(header=_SCHEMA_HEADER))
"""The first message of every stream of batches."""
STEP_BYTES: Final = 4 << 20
"""About how many bytes of a range are read at a time."""


def encode_batch(batch: Batch, partition: int) -> bytes:
    """One batch as a message; one without rows, which is a gap, has metadata alone."""
    about: dict[str, Any] = {"partition": partition, "offset": batch.base_offset}
    if batch.next_offset != batch.base_offset + batch.records.num_rows:
        about["next"] = batch.next_offset
    if not batch.records.num_rows:
        return flight.flight_data(flight.FlightData(app_metadata=wire.dumps(about)))
    header, body = flight.ipc_message(batch.records.serialize())
    return flight.flight_data(flight.FlightData(header, body, wire.dumps(about)))


async def read(served: Served, pools: Pools, limits: ServerLimits, given: Given) -> AsyncIterator[bytes]:
    """The messages that answer one ticket. Raises PxrsError."""
    topic = await run(pools.data, functools.partial(_topic, served, given))
    yield SCHEMA_MESSAGE
    if "positions" in given.found:
        for message in await run(pools.data, functools.partial(_fetch, topic, limits, given)):
            yield message
        return
    partition, start, end = given.whole("partition"), given.whole("start"), given.whole("end")
    step = functools.partial(_step, served, topic, given, partition, end)
    ahead = asyncio.ensure_future(run(pools.data, functools.partial(step, start)))
    try:
        while start < end:
            messages, start = await ahead
            if start < end:
                ahead = asyncio.ensure_future(run(pools.data, functools.partial(step, start)))
            for message in messages:
                yield message
    finally:
        ahead.cancel()


def _fetch(topic: TopicLog, limits: ServerLimits, given: Given) -> list[bytes]:
    asked = given.whole_or_none("max_bytes")
    most = limits.read_bytes_max if asked is None else min(max(1, asked), limits.read_bytes_max)
    messages = []
    for partition, found in topic.fetch(given.pairs("positions") or {}, most, timeout=0).items():
        messages += [encode_batch(batch, partition) for batch in found.batches]
        if found.error is not None:
            about = {"partition": partition, "error": wire.error_to_dict(found.error)}
            messages.append(flight.flight_data(flight.FlightData(app_metadata=wire.dumps(about))))
    return messages


def _topic(served: Served, given: Given) -> TopicLog:
    served.check(given.call, given.found)
    return served.topic(given)


def _step(
    served: Served, topic: TopicLog, given: Given, partition: int, end: int, start: int
) -> tuple[list[bytes], int]:
    """The next messages of a range, and where the step after it begins."""
    if start >= end:
        return [], start
    served.check(given.call, given.found)  # the token may have been revoked since the last step
    batches = topic.read(partition, start, STEP_BYTES)
    if not batches:
        raise OffsetOutOfRange(f"{topic.name}/{partition}", end, start)
    if batches[0].base_offset != start:
        raise OffsetTrimmed(f"{topic.name}/{partition}", start, batches[0].base_offset)
    chosen = [batch.within(start, end) for batch in batches if batch.base_offset < end]
    return [encode_batch(batch, partition) for batch in chosen], chosen[-1].next_offset
