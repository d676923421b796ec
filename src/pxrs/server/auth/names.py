"""The names that belong to the ids of topics and queues, by which permissions for keys of the registry are decided."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Final

from pxrs.group.readables import is_topic_id
from pxrs.model import Topic
from pxrs.queue.records import DELETED
from pxrs.registry.values import Entry
from pxrs.server.auth.keys import Names

NAMES_MAX: Final = 100_000
"""How many names of each kind are remembered."""


class HubNames:
    """Reads names from the log and the registry of a hub, and remembers them: an id never gets another name. Threads
    share it. What is not found is looked for again at each call, so that a new topic counts at once."""

    def __init__(self, topics: Callable[[], Iterable[Topic]], get: Callable[[str], Entry | None]) -> None:
        """topics: all topics of the log. get: `Registry.get`."""
        self._list_topics, self._get = topics, get
        self._lock = threading.Lock()
        self._topics: dict[str, str] = {}
        self._queues: dict[str, str] = {}

    def once(self) -> Names:
        """The same for one call of a client: see `Names.once`."""
        return _Once(self)

    def known_topic(self, id: str) -> str | None:
        """As `topic`, without a look into the log."""
        with self._lock:
            return self._topics.get(id)

    def topic(self, id: str) -> str | None:
        known = self.known_topic(id)
        if known is not None or not is_topic_id(id):  # the id of a table: the topics need not be listed
            return known
        found = {topic.id: topic.name for topic in self._list_topics()}
        with self._lock:
            # Topics that were deleted since stay known, so that members can still write their last checkpoints.
            self._topics = found if len(self._topics) > NAMES_MAX else {**self._topics, **found}
        return found.get(id)

    def queue(self, id: str) -> str | None:
        with self._lock:
            known = self._queues.get(id)
        if known is not None:
            return known
        entry = self._get(f"standing/{id}") or self._get(f"{DELETED}{id}")
        if entry is None:
            return None
        name = entry.value.decode(errors="replace")
        with self._lock:
            if len(self._queues) >= NAMES_MAX:
                self._queues.clear()
            self._queues[id] = name
        return name


class _Once:
    """The names of a hub, for one call: its topics are listed at most once."""

    def __init__(self, names: HubNames) -> None:
        self._names, self._is_listed = names, False

    def once(self) -> Names:
        return self

    def topic(self, id: str) -> str | None:
        if self._is_listed:
            return self._names.known_topic(id)
        found = self._names.topic(id)
        self._is_listed = found is None and is_topic_id(id)
        return found

    def queue(self, id: str) -> str | None:
        return self._names.queue(id)
