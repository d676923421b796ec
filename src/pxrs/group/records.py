"""What a group keeps in the registry: its keys, and the values under them, as JSON that a person can read.

    groups/<group>/members/<incarnation>               ephemeral: the member is there; what it reads
    groups/<group>/leader                              who writes the targets, and its term
    groups/<group>/targets/<incarnation>               which partitions this member should own
    groups/<group>/owners/<topic id>/<partition>       who owns it, under which epoch: its version is the fence
    groups/<group>/checkpoints/<topic id>/<partition>  the offset of the next message to read
    groups/<group>/starts/<topic id>                   how many partitions have had their first checkpoint written (G6)
    groups/<group>/pinning/<topic id>                  ephemeral: the member that is writing these
    groups/<group>/paused/<topic id>/<partition>       a message that could not be handled, and why
    groups/<group>/hub                                 the hub whose topics the group reads (G7)
    groups/<group>/assignor                            the assignor of the members that are there
    groups/<group>/sources/<mark of the source>        a source that is no topic, and the id of its checkpoints

and, for topics with `keep_unread`, what the groups that read a topic share with its retention (O10):

    topics/<topic id>/start    the first offset of each partition that retention has left
    topics/<topic id>/gate     written by whoever gives a group a checkpoint that may lie before those of all others

The keys of owners, checkpoints, the leader and the hub guard other writes, so they are persistent and never deleted
while the group lives: a key that is deleted and made again could have an old version again, and an old write that
expects it would be accepted (R4). A target is deleted only when its incarnation is gone, and an incarnation never comes
back: a member gets a new one at every join (G1). With a name in place of the incarnation, a member that was restarted
would find itself the owner of what it lost.

Layouts. Up to version 0.2.dev1 (layout 1) the targets of all members were in one key, `groups/<group>/assignment`. A
member of that version does not know its target here, and this version does not read it there, so the two cannot share a
group: see `Member.layout` and docs/decisions/0030-a-target-for-each-member.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, NamedTuple, Self

from pxrs.errors import InvalidGroup, RegistryCorrupt
from pxrs.log.numbering import Numbering, TopicPartition
from pxrs.registry.record import Record

GROUP_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

BY_HAND: Final = ("reset", "import")
"""The values of `Checkpoint.by` of checkpoints that an administrator wrote."""


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
        self.targets = f"{self.root}targets/"
        self.legacy_assignment = f"{self.root}assignment"
        self.owners = f"{self.root}owners/"
        self.checkpoints = f"{self.root}checkpoints/"
        self.paused = f"{self.root}paused/"
        self.home = f"{self.root}hub"
        self.assignor = f"{self.root}assignor"
        self.sources = f"{self.root}sources/"

    def member(self, incarnation: str) -> str:
        return f"{self.members}{incarnation}"

    def target(self, incarnation: str) -> str:
        return f"{self.targets}{incarnation}"

    def starts(self, topic: str) -> str:
        return f"{self.root}starts/{topic}"

    def pinning(self, topic: str) -> str:
        return f"{self.root}pinning/{topic}"

    def owners_of(self, topic: str) -> str:
        return f"{self.owners}{topic}/"

    def checkpoints_of(self, topic: str) -> str:
        return f"{self.checkpoints}{topic}/"

    def pauses_of(self, topic: str) -> str:
        return f"{self.paused}{topic}/"

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
    """The partition that an owner key, a checkpoint key or a pause key belongs to."""
    _, topic, number = key.rsplit("/", 2)
    return topic, int(number)


PAST_MAX: Final = 8
"""How many earlier owners `Owner.past` has at most: so many changes in a row may lose their events."""
LAYOUT: Final = 2
"""The layout of the keys that this version writes: see the docstring of this module."""
_LAYOUT_MARK: Final = re.compile(r"(.*)@([0-9]+)", re.DOTALL)


def _marked(assignor: str) -> str:
    """The assignor's name as it is stored. A member of layout 1 takes it for another assignor than its own, and so
    refuses to join members of this version."""
    return f"{assignor}@{LAYOUT}"


def _unmarked(stored: str) -> tuple[str, int]:
    """The assignor's name, and the layout of whoever stored it."""
    found = _LAYOUT_MARK.fullmatch(stored)
    return (stored, 1) if found is None else (found[1], int(found[2]))


