"""P7: what a deletion at one broker means for the others, and that brokers keep nothing of topics and brokers that are
gone."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("grpc")

from pxrs.cluster import records as keys
from pxrs.cluster.broker import log as logs
from pxrs.cluster.broker.log import ClusterLog, ClusterTopic
from pxrs.cluster.broker.running import RunningBroker
from pxrs.cluster.broker.view import Seen
from pxrs.errors import Closed, PartitionMoved, TopicDeleted
from pxrs.log.contract import Append, TopicLog
from pxrs.log.outcomes import NotStored, StoredAt
from pxrs.registry.memory import MemoryRegistry, MemoryStore
from pxrs.remote.client import routes
from pxrs.remote.client.routes import Peers
from pxrs.remote.client.settings import Settings
from pxrs.testing.clusters import SmallCluster, small_cluster
from pxrs.testing.log_fixtures import new_topic, records
from pxrs.testing.waiting import aside, eventually

_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallCluster]:
    store = MemoryStore()
    with small_cluster(Path(tmp_path_factory.mktemp("cluster")), lambda: MemoryRegistry(store)) as cluster:
        yield cluster


class Found:
    """A topic, the broker that owns its partition, and the other one."""

    def __init__(self, cluster: SmallCluster) -> None:
        self.name = f"topic-{next(_numbers)}"
        self.topic = cluster.brokers[0].hub.log.create_topic(new_topic(self.name, 1))
        self.owner = eventually(lambda: self._owner(cluster))
        self.other = next(each for each in cluster.brokers if each is not self.owner)
        topic = self.owner.hub.log.topic_now(self.name)
        assert isinstance(topic, ClusterTopic)
        self.local = topic.local

    def _owner(self, cluster: SmallCluster) -> RunningBroker | None:
        for broker in cluster.brokers:
            found = broker.ownership.owned(self.topic.id, 0)
            if found is not None and found.why_not is None:
                return broker
        return None


@pytest.fixture
def found(cluster: SmallCluster) -> Found:
    return Found(cluster)


class Blind:
    """A broker whose view of the registry is not read again until `go` is set."""

    def __init__(self, broker: RunningBroker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        view = broker.broker.view
        refresh = view.refresh

        def later() -> Seen:
            assert self.go.wait(30)
            return refresh()

        monkeypatch.setattr(view, "refresh", later)


def _append(topic: TopicLog) -> object:
    return topic.append([Append.encoded(0, records([b"a"]))])[0]


class Asked:
    """Set once a deletion has looked for owners that have not given up."""

    def __init__(self, broker: RunningBroker, monkeypatch: pytest.MonkeyPatch) -> None:
        self._count, self._lock = 0, threading.Lock()
        log = broker.hub.log
        assert isinstance(log, ClusterLog)
        look = log._owners_left

        def counted(topic_id: str) -> list[str]:
            found = look(topic_id)
            with self._lock:
                self._count += 1
            return found

        monkeypatch.setattr(log, "_owners_left", counted)

    def __call__(self, times: int) -> bool:
        return self._count >= times


def test_p7_an_append_that_begins_after_a_deletion_is_not_stored(
    found: Found, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The deletion is made at a broker that does not own the partition, and its owner has not seen it yet."""
    blind, has_asked = Blind(found.owner, monkeypatch), Asked(found.other, monkeypatch)
    deleted = aside(lambda: found.other.hub.log.delete_topic(found.name))
    eventually(lambda: has_asked(1) or deleted.done())
    assert isinstance(_append(found.local), StoredAt)
    assert not deleted.done()
    blind.go.set()
    assert deleted.result() == found.topic.id
    outcome = _append(found.local)
    assert isinstance(outcome, NotStored)
    assert isinstance(outcome.error, TopicDeleted | PartitionMoved)
    assert not [each for each in caplog.records if "have not given it up" in each.getMessage()]


