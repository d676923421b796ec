"""One cluster of real processes for the tests of a module: three members of etcd, two brokers, four storage nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("grpc")

from pxrs import registry as registries
from pxrs.registry.contract import Registry
from pxrs.testing.cluster_processes import ClusterProcesses
from pxrs.testing.servers import EtcdCluster

LEASE_S = 2.0
NODE_TIMEOUT_S = 1.0


@pytest.fixture(scope="package")
def etcd() -> Iterator[EtcdCluster]:
    with EtcdCluster(3) as servers:
        yield servers


@pytest.fixture(scope="package")
def cluster(etcd: EtcdCluster) -> Iterator[ClusterProcesses]:
    flags = ["--metrics-listen", "127.0.0.1:0"]
    with ClusterProcesses(
        etcd.url,
        lease_s=LEASE_S,
        node_timeout_s=NODE_TIMEOUT_S,
        broker_flags=flags,
        node_flags=["--limit", "lease_s=4", "--limit", "alive_s=1"],
    ) as running:
        yield running


@pytest.fixture
def registry(etcd: EtcdCluster) -> Iterator[Registry]:
    """A handle that no fault touches."""
    with registries.open(etcd.url) as opened:
        yield opened
