"""The contracts of logs, sources and registries over `pxrs serve`, unchanged: a client cannot tell a hub behind a
server from one in its own process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")

import pxrs
from pxrs.hub import Hub
from pxrs.log.contract import Append, Log
from pxrs.log.outcomes import offsets_of
from pxrs.server.serving import ServerSettings, serving
from pxrs.server.settings import ServerLimits
from pxrs.testing.log_contract import LogContract, new_topic, records
from pxrs.testing.registry_contract import Backend, RegistryContract, SharedRegistryContract
from pxrs.testing.source_contract import Feed, SourceContract

pytestmark = pytest.mark.sampled(6, of="module")
PLACES = ("memory", "directory")
FEW_THREADS = ServerSettings(limits=ServerLimits(threads=2))
"""The contracts count threads, and the server is in the same process."""


def open_hub(place: str, folder: Path) -> Hub:
    return pxrs.open("memory:" if place == "memory" else folder, upkeep=False)


@pytest.fixture(params=PLACES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of a server in front of an empty hub."""
    with open_hub(request.param, tmp_path / "hub") as hub, serving(hub, FEW_THREADS) as url:
        yield url


class TestLog(LogContract):
    @pytest.fixture
    def log(self, url: str) -> Iterator[Log]:
        with pxrs.open(url) as hub:
            yield hub.log


class RemoteFeed(Feed):
    """A topic behind a server, written to and read through one client."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.topic = hub.log.create_topic(new_topic(partitions=4, segment_bytes=4096, retention_s=3600.0))
        self.source = self.topic
        self._count = 0

    def put(self, values: Sequence[bytes]) -> list[tuple[int, int]]:
        partitions = [(self._count + number) % 4 for number in range(len(values))]
        self._count += len(values)
        # Each value fills a segment of a log on disk, so that `trim` can remove one.
        appends = [
            Append.encoded(partition, records([value], headers=[[("fill", b"." * 5000)]]))
            for partition, value in zip(partitions, values, strict=True)
        ]
        return list(zip(partitions, offsets_of(self.topic.append(appends)), strict=True))

    def trim(self, partition: int, offset: int) -> None:
        assert self.topic.trim({partition: offset}) == {partition: offset}

    def close(self) -> None:
        self._hub.close()


class TestSource(SourceContract):
    @pytest.fixture
    def feed(self, url: str) -> Iterator[Feed]:
        with pxrs.open(url) as hub:
            yield RemoteFeed(hub)


class Servers:
    """A server in front of a hub of its own for each namespace: the namespace is the hub's registry's."""

    def __init__(self, make: Callable[[str], Hub], stack: ExitStack) -> None:
        self._make, self._stack = make, stack
        self._urls: dict[str, str] = {}

    def url(self, namespace: str) -> str:
        if namespace not in self._urls:
            hub = self._stack.enter_context(self._make(namespace))
            self._urls[namespace] = self._stack.enter_context(serving(hub, FEW_THREADS))
        return self._urls[namespace]


@dataclass(frozen=True)
class ServedBackend(Backend):
    servers: Any = field(default=None)
    has_snapshots: bool = False

    def in_namespace(self, namespace: str) -> str:
        url: str = self.servers.url(namespace)
        return url


@pytest.fixture
def servers_stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class TestRegistryInMemory(RegistryContract):
    @pytest.fixture
    def backend(self, servers_stack: ExitStack) -> Backend:
        servers = Servers(lambda namespace: pxrs.open("memory:"), servers_stack)
        return ServedBackend("pxrs:", servers=servers)


@pytest.mark.skipif(
    "PXRS_SOAK" not in os.environ, reason="test_remote_registries.py has files behind a server of its own process"
)
class TestRegistryInFiles(SharedRegistryContract):
    @pytest.fixture
    def backend(self, servers_stack: ExitStack, tmp_path: Path) -> Backend:
        servers = Servers(lambda namespace: pxrs.open(tmp_path / namespace, upkeep=False), servers_stack)
        return ServedBackend("pxrs:", servers=servers)