def test_p7_upkeep_does_not_remove_what_a_deletion_waits_for(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    """It removes the owner records of deleted topics, and the owner has not given up."""
    blind, has_asked = Blind(found.owner, monkeypatch), Asked(found.other, monkeypatch)
    deleted = aside(lambda: found.other.hub.log.delete_topic(found.name))
    eventually(lambda: has_asked(1))
    finished = aside(found.other.hub.log.finish_deletions)
    eventually(lambda: has_asked(3) or finished.done())
    assert not deleted.done()
    assert not finished.done()
    blind.go.set()
    assert deleted.result() == found.topic.id
    assert isinstance(_append(found.local), NotStored)
    finished.result()
    eventually(lambda: not list(found.other.broker.registry.scan(f"{keys.OWNERS}{found.topic.id}/")))


def test_a_deletion_does_not_wait_for_ever_for_an_owner(
    found: Found, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "GIVEN_UP_S", 0.1)
    blind = Blind(found.owner, monkeypatch)
    assert aside(lambda: found.other.hub.log.delete_topic(found.name)).result() == found.topic.id
    blind.go.set()
    (told,) = [each.getMessage() for each in caplog.records if found.name in each.getMessage()]
    assert found.owner.broker.membership.incarnation in told
    eventually(lambda: isinstance(_append(found.local), NotStored))


def test_a_deletion_does_not_wait_for_an_owner_that_is_dead(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = found.other.broker.registry
    key = keys.owner_key(found.topic.id, 0)
    blind = Blind(found.owner, monkeypatch)
    entry = registry.get(key)
    assert entry is not None
    dead = keys.OwnerRecord.parse(entry.key, entry.value).claimed("dead", "127.0.0.1:1")
    registry.commit({key: entry.version}, {key: dead.dump()})
    log = found.other.hub.log
    assert isinstance(log, ClusterLog)
    assert log._owners_left(found.topic.id) == []
    blind.go.set()
    log.delete_topic(found.name)


def test_a_broker_keeps_nothing_of_deleted_topics(cluster: SmallCluster) -> None:
    ids = set()
    for _ in range(3):
        found = Found(cluster)
        ids.add(found.topic.id)
        with found.local.subscribe([0], lambda: None):
            pass
        found.other._peers.topic(cluster.addresses[cluster.brokers.index(found.owner)], found.topic.topic)
        found.owner.hub.log.delete_topic(found.name)

    def kept() -> set[str]:
        some = set[str]()
        for broker in cluster.brokers:
            mine = broker.ownership
            some |= {place[0] for places in (mine._owned, mine._orphans) for place in places}
            some |= mine._subscribers.keys() | {each.topic.topic.id for each in list(mine._opening)}
            some |= {topic_id for _, topic_id in broker._peers._topics}
            broker.broker.view.look_again()
        return some & ids

    eventually(lambda: not kept(), what=kept)


def test_a_broker_keeps_no_connection_to_brokers_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    peers, topic = Peers(Settings("pxrs://", (), 2.0, 2.0)), new_topic("orders")
    there, gone = (peers.topic(address, topic) for address in ("127.0.0.1:1", "127.0.0.1:2"))
    assert peers.keep(["127.0.0.1:1"], [topic.id]) == []  # it may be back soon, and calls may be under way
    assert peers.topic("127.0.0.1:2", topic) is gone
    monkeypatch.setattr(routes, "ABSENT_S", 0.0)
    assert peers.keep(["127.0.0.1:1", "127.0.0.1:2"], [topic.id]) == []
    (session,) = peers.keep(["127.0.0.1:1"], [topic.id])
    session.close()
    with pytest.raises(Closed):
        gone.bounds([0])
    assert peers.topic("127.0.0.1:1", topic) is there
    assert peers.topic("127.0.0.1:2", topic) is not gone
    assert peers.keep(["127.0.0.1:1", "127.0.0.1:2"], []) == []
    assert peers.topic("127.0.0.1:1", topic) is not there
    peers.close()
