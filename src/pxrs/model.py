"""The plain values that the log, groups and consumers speak of."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from types import UnionType
from typing import NamedTuple

from pxrs.errors import InvalidTopic

PARTITIONS_DEFAULT = 8
TABLE_POLL_S_DEFAULT = 0.2
"""How often a waiting reader of a SQL table asks for its highest id."""
PARTITIONS_MAX = 10_000
SEGMENT_BYTES_DEFAULT = 64 << 20
PARTITIONERS = ("xxh64", "murmur2")
CODECS = ("none", "lz4", "zstd")
DURABILITIES = ("disk", "os")
_NO_SETTINGS = ("name", "id", "extra", "revision")
ALTERABLE = (
    "codec",
    "segment_bytes",
    "retention_s",
    "retention_bytes",
    "durability",
    "keep_unread",
    "segment_s",
)
"""The fields of a topic that can be changed after its creation."""
ENSEMBLE_MAX = 100
QUORUMS = ("ensemble", "write_quorum", "ack_quorum")
"""The fields of a topic that say how many copies of its messages a cluster keeps."""
TOPIC_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""The names that users may give to topics."""
STORED_TOPIC_NAME = re.compile(f"_?{TOPIC_NAME.pattern}")
"""The names that topics have: those of users, and those of internal topics, which begin with an underscore."""
EVENTS_TOPIC = "_events"
AUDIT_TOPIC = "_audit"
"""The internal topics: see `pxrs.events`."""


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def is_internal(topic: str) -> bool:
    """Whether a topic of this name is one that pxrs creates and writes itself."""
    return topic.startswith("_")


def refuse_internal(topic: str, what: str) -> None:
    """Raise InvalidTopic if this is the name of an internal topic. what: what was to be done, such as "created"."""
    if isinstance(topic, str) and is_internal(topic):
        raise InvalidTopic(
            f"topic {topic!r} cannot be {what}: names that begin with '_' are for the topics that pxrs creates and "
            "writes itself, such as _events; choose another name"
        )


