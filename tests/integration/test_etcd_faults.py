"""The etcd registry when servers die, stop and restart, and when the network loses, delays and cuts."""

from __future__ import annotations

import importlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import urlopen
from uuid import uuid4

import pytest

from pxrs import registry as registries
from pxrs.clock import SYSTEM
from pxrs.cluster.records import alive_key
from pxrs.copying import copier
from pxrs.errors import (
    AccessDenied,
    Closed,
    LeaseExpired,
    OutcomeUnknown,
    RegistryUnavailable,
    StorageFull,
)
from pxrs.registry import Registry
from pxrs.registry.etcd import connection
from pxrs.registry.etcd.lease import TRUSTED
from pxrs.registry.etcd.link import DIAL_S_MAX
from pxrs.registry.etcd.registry import EtcdRegistry
from pxrs.testing.history import record
from pxrs.testing.linearizability import check
from pxrs.testing.proxy import Proxy
from pxrs.testing.registry_contract import quieten
from pxrs.testing.servers import EtcdCluster, EtcdServer, StorageServer, certificates, free_ports
from pxrs.testing.waiting import eventually
from tests.integration import waits
from tests.integration.waits import COPY_S, OF_THE_REGISTRY, World, check_calls

pytestmark = pytest.mark.sampled(2, of="module")

# For the requests that no registry makes. Not imported here: pxrs must be the first to import gRPC (`pxrs.grpc_fork`).
grpc, rpc = importlib.import_module("grpc"), importlib.import_module("pyetcd.etcdrpc")

TIMEOUT_S = 0.6
# What a bounded call may take beyond its bound on a busy machine.
SLACK_S = 5.0
ANSWER_S = 30.0


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


@pytest.fixture(scope="module")
def cluster() -> Iterator[EtcdCluster]:
    with EtcdCluster(3) as servers:
        yield servers


@pytest.fixture
def namespace() -> str:
    return f"t{uuid4().hex[:12]}"


@pytest.fixture
def proxy(etcd: EtcdServer) -> Iterator[Proxy]:
    with Proxy(etcd.host, etcd.port) as between:
        yield between


@pytest.fixture
def direct(etcd: EtcdServer, namespace: str) -> Iterator[Registry]:
    """A handle that the proxy's faults do not touch."""
    with registries.open(f"{etcd.url}?namespace={namespace}") as registry:
        yield registry


@pytest.fixture
def through(proxy: Proxy, namespace: str) -> Iterator[Registry]:
    """A handle to the same namespace through the proxy."""
    url = f"etcd://{proxy.host}:{proxy.port}?namespace={namespace}&timeout={TIMEOUT_S}"
    with registries.open(url) as registry:
        yield registry
        proxy.restore()  # so that the end of its leases can be told


def test_a_storage_node_that_starts_while_etcd_is_away_waits_for_it(
    etcd: EtcdServer, proxy: Proxy, direct: Registry, namespace: str
) -> None:
    """And says so on /readyz from the beginning; what is cut again while it registers does not end it either."""
    (port,) = free_ports(1)
    proxy.cut()
    url = f"etcd://{proxy.host}:{proxy.port}?namespace={namespace}&timeout={TIMEOUT_S}"
    with closing(StorageServer(url, flags=["--metrics-listen", str(port)], forked=True)) as server:
        server.start(wait=False)
        eventually(lambda: "waiting for the registry: " in readiness(port))
        proxy.drop_replies(close_after=0)
        proxy.wait_for_request(ANSWER_S)
        proxy.cut()
        proxy.restore()
        server.wait_until_ready()
        eventually(lambda: '"ok": true' in readiness(port))
        assert direct.get(alive_key(server.node)) is not None
        assert not list(server.data.glob("aside-*"))