class ReadTopic(NamedTuple):
    """A topic or source that a member reads."""

    id: str
    name: str
    partitions: int
    """How many it has."""


@dataclass(frozen=True, slots=True)
class Member(Record):
    """A member. `topic` is the id of what it reads, `partitions` the number of its partitions; a member that reads
    several topics names the others in `further`."""

    name: str
    topic: str
    topic_name: str
    partitions: int
    host: str = ""
    pid: int = 0
    since: float = 0.0
    """When the member joined, in wall-clock seconds; only to be shown."""
    assignor: str = ""
    """The name of its assignor. Empty in records that do not state one: then any goes with it. In the registry the name
    is followed by `@` and the layout."""
    is_alone: bool = False
    """Whether the member must own every partition, and no other member of its topic may join, because its state cannot
    move (K4)."""
    handover_s: float | None = None
    """How long this member may take to finish what it has in hand of a partition that is to move, before the leader
    takes the partition from it. None in records of version 0.1: then the leader's own time counts."""
    layout: int = LAYOUT
    """The layout of the keys that the member reads and writes. A member of another layout is given no partitions, and
    does not share a group with this version."""
    further: tuple[ReadTopic, ...] = ()
    """The topics that the member reads beside `topic`. Not stored if there are none."""

    @classmethod
    def reading(cls, name: str, topics: Sequence[ReadTopic], **fields: Any) -> Self:
        """The record of a member that reads these topics, at least one."""
        (id, topic_name, partitions), *further = topics
        return cls(name, id, topic_name, partitions, further=tuple(further), **fields)

    @property
    def reads(self) -> tuple[ReadTopic, ...]:
        """All topics that the member reads."""
        return ReadTopic(self.topic, self.topic_name, self.partitions), *self.further

    @property
    def topics(self) -> frozenset[str]:
        """The ids of all topics that the member reads."""
        return frozenset(each.id for each in self.reads)

    @property
    def numbering(self) -> Numbering:
        """How the member numbers the partitions of all topics that it reads."""
        return Numbering((each.id, each.partitions) for each in self.reads)

    @property
    def is_of_this_layout(self) -> bool:
        return self.layout == LAYOUT

    def dump(self) -> bytes:
        fields = {**asdict(self), "assignor": _marked(self.assignor)}
        del fields["layout"]
        if not self.further:
            del fields["further"]
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def load(cls, key: str, value: bytes) -> Self:
        stored = super(Member, cls).load(key, value)
        assignor, layout = _unmarked(stored.assignor)
        try:
            further = tuple(ReadTopic(*each) for each in stored.further)
        except TypeError as error:
            raise RegistryCorrupt(key, f"not a valid member record: {error}") from error
        return replace(stored, assignor=assignor, layout=layout, further=further)


@dataclass(frozen=True, slots=True)
class Home(Record):
    """The hub whose topics a group reads: its id, and where its directory was when this was written, to be shown. It
    counts while the group has members or checkpoints; when it has none, any hub may write its own id here."""

    hub: str = ""
    place: str = ""


@dataclass(frozen=True, slots=True)
class ChosenAssignor(Record):
    """The assignor of the member that joined last, or tries to. A member joins only by a commit that expects this key
    in a version that names its own assignor: see `Joining._agree`."""

    assignor: str = ""
    """With the layout, as in the records of members."""
    is_agreed: bool = False
    """Whether all members that were there when this was written have this assignor, so that one that finds it here need
    not look at them."""

    @classmethod
    def of(cls, assignor: str, *, is_agreed: bool) -> ChosenAssignor:
        return cls(_marked(assignor), is_agreed)

    def names(self, assignor: str) -> bool:
        return self.assignor == _marked(assignor)


