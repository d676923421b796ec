"""A replicated cluster of real processes: a registry, storage nodes and brokers, with a proxy before each of them.

    with ClusterProcesses(registry.url, brokers=2, nodes=4) as cluster:
        with pxrs.open(cluster.url) as hub: ...
        cluster.brokers[0].process.kill()
        cluster.nodes[1].proxy.stall()

Every storage node and every broker is reached through a proxy of its own, whose address it records in the registry. A
broker reaches the registry through proxies of its own too. So one broker alone can be cut off from the registry, from
its clients, or both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Final, NamedTuple, Self

import pxrs
from pxrs.cluster import records
from pxrs.cluster.records import AliveNode, BrokerRecord
from pxrs.errors import PxrsError
from pxrs.registry.contract import Registry
from pxrs.testing.proxy import Proxy
from pxrs.testing.servers import BrokerServer, ServerFailed, StorageServer
from pxrs.testing.servers.command import CommandServer

READY_S: Final = 60.0


class Node(NamedTuple):
    """A storage node, and the proxy between it and the brokers."""

    process: StorageServer
    proxy: Proxy


class BrokerMember(NamedTuple):
    """A broker, the proxy between it and its clients, and the proxies between it and the registry."""

    process: BrokerServer
    proxy: Proxy
    registry: tuple[Proxy, ...]


class ClusterProcesses(ExitStack):
    """What it starts is stopped at the end of the block."""

    def __init__(
        self,
        registry: str,
        *,
        brokers: int = 2,
        nodes: int = 4,
        lease_s: float = 3.0,
        node_timeout_s: float = 2.0,
        broker_flags: Sequence[str] = (),
        node_flags: Sequence[str] = (),
    ) -> None:
        """registry: the address of etcd or ZooKeeper servers, `SCHEME://HOST:PORT,HOST:PORT`, each of which gets a
        proxy for each broker; every other address is used as it is."""
        super().__init__()
        self.registry = registry
        self._broker_flags = ["--lease-s", f"{lease_s}", "--node-timeout-s", f"{node_timeout_s}", *broker_flags]
        self._node_flags = node_flags
        self.nodes: list[Node] = []
        self.brokers: list[BrokerMember] = []
        self._counts = (brokers, nodes)

    @property
    def url(self) -> str:
        """The address of all brokers."""
        return f"pxrs://{','.join(f'{each.proxy.host}:{each.proxy.port}' for each in self.brokers)}"

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            brokers, nodes = self._counts
            for _ in range(nodes):
                self.add_node()
            for number in range(brokers):
                self._add_broker(f"broker{number}")
            for node in self.nodes:
                node.process.wait_until_ready()
            for broker in self.brokers:
                broker.process.wait_until_ready()
            self._wait_for(lambda hub: len(hub.topics()) >= 0)
        except BaseException:
            self.close()
            raise
        return self

    def _wait_for(self, check: Callable[[pxrs.Hub], bool]) -> None:
        until = time.monotonic() + READY_S
        while True:
            with suppress(PxrsError), pxrs.open(self.url) as hub:
                if check(hub):
                    return
            assert time.monotonic() < until, self.logs()
            time.sleep(0.1)

    def add_node(self) -> Node:
        """Start another storage node. Returns before it is ready: call `wait_until_whole` later."""
        process = StorageServer(self.registry, flags=self._node_flags, forked=True)
        proxy = self.enter_context(Proxy(process.host, process.port))
        process.advertised = f"{proxy.host}:{proxy.port}"
        self.enter_context(_Closing(process))
        process.start(wait=False)
        self.nodes.append(Node(process, proxy))
        return self.nodes[-1]

    def _add_broker(self, name: str) -> None:
        proxies: tuple[Proxy, ...] = ()
        registry = self.registry
        scheme, _, rest = registry.partition("://")
        if scheme in ("etcd", "zookeeper"):
            targets = [target.rpartition(":") for target in rest.split(",")]
            proxies = tuple(self.enter_context(Proxy(host, int(port))) for host, _, port in targets)
            registry = f"{scheme}://{','.join(f'{each.host}:{each.port}' for each in proxies)}"
        process = BrokerServer(registry, name, flags=self._broker_flags, forked=True)
        proxy = self.enter_context(Proxy(process.host, process.port))
        process.advertised = f"{proxy.host}:{proxy.port}"
        self.enter_context(_Closing(process))
        process.start(wait=False)
        self.brokers.append(BrokerMember(process, proxy, proxies))

    def wait_until_whole(self, registry: Registry, timeout_s: float = READY_S) -> None:
        """Return once every process serves, every proxy passes everything, and `registry` has every broker and every
        present start of a storage node as alive. Raises ServerFailed with the log of what has ended or is not so within
        `timeout_s`. A process that was started with `wait=False` is found here if it has ended since."""
        until = time.monotonic() + timeout_s
        for name, process in self._named():
            if (fault := process.fault(max(until - time.monotonic(), 1.0))) is not None:
                raise ServerFailed(f"{name}: {fault}")
        faults = [f"{name}: its proxy is in the mode {proxy.fault!r}" for name, proxy in self._proxies() if proxy.fault]
        if faults:
            raise ServerFailed("; ".join(faults))
        while missing := self._unregistered(registry):
            if time.monotonic() > until:
                raise ServerFailed(f"not registered within {timeout_s} s: {', '.join(missing)}\n{self.logs()}")
            time.sleep(0.05)

    def _unregistered(self, registry: Registry) -> list[str]:
        """The names of the processes that the registry does not have as alive."""
        brokers = {BrokerRecord.parse(entry.key, entry.value).address for entry in registry.scan(records.BROKERS)}
        missing = [
            f"broker{number}" for number, each in enumerate(self.brokers) if each.process.advertised not in brokers
        ]
        for number, node in enumerate(self.nodes):
            key = records.alive_key(node.process.node)
            entry = registry.get(key)
            if entry is None or AliveNode.parse(key, entry.value).starts != node.process.starts:
                missing.append(f"node{number}")
        return missing

    def _proxies(self) -> list[tuple[str, Proxy]]:
        brokers = [
            (f"broker{number}", proxy)
            for number, each in enumerate(self.brokers)
            for proxy in (each.proxy, *each.registry)
        ]
        return [*brokers, *((f"node{number}", each.proxy) for number, each in enumerate(self.nodes))]

    def logs(self) -> str:
        """The ends of the logs of all processes."""
        return "\n".join(f"{name}: {process.log_tail()}" for name, process in self._named())

    def tracebacks(self) -> list[str]:
        """The unexpected errors in the logs of all processes: up to 3,000 characters of each traceback."""
        texts = {name: (process.directory / "log").read_text(errors="replace") for name, process in self._named()}
        return [
            f"{name}: {part[:3000]}"
            for name, text in texts.items()
            for part in text.split("Traceback (most recent")[1:]
        ]

    def _named(self) -> list[tuple[str, CommandServer]]:
        brokers = [(f"broker{number}", each.process) for number, each in enumerate(self.brokers)]
        nodes = [(f"node{number}", each.process) for number, each in enumerate(self.nodes)]
        return [*brokers, *nodes]


class _Closing:
    """Ends a process that is started later."""

    def __init__(self, process: CommandServer) -> None:
        self._process = process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()
