"""The test servers themselves: each answers its real client, keeps what it acknowledged, and ends when it must."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

import psutil
import psycopg
import pyetcd
import pytest
from kazoo.client import KazooClient

from pxrs.errors import MissingDependency
from pxrs.testing.servers import (
    Certificates,
    EtcdCluster,
    EtcdServer,
    PostgresServer,
    Server,
    ServerFailed,
    ZooKeeperCluster,
    ZooKeeperServer,
    certificates,
    installed_postgres,
    postgres,
    started_servers,
)
from pxrs.testing.servers import process as process_module

pytestmark = pytest.mark.sampled(4, of="module")


@contextmanager
def etcd_client(server: Server, **options: Any) -> Iterator[Any]:
    with pyetcd.client(host=server.host, port=server.port, timeout=5, **options) as client:
        yield client


@contextmanager
def zookeeper_client(hosts: str, **options: Any) -> Iterator[Any]:
    client = KazooClient(hosts, timeout=5, **options)
    try:
        client.start(timeout=10)
        yield client
    finally:
        client.stop()
        client.close()


def etcd_put(server: Any, value: bytes) -> None:
    with etcd_client(server) as client:
        client.put("key", value)


def etcd_get(server: Any) -> bytes:
    with etcd_client(server) as client:
        value, _ = client.get("key")
        return bytes(value)


def postgres_put(server: Any, value: bytes) -> None:
    server.sql("CREATE TABLE IF NOT EXISTS pairs (key text PRIMARY KEY, value text)")
    upsert = "ON CONFLICT (key) DO UPDATE SET value = excluded.value"
    server.sql(f"INSERT INTO pairs VALUES ('key', '{value.decode()}') {upsert}")


def postgres_get(server: Any) -> bytes:
    ((value,),) = server.sql("SELECT value FROM pairs")
    return str(value).encode()


def zookeeper_put(server: Any, value: bytes) -> None:
    with zookeeper_client(f"{server.host}:{server.port}") as client:
        client.ensure_path("/key")
        client.set("/key", value)


def zookeeper_get(server: Any) -> bytes:
    with zookeeper_client(f"{server.host}:{server.port}") as client:
        return bytes(client.get("/key")[0])


@dataclass(frozen=True, slots=True)
class Kind:
    make: Callable[[], Server]
    put: Callable[[Any, bytes], None]
    get: Callable[[Any], bytes]


KINDS = {
    "etcd": Kind(EtcdServer, etcd_put, etcd_get),
    "postgres": Kind(PostgresServer, postgres_put, postgres_get),
    "zookeeper": Kind(ZooKeeperServer, zookeeper_put, zookeeper_get),
}


@contextmanager
def skipped_if_missing() -> Iterator[None]:
    """Skip where a server's package is not installed, except in CI."""
    try:
        yield
    except MissingDependency as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def server(kind: Kind) -> Iterator[Server]:
    """One server for all tests of its kind: each leaves it running."""
    with skipped_if_missing():
        server = kind.make().start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("tls"))


def is_gone(process: psutil.Process) -> bool:
    return process_module._has_status(process, psutil.STATUS_ZOMBIE)


def test_a_restart_keeps_data_and_address(kind: Kind, server: Server) -> None:
    url, pid = server.url, server.pid
    kind.put(server, b"before the restart")
    server.restart()
    assert (server.url, server.pid != pid) == (url, True)
    assert kind.get(server) == b"before the restart"


def test_a_kill_ends_every_process_and_loses_nothing_acknowledged(kind: Kind, server: Server) -> None:
    kind.put(server, b"before the kill")
    processes = server._processes()
    server.kill()
    assert all(map(is_gone, processes))
    assert not server.is_running
    server.restart()
    assert kind.get(server) == b"before the kill"


def test_a_paused_server_keeps_its_processes_still_until_resumed(kind: Kind, server: Server) -> None:
    kind.put(server, b"before the pause")
    server.pause()
    still = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    assert all(process.status() in still for process in server._processes())
    server.resume()
    server.wait_until_ready()
    assert kind.get(server) == b"before the pause"


def test_a_paused_server_can_be_stopped_killed_and_started(kind: Kind, server: Server) -> None:
    server.pause()
    server.restart()
    server.pause()
    server.kill()
    server.start()
    assert server.start() is server
    kind.put(server, b"after all that")
    assert kind.get(server) == b"after all that"


