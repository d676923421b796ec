"""Consumer groups by seed: whatever fails and whenever, the rules of the simulator's ghost hold (X3 to X11, G1 to G9).

`make sim SEEDS=10000` runs more of them, `make sim SEED=n` shows the schedule of one.
"""

from __future__ import annotations

import functools
import os

import pytest

from pxrs.testing.simulator import Simulation, simulate

SEEDS = 1_000 if os.environ.get("PXRS_SOAK") else 64
PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_rules_hold_after_every_step_and_the_group_comes_to_rest(part: int) -> None:
    for seed in range(part, SEEDS, PARTS):
        simulate(seed)


def test_a_seed_replays_exactly() -> None:
    for seed in range(3):
        events = [list(Simulation(seed, trace=100_000).run().environment.events) for _ in range(2)]
        assert events[0] == events[1]


@functools.cache
def some_schedules() -> list[Simulation]:
    """Simulations whose statistics the tests below look at."""
    return [simulate(seed) for seed in range(1_000, 1_030)]


def test_schedules_reach_what_they_are_for() -> None:
    """A simulator that never gets anywhere would find nothing either."""
    ghosts = [each.ghost for each in some_schedules()]
    assert sum(ghost.claims for ghost in ghosts) > 10 * len(ghosts)
    assert sum(ghost.commits for ghost in ghosts) > 20 * len(ghosts)
    assert sum(ghost.handed for ghost in ghosts) > 20 * len(ghosts)
    assert sum(ghost.fences for ghost in ghosts) > 0


def test_some_schedules_have_several_topics_and_members_that_read_different_ones() -> None:
    several = [each for each in some_schedules() if len(each.environment.topics) > 1]
    assert len(several) > 5
    assert any(each.environment.topic_settings.sets_differ for each in several)
    assert any(not each.environment.topic_settings.sets_differ for each in several)
    for each in several:
        owned = {topic for topic, _ in each.ghost.owners}
        assert len(owned) > 1, f"only {owned} were claimed with the seed {each.environment.seed}"
