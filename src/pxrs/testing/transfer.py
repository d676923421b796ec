"""An exact account of messages that were sent to a topic: how many were lost, doubled, misplaced or out of order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from pxrs.hashing import hash_named
from pxrs.topics import TopicHandle

Row = tuple[bytes | None, bytes | None]
"""A message's key and value."""


@dataclass(frozen=True)
class Transfer:
    messages: int
    """How many messages were sent."""
    lost: int = 0
    doubled: int = 0
    """How many messages arrived that were not sent, or more often than they were sent."""
    misplaced: int = 0
    """How many messages are in another partition than that of their key."""
    out_of_order: int = 0
    """How many keys have their messages in another order than they were sent in."""

    @property
    def is_exact(self) -> bool:
        return self == Transfer(self.messages)


def rows_of(topic: TopicHandle) -> list[Row]:
    """All messages of a topic; those with the same key in their order."""
    return [(each.key, each.value) for number in range(topic.partitions) for each in topic.messages(number)]


def transfer(sent: Iterable[Row], topic: TopicHandle, is_ordered: bool = True) -> Transfer:
    """Compare the messages in the topic with those that were sent. is_ordered: also check the order of each key."""
    wanted, found = list(sent), rows_of(topic)
    missing, more = Counter(wanted), Counter(found)
    hash_of = hash_named(topic.topic.partitioner)
    misplaced = sum(
        each.key is not None and hash_of(each.key) % topic.partitions != number
        for number in range(topic.partitions)
        for each in topic.messages(number)
    )
    before, after = _by_key(wanted), _by_key(found)
    out_of_order = sum(after[key] != values for key, values in before.items()) if is_ordered else 0
    return Transfer(len(wanted), (missing - more).total(), (more - missing).total(), misplaced, out_of_order)


def _by_key(rows: Iterable[Row]) -> defaultdict[bytes, list[bytes | None]]:
    """The values of each key, in order. Messages without a key have none."""
    found: defaultdict[bytes, list[bytes | None]] = defaultdict(list)
    for key, value in rows:
        if key is not None:
            found[key].append(value)
    return found
