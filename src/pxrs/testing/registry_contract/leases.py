"""Leases and the keys that live with them."""

from __future__ import annotations

import time

import pytest

from pxrs.clock import SYSTEM
from pxrs.errors import (
    Conflict,
    InvalidCommit,
    LeaseExpired,
)
from pxrs.registry import ABSENT, Registry
from pxrs.testing.registry_contract.store import Backend, Fixtures, Store, at_once, end_in_store, eventually


class Leases(Fixtures):
    @pytest.fixture
    def ttl(self, backend: Backend) -> float:
        return backend.ttl

    def test_ephemeral_keys_go_when_the_lease_is_closed(self, store: Store, registry: Registry, ttl: float) -> None:
        other = store.open()
        with registry.lease(ttl) as lease:
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
                assert watch.wait(limit), "nobody told the watcher of the expiry"
                assert time.monotonic() - began < limit
        assert SYSTEM.now() >= lease.deadline
        assert not lease.alive

    def test_r3_a_commit_with_an_expired_lease_is_refused(self, store: Store, registry: Registry, ttl: float) -> None:
        lease = registry.lease(ttl)
        version = registry.commit(put={"guard": b""}, lease=lease)["guard"]
        end_in_store(lease)
        assert lease.alive, "its holder has not noticed"
        for write in ({"put": {"a": b""}}, {"ephemeral": {"a": b""}}, {"delete": ["guard"]}, {}):
            with pytest.raises(LeaseExpired):
                registry.commit(expect={"guard": version}, lease=lease, **write)
        assert [e.key for e in store.open().scan("")] == ["guard"]

    def test_r3_an_expired_lease_is_never_revived(self, store: Store, registry: Registry, ttl: float) -> None:
        lease = registry.lease(ttl)
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

    def test_a_successor_claims_when_the_member_key_is_gone(self, store: Store, ttl: float) -> None:
        first, second = store.open(), store.open()
        lease = first.lease(ttl)
        first.commit(expect={"m/1": ABSENT}, ephemeral={"m/1": b""}, put={"owner": b"1"}, lease=lease)
        with pytest.raises(Conflict) as conflict:
            second.commit(expect={"m/1": ABSENT}, put={"owner": b"2"})
        assert conflict.value.keys == ("m/1",)
        lease.close()
        second.commit(expect={"m/1": ABSENT}, put={"owner": b"2"})

    def test_a_key_is_as_its_last_write_made_it(self, store: Store, registry: Registry, ttl: float) -> None:
        other = store.open()
        with registry.lease(ttl) as lease:
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

    def test_a_key_moves_from_one_lease_to_another(self, store: Store, ttl: float) -> None:
        first, second = store.open(), store.open()
        old, new = first.lease(ttl), second.lease(ttl)
        version = first.commit(ephemeral={"m": b"old"}, lease=old)["m"]
        second.commit(expect={"m": version}, ephemeral={"m": b"new"}, lease=new)
        old.close()
        entry = first.get("m")
        assert entry is not None
        assert entry.value == b"new"
        new.close()
        assert first.get("m") is None

    def test_an_ephemeral_key_can_be_deleted_and_written_again(self, registry: Registry, ttl: float) -> None:
        with registry.lease(ttl) as lease:
            first = registry.commit(ephemeral={"m": b"1"}, lease=lease)["m"]
            registry.commit(delete=["m"])
            second = registry.commit(expect={"m": ABSENT}, ephemeral={"m": b"2"}, lease=lease)["m"]
            assert first != second
            third = registry.commit(expect={"m": second}, ephemeral={"m": b"3"}, lease=lease)["m"]
            assert third not in (first, second)
            with pytest.raises(Conflict):
                registry.commit(expect={"m": second}, put={"x": b""}, lease=lease)

    def test_leases_are_independent(self, registry: Registry, ttl: float) -> None:
        with registry.lease(ttl) as one, registry.lease(ttl) as two:
            registry.commit(ephemeral={"m/1": b""}, lease=one)
            registry.commit(ephemeral={"m/2": b""}, lease=two)
            one.close()
            assert [e.key for e in registry.scan("m/")] == ["m/2"]
            registry.commit(put={"a": b""}, lease=two)

    def test_closing_the_registry_ends_its_leases(self, store: Store, registry: Registry, ttl: float) -> None:
        holder = store.open()
        lease = holder.lease(60)
        holder.commit(ephemeral={"m": b""}, lease=lease)
        holder.close()
        assert registry.get("m") is None

    def test_a_lease_of_another_handle_is_refused(self, store: Store, registry: Registry, ttl: float) -> None:
        with store.open().lease(ttl) as lease, pytest.raises(InvalidCommit):
            registry.commit(put={"a": b""}, lease=lease)
