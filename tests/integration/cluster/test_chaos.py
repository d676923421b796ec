"""Brokers, storage nodes and members of etcd that are killed, stopped and cut off under load: no acknowledged message
is lost or doubled, and readers never see the log go back."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

pytest.importorskip("grpc")

from pxrs.registry.contract import Registry
from pxrs.testing.cluster_processes import ClusterProcesses
from pxrs.testing.servers import EtcdCluster
from tests.integration.cluster.chaos import IS_SOAK, ClusterChaos, missing_copies
from tests.integration.cluster.conftest import LEASE_S

KINDS = (
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
    "registry_paused",
)
FAULTS = 100 if IS_SOAK else 10


def faults(chance: random.Random, count: int) -> list[list[str]]:
    """Each kind about as often as the others, in a random order, some of them two at a time; at the end a member of
    etcd that is gone for good. Of two at a time at most one concerns brokers: there is always one that serves."""
    kinds = [kind for _ in range(count // len(KINDS) + 1) for kind in chance.sample(KINDS, len(KINDS))][: count - 1]
    chosen: list[list[str]] = []
    for kind in kinds:
        last = chosen[-1] if chosen else []
        is_apart = not (kind.startswith("broker") and last and last[0].startswith("broker"))
        if len(last) == 1 and kind not in last and is_apart and chance.random() < 0.6:
            last.append(kind)
        else:
            chosen.append([kind])
    return [*chosen, ["registry_killed"]]


def test_c1_c4_faults_of_every_process_lose_double_and_reorder_nothing(
    etcd: EtcdCluster, cluster: ClusterProcesses, registry: Registry, tmp_path: Path
) -> None:
    began = time.monotonic()
    with ClusterChaos(tmp_path, cluster, registry, etcd, LEASE_S) as chaos:
        chaos.start_clients()
        started = time.monotonic()
        for kinds in faults(chaos.random, FAULTS):
            chaos.go_on("before")
            chaos.disturb(kinds)
        chaos.go_on("at the end")
        went_on = time.monotonic()
        chaos.finish()
        count = chaos.check_topic()
        found = chaos.check_group(count)
        reads = chaos.check_reads()
        chaos.eventually(lambda: not missing_copies(registry), lambda: f"copies: {missing_copies(registry)[:5]}")
        assert not cluster.tracebacks(), chaos.tell(f"a process has failed: {cluster.tracebacks()}")
        print(  # noqa: T201
            f"cluster SEED={chaos.seed}: {dict(chaos.faults)}; {found}; {reads.reads} reads, {reads.failed} failed; "
            f"slowest {sorted(chaos.gaps)[-5:]}; {started - began:.1f} s, {went_on - started:.1f} s, "
            f"{time.monotonic() - went_on:.1f} s"
        )
