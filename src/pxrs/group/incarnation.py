"""One incarnation of a member: what it was given when it joined, and what it owns. No thread, no clock, no registry.

`Joining` (`group/joining.py`), `Committing` (`group/committing.py`) and `MemberProtocol` (`group/protocol.py`) add the
procedures: generators that yield one registry operation at a time (`registry/steps.py`), so that the same code runs on
a real registry and in the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final, Protocol

from pxrs.group.checkpoints import Holding
from pxrs.group.foreign import Foreign
from pxrs.group.lane import Lane
from pxrs.group.records import Home, Keys, Member

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
    """The hub that the topic is of; None for a source that belongs to none, which is not checked."""
    foreign: Foreign | None = None
    """The source that is read, if it is no topic of a hub; otherwise None."""
    keeps_unread: bool = False
    """Whether the topic has `keep_unread`: then starts are written together with the gate."""
    former: Collection[str] = ()
    """Earlier incarnations of the same member, which may be listed until the store has noticed that they are gone."""
    sees_all: bool = False
    """Whether the member reads and watches all members and targets although it does not lead: a bounded reader ends
    only when everything else is meant for others that are there."""
    held: dict[int, Holding] = field(default_factory=dict)
    """The partitions that this member owns, by number."""
