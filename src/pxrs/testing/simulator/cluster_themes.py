"""What a schedule of a simulated cluster is rich in.

A mistake in the protocol shows only in schedules in which several unlikely things come together. A seed that does a
little of everything hardly ever has them. So each seed has a theme, which makes some of them frequent:

    mixed      a little of everything
    late       a broker's lease ends while entries are on their way; they arrive after the recovery, or during it
    pipelined  many entries are under way at once, acknowledged out of order; nodes fail and are replaced meanwhile
    moved      copies of closed ledgers are moved from node to node, and garbage is removed, while brokers change
    damaged    disks lose what they had synced, or turn back to an older state; machines lose their power (C7, C8, C9)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from pxrs.cluster.ledgers import Quorum

Rates = tuple[float, ...]
Kinds = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Theme:
    """Tuples are the values that a seed chooses from."""

    name: str
    quorums: tuple[Quorum, ...]
    ticks: Kinds
    """What happens when no message is delivered."""
    faults: Kinds
    stalls: tuple[Kinds, ...]
    """Which kinds of events a stall holds: messages to storage nodes (add, fence, read), their answers, their syncs,
    the removal of garbage, changes of the registry."""
    lost: Rates = (0.0, 0.0, 0.03, 0.1)
    early: Rates = (0.0, 0.0, 0.03)
    """How often a request fails for its sender although its message and reply are only late."""
    unknown: Rates = (0.0, 0.1, 0.3)
    """How often the answer to a commit is lost."""
    slow: Rates = (0.0, 0.1, 0.3)
    """How often something takes so long that everything else goes on meanwhile."""
    has_laggards: bool = False
    """Of each entry one copy, to another machine each time, is under way for long."""
    is_moving: bool = False
    """Copies are moved away from a ledger's node when a recovery has closed it, and back to a node that is about to
    remove it as garbage."""
    stall: Rates = (0.0, 0.5, 1.0)
    trap: Rates = (0.0, 0.03, 0.15)
    """How often a broker's lease ends while an entry is on its way."""
    trap_steps: tuple[int, ...] = (20, 60, 120)
    """For how long the entry is on its way."""
    stall_steps: tuple[int, ...] = (20, 60, 120)
    stall_pause: int = 30
    """How many steps there are between two stalls."""
    burst: Rates = (0.0, 0.3)
    """How often all producers send at the same moment."""
    fault: Rates = (0.1, 0.4, 0.8)
    timeout: float = 0.3
    """How often a writer, when it looks, takes a node that has not answered for failed."""
    spread: tuple[int, ...] = (1, 3, 8, 30)
    """Among how many of the oldest events the next one is chosen."""
    producers: tuple[int, ...] = (2, 3, 5)
    steps: int = 350
    """How long the storm lasts."""
    beyond: float = 0.0
    """In how many seeds more copies are damaged than the quorum allows."""
    harm: Rates = (0.0,)
    """How often the disk of a node is damaged while an entry is on its way, and the broker's lease ends."""
    machines: tuple[int, ...] = (-1, 0, 1, 1, 1, 2)
    """How many more there are than the ensemble has positions. Fewer: positions are empty until another one comes."""


QUORUMS: Final = (
    *(Quorum(3, 3, 2), Quorum(3, 3, 2), Quorum(3, 3, 2), Quorum(4, 3, 2), Quorum(5, 3, 2)),
    *(Quorum(3, 3, 3), Quorum(2, 2, 2), Quorum(3, 2, 2), Quorum(4, 2, 2), Quorum(4, 4, 3), Quorum(1, 1, 1)),
)
MIXED: Final = Theme(
    "mixed",
    QUORUMS,
    ticks=(
        *("broker", "broker", "broker", "producer", "producer", "producer", "reader", "release", "release"),
        *("repair", "garbage", "faults", "faults"),
    ),
    faults=(
        *("crash", "crash", "disk", "disk", "disk", "disk", "lease", "lease", "lease", "broker", "broker", "notice"),
        *("retire", "machine"),
    ),
    stalls=(("add",), ("add", "fence"), ("fence",), ("read",), ("answer",), ("sync",), ("commit",), ("remove",)),
)
LATE: Final = replace(
    MIXED,
    name="late",
    quorums=(Quorum(2, 2, 2), Quorum(2, 2, 2), Quorum(2, 2, 2), Quorum(3, 3, 2), Quorum(4, 3, 2), Quorum(1, 1, 1)),
    stalls=(("add",), ("add", "fence"), ("fence",)),
    lost=(0.0, 0.03),
    early=(0.0,),
    stall=(1.0,),
    trap=(0.3, 0.6),
    fault=(0.05,),
    timeout=0.05,
    spread=(3, 8, 30),
)
PIPELINED: Final = replace(
    MIXED,
    name="pipelined",
    quorums=(Quorum(3, 3, 2), Quorum(3, 3, 2), Quorum(4, 3, 2), Quorum(4, 4, 3)),
    ticks=(*MIXED.ticks, "producer", "broker", "broker"),
    stalls=(("commit",),),
    lost=(0.0, 0.03),
    slow=(0.0, 0.1),
    stall=(1.0,),
    stall_steps=(8, 15, 25),
    stall_pause=5,
    has_laggards=True,
    trap=(0.0,),
    burst=(0.9,),
    fault=(0.1,),
    timeout=0.6,
    spread=(8, 30),
    producers=(5, 8),
    machines=(1, 2),
)
MOVED: Final = replace(
    MIXED,
    name="moved",
    quorums=(Quorum(1, 1, 1), Quorum(1, 1, 1), Quorum(2, 2, 2), Quorum(3, 3, 2), Quorum(3, 2, 2)),
    ticks=(*MIXED.ticks, "repair", "repair", "garbage", "garbage", "garbage"),
    faults=("retire", "retire", "retire", "lease", "crash"),
    stalls=(("remove",), ("remove",), ("add",)),
    slow=(0.0,),
    lost=(0.0,),
    early=(0.0,),
    stall=(1.0,),
    trap=(0.3, 0.5),
    trap_steps=(60, 120),
    fault=(0.5,),
    is_moving=True,
    timeout=0.05,
    machines=(1, 2),
)
DAMAGED: Final = replace(
    MIXED,
    name="damaged",
    quorums=(Quorum(3, 3, 2), Quorum(3, 3, 2), Quorum(3, 3, 2), Quorum(4, 3, 2), Quorum(5, 3, 2), Quorum(4, 4, 3)),
    ticks=(*MIXED.ticks, "garbage", "repair"),
    faults=(
        *("harm", "harm", "harm", "cut", "copy", "copy", "rot", "power", "power all", "kill", "kill"),
        *("lease", "lease", "broker", "crash", "disk", "notice"),
    ),
    stalls=(("add",), ("read",), ("read",), ("fence",), ("read", "fence"), ("answer",), ("sync",)),
    lost=(0.0, 0.03),
    early=(0.0,),
    slow=(0.0, 0.1),
    trap=(0.0, 0.1),
    harm=(0.5, 1.0),
    steps=850,
    fault=(0.05, 0.3),
    timeout=0.02,
    beyond=0.25,
    machines=(0, 0, 1, 1, 2),
)
THEMES: Final = (MIXED, MIXED, LATE, LATE, PIPELINED, MOVED, DAMAGED, DAMAGED)
