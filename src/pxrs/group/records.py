"""What a group keeps in the registry: its keys, and the values under them, as JSON that a person can read.

    groups/<group>/members/<incarnation>            ephemeral: who is there, and what it reads
    groups/<group>/leader                           who writes the assignment, and its term
    groups/<group>/assignment                       which member each partition is meant for
    groups/<group>/owners/<topic id>/<partition>    who has it, under which epoch: its version is the fence
    groups/<group>/checkpoints/<topic id>/<partition>    the offset of the next message to read
    groups/<group>/paused/<topic id>/<partition>    a message that could not be handled, and why
    groups/<group>/hub                              the hub whose topics the group reads (G7)
    groups/<group>/assignor                         the assignor of the members that are there
    groups/<group>/sources/<mark of the source>     a source that is no topic: its name, and the id of its checkpoints

and what the groups that read a topic share with its retention, if the topic keeps what is unread (O10):

    topics/<topic id>/start    the first offset of each partition that retention has left
    topics/<topic id>/gate     written by whoever gives a group a checkpoint that may lie before those of all others

All but the members are persistent and never deleted while the group lives: a deleted and re-created key could have an
old version again, and let an old write pass (R4). A member is an incarnation, made anew at every join (G1): a name
that comes back would otherwise find itself the owner of what it lost.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Final, Self

from pxrs.errors import InvalidGroup, RegistryCorrupt

GROUP_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

BY_HAND: Final = ("reset", "import")
"""Who has written a checkpoint, if it was no member but a person."""


TopicPartition = tuple[str, int]
"""The id of a topic or source, and the number of a partition of it."""


class Keys:
    """The keys of one group."""

    def __init__(self, group: str) -> None:
        if not isinstance(group, str) or not GROUP_NAME.fullmatch(group):
            raise InvalidGroup(
                f"group name {group!r}: use up to 100 letters, digits, '.', '_' or '-', a letter or digit first"
            )
        self.group = group
        self.root = f"groups/{group}/"
        self.members = f"{self.root}members/"
        self.leader = f"{self.root}leader"
        self.assignment = f"{self.root}assignment"
        self.owners = f"{self.root}owners/"
        self.checkpoints = f"{self.root}checkpoints/"
        self.paused = f"{self.root}paused/"
        self.home = f"{self.root}hub"
        self.assignor = f"{self.root}assignor"
        self.sources = f"{self.root}sources/"

    def member(self, incarnation: str) -> str:
        return f"{self.members}{incarnation}"

    def owner(self, topic: str, partition: int) -> str:
        return f"{self.owners}{topic}/{partition:05d}"

    def checkpoint(self, topic: str, partition: int) -> str:
        return f"{self.checkpoints}{topic}/{partition:05d}"

    def pause(self, topic: str, partition: int) -> str:
        return f"{self.paused}{topic}/{partition:05d}"


def start_key(topic: str) -> str:
    return f"topics/{topic}/start"


def gate_key(topic: str) -> str:
    return f"topics/{topic}/gate"


def partition_of(key: str) -> TopicPartition:
    """The partition of an owner's, a checkpoint's or a pause's key."""
    _, topic, number = key.rsplit("/", 2)
    return topic, int(number)


