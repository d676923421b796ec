"""The registry contract on a real etcd, and what is etcd's own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from pxrs import registry as registries
from pxrs.errors import (
    AccessDenied,
    CommitTooLarge,
    Conflict,
    InvalidUrl,
    LeaseExpired,
    OutcomeUnknown,
    RegistryCorrupt,
    RegistryError,
    RegistryUnavailable,
    StorageFull,
    UsedAfterFork,
)
from pxrs.registry import ABSENT, Registry
from pxrs.registry.etcd.faults import Proof, fault_of
from pxrs.testing.registry_contract import Backend, SharedRegistryContract, Store, quieten
from pxrs.testing.servers import EtcdServer

pytestmark = pytest.mark.sampled(2, of="module")


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


CHILDREN = 40 if os.environ.get("PXRS_SOAK") else 12
"""How many children a busy process forks."""


class TestEtcd(SharedRegistryContract):
    @pytest.fixture
    def backend(self, etcd: EtcdServer) -> Backend:
        return Backend(etcd.url, ttl=1.0)

    def test_the_largest_commit_of_the_longest_keys_fits(self, registry: Registry) -> None:
        limits = registry.limits
        keys = [f"{i:03}".ljust(limits.key_bytes_max, "k") for i in range(limits.commit_keys_max)]
        size = (limits.commit_bytes_max - sum(map(len, keys))) // len(keys)
        with registry.lease(10) as lease:
            put = dict.fromkeys(keys, b"x" * size)
            versions = registry.commit(expect=dict.fromkeys(keys, ABSENT), ephemeral=put, lease=lease)
            with pytest.raises(Conflict) as conflict:
                registry.commit(expect=dict.fromkeys(keys, ABSENT), put=put, lease=lease)
            assert list(conflict.value.keys) == keys
            registry.commit(expect=versions, put=put, lease=lease)

    def test_a_long_scan_comes_in_pages(self, registry: Registry) -> None:
        keys = [f"n/{i:04}" for i in range(1_270)]
        for start in range(0, len(keys), 127):
            registry.commit(put=dict.fromkeys(keys[start : start + 127], b"small"))
        large = [f"n/{i:04}/large" for i in (0, 1, 2, 700, 701, 1_269)]
        for key in large:
            registry.commit(put={key: b"x" * registry.limits.value_bytes_max})
        expected = sorted(keys + large)
        assert [e.key for e in registry.scan("")] == expected
        assert [e.key for e in registry.scan("n/", limit=999)] == expected[:999]
        assert [e.key for e in registry.scan("n/", after=expected[150], limit=600)] == expected[151:751]

    def test_the_keys_that_guard_leases_are_not_seen(self, registry: Registry, store: Store) -> None:
        registry.commit(put={"!": b"", "a": b"", "~": b""})
        with store.open().watch("") as watch, registry.lease(10), registry.lease(10):
            assert [e.key for e in registry.scan("")] == ["!", "a", "~"]
            assert [e.key for e in registry.scan("", after="!", limit=1)] == ["a"]
            quieten(watch)
            registry.lease(10).close()
            assert not watch.wait(0.3)

    def test_a_version_of_another_store_conflicts(self, registry: Registry) -> None:
        registry.commit(put={"a": b""})
        with pytest.raises(Conflict):
            registry.commit(expect={"a": 2**70}, put={"a": b""})

    def test_r11_a_child_of_a_busy_process_is_told_at_once_that_it_cannot_open_its_own(self, store: Store) -> None:
        """With gRPC's own handling of forks, some of these children crash, and would if they did nothing."""
        registries = [store.open() for _ in range(3)]
        leases = [registry.lease(30) for registry in registries]
        is_done = threading.Event()

        def keep_busy(registry: Registry) -> None:
            with registry.watch("a"):
                while not is_done.is_set():
                    with suppress(OutcomeUnknown, RegistryUnavailable):  # gRPC may stand still while this process forks
                        registry.commit(put={"a": b""})

        threads = [threading.Thread(target=keep_busy, args=(registry,)) for registry in registries]
        for thread in threads:
            thread.start()
        try:
            assert {_open_in_a_fork(store.url) for _ in range(CHILDREN)} == {"UsedAfterFork"}
        finally:
            is_done.set()
            for thread in threads:
                thread.join()
        for registry, lease in zip(registries, leases, strict=True):
            registry.commit(put={"a": b""}, lease=lease)


