"""The ZooKeeper registry when servers die, hang and restart, and when the network loses, delays and cuts."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest

from pxrs import registry as registries
from pxrs.clock import SYSTEM
from pxrs.copying import copier
from pxrs.errors import (
    AccessDenied,
    InvalidUrl,
    LeaseExpired,
    MissingDependency,
    OutcomeUnknown,
    RegistryUnavailable,
)
from pxrs.registry import ABSENT, Lease, Registry
from pxrs.registry.zookeeper import ZooKeeperRegistry
from pxrs.registry.zookeeper.client import Client
from pxrs.registry.zookeeper.lease import LeaseSession
from pxrs.testing.history import record
from pxrs.testing.linearizability import check
from pxrs.testing.proxy import Proxy
from pxrs.testing.registry_contract import at_once, quieten
from pxrs.testing.servers import Cluster, Server, ZooKeeperCluster, ZooKeeperServer, certificates
from pxrs.testing.waiting import eventually
from tests.integration import waits
from tests.integration.waits import COPY_S, OF_THE_REGISTRY, World, check_calls

pytestmark = pytest.mark.sampled(2, of="module")

TIMEOUT_S = 1.2
SOAK = bool(os.environ.get("PXRS_SOAK"))
# What a bounded call may take beyond its bound on a busy machine.
SLACK_S = 5.0


@contextmanager
def running(server: ZooKeeperServer | ZooKeeperCluster) -> Iterator[None]:
    """A machine that cannot run ZooKeeper skips these tests, unless it is the one that must not."""
    try:
        server.start()
    except MissingDependency as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))
    with server:
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeperServer]:
    """Alone, with short ticks: sessions from 0.4 s."""
    server = ZooKeeperServer(tick_ms=200)
    with running(server):
        yield server


@pytest.fixture(scope="module")
def cluster() -> Iterator[ZooKeeperCluster]:
    cluster = ZooKeeperCluster(3, tick_ms=200, session_ms_max=30_000, settings={"syncLimit": "8"})
    with running(cluster):
        yield cluster


@pytest.fixture
def namespace() -> str:
    return f"t{uuid4().hex[:12]}"


@pytest.fixture
def proxy(server: ZooKeeperServer) -> Iterator[Proxy]:
    with Proxy(server.host, server.port) as between:
        yield between


@pytest.fixture
def direct(server: ZooKeeperServer, namespace: str) -> Iterator[Registry]:
    """A handle that the proxy's faults do not touch."""
    with registries.open(f"{server.url}?namespace={namespace}") as registry:
        yield registry


@pytest.fixture
def through(proxy: Proxy, namespace: str) -> Iterator[Registry]:
    """A handle to the same namespace through the proxy."""
    with registries.open(url_through(proxy, namespace)) as registry:
        yield registry
        proxy.restore()  # so that the end of its leases can be told


def url_through(proxy: Proxy, namespace: str, timeout_s: float = TIMEOUT_S) -> str:
    return f"zookeeper://{proxy.host}:{proxy.port}?namespace={namespace}&timeout={timeout_s}"


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def client_of(registry: Registry) -> Client:
    assert isinstance(registry, ZooKeeperRegistry)
    return registry._session._client()


def value_of(registry: Registry, key: str) -> bytes | None:
    entry = registry.get(key)
    return None if entry is None else entry.value


def done(action: Callable[[], object]) -> bool:
    """Whether it could be done this time."""
    try:
        action()
    except (RegistryUnavailable, OutcomeUnknown):
        return False
    return True


def works(registry: Registry) -> bool:
    return done(lambda: registry.commit(put={"works": b"%d" % time.monotonic_ns()}))


# Lost, late and impossible replies


def test_r5_a_lost_reply_is_an_unknown_outcome_and_not_done_twice(
    proxy: Proxy, through: Registry, direct: Registry
) -> None:
    version = through.commit(put={"n": b"0"})["n"]
    proxy.drop_replies(close_after=0.2)
    with within(TIMEOUT_S + SLACK_S), pytest.raises(OutcomeUnknown):
        through.commit(expect={"n": version}, put={"n": b"1"})
    proxy.restore()
    entry = direct.get("n")
    assert entry is not None
    assert entry.value == b"1", "the request had passed"
    assert entry.version == version + 1, "and once"
    assert through.get("n") == entry


