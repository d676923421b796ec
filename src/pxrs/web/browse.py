"""Messages of a topic for the page: from an offset, from a time, the last ones, or those with a key.

A request reads at most `WHOLE_MAX` partitions, about `READ_BYTES` of them together and at least a batch of each, and
returns at most `LIMIT_MAX` messages, with at most `SHOWN_BYTES` of each value and key. A search for a key reads the one
partition of that key, at most `SEARCH_BYTES` of it for each request, and says where the next request goes on.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
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
READ_BYTES: Final = 8 << 20
SEARCH_READ_BYTES: Final = 1 << 20
SEARCH_BYTES: Final = 64 << 20
WHOLE_MAX: Final = 64
"""How many partitions are read for one page: each that is read stays open in this process, and costs it descriptors."""


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
    left_out: int = 0
    """How many partitions that have messages were not read, because there are more than `WHOLE_MAX`."""


def find(log: TopicLog, asked: Asked) -> Page:
    """Raises InvalidArgument, and what reading raises."""
    if asked.partition is not None and not 0 <= asked.partition < log.partitions:
        raise InvalidArgument(f"{log.name} has no partition {asked.partition}; it has 0 to {log.partitions - 1}")
    if asked.key is not None:
        return _with_key(log, asked, asked.key)
    bounds, left_out = _places(log, asked.partition)
    limit = max(1, min(asked.limit, LIMIT_MAX))
    is_last = asked.offset is None and asked.time_us is None
    size = READ_BYTES // max(1, len(bounds))
    found: list[Message] = []
    begins: dict[int, int] = {}
    for number, place in bounds.items():
        begins[number] = _begin(log, asked, number, place)
        found += _last(log, number, place, limit, size) if is_last else _from(log, number, begins[number], limit, size)
    found.sort(key=lambda message: (message.timestamp, message.partition, message.offset))
    shown = found[-limit:] if is_last else found[:limit]
    after = begins | {message.partition: message.offset + 1 for message in sorted(shown, key=lambda each: each.offset)}
    next_ = {number: offset for number, offset in after.items() if offset < bounds[number].end}
    return Page(shown, {} if is_last else next_, left_out=left_out)


def _places(log: TopicLog, partition: int | None) -> tuple[Mapping[int, Bounds], int]:
    """The partitions to read with their bounds, and how many others have messages."""
    if partition is not None:
        return log.bounds((partition,)), 0
    if log.partitions <= WHOLE_MAX:
        return log.bounds(range(log.partitions)), 0
    filled = [number for number, each in enumerate(log.glance()) if each.end > each.start]
    return log.bounds(filled[:WHOLE_MAX]), max(0, len(filled) - WHOLE_MAX)


def _last(log: TopicLog, number: int, place: Bounds, limit: int, size: int) -> list[Message]:
    """The last messages of a partition, up to its end: fewer than `limit` if they are more than `size` bytes."""
    while True:
        found = list(_messages(log, number, max(place.start, place.end - limit), size))
        if limit == 1 or not found or found[-1].offset >= place.end - 1:
            return found
        limit = max(1, limit // 4)


def _from(log: TopicLog, number: int, offset: int, limit: int, size: int) -> list[Message]:
    return list(islice(_messages(log, number, offset, size), limit))


def _begin(log: TopicLog, asked: Asked, number: int, place: Bounds) -> int:
    if asked.offset is not None:
        return min(max(asked.offset, place.start), place.end)
    if asked.time_us is not None:
        return log.offset_at(number, asked.time_us)
    return place.start


def _with_key(log: TopicLog, asked: Asked, key: bytes) -> Page:
    number = hash_named(log.topic.partitioner)(key) % log.partitions if asked.partition is None else asked.partition
    place = log.bounds((number,))[number]
    offset, limit = _begin(log, asked, number, place), max(1, min(asked.limit, LIMIT_MAX))
    found: list[Message] = []
    searched = read = 0
    while offset < place.end and read < SEARCH_BYTES:
        batches = log.read(number, offset, SEARCH_READ_BYTES)
        if not batches:
            break
        for batch in batches:
            read += batch.records.nbytes
            for message in messages_of(batch, log.name, number):
                searched += 1
                offset = message.offset + 1
                if message.key == key:
                    found.append(message)
                    if len(found) == limit:
                        return Page(found, {number: offset} if offset < place.end else {}, searched)
            offset = batch.next_offset
    return Page(found, {number: offset} if offset < place.end else {}, searched)


def _messages(log: TopicLog, partition: int, offset: int, size: int) -> Iterator[Message]:
    """Messages from this offset on, out of one read: a page has no more than that holds."""
    try:
        batches = log.read(partition, offset, size)
    except OffsetTrimmed as error:  # retention has removed them since the bounds were read
        batches = log.read(partition, error.first_offset, size)
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
