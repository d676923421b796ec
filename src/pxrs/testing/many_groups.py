"""A hub with very many topics and groups, for tests and benchmarks of what looks at all of them.

The records of the groups are written as members write them, without members: a thousand consumers would take minutes.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pxrs.group.records import Checkpoint, Keys, Member, Owner, ReadTopic
from pxrs.hub import Hub
from pxrs.model import Topic
from pxrs.registry.contract import Registry


def fill(hub: Hub, *, groups: int, topics: int, partitions: int) -> list[Topic]:
    """Make so many topics with so many partitions in all, and groups that read them, each its share."""
    each = partitions // topics
    described = (Topic(f"topic-{number:04d}", uuid.uuid4().hex, each, durability="os") for number in range(topics))
    made = [hub.log.create_topic(topic).topic for topic in described]
    share = topics // groups
    for number in range(groups):
        add_group(hub.registry, f"group-{number:03d}", made[number * share : (number + 1) * share])
    return made


def add_group(registry: Registry, name: str, topics: list[Topic]) -> None:
    """A group with one member, which owns every partition of these topics and has checkpoints of all of them."""
    keys, now = Keys(name), time.time()
    member = Member.reading("m", [ReadTopic(each.id, each.name, each.partitions) for each in topics], since=now)
    put = {keys.member("i" * 32): member.dump()}
    for topic in topics:
        for number in range(topic.partitions):
            put[keys.owner(topic.id, number)] = Owner("i" * 32, 1, "m").dump()
            put[keys.checkpoint(topic.id, number)] = Checkpoint(0, now, "m", 1).dump()
    items = list(put.items())
    size = registry.limits.commit_keys_max
    for at in range(0, len(items), size):
        registry.commit(put=dict(items[at : at + size]))


@contextmanager
def counted_calls(registry: Registry) -> Iterator[Counter[str]]:
    """Count the calls of `get`, `scan` and `commit` of this handle while the block runs."""
    counts: Counter[str] = Counter()
    originals = {name: getattr(registry, name) for name in ("get", "scan", "commit")}

    def counting(name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            counts[name] += 1
            return originals[name](*arguments, **named)

        return call

    for name in originals:
        setattr(registry, name, counting(name))
    try:
        yield counts
    finally:
        for name in originals:
            delattr(registry, name)
