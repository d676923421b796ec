"""Whole clusters within one process: storage nodes and brokers on threads, a registry of one's choice. For tests.

with small_cluster(folder) as cluster:
    with pxrs.open(cluster.url) as hub: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pxrs import registry as registries
from pxrs.cluster.broker.context import BrokerSettings
from pxrs.cluster.broker.running import RunningBroker
from pxrs.cluster.storage.running import StorageServer, StorageSettings, storing
from pxrs.registry.contract import Registry
from pxrs.server.serving import ServerSettings, serving


@dataclass
class SmallCluster:
    """What is running."""

    nodes: list[StorageServer] = field(default_factory=list)
    brokers: list[RunningBroker] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    """Of the brokers, host and port."""

    @property
    def url(self) -> str:
        return f"pxrs://{','.join(self.addresses)}"


@contextmanager
def small_cluster(
    folder: Path,
    registry: Callable[[], Registry] | None = None,
    *,
    nodes: int = 3,
    brokers: int = 2,
    server: ServerSettings | None = None,
    settings: BrokerSettings | None = None,
    lease_ttl: float = 10.0,
) -> Iterator[SmallCluster]:
    """Run a cluster for the block.

    registry: opens another handle; by default of a registry in files in the folder"""
    open_registry = registry or (lambda: registries.open(f"file:{folder / 'registry'}"))
    found = SmallCluster()
    with ExitStack() as stack:
        for number in range(nodes):
            handle = open_registry()
            stack.callback(handle.close)
            found.nodes.append(stack.enter_context(storing(handle, StorageSettings(folder / f"node-{number}"))))
        for number in range(brokers):
            broker = RunningBroker(open_registry(), name=f"broker-{number}", settings=settings, lease_ttl=lease_ttl)
            stack.callback(broker.close)
            url = stack.enter_context(serving(broker.hub, server))
            stack.callback(broker.leave)
            found.brokers.append(broker)
            found.addresses.append(url.removeprefix("pxrs://"))
            broker.join(found.addresses[-1])
        yield found