def test_why_a_server_does_not_serve_is_told_and_mended(kind: Kind, server: Server) -> None:
    """As `tests/conftest.py` does it after each test, for servers that tests share."""
    assert server in started_servers()
    assert server.fault() is None
    server.pause()
    assert "is paused" in (server.fault() or "")
    server.restore()
    assert server.fault() is None
    server.kill()
    assert f"exited with code -9:\n{server.log_tail()}" in (server.fault() or "")
    server.restore()
    assert server.fault() is None
    kind.put(server, b"after all that")


def test_close_leaves_no_process_and_no_folder() -> None:
    with skipped_if_missing(), EtcdServer() as server:
        folder, process = server.directory, psutil.Process(server.pid)
    assert is_gone(process)
    assert not folder.exists()
    assert server not in started_servers()
    server.close()


def test_a_failed_start_shows_the_log_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []
    monkeypatch.setattr(EtcdServer, "_prepare", lambda _, folder: folders.append(folder))
    server = EtcdServer(flags=["--no-such-flag"])
    with skipped_if_missing(), pytest.raises(ServerFailed, match="not defined: -no-such-flag"), server:
        pass
    assert not server.is_running
    assert [folder.exists() for folder in folders] == [False]


def test_zookeeper_too_says_why_it_does_not_start() -> None:
    with skipped_if_missing(), pytest.raises(ServerFailed, match='For input string: "x"'):
        ZooKeeperServer(settings={"tickTime": "x"}).__enter__()


def test_postgres_too_says_why_it_does_not_start() -> None:
    with skipped_if_missing(), pytest.raises(ServerFailed, match="no_such_setting"):
        PostgresServer(settings={"no_such_setting": "on"}).__enter__()