def test_r5_a_request_may_land_after_its_outcome_was_unknown(namespace: str) -> None:
    # The server grants no session so short that kazoo would leave a silent connection before the call gives up.
    patient = ZooKeeperServer(tick_ms=200, session_ms_min=6000, session_ms_max=10_000)
    with running(patient), Proxy(patient.host, patient.port) as proxy:
        other = registries.open(f"{patient.url}?namespace={namespace}")
        through = registries.open(url_through(proxy, namespace, timeout_s=0.5))
        with other, through:
            version = through.commit(put={"n": b"0"})["n"]
            proxy.hold_requests()
            with within(0.5 + SLACK_S), pytest.raises(OutcomeUnknown):
                through.commit(expect={"n": version}, put={"n": b"late"})
            assert value_of(other, "n") == b"0", "not there, which proves nothing"
            proxy.release_requests()
            eventually(lambda: value_of(other, "n") == b"late")
            assert value_of(through, "n") == b"late"


def test_without_a_connection_nothing_is_sent_and_it_works_again_after(
    proxy: Proxy, through: Registry, direct: Registry
) -> None:
    version = through.commit(put={"n": b"0"})["n"]
    proxy.cut()
    eventually(lambda: not client_of(through).connected)

    def fails_in_time(call: Callable[[], object]) -> None:
        with within(TIMEOUT_S + SLACK_S), pytest.raises(RegistryUnavailable):
            call()

    calls: list[Callable[[], object]] = [
        lambda: through.get("n"),
        lambda: through.commit(expect={"n": version}, put={"n": b"1"}),
        lambda: through.commit(put={"n": b"1"}),
        lambda: through.scan(""),
        lambda: through.watch("n"),
        lambda: through.lease(1),
    ]
    at_once(*[partial(fails_in_time, call) for call in calls])
    proxy.restore()
    with within(2 * SLACK_S):
        through.commit(expect={"n": version}, put={"n": b"2"})
    assert value_of(direct, "n") == b"2"


def test_a_stopped_server_is_an_error_in_time_and_goes_on_after(server: ZooKeeperServer, namespace: str) -> None:
    with registries.open(f"{server.url}?namespace={namespace}&timeout={TIMEOUT_S}") as registry:
        version = registry.commit(put={"n": b"0"})["n"]
        server.pause()
        try:
            with within(TIMEOUT_S + SLACK_S), pytest.raises(OutcomeUnknown):
                registry.commit(expect={"n": version}, put={"n": b"1"})
            with within(TIMEOUT_S + SLACK_S), pytest.raises(RegistryUnavailable):
                registry.get("n")
        finally:
            server.resume()
        eventually(lambda: works(registry))
        assert value_of(registry, "n") in (b"0", b"1")


def test_however_many_calls_there_are_each_ends_in_time(proxy: Proxy, namespace: str) -> None:
    """kazoo's own pipe fills up behind a connection that hangs, and then blocks whoever writes into it."""
    with registries.open(url_through(proxy, namespace, 1.5)) as registry:
        registry.commit(put={"n": b""})
        proxy.stall()

        def ask(_: int) -> bool:
            with suppress(RegistryUnavailable):
                registry.get("n")
            return True

        with within(4 * 1.5 + SLACK_S), ThreadPoolExecutor(400) as pool:
            assert all(pool.map(ask, range(400)))
        proxy.restore()
        assert eventually(lambda: works(registry))


def test_the_death_of_kazoos_thread_is_survived(direct: Registry, caplog: pytest.LogCaptureFixture) -> None:
    direct.commit(put={"n": b"0"})
    with direct.watch("n") as watch:
        first = client_of(direct)
        with caplog.at_level(logging.CRITICAL):
            first._queue.append((None, None))  # what it cannot send, as it cannot read an error code it does not know
            first._connection._write_sock.send(b"\0")
            eventually(lambda: first.line.has_ended)
        eventually(lambda: works(direct))
        assert client_of(direct) is not first
        quieten(watch)
        direct.commit(put={"n": b"1"})
        assert watch.wait(30), "not armed on the new client"


