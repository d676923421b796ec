"""The two suites: for every registry, and in addition for those that several processes share."""

from __future__ import annotations

import random
import signal
import time

import pytest

from pxrs.errors import (
    LeaseExpired,
)
from pxrs.registry import ABSENT
from pxrs.testing.history import record
from pxrs.testing.linearizability import check
from pxrs.testing.registry_contract.commits import BadInput, Commits
from pxrs.testing.registry_contract.keys import Keys, Scans
from pxrs.testing.registry_contract.leases import Leases
from pxrs.testing.registry_contract.lifecycle import Lifecycle
from pxrs.testing.registry_contract.races import Races
from pxrs.testing.registry_contract.snapshots import Snapshots
from pxrs.testing.registry_contract.store import Store, quieten
from pxrs.testing.registry_contract.watches import Watches
from pxrs.testing.waiting import eventually


class RegistryContract(Keys, Scans, Commits, BadInput, Lifecycle, Races, Leases, Watches, Snapshots):
    """The contract of every backend, tested with threads."""


class SharedRegistryContract(RegistryContract):
    """The further contract of backends that processes share, tested with real processes."""

    def test_one_of_many_processes_wins_each_claim(self, store: Store) -> None:
        actors = [store.actor() for _ in range(4)]
        for i in range(10):
            for number, actor in enumerate(actors):
                actor.send("claim", key=f"claim/{i}", value=b"%d" % number)
            winners = [number for number, actor in enumerate(actors) if actor.receive()]
            assert len(winners) == 1
            entry = store.open().get(f"claim/{i}")
            assert entry is not None
            assert entry.value == b"%d" % winners[0]

    def test_no_increment_is_lost_between_processes(self, store: Store) -> None:
        actors = [store.actor() for _ in range(3)]
        for actor in actors:
            actor.send("increment", key="n", times=25)
        for actor in actors:
            actor.receive()
        entry = store.open().get("n")
        assert entry is not None
        assert entry.value == b"75"

    def test_r1_histories_of_several_processes_are_linearizable(self, store: Store) -> None:
        seed = random.randrange(1 << 30)
        deletes = store.backend.versions_outlive_deletion
        history = record([store.url], 3, 60, seed, keys=("a", "b", "c/d"), deletes=deletes)
        assert len(history) > 100
        verdict = check(history)
        assert verdict.ok, f"seed {seed}: {verdict}"

    def test_kill_9_leaves_all_keys_of_a_commit_or_none(self, store: Store) -> None:
        registry = store.open()
        keys = ["twin/a", "twin/b", "twin/c"]
        dice = random.Random(7)
        for _ in range(5):
            with store.actor() as actor:
                before = registry.get(keys[0])
                actor.send("twin_writes", keys=keys)
                eventually(lambda b=before: registry.get(keys[0]) != b)  # type: ignore[misc]
                time.sleep(dice.random() * 0.02)  # at a random moment of its work
                actor.signal(signal.SIGKILL)
            # What the killed client has sent may still be applied, but only as a whole.
            eventually(lambda: len({(e.value, e.version) for e in registry.scan("twin/")}) == 1)

    def test_a_killed_holder_is_noticed(self, store: Store) -> None:
        registry = store.open()
        with store.actor() as holder:
            ttl = holder.call("lease", ttl=store.backend.ttl)
            holder.call("commit", ephemeral={"m": b""}, lease=True)
            with registry.watch("m") as watch:
                quieten(watch)
                holder.signal(signal.SIGKILL)
                while registry.get("m") is not None:
                    assert watch.wait(ttl + store.backend.expiry_slack), "the expiry did not wake the watch"

    def test_w2_kill_9_of_the_process_does_not_end_an_unrenewed_lease(self, store: Store) -> None:
        registry = store.open()
        with store.actor() as holder:
            secret = holder.call("unrenewed_lease", ttl=30)
            holder.call("commit", ephemeral={"m": b""}, lease=True)
            holder.signal(signal.SIGKILL)
        assert registry.get("m") is not None
        attached = registry.attach(secret)
        registry.commit(put={"after": b""}, lease=attached)
        assert [entry.key for entry in registry.scan("")] == ["after", "m"]
        attached.end()
        assert registry.get("m") is None

    def test_a_stopped_holder_expires_and_finds_itself_expired(self, store: Store) -> None:
        registry = store.open()
        with store.actor() as holder:
            ttl = holder.call("lease", ttl=store.backend.ttl)
            holder.call("commit", ephemeral={"m": b""}, lease=True)
            with registry.watch("m") as watch:
                holder.signal(signal.SIGSTOP)
                while registry.get("m") is not None:
                    assert watch.wait(ttl + store.backend.expiry_slack), "the expiry did not wake the watch"
            registry.commit(expect={"m": ABSENT}, put={"owner": b"other"})
            holder.signal(signal.SIGCONT)
            with pytest.raises(LeaseExpired):
                holder.call("commit", put={"owner": b"zombie"}, lease=True)
            assert not holder.call("lease_state")["alive"]
        entry = registry.get("owner")
        assert entry is not None
        assert entry.value == b"other"

    def test_a_change_in_another_process_wakes(self, store: Store) -> None:
        registry = store.open()
        with store.actor() as actor:
            for i in range(3):
                actor.send("wait_change", prefix="w/", timeout=10)
                assert actor.receive() == "watching"
                registry.commit(put={"w/a": b"%d" % i})
                actor.receive()