@dataclass(frozen=True, slots=True)
class SourceRead(Record):
    """A source that the group reads and that is no topic of a hub, such as a table. It is written in one commit with
    the first checkpoints under its id, so that two members that address the table differently cannot both begin; and it
    keeps the name for when no member is there."""

    id: str = ""
    """Empty once the group has forgotten the source."""
    name: str = ""
    address: str = ""
    """The address without credentials, to be shown."""
    meaning: str = ""
    """Which rows are in which partition, and what an offset is, as a text. With another meaning, the checkpoints cannot
    be used."""


@dataclass(frozen=True, slots=True)
class Starts(Record):
    """The first offset of each partition that retention has left, of a topic with `keep_unread`, by the partition's
    number as text. Messages before it may be removed at any moment, so no checkpoint may be put there."""

    offsets: dict[str, int] = field(default_factory=dict)

    def of(self, partition: int) -> int:
        return self.offsets.get(str(partition), 0)


@dataclass(frozen=True, slots=True)
class Gate(Record):
    """The last writer of the gate, and when; only the version of its key matters."""

    by: str = ""
    when: float = 0.0


@dataclass(frozen=True, slots=True)
class Leader(Record):
    incarnation: str
    term: int


@dataclass(frozen=True, slots=True)
class Target(Record):
    """What the leader wants one member to own: written by the leader, and by whoever takes a partition from it."""

    generation: int = 0
    """Rises with every rebalance. Targets of two generations may be there at a time: see `MemberProtocol.look`."""
    partitions: dict[str, list[int]] = field(default_factory=dict)
    """The numbers of the partitions, in order, by topic id."""
    taken: int = 0
    """How often partitions were taken from this member while it lived, by the leader's fence or an administrator.
    Raised in the commit that takes them. When the member sees another number than before, it reads all its owner
    keys."""

    def numbers(self, topic: str) -> list[int]:
        return self.partitions.get(topic, [])


@dataclass(frozen=True, slots=True)
class LegacyAssignment(Record):
    """What is read of `groups/<group>/assignment`, which held the targets of all members in layout 1. The first leader
    of this layout deletes the key."""

    generation: int = 0


@dataclass(frozen=True, slots=True)
class Pinned(Record):
    """How many partitions of a topic have a checkpoint of the group: those from 0 on. A member that finds all of them
    counted here does not look at the checkpoints. 0 once the group has been deleted."""

    partitions: int = 0


class Earlier(NamedTuple):
    """The owner of a partition during an earlier epoch, as `Owner.past` and events name it."""

    epoch: int
    incarnation: str | None
    name: str


@dataclass(frozen=True, slots=True)
class Owner(Record):
    """The owner of a partition; None if it is free. The epoch rises with each claim and each release (X9)."""

    incarnation: str | None
    epoch: int
    name: str = ""
    past: tuple[Earlier, ...] = field(default=(), compare=False)
    """The owners of the epochs before this one, the last one last, as far as their events are not known to be stored;
    at most `PAST_MAX`. Only events are made of it: a process that dies after it has changed the owner, and before it
    has stored the event of that, leaves the change here for the event of the next one (`pxrs.events.timeline`). Not
    stored if there are none."""

    def history(self, *, is_stored: bool = False) -> tuple[Earlier, ...]:
        """The `past` of the owner that follows this one. is_stored: the event of this owner's claim is stored, and with
        it what was before the claim."""
        if not self.epoch:
            return ()
        return (*(() if is_stored else self.past), Earlier(self.epoch, self.incarnation, self.name))[-PAST_MAX:]

    def dump(self) -> bytes:
        fields = asdict(self)
        if not self.past:
            del fields["past"]
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def load(cls, key: str, value: bytes) -> Self:
        stored = super(Owner, cls).load(key, value)
        if not stored.past:
            return stored
        try:
            return replace(stored, past=tuple(Earlier(*each) for each in stored.past))
        except TypeError as error:
            raise RegistryCorrupt(key, f"not a valid owner record: {error}") from error


NOBODY: Final = Owner(None, 0)
"""The owner of a partition that has no owner key, because no member has ever claimed it."""


@dataclass(frozen=True, slots=True)
class Checkpoint(Record):
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
class Paused(Record):
    """A message that could not be handled pauses its partition; `skip` means: go on behind it."""

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