def _open_in_a_fork(url: str) -> str:
    read_end, write_end = os.pipe()
    if (pid := os.fork()) == 0:
        signal.alarm(30)  # it would hang
        said = "nothing"
        try:
            registries.open(url)
            said = "opened"
        except UsedAfterFork:
            said = "UsedAfterFork"
        finally:
            time.sleep(0.01)  # time to crash in
            os.write(write_end, said.encode())
            os._exit(0)
    os.close(write_end)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(read_end) as pipe:
        return pipe.read() if status == 0 else f"exit code {os.waitstatus_to_exitcode(status)}"


@pytest.mark.parametrize(
    ("address", "names"),
    [
        ("etcd://localhost/folder", "namespace=folder"),
        ("etcd://", "the host is empty"),
        ("etcd://localhost?colour=red", "colour"),
        ("etcd://localhost?timeout=soon", "timeout"),
        ("etcd://localhost?ca=/nowhere/ca.pem", "no such file"),
        ("etcd://localhost?cert={file}", "together"),
        ("etcd://localhost?ca={file}&tls=false", "contradicts"),
        ("etcd://user@localhost", "password"),
        ("etcd://localhost?password_file={file}", "user"),
    ],
)
def test_a_bad_address_is_refused_at_once(
    address: str, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PXRS_REGISTRY_PASSWORD", raising=False)
    (file := tmp_path / "file").write_text("secret")
    with pytest.raises(InvalidUrl, match=names) as refused:
        registries.open(address.format(file=file))
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("code", "details", "proof", "kind"),
    [
        ("UNAVAILABLE", "etcdserver: no leader", Proof.REFUSED, RegistryUnavailable),
        ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", Proof.REFUSED, RegistryUnavailable),
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", Proof.FULL, StorageFull),
        ("RESOURCE_EXHAUSTED", "grpc: received message larger than max (9 vs. 8)", Proof.FINAL, CommitTooLarge),
        ("INVALID_ARGUMENT", "etcdserver: request is too large", Proof.FINAL, CommitTooLarge),
        ("NOT_FOUND", "etcdserver: requested lease not found", Proof.FINAL, LeaseExpired),
        ("PERMISSION_DENIED", "etcdserver: permission denied", Proof.FINAL, AccessDenied),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", Proof.LOGIN, AccessDenied),
        ("DATA_LOSS", "etcdserver: corrupt cluster", Proof.FINAL, RegistryCorrupt),
        # All of these have been seen after the proposal: it may be in the log.
        ("UNAVAILABLE", "etcdserver: leader changed", Proof.LOST, RegistryUnavailable),
        ("UNAVAILABLE", "etcdserver: request timed out", Proof.LOST, RegistryUnavailable),
        ("UNAVAILABLE", "etcdserver: server stopped", Proof.LOST, RegistryUnavailable),
        ("UNAVAILABLE", "Socket closed", Proof.LOST, RegistryUnavailable),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", Proof.LOST, RegistryUnavailable),
        ("CANCELLED", "Channel closed!", Proof.LOST, RegistryUnavailable),
        ("UNKNOWN", "raft proposal dropped", Proof.LOST, RegistryUnavailable),
        ("INTERNAL", "", Proof.LOST, RegistryUnavailable),
        # A known text under another code proves nothing.
        ("UNKNOWN", "etcdserver: no leader", Proof.LOST, RegistryUnavailable),
    ],
)
def test_r5_what_an_error_proves(code: str, details: str, proof: Proof, kind: type[RegistryError]) -> None:
    error = SimpleNamespace(code=lambda: SimpleNamespace(name=code), details=lambda: details)
    fault = fault_of(error)
    assert fault.proof is proof
    assert type(fault.error("etcd://host")) is kind
