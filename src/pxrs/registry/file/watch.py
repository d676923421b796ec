"""The thread that wakes the watches of a file registry: `FileWatcher`.

inotify tells the thread of two kinds of events: a new entry in the folder of the journal's generation, which the thread
reads, and a lease file that was closed or removed, because its holder has ended or has renewed it. The thread also
waits for the nearest expiry of a lease. It ends the leases that are over, so that their keys vanish although no process
reads them.

Invariants:
- The thread adds a folder to inotify before it reads the folder, so an entry is read or causes an event (R2).
- If events were lost (a queue overflow, an error), every watch wakes.
- A process that may read the directory and not create a registry looks for one every `WATCH_RETRY_S`.

On failure: the thread logs the first of several errors in a row, wakes every watch, and tries again after
`WATCH_RETRY_S`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Final, TypeVar

from pxrs.clock import SYSTEM
from pxrs.errors import RegistryUnavailable
from pxrs.inotify import CLOSE_WRITE, CREATE, DELETE, MOVE_SELF, Notifier
from pxrs.registry.file.commit import SharedJournal
from pxrs.registry.file.lease import expiry_of, read
from pxrs.waiting import start_thread

log = logging.getLogger(__name__)
T = TypeVar("T")

DEATH_LOOKS_S: Final = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.5, 2.0)
"""The pauses between looks at a lease whose file was closed. When a process dies, the kernel closes its files, which
causes the event, shortly before it releases their locks: at the first look the lease may still seem to be held."""
WATCH_RETRY_S: Final = 0.5


class FileWatcher:
    """One thread for each open file registry, made and started with the first watch."""

    def __init__(self, journal: SharedJournal) -> None:
        self._journal = weakref.ref(journal)
        """A weak reference: when the registry is garbage-collected without having been closed, its journal is too, and
        the thread ends."""
        self._url = journal.url
        self.notifier = Notifier()
        self._armed = threading.Event()
        self._stopped = threading.Event()
        self._trouble: Exception | None = None
        self._was_made = journal.is_open
        """Whether the registry existed at the last look; False only in a process that may not create it."""
        self._due: dict[str, float] = {}
        """The expiry of each living lease, on the machine's clock, as its file had it when it was last read."""
        self._suspects: dict[str, int] = {}
        """Leases whose file was removed, or was closed, perhaps because their holder is dying; and how often the thread
        has looked at each."""
        try:
            self.thread = start_thread(self._run, "pxrs-file-watch")
        except BaseException:
            self.notifier.close()
            raise

    def await_armed(self, timeout: float) -> None:
        """Return when every later change causes an event. Raises RegistryUnavailable after this number of seconds."""
        if not self._armed.wait(timeout):
            raise RegistryUnavailable(f"{self._url}: no watch could be set up: {self._trouble}")

    def interrupt(self) -> None:
        """Let the thread look at the leases again: there is a new one, which may be the next to expire."""
        self.notifier.interrupt()

    def stop(self, timeout: float) -> None:
        """End the thread, and wait for its end for at most this number of seconds."""
        self._stopped.set()
        self.notifier.interrupt()
        self.thread.join(timeout)

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                try:
                    pause = self._with_journal(self._look)
                    self._wait(pause)
                    self._trouble = None
                except Exception as error:  # noqa: BLE001 - logged; the thread must go on, or watches would never wake
                    if self._trouble is None:
                        log.warning("%s: watching failed, will try again: %s", self._url, error)
                    # Without the traceback, whose frames refer to the journal and would keep it from being collected.
                    self._trouble = error.with_traceback(None)
                    self._armed.clear()
                    self._with_journal(_doubt)
                    self._stopped.wait(WATCH_RETRY_S)
        finally:
            self.notifier.close()

    def _with_journal(self, step: Callable[[SharedJournal], T]) -> T | None:
        """Call `step` with the journal, to which the thread refers only during this call. If the journal was
        garbage-collected, return None and let the thread end."""
        journal = self._journal()
        if journal is not None:
            return step(journal)
        self._stopped.set()
        return None

    def _wait(self, pause: float | None) -> None:
        if self._stopped.is_set():
            return
        news = self.notifier.wait(pause)
        if news.overflow:
            self._with_journal(_doubt)
            self._suspects.update(dict.fromkeys(self._due, 0))
        self._suspects.update(dict.fromkeys(news.closed, 0))

    def _look(self, journal: SharedJournal) -> float | None:
        """Arm inotify, read new entries, end the leases that are over. Returns after how many seconds to look again if
        there is no event; None: only after an event."""
        with journal.lock:
            is_made = journal.is_made()
        if is_made != self._was_made:
            self._was_made = is_made
            _doubt(journal)
        if not is_made:
            self._armed.set()
            return WATCH_RETRY_S
        leases = self._arm(journal)
        self._armed.set()
        now = SYSTEM.now()
        self._due = {lease: self._due[lease] for lease in leases if lease in self._due}
        asked = [x for x in leases if x in self._suspects or self._due.get(x, now) <= now]
        over = []
        for lease in asked:
            asked_at = SYSTEM.now()  # before the expiry is read, see `expiry_of`
            expiry = expiry_of(journal.lease_folder / lease)
            if expiry is None or asked_at >= expiry:
                over.append(lease)
            else:
                self._due[lease] = expiry
        journal.end_or_hide(over)
        pauses = [expiry - SYSTEM.now() for lease, expiry in self._due.items() if lease not in over]
        for lease, looks in list(self._suspects.items()):
            # An unheld lease does not end with a process; its file is closed after each renewal.
            is_unheld = (record := read(journal.lease_folder / lease)) is not None and not record.is_held
            if lease in over or lease not in self._due or looks >= len(DEATH_LOOKS_S) or is_unheld:
                del self._suspects[lease]
            else:
                self._suspects[lease] += 1
                pauses.append(DEATH_LOOKS_S[looks])
        return max(0.0, min(pauses)) if pauses else None

    def _arm(self, journal: SharedJournal) -> list[str]:
        """Add the folders to inotify, then read the entries that were there before; returns the living leases. Repeated
        if a compaction has begun another generation, whose folder is another one, in between."""
        self.notifier.add(str(journal.lease_folder), CLOSE_WRITE | DELETE)
        while True:
            with journal.lock:
                generation = journal.journal.generation
            with contextlib.suppress(FileNotFoundError):
                self.notifier.add(generation.path, CREATE | MOVE_SELF)
            with journal.lock:
                journal.catch_up()
                if journal.journal.generation is generation:
                    return [lease for lease in journal.journal.state.leases if lease not in journal.gone]


def _doubt(journal: SharedJournal) -> None:
    """Wake every watch, because changes may have been missed."""
    journal.wake(None)
