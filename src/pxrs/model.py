"""The plain values that the log, groups and consumers speak of."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from pxrs.errors import InvalidTopic

PARTITIONS_DEFAULT = 8
PARTITIONS_MAX = 10_000
SEGMENT_BYTES_DEFAULT = 64 << 20
PARTITIONERS = ("xxh64", "murmur2")
CODECS = ("none", "lz4", "zstd")
DURABILITIES = ("disk", "os")
TOPIC_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def microseconds_of(moment: datetime) -> int:
    """Since 1970, as the log counts time. The moment must have a time zone."""
    return (moment - EPOCH) // timedelta(microseconds=1)


class Message(NamedTuple):
    """One message as a consumer gets it. A named tuple: it is made a million times a second."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    timestamp: int
    """Microseconds since 1970, UTC."""
    headers: list[tuple[str, bytes]] | None
    epoch: int
    """The fencing token under which the partition was owned; 0 when read without a group."""


class TopicPartition(NamedTuple):
    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as it was created. Its id is new with each creation: a later topic of the same name is another one."""

    name: str
    id: str
    partitions: int = PARTITIONS_DEFAULT
    partitioner: str = "xxh64"
    codec: str = "none"
    segment_bytes: int = SEGMENT_BYTES_DEFAULT
    retention_s: float | None = None
    retention_bytes: int | None = None
    """For each partition."""
    durability: str = "disk"
    """What an append waits for: "disk", the medium; or "os", no more than that the operating system has it."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What a later version wrote and this one does not know; kept as it is."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not TOPIC_NAME.fullmatch(self.name):
            raise InvalidTopic(
                f"topic name {self.name!r}: use up to 200 letters, digits, '.', '_' or '-', a letter or digit first"
            )
        if not 1 <= self.partitions <= PARTITIONS_MAX:
            raise InvalidTopic(f"{self.name}: {self.partitions} partitions; choose from 1 to {PARTITIONS_MAX:,}")
        if self.partitioner not in PARTITIONERS:
            raise InvalidTopic(f"{self.name}: partitioner {self.partitioner!r}; choose from {', '.join(PARTITIONERS)}")
        if self.codec not in CODECS:
            raise InvalidTopic(f"{self.name}: codec {self.codec!r}; choose from {', '.join(CODECS)}")
        if self.durability not in DURABILITIES:
            raise InvalidTopic(f"{self.name}: durability {self.durability!r}; choose from {', '.join(DURABILITIES)}")
        if not 4096 <= self.segment_bytes <= 1 << 31:
            raise InvalidTopic(f"{self.name}: segment_bytes {self.segment_bytes:,}; choose from 4,096 to 2 GiB")
        for name in ("retention_s", "retention_bytes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidTopic(f"{self.name}: {name} is {value}; give more than 0, or None to keep everything")
