"""Drivers that die, or were thought dead, at each of their steps: every message is published once."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pxrs.log.producers import Producers
from pxrs.testing import faults
from tests.integration.publishing.driver import (
    SEED,
    SOAK,
    STEPS_MAX,
    Crash,
    Driver,
    Held,
    Places,
    Steps,
    crash,
    next_driver,
    settle,
    step_count,
    take_over,
    try_every_crash,
    try_schedules,
)

pytestmark = pytest.mark.sampled(2, of="module")


def test_k1_a_driver_may_die_at_every_step(places: Places, is_one_hub: bool) -> None:
    assert try_every_crash(places, None, is_one_hub, steps_max=STEPS_MAX) > 20


def test_k1_a_driver_may_die_at_every_step_with_a_log_that_forgets_every_producer_at_once(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Producers.__init__, "__defaults__", (0, -1))
    assert try_every_crash(places, steps_max=STEPS_MAX) > 20


def test_k3_another_member_goes_on_exactly_where_a_dead_driver_was(places: Places) -> None:
    try_every_crash(places, successor=take_over, steps_max=STEPS_MAX)


def test_k1_drivers_may_die_one_after_the_other(places: Places) -> None:
    count = step_count(places())
    chance = random.Random(SEED)
    for number in range(60 if SOAK else 8):
        place = places()
        for _ in range(4):
            try:
                Driver(place, Steps(chance.randrange(1, count), crash), chance.randrange(1, 9), chance.random()).run()
            except Crash:
                continue
        Driver(place, tasks=chance.randrange(1, 9), seed=number).run()
        place.check(f"SEED={SEED} {number}")
        place.close()


def test_k1_a_process_may_be_killed_at_any_system_call(places: Places) -> None:
    """Within a step too: while it makes, names and removes files."""
    numbers = itertools.count()

    def run(act: Callable[[str], None], at: int | None) -> int:
        place = places()

        def work() -> None:
            place.open()  # the parent's is not for it
            with faults.counted(faults.Steps(at, act)) as steps:
                Driver(place).run()
            Path(place.url, "steps").write_text(str(steps.count))

        with faults.child(work) as pid:
            code = faults.wait_exit(pid)
        if at is None:
            assert code == 0
            return int(Path(place.url, "steps").read_text())
        assert code in (-signal.SIGKILL, 0)  # it may come to its end with a call or two less
        next_driver(next(numbers))(place)
        place.check(f"SEED={SEED}: killed at call {at}")
        place.close()
        return at

    count = run(lambda name: None, None)
    for at in random.Random(SEED).sample(range(1, count + 1), count if SOAK else 8):
        run(faults.kill, at)


def test_k1_a_zombie_goes_on_when_its_successor_is_done(places: Places, is_one_hub: bool) -> None:
    count = step_count(places(None, is_one_hub))
    for at in range(1, count) if SOAK else random.Random(SEED).sample(range(1, count), STEPS_MAX or 1):
        place = places(None, is_one_hub)
        zombie = Held(place, at)
        next_driver(at)(place)
        zombie.go_on()
        settle(place)
        place.check(f"SEED={SEED}: held at step {at}")
        place.close()


def test_k1_two_drivers_at_once(places: Places, is_one_hub: bool) -> None:
    for only in ("registry", "log"):
        try_schedules(places, is_one_hub, only)
