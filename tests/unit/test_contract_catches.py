"""The contract suite has teeth: a backend with one safety rule removed does not pass it."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from pxrs.errors import Conflict, LeaseExpired
from pxrs.registry.memory import MemoryRegistry, MemoryStore
from pxrs.registry.state import Change, State
from pxrs.registry.watch import Watch
from pxrs.testing.registry_contract import Backend, RegistryContract, Store


class NoFence(State):
    """Expectations are not checked."""

    def refusal(self, expect: Mapping[str, int], lease: str | None) -> Conflict | LeaseExpired | None:
        return super().refusal({}, lease)


class NoAbsence(State):
    """ABSENT is taken for "any"."""

    def refusal(self, expect: Mapping[str, int], lease: str | None) -> Conflict | LeaseExpired | None:
        return super().refusal({key: version for key, version in expect.items() if version}, lease)


class NoLeaseCheck(State):
    """A dead lease may write."""

    def refusal(self, expect: Mapping[str, int], lease: str | None) -> Conflict | LeaseExpired | None:
        return super().refusal(expect, None)


class KeysOutliveLeases(State):
    def apply(self, change: Change, version: int) -> list[str]:
        if change.leases_end:
            for lease in change.leases_end:
                self.leases.pop(lease, None)
            return []
        return super().apply(change, version)


class SameVersion(MemoryStore):
    """Every write gives version 1."""

    def _apply(self, change: Change) -> int:
        self._version = 0
        return super()._apply(change)


class Torn(State):
    """Of several keys only the first is written."""

    def apply(self, change: Change, version: int) -> list[str]:
        return super().apply(replace(change, put=dict(list(change.put.items())[:1])), version)


class Deaf(MemoryStore):
    """Watchers are told of nothing."""

    def _apply(self, change: Change) -> int:
        self._version += 1
        self._state.apply(change, self._version)
        return self._version


def run(kind: type[Any], name: str) -> None:
    """Run one test of the suite, with the arguments that pytest would give it, on a store of this kind."""
    stores: dict[str, MemoryStore] = defaultdict(lambda: make(kind))
    with ExitStack() as stack:
        store = Store(Backend("memory:", opener=lambda url: MemoryRegistry(stores[url])), stack)
        give: dict[str, Callable[[], Any]] = {"store": lambda: store, "registry": store.open, "ttl": lambda: 0.6}
        test = getattr(RegistryContract(), name)
        test(**{argument: give[argument]() for argument in inspect.signature(test).parameters})


def make(kind: type[Any]) -> MemoryStore:
    if issubclass(kind, MemoryStore):
        return kind()
    store = MemoryStore()
    store._state = kind()
    return store


MUTATIONS = [
    (NoFence, "test_a_conflict_names_the_keys_and_writes_nothing"),
    (NoFence, "test_a_stale_version_conflicts_however_old"),
    (NoFence, "test_exactly_one_of_many_claims_wins"),
    (NoAbsence, "test_expecting_absent_what_is_there_conflicts"),
    (NoAbsence, "test_exactly_one_of_many_claims_wins"),
    (NoAbsence, "test_r7_two_commits_that_each_expect_the_others_key_absent"),
    (NoLeaseCheck, "test_r3_a_commit_with_an_expired_lease_is_refused"),
    (NoLeaseCheck, "test_r3_an_expired_lease_is_never_revived"),
    (KeysOutliveLeases, "test_ephemeral_keys_go_when_the_lease_is_closed"),
    (KeysOutliveLeases, "test_a_successor_claims_when_the_member_key_is_gone"),
    (SameVersion, "test_every_write_changes_the_version"),
    (Torn, "test_what_was_put_is_read_back_with_its_version"),
    (Deaf, "test_a_single_key_is_watched"),
]


@pytest.mark.parametrize(("broken", "name"), MUTATIONS)
def test_a_broken_store_is_caught(broken: type[Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Watch.wait
    monkeypatch.setattr(Watch, "wait", lambda watch, timeout: wait(watch, min(timeout, 0.5)))  # it waits for nothing
    with pytest.raises((AssertionError, pytest.fail.Exception, Conflict)):
        run(broken, name)


@pytest.mark.parametrize("name", sorted({name for _, name in MUTATIONS}))
def test_the_same_test_passes_on_the_sound_store(name: str) -> None:
    run(State, name)