def readiness(port: int) -> str:
    """What /readyz answers; empty if nobody answers."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=ANSWER_S) as answer:
            return str(answer.read().decode())
    except HTTPError as error:
        with error:
            return error.read().decode()
    except OSError:
        return ""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds, f"took {took:.2f} s, and {seconds:g} s is the bound"


def value_of(registry: Registry, key: str) -> bytes | None:
    entry = registry.get(key)
    return None if entry is None else entry.value


def link_of(registry: Registry) -> Any:
    """How the registry reaches etcd for everything but renewals."""
    assert isinstance(registry, EtcdRegistry)
    return registry._keys


def through_any(servers: EtcdCluster, first: int, options: str) -> str:
    """An address of the whole cluster that begins with the server `first`."""
    nodes = servers.nodes[first:] + servers.nodes[:first]
    return f"etcd://{','.join(f'{node.host}:{node.port}' for node in nodes)}?{options}"


# Lost requests and lost replies.


@pytest.mark.parametrize("close_after", [None, 0], ids=["silence", "reset"])
def test_r5_a_lost_reply_is_an_unknown_outcome_and_is_not_sent_again(
    through: Registry, direct: Registry, proxy: Proxy, close_after: float | None
) -> None:
    before = through.commit(put={"a": b"0"})["a"]
    proxy.drop_replies(close_after)
    with within(TIMEOUT_S + SLACK_S), pytest.raises(OutcomeUnknown):
        through.commit(put={"a": b"1"})
    eventually(lambda: value_of(direct, "a") == b"1")
    proxy.restore()
    entry = _persist(lambda: through.get("a"))
    assert entry is not None
    assert (entry.value, entry.version) == (b"1", before + 1), "it was written twice"


def test_a_cut_connection_is_unavailable_within_the_bound_and_heals(
    through: Registry, direct: Registry, proxy: Proxy
) -> None:
    through.commit(put={"a": b"0"})
    used = link_of(through)._current
    proxy.cut()
    eventually(lambda: not used.is_sound)
    calls: list[Callable[[], object]] = [
        lambda: through.commit(put={"a": b"1"}),  # first: nothing else has found out that the connection is gone
        lambda: through.get("a"),
        lambda: through.scan(""),
        lambda: through.lease(5),
        lambda: through.watch(""),
    ]
    for call in calls:
        with within(TIMEOUT_S + SLACK_S), pytest.raises(RegistryUnavailable, match="refused"):
            call()
    assert value_of(direct, "a") == b"0"
    proxy.restore()
    with within(SLACK_S):
        _persist(lambda: through.commit(put={"a": b"2"}))
    assert value_of(direct, "a") == b"2"
    with _persist(lambda: through.watch("")) as watch, _persist(lambda: through.lease(5)):
        direct.commit(put={"b": b""})
        assert watch.wait(30)


def test_a_silent_network_is_an_error_within_the_bound(through: Registry, proxy: Proxy) -> None:
    through.commit(put={"a": b"0"})
    proxy.stall()
    with within(TIMEOUT_S + SLACK_S), pytest.raises(OutcomeUnknown):
        through.commit(put={"a": b"1"})
    # The connection that did not answer was given up, and no new one comes about: nothing is sent.
    with within(TIMEOUT_S + SLACK_S), pytest.raises(RegistryUnavailable):
        through.commit(put={"a": b"2"})
    with within(TIMEOUT_S + SLACK_S), pytest.raises(RegistryUnavailable):
        through.get("a")
    proxy.restore()
    assert _persist(lambda: value_of(through, "a")) in (b"0", b"1")


@pytest.mark.parametrize("fault", ["restore", "cut", "stall"])
def test_calls_that_a_close_interrupts_end_at_once_in_errors_of_our_own(
    proxy: Proxy, namespace: str, fault: str
) -> None:
    ends: list[BaseException] = []

    def call_until_it_fails(call: Callable[[], object]) -> None:
        try:
            while True:
                call()
        except BaseException as error:  # noqa: BLE001 - it is what the test is about
            ends.append(error)

    with registries.open(f"etcd://{proxy.host}:{proxy.port}?namespace={namespace}") as registry:
        calls: list[Callable[[], object]] = [
            lambda: registry.get("a"),
            lambda: registry.commit(put={"a": b""}),
            lambda: registry.watch("a").close(),
        ]
        threads = [threading.Thread(target=call_until_it_fails, args=(call,)) for call in calls * 2]
        for thread in threads:
            thread.start()
        getattr(proxy, fault)()
        time.sleep(0.1)  # into whatever they wait for then
        with within(2 + SLACK_S):
            registry.close()
            for thread in threads:
                thread.join()
    assert len(ends) == len(threads)
    assert {type(end) for end in ends} <= {Closed, OutcomeUnknown, RegistryUnavailable}, ends


def test_r5_a_commit_may_land_after_its_outcome_was_given_up(cluster: EtcdCluster, namespace: str) -> None:
    """The leader has it and cannot replicate it; its followers come back, and there it is."""
    leader = cluster.leader()
    followers = [node for i, node in enumerate(cluster.nodes) if i != leader]
    url = f"{cluster.nodes[leader].url}?namespace={namespace}"
    with registries.open(f"{url}&timeout=0.25") as hasty, registries.open(url) as patient:
        hasty.commit(put={"a": b"0"})
        for node in followers:
            node.pause()
        try:
            with pytest.raises(OutcomeUnknown):
                hasty.commit(put={"a": b"late"})
        finally:
            for node in followers:
                node.resume()
        eventually(lambda: value_of(patient, "a") == b"late")
    cluster.wait_until_ready()


def test_a_connection_that_dies_silently_is_noticed_by_an_idle_watch(
    proxy: Proxy, direct: Registry, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = {
        "grpc.keepalive_time_ms": 1_000,
        "grpc.keepalive_timeout_ms": 500,
        "grpc.http2.ping_timeout_ms": 500,
    }
    options = tuple((name, quick.get(name, value)) for name, value in connection._CHANNEL_OPTIONS)
    monkeypatch.setattr(connection, "_CHANNEL_OPTIONS", options)
    url = f"etcd://{proxy.host}:{proxy.port}?namespace={namespace}"
    with registries.open(url) as through, through.watch("a") as watch:
        quieten(watch)
        proxy.stall()
        assert watch.wait(30), "the doubt was not told"
        direct.commit(put={"a": b""})
        proxy.reset_connections()
        proxy.restore()
        assert watch.wait(30)
        assert through.get("a") is not None


# A server that stops, dies and comes back.


def test_a_stopped_server_is_an_error_within_the_bound_and_resumes(etcd: EtcdServer, namespace: str) -> None:
    with registries.open(f"{etcd.url}?namespace={namespace}&timeout={TIMEOUT_S}") as registry:
        registry.commit(put={"a": b"0"})
        etcd.pause()
        try:
            with within(TIMEOUT_S + SLACK_S), pytest.raises(OutcomeUnknown):
                registry.commit(put={"a": b"1"})
            with within(TIMEOUT_S + SLACK_S), pytest.raises(RegistryUnavailable):
                registry.get("a")
        finally:
            etcd.resume()
        _persist(lambda: registry.commit(put={"b": b""}))
        assert _persist(lambda: value_of(registry, "a")) in (b"0", b"1")


def test_r2_nothing_is_missed_around_kill_9_and_restart(namespace: str) -> None:
    """One handle counts, another follows by watch and read, while the server is killed under both."""
    last = 60
    with EtcdServer() as etcd:
        url = f"{etcd.url}?namespace={namespace}&timeout=5"
        with registries.open(url) as writer, registries.open(url) as reader, reader.watch("n") as watch:
            has_started, may_end = threading.Event(), threading.Event()
            acknowledged: list[int] = []

            def write() -> None:
                for i in range(1, last + 1):
                    if i == last:
                        may_end.wait(20)
                    put = {"n": b"%d" % i, f"each/{i}": b""}
                    _persist(lambda put=put: writer.commit(put=put))  # type: ignore[misc]
                    acknowledged.append(i)
                    has_started.set()

            thread = threading.Thread(target=write)
            thread.start()
            try:
                has_started.wait(10)
                etcd.kill()
                etcd.restart()
                may_end.set()
                while _persist(lambda: value_of(reader, "n")) != b"%d" % last:
                    assert watch.wait(30), "a change was missed"
            finally:
                may_end.set()
                thread.join()
            assert acknowledged == list(range(1, last + 1))
            assert len(reader.scan("each/")) == last
            quieten(watch)
            writer.commit(put={"n": b"after"})
            assert watch.wait(30)


def _persist(call: Callable[[], Any]) -> Any:
    """Call until it succeeds; only for what may be done twice."""
    while True:
        try:
            return call()
        except (RegistryUnavailable, OutcomeUnknown):
            continue


def test_r2_a_compaction_while_a_watch_is_cut_off(
    through: Registry, direct: Registry, proxy: Proxy, etcd: EtcdServer
) -> None:
    with through.watch("a") as watch:
        quieten(watch)
        proxy.cut()
        assert watch.wait(30), "the doubt was not told"
        for i in range(5):
            version = direct.commit(put={"a": b"%d" % i})["a"]
        with grpc.insecure_channel(f"{etcd.host}:{etcd.port}") as channel:
            rpc.KVStub(channel).Compact(rpc.CompactionRequest(revision=version, physical=True))
        quieten(watch)
        proxy.restore()
        assert watch.wait(30), "a change while the watch was cut off was missed"
        assert value_of(through, "a") == b"4"
        quieten(watch)
        direct.commit(put={"a": b"5"})
        assert watch.wait(30), "the watch was not made again"


# Leases.


@pytest.mark.parametrize("fault", ["cut", "stall", "drop_replies"])
def test_x12_a_holder_that_cannot_renew_is_past_its_deadline_before_its_keys_are_gone(
    through: Registry, direct: Registry, proxy: Proxy, fault: str
) -> None:
    lease = through.lease(3)
    through.commit(ephemeral={"m": b""}, lease=lease)
    first = lease.deadline
    eventually(lambda: lease.deadline > first)  # it is being renewed
    with direct.watch("m") as watch:
        getattr(proxy, fault)()
        while direct.get("m") is not None:
            assert watch.wait(lease.ttl + 20)
    assert SYSTEM.now() >= lease.deadline, "the store gave it away before its holder let go"
    assert not lease.alive
    with pytest.raises(LeaseExpired):
        through.commit(put={"a": b""}, lease=lease)
    proxy.restore()
    with pytest.raises(LeaseExpired):
        through.commit(put={"a": b""}, lease=lease)
    eventually(lambda: value_of(through, "a") is None)
    lease.close()


def test_r6_renewal_takes_no_lock_that_a_commit_can_hold(through: Registry) -> None:
    link = link_of(through)
    with through.lease(3) as lease, link._dialling, link._lock:
        until = lease.deadline + lease.ttl
        eventually(lambda: lease.deadline > until)


def test_x12_a_renewal_counts_only_if_the_term_has_not_changed_since(
    through: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that was deposed and does not know it answers renewals that its successor never hears of."""
    assert isinstance(through, EtcdRegistry)
    with through.lease(5) as lease:
        current = through._renewals._current
        assert current is not None
        renew = current.keep_alive

        def answer_of_the_deposed(*arguments: Any, **options: Any) -> Any:
            answer = renew(*arguments, **options)
            answer.header.raft_term -= 1
            return answer

        assert lease.stored.renew() > SYSTEM.now()
        monkeypatch.setattr(current, "keep_alive", answer_of_the_deposed)
        with pytest.raises(RegistryUnavailable, match="leader changed"):
            lease.stored.renew()
        monkeypatch.undo()
        assert lease.stored.renew() > SYSTEM.now()


