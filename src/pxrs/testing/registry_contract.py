"""The registry's contract as tests: one suite for every backend, ours and yours.

    class TestMine(SharedRegistryContract):
        @pytest.fixture
        def backend(self):
            return Backend("mine://127.0.0.1:1234")

`RegistryContract` needs threads only; `SharedRegistryContract` adds real processes that race, are killed and stopped.
Every test works in a namespace of its own. Nothing here is optional.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

import pytest

from pxrs import registry as registries_module
from pxrs.clock import SYSTEM
from pxrs.errors import (
    Closed,
    CommitTooLarge,
    Conflict,
    InvalidCommit,
    InvalidKey,
    LeaseExpired,
    UsedAfterFork,
    ValueTooLarge,
)
from pxrs.registry import ABSENT, Lease, Registry
from pxrs.testing.actor import Actor
from pxrs.testing.history import record
from pxrs.testing.linearizability import check

T = TypeVar("T")


@dataclass(frozen=True)
class Backend:
    """How a suite reaches the store under test."""

    url: str
    ttl: float = 1.0
    """The shortest lease that the store grants and the tests can rely on."""
    expiry_slack: float = 2.0
    """How long after a lease's expiry its keys may still be seen."""
    versions_outlive_deletion: bool = True
    """Whether a version is not used again even after its key was deleted and made anew (not on ZooKeeper, R4)."""
    opener: Callable[[str], Registry] = field(default=registries_module.open)

    def in_namespace(self, namespace: str) -> str:
        return f"{self.url}{'&' if '?' in self.url else '?'}namespace={namespace}"


class Store:
    """A backend in a namespace of one test; closes what the test opened."""

    def __init__(self, backend: Backend, stack: ExitStack) -> None:
        self.backend = backend
        self.namespace = f"t{uuid.uuid4().hex[:12]}"
        self.url = backend.in_namespace(self.namespace)
        self._stack = stack

    def open(self, namespace: str | None = None) -> Registry:
        url = self.url if namespace is None else self.backend.in_namespace(namespace)
        return self._stack.enter_context(self.backend.opener(url))

    def actor(self) -> Actor:
        return self._stack.enter_context(Actor(self.url))


def eventually(condition: Callable[[], T], timeout: float = 10.0) -> T:
    """The condition's first true value; asks again and again, for stores that tell nothing."""
    until = time.monotonic() + timeout
    while True:
        value = condition()
        if value or time.monotonic() > until:
            assert value, f"not within {timeout} s"
            return value
        time.sleep(0.005)


def at_once(*actions: Callable[[], T]) -> list[T]:
    """Run the actions in threads that start together; their results, or the first error."""
    barrier = threading.Barrier(len(actions))

    def run(action: Callable[[], T]) -> T:
        barrier.wait(30)
        return action()

    with ThreadPoolExecutor(len(actions)) as pool:
        return [future.result(60) for future in [pool.submit(run, action) for action in actions]]


def end_in_store(lease: Lease) -> None:
    """End a lease in the store while its holder still believes in it, as an expiry that it has not noticed."""
    lease.abandon()
    lease._end()


class _Fixtures:
    @pytest.fixture
    def backend(self) -> Backend:
        raise NotImplementedError("a contract test class says which backend it tests")

    @pytest.fixture
    def store(self, backend: Backend) -> Iterator[Store]:
        with ExitStack() as stack:
            yield Store(backend, stack)

    @pytest.fixture
    def registry(self, store: Store) -> Registry:
        return store.open()


