"""One schedule of a group, by a seed: first `Storm`, with faults, then `Calm`, without.

Simulation(seed).run()      # raises Violation if a rule is broken
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pxrs.group.protocol import MemberProtocol
from pxrs.testing.simulator.calm import Calm
from pxrs.testing.simulator.environment import Alter, Environment
from pxrs.testing.simulator.group import SimulatedGroup
from pxrs.testing.simulator.member import SimulatedMember
from pxrs.testing.simulator.storm import Storm


@dataclass(frozen=True, slots=True)
class Defects:
    """What a test puts in place of the sound parts, to see that the simulator notices."""

    protocol: type[MemberProtocol] = MemberProtocol
    member: type[SimulatedMember] = SimulatedMember
    environment: type[Environment] = Environment
    alter: Alter | None = None
    """Changes an operation as it is sent."""
    incarnation_of: Callable[[str, int], str] | None = None
    """Gives a member's incarnation from its name and a number."""
    counts_anew: bool | None = None
    """Whether versions begin anew when a key is created again; None: as the seed says."""


SOUND: Final = Defects()


class Simulation:
    """One schedule, from the first member to the last check."""

    def __init__(self, seed: int, defects: Defects = SOUND, *, steps: int = 600, trace: int = 0) -> None:
        """
        steps: how many steps the storm has.
        trace: how many of the last events are kept in `environment.events`, to be shown."""
        self._steps_max = steps
        self.environment = defects.environment(
            seed,
            protocol=defects.protocol,
            alter=defects.alter,
            incarnation_of=defects.incarnation_of,
            counts_anew=defects.counts_anew,
            trace=trace,
        )
        self.ghost = self.environment.ghost
        self.group = SimulatedGroup(self.environment, defects.member)
        self.environment.store.on_changed = self.group.wake
        self._storm = Storm(self.environment, self.group)
        self._storm.begin()

    def run(self) -> Simulation:
        """Raises Violation."""
        while self.environment.steps < self._steps_max:
            self._storm.step()
        Calm(self.environment, self.group).run()
        return self


def simulate(seed: int, defects: Defects = SOUND, *, steps: int = 600) -> Simulation:
    """Run one schedule. A Violation says how to replay it."""
    try:
        return Simulation(seed, defects, steps=steps).run()
    except Exception as error:
        error.add_note(f"SEED={seed}  replay: make sim SEED={seed}")
        raise
