"""Which ledgers live storage nodes may have lost entries of (C7), as the nodes themselves say.

A node shows in its key among the live nodes that it is in doubt about some ledgers, or that it knows of damage. It is
asked for the list then, after each change and every AGAIN_S, on a thread of the broker's crew: one question at a time
for each node.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from pxrs.cluster.broker.context import Broker
from pxrs.cluster.records import AliveNode
from pxrs.errors import PxrsError

_logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 2.0
PAUSE_S: Final = 5.0
"""How long a node that has not answered is left alone."""
AGAIN_S: Final = 30.0
"""After this time a node is asked again, although its counts are the same: one entry may have been repaired, and
another one damaged."""


@dataclass(slots=True)
class _Asked:
    """What is known of one node."""

    state: tuple[int, int, int] | None = None
    """Its starts, and its counts of doubts and of damage, when it was last asked."""
    is_under_way: bool = False
    not_before: float = 0.0
    """On the monotonic clock, as is `again_at`."""
    again_at: float = 0.0
    ledgers: frozenset[str] = frozenset()


class NodeDoubts:
    """`look` is called by one thread; answers come on others."""

    def __init__(self, broker: Broker, on_answer: Callable[[], None]) -> None:
        self._broker, self._on_answer = broker, on_answer
        self._nodes: dict[str, _Asked] = {}

    def look(self, alive: Mapping[str, AliveNode]) -> dict[str, frozenset[str]]:
        """By node: the ledgers of which it may have lost entries, as far as it has answered. Asks those that show
        something new."""
        for node in self._nodes.keys() - {each for each, found in alive.items() if found.doubts or found.damaged}:
            if not self._nodes[node].is_under_way:
                del self._nodes[node]
        for node, found in alive.items():
            if found.doubts or found.damaged:
                asked, state = self._nodes.setdefault(node, _Asked()), (found.starts, found.doubts, found.damaged)
                now = time.monotonic()
                is_due = asked.state != state or now >= asked.again_at
                if is_due and not asked.is_under_way and now >= asked.not_before:
                    asked.is_under_way, asked.not_before = True, now + PAUSE_S
                    self._broker.crew.submit(self._ask, node, asked, state)
        return {node: asked.ledgers for node, asked in self._nodes.items() if asked.ledgers}

    def _ask(self, node: str, asked: _Asked, state: tuple[int, int, int]) -> None:
        found: list[str] = []
        try:
            link, more = self._broker.links(node), True
            while more:
                page, more = link.lacking(found[-1] if found else "", timeout_s=TIMEOUT_S)
                found += page
                more = more and bool(page)
            asked.state, asked.ledgers = state, frozenset(found)
            asked.not_before, asked.again_at = 0.0, time.monotonic() + AGAIN_S
        except PxrsError as error:
            _logger.info("storage node %s did not report which entries it may have lost: %s", node, error)
        finally:
            asked.is_under_way = False
            self._on_answer()