# Watches


def test_r2_a_watch_survives_kill_9_of_the_server_and_misses_nothing(server: ZooKeeperServer, namespace: str) -> None:
    url = f"{server.url}?namespace={namespace}&timeout={TIMEOUT_S}"
    last = 30

    def write() -> None:
        for i in range(1, last + 1):
            if i == last // 2:
                server.kill()
                server.start()
            eventually(lambda i=i: done(lambda: writer.commit(put={"w/n": b"%d" % i})), 20)  # type: ignore[misc]

    with (
        registries.open(url) as reader,
        registries.open(url) as writer,
        reader.watch("w/") as watch,
        ThreadPoolExecutor(1) as pool,
    ):
        written = pool.submit(write)
        value = None
        while value != b"%d" % last:
            assert watch.wait(30), f"no wake after {value!r}"
            with suppress(RegistryUnavailable):  # the next wake comes with the next connection
                value = value_of(reader, "w/n")
        written.result()
        quieten(watch)
        writer.commit(put={"w/after": b""})
        assert watch.wait(30)


def test_r2_an_expired_session_is_replaced_and_its_watches_are_armed_again(
    server: ZooKeeperServer, proxy: Proxy, through: Registry, direct: Registry
) -> None:
    through.commit(put={"w/a": b"0", "w/deep/b": b"0"})
    with through.watch("w/") as watch:
        first = client_of(through).client_id
        quieten(watch)
        proxy.cut()
        assert watch.wait(30), "a lost connection is a doubt, and wakes"
        eventually(lambda: not server.has_session(first[0]))
        # On a busy machine the connection may have broken and come back before the cut, so that the wait above took the
        # wake of that. While the proxy is cut there is no connection, and so no further wake.
        quieten(watch)
        direct.commit(put={"w/deep/b": b"1"})
        assert not watch.wait(0.0)
        proxy.restore()
        assert watch.wait(30), "connected again, without a wake"
        assert value_of(through, "w/deep/b") == b"1"
        assert client_of(through).client_id[0] != first[0], "the session had not expired"
        for key in ("w/a", "w/deep/b", "w/new", "w/new/below"):
            quieten(watch)
            direct.commit(put={key: b"2"})
            assert watch.wait(30), f"{key} is not watched any more"


def test_r2_a_watch_on_folders_that_are_not_there_yet(direct: Registry) -> None:
    with direct.watch("a/b/c/", "x/y/key") as watch:
        for key in ("a/b/c/d/e", "a/b/c/d/e", "a/b/c/d/f", "x/y/key", "x/y/key"):
            quieten(watch)
            direct.commit(put={"a/b/other": b"", "x/y/other": b""})
            assert not watch.wait(0.05), "a neighbour is none of its business"
            direct.commit(put={key: b"%d" % time.monotonic_ns()})
            assert watch.wait(30), key
        quieten(watch)
        direct.commit(delete=["a/b/c/d/e"])
        assert watch.wait(30)


def test_r2_a_thousand_keys_are_watched_each(direct: Registry, server: ZooKeeperServer, namespace: str) -> None:
    keys = [f"w/{i % 10}/{i:03}" for i in range(1000)]
    with registries.open(f"{server.url}?namespace={namespace}") as other:
        other.commit(put=dict.fromkeys(keys, b"0"))
        with within(5.0):
            watch = direct.watch("w/")
        for key in keys[::333]:
            quieten(watch)
            other.commit(put={key: b"1"})
            assert watch.wait(30), key
        quieten(watch)
        versions = {entry.key: entry.version for entry in other.scan("w/")}
        other.commit(expect=versions, delete=keys)
        assert watch.wait(30)
        assert direct.scan("w/") == []
        quieten(watch)
        other.commit(put={keys[0]: b"again"})
        assert watch.wait(30), "a key that was made anew"


# Leases


