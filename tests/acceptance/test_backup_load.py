"""V5: backups of a hub under full load, restored elsewhere, into another kind of registry. With PXRS_SOAK on all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import pxrs
from pxrs import registry as registries
from pxrs.backup.making import MadeBackup, make_backup
from pxrs.backup.restoring import restore, verify
from pxrs.log.directory.check import check
from pxrs.testing.servers import EtcdServer, PostgresServer, ZooKeeperServer
from tests.acceptance.backup_load import Load, Restored

SOAK = bool(os.environ.get("PXRS_SOAK"))
ROUNDS = 5 if SOAK else 2
KINDS = ("files", "sqlite", "postgresql", "etcd", "zookeeper") if SOAK else ("files",)


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    """The addresses of servers by kind. All are started first: starting one forks, which a process with the threads of
    a client of etcd must not do."""
    kinds = {"postgresql": PostgresServer, "etcd": EtcdServer, "zookeeper": ZooKeeperServer}
    with ExitStack() as stack:
        yield {kind: stack.enter_context(server()).url for kind, server in kinds.items() if kind in KINDS}


class Registries:
    """Addresses of new registries of each kind."""

    def __init__(self, folder: Path, servers: dict[str, str]) -> None:
        self._folder, self._servers = folder, servers

    def new(self, kind: str) -> str | None:
        name = f"n{uuid.uuid4().hex[:12]}"
        match kind:
            case "files":
                return None
            case "sqlite":
                return f"sqlite:///{self._folder}/{name}.db"
        return f"{self._servers[kind]}?namespace={name}"


@pytest.fixture
def addresses(servers: dict[str, str], tmp_path: Path) -> Registries:
    return Registries(tmp_path, servers)


def backed_up(load: Load, target: Path) -> MadeBackup:
    with load.open() as hub:
        home = hub.check_registry()
        assert home is not None
        return make_backup(load.path, home.hub, hub.registry, "shown", target, pxrs.__version__, lambda progress: None)


def restored(source: Path, path: Path, address: str | None) -> Restored:
    manifest = verify(source, lambda progress: None)
    with registries.open(path / "registry" if address is None else address) as registry:
        restore(source, manifest, path, registry, "shown", lambda progress: None)
    return Restored(path, address)


@pytest.mark.parametrize("kind", KINDS)
def test_v5_backups_under_full_load_are_consistent_and_go_on_elsewhere(
    kind: str, addresses: Registries, tmp_path: Path
) -> None:
    others = KINDS if SOAK else ("sqlite", "files")
    load = Load(tmp_path / "hub", addresses.new(kind))
    load.start()
    try:
        load.await_work()
        for number in range(ROUNDS):
            acknowledged, jobs = list(load.acknowledged), list(load.jobs)
            made = backed_up(load, tmp_path / "backup")
            assert not load.errors
            path = tmp_path / f"restored-{number}"
            hub = restored(tmp_path / "backup", path, addresses.new(others[number % len(others)]))
            assert [checked.findings for checked in check(path) if checked.findings] == []
            hub.verify(acknowledged, jobs)
            assert number == 0 or made.kept_bytes, "sealed segments were copied again"
            shutil.rmtree(path)
    finally:
        load.stop()
    assert len(load.acknowledged) > 100
    assert len(load.jobs) > 10
