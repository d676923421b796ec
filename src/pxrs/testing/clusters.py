"""Whole clusters within one process: storage nodes and brokers on threads, a registry of one's choice. For tests.

with small_cluster(folder) as cluster:
    with pxrs.open(cluster.url) as hub: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

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
    start_node: Callable[[int], StorageServer] = lambda number: _not_running()
    """Start the node of this number, again or for the first time."""
    stop_node: Callable[[int], None] = lambda number: _not_running()
    start_broker: Callable[[], RunningBroker] = lambda: _not_running()
    """Start a further broker."""
    stop_broker: Callable[[int], None] = lambda number: _not_running()
    """As SIGTERM does it."""

    @property
    def url(self) -> str:
        return f"pxrs://{','.join(self.addresses)}"


def _not_running() -> NoReturn:
    raise RuntimeError("there is no cluster: use small_cluster")


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
    stacks: dict[str, ExitStack] = {}

    def start_node(number: int) -> StorageServer:
        with ExitStack() as stack:
            handle = open_registry()
            stack.callback(handle.close)
            node = stack.enter_context(storing(handle, StorageSettings(folder / f"node-{number}")))
            stacks[f"node {number}"] = stack.pop_all()
        found.nodes[number : number + 1] = [node]
        return node

    def start_broker() -> RunningBroker:
        number = len(found.brokers)
        with ExitStack() as stack:
            broker = RunningBroker(open_registry(), name=f"broker-{number}", settings=settings, lease_ttl=lease_ttl)
            stack.callback(broker.close)
            url = stack.enter_context(serving(broker.hub, server))
            stack.callback(broker.leave)
            found.brokers.append(broker)
            found.addresses.append(url.removeprefix("pxrs://"))
            broker.join(found.addresses[-1])
            stacks[f"broker {number}"] = stack.pop_all()
        return broker

    found.start_node, found.stop_node = start_node, lambda number: stacks.pop(f"node {number}").close()
    found.start_broker, found.stop_broker = start_broker, lambda number: stacks.pop(f"broker {number}").close()
    try:
        for number in range(nodes):
            start_node(number)
        for _ in range(brokers):
            start_broker()
        yield found
    finally:
        with ExitStack() as every:
            for stack in stacks.values():
                every.push(stack)