# Several servers.


def test_reads_commits_and_leases_survive_the_loss_of_the_leader(cluster: EtcdCluster, namespace: str) -> None:
    leader = cluster.leader()
    options = f"namespace={namespace}&timeout=5"
    url = through_any(cluster, leader, options)
    with registries.open(url) as registry, registry.lease(12) as lease, registry.watch("w/") as watch:
        registry.commit(ephemeral={"m": b""}, put={"a": b"0"}, lease=lease)
        quieten(watch)
        cluster.nodes[leader].kill()
        try:
            with within(5 + SLACK_S):
                assert value_of(registry, "a") == b"0"
            with within(5 + SLACK_S):
                registry.commit(put={"a": b"1"}, lease=lease)
            assert watch.wait(30), "the doubt was not told"
            renewed_at = SYSTEM.now()
            # A deadline this far ahead comes only from a renewal after the election.
            eventually(lambda: lease.deadline > renewed_at + TRUSTED * lease.ttl - 0.5)
            with registries.open(through_any(cluster, (leader + 1) % 3, options)) as other:
                quieten(watch)
                other.commit(put={"w/a": b""})
                assert watch.wait(30)
                assert other.get("m") is not None
        finally:
            cluster.nodes[leader].restart()
    cluster.wait_until_ready()


