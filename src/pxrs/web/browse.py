"""Messages of a topic for the page: from an offset, from a time, the last ones, or those with a key.

A request reads at most `READ_BYTES` of each partition and returns at most `LIMIT_MAX` messages, with at most
`SHOWN_BYTES` of each value and key. A search for a key reads the one partition of that key, at most `SEARCH_BYTES` of
it for each request, and says where the next request goes on.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from pxrs.errors import InvalidArgument, OffsetTrimmed
from pxrs.hashing import hash_named
from pxrs.log.contract import Bounds, TopicLog
from pxrs.log.messages import messages_of
from pxrs.model import Message

LIMIT_MAX: Final = 200
SHOWN_BYTES: Final = 32 << 10
HEADERS_MAX: Final = 100
READ_BYTES: Final = 1 << 20
SEARCH_BYTES: Final = 64 << 20
WHOLE_MAX: Final = 64
"""Of a topic with more partitions, a page has only its share of messages of each partition."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for. Without an offset, a time or a key: the last messages."""

    partition: int | None = None
    offset: int | None = None
    time_us: int | None = None
    key: bytes | None = None
    limit: int = 50


@dataclass(frozen=True, slots=True)
class Page:
    messages: list[Message]
    next: dict[int, int]
    """The offset at which the next page begins, by partition; partitions that have no more are left out."""
    searched: int = 0
    """How many messages were compared with the key."""


def find(log: TopicLog, asked: Asked) -> Page:
    """Raises InvalidArgument, and what reading raises."""
    if asked.partition is not None and not 0 <= asked.partition < log.partitions:
        raise InvalidArgument(f"{log.name} has no partition {asked.partition}; it has 0 to {log.partitions - 1}")
    if asked.key is not None:
        return _with_key(log, asked, asked.key)
    numbers = range(log.partitions) if asked.partition is None else (asked.partition,)
    bounds = log.bounds(numbers)
    limit = max(1, min(asked.limit, LIMIT_MAX))
    each_limit = limit if len(bounds) <= WHOLE_MAX else -(-limit // len(bounds))
    begins = {number: _begin(log, asked, number, place, each_limit) for number, place in bounds.items()}
    found = [message for number, at in begins.items() for message in islice(_messages(log, number, at), each_limit)]
    found.sort(key=lambda message: (message.timestamp, message.partition, message.offset))
    is_last = asked.offset is None and asked.time_us is None
    shown = found[-limit:] if is_last else found[:limit]
    after = begins | {message.partition: message.offset + 1 for message in sorted(shown, key=lambda each: each.offset)}
    next_ = {number: offset for number, offset in after.items() if offset < bounds[number].end}
    return Page(shown, {} if is_last else next_)


def _begin(log: TopicLog, asked: Asked, number: int, place: Bounds, limit: int) -> int:
    if asked.offset is not None:
        return min(max(asked.offset, place.start), place.end)
    if asked.time_us is not None:
        return log.offset_at(number, asked.time_us)
    return max(place.start, place.end - limit)


def _with_key(log: TopicLog, asked: Asked, key: bytes) -> Page:
    number = hash_named(log.topic.partitioner)(key) % log.partitions if asked.partition is None else asked.partition
    place = log.bounds((number,))[number]
    offset = place.start
    if asked.offset is not None or asked.time_us is not None:
        offset = _begin(log, asked, number, place, asked.limit)
    found: list[Message] = []
    searched = read = 0
    while offset < place.end and read < SEARCH_BYTES and len(found) < min(asked.limit, LIMIT_MAX):
        batches = log.read(number, offset, READ_BYTES)
        if not batches:
            break
        for batch in batches:
            read += batch.records.nbytes
            for message in messages_of(batch, log.name, number):
                searched += 1
                offset = message.offset + 1
                if message.key == key:
                    found.append(message)
                    if len(found) == min(asked.limit, LIMIT_MAX):
                        return Page(found, {number: offset} if offset < place.end else {}, searched)
            offset = batch.next_offset
    return Page(found, {number: offset} if offset < place.end else {}, searched)


def _messages(log: TopicLog, partition: int, offset: int) -> Iterator[Message]:
    """Messages from this offset on, out of one read: a page has no more than that holds."""
    try:
        batches = log.read(partition, offset, READ_BYTES)
    except OffsetTrimmed as error:  # retention has removed them since the bounds were read
        batches = log.read(partition, error.first_offset, READ_BYTES)
    for batch in batches:
        yield from messages_of(batch.within(offset, None) if batch.base_offset < offset else batch, log.name, partition)


def plain(message: Message) -> dict[str, Any]:
    """The message for the page, which decodes the bytes and shows them as text."""
    return {
        "partition": message.partition,
        "offset": message.offset,
        "time": message.timestamp / 1e6,
        "key": data(message.key),
        "value": data(message.value),
        "headers": [{"name": name, "value": data(value)} for name, value in (message.headers or [])[:HEADERS_MAX]],
        "header_count": len(message.headers or ()),
    }


def data(value: bytes | None) -> dict[str, Any] | None:
    """Bytes in base64, the first ones if they are many, and how many there are."""
    return None if value is None else {"base64": base64.b64encode(value[:SHOWN_BYTES]).decode(), "bytes": len(value)}
