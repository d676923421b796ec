"""Records the decisions of operators (`pxrs.cluster.deciding`) in the audit of the cluster.

The key of a decision is deleted after its event is stored. So no decision is lost if the broker fails; if it fails
between the two steps, the decision is recorded twice.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from pxrs.cluster import records
from pxrs.cluster.records import Decision
from pxrs.events.recording import Recorder
from pxrs.registry.contract import Registry


class Decisions:
    """One thread calls `look`; the recorder calls `_note` on its own thread."""

    def __init__(self, registry: Registry, recorder: Recorder) -> None:
        self._registry, self._recorder = registry, recorder
        self._lock = threading.Lock()
        self._begun: set[str] = set()
        """The keys whose event was given to the recorder, until the key is deleted."""
        self._stored: set[str] = set()
        """The keys whose event is stored, and which can be deleted."""

    def look(self) -> None:
        """Delete the keys of stored events, and record new decisions. Raises what the registry raises."""
        with self._lock:
            stored = sorted(self._stored)
        for key in stored:
            self._registry.commit(delete=[key])
            with self._lock:
                self._stored.discard(key)
                self._begun.discard(key)
        for entry in self._registry.scan(records.DECISIONS):
            decision = Decision.parse(entry.key, entry.value)
            with self._lock:
                if entry.key in self._begun:
                    continue
                self._begun.add(entry.key)
            fields: dict[str, Any] = dict(decision.fields)
            self._recorder.record(f"audit.{decision.action}", functools.partial(self._note, entry.key), **fields)

    def _note(self, key: str) -> None:
        with self._lock:
            self._stored.add(key)
