"""A consumer group under every misfortune that a seed can think of, without a thread, a clock or a store."""

from pxrs.testing.simulator.ghost import Violation
from pxrs.testing.simulator.member import SimulatedMember
from pxrs.testing.simulator.simulation import SOUND, Defects, Simulation, fewest_moves, simulate
from pxrs.testing.simulator.store import SimulatedStore

__all__ = [
    "SOUND",
    "Defects",
    "SimulatedMember",
    "SimulatedStore",
    "Simulation",
    "Violation",
    "fewest_moves",
    "simulate",
]
