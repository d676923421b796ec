"""Leases and the keys that live with them: who renews them, who may attach, and what ends them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pxrs.clock import SYSTEM
from pxrs.errors import (
    Conflict,
    InvalidArgument,
    InvalidCommit,
    LeaseExpired,
)
from pxrs.registry import ABSENT, Lease, Registry
from pxrs.testing.registry_contract.store import Backend, Fixtures, Store, at_once, end_in_store
from pxrs.testing.waiting import eventually

LONG_S = 30
"""Time to live of leases in tests that await no expiry: none of them expires if the test is held up."""


class Leases(Fixtures):
    @pytest.fixture
    def ttl(self, backend: Backend) -> float:
        return backend.ttl

    def test_ephemeral_keys_go_when_the_lease_is_closed(self, store: Store, registry: Registry) -> None:
        other = store.open()
        with registry.lease(LONG_S) as lease:
            registry.commit(ephemeral={"m/1": b"x", "m/2": b""}, put={"stays": b""}, lease=lease)
            assert [e.key for e in other.scan("")] == ["m/1", "m/2", "stays"]
        assert [e.key for e in other.scan("")] == ["stays"]
        assert not lease.alive
        lease.close()

    def test_renewal_keeps_it_alive(self, store: Store, registry: Registry, ttl: float) -> None:
        other = store.open()
        with registry.lease(ttl) as lease:
            assert lease.ttl >= ttl
            registry.commit(ephemeral={"m": b""}, lease=lease)
            until = time.monotonic() + 2.2 * lease.ttl
            with other.watch("m") as watch:
                while (left := until - time.monotonic()) > 0:
                    watch.wait(left)
                    assert other.get("m") is not None
            assert lease.alive
            assert SYSTEM.now() < lease.deadline <= SYSTEM.now() + lease.ttl
            registry.commit(put={"still": b""}, lease=lease)

    def test_keys_vanish_at_expiry_and_not_before_the_deadline(
        self, store: Store, registry: Registry, ttl: float
    ) -> None:
        other = store.open()
        lease = registry.lease(ttl)
        registry.commit(ephemeral={"m": b""}, lease=lease)
        lease.abandon()
        limit = lease.ttl + store.backend.expiry_slack
        with other.watch("m") as watch:
            began = time.monotonic()
            while other.get("m") is not None:
                assert watch.wait(limit), "the expiry did not wake the watch"
                assert time.monotonic() - began < limit
        assert SYSTEM.now() >= lease.deadline
        assert not lease.alive

    def test_r3_a_commit_with_an_expired_lease_is_refused(self, store: Store, registry: Registry) -> None:
        version = registry.commit(put={"guard": b""})["guard"]
        for write in ({"put": {"a": b""}}, {"ephemeral": {"a": b""}}, {"delete": ["guard"]}, {}):
            lease = registry.lease(LONG_S)
            registry.commit(expect={"guard": version}, lease=lease)
            end_in_store(lease)
            assert lease.alive, "the holder has not noticed yet"
            with pytest.raises(LeaseExpired):
                registry.commit(expect={"guard": version}, lease=lease, **write)
            assert lease.lost.is_set(), "the store reported that the lease has ended"
            lease.close()
        assert [e.key for e in store.open().scan("")] == ["guard"]

    def test_r3_an_expired_lease_is_never_revived(self, store: Store, registry: Registry) -> None:
        lease = registry.lease(LONG_S)
        registry.commit(ephemeral={"m": b""}, lease=lease)
        end_in_store(lease)
        with pytest.raises(LeaseExpired):
            lease.stored.renew()
        with pytest.raises(LeaseExpired):
            registry.commit(put={"a": b""}, lease=lease)
        assert store.open().scan("") == []

    def test_a_lease_past_its_deadline_is_refused_before_the_store_is_asked(
        self, registry: Registry, ttl: float
    ) -> None:
        lease = registry.lease(ttl)
        lease.abandon()
        eventually(lambda: not lease.alive, lease.ttl + 5)
        assert lease.lost.is_set()
        with pytest.raises(LeaseExpired):
            registry.commit(put={"a": b""}, lease=lease)
        assert registry.get("a") is None

    def test_a_successor_claims_when_the_member_key_is_gone(self, store: Store) -> None:
        first, second = store.open(), store.open()
        lease = first.lease(LONG_S)
        first.commit(expect={"m/1": ABSENT}, ephemeral={"m/1": b""}, put={"owner": b"1"}, lease=lease)
        with pytest.raises(Conflict) as conflict:
            second.commit(expect={"m/1": ABSENT}, put={"owner": b"2"})
        assert conflict.value.keys == ("m/1",)
        lease.close()
        second.commit(expect={"m/1": ABSENT}, put={"owner": b"2"})

    def test_a_key_is_as_its_last_write_made_it(self, store: Store, registry: Registry) -> None:
        other = store.open()
        with registry.lease(LONG_S) as lease:
            registry.commit(put={"bound": b"1"})
            registry.commit(ephemeral={"freed": b"1", "bound": b"2", "held": b"1"}, lease=lease)
            other.commit(put={"freed": b"2"})
            before = registry.commit(ephemeral={"held": b"2"}, lease=lease)["held"]
            entry = other.get("held")
            assert entry is not None
            assert (entry.value, entry.version) == (b"2", before)
        assert [(e.key, e.value) for e in other.scan("")] == [("freed", b"2")]

    def test_of_two_racing_writes_the_last_one_decides_what_the_key_is(self, store: Store) -> None:
        first, second = store.open(), store.open()
        for i in range(15):
            key = f"kind/{i}"
            first.commit(put={key: b"before"})
            with first.lease(30) as lease:
                at_once(
                    lambda key=key, lease=lease: first.commit(ephemeral={key: b"ephemeral"}, lease=lease),  # type: ignore[misc]
                    lambda key=key: second.commit(put={key: b"persistent"}),  # type: ignore[misc]
                )
                last = second.get(key)
                assert last is not None
            after = second.get(key)
            assert (after is None) == (last.value == b"ephemeral"), f"round {i}: {last} became {after}"

    def test_a_key_moves_from_one_lease_to_another(self, store: Store) -> None:
        first, second = store.open(), store.open()
        old, new = first.lease(LONG_S), second.lease(LONG_S)
        version = first.commit(ephemeral={"m": b"old"}, lease=old)["m"]
        second.commit(expect={"m": version}, ephemeral={"m": b"new"}, lease=new)
        old.close()
        entry = first.get("m")
        assert entry is not None
        assert entry.value == b"new"
        new.close()
        assert first.get("m") is None

    def test_an_ephemeral_key_can_be_deleted_and_written_again(self, registry: Registry) -> None:
        with registry.lease(LONG_S) as lease:
            first = registry.commit(ephemeral={"m": b"1"}, lease=lease)["m"]
            registry.commit(delete=["m"])
            second = registry.commit(expect={"m": ABSENT}, ephemeral={"m": b"2"}, lease=lease)["m"]
            assert first != second
            third = registry.commit(expect={"m": second}, ephemeral={"m": b"3"}, lease=lease)["m"]
            assert third not in (first, second)
            with pytest.raises(Conflict):
                registry.commit(expect={"m": second}, put={"x": b""}, lease=lease)

    def test_leases_are_independent(self, registry: Registry) -> None:
        with registry.lease(LONG_S) as one, registry.lease(LONG_S) as two:
            registry.commit(ephemeral={"m/1": b""}, lease=one)
            registry.commit(ephemeral={"m/2": b""}, lease=two)
            one.close()
            assert [e.key for e in registry.scan("m/")] == ["m/2"]
            registry.commit(put={"a": b""}, lease=two)

    def test_closing_the_registry_ends_its_leases(self, store: Store, registry: Registry) -> None:
        holder = store.open()
        lease = holder.lease(60)
        holder.commit(ephemeral={"m": b""}, lease=lease)
        holder.close()
        assert registry.get("m") is None

    def test_a_lease_of_another_handle_is_refused(self, store: Store, registry: Registry) -> None:
        with store.open().lease(LONG_S) as lease, pytest.raises(InvalidCommit):
            registry.commit(put={"a": b""}, lease=lease)

    # Leases that the registry does not renew.

    def test_w2_an_unrenewed_lease_lives_as_long_as_somebody_renews_it_and_no_longer(
        self, store: Store, registry: Registry, ttl: float
    ) -> None:
        other = store.open()

        def measure(pace: _Pace) -> None:
            kept, left = registry.lease(ttl, renewed=False), registry.lease(ttl, renewed=False)
            registry.commit(ephemeral={"kept": b""}, lease=kept)
            registry.commit(ephemeral={"left": b""}, lease=left)
            with registry.lease(ttl) as busy, other.watch("left") as watch:  # the handle's own renewals do not count
                until = time.monotonic() + left.ttl + store.backend.expiry_slack
                while other.get("left") is not None:
                    assert time.monotonic() < until, "the lease is renewed although nobody renews it"
                    pace.step()
                    assert kept.renew() == kept.deadline > SYSTEM.now()
                    registry.commit(put={"busy": b""}, lease=busy)
                    watch.wait(ttl / 8)
            assert SYSTEM.now() >= left.deadline
            assert other.get("kept") is not None
            registry.commit(put={"still": b""}, lease=kept)
            with pytest.raises(LeaseExpired):
                left.renew()
            with pytest.raises(LeaseExpired):
                left.stored.renew()
            with pytest.raises(LeaseExpired):
                registry.attach(left.secret)
            kept.end()
            assert other.get("kept") is None
            with pytest.raises(LeaseExpired):
                kept.renew()

        for _ in range(MEASUREMENTS_MAX):
            pace = _Pace(ttl / 2)
            try:
                return measure(pace)
            except (AssertionError, LeaseExpired):
                if not pace.was_held_up():
                    raise
        pytest.fail("this process was delayed in every measurement")

    def test_w2_another_handle_attaches_commits_renews_and_ends(
        self, store: Store, registry: Registry, ttl: float
    ) -> None:
        other = store.open()
        lease = registry.lease(30, renewed=False)
        version = registry.commit(ephemeral={"m/1": b"first"}, put={"guard": b""}, lease=lease)["m/1"]
        attached = other.attach(lease.secret)
        assert (attached.id, attached.secret, attached.is_renewed) == (lease.id, lease.secret, False)
        assert attached.ttl == pytest.approx(lease.ttl)
        assert SYSTEM.now() < attached.deadline <= SYSTEM.now() + lease.ttl
        other.commit({"m/1": version}, ephemeral={"m/1": b"second", "m/2": b""}, lease=attached)
        assert attached.renew() > SYSTEM.now()
        registry.commit(ephemeral={"m/3": b""}, lease=lease)
        assert [e.key for e in registry.scan("m/")] == ["m/1", "m/2", "m/3"]
        attached.end()
        assert registry.scan("m/") == []
        assert lease.alive, "the holder has not noticed yet"
        with pytest.raises(LeaseExpired):
            registry.commit(put={"guard": b"late"}, lease=lease)
        with pytest.raises(LeaseExpired):
            other.attach(lease.secret)
        assert [(e.key, e.value) for e in other.scan("")] == [("guard", b"")]

    def test_w2_a_secret_cannot_be_guessed_and_a_wrong_one_tells_nothing(
        self, store: Store, registry: Registry, ttl: float
    ) -> None:
        ended = registry.lease(30, renewed=False)
        ended.end()
        lease, second = registry.lease(30, renewed=False), registry.lease(30, renewed=False)
        assert lease.secret != second.secret
        assert lease.id not in (second.id, lease.secret)
        assert lease.secret not in repr(lease)
        registry.commit(ephemeral={"m": b""}, lease=lease)
        wrong = [ended.secret, "", "x", "\u00fc", lease.id, f"{lease.id}.", lease.secret + "0", lease.secret[:-1]]
        for at in (0, len(lease.secret) // 2, -1):
            as_list = list(lease.secret)
            as_list[at] = "0" if as_list[at] != "0" else "1"
            wrong.append("".join(as_list))
        if "." in lease.secret:  # parts of one and of another
            first, _, rest = lease.secret.partition(".")
            wrong += [f"{first}.{second.secret.partition('.')[2]}", f"{second.secret.partition('.')[0]}.{rest}"]
        said = set()
        for secret in wrong:
            with pytest.raises(LeaseExpired) as refused:
                registry.attach(secret)
            said.add(str(refused.value))
        with pytest.raises(LeaseExpired):
            store.open(f"{store.namespace}x").attach(lease.secret)
        assert len(said) == 1, "an ended lease and an unknown secret must give the same error"
        with pytest.raises(InvalidArgument):
            registry.attach(None)  # type: ignore[arg-type]
        registry.commit(put={"a": b""}, lease=lease)
        lease.end()

    def test_w2_closing_the_handle_leaves_an_unrenewed_lease(self, store: Store, registry: Registry) -> None:
        holder = store.open()
        lease, closed = holder.lease(30, renewed=False), holder.lease(30, renewed=False)
        holder.commit(ephemeral={"m/1": b""}, lease=lease)
        holder.commit(ephemeral={"m/2": b""}, lease=closed)
        closed.close()
        holder.close()
        assert not lease.alive
        assert [e.key for e in registry.scan("m/")] == ["m/1", "m/2"]
        for each in (lease, closed):
            with registry.attach(each.secret) as attached:
                registry.commit(put={"a": b""}, lease=attached)
                attached.end()
        assert registry.scan("m/") == []

    # Renewals of other leases.

    def test_r6_a_renewal_that_hangs_does_not_expire_another_lease(
        self, store: Store, registry: Registry, ttl: float
    ) -> None:
        stuck = registry.lease(ttl)
        other = registry.attach(registry.lease(ttl, renewed=False).secret, renewed=True)
        registry.commit(ephemeral={"m": b""}, lease=other)
        first = max(stuck.deadline, other.deadline)
        with hanging(stuck):
            eventually(lambda: SYSTEM.now() > first + ttl / 4, first - SYSTEM.now() + 30)
            eventually(stuck.lost.is_set)
            assert other.alive
            assert SYSTEM.now() < other.deadline
            registry.commit(put={"a": b""}, lease=other)
        stuck.close()
        other.close()
        assert registry.get("m") is None

    @pytest.mark.parametrize("renewed", [True, False])
    def test_threads_do_not_grow_with_leases(self, store: Store, registry: Registry, renewed: bool) -> None:
        count = store.backend.leases_many
        with registry.lease(60):
            before = threading.active_count()
            leases = [registry.lease(60, renewed) for _ in range(count)]
            allowed = THREADS_MORE + (count * store.backend.lease_threads if renewed else 0)
            assert threading.active_count() - before <= allowed
            assert all(lease.alive for lease in leases)
        for lease in leases:
            assert lease.is_renewed == renewed


THREADS_MORE = 5
"""How many threads a store's driver and the renewer may add, however many leases there are."""

