"""Watching a database that sends no notifications: `Poller`, a thread that reads the watched keys at an interval.

Each round compares the keys and versions under the watched prefixes with those of the round before, and wakes the
watches of the prefixes that differ. An outage loses no change, because the round after it compares with the last round
before it. Two rounds do not differ if a key was created and deleted between them. But if a user of this handle has read
the key in between, its deletion is a change after that read, and must wake. So `note_read` remembers what was read, and
the next round wakes the watches of remembered keys that are gone or have another version.

If the database can tell cheaply that nothing was written (SQLite, see `Gate`), most rounds read no keys. The thread
also ends leases that are over, so that their keys vanish although no process reads them.

On failure: the error is logged, and the next round compares whatever the gate says.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pxrs.errors import PxrsError, RegistryReplaced
from pxrs.registry.contract import Entry
from pxrs.registry.sql.database import Gate
from pxrs.registry.watch import PrefixWatch
from pxrs.waiting import start_thread

if TYPE_CHECKING:
    from pxrs.registry.sql.registry import SqlRegistry

log = logging.getLogger(__name__)

Versions = list[tuple[str, int]]
"""Keys and their versions."""


class Poller:
    """Compares every `interval` seconds while there are watches."""

    def __init__(self, registry: SqlRegistry, interval: float) -> None:
        self._registry, self._interval = registry, interval
        self._lock = threading.Lock()
        self._seen: dict[PrefixWatch, Versions] = {}
        """The keys and versions under each watched prefix at the last round."""
        self._read: dict[str, int] = {}
        """Keys under a watched prefix that this handle has read since the last round, with their versions."""
        self._must_compare = False
        self._wanted = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._gate: Gate | None = None
        self._next_sweep_at = 0.0

    def add(self, watches: Sequence[PrefixWatch]) -> None:
        seen = self._registry.versions(tuple(watch.prefix for watch in watches))
        with self._lock:
            self._seen.update(zip(watches, seen, strict=True))
            # A change after `versions` may fall into a round that began without these prefixes, and the gate reports
            # each change only once: the next round must compare whatever the gate says.
            self._must_compare = True
            if self._thread is None:
                if self._gate is None:
                    self._gate = self._registry.database.gate()
                self._thread = start_thread(self._run, "pxrs-sql-poller")
            self._wanted.set()

    def remove(self, watch: PrefixWatch) -> None:
        with self._lock:
            self._seen.pop(watch, None)
            if not self._seen:
                self._wanted.clear()

    def note_read(self, entries: Iterable[Entry]) -> None:
        """Remember entries that a user of this handle has read, see the head of this file."""
        if not self._seen:
            return
        with self._lock:
            for entry in entries:
                if any(watch.covers(entry.key) for watch in self._seen):
                    self._read[entry.key] = entry.version

    def close(self) -> None:
        self._stopped.set()
        self._wanted.set()
        thread = self._thread
        if thread is None:  # there was no watch, or the thread could not be started
            self._close_gate()
        elif thread is not threading.current_thread():
            thread.join(self._registry.database.timeout)

    def _close_gate(self) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.close()

    def _run(self) -> None:
        is_told = False
        try:
            while not self._stopped.wait(self._interval):
                self._wanted.wait()
                try:
                    self._look()
                    is_told = False
                except Exception as error:  # noqa: BLE001 - logged; the thread must go on, or watches would never wake
                    is_told = self._tell(error, is_told)
                    with self._lock:  # the gate reports each change only once
                        self._must_compare = True
        finally:
            self._close_gate()

    def _tell(self, error: Exception, is_told: bool) -> bool:
        """Log the error of a round. An error that may last is logged, and wakes, once and not in every round: the woken
        users read, and get the error. Returns whether this error, or one before it, was such a one.

        is_told: what the call for the round before has returned; False if that round had no error."""
        if isinstance(error, PxrsError) and not isinstance(error, RegistryReplaced):
            log.info("watching %s: %s", self._registry.url, error)
            return is_told
        if not is_told:
            is_known = isinstance(error, RegistryReplaced)
            log.warning("watching %s failed: %s", self._registry.url, error, exc_info=None if is_known else error)
            self._registry.watched.wake(None)
        return True

    def _look(self) -> None:
        with self._lock:
            is_forced, self._must_compare = self._must_compare, False
        wrote, changed = self._gate.look() if self._gate is not None else (True, True)
        if wrote or is_forced or time.monotonic() >= self._next_sweep_at:
            left = self._registry.sweep()
            self._next_sweep_at = float("inf") if left is None else time.monotonic() + left
        if changed or is_forced:
            self._compare()

    def _compare(self) -> None:
        with self._lock:
            watches = list(self._seen)
            read, self._read = self._read, {}
        for watch, now in zip(watches, self._registry.versions(tuple(each.prefix for each in watches)), strict=True):
            there = set(now)
            gone = any(watch.covers(key) and (key, version) not in there for key, version in read.items())
            with self._lock:
                differs = watch in self._seen and (gone or self._seen[watch] != now)
                if differs:
                    self._seen[watch] = now
            if differs:
                watch.wake()
