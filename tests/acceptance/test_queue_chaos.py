"""Real processes at the queues of every store, killed, stopped and woken at random under load."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pxrs.testing.queue_worker import DONE, LOG, NUMBERS
from pxrs.testing.servers import EtcdServer, PostgresServer, ZooKeeperServer
from tests.acceptance.queue_chaos import (
    Load,
    QueueChaos,
    check_jobs,
    check_log,
    create_queues,
    given_up,
    values,
)

STORES = ["file", "sqlite", "postgresql", "etcd", "zookeeper"]
SEED = int(os.environ.get("SEED", random.randrange(1_000_000)))
CHOSEN = STORES if os.environ.get("PXRS_SOAK") else ["file", STORES[1 + SEED % (len(STORES) - 1)]]
"""Where random kills are tried; with PXRS_SOAK on every store."""
STRICT_COUNT, STRICT_KILLS = (600, 10) if os.environ.get("PXRS_SOAK") else (120, 3)
STRICT_TTL_S = 0.5
"""As short as can be: when the one whose turn it is dies, the others wait for so long."""


@pytest.fixture(scope="module", params=STORES)
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """One for all tests: the address of a server, or which of the two stores needs none."""
    with ExitStack() as stack:
        match request.param:
            case "postgresql":
                yield stack.enter_context(PostgresServer(settings={"fsync": "off"})).url  # it is not it that is killed
            case "etcd":
                yield stack.enter_context(EtcdServer()).url
            case "zookeeper":
                yield stack.enter_context(ZooKeeperServer()).url
            case name:
                yield name


@pytest.fixture
def registry(server: str, tmp_path: Path) -> str:
    """A new one."""
    match server:
        case "file":
            return "-"
        case "sqlite":
            return f"sqlite:///{tmp_path}/registry.db"
    return f"{server}{'&' if '?' in server else '?'}namespace={tmp_path.name}"


def test_q_random_kills_and_stops_leave_each_item_committed_once_or_dead(
    request: pytest.FixtureRequest, registry: str, tmp_path: Path
) -> None:
    if request.node.callspec.params["server"] not in CHOSEN:
        pytest.skip(f"runs on another store with SEED={SEED}")
    with QueueChaos(tmp_path, registry, ["coins", "jobs", "numbers"]) as chaos:
        began = time.monotonic()
        hub = chaos.hub
        create_queues(hub)
        load = Load(chaos)
        chaos.go_on(load)
        went_on = time.monotonic()
        chaos.calm_down(
            lambda: (
                len(values(hub, DONE)) + len(given_up(hub)) >= len(load.jobs) and len(values(hub, LOG)) >= load.numbers
            ),
            lambda: f"not worked off: {[(queue.name, queue.depth()) for queue in hub.queues()]}",
        )
        calm = time.monotonic()
        chaos.end()
        chaos.check_nothing_is_held()
        chaos.check_outcomes_are_removed()
        chaos.check_coins()
        chaos.check_fence()
        chaos.check_losses()
        deliveries = chaos.check_deliveries()
        dead = check_jobs(chaos, load.jobs, deliveries)
        check_log(chaos, load.numbers)
        outcomes = Counter(attempt.outcome or "cut off" for attempt in chaos.attempts() if attempt.taken)
        again = sum(delivery.deliveries > 1 for delivery in deliveries)
        print(  # noqa: T201
            f"queues SEED={chaos.seed}: {chaos.kills} kills, {chaos.stops} stops, {len(chaos.workers)} workers, "
            f"{len(load.jobs)} jobs, {load.numbers} numbers, {len(deliveries)} deliveries, {again} of them again, "
            f"{dead} dead; {dict(outcomes)}; {len(chaos.fenced)} fenced; "
            f"{went_on - began:.1f} s, {calm - went_on:.1f} s, {time.monotonic() - calm:.1f} s"
        )


@pytest.mark.sampled(5)
def test_q_a_strict_queue_is_worked_off_in_order_by_several_workers_that_crash(registry: str, tmp_path: Path) -> None:
    with QueueChaos(tmp_path, registry, ["numbers"], STRICT_TTL_S) as chaos:
        hub = chaos.hub
        create_queues(hub)
        hub.queue(NUMBERS).put_many(f"{number}" for number in range(STRICT_COUNT))
        # Each when some more numbers have arrived, the last before the last of them have.
        moments = sorted(chaos.random.sample(range(STRICT_COUNT - 20), STRICT_KILLS))
        for moment in moments:

            def has_come(moment: int = moment) -> bool:
                chaos.fill_up()
                return len(values(hub, LOG)) > moment and bool(chaos.working())

            chaos.eventually(has_come, lambda: f"the numbers stay where they are: {hub.queue(NUMBERS).depth()}")
            chaos.event("kill")
        chaos.calm_down(
            lambda: len(values(hub, LOG)) >= STRICT_COUNT, lambda: f"not worked off: {hub.queue(NUMBERS).depth()}"
        )
        chaos.end()
        chaos.check_nothing_is_held()
        chaos.check_outcomes_are_removed()
        chaos.check_losses()
        deliveries = chaos.check_deliveries()
        check_log(chaos, STRICT_COUNT)
        workers = {line.split()[1] for line in values(hub, LOG)}
        print(  # noqa: T201
            f"strict SEED={chaos.seed}: {STRICT_COUNT} numbers by {len(workers)} workers, {chaos.kills} kills, "
            f"{len(deliveries)} deliveries"
        )