def test_x12_a_leader_that_was_asleep_does_not_renew_what_its_successor_counts_down(
    cluster: EtcdCluster, namespace: str
) -> None:
    """The new leader counts from its election. The old one wakes up, knows nothing of it, and answers a renewal."""
    node = cluster.nodes[cluster.leader()]
    other = next(each for each in cluster.nodes if each is not node)
    with registries.open(f"{node.url}?namespace={namespace}") as registry, registry.lease(6) as lease:
        lease.abandon()
        node.pause()
        try:
            eventually(lambda: any(each.is_leader() for each in cluster.nodes if each is not node))
            time.sleep(2.5)  # of the lease's time, by the new leader's count
        finally:
            node.resume()
        try:
            deadline = lease.stored.renew()
        except RegistryUnavailable:
            deadline = lease.deadline
        with grpc.insecure_channel(f"{other.host}:{other.port}") as channel:
            request = rpc.LeaseTimeToLiveRequest(ID=int(lease.id, 16))
            left_s = rpc.LeaseStub(channel).LeaseTimeToLive(request, timeout=10).TTL
        assert deadline <= SYSTEM.now() + left_s + 1, "the holder believes in time that the store has not given"
    cluster.wait_until_ready()


def test_a_member_that_is_down_or_silent_is_passed_over(etcd: EtcdServer, proxy: Proxy, namespace: str) -> None:
    with Proxy(etcd.host, etcd.port) as down:
        down.cut()
        proxy.stall()
        hosts = ",".join(f"{place.host}:{place.port}" for place in (down, proxy, etcd))
        with (
            within(2 * DIAL_S_MAX + SLACK_S),  # two servers are dialled in vain
            registries.open(f"etcd://{hosts}?namespace={namespace}") as registry,
            registry.watch("a") as watch,
            registry.lease(5) as lease,
        ):
            registry.commit(ephemeral={"a": b""}, lease=lease)
            assert watch.wait(30)


