"""Back-pressure over all partitions of a broker: a storage node that keeps up is not taken for one that has failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")

from pxrs.cluster.broker.context import BrokerSettings
from pxrs.cluster.broker.log import ClusterTopic
from pxrs.cluster.broker.room import Room
from pxrs.cluster.links import LinkSettings, NodeLink
from pxrs.errors import PartitionUnavailable
from pxrs.log.contract import Append
from pxrs.log.outcomes import NotStored, StoredAt
from pxrs.registry.memory import MemoryRegistry, MemoryStore
from pxrs.testing.clusters import SmallCluster, small_cluster
from pxrs.testing.log_fixtures import new_topic, records
from pxrs.testing.waiting import aside, eventually

PARTITIONS = 12
ENTRY = 50_000
LINK_BYTES_MAX = 400_000


class Held:
    """The answers of all storage nodes wait until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        answered = NodeLink._answered

        def later(link: NodeLink, *arguments: Any) -> None:
            assert self.go.wait(20)
            answered(link, *arguments)

        monkeypatch.setattr(NodeLink, "_answered", later)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallCluster]:
    store = MemoryStore()
    folder = Path(tmp_path_factory.mktemp("cluster"))
    settings = BrokerSettings(append_s=20.0, pending_bytes_max=2 * ENTRY)
    links = LinkSettings(timeout_s=30.0, unanswered_bytes_max=LINK_BYTES_MAX)
    with small_cluster(folder, lambda: MemoryRegistry(store), brokers=1, settings=settings, links=links) as cluster:
        yield cluster


@pytest.fixture
def topic(cluster: SmallCluster) -> Iterator[ClusterTopic]:
    (broker,) = cluster.brokers
    topic = broker.hub.log.create_topic(new_topic("orders", PARTITIONS))
    assert isinstance(topic, ClusterTopic)

    def are_open() -> bool:
        mine = [each for place, each in broker.ownership.partitions().items() if place[0] == topic.id]
        return len(mine) == PARTITIONS and all(each.why_not is None and not each._pending for each in mine)

    eventually(are_open)
    yield topic
    broker.hub.log.delete_topic("orders")


def _append(partition: int) -> Append:
    return Append.encoded(partition, records([b"x" * ENTRY]))


def test_appends_to_many_partitions_wait_instead_of_losing_a_node(
    cluster: SmallCluster, topic: ClusterTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each partition is below its own bound, and together they would be beyond that of a link to a node."""
    broker = cluster.brokers[0].broker
    room, nodes = broker.room, [broker.links(each.node.id) for each in cluster.nodes]
    held = Held(monkeypatch)
    sent = [aside(lambda number=number: topic.append([_append(number)])) for number in range(PARTITIONS)]
    eventually(lambda: room.waiting >= PARTITIONS - LINK_BYTES_MAX // 2 // ENTRY - 1 or any(o.done() for o in sent))
    most = max(link.unanswered_bytes for link in nodes)
    held.go.set()
    assert [each.result() for each in sent] == [[StoredAt(0)]] * PARTITIONS
    assert most < LINK_BYTES_MAX / 2 + 2 * ENTRY  # beyond LINK_BYTES_MAX the node would be replaced
    eventually(lambda: not room.used, what=lambda: f"{room.used} bytes are counted for ever")


def test_an_append_that_finds_no_room_in_time_is_not_stored(
    cluster: SmallCluster, topic: ClusterTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = cluster.brokers[0].broker.room
    room.add(LINK_BYTES_MAX)  # as if of other partitions
    with monkeypatch.context() as patched:
        patched.setattr(room, "wait", lambda own, until: False)  # as after `append_s`
        (outcome,) = topic.local.append([_append(0)])
    assert isinstance(outcome, NotStored)
    assert isinstance(outcome.error, PartitionUnavailable)
    room.give_back(LINK_BYTES_MAX)
    assert topic.append([_append(0)]) == [StoredAt(0)]


def test_entries_that_will_never_be_confirmed_take_no_room(
    cluster: SmallCluster, topic: ClusterTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a partition whose ledger is recovered, and of one that is given up."""
    (broker,) = cluster.brokers
    held = Held(monkeypatch)
    stuck, gone = (broker.ownership.owned(topic.id, number) for number in (0, 1))
    assert stuck is not None
    assert gone is not None
    sent = [aside(lambda number=number: topic.append([_append(number)])) for number in (0, 1)]
    eventually(lambda: stuck._pending and gone._pending)
    assert broker.broker.room.used >= 2 * ENTRY
    stuck.get_stuck("a test")
    broker.ownership._give_up((topic.id, 1), PartitionUnavailable(gone.name, "a test"))
    assert broker.broker.room.used < ENTRY  # what is left is of `_events`
    held.go.set()
    for each in sent:
        each.exception()
    eventually(lambda: stuck.why_not is None and not stuck._pending)
    eventually(lambda: not broker.broker.room.used)


def test_a_partition_whose_nodes_do_not_answer_leaves_room_for_others() -> None:
    room, blocked = Room(100), [0, 0]
    for _ in range(100):  # two partitions of which nothing is confirmed
        for number in (0, 1):
            if room.take(blocked[number], 1):
                blocked[number] += 1
    assert blocked == [34, 33]
    own = 0
    for _ in range(1_000):
        assert room.take(own, 1)
        room.give_back(1)


def test_the_bound_is_exceeded_by_one_append_at_most() -> None:
    room = Room(100)
    assert room.take(0, 70)
    assert room.take(0, 90)
    assert not room.take(0, 1)
    room.give_back(70)
    assert room.take(0, 1)
    assert not room.take(90, 1)


def test_a_waiter_for_room_is_woken_by_others_and_waits_no_longer_than_told() -> None:
    room, own = Room(100), [60]
    room.add(160)
    began = time.monotonic()
    assert not room.wait(lambda: own[0], time.monotonic() + 0.05)
    assert time.monotonic() - began < 5
    waiting = aside(lambda: room.wait(lambda: own[0], time.monotonic() + 600))
    eventually(lambda: room.waiting == 1)
    own[0] = 0
    room.give_back(61)  # of another partition, too
    assert waiting.result()
    assert room.waiting == 0
