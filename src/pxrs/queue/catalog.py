"""The queues of a registry by name: create them, find them, delete them, and remember their settings.

A process remembers a queue's settings, and reads them again after `SETTINGS_AGE_S`: then it learns that they were
changed, or that the queue was deleted and another one created under its name. A put, which expects the queue's
existence key, is refused in the latter case at any time. `fifo` and the id never change: keys of items depend on
them."""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from pxrs.errors import Conflict, QueueDiffers, QueueExists, RegistryCorrupt, RegistryUnavailable, UnknownQueue
from pxrs.events.recording import LOGGED_ONLY, Recorder, attempted
from pxrs.queue.deleting import clear_deleted, delete_queue
from pxrs.queue.policy import Backoff, Policy
from pxrs.queue.puts import PutVersions
from pxrs.queue.records import DELETED, QUEUES, Queue, check_name
from pxrs.registry.contract import ABSENT, Registry
from pxrs.registry.steps import drive

_logger = logging.getLogger(__name__)

SETTINGS_AGE_S: Final = 1.0
"""How old remembered settings may be."""
ATTEMPTS_MAX: Final = 200
_PAUSE_S_MAX: Final = 0.02

T = TypeVar("T")


class QueueCatalog:
    """Threads share it. `_lock` guards `_known`, and is not held during a call of the registry."""

    def __init__(
        self,
        registry: Registry,
        versions: PutVersions,
        on_gone: Callable[[Queue], None],
        recorder: Recorder = LOGGED_ONLY,
    ) -> None:
        """on_gone: called with a queue that this process knew and that was found deleted."""
        self._registry, self._recorder = registry, recorder
        self._versions = versions
        self._on_gone = on_gone
        self._lock = threading.Lock()
        self._known: dict[str, tuple[Queue, float]] = {}
        """By name: the settings, and the time (`time.monotonic`) from which on they have to be read again."""

    def create(
        self, name: str, policy: Policy, is_fifo: bool, backoff: Backoff | None, *, exist_ok: bool = False
    ) -> Queue:
        """Create a queue. Raises QueueExists.

        exist_ok: return the queue that has the name if its settings are those given here. Raises QueueDiffers if they
                  are not."""
        wall_time = self._registry.clock.wall_time_us() / 1e6
        asked = Queue(name, uuid.uuid4().hex, policy, bool(is_fifo), backoff, wall_time)
        if not exist_ok:
            return self._create(asked)
        for _ in range(ATTEMPTS_MAX):
            found = self._look_up(name)
            if found is not None:
                if differences := found.differences(asked):
                    raise QueueDiffers(name, differences)
                return found
            try:
                return self._create(asked)
            except QueueExists:
                continue  # another process created it between the two calls: compare its settings
        raise RegistryUnavailable(
            f"queue {name!r} was created and deleted by other processes {ATTEMPTS_MAX} times; try again"
        )

    def _create(self, queue: Queue) -> Queue:
        try:
            with attempted(self._recorder, "create_queue", queue=queue.name):
                versions = self._registry.commit(
                    {queue.key: ABSENT, queue.existence: ABSENT},
                    {queue.key: queue.dump(), queue.existence: queue.name.encode()},
                )
        except Conflict:
            raise QueueExists(f"queue {queue.name!r} already exists: use it, or choose another name") from None
        self._versions.created(queue, versions[queue.existence])
        self._recorder.audit("create_queue", queue=queue.name)
        return queue

    def alter(self, name: str, changes: Mapping[str, Any]) -> Queue:
        """Change fields of a queue's settings. Raises UnknownQueue, InvalidQueue."""
        check_name(name)
        for _ in range(ATTEMPTS_MAX):
            entry = self._registry.get(f"{QUEUES}{name}")
            if entry is None:
                raise self.unknown(name)
            before = Queue.load(entry.key, entry.value)
            after = replace(before, **changes)
            if after != before:
                try:
                    with attempted(self._recorder, "alter_queue", queue=name):
                        self._registry.commit({entry.key: entry.version}, {entry.key: after.dump()})
                except Conflict:
                    continue  # another process has changed it, or has deleted the queue
                told = {each: str(value) for each, value in changes.items()}
                self._recorder.audit("alter_queue", queue=name, changes=told)
            with self._lock:
                self._known[name] = after, time.monotonic() + SETTINGS_AGE_S
            return after
        raise RegistryUnavailable(f"queue {name!r} was changed by other processes {ATTEMPTS_MAX} times; try again")

    def queues(self) -> list[Queue]:
        """All queues. Those whose settings are damaged are logged and left out."""
        found = []
        for entry in self._registry.scan(QUEUES):
            try:
                found.append(Queue.load(entry.key, entry.value))
            except RegistryCorrupt as error:
                _logger.error("queues of %s: %s", self._registry.url, error)
        return found

    def queue(self, name: str) -> Queue:
        """A queue's settings. Raises UnknownQueue."""
        check_name(name)
        with self._lock:
            known = self._known.get(name)
        if known is not None and time.monotonic() < known[1]:
            return known[0]
        queue = self._look_up(name)
        if queue is None:
            raise self.unknown(name)
        return queue

    def queue_of(self, queue: Queue) -> Queue:
        """The settings of this queue as this process remembers them last, without a call of the registry."""
        with self._lock:
            known = self._known.get(queue.name)
        return queue if known is None or known[0].id != queue.id else known[0]

    def _look_up(self, name: str) -> Queue | None:
        """Read a queue's settings from the registry, whatever this process remembers, and remember them. None if there
        is no queue of this name. What was remembered of a deleted queue is forgotten."""
        with self._lock:
            known = self._known.get(name)  # before the read: what another thread learns meanwhile is not forgotten
        entry = self._registry.get(f"{QUEUES}{name}")
        if entry is None:
            with self._lock:
                self._known.pop(name, None)
            if known is not None:
                self._forget(known[0])
            return None
        queue = Queue.load(entry.key, entry.value)
        if known is not None and known[0].id != queue.id:
            self._forget(known[0])
        with self._lock:
            self._known[name] = queue, time.monotonic() + SETTINGS_AGE_S
        return queue

    def unknown(self, name: str) -> UnknownQueue:
        """The error for a queue that is not there, or not any more although another one has its name."""
        return UnknownQueue(name, [queue.name for queue in self.queues() if queue.name != name])

    def check_exists(self, queue: Queue) -> None:
        """Read the queue's settings again. Raises UnknownQueue if it was deleted, also if another one has its name."""
        self._expire(queue)
        self.check_same(queue)

    def check_same(self, queue: Queue) -> None:
        """As `check_exists`, but as far as this process remembers."""
        if self.queue(queue.name).id != queue.id:
            raise self.unknown(queue.name)

    def retry(self, targets: Sequence[Queue], owned: Callable[[], Collection[str]], attempt: Callable[[], T]) -> T:
        """Make a commit that puts items into the queues `targets`, again and again while it is refused because of keys
        that others change at any time: the last number of a FIFO queue, a queue's existence, or a checkpoint of this
        consumer that was applied late. What is remembered of the targets is read again after each refusal.

        owned: returns the keys that nobody else may change. A Conflict that names one of them is raised."""
        for count in range(ATTEMPTS_MAX):
            try:
                return attempt()
            except BaseException as error:
                for queue in targets:
                    self._versions.forget_number(queue)
                    if isinstance(error, Conflict) and queue.existence in error.keys:
                        self._expire(queue)
                if not isinstance(error, Conflict) or not set(error.keys).isdisjoint(owned()):
                    raise
            time.sleep(random.random() * min(0.001 * 2**count, _PAUSE_S_MAX))
        raise RegistryUnavailable(
            f"{self._registry.url}: commits of other processes conflicted with this one {ATTEMPTS_MAX} times; try again"
        )

    def delete(self, name: str) -> None:
        """Delete a queue with its items. What was taken from it cannot be committed any more.

        It may be called again after an error: what is left of deleted queues is removed. Raises UnknownQueue."""
        check_name(name)
        entry = self._registry.get(f"{QUEUES}{name}")
        if entry is None:
            if name not in self.clear_deleted():
                raise self.unknown(name)
            return
        try:
            with attempted(self._recorder, "delete_queue", queue=name):
                queue = drive(delete_queue(entry, self._versions), self._registry)
            # Before what is left of it is removed: that may fail, and the queue is deleted.
            self._recorder.audit("delete_queue", queue=name)
        except Conflict:
            raise self.unknown(name) from None
        except RegistryUnavailable as error:
            error.add_note("if other programs keep putting items into the queue, stop them first")
            raise
        with self._lock:
            self._known.pop(name, None)
        self._forget(queue)
        self.clear_deleted()

    def clear_deleted(self) -> set[str]:
        """Remove the keys that are left of deleted queues. The names of these queues."""
        names = set()
        for deleted in self._registry.scan(DELETED):
            drive(clear_deleted(deleted, self._registry.limits), self._registry)
            names.add(deleted.value.decode(errors="replace"))
        return names

    def _expire(self, queue: Queue) -> None:
        """The settings are read again when they are next asked for."""
        with self._lock:
            if queue.name in self._known:
                self._known[queue.name] = self._known[queue.name][0], 0.0

    def _forget(self, queue: Queue) -> None:
        self._versions.forget(queue)
        self._on_gone(queue)
