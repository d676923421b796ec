"""Pure: which partition a broker releases so that another broker can claim it (P5).

Only the broker with the most partitions releases one, and only if another broker has at least STEP fewer. The release
makes the difference smaller and never reverses it, so no partition moves back. While any partition has no owner, no
broker releases one, so partitions move one at a time.
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
    """The partition that this broker should release now; None if none.

    brokers: the brokers that claim partitions. owners: the owner of every partition of every topic; "" or a broker that
    is not in `brokers` if it has none. serving: the partitions that this broker serves, and so can release."""
    if me not in brokers or any(owner not in brokers for owner in owners.values()):
        return None
    load = Counter(dict.fromkeys(brokers, 0))
    load.update(owners.values())
    most = max(brokers, key=lambda broker: (load[broker], broker))
    least = min(brokers, key=lambda broker: (load[broker], broker))
    if most != me or load[me] - load[least] < STEP:
        return None
    # Choose the topic in which this broker exceeds the other one most, so that each topic is spread too.
    topics = Counter(topic for (topic, _), owner in owners.items() if owner == me)
    topics.subtract(topic for (topic, _), owner in owners.items() if owner == least)
    mine = [place for place in serving if owners.get(place) == me]
    return max(mine, key=lambda place: (topics[place[0]], place), default=None)
