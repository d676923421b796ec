"""Records the owners of partitions that no event tells of.

Whoever changes an owner records it, and the next change tells of this one too (`Owner.past`). So only the last change
of a partition can be missing in `_events`: the process that made it died before it had stored the event, and nobody has
changed the owner since. The janitor compares the owner keys of all groups with the events, and records what is missing
as `partition.observed`. Two janitors may record the same; readers tell duplicates by the epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pxrs.errors import OffsetTrimmed, RegistryCorrupt, UnknownTopic
from pxrs.events.model import Event
from pxrs.events.timeline import Place, last_epochs
from pxrs.group.listing import groups
from pxrs.group.records import Keys, Owner, partition_of
from pxrs.hub_parts import HubParts
from pxrs.model import EVENTS_TOPIC

PART_MAX: Final = 1_000
"""How many owners are recorded before their events must be stored."""
FLUSH_S: Final = 2.0
"""How long the events of this process are waited for before those that are stored are read."""


class OwnerObserver:
    """Of one open hub. Used by one thread at a time."""

    def __init__(self, parts: HubParts) -> None:
        self._parts = parts
        self._topic_id, self._positions = "", dict[int, int]()
        """The topic of events that was read, and up to which offset, by partition."""
        self._epochs: dict[Place, int] = {}
        """The last epoch of each partition of which an event tells, or that this object has recorded."""

    def observe(self, should_stop: Callable[[], bool]) -> int:
        """Record all owners that no event tells of; how many. Ends early if `should_stop` says so, and if events cannot
        be stored: then the next call goes on. Raises RegistryCorrupt, when all others are recorded, if an owner key is
        damaged."""
        registry, count = self._parts.registry.get(), 0
        names = {topic.id: topic.name for topic in self._parts.log.topics()}
        damage: RegistryCorrupt | None = None
        for group in groups(registry, deleted=True):
            if should_stop():
                break
            untold = dict[Place, Owner]()
            for entry in registry.scan(Keys(group).owners):
                try:
                    place, owner = Place(group, *partition_of(entry.key)), Owner.load(entry.key, entry.value)
                except RegistryCorrupt as error:
                    damage = error
                    continue
                if owner.epoch > self._epochs.get(place, 0):
                    untold[place] = owner
            # The events after the keys: a change of which the event is stored meanwhile is none that is missing.
            if untold and not self._catch_up():
                break
            for place, owner in untold.items():
                if owner.epoch <= self._epochs.get(place, 0):
                    continue
                # In parts that the buffer of events can hold.
                if count and count % PART_MAX == 0 and not self._parts.events.flush(FLUSH_S):
                    return count
                self._record(place, names.get(place.topic_id, place.topic_id), owner)
                self._epochs[place] = owner.epoch
                count += 1
        if damage is not None:
            raise damage
        return count

    def _catch_up(self) -> bool:
        """Read the events that were stored since the last time. False if those of this process cannot be stored."""
        if not self._parts.events.flush(FLUSH_S):
            return False
        self._read_events()
        return True

    def _record(self, place: Place, topic: str, owner: Owner) -> None:
        self._parts.events.record(
            "partition.observed",
            **place._asdict(),
            topic=topic,
            epoch=owner.epoch,
            member=owner.name,
            incarnation=owner.incarnation,
            past=[list(each) for each in owner.past],
        )

    def _read_events(self) -> None:
        """Read the events that were stored since the last time."""
        try:
            topic = self._parts.log.topic(EVENTS_TOPIC)
        except UnknownTopic:
            return
        if topic.id != self._topic_id:
            self._topic_id, self._positions = topic.id, dict.fromkeys(range(topic.partitions), 0)
        for number in self._positions:
            self._positions[number] = max(self._positions[number], topic.start(number))
            try:
                for batch in topic.batches(number, self._positions[number]):
                    values = batch.records.column("value").to_pylist()
                    last_epochs(filter(None, map(Event.load, values)), self._epochs)
                    self._positions[number] = batch.next_offset
            except OffsetTrimmed as error:  # retention has removed them between the two calls; the next look goes on
                self._positions[number] = error.first_offset
