"""Commits of several threads that come together are made together.

The problem: each take and each transaction is a commit of its own, and a durable commit costs the store about the same
for one item as for twenty. With many threads in a process most of them wait for the store.

So one thread at a time commits, and takes along what the others have brought meanwhile. Alone, a thread waits for
nobody. They share no keys but such as all of them only expect, in the same version, or are not put together; so all of
them together happen exactly when each of them may.

On failure: those that a conflict names are refused, and the rest is tried again without them. An unknown outcome is
unknown for all that were in it. What else the store says is said to each."""

from __future__ import annotations

import copy
import threading
from collections import deque
from typing import Final

from pxrs.errors import Conflict, OutcomeUnknown
from pxrs.queue.moves import Changes
from pxrs.registry.contract import Registry
from pxrs.registry.lease import Lease

TOGETHER_MAX: Final = 64
_LOOK_S: Final = 1.0
_BYTES_MAX: Final = 1 << 20
"""More at once would keep the small ones waiting for the large."""


class _Request:
    __slots__ = ("changed", "changes", "error", "is_done", "is_quiet", "keys", "lease", "size", "versions")

    def __init__(self, changes: Changes, lease: Lease | None, is_quiet: bool) -> None:
        self.changes, self.lease, self.is_quiet = changes, lease, is_quiet
        self.changed = {*changes.put, *changes.delete}
        self.keys = {*changes.expect, *self.changed}
        self.size = sum(map(len, self.keys)) + sum(map(len, changes.put.values()))
        self.is_done = False
        self.versions: dict[str, int] = {}
        self.error: BaseException | None = None

    def end(self, error: BaseException | None = None) -> None:
        self.error = error
        self.is_done = True


class Combiner:
    """For the commits of one process to one registry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._changed = threading.Condition()
        self._waiting: deque[_Request] = deque()
        self._leader: _Request | None = None

    def commit(self, changes: Changes, lease: Lease | None = None, *, quiet: bool = False) -> dict[str, int]:
        """As `Registry.commit`."""
        self._registry._check_usable()  # a forked child: the leader is the parent's
        request = _Request(changes, lease, quiet)
        together: list[_Request] = []
        try:
            with self._changed:
                self._waiting.append(request)
            while not request.is_done:
                with self._changed:
                    while self._leader is not None and not request.is_done:
                        self._changed.wait(_LOOK_S)  # an interrupt may have kept the leader from telling
                    if request.is_done:
                        break
                    self._leader = request
                    together = self._next()
                self._perform(together)
                self._leader = None
                with self._changed:
                    self._changed.notify_all()
        except BaseException:
            if self._leader is request:
                self._waiting.extendleft([each for each in reversed(together) if not each.is_done])  # never sent
                self._leader = None
            if not request.is_done and request in self._waiting:  # never sent
                self._waiting.remove(request)
            raise
        if request.error is not None:
            raise request.error
        return request.versions

    def _next(self) -> list[_Request]:
        """The first that waits, and those behind it that go well with it. Others keep their places."""
        limits = self._registry.limits
        waiting = list(self._waiting)
        first, *behind = waiting
        together, others = [first], []
        keys, changed, expect, size = set(first.keys), set(first.changed), dict(first.changes.expect), first.size
        bytes_max = min(limits.commit_bytes_max, _BYTES_MAX)
        for request in behind:
            if (
                len(together) < TOGETHER_MAX
                and request.lease is first.lease
                and size + request.size <= bytes_max
                and len(keys | request.keys) <= limits.commit_keys_max
                and keys.isdisjoint(request.changed)
                and changed.isdisjoint(request.keys)
                and all(expect.get(key, version) == version for key, version in request.changes.expect.items())
            ):
                together.append(request)
                keys |= request.keys
                changed |= request.changed
                expect |= request.changes.expect
                size += request.size
            else:
                others.append(request)
        self._waiting = deque(others)  # last, and at once: an interrupt leaves all where they are
        return together

    def _perform(self, together: list[_Request]) -> None:
        try:
            while together:
                try:
                    versions = self._commit(together)
                except Conflict as conflict:
                    together = _refuse(together, conflict)
                    continue
                for request in together:
                    request.versions = {key: versions[key] for key in request.changes.put}
                    request.end()
                return
        except Exception as error:  # noqa: BLE001 - each raises it in its own thread
            for request in together:
                told = copy.copy(error)
                told.__cause__ = error
                request.end(told)
        except BaseException:  # an interrupt of this thread: the others only know that they do not know
            for request in together:
                request.end(OutcomeUnknown(f"{self._registry.url}: the thread that committed was interrupted"))
            raise

    def _commit(self, together: list[_Request]) -> dict[str, int]:
        expect: dict[str, int] = {}
        put: dict[str, bytes] = {}
        delete: list[str] = []
        for request in together:
            expect |= request.changes.expect
            put |= request.changes.put
            delete += request.changes.delete
        is_quiet = all(request.is_quiet for request in together)
        return self._registry.commit(expect, put, lease=together[0].lease, delete=delete, quiet=is_quiet)


def _refuse(together: list[_Request], conflict: Conflict) -> list[_Request]:
    """Refuse those that the conflict names; the others."""
    differing = set(conflict.keys)
    rest = [request for request in together if request.keys.isdisjoint(differing)]
    for request in together:
        if mine := [key for key in conflict.keys if key in request.keys]:
            request.end(Conflict(mine))
    if len(rest) == len(together):  # it names nothing of theirs, which cannot be
        raise conflict
    return rest
