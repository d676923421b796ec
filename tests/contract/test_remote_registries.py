"""The registry contract over a server in front of files, PostgreSQL, etcd and ZooKeeper; and the server is killed and
started again between two calls.

The server is killed in one test of each suite, chosen by SEED, and in every test with PXRS_SOAK. Tests that wait for
leases to expire, and tests of input that is refused before the store is asked, run on one of the stores, chosen by
SEED; with PXRS_SOAK on each."""

from __future__ import annotations

import os
import random
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("grpc")

import pxrs
from pxrs.errors import Conflict, LeaseExpired, MissingDependency
from pxrs.registry import ABSENT, Registry
from pxrs.testing.registry_contract import Backend, RegistryContract, Store, quieten
from pxrs.testing.registry_contract.commits import BadInput
from pxrs.testing.served_hubs import ServedHubs
from pxrs.testing.servers import EtcdServer, PostgresServer, ZooKeeperServer

pytestmark = pytest.mark.sampled(14, of="module")
IS_SOAK = bool(os.environ.get("PXRS_SOAK"))
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(time.time_ns()))
SEED = int(os.environ.get("SEED", zlib.crc32(RUN.encode()) % 1_000_000))
"""The same for all processes of a test run."""
STORES = ("files", "postgresql", "etcd", "zookeeper")
SLOW = (
    "test_renewal_keeps_it_alive",
    "test_r6_a_renewal_that_hangs_does_not_expire_another_lease",
    "test_w2_an_unrenewed_lease_lives_as_long_as_somebody_renews_it_and_no_longer",
    "test_a_lease_past_its_deadline_is_refused_before_the_store_is_asked",
    "test_keys_vanish_at_expiry_and_not_before_the_deadline",
    "test_an_idle_watch_uses_no_processor",
)
"""Tests that take as long as a lease."""


@dataclass(frozen=True)
class RemoteBackend(Backend):
    """Each namespace is a hub of its own behind a server of its own."""

    hubs: ServedHubs | None = None
    has_snapshots: bool = False
    folder: Path = Path()

    def in_namespace(self, namespace: str) -> str:
        assert self.hubs is not None
        registry = super().in_namespace(namespace) if self.url else None
        return self.hubs.serve(self.folder / namespace, registry)


@pytest.fixture(scope="module")
def hubs() -> Iterator[ServedHubs]:
    with ServedHubs() as hubs:
        yield hubs


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


@pytest.fixture(scope="module")
def zookeeper() -> Iterator[ZooKeeperServer]:
    try:
        server = ZooKeeperServer(tick_ms=200, session_ms_max=60_000).start()
    except MissingDependency as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))
    with server:
        yield server


def test_a_server_process_that_has_ended_is_told_of_once(hubs: ServedHubs, tmp_path: Path) -> None:
    """The test that ends it fails, and those that follow have another one."""
    hubs._process.kill()
    hubs._process.wait(10)
    with pytest.raises(EOFError, match="has ended"):
        hubs.forget_all()
    with pxrs.open(hubs.serve(tmp_path)) as hub:
        assert hub.topics() == []
    hubs.forget_all()


class RemoteRegistryContract(RegistryContract):
    store_name: str

    @pytest.fixture(autouse=True)
    def chosen(self, request: pytest.FixtureRequest) -> None:
        name = request.node.originalname
        if IS_SOAK or not (name in SLOW or hasattr(BadInput, name)):
            return
        if STORES[(SEED + zlib.crc32(name.encode())) % len(STORES)] != self.store_name:
            pytest.skip(f"runs on another store with SEED={SEED}")

    @pytest.fixture
    def store(self, backend: Backend, hubs: ServedHubs) -> Iterator[Store]:
        with ExitStack() as stack:
            stack.callback(hubs.forget_all)
            yield Store(backend, stack)

    @pytest.fixture
    def registry(self, store: Store, hubs: ServedHubs, request: pytest.FixtureRequest) -> Registry:
        registry = store.open()
        names = [
            item.name
            for item in request.session.items
            if getattr(item, "cls", None) is type(self) and "registry" in getattr(item, "fixturenames", ())
        ]
        if IS_SOAK or request.node.name == random.Random(f"{SEED} {self.store_name}").choice(sorted(names)):
            registry.get("a")
            hubs.kill_and_start()
        return registry

    @pytest.mark.sampled(1)
    def test_w1_w2_the_server_is_killed_and_started_again_between_two_calls(
        self, store: Store, hubs: ServedHubs
    ) -> None:
        """By seed, between any two of the calls of this test."""
        chance = random.Random(f"{SEED} {self.store_name}")
        kill_at = set(range(8)) if IS_SOAK else set(chance.sample(range(8), 2))

        def maybe_kill(number: int) -> None:
            if number in kill_at:
                hubs.kill_and_start()

        registry = store.open()
        lease = registry.lease(60)
        with registry.watch("a/") as watch:
            maybe_kill(0)
            version = registry.commit(expect={"a/b": ABSENT}, put={"a/b": b"1"})["a/b"]
            assert watch.wait(30), f"SEED={SEED}: the watch was forgotten"
            quieten(watch)
            maybe_kill(1)
            entry = registry.get("a/b")
            assert entry is not None
            assert (entry.value, entry.version) == (b"1", version), f"SEED={SEED}"
            maybe_kill(2)
            with pytest.raises(Conflict):
                registry.commit(expect={"a/b": ABSENT}, put={"a/b": b"2"})
            maybe_kill(3)
            registry.commit(expect={"a/b": version}, ephemeral={"a/c": b""}, lease=lease)
            assert watch.wait(30), f"SEED={SEED}: the watch was forgotten"
            maybe_kill(4)
            assert lease.renew() > registry.clock.now()
            maybe_kill(5)
            other = store.open()
            attached = other.attach(lease.secret)
            other.commit(put={"a/d": b""}, lease=attached)
            maybe_kill(6)
            assert [entry.key for entry in registry.scan("a/")] == ["a/b", "a/c", "a/d"]
            attached.end()
            maybe_kill(7)
            assert [entry.key for entry in registry.scan("a/")] == ["a/b", "a/d"]
            with pytest.raises(LeaseExpired):
                registry.commit(put={"a/e": b""}, lease=lease)


class TestFiles(RemoteRegistryContract):
    store_name = "files"

    @pytest.fixture
    def backend(self, hubs: ServedHubs, tmp_path: Path) -> Backend:
        return RemoteBackend("", hubs=hubs, folder=tmp_path)


class TestPostgresql(RemoteRegistryContract):
    store_name = "postgresql"

    @pytest.fixture
    def backend(self, hubs: ServedHubs, tmp_path: Path, postgres: PostgresServer) -> Backend:
        return RemoteBackend(postgres.url, hubs=hubs, folder=tmp_path)


class TestEtcd(RemoteRegistryContract):
    store_name = "etcd"

    @pytest.fixture
    def backend(self, hubs: ServedHubs, tmp_path: Path, etcd: EtcdServer) -> Backend:
        return RemoteBackend(etcd.url, ttl=1.0, hubs=hubs, folder=tmp_path)


class TestZooKeeper(RemoteRegistryContract):
    store_name = "zookeeper"

    @pytest.fixture
    def backend(self, hubs: ServedHubs, tmp_path: Path, zookeeper: ZooKeeperServer) -> Backend:
        return RemoteBackend(
            f"{zookeeper.url}/tests/served",
            ttl=2.0,
            versions_outlive_deletion=False,
            leases_many=20,
            hubs=hubs,
            folder=tmp_path,
        )
