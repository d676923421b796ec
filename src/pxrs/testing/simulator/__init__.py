"""The simulator: runs a consumer group through seeded schedules of failures, without threads, a real clock or a
store."""

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