class _Keys(_Fixtures):
    def test_an_unknown_key_is_none(self, registry: Registry) -> None:
        assert registry.get("nothing/here") is None
        assert registry.scan("nothing/") == []

    def test_what_was_put_is_read_back_with_its_version(self, registry: Registry) -> None:
        versions = registry.commit(put={"a": b"1", "b/c": b"2"})
        assert versions.keys() == {"a", "b/c"}
        for key, value in {"a": b"1", "b/c": b"2"}.items():
            entry = registry.get(key)
            assert entry is not None
            assert (entry.key, entry.value, entry.version) == (key, value, versions[key])

    def test_every_write_changes_the_version(self, registry: Registry) -> None:
        seen = [registry.commit(put={"a": b"same"})["a"] for _ in range(5)]
        registry.commit(delete=["a"])
        seen += [registry.commit(put={"a": b"same"})["a"] for _ in range(3)]
        assert len(set(seen)) == len(seen)
        assert ABSENT not in seen

    @pytest.mark.parametrize("value", [b"", b"\0", bytes(range(256)), "ü€😀".encode()], ids=repr)
    def test_values_are_any_bytes(self, registry: Registry, value: bytes) -> None:
        registry.commit(put={"v": value})
        entry = registry.get("v")
        assert entry is not None
        assert entry.value == value
        assert registry.scan("") == [entry]

    def test_a_key_may_also_be_a_folder(self, registry: Registry) -> None:
        registry.commit(put={"a/b": b"below"})
        registry.commit(put={"a": b"above"})
        registry.commit(put={"a/b/c": b"deep"})
        assert [(e.key, e.value) for e in registry.scan("")] == [
            ("a", b"above"),
            ("a/b", b"below"),
            ("a/b/c", b"deep"),
        ]
        assert [e.key for e in registry.scan("a/")] == ["a/b", "a/b/c"]

    def test_delete_removes_and_an_absent_key_is_no_error(self, registry: Registry) -> None:
        registry.commit(put={"a": b"", "b": b""})
        registry.commit(delete=["a", "never"])
        assert registry.get("a") is None
        assert registry.get("b") is not None

    def test_put_and_delete_in_one_commit(self, registry: Registry) -> None:
        version = registry.commit(put={"from": b"x"})["from"]
        registry.commit(expect={"from": version, "to": ABSENT}, put={"to": b"x"}, delete=["from"])
        assert [e.key for e in registry.scan("")] == ["to"]

    def test_namespaces_are_worlds_apart(self, store: Store, registry: Registry) -> None:
        other = store.open(store.namespace + "x")
        registry.commit(put={"a": b"here"})
        assert other.get("a") is None
        other.commit(expect={"a": ABSENT}, put={"a": b"there"})
        assert [e.value for e in registry.scan("")] == [b"here"]


class _Scans(_Fixtures):
    KEYS = (
        "a",
        "a-b",
        "a/b",
        "a/b-c",
        "a/b/c",
        "a/c",
        "a0",
        "ab",
        "b/0",
        "b/1",
        "b/10",
        "b/2",
        "B",
        "~/x",
        "!/y",
    )

    def test_scan_is_in_byte_order_of_keys(self, registry: Registry) -> None:
        registry.commit(put=dict.fromkeys(self.KEYS, b""))
        assert [e.key for e in registry.scan("")] == sorted(self.KEYS)
        assert [e.key for e in registry.scan("a/")] == ["a/b", "a/b-c", "a/b/c", "a/c"]
        assert [e.key for e in registry.scan("b/")] == ["b/0", "b/1", "b/10", "b/2"]

    def test_after_and_limit_page_through(self, registry: Registry) -> None:
        registry.commit(put=dict.fromkeys(self.KEYS, b""))
        for size in (1, 2, 3, 100):
            pages, after = [], None
            while page := registry.scan("", after=after, limit=size):
                assert len(page) <= size
                pages += [e.key for e in page]
                after = page[-1].key
            assert pages == sorted(self.KEYS)

    def test_after_need_not_be_a_key_that_exists(self, registry: Registry) -> None:
        registry.commit(put=dict.fromkeys(("p/a", "p/c", "q/a"), b""))
        assert [e.key for e in registry.scan("p/", after="p/b")] == ["p/c"]
        assert [e.key for e in registry.scan("p/", after="a")] == ["p/a", "p/c"]
        assert registry.scan("p/", after="q") == []

    def test_scan_gives_values_and_versions(self, registry: Registry) -> None:
        registry.commit(put={f"n/{i:03}": b"%d" % i for i in range(100)})
        for entry in registry.scan("n/"):
            assert registry.get(entry.key) == entry

    @pytest.mark.parametrize("limit", [0, -1])
    def test_a_useless_limit_is_refused(self, registry: Registry, limit: int) -> None:
        with pytest.raises(ValueError, match="limit"):
            registry.scan("", limit=limit)


