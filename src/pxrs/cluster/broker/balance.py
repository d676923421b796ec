"""Pure: which partition a broker releases so that another one takes it (P5).

Only the broker with the most partitions releases, one partition, and only if some broker has at least STEP fewer. Then
the two differ by less than before, and never the other way round: nothing moves back. While a partition has no owner
nothing is released, so partitions move one after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final

from pxrs.cluster.broker.view import Place

STEP: Final = 2


def to_release(
    me: str, brokers: Collection[str], owners: Mapping[Place, str], serving: Collection[Place]
) -> Place | None:
    """The partition to release; None: none.

    brokers: those that take partitions. owners: of every partition of every topic, "" or a broker that is gone if it
    has none. serving: what this broker can release now."""
    if me not in brokers or any(owner not in brokers for owner in owners.values()):
        return None
    load = Counter(dict.fromkeys(brokers, 0))
    load.update(owners.values())
    most = max(brokers, key=lambda broker: (load[broker], broker))
    least = min(brokers, key=lambda broker: (load[broker], broker))
    if most != me or load[me] - load[least] < STEP:
        return None
    # Of the topic of which this broker has the most more, so that the partitions of each topic are spread, too.
    topics = Counter(topic for (topic, _), owner in owners.items() if owner == me)
    topics.subtract(topic for (topic, _), owner in owners.items() if owner == least)
    mine = [place for place in serving if owners.get(place) == me]
    return max(mine, key=lambda place: (topics[place[0]], place), default=None)
