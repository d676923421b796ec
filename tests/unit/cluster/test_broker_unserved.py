"""Partitions that a broker owns and cannot serve: what it publishes, what clients are told, and when it tries again."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")

import pxrs
from pxrs.cluster import placement as placements
from pxrs.cluster.broker import ownership, repairs, tries, view
from pxrs.cluster.broker.context import Broker, BrokerSettings
from pxrs.cluster.broker.partition import OwnedPartition
from pxrs.cluster.broker.running import RunningBroker
from pxrs.cluster.ledgers import LedgerName
from pxrs.cluster.placement import Candidate
from pxrs.cluster.records import Abandonment, abandoned_key
from pxrs.cluster.status import ClusterStatus, read_status
from pxrs.cluster.storage.node import StorageNode
from pxrs.cluster.troubles import NODES, OTHER, PLACEMENT, RECOVERY, TROUBLES
from pxrs.errors import AppendFailed, PartitionUnavailable, PxrsError, RegistryUnavailable
from pxrs.metrics.instruments import BROKER_UNSERVED
from pxrs.registry.contract import Registry
from pxrs.registry.memory import MemoryRegistry, MemoryStore
from pxrs.testing.clusters import SmallCluster, small_cluster
from pxrs.testing.command import run_here
from pxrs.testing.waiting import eventually

WHY = "1 of 2 needed storage nodes accept entries (3 in the ensemble)"
_numbers = itertools.count()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def lonely(tmp_path: Path, store: MemoryStore) -> Iterator[SmallCluster]:
    """A broker, and one storage node of the three that a topic needs by default."""
    with small_cluster(tmp_path, lambda: MemoryRegistry(store), nodes=1, brokers=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallCluster]:
    """A whole one."""
    shared = MemoryStore()
    folder = Path(tmp_path_factory.mktemp("cluster"))
    settings = BrokerSettings(append_s=5.0)
    with small_cluster(folder, lambda: MemoryRegistry(shared), brokers=1, settings=settings) as found:
        yield found


def registry_of(cluster: SmallCluster) -> Registry:
    return cluster.brokers[0].broker.registry


def status_when(cluster: SmallCluster, check: Any) -> ClusterStatus:
    """The status, once it is as `check` says."""
    registry = registry_of(cluster)

    def look() -> ClusterStatus | None:
        found = read_status(registry)
        return found if check(found) else None

    return eventually(look, what=lambda: read_status(registry))


def patient_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a failed try is not repeated during a test, unless something has changed."""
    monkeypatch.setattr(tries, "RETRY_S", 600.0)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Troubles are published soon."""
    monkeypatch.setattr(ownership, "TROUBLE_S", 0.6)
    monkeypatch.setattr(ownership, "TELL_S", 0.1)


class Opened:
    """What `open_partition` does, in place of the real one: raises the error, if there is one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        self.error: Exception | None = error
        self.count = 0
        self.has_begun = threading.Event()
        opened = ownership.open_partition

        def opening(broker: Broker, partition: OwnedPartition, is_crowded: Any) -> bool:
            self.count += 1
            self.has_begun.set()
            if self.error is not None:
                raise self.error
            return opened(broker, partition, is_crowded)

        monkeypatch.setattr(ownership, "open_partition", opening)


@pytest.fixture
def partition(cluster: SmallCluster) -> Iterator[OwnedPartition]:
    """Of a new topic of one partition, which is served."""
    (broker,) = cluster.brokers
    name = f"orders-{next(_numbers)}"
    topic = broker.hub.create_topic(name, partitions=1)
    yield eventually(lambda: serving(broker, topic.id))
    broker.hub.delete_topic(name)


def serving(broker: RunningBroker, topic_id: str) -> OwnedPartition | None:
    found = broker.ownership.owned(topic_id, 0)
    return found if found is not None and found.why_not is None else None


