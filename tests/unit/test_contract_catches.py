"""The contract suite has teeth: a backend with one safety rule removed does not pass it."""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from pxrs.errors import Conflict, LeaseExpired
from pxrs.registry.lease import Lease
from pxrs.registry.memory import MemoryRegistry, MemoryStore, Renewed
from pxrs.registry.renewal import Renewer
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


class RenewsAll(MemoryRegistry):
    """Leases that are not to be renewed are renewed."""

    def lease(self, ttl: float | timedelta, renewed: bool = True) -> Lease:
        lease = super().lease(ttl, renewed)
        if not renewed:
            self._renewer.add(lease)
        return lease


class RenewsNothing(MemoryStore):
    """A renewal is answered, and the lease's expiry stays as it was."""

    def renew_lease(self, lease: str) -> Renewed:
        expiry = self._expiry.get(lease, 0.0)
        renewed = super().renew_lease(lease)
        self._expiry[lease] = expiry
        return renewed


class Revives(MemoryStore):
    """A renewal begins a lease anew that has ended."""

    def renew_lease(self, lease: str) -> Renewed:
        try:
            return super().renew_lease(lease)
        except LeaseExpired:
            return Renewed(0.6, self.begin_lease(lease, 0.6))


class AttachesById(MemoryRegistry):
    """The id of a lease, which is in logs, is as good as its secret."""

    def _attach(self, secret: str, renewed: bool) -> Lease:
        try:
            return super()._attach(secret, renewed)
        except LeaseExpired:
            ttl, deadline = self._store.renew_lease(secret)
            return self._grant(secret, ttl, deadline)


class TellsWhatExists(MemoryRegistry):
    """A wrong secret and one of a lease that has ended get different answers."""

    def _attach(self, secret: str, renewed: bool) -> Lease:
        try:
            return super()._attach(secret, renewed)
        except LeaseExpired:
            raise LeaseExpired(f"no lease {secret}") from None


class CloseEndsAll(MemoryRegistry):
    """A handle that is closed ends its unrenewed leases too."""

    def close(self) -> None:
        for lease in list(self._unrenewed):
            lease.end()
        super().close()


class EndsHereAlone(MemoryStore):
    """The end of a lease is not written."""

    def end_lease(self, lease: str) -> None:
        return


class OneByOne(MemoryRegistry):
    """Renewals wait for each other."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self._renewer = Renewer(self.clock, workers_max=1)


class ThreadEach(MemoryRegistry):
    """A thread for each lease."""

    def lease(self, ttl: float | timedelta, renewed: bool = True) -> Lease:
        lease = super().lease(ttl, renewed)
        threading.Thread(target=lease.lost.wait, args=(60,), daemon=True).start()
        return lease


def run(kind: type[Any], name: str, ttl: float = 0.6) -> None:
    """Run one test of the suite, with the arguments that pytest would give it, on a store of this kind."""
    handle = kind if issubclass(kind, MemoryRegistry) else MemoryRegistry
    stores: dict[str, MemoryStore] = defaultdict(lambda: make(State if handle is kind else kind))
    with ExitStack() as stack:
        backend = Backend("memory:", expiry_slack=1.0, opener=lambda url: handle(stores[url]))
        store = Store(backend, stack)
        give: dict[str, Callable[[], Any]] = {
            "store": lambda: store,
            "registry": store.open,
            "ttl": lambda: ttl,
            "renewed": lambda: True,
        }
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
    (RenewsAll, "test_w2_an_unrenewed_lease_lives_as_long_as_somebody_renews_it_and_no_longer"),
    (RenewsNothing, "test_w2_an_unrenewed_lease_lives_as_long_as_somebody_renews_it_and_no_longer"),
    (Revives, "test_w2_an_unrenewed_lease_lives_as_long_as_somebody_renews_it_and_no_longer"),
    (EndsHereAlone, "test_w2_another_handle_attaches_commits_renews_and_ends"),
    (AttachesById, "test_w2_a_secret_cannot_be_guessed_and_a_wrong_one_tells_nothing"),
    (TellsWhatExists, "test_w2_a_secret_cannot_be_guessed_and_a_wrong_one_tells_nothing"),
    (CloseEndsAll, "test_w2_closing_the_handle_leaves_an_unrenewed_lease"),
    (OneByOne, "test_r6_a_renewal_that_hangs_does_not_expire_another_lease"),
    (ThreadEach, "test_threads_do_not_grow_with_leases"),
    (SameVersion, "test_every_write_changes_the_version"),
    (Torn, "test_what_was_put_is_read_back_with_its_version"),
    (Deaf, "test_a_single_key_is_watched"),
]


@pytest.mark.parametrize(("broken", "name"), MUTATIONS)
def test_a_broken_store_is_caught(broken: type[Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Watch.wait
    monkeypatch.setattr(Watch, "wait", lambda watch, timeout: wait(watch, min(timeout, 0.5)))  # it waits for nothing
    with pytest.raises((AssertionError, pytest.fail.Exception, Conflict, LeaseExpired)):
        run(broken, name)


@pytest.mark.parametrize("name", sorted({name for _, name in MUTATIONS}))
def test_the_same_test_passes_on_the_sound_store(name: str) -> None:
    run(State, name, ttl=2.0)  # a lease that no thread of a busy machine fails to renew