def microseconds_of(moment: datetime) -> int:
    """The time in microseconds since 1970, as the log stores it. The moment must have a time zone."""
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
    """A partition of one of several topics that are read together."""

    topic: str
    """The name of the topic."""
    partition: int


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic and its settings. Its id is new with each creation: a later topic of the same name is another one."""

    name: str
    id: str
    partitions: int = PARTITIONS_DEFAULT
    partitioner: str = "xxh64"
    codec: str = "none"
    segment_bytes: int = SEGMENT_BYTES_DEFAULT
    retention_s: float | None = None
    retention_bytes: int | None = None
    """How many bytes of each partition are kept."""
    durability: str = "disk"
    """What an append waits for: "disk", the medium; or "os", no more than that the operating system has it."""
    keep_unread: bool = False
    """Whether retention keeps every message that a group has yet to read."""
    segment_s: float | None = None
    """For how long a segment is appended to. None: for a quarter of `retention_s`, if there is one. See
    `segment_age_s`.
    """
    extra: dict[str, object] = field(default_factory=dict)
    """Settings that a later version wrote and this one does not know; kept as they are."""
    revision: int = 0
    """How often the settings were changed since the topic was created."""
    ensemble: int | None = None
    """In a cluster: over how many storage nodes the messages are spread. This and the next two are None in every other
    log."""
    write_quorum: int | None = None
    """In a cluster: how many storage nodes keep a copy of each message."""
    ack_quorum: int | None = None
    """In a cluster: how many copies must be durable before a message is acknowledged."""

    def differences(self, asked: Topic) -> dict[str, tuple[object, object]]:
        """The settings in which a topic that is to be created would differ from this one, by the argument of
        `create_topic` that gives each: this topic's value and the other's. Empty if the two agree.

        `name` and `id` are no settings. `extra` is not compared: no argument of this version can ask for it."""
        found = {}
        for each in fields(self):
            mine, other = getattr(self, each.name), getattr(asked, each.name)
            if each.name in QUORUMS and other is None:
                continue  # the cluster chose
            if each.name not in _NO_SETTINGS and mine != other:
                found["retention" if each.name == "retention_s" else each.name] = mine, other
        return found

    def altered(self, changes: Mapping[str, object]) -> Topic:
        """The topic with these fields changed, and the next revision; the topic itself if nothing changes. Raises
        InvalidTopic if a field cannot be changed, or if a value is not possible."""
        if fixed := sorted(set(changes) - set(ALTERABLE)):
            if fixed[0] in ("partitions", "partitioner"):
                raise InvalidTopic(
                    f"{self.name}: {fixed[0]} cannot be changed after a topic was created; `pxrs topic copy` copies "
                    "its messages into a topic with another one"
                )
            raise InvalidTopic(f"{self.name}: {fixed[0]} cannot be changed; choose from {', '.join(ALTERABLE)}")
        found = replace(self, **changes)  # type: ignore[arg-type]  # the constructor checks each value
        return self if found == self else replace(found, revision=self.revision + 1)

    @property
    def is_retained(self) -> bool:
        """Whether the topic has a retention setting, by which messages are removed."""
        return self.retention_s is not None or self.retention_bytes is not None

    @property
    def segment_age_s(self) -> float | None:
        """How long a segment takes appends before the next one begins; None if only its size ends it.

        Retention removes whole segments, once the last message in them is old enough: by a quarter of the retention
        nothing is kept for much longer than it, however steadily messages come."""
        if self.segment_s is None:
            return None if self.retention_s is None else self.retention_s / 4
        return self.segment_s

    @property
    def keeps_unread(self) -> bool:
        """Whether retention depends on the checkpoints of groups: without a limit nothing is ever removed."""
        return self.keep_unread and self.is_retained

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not STORED_TOPIC_NAME.fullmatch(self.name):
            raise InvalidTopic(
                f"topic name {self.name!r}: use up to 200 letters, digits, '.', '_' or '-', a letter or digit first"
            )
        if not _is_number(self.partitions, int) or not 1 <= self.partitions <= PARTITIONS_MAX:
            raise InvalidTopic(f"{self.name}: {self.partitions!r} partitions; choose from 1 to {PARTITIONS_MAX:,}")
        if not isinstance(self.partitioner, str) or not TOPIC_NAME.fullmatch(self.partitioner):
            raise InvalidTopic(f"{self.name}: {self.partitioner!r} is not the name of a partitioner, such as xxh64")
        if self.codec not in CODECS:
            raise InvalidTopic(f"{self.name}: codec {self.codec!r}; choose from {', '.join(CODECS)}")
        if self.durability not in DURABILITIES:
            raise InvalidTopic(f"{self.name}: durability {self.durability!r}; choose from {', '.join(DURABILITIES)}")
        if not _is_number(self.segment_bytes, int) or not 4096 <= self.segment_bytes <= 1 << 31:
            raise InvalidTopic(f"{self.name}: segment_bytes {self.segment_bytes!r}; choose from 4,096 to 2 GiB")
        for name, kind, default in (
            ("retention_s", int | float, "to keep everything"),
            ("retention_bytes", int, "to keep everything"),
            ("segment_s", int | float, "for a quarter of the retention"),
        ):
            value = getattr(self, name)
            if value is not None and not (_is_number(value, kind) and 0 < value < math.inf):
                raise InvalidTopic(f"{self.name}: {name} is {value!r}; give more than 0, or None {default}")
        if not isinstance(self.keep_unread, bool):
            raise InvalidTopic(f"{self.name}: keep_unread is {self.keep_unread!r}; it must be True or False")
        self._check_quorums()
        if not _is_number(self.revision, int) or self.revision < 0:
            raise InvalidTopic(f"{self.name}: revision {self.revision!r} is not a count of changes")

    def _check_quorums(self) -> None:
        given = self.ensemble, self.write_quorum, self.ack_quorum
        for name, value in zip(QUORUMS, given, strict=True):
            if value is not None and not (_is_number(value, int) and 1 <= value <= ENSEMBLE_MAX):
                raise InvalidTopic(f"{self.name}: {name} is {value!r}; choose from 1 to {ENSEMBLE_MAX}")
        if None in given:
            return
        ensemble, writes, acks = (value or 0 for value in given)
        if not ensemble >= writes >= acks:
            raise InvalidTopic(
                f"{self.name}: ensemble {ensemble}, write_quorum {writes}, ack_quorum {acks}: each must be at least as "
                "large as the next one"
            )
        if acks == 1 < writes:
            raise InvalidTopic(
                f"{self.name}: ack_quorum 1 with write_quorum {writes}: the loss of one node could take acknowledged "
                "messages, although others have copies; choose an ack_quorum of 2 or more, or a write_quorum of 1"
            )


def _is_number(value: object, kind: type | UnionType) -> bool:
    """Whether the value is a number; a bool is none here, although Python counts it as one."""
    return isinstance(value, kind) and not isinstance(value, bool)
