"""The registry contract on a real ZooKeeper, and what is ZooKeeper's own."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

import pytest
from kazoo.protocol.serialization import CheckVersion, Create, Delete, SetData, Transaction
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from pxrs import registry as registries
from pxrs.clock import SYSTEM, ManualClock
from pxrs.errors import CommitTooLarge, Conflict, LeaseExpired, MissingDependency, RegistryUnavailable
from pxrs.registry import ABSENT
from pxrs.registry.contract import Commit
from pxrs.registry.limit import time_limit
from pxrs.registry.zookeeper import ZooKeeperRegistry, snapshot
from pxrs.registry.zookeeper.bulk import MultiRead, SetWatches, next_count
from pxrs.registry.zookeeper.client import UNSENT_MAX, Client, Crowded, Endpoint
from pxrs.registry.zookeeper.layout import Layout, Version, ancestors
from pxrs.registry.zookeeper.lease import Connections, Secret, VisitingSession
from pxrs.registry.zookeeper.multi import Node, Step, steps
from pxrs.testing.registry_contract import Backend, SharedRegistryContract, quieten
from pxrs.testing.registry_contract.snapshots import Snapshots
from pxrs.testing.servers import ZooKeeperCluster, ZooKeeperServer

pytestmark = pytest.mark.sampled(2, of="module")


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeperServer]:
    try:
        server = ZooKeeperServer(tick_ms=200, session_ms_max=60_000).start()
    except MissingDependency as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))
    with server:
        yield server


class TestZooKeeper(SharedRegistryContract):
    @pytest.fixture
    def backend(self, server: ZooKeeperServer) -> Backend:
        return Backend(
            f"{server.url}/tests/contract", ttl=1.0, versions_outlive_deletion=False, leases_many=20, lease_threads=1
        )


@pytest.mark.skipif(not os.environ.get("PXRS_SOAK"), reason="a server alone is tested above; `make soak` runs it")
class TestSnapshotsOfAnEnsemble(Snapshots):
    """Through the leader and through followers: each of them answers a multiRead between two transactions."""

    @pytest.fixture(params=range(3))
    def backend(self, request: pytest.FixtureRequest) -> Iterator[Backend]:
        with ZooKeeperCluster(3) as cluster:
            yield Backend(f"{cluster.urls[request.param]}/tests/ensemble", ttl=1.0)


@pytest.fixture
def registry(server: ZooKeeperServer) -> Iterator[ZooKeeperRegistry]:
    with registries.open(f"{server.url}/tests/own?namespace=t{uuid4().hex[:12]}") as registry:
        assert isinstance(registry, ZooKeeperRegistry)
        yield registry


def a_commit(
    expect: dict[str, int] | None = None, put: dict[str, bytes] | None = None, delete: tuple[str, ...] = ()
) -> Commit:
    return Commit(expect or {}, put or {}, {}, frozenset(delete), None, False)


# The layout


@pytest.mark.parametrize("key", ["a", "a/b", "groups/g/members/x", "a-b/c.d/~", "!"])
def test_a_key_is_a_leaf_and_its_path_leads_back(key: str) -> None:
    layout = Layout("/chroot/prod")
    assert layout.key(layout.leaf(key)) == key
    assert layout.prefix(layout.folder(f"{key}/")) == f"{key}/"
    assert not layout.is_folder(layout.leaf(key))
    assert layout.is_folder(layout.folder(f"{key}/"))
    assert ancestors(layout.leaf(f"{key}/below"))[-1] == layout.folder(f"{key}/")


def test_the_namespaces_own_node_is_the_folder_of_everything() -> None:
    layout = Layout("/prod")
    assert layout.folder("") == "/prod"
    assert layout.prefix("/prod") == ""
    assert layout.leaf("groups/g/members/x") == "/prod/groups;/g;/members;/x"
    assert ancestors(layout.lease("7")) == ["/prod", "/prod/;leases"]
    assert layout.children("", ["a", "a;", ";leases"]) == (["a"], ["a/"])


def test_a_version_is_a_number_and_leads_back() -> None:
    for version in (Version(1, False, 0), Version(2**63 - 1, True, 2**31 - 1), Version(5, False, -(2**31))):
        assert Version.parse(version.number()) == version
    one = Version(7, False, 3).number()
    assert Version.parse(one + 1).writes == 4, "off by one is caught by the one comparison that ZooKeeper makes"
    assert Version.parse(one - 1).writes == 2
    assert not Version.parse(12345).is_possible


# The transaction


def test_a_blind_deletion_of_an_absent_key_is_proved_where_more_depends_on_it() -> None:
    done = steps(a_commit(put={"a": b"v"}, delete=("b",)), {"a": None, "b": None}, Layout("/r"), "acl", None)
    assert [(step.key, step.request) for step in done] == [
        ("a", Create("/r/a", b"v", "acl", 0)),
        ("b", Create("/r/b", b"", "acl", 0)),
        ("b", Delete("/r/b", -1)),
        (None, SetData("/r", b"", -1)),
    ]


def test_what_is_believed_is_in_the_steps() -> None:
    believed = {"checked": Node(3, False, False), "set": Node(4, False, False), "freed": Node(5, True, True)}
    commit = a_commit({"checked": 1, "set": 1, "freed": 1}, {"set": b"s", "freed": b"f"})
    assert steps(commit, believed, Layout("/r"), "acl", "/r/;leases/7") == [
        Step(CheckVersion("/r/;leases/7", -1)),
        Step(CheckVersion("/r/checked", 3), "checked"),
        Step(Delete("/r/freed", 5), "freed"),
        Step(Create("/r/freed", b"f", "acl", 0), "freed"),
        Step(SetData("/r/set", b"s", 4), "set"),
    ]


@pytest.mark.parametrize("acl", [CREATOR_ALL_ACL, OPEN_ACL_UNSAFE], ids=["closed", "open"])
def test_no_transaction_is_longer_than_was_counted(acl: object) -> None:
    for path in ("/r", f"/r/{'x' * 500}"):
        for request in (
            Create(path, b"v" * 9, acl, 0),
            SetData(path, b"v" * 9, 1),
            Delete(path, 1),
            CheckVersion(path, 1),
        ):
            alone = len(Transaction([request]).serialize()) - len(Transaction([]).serialize())
            assert alone <= Step(request).wire_bytes


# Many nodes by one request


@pytest.mark.parametrize(("value_bytes", "count"), [(0, 250), (100, 250), (100_000, 10), (750_000, 1), (2_000_000, 1)])
def test_large_values_are_asked_for_few_at_a_time(value_bytes: int, count: int) -> None:
    assert next_count([(b"v" * value_bytes, None)] * 2) == count
    assert next_count([None, None]) == 250


# Sessions of leases


@pytest.mark.parametrize("session_id", [0x1000_0000_0001, -0x7000_0000_0000_0001])
def test_the_secret_of_a_lease_holds_its_session(session_id: int) -> None:
    secret = Secret("token", session_id, bytes(range(16)))
    assert Secret.parse(secret.text()) == secret
    for wrong in ("", "a.b", "a.b.c.d", "token.xyz.00", "token.1.0", secret.text().upper(), f"{secret.text()} "):
        with pytest.raises(LeaseExpired):
            Secret.parse(wrong)


def test_r6_a_renewal_proves_what_the_leader_knows_and_not_what_it_will_hear() -> None:
    """The leader may hear of a touch half a tick later, and a quarter of the granted time is at least as long."""
    endpoint = Endpoint("zookeeper://h", ("h:2181",), 1.0)
    session = VisitingSession(
        endpoint, Layout("/r"), ManualClock(), Connections("", 1), 4.0, Secret("token", 1, b"password")
    )
    trusted_s = 4.0 * 0.95
    assert session._renewed(sent_at=10.0, touched_at=9.0) == 9.0 + trusted_s
    assert session._renewed(sent_at=10.5, touched_at=9.0) == 9.0 + trusted_s, "too soon after the first"
    assert session._renewed(sent_at=11.2, touched_at=9.0) == 10.0 + trusted_s
    assert session._renewed(sent_at=11.3, touched_at=11.25) == 11.25 + trusted_s, "connected anew"


def test_r8_the_connections_of_leases_are_bounded_and_the_error_names_the_option(server: ZooKeeperServer) -> None:
    url = f"{server.url}/tests/own?namespace=t{uuid4().hex[:12]}&timeout=1&sessions=2"
    with registries.open(url) as registry:
        # They take turns. A renewal that finds no connection is refused after a quarter of the lease.
        on_request = [registry.lease(8, renewed=False) for _ in range(5)]
        first, _ = registry.lease(30), registry.lease(30)
        with pytest.raises(RegistryUnavailable, match="sessions=N"):
            registry.lease(30)
        with pytest.raises(RegistryUnavailable, match="sessions=N"):
            on_request[0].renew()
        first.close()
        assert on_request[0].renew() > SYSTEM.now()
        with registry.lease(30) as again:
            registry.commit(put={"a": b""}, lease=again)


def test_w2_between_two_calls_nothing_is_connected_to_the_session_of_an_unrenewed_lease(
    registry: ZooKeeperRegistry, server: ZooKeeperServer
) -> None:
    lease = registry.lease(30, renewed=False)
    session = lease.stored
    assert isinstance(session, VisitingSession)
    for call in (lease.renew, lambda: registry.commit(ephemeral={"m": b""}, lease=lease)):
        call()
        assert session._present is None
        assert f"{session.secret.session_id:x}".encode() not in server._ask(b"cons")
    assert server.has_session(session.secret.session_id)
    lease.end()
    assert not server.has_session(session.secret.session_id)


# On the server


def test_many_keys_are_read_and_watched_by_few_requests(
    registry: ZooKeeperRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {f"k/{i % 3}/{i:04}": b"%d" % i for i in range(900)}
    versions = registry.commit(put=values)
    sent = requests_of(monkeypatch)
    found = registry.scan("k/")
    assert {entry.key: entry.value for entry in found} == values
    assert {entry.key: entry.version for entry in found} == versions
    assert len(sent) < 15
    sent.clear()
    with pytest.raises(Conflict) as conflict:
        registry.commit(expect={**versions, "k/1/0001": ABSENT}, put={"k/0/0000": b""})
    assert conflict.value.keys == ("k/1/0001",)
    assert len(sent) < 10
    sent.clear()
    with registry.watch("k/") as watch:
        assert len(sent) < 15
        for key in ("k/0/0000", "k/2/0899"):  # in the first request, and in the last
            quieten(watch)
            registry.commit(put={key: b"new"})
            assert watch.wait(30), key


def test_a_server_that_cannot_read_many_is_asked_one_by_one(
    registry: ZooKeeperRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"k/{i:02}" for i in range(60)]
    registry.commit(put=dict.fromkeys(keys, b"v"))
    monkeypatch.setattr(MultiRead, "type", 99)  # a request that no server knows, as those before 3.6 do not know ours
    assert [entry.key for entry in registry.scan("k/")] == keys


def test_r2_a_key_that_vanishes_before_it_is_watched_is_watched_when_it_is_back(
    registry: ZooKeeperRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.commit(put={"k/1": b"", "k/2": b""})
    watched = registry._session.watch

    def lose_then_watch(client: Client, paths: Sequence[str]) -> None:
        if paths:
            monkeypatch.setattr(registry._session, "watch", watched)
            registry.commit(delete=["k/2"])
        watched(client, paths)

    monkeypatch.setattr(registry._session, "watch", lose_then_watch)
    with registry.watch("k/") as watch:
        assert watch.wait(30), "it is gone"
        quieten(watch)
        sent = requests_of(monkeypatch)
        assert not watch.wait(0.2), "it stays gone"
        assert not [request for request in sent if isinstance(request, SetWatches)]
        for value in (b"back", b"again", b"and again"):
            registry.commit(put={"k/2": value})
            assert watch.wait(30), value
            quieten(watch)


def requests_of(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is sent from now on."""
    sent: list[object] = []
    call = Client._call

    def record(client: Client, request: object, result: object) -> object:
        sent.append(request)
        return call(client, request, result)

    monkeypatch.setattr(Client, "_call", record)
    return sent


