"""Clusters of real processes. A test that damages its cluster for good starts its own with `running_cluster`; the
others share one through the fixture `cluster`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import pytest

pytest.importorskip("grpc")

from pxrs import registry as registries
from pxrs.registry.contract import Registry
from pxrs.testing.cluster_processes import ClusterProcesses
from pxrs.testing.servers import EtcdCluster

LEASE_S = 2.0
"""Of brokers in the tests of many faults: losing a lease is one of the faults."""
LONG_LEASE_S = 4.0
"""Of brokers in tests that need a broker to keep its lease although the machine is busy."""
NODE_TIMEOUT_S = 1.0


class RunningCluster(NamedTuple):
    etcd: EtcdCluster
    processes: ClusterProcesses
    registry: Registry
    """A handle that no fault touches."""


@contextmanager
def running_cluster(members: int, lease_s: float) -> Iterator[RunningCluster]:
    """So many members of etcd, two brokers and four storage nodes, for the block. lease_s: of the brokers."""
    with (
        EtcdCluster(members) as etcd,
        ClusterProcesses(
            etcd.url,
            lease_s=lease_s,
            node_timeout_s=NODE_TIMEOUT_S,
            broker_flags=["--metrics-listen", "127.0.0.1:0"],
            node_flags=["--limit", "lease_s=4", "--limit", "alive_s=1"],
        ) as processes,
        registries.open(etcd.url) as registry,
    ):
        yield RunningCluster(etcd, processes, registry)


class SharedCluster:
    """The cluster that the tests of a module share. It is started for the first test, and anew after a test that has
    not given it back whole."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._running: RunningCluster | None = None

    def get(self) -> RunningCluster:
        """A whole cluster."""
        if self._running is None:
            self._running = self._stack.enter_context(running_cluster(1, LONG_LEASE_S))
        self.check()
        return self._running

    def check(self) -> None:
        """Raise ServerFailed, with the log of what is broken, unless the cluster is whole. It is then stopped, and the
        next test gets another one."""
        if self._running is None:
            return
        try:
            for member in self._running.etcd.nodes:
                member.wait_until_ready()
            self._running.processes.wait_until_whole(self._running.registry)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._running = None
        self._stack.close()


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[SharedCluster]:
    shared = SharedCluster()
    yield shared
    shared.close()


@pytest.fixture
def running(shared_cluster: SharedCluster) -> Iterator[RunningCluster]:
    yield shared_cluster.get()
    shared_cluster.check()


@pytest.fixture
def cluster(running: RunningCluster) -> ClusterProcesses:
    return running.processes


@pytest.fixture
def registry(running: RunningCluster) -> Registry:
    return running.registry