@pytest.mark.parametrize("fault", ["stall", "cut"])
def test_x12_a_holder_out_of_reach_is_past_its_deadline_before_its_keys_vanish(
    proxy: Proxy, through: Registry, direct: Registry, fault: str
) -> None:
    lease = through.lease(2.0)
    through.commit(ephemeral={"m": b""}, put={"owner": b"first"}, lease=lease)
    granted_until = lease.deadline
    eventually(lambda: lease.deadline > granted_until)
    with direct.watch("m") as watch:
        getattr(proxy, fault)()
        while direct.get("m") is not None:
            assert watch.wait(lease.ttl + 20)
    assert lease.deadline <= SYSTEM.now()
    assert not lease.alive
    direct.commit(expect={"m": ABSENT}, put={"owner": b"second"})
    proxy.restore()
    eventually(lambda: client_is_over(lease))
    with pytest.raises(LeaseExpired):
        through.commit(put={"owner": b"zombie"}, lease=lease)
    assert value_of(through, "owner") == b"second"


def session_of(lease: Lease) -> LeaseSession:
    assert isinstance(lease.stored, LeaseSession)
    return lease.stored


def lease_client(lease: Lease) -> Client:
    client = session_of(lease)._present
    assert client is not None
    return client


def client_is_over(lease: Lease) -> bool:
    return lease_client(lease).line.has_ended