MEASUREMENTS_MAX = 5
"""How often a measurement of an expiry is begun in which this process was held up for most of a lease."""


class _Pace:
    """Whether the steps of a measurement follow each other closely: whoever renews a lease too late loses it."""

    def __init__(self, step_s_max: float) -> None:
        self._step_s_max = step_s_max
        self._step_at = time.monotonic()
        self._longest_s = 0.0

    def step(self) -> None:
        now = time.monotonic()
        self._longest_s = max(self._longest_s, now - self._step_at)
        self._step_at = now

    def was_held_up(self) -> bool:
        self.step()
        return self._longest_s > self._step_s_max


class _Hanging:
    """A lease in its store whose renewals are not answered until `may_go_on`."""

    def __init__(self, lease: Lease) -> None:
        self._stored = lease.stored
        self.may_go_on = threading.Event()

    def renew(self) -> float:
        self.may_go_on.wait(60)
        return self._stored.renew()

    def end(self) -> None:
        self._stored.end()

    def let_go(self) -> None:
        self._stored.let_go()


@contextmanager
def hanging(lease: Lease) -> Iterator[None]:
    """Within the block, the renewals of the lease are not answered."""
    stored = lease.stored = _Hanging(lease)
    try:
        yield
    finally:
        stored.may_go_on.set()
