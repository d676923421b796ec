"""A consumer group under the faults that a seed draws, without a thread, a clock or a real store.

The simulator runs the procedures of `pxrs.group` (generators that yield one registry operation at a time) over a
simulated store. It can stop a member between any two operations, lose a reply, apply a write long after its sender has
stopped waiting, and let members crash. After every step it compares what has happened with the rules of the protocol.
The same seed always gives the same schedule: `make sim SEED=n` shows it.

Start with `simulation.py`, which puts the parts together:

    settings      the sizes and rates of one schedule, drawn from the seed
    store         the registry: requests that are sent, applied and answered at different moments
    ghost         what has really happened, and the rules
    environment   what the members share: clock, store, ghost, random numbers, late writes
    connection    the request that a member has under way
    consumer      a member's messages
    member        a member: which procedure it performs next, and what follows from the result
    retention, admin    those who are no members: they move a topic's start, reset checkpoints, retry messages
    group         the members
    storm, calm   a schedule's first part, with faults, and its second part, without
    scale         what a rebalance costs a large group; nothing fails there

Queues have a simulator of their own (`queue_simulation.py`), and so have whole clusters, on the pure modules of
`pxrs.cluster` (`cluster_simulation.py`):

    cluster_themes      what a schedule is rich in
    cluster_schedule    the choices of a seed, the events that are to come, the network, the registry
    cluster_machine     a storage node: its journal and disk, crashes, garbage
    cluster_broker      a broker: claims, recovers, replays, writes
    cluster_tending     producers, readers, repairs, retention, the deletion of a topic
    cluster_ghost       what has really happened, and the rules
"""

from pxrs.testing.simulator.calm import fewest_moves
from pxrs.testing.simulator.environment import Environment
from pxrs.testing.simulator.ghost import Violation
from pxrs.testing.simulator.member import SimulatedMember
from pxrs.testing.simulator.simulation import SOUND, Defects, Simulation, simulate
from pxrs.testing.simulator.store import SimulatedStore

__all__ = [
    "SOUND",
    "Defects",
    "Environment",
    "SimulatedMember",
    "SimulatedStore",
    "Simulation",
    "Violation",
    "fewest_moves",
    "simulate",
]
