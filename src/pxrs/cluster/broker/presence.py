"""Pure: which storage nodes are alive, away for a short time, or lost (away for longer than a grace period). Time is an
argument."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple


class News(NamedTuple):
    """The result of `Presence.look`."""

    live: frozenset[str]
    """The nodes that are alive or have been away for less than the grace period, without retired ones."""
    lost: tuple[tuple[str, float], ...]
    """Nodes that were alive at an earlier call and are lost now, with the seconds that they have been away. Each is
    returned once per absence."""
    returned: tuple[tuple[str, float], ...]
    """Nodes that an earlier call returned in `lost` and that are alive again, with the seconds that they were away."""


class Presence:
    """Not thread-safe."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._away: dict[str, float] = {}
        """By node: when it was first seen to be away, on the clock of `look`."""
        self._seen: set[str] = set()
        """The nodes that were alive at some call. A node that has been away since this process began is not
        reported."""
        self._lost: set[str] = set()

    def look(self, alive: Iterable[str], retired: Collection[str], known: Iterable[str], now: float) -> News:
        """Compare the current nodes with those of the last call. alive: the nodes with a key `cluster/alive/`. retired:
        the retired nodes. known: all nodes with a record; a node without one never comes back. now: seconds of a
        monotonic clock."""
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
