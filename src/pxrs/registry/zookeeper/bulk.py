"""Requests that read or watch many nodes at once: `MultiRead` and `SetWatches`, which kazoo does not have. No I/O here.

The problem: with one request for each node, a scan of 900 keys takes 900 requests, and so does a watch over them.
Client and server spend their time on the number of requests.

The answer to "multiRead" (since ZooKeeper 3.6) has a part for each node, as separate requests would have; the part of a
node that does not exist or may not be read is an error. "setWatches" is the request that ZooKeeper's own clients send
after a reconnect. It sets one-shot watches on the nodes' data. For a node that has changed after a given transaction,
or does not exist, the server sends an event at once, before the answer. `SetWatches` gives the largest transaction id,
so that only nodes that do not exist have an event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kazoo.exceptions import EXCEPTIONS, NoNodeError
from kazoo.protocol.serialization import (
    GetChildren,
    GetData,
    MultiHeader,
    int_struct,
    long_struct,
    multiheader_struct,
    read_buffer,
    read_string,
    stat_struct,
    write_string,
)
from kazoo.protocol.states import ZnodeStat

NODES_MAX = 250
"""How many nodes a request may name: with the longest paths it is far smaller than the server's limit of 1 MiB."""
NODES_FIRST = 25
"""How many nodes the first request names, while the size of the values is not known."""
REPLY_BYTES = 1 << 20
"""The size of an answer that `next_count` aims at."""

_HEAD = multiheader_struct.pack(GetData.type, False, -1)
_LIST = multiheader_struct.pack(GetChildren.type, False, -1)
_END = multiheader_struct.pack(-1, True, -1)
_WITHOUT_WATCH = b"\0"
_ZXID_MAX = (1 << 63) - 1
_NO_PATHS = int_struct.pack(0)

Found = tuple[bytes, Any]
"""A node's value and its stat, as kazoo's `get` gives them."""


@dataclass(frozen=True, slots=True)
class MultiRead:
    """A request in the form of kazoo's own. Its answer has the values of `paths` and then the names of the children of
    `folders`, None for a node that does not exist, and other errors."""

    paths: tuple[str, ...]
    folders: tuple[str, ...] = ()
    type: ClassVar = 22

    def serialize(self) -> bytes:
        values = (_HEAD + write_string(path) + _WITHOUT_WATCH for path in self.paths)
        listings = (_LIST + write_string(path) + _WITHOUT_WATCH for path in self.folders)
        return b"".join((*values, *listings, _END))

    @classmethod
    def deserialize(cls, data: bytes, offset: int) -> list[Found | list[str] | Exception | None]:
        found: list[Found | list[str] | Exception | None] = []
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
            if header.type == GetChildren.type:
                count, offset = int_struct.unpack_from(data, offset)[0], offset + int_struct.size
                names = []
                for _ in range(count):
                    name, offset = read_string(data, offset)
                    names.append(name)
                found.append(names)
                continue
            error = EXCEPTIONS[int_struct.unpack_from(data, offset)[0]]()
            offset += int_struct.size
            found.append(None if isinstance(error, NoNodeError) else error)


@dataclass(frozen=True, slots=True)
class SetWatches:
    """A request in the form of kazoo's own. `Line.on_event` gets its events: kazoo does not know the watches."""

    paths: tuple[str, ...]
    type: ClassVar = 101

    def serialize(self) -> bytes:
        data = (int_struct.pack(len(self.paths)), *map(write_string, self.paths))
        return b"".join((long_struct.pack(_ZXID_MAX), *data, _NO_PATHS, _NO_PATHS))

    @classmethod
    def deserialize(cls, data: bytes, offset: int) -> bool:
        return True


def next_count(found: Sequence[Found | None]) -> int:
    """How many nodes the next request names, so that its answer has about REPLY_BYTES."""
    size = sum(len(each[0]) for each in found if each is not None)
    return max(1, min(NODES_MAX, REPLY_BYTES * len(found) // max(1, size)))
