"""What the tests of queues share: registries that behave as some stores do, and things that go wrong at one commit."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from pxrs.clock import Clock
from pxrs.errors import (
    OutcomeUnknown,
    RegistryUnavailable,
)
from pxrs.hub import Hub
from pxrs.queue.records import OUTCOMES, QUEUES
from pxrs.queue.transaction import Transaction
from pxrs.registry.contract import Commit, Entry
from pxrs.registry.memory import MemoryStore
from pxrs.registry.state import Change
from pxrs.testing import waiting
from pxrs.testing.hooked import HookedRegistry, SharedStore, store_of
from tests.unit.numbered import send_numbers

PATIENCE_S = 30.0
eventually = partial(waiting.eventually, patience_s=PATIENCE_S)


class RecountingRegistry(HookedRegistry):
    """As ZooKeeper has it: the versions of a key that is made again are those of the one before it (R4)."""

    def _get(self, key: str) -> Entry | None:
        found = super()._get(key)
        return replace(found, version=1) if found is not None and key.startswith(QUEUES) else found

    def _commit(self, commit: Commit) -> dict[str, int]:
        expect = dict(commit.expect)
        for key, version in commit.expect.items():
            if key.startswith(QUEUES) and version == 1 and (found := super()._get(key)) is not None:
                expect[key] = found.version
        return super()._commit(replace(commit, expect=expect))


class QuietStore(MemoryStore):
    """As PostgreSQL has it: a quiet commit wakes nobody."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._is_quiet = threading.local()

    def commit(self, commit: Commit) -> dict[str, int]:
        self._is_quiet.now = commit.quiet
        try:
            return super().commit(commit)
        finally:
            self._is_quiet.now = False

    def _apply(self, change: Change) -> int:
        handles = self._handles
        if getattr(self._is_quiet, "now", False):
            self._handles = weakref.WeakSet()
        try:
            return super()._apply(change)
        finally:
            self._handles = handles


def die(place: SharedStore, hub: Hub) -> None:
    """The hub's process is stopped, for longer than its lease lives; it does not know yet."""
    taker = store_of(hub)._taker
    assert taker is not None
    taker.lease.abandon()
    for _ in range(8):  # in steps, so that the others renew theirs
        place.clock.advance(2.4)
        time.sleep(0.01)


def fail(hub: Hub, queue: str, why: str = "it failed", target: str | None = None) -> Transaction:
    """Take an item, perhaps put it elsewhere, and fail."""
    tx = hub.transaction()

    def work() -> None:
        with tx:
            item = tx.take(queue, timeout=PATIENCE_S)
            assert item is not None
            if target is not None:
                tx.put(target, item.value)
            raise ZeroDivisionError(why)

    with pytest.raises(ZeroDivisionError):
        work()
    return tx


def once(matches: Callable[[Commit], bool], act: Callable[[Commit], Any]) -> Callable[[Commit], None]:
    """Do this at the first commit that is such a one."""
    left = [act]

    def hook(commit: Commit) -> None:
        if left and matches(commit):
            left.pop()(commit)

    return hook


def values(hub: Hub, queue: str) -> list[bytes]:
    return sorted(item.value for item in hub.queue(queue).peek(100))


def raise_once(matches: Callable[[Commit], bool], error: BaseException) -> Callable[[Commit], None]:
    """Raise this at the first commit that matches."""

    def fail_with_it(commit: Commit) -> None:
        raise error

    return once(matches, fail_with_it)


def names_slots(commit: Commit) -> bool:
    return any(key.startswith(OUTCOMES) for key in commit.put)


def gives_back(commit: Commit) -> bool:
    return any("/inflight/" in key for key in commit.delete) and any("/ready/" in key for key in commit.put)


def takes(commit: Commit) -> bool:
    return any("/inflight/" in key for key in commit.put)


def puts(commit: Commit) -> bool:
    return any("/ready/" in key for key in commit.put)


def lose_the_reply(commit: Commit) -> None:
    raise OutcomeUnknown("the reply was lost")


def be_away(commit: Commit) -> None:
    raise RegistryUnavailable("away")


def with_topic(hub: Hub, count: int, partitions: int = 1) -> Hub:
    """Create a topic `t` with so many messages, and a queue `jobs`."""
    hub.create_topic("t", partitions=partitions)
    hub.create_queue("jobs")
    send_numbers(hub, "t", count, partitions)
    return hub


def waiters(hub: Hub) -> int:
    """How many threads of this hub wait for items."""
    return sum(head._waiters for head in store_of(hub)._heads.values())


def is_waiting(hub: Hub, queue: str) -> bool:
    """Whether a thread of this hub has found the queue empty and waits for items."""
    return any(head.queue.name == queue and head._waiting.locked() for head in store_of(hub)._heads.values())
