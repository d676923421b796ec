"""Whole clusters within one process: storage nodes and brokers on threads, a registry of one's choice. For tests.

with small_cluster(folder) as cluster:
    with pxrs.open(cluster.url) as hub: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pxrs import registry as registries
from pxrs.cluster.broker.context import BrokerSettings
from pxrs.cluster.broker.running import RunningBroker
from pxrs.cluster.links import LinkSettings
from pxrs.cluster.storage.running import StorageServer, StorageSettings, storing
from pxrs.registry.contract import Registry
from pxrs.remote.client.settings import PATIENCE_S, TIMEOUT_S, Settings
from pxrs.server.serving import ServerSettings, serving


class SmallCluster:
    """What is running. Belongs to one thread."""

    def __init__(
        self,
        folder: Path,
        registry: Callable[[], Registry],
        server: ServerSettings | None,
        settings: BrokerSettings | None,
        lease_ttl: float,
        token: str | None,
        links: LinkSettings | None,
    ) -> None:
        self._folder, self._links = folder, links
        self._registry, self._server, self._settings, self._lease_ttl = registry, server, settings, lease_ttl
        self._peers = Settings("pxrs://", (), TIMEOUT_S, PATIENCE_S, given_token=token)
        self.nodes: list[StorageServer] = []
        self.brokers: list[RunningBroker] = []
        self.addresses: list[str] = []
        """Of the brokers, host and port."""
        self._running: dict[tuple[str, int], ExitStack] = {}
        """By kind and number: what ends each node and broker that runs."""

    @property
    def url(self) -> str:
        """With all brokers that were ever started, so that a client may find that some are away."""
        return f"pxrs://{','.join(self.addresses)}"

    def start_node(self, number: int) -> StorageServer:
        """Start the node of this number, again or for the first time."""
        with ExitStack() as stack:
            handle = self._registry()
            stack.callback(handle.close)
            node = stack.enter_context(storing(handle, StorageSettings(self._folder / f"node-{number}")))
            self._running["node", number] = stack.pop_all()
        self.nodes[number : number + 1] = [node]
        return node

    def stop_node(self, number: int) -> None:
        self._stop("node", number)

    def start_broker(self) -> RunningBroker:
        """Start a further broker, at a port of its own."""
        number = len(self.brokers)
        with ExitStack() as stack:
            broker = RunningBroker(
                self._registry(),
                name=f"broker-{number}",
                settings=self._settings,
                links=self._links,
                peers=self._peers,
                lease_ttl=self._lease_ttl,
            )
            stack.callback(broker.close)
            url = stack.enter_context(serving(broker.hub, self._server))
            stack.callback(broker.leave)
            self.brokers.append(broker)
            self.addresses.append(url.removeprefix("pxrs://"))
            broker.join(self.addresses[-1])
            self._running["broker", number] = stack.pop_all()
        return broker

    def stop_broker(self, number: int) -> None:
        """As `pxrs broker` ends after SIGTERM: it gives its partitions to the others, and drains. Idempotent."""
        self._stop("broker", number)

    def _stop(self, kind: str, number: int) -> None:
        stack = self._running.pop((kind, number), None)
        if stack is not None:
            stack.close()

    def close(self) -> None:
        """Stop everything: brokers first, because they need nodes."""
        with ExitStack() as every:
            for _, stack in sorted(self._running.items(), key=lambda item: item[0][0] == "broker"):
                every.push(stack)
            self._running.clear()


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
    token: str | None = None,
    links: LinkSettings | None = None,
) -> Iterator[SmallCluster]:
    """Run a cluster for the block.

    registry: opens another handle; by default of a registry in files in the folder
    token: what the brokers show to each other
    links: how the brokers reach storage nodes"""
    open_registry = registry or (lambda: registries.open(f"file:{folder / 'registry'}"))
    found = SmallCluster(folder, open_registry, server, settings, lease_ttl, token, links)
    try:
        for number in range(nodes):
            found.start_node(number)
        for _ in range(brokers):
            found.start_broker()
        yield found
    finally:
        found.close()
