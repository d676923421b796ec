"""Creates the parts of a broker: its view of the cluster, its partitions, its log, and the hub that the server serves.

Start: read the registry, create the hub, let the server listen, and only then join the cluster, because the broker's
record contains the address. Stop: close the ledgers and end the lease, so that other brokers claim the partitions at
once; then close the rest.
"""

from __future__ import annotations

from typing import Final

from pxrs.clock import SYSTEM, Clock
from pxrs.cluster.broker.context import Broker, BrokerSettings
from pxrs.cluster.broker.log import ClusterLog
from pxrs.cluster.broker.membership import LEASE_TTL_DEFAULT, Membership
from pxrs.cluster.broker.nodes import NodeLinks
from pxrs.cluster.broker.ownership import Ownership
from pxrs.cluster.broker.pools import ToldPool
from pxrs.cluster.broker.reading import LedgerReader
from pxrs.cluster.broker.recent import Recent
from pxrs.cluster.broker.repairs import Repairs
from pxrs.cluster.broker.room import Room
from pxrs.cluster.broker.view import View
from pxrs.cluster.links import LinkSettings
from pxrs.cluster.naming import cluster_id
from pxrs.hub import Hub
from pxrs.registry.contract import Registry
from pxrs.registry.outage import StartWait
from pxrs.remote.client.routes import Peers
from pxrs.remote.client.settings import Settings

CREW_MAX: Final = 64
"""Maximum number of threads in `Broker.crew`."""
FLUSH_S: Final = 1.0
"""How long a broker that leaves waits at most until its events are stored, before it releases its partitions."""


class RunningBroker:
    """A broker from its start to its end. The registry belongs to the caller."""

    def __init__(
        self,
        registry: Registry,
        *,
        name: str = "",
        settings: BrokerSettings | None = None,
        links: LinkSettings | None = None,
        peers: Settings | None = None,
        lease_ttl: float = LEASE_TTL_DEFAULT,
        clock: Clock = SYSTEM,
        wait: StartWait | None = None,
    ) -> None:
        """links, peers: the timeouts, tokens and TLS settings for storage nodes and for other brokers. wait: for how
        long the constructor and `join` wait for the registry."""
        settings, links = settings or BrokerSettings(), links or LinkSettings()
        self._wait = wait = wait or StartWait()
        self._cluster = wait(lambda: cluster_id(registry))
        self._view = wait(lambda: View(registry))
        try:
            wait(self._view.start)
        except BaseException:
            self._view.close()
            raise
        self._links = NodeLinks(registry, self._view, links)
        self._crew = ToldPool(CREW_MAX, "pxrs-broker")
        self._rollers = ToldPool(settings.openings_max, "pxrs-rolling")
        self._membership = Membership(registry, "", name, lease_ttl)
        self.broker = Broker(
            registry,
            self._view,
            self._membership,
            self._links,
            LedgerReader(self._links),
            Recent(settings.recent_bytes),
            self._crew,
            self._rollers,
            Room(min(settings.unconfirmed_bytes_max, links.unanswered_bytes_max // 2)),
            settings,
            clock,
        )
        self.ownership = Ownership(self.broker)
        self._peers = Peers(peers or Settings("pxrs://", (), 2.0, 2.0))
        log = ClusterLog(self.broker, self.ownership, self._peers, self._cluster, f"cluster:{self._cluster[:8]}")
        self.hub = Hub(log, registry)
        self.broker.news.recorder = self.hub.parts.events
        self._peers_kept = self._view.subscribe(self._keep_peers)
        self.repairs = Repairs(self.broker, self.ownership, self.hub.parts.events)

    def _keep_peers(self) -> None:
        """After each change: end the connections to brokers that are gone."""
        seen = self._view.seen
        topics = {record.topic.id for record, _ in seen.topics.values()}
        for session in self._peers.keep({each.address for each in seen.brokers.values()}, topics):
            self._crew.submit(session.close)

    def join(self, address: str) -> None:
        """Join the cluster and begin to claim partitions. address: host and port under which others reach this
        broker. Raises what the registry raises, once the wait for it is over."""
        self._membership.address = address
        self._wait(self._membership.join)
        self.ownership.start()
        self.repairs.start()

    def leave(self) -> None:
        """Release all partitions and leave the cluster."""
        self.repairs.close()
        count = len(self.ownership.partitions())
        self.broker.news.record("broker.left", **self._membership.named(), partitions=count)
        # While this broker still serves: if it is the last one, nobody can store events once its partitions are
        # released.
        self.hub.parts.events.flush(FLUSH_S)
        self.ownership.close()
        self._membership.close()

    def close(self) -> None:
        """Close the hub, the registry and all connections. Call this after `leave`, and after the server has
        stopped."""
        self.hub.close()
        self._peers_kept.close()
        self._view.close()
        self._peers.close()
        self._links.close()
        self._rollers.shutdown(wait=False, cancel_futures=True)
        self._crew.shutdown(wait=False, cancel_futures=True)