def test_r3_the_store_itself_refuses_a_lease_whose_session_kazoo_has_replaced(
    proxy: Proxy, through: Registry, direct: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the holder noticed nothing: neither that its deadline has passed, nor that the session is another."""
    lease = through.lease(2.0)
    through.commit(ephemeral={"m": b""}, lease=lease)
    first = lease_client(lease).client_id[0]
    lease.abandon()
    monkeypatch.setattr(lease, "deadline", SYSTEM.now() + 60)
    monkeypatch.setattr(session_of(lease), "expire", lambda: LeaseExpired("said the store"))
    monkeypatch.setattr(lease, "expire", lambda: None)  # a refused commit would end it here
    lease_client(lease).state_listeners.clear()
    proxy.cut()
    eventually(lambda: direct.get("m") is None)
    proxy.restore()
    eventually(lambda: (lease_client(lease).client_id or (first,))[0] != first)
    for write in ({"put": {"a": b""}}, {"ephemeral": {"a": b""}}):
        assert lease.alive
        with pytest.raises(LeaseExpired, match="said the store"):
            through.commit(lease=lease, **write)  # type: ignore[arg-type]
    assert direct.scan("") == []


@pytest.mark.soak
@pytest.mark.skipif(not SOAK, reason="a matter of milliseconds that takes many rounds to show; `make soak` runs it")
def test_x12_a_holder_at_a_follower_counts_from_what_the_leader_has_heard(namespace: str) -> None:
    """The follower stops right after it has answered a renewal, before it has told the leader. With a lease of two
    ticks, a deadline counted from that renewal lies 0.2 s behind the expiry in about half of the rounds."""
    cluster = ZooKeeperCluster(3, tick_ms=500, settings={"syncLimit": "20"})
    with running(cluster):
        for round_number in range(12):
            cluster.wait_until_ready()
            leader = cluster.leader()
            options = f"?namespace={namespace}{round_number}&timeout=3"
            with (
                registries.open(cluster.urls[leader] + options) as observer,
                registries.open(cluster.urls[leader - 1] + options) as registry,
            ):
                lease = registry.lease(2.0)
                registry.commit(ephemeral={"m": b""}, lease=lease)
                for _ in range(3):
                    eventually(lambda known=lease.deadline: lease.deadline > known)  # type: ignore[misc]  # noqa: B023
                cluster.nodes[leader - 1].pause()
                with observer.watch("m") as watch:
                    while observer.get("m") is not None:
                        assert watch.wait(30)
                    assert lease.deadline < SYSTEM.now()
                cluster.nodes[leader - 1].resume()


# Three servers


def test_a_dead_leader_is_survived_and_so_are_leases(cluster: ZooKeeperCluster, namespace: str) -> None:
    with registries.open(f"{cluster.url}?namespace={namespace}&timeout=8") as registry:
        lease = registry.lease(20.0)
        registry.commit(ephemeral={"m": b""}, lease=lease)
        with killed(cluster, cluster.leader()):
            before = lease.deadline
            with within(8 + SLACK_S):
                eventually(lambda: works(registry))
                registry.commit(put={"n": b"1"}, lease=lease)
                assert lease.alive
                assert value_of(registry, "m") == b""
            eventually(lambda: lease.deadline > before)  # renewed by the servers that are left


def test_a_lease_leaves_a_server_that_hangs(cluster: ZooKeeperCluster, namespace: str) -> None:
    cluster.wait_until_ready()
    leader = cluster.nodes[cluster.leader()]
    with registries.open(f"{cluster.url}?namespace={namespace}&timeout=8") as registry:
        lease, node = lease_elsewhere(registry, cluster, leader)
        registry.commit(ephemeral={"m": b""}, lease=lease)
        eventually(lambda: lease.deadline > SYSTEM.now() + 0.7 * lease.ttl)
        before = lease.deadline
        node.pause()
        try:
            eventually(lambda: lease.deadline > before + lease.ttl / 2 or not lease.alive)
            assert lease.alive
        finally:
            node.resume()
        registry.commit(put={"n": b"1"}, lease=lease)


def lease_elsewhere(
    registry: Registry, cluster: ZooKeeperCluster, leader: ZooKeeperServer
) -> tuple[Lease, ZooKeeperServer]:
    """A lease whose session is not at the leader, and where it is."""
    while True:
        lease = registry.lease(6.0)
        port = lease_client(lease).line._socket.getpeername()[1]
        if port != leader.port:
            return lease, next(node for node in cluster.nodes if node.port == port)
        lease.close()


def test_r1_a_deposed_leader_that_has_not_noticed_tells_nothing_old(cluster: ZooKeeperCluster, namespace: str) -> None:
    """It would answer a read, also one behind a `sync`, from what it had when it was stopped."""
    cluster.wait_until_ready()
    leader = cluster.leader()
    rest = ",".join(f"{node.host}:{node.port}" for i, node in enumerate(cluster.nodes) if i != leader)
    with (
        registries.open(f"{cluster.urls[leader]}?namespace={namespace}&timeout=20") as reader,
        registries.open(f"zookeeper://{rest}?namespace={namespace}&timeout=20") as writer,
        ThreadPoolExecutor(1) as pool,
    ):
        writer.commit(put={"n": b"old"})
        assert value_of(reader, "n") == b"old"
        connection = client_of(reader).line._socket
        cluster.nodes[leader].pause()
        try:
            eventually(lambda: done(lambda: writer.commit(put={"n": b"new"})))
            assert client_of(reader).line._socket is connection
            read = pool.submit(value_of, reader, "n")
            time.sleep(0.05)  # so that the request is there when the server goes on
        finally:
            cluster.nodes[leader].resume()
        assert read.result() == b"new"


def test_r1_histories_are_linearizable_while_the_leader_is_killed(cluster: ZooKeeperCluster, namespace: str) -> None:
    cluster.wait_until_ready()
    seed = int(time.time())
    urls = [f"{url}?namespace={namespace}&timeout=2" for url in cluster.urls]

    def kill_and_restart() -> None:
        with killed(cluster, cluster.leader()):
            pass

    history = record(
        urls, 3, 1500 if SOAK else 150, seed, keys=("a", "b", "c/d"), during=kill_and_restart, deletes=False
    )
    assert len(history) > 120
    verdict = check(history)
    assert verdict.ok, f"seed {seed}: {verdict.explanation}"


@contextmanager
def killed(cluster: Cluster[ZooKeeperServer], index: int) -> Iterator[Server]:
    node = cluster.nodes[index]
    node.kill()
    try:
        yield node
    finally:
        node.start(wait=False)


# Credentials and addresses


def test_credentials_keep_others_out_and_are_not_shown(
    server: ZooKeeperServer, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(1)
    place = f"{server.host}:{server.port}/closed-{namespace}?namespace={namespace}&timeout={TIMEOUT_S}"
    with registries.open(f"zookeeper://ann:s3cret@{place}") as owner, owner.lease(1) as lease:
        owner.commit(put={"n": b"0"}, ephemeral={"m": b""}, lease=lease)
        assert value_of(owner, "n") == b"0"
        said = [repr(owner)]
        for login in ("ann:wr0ng@", ""):
            with registries.open(f"zookeeper://{login}{place}") as stranger:
                calls: list[Callable[[], object]] = [
                    lambda s=stranger: s.get("n"),  # type: ignore[misc]
                    lambda s=stranger: s.scan(""),  # type: ignore[misc]
                    lambda s=stranger: s.commit(put={"n": b"1"}),  # type: ignore[misc]
                    lambda s=stranger: s.commit(expect={"new": ABSENT}, put={"new": b"1"}),  # type: ignore[misc]
                    lambda s=stranger: s.watch(""),  # type: ignore[misc]
                    lambda s=stranger: s.lease(1),  # type: ignore[misc]
                ]
                for call in calls:
                    with pytest.raises(AccessDenied) as denied:
                        call()
                    said.append(str(denied.value))
        assert value_of(owner, "n") == b"0"
    for text in (*said, *caplog.messages):
        assert "s3cret" not in text
        assert "wr0ng" not in text


def test_tls_with_certificates_of_both_sides(tmp_path: Path, namespace: str) -> None:
    for name in ("ours", "foreign"):
        (tmp_path / name).mkdir()
    ours, foreign = certificates(tmp_path / "ours"), certificates(tmp_path / "foreign")
    server = ZooKeeperServer(tls=ours, client_auth=True)
    with running(server):
        url = f"{server.url}?namespace={namespace}&timeout=1&ca="
        patient = url.replace("timeout=1", "timeout=20")
        with registries.open(f"{patient}{ours.ca}&cert={ours.client_cert}&key={ours.client_key}") as registry:
            keys = [f"k/{i}" for i in range(200)]
            registry.commit(put=dict.fromkeys(keys, b"x" * 1000))
            assert len(registry.scan("k/")) == 200

        def is_refused(options: str) -> None:
            with registries.open(url + options) as stranger, pytest.raises(RegistryUnavailable):
                stranger.get("k/0")

        foreign_server = f"{foreign.ca}&cert={ours.client_cert}&key={ours.client_key}"
        at_once(partial(is_refused, f"{ours.ca}"), partial(is_refused, foreign_server))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("zookeeper://h:2181/a/../b", "path"),
        ("zookeeper://h:2181/a//b", "path"),
        ("zookeeper://h:2181/zookeeper", "reserved by ZooKeeper"),
        ("zookeeper://h:2181?namespace=zookeeper", "reserved by ZooKeeper"),
        ("zookeeper://ann@h:2181", "password"),
        ("zookeeper://h:2181?retries=3", "retries"),
        ("zookeeper://h:2181?timeout=soon", "timeout"),
        ("zookeeper://h:2181?sessions=0", "sessions"),
        ("zookeeper://h:2181?sessions=many", "sessions"),
        ("zookeeper://h:2181?ca=/no/such/file", "no such file"),
        (f"zookeeper://h:2181?cert={__file__}", "together"),
        (f"zookeeper://h:2181?ca={__file__}", "cannot be used"),
        ("zookeeper://", "host"),
    ],
)
def test_a_bad_address_is_an_error_at_once(url: str, said: str) -> None:
    with pytest.raises(InvalidUrl, match=said):
        registries.open(url)


@pytest.mark.sampled(8, of="waits")
def test_every_public_call_that_needs_the_registry_ends_within_its_limit_while_it_does_not_answer(
    proxy: Proxy, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "RETRY_S_MAX", COPY_S)
    url = f"zookeeper://{proxy.host}:{proxy.port}?namespace={namespace}&timeout={waits.TIMEOUT_S:g}"
    world = World(str(tmp_path / "hub"), url, waits.TIMEOUT_S, patience_s=0.0)
    ended = check_calls(world, proxy.stall, proxy.restore, OF_THE_REGISTRY)
    error = ended["Registry.get"]
    assert isinstance(error, RegistryUnavailable)
    assert f"{proxy.host}:{proxy.port}" in str(error)