# The servers are started by a thread that has ended since, because Linux takes that for a parent's death.
STARTS_AND_SAYS_SO = """
import signal, threading
from pxrs.testing.servers import EtcdServer, PostgresServer, ZooKeeperServer
servers = [EtcdServer(), PostgresServer(), PostgresServer(), ZooKeeperServer()]
threads = [threading.Thread(target=server.start) for server in servers]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert all(server.is_ready() for server in servers)
servers[2].pause()
print(*(process.pid for server in servers for process in server._processes()))
print(*(server.directory for server in servers), flush=True)
signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_servers_die_with_a_test_process_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTS_AND_SAYS_SO], stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in tests.stdout.readline().split()]
        folders = [Path(name) for name in tests.stdout.readline().split()]
        tests.send_signal(signal.SIGKILL)
    try:
        assert len(processes) > 4
        assert process_module.wait_until(lambda: all(map(is_gone, processes)), 10)
    finally:
        for process in processes:
            process_module._signal(process, signal.SIGKILL)
        for folder in folders:
            process_module.remove_folder(folder, os.getpid())


def test_an_etcd_cluster_survives_its_leader() -> None:
    with skipped_if_missing(), EtcdCluster(3) as cluster:
        assert cluster.url == "etcd://" + ",".join(url.removeprefix("etcd://") for url in cluster.urls)
        first = cluster.leader()
        etcd_put(cluster.nodes[first], b"by the first leader")
        cluster.nodes[first].kill()
        second = cluster.leader()
        assert second != first
        assert etcd_get(cluster.nodes[second]) == b"by the first leader"
        etcd_put(cluster.nodes[second], b"by the second")
        cluster.nodes[first].restart()
        assert etcd_get(cluster.nodes[first]) == b"by the second"


def test_a_zookeeper_cluster_survives_its_leader() -> None:
    with skipped_if_missing(), ZooKeeperCluster(3) as cluster:
        first = cluster.leader()
        with zookeeper_client(cluster.url.removeprefix("zookeeper://")) as client:
            client.create("/key", b"by the first leader")
            cluster.nodes[first].kill()
            assert cluster.leader() != first
            assert client.retry(client.get, "/key")[0] == b"by the first leader"
            client.retry(client.set, "/key", b"by the second")
        cluster.nodes[first].restart()
        assert zookeeper_get(cluster.nodes[first]) == b"by the second"


def test_a_node_cannot_serve_without_a_majority() -> None:
    with skipped_if_missing(), EtcdCluster(3) as cluster:
        for node in cluster.nodes[1:]:
            node.kill()
        assert process_module.wait_until(lambda: not cluster.nodes[0].is_ready(), 10)
        for node in cluster.nodes[1:]:
            node.start(wait=False)
        cluster.wait_until_ready()


def refuses_strangers(server: Server, tls: Certificates) -> None:
    """Check that a client without a certificate is turned away; in TLS 1.3 it learns so on its first read."""
    context = ssl.create_default_context(cafile=str(tls.ca))
    with (
        socket.create_connection((server.host, server.port), timeout=5) as plain,
        pytest.raises(ssl.SSLError, match="certificate"),
        context.wrap_socket(plain, server_hostname=server.host) as secure,
    ):
        secure.recv(1)


def test_etcd_with_tls_asks_for_a_certificate(tls: Certificates) -> None:
    with skipped_if_missing(), EtcdServer(tls=tls, client_auth=True) as server:
        names = {"ca_cert": str(tls.ca), "cert_cert": str(tls.client_cert), "cert_key": str(tls.client_key)}
        with etcd_client(server, **names) as client:
            client.put("key", b"in secret")
            assert client.get("key")[0] == b"in secret"
        refuses_strangers(server, tls)


def test_zookeeper_with_tls_asks_for_a_certificate(tls: Certificates) -> None:
    with skipped_if_missing(), ZooKeeperServer(tls=tls, client_auth=True) as server:
        hosts, trust = f"{server.host}:{server.port}", {"use_ssl": True, "ca": str(tls.ca)}
        own = {"certfile": str(tls.client_cert), "keyfile": str(tls.client_key)}
        with zookeeper_client(hosts, **trust, **own) as client:
            client.create("/key", b"in secret")
            assert client.get("/key")[0] == b"in secret"
        refuses_strangers(server, tls)


def test_postgres_with_tls_asks_for_a_certificate(tls: Certificates) -> None:
    bin_dir = installed_postgres()
    if bin_dir is None:
        pytest.skip("the bundled PostgreSQL has no TLS, and there is no other")
    with PostgresServer(tls=tls, client_auth=True, bin_dir=bin_dir) as server:
        assert server.sql("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()") == [(True,)]
        with pytest.raises(psycopg.OperationalError, match="valid client certificate"):
            psycopg.connect(f"{server.url}?sslmode=verify-full&sslrootcert={tls.ca}")
        with pytest.raises(psycopg.OperationalError, match="no encryption"):
            psycopg.connect(f"{server.url}?sslmode=disable")


def test_postgres_asks_for_the_password_unless_it_trusts() -> None:
    with skipped_if_missing(), PostgresServer() as server:
        assert server.sql("SHOW fsync") == [("on",)]
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(server.url.replace(server.password, "wrong"))
    with PostgresServer(auth="trust") as server:
        psycopg.connect(server.url.replace(server.password, "wrong")).close()


def test_postgres_databases_can_sort_unlike_bytes() -> None:
    words = "SELECT string_agg(word, '' ORDER BY word) FROM (VALUES ('a'), ('B'), ('c')) AS words (word)"
    with skipped_if_missing(), PostgresServer(locales=["en_US.UTF-8"]) as server:
        assert server.create_database("english", locale="en_US.UTF-8") == server.url_of("english")
        server.create_database("builtin", locale_provider="builtin", builtin_locale="C.UTF-8")
        assert server.sql(words, "english") == [("aBc",)]
        assert server.sql(words, "builtin") == [("Bac",)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root must run PostgreSQL as somebody else")
def test_postgres_runs_from_a_folder_that_its_user_cannot_enter(tmp_path: Path) -> None:
    with skipped_if_missing():
        install = postgres._bundled_postgres().parent
    site = install.parents[1]
    for folder in (install, *site.glob(f"{install.parent.name}.libs")):
        copytree(folder, tmp_path / folder.relative_to(site), symlinks=True)
    tmp_path.chmod(0o700)
    hidden = tmp_path / install.relative_to(site) / "bin"
    with PostgresServer(bin_dir=hidden) as server:
        assert server.sql("SELECT 1") == [(1,)]