def test_a_full_commit_of_long_keys_fits(registry: ZooKeeperRegistry) -> None:
    limits = registry.limits
    keys = [f"groups/{'g' * 40}/checkpoints/{'t' * 36}/{i:05}" for i in range(limits.commit_keys_max)]
    size = limits.commit_bytes_max // len(keys) - len(keys[0])
    new = registry.commit(expect=dict.fromkeys(keys, ABSENT), put=dict.fromkeys(keys, b"1" * size))
    new = registry.commit(expect=new, put=dict.fromkeys(keys, b"2" * size))
    with registry.lease(5) as lease:  # every node is replaced: each path goes twice
        registry.commit(expect=new, ephemeral=dict.fromkeys(keys, b"3" * size), lease=lease)
        assert [entry.value for entry in registry.scan("")] == [b"3" * size] * len(keys)
    assert registry.scan("") == []


def test_what_the_wire_does_not_take_is_refused_before_it_is_sent(registry: ZooKeeperRegistry) -> None:
    assert registry.get("a") is None
    first = registry._session._client().client_id
    keys = [f"{'x' * 500}/{i:04}" for i in range(registry.limits.commit_keys_max - 1)]
    with pytest.raises(CommitTooLarge, match="paths"):
        registry.commit(expect=dict.fromkeys(keys, ABSENT), put={"a": b"x" * 200_000})
    assert registry.scan("") == []
    assert registry._session._client().client_id == first


