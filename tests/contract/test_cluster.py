"""The contracts of logs and sources over a cluster, unchanged: a client cannot tell it from a log in a directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("grpc")

import pxrs
from pxrs.log.contract import Log
from pxrs.model import is_internal
from pxrs.registry.memory import MemoryRegistry, MemoryStore
from pxrs.testing.clusters import SmallCluster, small_cluster
from pxrs.testing.log_contract import LogContract
from pxrs.testing.source_contract import Feed, SourceContract

from .test_remote import FEW_THREADS, RemoteFeed

pytestmark = pytest.mark.sampled(6, of="module")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallCluster]:
    """Two brokers and three storage nodes, for all tests of the module."""
    store = MemoryStore()
    folder = Path(tmp_path_factory.mktemp("cluster"))
    with small_cluster(folder, lambda: MemoryRegistry(store), server=FEW_THREADS) as cluster:
        yield cluster


@pytest.fixture
def url(cluster: SmallCluster) -> Iterator[str]:
    """The address of the cluster, which has no topics."""
    yield cluster.url
    with pxrs.open(cluster.url) as hub:
        for topic in hub.log.topics():
            if not is_internal(topic.name):
                hub.delete_topic(topic.name)


class TestLog(LogContract):
    @pytest.fixture
    def log(self, url: str) -> Iterator[Log]:
        with pxrs.open(url) as hub:
            yield hub.log


class TestSource(SourceContract):
    @pytest.fixture
    def feed(self, url: str) -> Iterator[Feed]:
        with pxrs.open(url) as hub:
            yield RemoteFeed(hub)
