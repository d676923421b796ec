"""The links of a broker to storage nodes. A link is created when it is first used."""

from __future__ import annotations

import threading

from pxrs.cluster import records
from pxrs.cluster.broker.view import View
from pxrs.cluster.links import LinkSettings, NodeLink
from pxrs.cluster.records import NodeRecord
from pxrs.errors import NodeUnreachable, PxrsError
from pxrs.registry.contract import Registry
from pxrs.waiting import start_thread


class NodeLinks:
    """Threads share it."""

    def __init__(self, registry: Registry, view: View, settings: LinkSettings) -> None:
        self._registry, self._view, self._settings = registry, view, settings
        self._lock = threading.Lock()
        self._links: dict[str, NodeLink] = {}
        self._is_closed = False

    def __call__(self, node: str) -> NodeLink:
        """The link to the node with this id. Raises NodeUnreachable if the address of the node is not known."""
        address = self._address(node)
        stale: NodeLink | None = None
        with self._lock:
            if self._is_closed:
                raise NodeUnreachable(node, "the broker is stopping")
            link = self._links.get(node)
            if link is not None and link.address != address:  # the node was restarted at another address
                stale, link = link, None
            if link is None:
                link = self._links[node] = NodeLink(node, address, self._settings)
        if stale is not None:
            # Not on this thread: `close` waits for the link's thread, which may wait for the lock of a partition that
            # the caller holds. Or this is the link's thread itself.
            start_thread(stale.close, "pxrs-node-link-end")
        return link

    def _address(self, node: str) -> str:
        alive = self._view.seen.alive.get(node)
        if alive is not None:
            return alive.address
        known = self._links.get(node)
        if known is not None:
            return known.address
        try:
            entry = self._registry.get(records.node_key(node))
        except PxrsError as error:
            raise NodeUnreachable(node, f"its address cannot be read: {error}") from error
        if entry is None:
            raise NodeUnreachable(node, "the registry has no record of it")
        return NodeRecord.parse(entry.key, entry.value).address

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            links = list(self._links.values())
        for link in links:
            link.close()
