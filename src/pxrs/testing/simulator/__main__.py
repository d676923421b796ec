"""`make sim`: many seeds, or one with its schedule."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from pxrs.testing.simulator.cluster_simulation import ClusterSimulation, simulate_cluster
from pxrs.testing.simulator.simulation import Simulation, simulate

TRACE_MAX = 100_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pxrs.testing.simulator")
    parser.add_argument("--seeds", type=int, default=1_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="replay this one and show its schedule")
    parser.add_argument("--failures-max", type=int, default=1)
    parser.add_argument("--of", choices=("groups", "clusters", "both"), default="both", help="what to simulate")
    options = parser.parse_args()
    kinds = ("groups", "clusters") if options.of == "both" else (options.of,)
    if options.seed is not None:
        return max(replay(options.seed, kind) for kind in kinds)
    return max(sweep(options) if kind == "groups" else sweep_clusters(options) for kind in kinds)


def replay(seed: int, kind: str) -> int:
    simulation: Simulation | ClusterSimulation
    if kind == "groups":
        simulation = Simulation(seed, trace=TRACE_MAX)
        events = simulation.environment.events
    else:
        simulation = ClusterSimulation(seed, trace=TRACE_MAX)
        events = simulation.events
    try:
        simulation.run()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is shown
        say(*events)
        say(f"{kind} SEED={seed} {type(error).__name__}: {error}")
        if not isinstance(error, AssertionError):
            traceback.print_exc()
        return 1
    say(*events, f"{kind} SEED={seed} passed")
    return 0


def sweep_clusters(options: argparse.Namespace) -> int:
    begin = time.perf_counter()
    failures = steps = 0
    counts: Counter[str] = Counter()
    for seed in range(options.first, options.first + options.seeds):
        try:
            simulation = simulate_cluster(seed)
        except Exception as error:  # noqa: BLE001 - the seed is shown, and replays it
            failures += 1
            say(f"clusters SEED={seed} {type(error).__name__}: {error}")
            if failures >= options.failures_max:
                return 1
            continue
        steps += simulation.steps
        counts.update(simulation.ghost.counts)
        counts.update(simulation.counts)
    seconds = time.perf_counter() - begin
    say(
        f"{options.seeds:,} schedules of clusters, {steps:,} steps, {options.seeds / seconds:,.0f} schedules/s; "
        + ", ".join(f"{count:,} {what}" for what, count in counts.items())
        + f"; {failures} failed"
    )
    return 1 if failures else 0


def sweep(options: argparse.Namespace) -> int:
    begin = time.perf_counter()
    failures = steps = commits = claims = fences = handed = 0
    for seed in range(options.first, options.first + options.seeds):
        try:
            simulation = simulate(seed)
        except Exception as error:  # noqa: BLE001 - the seed is shown, and replays it
            failures += 1
            say(f"groups SEED={seed} {type(error).__name__}: {error}")
            if failures >= options.failures_max:
                return 1
            continue
        ghost = simulation.ghost
        steps, commits, claims = steps + simulation.environment.steps, commits + ghost.commits, claims + ghost.claims
        fences, handed = fences + ghost.fences, handed + ghost.handed
    seconds = time.perf_counter() - begin
    say(
        f"{options.seeds:,} schedules of groups, {steps:,} steps, {options.seeds / seconds:,.0f} schedules/s; "
        f"{claims:,} claims, {commits:,} checkpoints, {fences:,} fences, {handed:,} messages; {failures} failed"
    )
    return 1 if failures else 0


def say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
