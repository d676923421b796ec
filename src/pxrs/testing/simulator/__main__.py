"""`make sim`: many seeds, or one with its schedule."""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from pxrs.testing.simulator.simulation import Simulation, simulate

TRACE_MAX = 100_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pxrs.testing.simulator")
    parser.add_argument("--seeds", type=int, default=1_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="replay this one and show its schedule")
    parser.add_argument("--failures-max", type=int, default=1)
    options = parser.parse_args()
    return replay(options.seed) if options.seed is not None else sweep(options)


def replay(seed: int) -> int:
    simulation = Simulation(seed, trace=TRACE_MAX)
    try:
        simulation.run()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is shown
        say(*simulation.environment.events)
        say(f"SEED={seed} {type(error).__name__}: {error}")
        if not isinstance(error, AssertionError):
            traceback.print_exc()
        return 1
    say(*simulation.environment.events, f"SEED={seed} passed")
    return 0


def sweep(options: argparse.Namespace) -> int:
    begin = time.perf_counter()
    failures = steps = commits = claims = fences = handed = 0
    for seed in range(options.first, options.first + options.seeds):
        try:
            simulation = simulate(seed)
        except Exception as error:  # noqa: BLE001 - the seed is shown, and replays it
            failures += 1
            say(f"SEED={seed} {type(error).__name__}: {error}")
            if failures >= options.failures_max:
                return 1
            continue
        ghost = simulation.ghost
        steps, commits, claims = steps + simulation.environment.steps, commits + ghost.commits, claims + ghost.claims
        fences, handed = fences + ghost.fences, handed + ghost.handed
    seconds = time.perf_counter() - begin
    say(
        f"{options.seeds:,} schedules, {steps:,} steps, {options.seeds / seconds:,.0f} schedules/s; "
        f"{claims:,} claims, {commits:,} checkpoints, {fences:,} fences, {handed:,} messages; {failures} failed"
    )
    return 1 if failures else 0


def say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
