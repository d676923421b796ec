"""Brokers, storage nodes and members of etcd that are killed, stopped and cut off under load: no acknowledged message
is lost or doubled, and readers never see the log go back."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("grpc")

from pxrs import registry as registries
from pxrs.cluster.status import read_status
from pxrs.testing.cluster_processes import ClusterProcesses
from pxrs.testing.servers import PostgresServer, ZooKeeperServer
from tests.integration.cluster.chaos import IS_SOAK, ClusterChaos, missing_copies
from tests.integration.cluster.conftest import LEASE_S, NODE_TIMEOUT_S, running_cluster

KINDS = (  # each is a method of ClusterChaos
    "broker_restarted",
    "broker_killed",
    "broker_paused",
    "broker_cut",
    "broker_silent",
    "broker_without_registry",
    "node_restarted",
    "node_killed",
    "node_paused",
    "node_silent",
    "quorum_lost",
    "registry_paused",
)
FAULTS = 40
"""With PXRS_SOAK. `make test` has half of the kinds once, chosen by SEED."""


def half_once(chance: random.Random, kinds: Sequence[str]) -> list[list[str]]:
    """Half of the kinds, each once, in a random order, two at a time where that is possible."""
    left, chosen = chance.sample(kinds, len(kinds) // 2), list[list[str]]()
    while left:
        first = left.pop(0)
        second = next((kind for kind in left if may_meet(first, kind)), None)
        if second is not None:
            left.remove(second)
        chosen.append([first] if second is None else [first, second])
    return chosen


def may_meet(first: str, second: str) -> bool:
    """Whether the faults may last at the same time: one broker always serves, and `quorum_lost` is alone."""
    return "quorum_lost" not in (first, second) and not all(each.startswith("broker") for each in (first, second))


def faults(chance: random.Random, count: int, kinds: Sequence[str]) -> list[list[str]]:
    """Each kind about as often as the others, in a random order, some of them two at a time."""
    rounds = (chance.sample(kinds, len(kinds)) for _ in range(count // len(kinds) + 1))
    chosen: list[list[str]] = []
    for kind in [kind for each in rounds for kind in each][:count]:
        last = chosen[-1] if chosen else []
        if len(last) == 1 and kind not in last and may_meet(last[0], kind) and chance.random() < 0.6:
            last.append(kind)
        else:
            chosen.append([kind])
    return chosen


def run(chaos: ClusterChaos, schedule: list[list[str]]) -> None:
    """Have all faults under load, and judge what the clients have seen."""
    began = time.monotonic()
    chaos.start_clients()
    started = time.monotonic()
    for kinds in schedule:
        chaos.go_on("before")
        chaos.disturb(kinds)
    chaos.go_on("at the end")
    went_on = time.monotonic()
    chaos.finish()
    count = chaos.check_topic()
    found = chaos.check_group(count)
    reads = chaos.check_reads()
    registry, cluster = chaos.registry, chaos.cluster
    chaos.check_processes()
    chaos.eventually(
        lambda: read_status(registry).is_whole, lambda: f"copies are missing: {read_status(registry).shortages[:5]}"
    )
    lacking = missing_copies(registry)
    assert not lacking, chaos.tell(f"the status is whole, and nodes lack entries: {lacking[:5]}")
    assert not cluster.tracebacks(), chaos.tell(f"a process has failed: {cluster.tracebacks()}")
    print(  # noqa: T201
        f"cluster SEED={chaos.seed}: {dict(chaos.faults)}; {found}; {reads.reads} reads, {reads.failed} failed; "
        f"slowest {sorted(chaos.gaps)[-5:]}; {started - began:.1f} s, {went_on - started:.1f} s, "
        f"{time.monotonic() - went_on:.1f} s"
    )


def test_c1_c4_faults_of_every_process_lose_double_and_reorder_nothing(tmp_path: Path) -> None:
    """At the end one member of etcd is killed for good."""
    with (
        running_cluster(3, LEASE_S) as (etcd, cluster, registry),
        ClusterChaos(tmp_path, cluster, registry, etcd, LEASE_S) as chaos,
    ):
        schedule = faults(chaos.random, FAULTS - 1, KINDS) if IS_SOAK else half_once(chaos.random, KINDS)
        run(chaos, [*schedule, ["registry_killed"]])


@pytest.mark.skipif(not IS_SOAK, reason="the registry of the test above is etcd; `make soak` runs the others")
@pytest.mark.parametrize("server", [PostgresServer, ZooKeeperServer])
def test_c1_c4_with_another_registry(server: type[PostgresServer | ZooKeeperServer], tmp_path: Path) -> None:
    with (
        server() as running,
        ClusterProcesses(running.url, lease_s=LEASE_S, node_timeout_s=NODE_TIMEOUT_S) as cluster,
        registries.open(running.url) as registry,
        ClusterChaos(tmp_path, cluster, registry, None, LEASE_S) as chaos,
    ):
        has_proxies = bool(cluster.brokers[0].registry)
        left_out = {"registry_paused"} if has_proxies else {"registry_paused", "broker_without_registry"}
        run(chaos, faults(chaos.random, 20, [kind for kind in KINDS if kind not in left_out]))