class _Commits(_Fixtures):
    def test_a_commit_with_the_right_versions_passes(self, registry: Registry) -> None:
        first = registry.commit(expect={"a": ABSENT, "b": ABSENT}, put={"a": b"1", "b": b"1"})
        second = registry.commit(expect=first, put={"a": b"2"}, delete=["b"])
        registry.commit(expect={"a": second["a"], "b": ABSENT}, put={"c": b"3"})
        assert [(e.key, e.value) for e in registry.scan("")] == [("a", b"2"), ("c", b"3")]

    def test_a_conflict_names_the_keys_and_writes_nothing(self, registry: Registry) -> None:
        versions = registry.commit(put={"a": b"1", "b": b"1", "c": b"1"})
        registry.commit(put={"b": b"2"})
        with pytest.raises(Conflict) as conflict:
            registry.commit(expect={**versions, "d": ABSENT}, put={"a": b"3", "d": b"3"}, delete=["c"])
        assert conflict.value.keys == ("b",)
        assert [(e.key, e.value) for e in registry.scan("")] == [("a", b"1"), ("b", b"2"), ("c", b"1")]

    def test_expecting_absent_what_is_there_conflicts(self, registry: Registry) -> None:
        registry.commit(put={"a": b"1"})
        with pytest.raises(Conflict) as conflict:
            registry.commit(expect={"a": ABSENT, "b": ABSENT}, put={"b": b"x"})
        assert conflict.value.keys == ("a",)
        assert registry.get("b") is None

    def test_expecting_what_is_gone_conflicts(self, registry: Registry) -> None:
        version = registry.commit(put={"a": b"1"})["a"]
        registry.commit(delete=["a"])
        for write in ({"put": {"a": b"2"}}, {"put": {"b": b"2"}}, {"delete": ["a"]}):
            with pytest.raises(Conflict) as conflict:
                registry.commit(expect={"a": version}, **write)
            assert conflict.value.keys == ("a",)
        assert registry.scan("") == []

    def test_a_stale_version_conflicts_however_old(self, registry: Registry) -> None:
        stale = [registry.commit(put={"a": b"%d" % i})["a"] for i in range(4)]
        for version in stale[:-1]:
            with pytest.raises(Conflict):
                registry.commit(expect={"a": version}, put={"a": b"late"})
        registry.commit(expect={"a": stale[-1]}, put={"a": b"in time"})

    def test_a_commit_may_only_look(self, registry: Registry) -> None:
        version = registry.commit(put={"a": b"1"})["a"]
        assert registry.commit(expect={"a": version, "b": ABSENT}) == {}
        with pytest.raises(Conflict):
            registry.commit(expect={"a": version, "b": version})
        assert [e.key for e in registry.scan("")] == ["a"]
        assert registry.commit() == {}

    def test_a_quiet_commit_is_a_commit(self, registry: Registry) -> None:
        version = registry.commit(put={"a": b"1"}, quiet=True)["a"]
        assert registry.commit(expect={"a": version}, put={"a": b"2"}, quiet=True)["a"] != version

    def test_the_most_keys_fit_into_one_commit(self, registry: Registry) -> None:
        keys = [f"many/{i:04}" for i in range(registry.limits.commit_keys_max)]
        versions = registry.commit(expect=dict.fromkeys(keys, ABSENT), put=dict.fromkeys(keys, b"1"))
        assert [e.key for e in registry.scan("many/")] == keys
        registry.commit(expect=versions, delete=keys)
        assert registry.scan("many/") == []

    def test_the_largest_value_fits(self, registry: Registry) -> None:
        value = os.urandom(registry.limits.value_bytes_max)
        version = registry.commit(put={"v": value})["v"]
        entry = registry.get("v")
        assert entry is not None
        assert entry.value == value
        registry.commit(expect={"v": version}, put={"v": b"small"})

    def test_the_most_bytes_fit(self, registry: Registry) -> None:
        limits = registry.limits
        count = -(-limits.commit_bytes_max // limits.value_bytes_max)
        size = limits.commit_bytes_max // count - len("k00")
        keys = [f"k{i:02}" for i in range(count)]
        registry.commit(put=dict.fromkeys(keys, b"x" * size))
        assert [len(e.value) for e in registry.scan("")] == [size] * count


class _BadInput(_Fixtures):
    BAD_KEYS = (
        "",
        "/",
        "/a",
        "a/",
        "a//b",
        "..",
        "a/../b",
        "./a",
        "a b",
        "a\n",
        "a\0b",
        "a;b",
        "ü",
        "x" * 513,
    )

    @pytest.mark.parametrize("key", BAD_KEYS, ids=repr)
    def test_a_bad_key_is_refused_everywhere(self, registry: Registry, key: str) -> None:
        with pytest.raises(InvalidKey):
            registry.get(key)
        for bad in ({"put": {key: b""}}, {"expect": {key: ABSENT}}, {"delete": [key]}):
            with pytest.raises(InvalidKey):
                registry.commit(**{"put": {"good": b""}, **bad})  # type: ignore[arg-type]
        assert registry.scan("") == []

    @pytest.mark.parametrize("prefix", ["a", "/", "a//", "../", "ü/"], ids=repr)
    def test_a_bad_prefix_is_refused(self, registry: Registry, prefix: str) -> None:
        with pytest.raises(InvalidKey):
            registry.scan(prefix)

    def test_a_watch_needs_a_prefix(self, registry: Registry) -> None:
        for prefixes in ((), ("a//",), ("a", "..")):
            with pytest.raises(InvalidKey):
                registry.watch(*prefixes)

    def test_ten_megabytes_are_refused_and_nothing_is_written(self, registry: Registry) -> None:
        with pytest.raises(ValueTooLarge):
            registry.commit(put={"small": b"", "large": b"x" * 10_000_000})
        assert registry.scan("") == []

    def test_too_much_in_one_commit_is_refused(self, registry: Registry) -> None:
        limits = registry.limits
        with pytest.raises(CommitTooLarge):
            registry.commit(put={f"k{i}": b"" for i in range(limits.commit_keys_max + 1)})
        count = limits.commit_bytes_max // limits.value_bytes_max + 1
        with pytest.raises(CommitTooLarge):
            registry.commit(put={f"k{i}": b"x" * limits.value_bytes_max for i in range(count)})
        assert registry.scan("") == []

    def test_a_commit_that_contradicts_itself_is_refused(self, registry: Registry) -> None:
        with registry.lease(10) as lease:
            for contradiction in (
                {"put": {"a": b""}, "delete": ["a"]},
                {"put": {"a": b""}, "ephemeral": {"a": b""}, "lease": lease},
                {"ephemeral": {"a": b""}},
                {"put": {"a": "text"}},
                {"expect": {"a": None}},
                {"expect": {"a": -1}},
            ):
                with pytest.raises(InvalidCommit):
                    registry.commit(**contradiction)
        assert registry.scan("") == []

    @pytest.mark.parametrize("ttl", [0, -1, 0.01, float("nan"), float("inf")])
    def test_a_useless_ttl_is_refused(self, registry: Registry, ttl: float) -> None:
        with pytest.raises(ValueError, match="ttl"):
            registry.lease(ttl)


class _Lifecycle(_Fixtures):
    def test_a_closed_registry_refuses_every_call(self, store: Store) -> None:
        registry = store.open()
        watch = registry.watch("")
        registry.close()
        registry.close()
        for call in (
            lambda: registry.get("a"),
            lambda: registry.scan(""),
            lambda: registry.commit(put={"a": b""}),
            lambda: registry.lease(1),
            lambda: registry.watch(""),
            lambda: watch.wait(1),
        ):
            with pytest.raises(Closed):
                call()

    def test_what_one_handle_wrote_another_reads_after_the_first_is_closed(self, store: Store) -> None:
        reader = store.open()
        writer = store.open()
        writer.commit(put={"a": b"kept"})
        writer.close()
        entry = reader.get("a")
        assert entry is not None
        assert entry.value == b"kept"

    def test_r11_use_after_fork_raises(self, store: Store, registry: Registry) -> None:
        lease = registry.lease(store.backend.ttl)
        registry.commit(ephemeral={"mine": b""}, lease=lease)
        calls: list[Callable[[], object]] = [
            lambda: registry.get("a"),
            lambda: registry.scan(""),
            lambda: registry.commit(put={"a": b""}),
            lambda: registry.lease(1),
            lambda: registry.watch(""),
        ]
        pid = os.fork()
        if pid == 0:  # the child reports by its exit code alone
            refused = 0
            try:
                for call in calls:
                    try:
                        call()
                    except UsedAfterFork:
                        refused += 1
                registry.close()
            finally:
                os._exit(refused)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == len(calls)
        assert registry.get("mine") is not None
        registry.commit(put={"b": b""}, lease=lease)


class _Races(_Fixtures):
    def test_exactly_one_of_many_claims_wins(self, store: Store) -> None:
        handles = [store.open() for _ in range(4)]
        for i in range(5):
            key = f"claim/{i}"

            def claim(registry: Registry, key: str = key) -> bool:
                try:
                    registry.commit(expect={key: ABSENT}, put={key: b""})
                except Conflict:
                    return False
                return True

            assert sum(at_once(*[lambda r=r: claim(r) for r in handles * 2])) == 1

    def test_r7_two_commits_that_each_expect_the_others_key_absent(self, store: Store) -> None:
        """Write skew: both may be refused, both may not pass."""
        one, two = store.open(), store.open()
        for i in range(20):
            a, b = f"skew/{i}/a", f"skew/{i}/b"

            def take(registry: Registry, mine: str, other: str) -> bool:
                try:
                    registry.commit(expect={other: ABSENT}, put={mine: b""})
                except Conflict:
                    return False
                return True

            passed = at_once(lambda a=a, b=b: take(one, a, b), lambda a=a, b=b: take(two, b, a))  # type: ignore[misc]
            assert len(one.scan(f"skew/{i}/")) == sum(passed) <= 1

    def test_multi_key_commits_in_any_order_neither_deadlock_nor_tear(self, store: Store) -> None:
        handles = [store.open() for _ in range(4)]
        keys = [f"k/{i}" for i in range(6)]

        def write(registry: Registry, seed: int) -> None:
            dice = random.Random(seed)
            for i in range(25):
                some = dice.sample(keys, 4)
                registry.commit(put=dict.fromkeys([*some, "k/all"], b"%d-%d" % (seed, i)), delete=["k/none"])

        at_once(*[lambda r=r, s=s: write(r, s) for s, r in enumerate(handles)])
        final = handles[0].get("k/all")
        assert final is not None
        assert sum(e.version == final.version or e.value == final.value for e in handles[1].scan("k/")) >= 5

    def test_a_commit_that_also_deletes_what_is_not_there_is_still_one_step(self, store: Store) -> None:
        one, two, noise = store.open(), store.open(), store.open()
        for i in range(15):
            a, b, c = f"d/{i}/a", f"d/{i}/b", f"d/{i}/c"
            at_once(
                lambda a=a, b=b, c=c: one.commit(put={b: b"one", c: b"one"}, delete=[a]),  # type: ignore[misc]
                lambda a=a, c=c: two.commit(put={a: b"two", c: b"two"}),  # type: ignore[misc]
                lambda b=b: [noise.commit(put={b: b"noise"}) for _ in range(3)],  # type: ignore[misc]
            )
            last = one.get(c)
            assert last is not None
            assert (one.get(a) is not None) == (last.value == b"two"), f"round {i}: neither order gives this"

    def test_no_increment_is_lost(self, store: Store) -> None:
        handles = [store.open() for _ in range(3)]

        def add(registry: Registry) -> None:
            for _ in range(20):
                while True:
                    entry = registry.get("n")
                    version, count = (ABSENT, 0) if entry is None else (entry.version, int(entry.value))
                    try:
                        registry.commit(expect={"n": version}, put={"n": b"%d" % (count + 1)})
                        break
                    except Conflict:
                        continue

        at_once(*[lambda r=r: add(r) for r in handles])
        entry = handles[0].get("n")
        assert entry is not None
        assert entry.value == b"60"

    def test_threads_share_one_handle(self, registry: Registry) -> None:
        def write(thread: int) -> None:
            for i in range(10):
                registry.commit(expect={f"t/{thread}/{i}": ABSENT}, put={f"t/{thread}/{i}": b""})
                assert registry.get(f"t/{thread}/{i}") is not None

        at_once(*[lambda t=t: write(t) for t in range(6)])
        assert len(registry.scan("t/")) == 60


class _Leases(_Fixtures):
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
            lease._renew()
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


class _Watches(_Fixtures):
    def test_every_kind_of_change_wakes(self, store: Store, registry: Registry) -> None:
        other = store.open()
        with other.watch("w/") as watch, registry.lease(30) as lease:
            changes: list[Callable[[], object]] = [
                lambda: registry.commit(put={"w/a": b"1"}),
                lambda: registry.commit(put={"w/a": b"2"}),
                lambda: registry.commit(put={"w/deep/er/b": b""}),
                lambda: registry.commit(ephemeral={"w/m": b""}, lease=lease),
                lambda: registry.commit(delete=["w/a"]),
                lambda: registry.commit(put={"elsewhere": b"", "w/deep/er/b": b"2"}),
                lease.close,
            ]
            for i, change in enumerate(changes):
                quieten(watch)
                change()
                assert watch.wait(10), f"change {i} was missed"

    def test_a_change_elsewhere_does_not_wake(self, registry: Registry) -> None:
        with registry.watch("w/a/", "w/key") as watch:
            quieten(watch)
            registry.commit(put={"w/ab": b"", "w/keys": b"", "w/b/a": b"", "x": b""})
            assert not watch.wait(0.3)

    def test_a_single_key_is_watched(self, store: Store, registry: Registry) -> None:
        other = store.open()
        with other.watch("group/leader", "group/members/") as watch:
            for key in ("group/leader", "group/members/1"):
                for write in ({"put": {key: b""}}, {"put": {key: b"2"}}, {"delete": [key]}):
                    quieten(watch)
                    registry.commit(**write)
                    assert watch.wait(10), (key, write)

    def test_r2_no_change_is_missed_between_watch_and_scan(self, store: Store) -> None:
        writer, reader = store.open(), store.open()
        last = 60

        def write() -> None:
            for i in range(1, last + 1):
                writer.commit(put={"w/n": b"%d" % i})

        with reader.watch("w/") as watch:
            thread = threading.Thread(target=write)
            thread.start()
            try:
                while True:
                    entry = reader.get("w/n")
                    if entry is not None and int(entry.value) == last:
                        break
                    assert watch.wait(10), f"no wake after {entry}"
            finally:
                thread.join()

    def test_r2_a_key_that_was_seen_and_went_at_once_is_a_change(self, store: Store) -> None:
        writer, reader = store.open(), store.open()
        with reader.watch("w/") as watch:
            for i in range(3):
                quieten(watch)
                version = writer.commit(put={"w/a": b"%d" % i})["w/a"]
                entry = reader.get("w/a")
                assert entry is not None
                assert entry.version == version
                writer.commit(delete=["w/a"])
                while reader.get("w/a") is not None or not watch.wait(0.0):
                    assert watch.wait(10), "it was seen, it went, and nobody was told"
                    break

    def test_close_wakes_the_waiter(self, registry: Registry) -> None:
        watch = registry.watch("w/")
        quieten(watch)
        closer = threading.Timer(0.05, watch.close)
        closer.start()
        with pytest.raises(Closed):
            watch.wait(10)
        closer.join()
        watch.close()

    def test_an_idle_watch_uses_no_processor(self, registry: Registry) -> None:
        with registry.watch("w/") as watch, registry.lease(10):
            quieten(watch)
            began = time.process_time()
            assert not watch.wait(1.0)
            assert time.process_time() - began < 0.15


def quieten(watch: registries_module.Watch) -> None:
    """Take the wakes that are under way, so that the next one is of the next change."""
    while watch.wait(0.1):
        continue


class RegistryContract(_Keys, _Scans, _Commits, _BadInput, _Lifecycle, _Races, _Leases, _Watches):
    """What every backend keeps, with threads."""


class SharedRegistryContract(RegistryContract):
    """What every backend that processes share keeps besides, with real processes."""

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
            # What the dead client sent may still land; it lands whole.
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
                    assert watch.wait(ttl + store.backend.expiry_slack), "nobody told the watcher"

    def test_a_stopped_holder_expires_and_finds_itself_expired(self, store: Store) -> None:
        registry = store.open()
        with store.actor() as holder:
            ttl = holder.call("lease", ttl=store.backend.ttl)
            holder.call("commit", ephemeral={"m": b""}, lease=True)
            with registry.watch("m") as watch:
                holder.signal(signal.SIGSTOP)
                while registry.get("m") is not None:
                    assert watch.wait(ttl + store.backend.expiry_slack), "nobody told the watcher"
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