def test_a_version_that_no_node_had_conflicts(registry: ZooKeeperRegistry) -> None:
    version = registry.commit(put={"a": b"1"})["a"]
    for wrong in (1, 12345, 2**32 - 1, version - 1, version + 1, version | (2**32 - 1)):
        for write in ({"put": {"a": b"2"}}, {"delete": ["a"]}, {"put": {"b": b"2"}}):
            with pytest.raises(Conflict) as conflict:
                registry.commit(expect={"a": wrong}, **write)
            assert conflict.value.keys == ("a",)
    assert registry.get("a") == registry.scan("")[0]


def test_an_absent_key_is_deleted_without_a_trace(registry: ZooKeeperRegistry) -> None:
    assert registry.commit(delete=["never/was/here"]) == {}
    client = registry._session._client()
    assert client.exists(registry._layout.root) is None
    with pytest.raises(Conflict):
        registry.commit(expect={"never/was/here": 1}, delete=["never/was/here"])
    assert registry.commit(expect={"never/was/here": ABSENT}, delete=["never/was/here"]) == {}
    registry.commit(put={"never/was/here": b"now"})
    with pytest.raises(Conflict):
        registry.commit(expect={"never/was/here": ABSENT}, delete=["never/was/here"])


def test_keys_that_vanish_during_a_scan_are_made_up_for(
    registry: ZooKeeperRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.commit(put=dict.fromkeys(("k/1", "k/2", "k/3", "k/4"), b""))
    listed = registry._list

    def list_then_lose(*arguments: object) -> list[str]:
        keys = listed(*arguments)  # type: ignore[arg-type]
        if "k/2" in keys:
            registry.commit(delete=["k/2"])
        return keys

    monkeypatch.setattr(registry, "_list", list_then_lose)
    assert [entry.key for entry in registry.scan("k/", limit=2)] == ["k/1", "k/3"]


def test_a_request_that_finds_no_room_to_be_sent_waits_no_longer_than_the_limit_of_its_thread() -> None:
    """The connection hangs, so that what others have asked for is never sent."""
    client = Client.__new__(Client)
    client._clock, client._patience_s, client._one_by_one = SYSTEM, 30.0, threading.Lock()
    client._queue = deque([None] * UNSENT_MAX)
    began = SYSTEM.now()
    with time_limit(0.05), pytest.raises(Crowded):
        client._call(None, None)
    assert SYSTEM.now() - began < 15


def test_a_snapshot_that_needs_several_requests_is_exact_or_refused(
    registry: ZooKeeperRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests are of different moments: their answers count only if nothing was written meanwhile."""
    registry.commit(put={f"a/{n}": b"%d" % n for n in range(20)})
    monkeypatch.setattr(snapshot, "REQUEST_BYTES_MAX", 200)
    assert list(registry.snapshot().entries) == registry.scan("")
    asked = snapshot.SnapshotReader._ask

    def disturbed(reader: snapshot.SnapshotReader, parts: Any) -> Any:
        registry.commit(put={"a/0": b"again"})
        return asked(reader, parts)

    monkeypatch.setattr(snapshot.SnapshotReader, "_ask", disturbed)
    with pytest.raises(RegistryUnavailable, match="stop the programs that use them"):
        registry.snapshot()
