"""The queues of a registry as they were last looked at: how many items are in each state, and how old they are.

A queue's items are counted by reading their keys, so a long queue costs many reads: a count goes up to `COUNT_MAX` for
each state, is made again only after a change, and at most `SHARE` of the time is spent on it. The rates are those of
the items that were seen to come and go between two looks: an item that came and went in between is not counted, so they
are lower bounds. Damaged records are counted, and left out of lists.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from pxrs.errors import RegistryCorrupt, UnknownQueue
from pxrs.queue.items import Item
from pxrs.queue.records import QUEUES, Queue, Record, taker_in, time_in
from pxrs.queue.states import ItemState
from pxrs.registry.contract import Entry, Registry
from pxrs.web.watching import LateWatch, Watching, watch

COUNT_MAX: Final = 5_000
PAGE_ITEMS: Final = 500
SHARE: Final = 0.1
LOOK_S: Final = 1.0
RATE_S: Final = 30.0
STATES: Final = (ItemState.READY, ItemState.IN_FLIGHT, ItemState.DELAYED, ItemState.DEAD)


@dataclass(frozen=True, slots=True)
class ListedItem:
    """An item as it is listed, with what its key says."""

    item: Item
    due_at: float | None = None
    """Of a delayed item: when it can be taken."""
    taker: str = ""
    """Of an item in flight: the id of the process that has taken it."""


@dataclass(slots=True)
class WatchedQueue:
    queue: Queue
    watch: Watching
    counts: dict[ItemState, int] = field(default_factory=dict)
    """How many items are in each state, up to `COUNT_MAX`."""
    oldest: float | None = None
    """When the oldest item that is ready, in flight or delayed was put, in seconds since 1970."""
    samples: deque[tuple[float, int, int]] = field(default_factory=deque)
    """The time (`time.monotonic`) of a look, and how many items had come and gone in all."""
    look_again: float = 0.0
    is_changed: bool = True
    _ids: dict[str, ItemState] | None = None
    _came: int = 0
    _gone: int = 0

    def look(self, registry: Registry, now: float) -> None:
        self.is_changed = self.watch.wait(0) or self.is_changed
        if self.is_changed and now >= self.look_again:
            began = time.monotonic()
            self._count(registry)
            self.is_changed = False
            self.look_again = now + max(LOOK_S, (time.monotonic() - began) / SHARE)
        self.samples.append((now, self._came, self._gone))
        while len(self.samples) > 2 and self.samples[1][0] < now - RATE_S:
            self.samples.popleft()

    def _count(self, registry: Registry) -> None:
        ids: dict[str, ItemState] = {}
        self.oldest = None
        for state in STATES:
            count = 0
            for entry in _entries(registry, self.queue.folder(state), COUNT_MAX):
                count += 1
                try:
                    record = Record.load(entry.key, entry.value)
                except RegistryCorrupt:
                    continue
                ids[record.id] = state
                if state is not ItemState.DEAD:
                    self.oldest = min(self.oldest or record.put_at, record.put_at)
            self.counts[state] = count
        if self._ids is not None:
            live = {id for id, state in ids.items() if state is not ItemState.DEAD}
            before = {id for id, state in self._ids.items() if state is not ItemState.DEAD}
            self._came += len(live - before)
            self._gone += len(before - live)
        self._ids = ids

    def rates(self) -> tuple[float, float] | None:
        """Items a second that came and that went, at least; None before the second look."""
        if len(self.samples) < 2:
            return None
        (began, came, gone), (now, came_now, gone_now) = self.samples[0], self.samples[-1]
        span = max(now - began, 1e-9)
        return (came_now - came) / span, (gone_now - gone) / span


class QueueBook:
    """Used under the observer's lock."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._watch = LateWatch(registry, QUEUES)
        self.by_name: dict[str, WatchedQueue] = {}
        self.problems: list[str] = []
        """The queues whose settings are damaged."""
        self._is_due = True
        """The list has changed since it was last read, or the last try to read it failed."""

    def refresh(self, now: float) -> None:
        self._is_due = self._watch.wait(0) or self._is_due
        if self._is_due:
            self._read_list()
            self._is_due = False
        for each in self.by_name.values():
            each.look(self._registry, now)

    def _read_list(self) -> None:
        found: dict[str, Queue] = {}
        self.problems = []
        for entry in self._registry.scan(QUEUES):
            try:
                queue = Queue.load(entry.key, entry.value)
                found[queue.name] = queue
            except RegistryCorrupt as error:
                self.problems.append(str(error))
        for name, known in list(self.by_name.items()):
            if name not in found or found[name].id != known.queue.id:
                known.watch.close()
                del self.by_name[name]
        for name, queue in found.items():
            if name in self.by_name:
                self.by_name[name].queue = queue
            else:
                self.by_name[name] = WatchedQueue(queue, watch(self._registry, queue.root))

    def count_again(self) -> None:
        """Count what has changed at the next refresh, however short ago it was counted. Threads may call it."""
        for each in list(self.by_name.values()):
            each.look_again = 0.0

    def find(self, name: str) -> WatchedQueue:
        """Raises UnknownQueue."""
        found = self.by_name.get(name)
        if found is None:
            raise UnknownQueue(name, sorted(self.by_name))
        return found

    def close(self) -> None:
        self._watch.close()
        for each in self.by_name.values():
            each.watch.close()


def items(registry: Registry, queue: Queue, state: ItemState, after: str | None, limit: int) -> list[ListedItem]:
    """The first items in this state, in the order of their keys, after the item with the id `after`."""
    found: list[ListedItem] = []
    is_begun = after is None
    for entry in _entries(registry, queue.folder(state), COUNT_MAX):
        try:
            record = Record.load(entry.key, entry.value)
            if not is_begun:
                is_begun = record.id == after
                continue
            when = time_in(entry.key) if state in (ItemState.DELAYED, ItemState.DEAD) else None
        except RegistryCorrupt:
            continue
        item = Item.of(queue, record, when if state is ItemState.DEAD else None)
        taker = taker_in(entry.key) if state is ItemState.IN_FLIGHT else ""
        found.append(ListedItem(item, when if state is ItemState.DELAYED else None, taker))
        if len(found) == limit:
            break
    return found


def _entries(registry: Registry, prefix: str, count: int) -> Iterator[Entry]:
    after: str | None = None
    while count > 0 and (page := registry.scan(prefix, after, min(PAGE_ITEMS, count))):
        yield from page
        count -= len(page)
        if len(page) < PAGE_ITEMS:
            return
        after = page[-1].key