def test_a_member_without_a_leader_says_so_and_nothing_was_sent(namespace: str) -> None:
    options = f"namespace={namespace}&timeout={TIMEOUT_S}"
    with EtcdCluster(3) as cluster, registries.open(f"{cluster.urls[0]}?{options}") as registry:
        registry.commit(put={"a": b"0"})
        for node in cluster.nodes[1:]:
            node.kill()
        # What was sent while it still believed in a leader may be unknown; from then on it is refused.
        with pytest.raises((RegistryUnavailable, OutcomeUnknown)):
            registry.commit(put={"a": b"1"})
        eventually(lambda: has_no_leader(registry))
        with within(TIMEOUT_S + SLACK_S), pytest.raises(RegistryUnavailable, match="no leader"):
            registry.commit(put={"a": b"2"})


def has_no_leader(registry: Registry) -> bool:
    with within(TIMEOUT_S + SLACK_S), pytest.raises(RegistryUnavailable) as unavailable:
        registry.get("a")
    return "no leader" in str(unavailable.value)


def test_r1_histories_are_linearizable_while_a_server_is_killed(cluster: EtcdCluster, namespace: str) -> None:
    urls = [through_any(cluster, i, f"namespace={namespace}&timeout=3") for i in range(3)]
    leader = cluster.leader()
    try:
        history = record(
            urls,
            clients=3,
            operations_per_client=150,
            seed=int(namespace[1:], 16),
            keys=["a", "b", "c"],
            during=cluster.nodes[leader].kill,
            timeout=60,
        )
    finally:
        cluster.nodes[leader].restart()
    assert len(history) > 350
    verdict = check(history)
    assert verdict.ok, verdict.explanation


