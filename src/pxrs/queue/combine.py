"""Merges the commits that several threads of a process want to make at the same time into one.

The problem: each take and each transaction is a commit of its own, and a durable commit costs the store about the same
for one item as for twenty. With many threads in a process most of them wait for the store.

So one thread at a time commits, and merges into its commit what the other threads have requested meanwhile. A thread
that is alone waits for nobody. Two requests are merged only if neither changes a key that the other one names, and
their expectations of shared keys agree. So the merged commit succeeds exactly if each of its requests would.

On failure: the requests that a conflict names are refused, and the rest is committed without them. If a server does not
permit the merged commit, each request is committed by itself, so that only the ones that are not permitted fail. If the
outcome of the merged commit is unknown, it is unknown for each request in it. Any other error is raised by each of
them."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections import deque
from typing import Final

from pxrs.errors import Conflict, NotPermitted, OutcomeUnknown, RegistryUnavailable, UsedAfterFork
from pxrs.registry.contract import Registry
from pxrs.registry.lease import Lease
from pxrs.registry.steps import Write

TOGETHER_MAX: Final = 64
_LOOK_S: Final = 1.0
_BYTES_MAX: Final = 1 << 20
"""Of a merged commit, so that small requests do not wait for many large ones."""


class _Request:
    __slots__ = ("changed", "changes", "error", "is_done", "keys", "lease", "size", "versions")

    def __init__(self, changes: Write, lease: Lease | None) -> None:
        self.changes, self.lease = changes, lease
        self.size = -1
        """Of its keys and values, in bytes; -1 before `measure` was called."""
        self.is_done = False
        self.versions: dict[str, int] = {}
        self.error: BaseException | None = None

    def measure(self) -> None:
        """Set `changed`, `keys` and `size`, which decide whether the request can be merged with others. A request that
        is alone needs none of them."""
        if self.size >= 0:
            return
        changes = self.changes
        self.changed = {*changes.put, *changes.delete}
        self.keys = {*changes.expect, *self.changed}
        self.size = sum(map(len, self.keys)) + sum(map(len, changes.put.values()))

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
        """The request whose thread commits now."""
        self._pid = os.getpid()

    def commit(self, write: Write, lease: Lease | None = None) -> dict[str, int]:
        """As `Registry.commit`, without ephemeral keys. lease: named by the commit if the write `is_leased`.

        Waits for commits of other threads for up to the registry's `timeout`, and then raises RegistryUnavailable:
        while the store does not answer, each of the commits before this one takes that long."""
        if os.getpid() != self._pid:  # a thread of the parent may be the leader, and is not in this process
            raise UsedAfterFork(f"the registry {self._registry.url} was opened before a fork: open it in the child")
        assert not write.ephemeral
        request = _Request(write, lease if write.is_leased else None)
        if self._leader is not None:
            request.measure()  # here, and not under the lock
        together: list[_Request] = []
        until = time.monotonic() + self._registry.timeout_s
        try:
            with self._changed:
                self._waiting.append(request)
            while not request.is_done:
                with self._changed:
                    while self._leader is not None and not request.is_done:
                        if time.monotonic() >= until and request in self._waiting:  # no leader has it
                            self._waiting.remove(request)  # under the lock: no leader may take it now
                            raise RegistryUnavailable(
                                f"{self._registry.url}: commits of other threads took {self._registry.timeout_s:g} s "
                                "(`timeout` of the address), so this one was not sent: check that the store answers"
                            )
                        # For a bounded time: a KeyboardInterrupt may have kept the leader from notifying.
                        self._changed.wait(_LOOK_S)
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
        """The first waiting request, and those behind it that can be merged with it. The others keep their places."""
        first, *behind = self._waiting
        if not behind:
            self._waiting = deque()
            return [first]
        limits = self._registry.limits
        for request in self._waiting:
            request.measure()
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
        self._waiting = deque(others)  # in one step, and last: an interrupt before it leaves all requests waiting
        return together

    def _perform(self, together: list[_Request]) -> None:
        try:
            while together:
                try:
                    versions = self._commit(together)
                except Conflict as conflict:
                    together = _refuse(together, conflict)
                    continue
                except NotPermitted:
                    if len(together) == 1:
                        raise
                    alone, *together = together
                    self._perform([alone])
                    continue
                for request in together:
                    is_alone = len(together) == 1
                    request.versions = versions if is_alone else {key: versions[key] for key in request.changes.put}
                    request.end()
                return
        except Exception as error:  # noqa: BLE001 - each request raises it in its own thread
            for request in together:
                told = copy.copy(error)
                told.__cause__ = error
                request.end(told)
        except BaseException:  # an interrupt of this thread: nobody knows whether the commit was sent
            for request in together:
                request.end(OutcomeUnknown(f"{self._registry.url}: the thread that committed was interrupted"))
            raise

    def _commit(self, together: list[_Request]) -> dict[str, int]:
        first = together[0]
        if len(together) == 1:
            write = first.changes
            return self._registry.commit(
                write.expect, write.put, lease=first.lease, delete=write.delete, quiet=write.is_quiet
            )
        expect: dict[str, int] = {}
        put: dict[str, bytes] = {}
        delete: list[str] = []
        for request in together:
            expect |= request.changes.expect
            put |= request.changes.put
            delete += request.changes.delete
        is_quiet = all(request.changes.is_quiet for request in together)
        return self._registry.commit(expect, put, lease=first.lease, delete=delete, quiet=is_quiet)


def _refuse(together: list[_Request], conflict: Conflict) -> list[_Request]:
    """Refuse the requests that the conflict names. Returns the others."""
    if len(together) == 1:
        together[0].end(Conflict(conflict.keys))
        return []
    differing = set(conflict.keys)
    rest = [request for request in together if request.keys.isdisjoint(differing)]
    for request in together:
        if mine := [key for key in conflict.keys if key in request.keys]:
            request.end(Conflict(mine))
    if len(rest) == len(together):  # it names none of their keys: an error of the store
        raise conflict
    return rest