def test_a_cluster_that_can_store_nothing_says_so_and_serves_once_there_are_nodes(
    lonely: SmallCluster, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def call(*arguments: str) -> Any:
        return run_here(monkeypatch, capfd, (*arguments, "--at", lonely.url)).unwrapped()

    made = call("topic", "create", "orders", "--partitions", "2")
    assert made.code == 0
    assert made.errors.startswith(
        f"warning: topic orders was created, but nothing can be stored in it yet: {WHY}; start more storage nodes"
    )
    found = status_when(lonely, lambda found: len(found.unserved) == 4)
    assert {(each.topic, each.owner, each.kind, each.why) for each in found.unserved} == {
        (topic, "broker-0", NODES, WHY) for topic in ("_audit", "_events", "orders")
    }
    shown = call("cluster", "status")
    assert shown.code == 1
    assert f"nothing can be stored in topics _audit, _events, orders: {WHY}" in shown.out
    assert "4 partitions owned by broker broker-0 and not served since" in shown.out
    assert "every partition has an owner" not in shown.out
    assert dict(BROKER_UNSERVED.read())[NODES,] == 4
    with pxrs.open(lonely.url) as hub:
        producer = hub.producer("orders", delivery_timeout=1.5)

        def is_told() -> bool:
            """On a busy machine, the answer to the last try may not come in time."""
            with pytest.raises(AppendFailed) as refused:
                producer.send(b"a").result(20.0)
            return WHY in str(refused.value) and "see `pxrs cluster status`" in str(refused.value)

        eventually(is_told)
        with suppress(PxrsError):  # the errors that no receipt was asked for
            producer.close()
        patient_tries(monkeypatch)
        opening = lonely.brokers[0].ownership._opening
        eventually(lambda: len(opening) == 4 and min(each.wait_s(time.monotonic()) for each in opening.values()) > 100)
        lonely.start_node(1)
        lonely.start_node(2)
        with hub.producer("orders") as producer:
            assert producer.send(b"a").result(10.0) is not None
    found = status_when(lonely, lambda found: not found.has_faults)
    assert (found.unserved, found.lacking_nodes) == ((), ())
    assert registry_of(lonely).scan(TROUBLES) == []
    assert dict(BROKER_UNSERVED.read())[NODES,] == 0


def test_a_degraded_ensemble_is_warned_of_by_the_library_and_returned_as_before(
    lonely: SmallCluster, caplog: pytest.LogCaptureFixture
) -> None:
    lonely.start_node(1)
    eventually(lambda: len(lonely.brokers[0].broker.view.seen.alive) == 2)
    with pxrs.open(lonely.url) as hub:
        assert hub.create_topic("orders").partitions
        assert hub.create_topic("small", ensemble=2, write_quorum=2, ack_quorum=2).log.warnings == ()
    told = {each.getMessage() for each in caplog.records if each.name == "pxrs.hub_topics"}
    assert told == {
        "messages of topic orders get fewer copies than asked for: 2 of 3 storage nodes of the ensemble accept "
        "entries; start more storage nodes"
    }


def test_a_partition_that_is_opened_quickly_is_no_trouble(
    cluster: SmallCluster, partition: OwnedPartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "TROUBLE_S", 60.0)  # a reopening on a busy machine is quick, too
    broker = cluster.brokers[0]
    before = registry_of(cluster).get(f"{TROUBLES}{broker.broker.membership.incarnation}")
    partition.get_stuck("a test")
    broker.ownership._note_unserved()
    assert broker.ownership.unserved == []
    eventually(lambda: partition.why_not is None)
    assert before is registry_of(cluster).get(f"{TROUBLES}{broker.broker.membership.incarnation}") is None


@pytest.mark.usefixtures("soon")
def test_an_unexpected_error_is_told_with_its_kind_and_logged_once(
    cluster: SmallCluster,
    partition: OwnedPartition,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    opened = Opened(monkeypatch, ValueError("a defect"))
    partition.get_stuck("a test")
    found = status_when(cluster, lambda found: found.unserved)
    assert [(each.kind, each.why) for each in found.unserved] == [(OTHER, "a defect")]
    eventually(lambda: opened.count > 1)
    told = [each for each in caplog.records if "could not be opened" in each.getMessage()]
    assert [each.levelno for each in told] == [logging.ERROR]
    assert told[0].exc_info is not None
    opened.error = None
    status_when(cluster, lambda found: not found.has_faults)


@pytest.mark.usefixtures("soon")
def test_a_partition_that_opens_and_whose_entries_nobody_acknowledges_is_told(
    cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is opened again and again, so it is never stuck for long."""
    monkeypatch.setattr(StorageNode, "add", lambda *given: None)
    topic = cluster.brokers[0].hub.create_topic("silent", partitions=1)
    found = status_when(cluster, lambda found: any(each.topic == "silent" for each in found.unserved))
    told = {each.topic: (each.kind, each.why) for each in found.unserved}["silent"]  # and perhaps the hub's own topics
    assert told[0] == NODES
    assert told[1].startswith("too few storage nodes have acknowledged the first entry of ledger")
    monkeypatch.undo()
    status_when(cluster, lambda found: not found.has_faults)
    eventually(lambda: serving(cluster.brokers[0], topic.id))
    cluster.brokers[0].hub.delete_topic("silent")


@pytest.mark.usefixtures("soon")
def test_a_recovery_that_waits_is_told_as_one(
    cluster: SmallCluster, partition: OwnedPartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Opened(monkeypatch, PartitionUnavailable("ledger t/0/1", "too few storage nodes answered its recovery"))
    partition.get_stuck("a test")
    found = status_when(cluster, lambda found: found.unserved)
    assert [each.kind for each in found.unserved] == [RECOVERY]
    with pxrs.open(cluster.url) as hub:  # it was served before, and has an end that a producer can look up
        producer = hub.producer(partition.topic.topic.name, delivery_timeout=3.0)

        def is_told() -> bool:
            """On a busy machine, the answer to the last try may not come in time."""
            with pytest.raises(AppendFailed) as error:
                producer.send(b"a").result(20.0)
            return "too few storage nodes answered its recovery" in str(error.value)

        eventually(is_told)
        with suppress(PxrsError):  # the errors that no receipt was asked for
            producer.close()
    opened.error = None
    status_when(cluster, lambda found: not found.has_faults)


def test_a_decision_of_an_operator_causes_a_try_at_once(
    cluster: SmallCluster, partition: OwnedPartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Opened(monkeypatch, PartitionUnavailable("ledger t/0/1", "no answer"))
    patient_tries(monkeypatch)
    partition.get_stuck("a test")
    assert opened.has_begun.wait(10)
    eventually(lambda: not cluster.brokers[0].ownership._opening[partition].is_trying)
    opened.error = None
    key = abandoned_key(LedgerName("t", 0, 1))
    registry_of(cluster).commit(put={key: Abandonment(("n",), "ann", 1.0).dump()})
    eventually(lambda: partition.why_not is None, 10.0)
    registry_of(cluster).commit(delete=[key])


def test_the_view_is_told_of_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "LOOK_S", 600.0)
    key, changed = abandoned_key(LedgerName("t", 0, 1)), threading.Event()
    with MemoryRegistry(MemoryStore()) as registry, closing(view.View(registry)) as seen:
        seen.start()
        with seen.subscribe(changed.set):
            registry.commit(put={key: Abandonment(("n",), "ann", 1.0).dump()})
            assert changed.wait(10)
        assert seen.seen.abandoned.keys() == {"t/0/0000000001"}


@pytest.mark.usefixtures("soon")
def test_troubles_that_could_not_be_written_are_written_later(
    cluster: SmallCluster, partition: OwnedPartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Opened(monkeypatch, ValueError("a defect"))
    commit, refused = MemoryRegistry.commit, threading.Event()

    def away(self: MemoryRegistry, *given: Any, **named: Any) -> Any:
        if any(key.startswith(TROUBLES) for key in named.get("ephemeral", ())) and not refused.is_set():
            refused.set()
            raise RegistryUnavailable("a test")
        return commit(self, *given, **named)

    monkeypatch.setattr(MemoryRegistry, "commit", away)
    partition.get_stuck("a test")
    status_when(cluster, lambda found: found.unserved)
    assert refused.is_set()
    opened.error = None
    status_when(cluster, lambda found: not found.has_faults)


@pytest.fixture
def bad(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A placement function of the name `bad`, which raises while the event is set."""
    is_bad = threading.Event()
    is_bad.set()

    def choose(candidates: Sequence[Candidate], count: int, turn: int) -> list[str]:
        if is_bad.is_set():
            raise RuntimeError("a placement of a user")
        return [each.id for each in candidates][:count]

    monkeypatch.setitem(placements.PLACEMENTS, "bad", choose)  # type: ignore[arg-type]  # it is a dictionary
    return is_bad


@pytest.mark.usefixtures("soon")
def test_a_placement_function_that_raises_is_told_and_holds_up_no_other_topic(
    cluster: SmallCluster, partition: OwnedPartition, monkeypatch: pytest.MonkeyPatch, bad: threading.Event
) -> None:
    (broker,) = cluster.brokers
    looked = threading.Event()
    offered = repairs.is_repairable

    def repairable(record: Any, live: Any, spares: Any) -> bool:
        if record.topic_id == partition.topic.topic.id:
            looked.set()
        return offered(record, live, spares)

    settings = broker.broker.settings
    object.__setattr__(settings, "placement", "bad")
    try:
        topic = broker.hub.create_topic("misplaced", partitions=1)
    finally:
        object.__setattr__(settings, "placement", "least loaded")
    found = status_when(cluster, lambda found: found.unserved and found.placements)
    assert [(each.topic, each.kind) for each in found.unserved] == [("misplaced", PLACEMENT)]
    why = "the placement function 'bad' failed: RuntimeError('a placement of a user')"
    assert [(each.topic, each.placement, each.owner, each.why) for each in found.placements] == [
        ("misplaced", "bad", "broker-0", why)
    ]
    assert found.has_faults
    # The repairs of every topic go on.
    owned = broker.ownership.owned(topic.id, 0)
    assert owned is not None
    monkeypatch.setattr(OwnedPartition, "tend", lambda each, live, lacking: broker.broker.ensemble(each.topic))
    broker.repairs._look()
    monkeypatch.setattr(repairs, "needs_repair", lambda record, live: True)
    monkeypatch.setattr(repairs, "is_repairable", repairable)
    with partition.lock:
        partition._roll()
    eventually(lambda: partition.chain)
    eventually(looked.is_set)
    monkeypatch.undo()
    bad.clear()