@dataclass(frozen=True, slots=True)
class _Record:
    def dump(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def load(cls, key: str, value: bytes) -> Self:
        """Fields that this version does not know are left out: a later one wrote them."""
        try:
            found = json.loads(value)
            return cls(**{name: found[name] for name in cls.__dataclass_fields__ if name in found})
        except (ValueError, TypeError, AttributeError) as error:
            raise RegistryCorrupt(key, f"it is no {cls.__name__.lower()}: {error}") from error


@dataclass(frozen=True, slots=True)
class Member(_Record):
    """Who is there. `topic` is the id of what it reads, `partitions` how many there are."""

    name: str
    topic: str
    topic_name: str
    partitions: int
    host: str = ""
    pid: int = 0
    since: float = 0.0
    """Wall-clock seconds, to be shown."""
    assignor: str = ""
    """The name of its assignor. Empty in records that do not state one: then any goes with it."""
    is_alone: bool = False
    """It takes every partition, and others must stay away: what it keeps of them cannot move (K4)."""
    handover_s: float | None = None
    """How long this member may take to finish what it has in hand of a partition that is to move, before the leader
    takes the partition from it. None in records of version 0.1: then the leader's own time counts."""


@dataclass(frozen=True, slots=True)
class Home(_Record):
    """The hub whose topics a group reads: its id, and where its directory was when this was written, to be shown. It
    counts while the group has members or checkpoints; when it has none, any hub may write its own id here."""

    hub: str = ""
    place: str = ""


@dataclass(frozen=True, slots=True)
class ChosenAssignor(_Record):
    """The assignor of the member that joined last, or tries to. A member joins only by a commit that expects this key
    in a version that names its own assignor: see `MemberProtocol._agree`."""

    assignor: str = ""


@dataclass(frozen=True, slots=True)
class SourceRead(_Record):
    """A source that the group reads and that is no topic of a hub, such as a table. It is written in one commit with
    the first checkpoints under its id, so that two members that address the table differently cannot both begin; and it
    keeps the name for when no member is there."""

    id: str = ""
    """Empty once the group has forgotten the source."""
    name: str = ""
    address: str = ""
    """Where it is, without credentials, to be shown."""
    meaning: str = ""
    """Which rows are in which partition, and what an offset is: with another one, its checkpoints mean nothing."""


@dataclass(frozen=True, slots=True)
class Starts(_Record):
    """Of a topic that keeps what is unread: the first offset of each partition that retention has left, by the
    partition's number as text. Messages before it may be gone at any moment, so no checkpoint may be put there."""

    offsets: dict[str, int] = field(default_factory=dict)

    def of(self, partition: int) -> int:
        return self.offsets.get(str(partition), 0)


@dataclass(frozen=True, slots=True)
class Gate(_Record):
    """Who wrote the gate last, and when; only the version of its key decides anything."""

    by: str = ""
    when: float = 0.0


@dataclass(frozen=True, slots=True)
class Leader(_Record):
    incarnation: str
    term: int


@dataclass(frozen=True, slots=True)
class Assignment(_Record):
    """Which incarnation each partition is meant for, by topic id."""

    generation: int
    targets: dict[str, list[str | None]] = field(default_factory=dict)

    def target(self, topic: str, partition: int) -> str | None:
        targets = self.targets.get(topic, [])
        return targets[partition] if partition < len(targets) else None


@dataclass(frozen=True, slots=True)
class Owner(_Record):
    """Who has a partition; nobody has a free one. The epoch rises with each claim and each release (X9)."""

    incarnation: str | None
    epoch: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class Checkpoint(_Record):
    """The offset of the next message to read (X10), when it was written and by whom (G11)."""

    offset: int
    when: float = 0.0
    by: str = ""
    epoch: int = 0
    failure: str = ""
    """`Paused.failure` of the last pause that this owner wrote. The pause and this field are written by one commit and
    the field is kept by later checkpoints of the owner, so that the owner finds out after a lost reply whether the
    pause was written, also if an administrator has removed it since."""

    def dump(self) -> bytes:
        fields = asdict(self)
        if not self.failure:  # most have none; then the record is as version 0.1 wrote it
            del fields["failure"]
        return json.dumps(fields, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Paused(_Record):
    """A message that could not be handled holds its partition; `skip` is an order to go on behind it."""

    offset: int
    error: str
    """The class and the message of what the handler raised; and of a second error, if dealing with it failed too."""
    when: float = 0.0
    by: str = ""
    skip: bool = False
    error_type: str = ""
    """The class of what the handler raised. Empty in records of version 0.1, as is `traceback`."""
    traceback: str = ""
    """Where it was raised, up to `failures.TRACEBACK_CHARACTERS_MAX` characters."""
    failure: str = ""
    """Id of this failure, made by the member that writes the record; see `Checkpoint.failure`."""
