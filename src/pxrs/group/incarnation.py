"""One incarnation of a member: what it was given when it joined, and what it owns. No thread, no clock, no registry.

`Joining` (`group/joining.py`), `Committing` (`group/committing.py`) and `MemberProtocol` (`group/protocol.py`) add the
procedures: generators that yield one registry operation at a time (`registry/steps.py`), so that the same code runs on
a real registry and in the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from pxrs.group.checkpoints import Holding
from pxrs.group.foreign import Foreign
from pxrs.group.lane import Lane
from pxrs.group.records import Home, Keys, Member, Owner, Target
from pxrs.log.numbering import Numbering, TopicPartition
from pxrs.model import TopicPartition as NamedPartition

ATTEMPTS_MAX: Final = 100
"""How often a commit is tried again after a conflict with another one."""
TAKEN: Final = "another member owns it, or the leader or an administrator has taken it from this member"
LEASE_ENDED: Final = "the lease of this member ended before it could be renewed"
RELEASED: Final = "this member released it before all that was handed out was done"


class Hooks(Protocol):
    """Called in the middle of a procedure, so an implementation only notes what happened: it calls neither the protocol
    nor code of the user's, which may call the member. That code runs when the procedure is over: see
    `GroupMember.procedure`."""

    def assigned(self, partition: int, epoch: int, offset: int) -> Lane: ...

    def revoked(self, lane: Lane) -> None:
        """The partition will be released when nothing of it is in hand."""

    def released(self, lane: Lane) -> None: ...

    def resumed(self, lane: Lane) -> None:
        """The partition stays after all: `is_stopping` is cleared as soon as this returns."""

    def lost(self, lane: Lane) -> None: ...


class Reports:
    """Told of what the registry has confirmed, for events: see `group/reporting.py`. This one tells nobody. Its methods
    are called in the middle of a procedure, and must neither block nor call the protocol."""

    def owner_changed(self, change: str, place: TopicPartition, before: Owner, after: Owner) -> None:
        """This member has written an owner key. change: "claimed", "released" or "fenced"."""

    def is_stored(self, place: TopicPartition, epoch: int) -> bool:
        """Whether the event of the claim with this epoch is stored."""
        return False

    def targets_written(self, targets: Mapping[str, Target]) -> None:
        """As the leader, this member has written these targets, by incarnation."""

    def checkpoint_refused(self, lane: Lane) -> None:
        """A checkpoint of this lane was refused, because the partition was taken from this member."""


@dataclass
class Incarnation:
    keys: Keys
    incarnation: str
    member: Member
    hooks: Hooks
    start_of: Callable[[int, int], int]
    """The first offset of a partition without a checkpoint, given its number and the first offset that retention has
    left."""
    wall: Callable[[], float]
    """The time of day, in seconds since 1970."""
    keys_max: int
    """How many keys one commit may name."""
    handover_s: float
    home: Home | None = None
    """The hub that the topics are of; None for a source that belongs to none, which is not checked."""
    foreign: Mapping[str, Foreign] = field(default_factory=dict)
    """The sources that are read and are no topics of a hub, by id."""
    keeps_unread: Collection[str] = ()
    """The ids of the topics with `keep_unread`: their starts are written together with the gate."""
    former: Collection[str] = ()
    """Earlier incarnations of the same member, which may be listed until the store has noticed that they are gone."""
    named: Callable[[Iterable[int]], list[int] | list[NamedPartition]] = list
    """These partitions as errors name them: see `Source.named`."""
    sees_all: bool = False
    """Whether the member reads and watches all members and targets although it does not lead: a bounded reader ends
    only when everything else is meant for others that are there."""
    reports: Reports = field(default_factory=Reports)
    held: dict[int, Holding] = field(default_factory=dict)
    """The partitions that this member owns, by number: see `numbering`."""
    meets_alone: bool = False
    """Whether a member that must be alone with its own topics (`Member.is_alone`) was there when this one joined."""
    pinned: set[str] = field(default_factory=set)
    """The ids of the topics of which every partition was found to have a checkpoint: see `Joining.pin`."""
    numbering: Numbering = field(init=False)
    """How this member numbers the partitions of all topics that it reads."""

    def __post_init__(self) -> None:
        self.numbering = self.member.numbering

    def place(self, number: int) -> TopicPartition:
        """The topic id and partition that one of this member's numbers stands for. Keys and records contain these."""
        return self.numbering.place(number)

    def numbers_of(self, places: Iterable[TopicPartition]) -> set[int]:
        """The numbers of these partitions. Partitions that this member does not read are left out."""
        found = (self.numbering.number_of(*place) for place in places)
        return {number for number in found if number is not None}
