"""A copy in memory of the cluster's records: brokers, storage nodes, topics, owners. One thread keeps it up to date.

The copy may be out of date. A broker uses it only to decide what to try; every change is a commit that expects the
versions of the records on which the decision relies.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from pxrs.cluster import records
from pxrs.cluster.records import RETIRED, AliveNode, BrokerRecord, NodeRecord, OwnerRecord, TopicRecord
from pxrs.errors import Closed, PxrsError
from pxrs.registry.contract import Registry
from pxrs.waiting import Callback, Subscribers, Subscription, start_thread

_logger = logging.getLogger(__name__)

LOOK_S: Final = 5.0
"""Interval at which the registry is read although the watch has reported no change."""
PAUSE_S: Final = 0.5
"""How long to wait after a failed read of the registry."""

T = TypeVar("T")
Place = tuple[str, int]
"""The id of a topic, and the number of a partition."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The records that were read. Each field is the result of one scan; the scans run one after the other."""

    brokers: Mapping[str, BrokerRecord] = field(default_factory=dict)
    alive: Mapping[str, AliveNode] = field(default_factory=dict)
    topics: Mapping[str, tuple[TopicRecord, int]] = field(default_factory=dict)
    """By name: the record and its version."""
    owners: Mapping[Place, tuple[OwnerRecord, int]] = field(default_factory=dict)
    """By partition: the record and its version."""
    nodes: frozenset[str] = frozenset()
    """All storage nodes that have a record, whether they are alive or not."""
    retired: frozenset[str] = frozenset()
    """The nodes that an operator has retired."""
    abandoned: Mapping[str, int] = field(default_factory=dict)
    """The ledgers that an operator has decided to recover without some nodes: the version of each decision (C6)."""

    @property
    def takers(self) -> dict[str, AliveNode]:
        """The live storage nodes that are not retired."""
        return {node: alive for node, alive in self.alive.items() if node not in self.retired}


class View:
    """Reads the registry on a thread of its own, from `start` to `close`. Threads share it."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._watch = registry.watch(records.BROKERS, records.ALIVE, records.TOPICS, records.OWNERS, records.ABANDONED)
        self._lock = threading.Lock()
        self._subscribers = Subscribers()
        self._is_closed = False
        self._is_asked = False
        self.seen = Seen()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Read the records once, then start the thread. Raises what the registry raises."""
        self.refresh()
        self._thread = start_thread(self._follow, "pxrs-cluster-view")

    def refresh(self) -> Seen:
        """Read all records now, and call the subscribers if something has changed. Raises what the registry raises."""
        with self._lock:
            # Node records are not watched, because every node writes its record regularly; LOOK_S bounds the delay.
            nodes = self._scan(records.NODES, NodeRecord.parse)
            seen = Seen(
                self._scan(records.BROKERS, BrokerRecord.parse),
                self._scan(records.ALIVE, AliveNode.parse),
                self._scan_versions(records.TOPICS, TopicRecord.parse),
                {
                    (topic_id, int(partition)): found
                    for key, found in self._scan_versions(records.OWNERS, OwnerRecord.parse).items()
                    for topic_id, _, partition in [key.rpartition("/")]
                },
                frozenset(nodes),
                frozenset(node for node, found in nodes.items() if found.state == RETIRED),
                {
                    entry.key.removeprefix(records.ABANDONED): entry.version
                    for entry in self._registry.scan(records.ABANDONED)
                },
            )
            is_changed = seen != self.seen or self._is_asked
            self.seen, self._is_asked = seen, False
        if is_changed:
            self._subscribers.wake_all()
        return seen

    def look_again(self) -> None:
        """Have the thread read the records again now, and call the subscribers even if nothing has changed."""
        self._is_asked = True
        self._watch.wake()

    def subscribe(self, callback: Callback) -> Subscription:
        """Call the callback after each change of `seen`, on the thread that read the records."""
        return self._subscribers.add((), callback)

    def _scan(self, prefix: str, load: Callable[[str, bytes], T]) -> dict[str, T]:
        return {entry.key[len(prefix) :]: load(entry.key, entry.value) for entry in self._registry.scan(prefix)}

    def _scan_versions(self, prefix: str, load: Callable[[str, bytes], T]) -> dict[str, tuple[T, int]]:
        return {
            entry.key[len(prefix) :]: (load(entry.key, entry.value), entry.version)
            for entry in self._registry.scan(prefix)
        }

    def _follow(self) -> None:
        while True:
            try:
                self._watch.wait(LOOK_S)
                if self._is_closed:
                    return
                self.refresh()
            except Closed:
                return
            except PxrsError as error:
                _logger.warning("the registry could not be read, retrying in %g s: %s", PAUSE_S, error)
                time.sleep(PAUSE_S)
            except Exception:
                _logger.exception("the registry could not be read, retrying in %g s", PAUSE_S)
                time.sleep(PAUSE_S)

    def close(self) -> None:
        self._is_closed = True
        self._watch.close()
        if self._thread is not None:
            self._thread.join(LOOK_S)
