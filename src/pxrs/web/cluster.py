"""The page of a cluster: brokers, storage nodes, what lacks copies, and a map of the copies. Read-only.

The registry has all of it. It is read again at most every LOOK_S, and only while somebody looks at the page.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from typing import Any, Final

from pxrs.cluster.naming import known_cluster_id
from pxrs.cluster.problems import problems, short
from pxrs.cluster.status import ClusterStatus, LedgerStatus, read_status
from pxrs.errors import PxrsError
from pxrs.registry.contract import Registry

LOOK_S: Final = 2.0
LEDGERS_MAX: Final = 200
"""How many ledgers the map shows: those that lack copies first, then the newest of each partition."""
PARTITIONS_MAX: Final = 500
PROBLEMS_MAX: Final = 100


class ClusterBook:
    """Threads share it."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._found: ClusterStatus | None = None
        self._next = 0.0

    def is_there(self) -> bool:
        """Whether the registry is that of a cluster. False also if that cannot be read now."""
        try:
            return known_cluster_id(self._registry) is not None
        except PxrsError:
            return False

    def look(self) -> ClusterStatus:
        """Raises what the registry raises."""
        with self._lock:
            if self._found is None or time.monotonic() >= self._next:
                self._found = read_status(self._registry)
                self._next = time.monotonic() + LOOK_S
            return self._found


def view(found: ClusterStatus) -> dict[str, Any]:
    """As JSON for the page."""
    chosen = shown_ledgers(found)
    return {
        "cluster": found.id,
        "brokers": [
            {
                "id": short(each.incarnation),
                "name": each.name,
                "address": each.address,
                "version": each.version,
                "started_at": each.started_at or None,
                "is_leaving": each.is_leaving,
                "partitions": each.partitions,
            }
            for each in found.brokers
        ],
        "nodes": _nodes(found),
        "attention": [
            {"level": "bad" if each.is_urgent else "warn", "text": each.text}
            for each, _ in zip(problems(found), range(PROBLEMS_MAX), strict=False)
        ],
        "partitions": [
            {
                "topic": each.topic,
                "partition": each.partition,
                "owner": each.owner,
                "epoch": each.epoch,
                "ledgers": sum(each.ledgers.values()),
                "start": each.start,
                "size": each.size,
                "lacking": each.under_replicated,
                "unserved": each.unserved,
            }
            for each in sorted(
                found.partitions, key=lambda row: (bool(row.broker), row.unserved is None, -row.under_replicated)
            )[:PARTITIONS_MAX]
        ],
        "partitions_total": len(found.partitions),
        "ledgers": [_ledger(each) for each in chosen],
        "ledgers_total": len(found.ledgers),
        "lacking": len(found.under_replicated),
        "without_owner": len(found.without_owner),
        "unserved": len(found.unserved) + found.unserved_more,
    }


def _nodes(found: ClusterStatus) -> list[dict[str, Any]]:
    copying: Counter[str] = Counter(
        each.copied_to for ledger in found.ledgers for each in ledger.shortages if each.copied_to is not None
    )
    return [
        {
            "id": short(each.id),
            "address": each.address,
            "is_alive": each.is_alive,
            "is_retired": each.is_retired,
            "refuses": each.refuses,
            "starts": each.starts,
            "used": each.used_bytes if each.is_alive else None,
            "free": each.free_bytes if each.is_alive else None,
            "ledgers": each.named,
            "copying": copying[each.id],
            "doubts": each.doubts,
            "damaged": each.damaged,
        }
        for each in found.nodes
    ]


def shown_ledgers(found: ClusterStatus) -> list[LedgerStatus]:
    """Those that lack copies first, then the newest of every partition in turn."""
    chains: defaultdict[tuple[str, int], list[LedgerStatus]] = defaultdict(list)
    for ledger in found.ledgers:
        if not ledger.shortages:
            chains[ledger.topic_id, ledger.partition].append(ledger)
    turns = sorted(
        ((age, ledger) for chain in chains.values() for age, ledger in enumerate(reversed(chain))),
        key=lambda turn: turn[0],
    )
    return [*found.under_replicated, *(ledger for _, ledger in turns)][:LEDGERS_MAX]


def _ledger(ledger: LedgerStatus) -> dict[str, Any]:
    """copies: by the short id of a node, the state of its copy: `whole`, or why it is not."""
    copies = {short(node): "whole" for _, nodes in ledger.fragments for node in nodes if node is not None}
    for each in ledger.shortages:
        if each.node is not None:
            copies[short(each.node)] = each.why
        if each.copied_to is not None:
            copies[short(each.copied_to)] = "being copied"
    return {
        "id": ledger.id,
        "topic": ledger.topic,
        "query": ledger.query,
        "partition": ledger.partition,
        "number": ledger.number,
        "state": ledger.state,
        "base": ledger.base,
        "end": ledger.end,
        "size": ledger.size,
        "fragments": len(ledger.fragments),
        "copies": copies,
        "empty": sum(each.node is None for each in ledger.shortages),
        "abandoned": [short(node) for node in ledger.abandoned],
        "doubted": [short(node) for node in ledger.doubted],
    }
