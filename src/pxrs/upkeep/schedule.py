"""When upkeep is due. Pure: time is an argument, in seconds of any clock that never steps.

Retention of a topic is due every quarter of its retention, or every minute if that is shorter, as docs/log.md promises;
the other duties every minute. A topic that appears is due at once, and noticed within LOOK_S.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pxrs.model import Topic

ROUND_S: Final = 60.0
"""How often the duties are done; retention of a topic more often, if a quarter of its retention is less."""
ROUND_S_MIN: Final = 0.1
"""Retention is applied no more often than this, however short it is."""
LOOK_S: Final = 15.0
"""How often the janitor looks for topics that are new, and candidates look whether the janitor is gone."""


def retention_interval_s(topic: Topic) -> float:
    """How often the topic's retention is applied."""
    return ROUND_S if topic.retention_s is None else max(ROUND_S_MIN, min(ROUND_S, topic.retention_s / 4))


class Schedule:
    """Which topics and other duties are due."""

    def __init__(self, now: float) -> None:
        self._due_at: dict[str, float] = {}
        """When the retention of a topic is due next, by the id of the topic."""
        self._others_due_at = now

    def due_topics(self, topics: Iterable[Topic], now: float) -> list[Topic]:
        """The topics whose retention is due now; they are due again one interval later. Topics that are not among
        `topics` any more are forgotten."""
        retained = [topic for topic in topics if topic.is_retained]
        self._due_at = {topic.id: self._due_at.get(topic.id, now) for topic in retained}
        due = [topic for topic in retained if self._due_at[topic.id] <= now]
        for topic in due:
            self._due_at[topic.id] = now + retention_interval_s(topic)
        return due

    def others_are_due(self, now: float) -> bool:
        """Whether the other duties are due now; they are due again ROUND_S later."""
        if now < self._others_due_at:
            return False
        self._others_due_at = now + ROUND_S
        return True

    def next_look_at(self, now: float) -> float:
        """The moment at which to look again: something is due, or a new topic may be there."""
        return min([now + LOOK_S, *self._due_at.values()])
