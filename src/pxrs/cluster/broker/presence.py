"""Pure: which storage nodes are there, which may come back soon, and which are lost. Time is an argument."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple


class News(NamedTuple):
    """What a look has found out."""

    live: frozenset[str]
    """The nodes that are alive or have not been away for long, without those that were retired."""
    lost: tuple[tuple[str, float], ...]
    """Nodes that were seen alive and are now lost, with the seconds since then. Each is told once."""
    returned: tuple[tuple[str, float], ...]
    """Nodes that were told to be lost and are alive again, with the seconds that they were away."""


class Presence:
    """Not thread-safe."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._away: dict[str, float] = {}
        """Since when a node is seen to be away, on the clock of `look`."""
        self._seen: set[str] = set()
        """The nodes that were alive at some look. One that was away before this process began is no news."""
        self._lost: set[str] = set()

    def look(self, alive: Iterable[str], retired: Collection[str], known: Iterable[str], now: float) -> News:
        """alive: the nodes that the registry says are alive. known: all nodes that the registry has a record of; what
        has none never comes back. now: in seconds, on any clock that does not go back."""
        present = frozenset(alive)
        returned = tuple((node, now - self._away[node]) for node in sorted(present & self._lost))
        self._lost -= present
        for node in present & self._away.keys():
            del self._away[node]
        for node in frozenset(known) - present:
            self._away.setdefault(node, now)
        self._seen |= present
        over = {node: now - since for node, since in self._away.items() if now - since >= self._grace_s}
        lost = tuple((node, away_s) for node, away_s in sorted(over.items()) if node in self._seen - self._lost)
        self._lost |= {node for node, _ in lost}
        live = (present | self._away.keys()) - over.keys() - frozenset(retired)
        return News(frozenset(live), lost, returned)