# Who may.


def test_tls_with_client_certificates(tmp_path: Path) -> None:
    certs = certificates(tmp_path)
    (other := tmp_path / "other").mkdir()
    strangers = certificates(other)
    mutual = f"cert={certs.client_cert}&key={certs.client_key}"
    with EtcdServer(tls=certs, client_auth=True) as etcd:
        with registries.open(f"{etcd.url}?ca={certs.ca}&{mutual}") as registry:
            registry.commit(put={"a": b"1"})
            with registry.watch("a") as watch, registry.lease(5) as lease:
                registry.commit(put={"a": b"2"}, lease=lease)
                assert watch.wait(30)
        for options in (
            f"ca={certs.ca}",
            f"ca={strangers.ca}&{mutual}",
            f"ca={certs.ca}&cert={strangers.client_cert}&key={strangers.client_key}",
            "tls=true",
            "",
        ):
            with within(0.5 + SLACK_S), pytest.raises(RegistryUnavailable):
                registries.open(f"{etcd.url}?timeout=0.5&{options}".rstrip("&"))


ROOT, APP, PASSWORD = "root", "app", "s3cret/with?marks"


@pytest.fixture(scope="module")
def guarded() -> Iterator[EtcdServer]:
    """A server with authentication, where APP may read and write the namespace `app`."""
    with EtcdServer() as etcd:
        with grpc.insecure_channel(f"{etcd.host}:{etcd.port}") as channel:
            auth = rpc.AuthStub(channel)
            auth.UserAdd(rpc.AuthUserAddRequest(name=ROOT, password=PASSWORD))
            auth.UserAdd(rpc.AuthUserAddRequest(name=APP, password=PASSWORD))
            auth.RoleAdd(rpc.AuthRoleAddRequest(name=APP))
            auth.RoleAdd(rpc.AuthRoleAddRequest(name=ROOT))
            permission = rpc.Permission(permType=rpc.Permission.READWRITE, key=b"/app/", range_end=b"/app0")
            auth.RoleGrantPermission(rpc.AuthRoleGrantPermissionRequest(name=APP, perm=permission))
            auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user=APP, role=APP))
            auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user=ROOT, role=ROOT))
            auth.AuthEnable(rpc.AuthEnableRequest())
        yield etcd


def login(etcd: EtcdServer, user: str, password: str, namespace: str = "app") -> str:
    return f"etcd://{user}:{quote(password, safe='')}@{etcd.host}:{etcd.port}?namespace={namespace}&timeout=5"


