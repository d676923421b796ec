"""Many nodes read or watched by one request, for which ZooKeeper has two that kazoo does not know. No I/O here.

The problem: a scan of 900 keys was 900 requests and so was a watch over them, and it is the number of requests that the
time goes into, on both sides.

"multiRead" (since 3.6) is answered node by node, as that many requests in a row would be; a node that is not there, or
may not be read, has an error in its place. "setWatches" is what ZooKeeper's own clients send after a reconnect. It sets
one-shot watches on the nodes' data; a node that has changed since a given transaction, or is not there, gets its
event at once instead, before the answer. As the transaction we name the last that there can be, so that only those
that are not there do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kazoo.exceptions import EXCEPTIONS, NoNodeError
from kazoo.protocol.serialization import (
    GetData,
    MultiHeader,
    int_struct,
    long_struct,
    multiheader_struct,
    read_buffer,
    stat_struct,
    write_string,
)
from kazoo.protocol.states import ZnodeStat

NODES_MAX = 250
"""How many nodes one request asks for: the longest paths stay far below the megabyte that a server takes."""
NODES_FIRST = 25
"""How many the first request asks for, while it is not known how large the values are."""
REPLY_BYTES = 1 << 20
"""How large an answer is aimed at."""

_HEAD = multiheader_struct.pack(GetData.type, False, -1)
_END = multiheader_struct.pack(-1, True, -1)
_WITHOUT_WATCH = b"\0"
_ZXID_MAX = (1 << 63) - 1
_NO_PATHS = int_struct.pack(0)

Found = tuple[bytes, Any]
"""A node's value and its stat, as kazoo's `get` gives them."""


@dataclass(frozen=True, slots=True)
class MultiRead:
    """A request as kazoo's own are made. Its answer has None for a node that is not there, and errors as they came."""

    paths: tuple[str, ...]
    type: ClassVar = 22

    def serialize(self) -> bytes:
        return b"".join((*(_HEAD + write_string(path) + _WITHOUT_WATCH for path in self.paths), _END))

    @classmethod
    def deserialize(cls, data: bytes, offset: int) -> list[Found | Exception | None]:
        found: list[Found | Exception | None] = []
        while True:
            header, offset = MultiHeader.deserialize(data, offset)
            if header.done:
                return found
            if header.type == GetData.type:
                value, offset = read_buffer(data, offset)
                stat = ZnodeStat._make(stat_struct.unpack_from(data, offset))
                offset += stat_struct.size
                found.append((value or b"", stat))
                continue
            error = EXCEPTIONS[int_struct.unpack_from(data, offset)[0]]()
            offset += int_struct.size
            found.append(None if isinstance(error, NoNodeError) else error)


@dataclass(frozen=True, slots=True)
class SetWatches:
    """A request as kazoo's own are made. Its events come to `Line.on_event`: kazoo does not know of the watches."""

    paths: tuple[str, ...]
    type: ClassVar = 101

    def serialize(self) -> bytes:
        data = (int_struct.pack(len(self.paths)), *map(write_string, self.paths))
        return b"".join((long_struct.pack(_ZXID_MAX), *data, _NO_PATHS, _NO_PATHS))

    @classmethod
    def deserialize(cls, data: bytes, offset: int) -> bool:
        return True


def next_count(found: Sequence[Found | None]) -> int:
    """How many to ask for after this answer: as many as make an answer of the size that is aimed at."""
    size = sum(len(each[0]) for each in found if each is not None)
    return max(1, min(NODES_MAX, REPLY_BYTES * len(found) // max(1, size)))