def test_a_user_with_the_right_password_has_its_namespace(guarded: EtcdServer, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(PASSWORD + "\n")
    by_file = f"etcd://{APP}@{guarded.host}:{guarded.port}?namespace=app&password_file={file}"
    for url in (login(guarded, APP, PASSWORD), by_file):
        with registries.open(url) as registry, registry.lease(5) as lease, registry.watch("") as watch:
            registry.commit(put={"a": b"1"}, ephemeral={"m": b""}, lease=lease)
            assert watch.wait(30)
            assert [entry.key for entry in registry.scan("")] == ["a", "m"]


def test_what_is_not_permitted_is_denied_and_no_secret_is_told(
    guarded: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    anonymous = f"{guarded.url}?namespace=app"
    for url in (
        login(guarded, APP, "wrong" + PASSWORD),
        login(guarded, "nobody", PASSWORD),
        login(guarded, APP, PASSWORD, namespace="foreign"),
        anonymous,
    ):
        with within(SLACK_S), pytest.raises(AccessDenied) as denied:
            registries.open(url)
        assert PASSWORD not in str(denied.value)
    with registries.open(login(guarded, APP, PASSWORD)) as registry:
        assert PASSWORD not in repr(vars(registry))
    assert PASSWORD not in caplog.text


def test_a_server_that_has_forgotten_the_token_is_logged_in_to_again(guarded: EtcdServer) -> None:
    with (
        registries.open(login(guarded, APP, PASSWORD)) as registry,
        registry.watch("w") as watch,
        registry.lease(5) as lease,
    ):
        quieten(watch)
        guarded.kill()
        guarded.restart()
        registry.commit(put={"a": b"1"}, lease=lease)
        assert watch.wait(30), "the doubt was not told"
        assert isinstance(registry, EtcdRegistry)
        (shared,) = registry._watches.prefixes()
        eventually(lambda: registry._stream.is_live(shared))
        quieten(watch)
        registry.commit(put={"w": b"1"})
        assert watch.wait(30)
        assert lease.stored.renew() > SYSTEM.now()


def test_a_full_store_refuses_what_would_grow_it_until_there_is_room(namespace: str) -> None:
    with (
        EtcdServer(flags=["--quota-backend-bytes=3000000"]) as etcd,
        registries.open(f"{etcd.url}?namespace={namespace}") as registry,
    ):
        value = b"x" * registry.limits.value_bytes_max

        def fill() -> None:
            for i in itertools.count():
                registry.commit(put={f"k/{i}": value})

        with pytest.raises(OutcomeUnknown, match="space"):  # etcd has been seen to write it and to say this
            fill()
        entries = registry.scan("")
        calls: list[Callable[[], object]] = [lambda: registry.commit(put={"a": b""}), lambda: registry.lease(5)]
        for call in calls * 2:
            with pytest.raises(StorageFull):
                call()
        assert registry.scan("") == entries
        _make_room(etcd)
        assert registry.commit(put={"a": b""}).keys() == {"a"}
        with registry.lease(5) as lease:
            registry.commit(put={"b": b""}, lease=lease)
        assert [e.key for e in registry.scan("")] == ["a", "b"]


def _make_room(etcd: EtcdServer) -> None:
    """What an administrator does: delete, forget the past, give the space back, say that it is well again."""
    with grpc.insecure_channel(f"{etcd.host}:{etcd.port}") as channel:
        keys, maintenance = rpc.KVStub(channel), rpc.MaintenanceStub(channel)
        revision = keys.DeleteRange(rpc.DeleteRangeRequest(key=b"/", range_end=b"0")).header.revision
        keys.Compact(rpc.CompactionRequest(revision=revision, physical=True))
        maintenance.Defragment(rpc.DefragmentRequest())
        for alarm in maintenance.Alarm(rpc.AlarmRequest(action=rpc.AlarmRequest.GET)).alarms:
            off = rpc.AlarmRequest(action=rpc.AlarmRequest.DEACTIVATE, memberID=alarm.memberID, alarm=alarm.alarm)
            maintenance.Alarm(off)


@pytest.mark.sampled(8, of="waits")
def test_every_public_call_that_needs_the_registry_ends_within_its_limit_while_it_does_not_answer(
    proxy: Proxy, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "RETRY_S_MAX", COPY_S)
    url = f"etcd://{proxy.host}:{proxy.port}?namespace={namespace}&timeout={waits.TIMEOUT_S:g}"
    world = World(str(tmp_path / "hub"), url, waits.TIMEOUT_S, patience_s=0.0)
    ended = check_calls(world, proxy.stall, proxy.restore, OF_THE_REGISTRY)
    error = ended["Registry.get"]
    assert isinstance(error, RegistryUnavailable)
    assert f"{proxy.host}:{proxy.port}" in str(error)
