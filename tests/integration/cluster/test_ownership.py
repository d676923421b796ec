"""P5 and P7 in clusters within one process: partitions move to brokers that have fewer, and deleted topics leave
nothing behind."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("grpc")

import pxrs
from pxrs.cluster import records
from pxrs.cluster.records import DeletedTopic, TopicRecord
from pxrs.cluster.status import ClusterStatus, read_status
from pxrs.cluster.storage.node import StorageNode
from pxrs.testing.clusters import SmallCluster, small_cluster
from pxrs.testing.waiting import eventually


def status(cluster: SmallCluster) -> ClusterStatus:
    return read_status(cluster.brokers[-1].broker.registry)


def loads(cluster: SmallCluster) -> list[int]:
    """How many partitions of the topic each broker owns and serves."""
    owned = [broker.ownership.partitions().values() for broker in cluster.brokers]
    return [sum(each.why_not is None and each.name.startswith("orders/") for each in some) for some in owned]


def test_p5_a_broker_that_joins_gets_its_share_without_an_error_and_nothing_flaps(tmp_path: Path) -> None:
    with small_cluster(tmp_path, brokers=1) as cluster, pxrs.open(cluster.url) as hub:
        hub.create_topic("orders", partitions=6)
        eventually(lambda: loads(cluster) == [6])
        is_over = threading.Event()
        sent: list[int] = []

        with hub.producer("orders") as producer:

            def send() -> None:
                while not is_over.is_set():
                    producer.send(b"x", partition=len(sent) % 6)
                    producer.flush()  # raises what could not be stored
                    sent.append(len(sent))

            failed: list[BaseException] = []

            def run() -> None:
                try:
                    send()
                except BaseException as error:  # noqa: BLE001 - looked at below
                    failed.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            eventually(lambda: len(sent) > 20)
            cluster.start_broker()
            eventually(lambda: loads(cluster) == [3, 3], what=lambda: loads(cluster))
            before = len(sent)
            eventually(lambda: len(sent) > before + 20)
            is_over.set()
            thread.join()
        assert failed == []
        moved = Counter(each.epoch for each in status(cluster).partitions if each.topic == "orders")
        assert moved == {1: 3, 2: 3}, "a partition has moved more often than once"
        # Closed by the broker that released it, so that nothing had to be recovered.
        entries = cluster.brokers[0].broker.registry.scan(records.LEDGERS)
        assert {records.LedgerRecord.parse(entry.key, entry.value).recovery for entry in entries} == {0}
        assert sum(bounds.end for bounds in hub.log.topic("orders").bounds(range(6)).values()) == len(sent)


def test_p5_a_broker_that_stops_releases_its_partitions_to_the_others_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pxrs.cluster.broker.ownership.CLAIM_S", 1_000.0)  # only the broker that is to claim does
    with small_cluster(tmp_path, brokers=3, lease_ttl=60.0) as cluster, pxrs.open(cluster.url) as hub:
        hub.create_topic("orders", partitions=6)
        eventually(lambda: sum(loads(cluster)) == 6, what=lambda: loads(cluster))
        before = {each.partition: each for each in status(cluster).partitions if each.topic == "orders"}
        cluster.brokers[0].ownership.close()  # its lease lives: the others need not wait for its end
        eventually(lambda: sum(loads(cluster)[1:]) == 6, what=lambda: loads(cluster))
        cluster.stop_broker(0)
        for each in status(cluster).partitions:
            if each.topic == "orders":
                has_moved = before[each.partition].owner == "broker-0"
                assert each.epoch == before[each.partition].epoch + has_moved
                assert each.ledgers == ({"closed": 1, "open": 1} if has_moved else {"open": 1})
        assert [each.name for each in status(cluster).brokers] == ["broker-1", "broker-2"]


def test_v8_that_the_last_broker_has_left_is_stored_before_it_releases_its_partitions(tmp_path: Path) -> None:
    with small_cluster(tmp_path, brokers=1) as cluster:
        with pxrs.open(cluster.url) as hub:
            hub.create_topic("orders", partitions=1)
            eventually(lambda: [each for each in hub.events() if each.name == "broker.joined"])  # `_events` is served
        cluster.stop_broker(0)
        cluster.start_broker()
        with pxrs.open(f"pxrs://{cluster.addresses[1]}") as hub:
            left = [each.fields["broker"] for each in hub.events() if each.name == "broker.left"]
    assert left == ["broker-0"]


def stored(node: StorageNode) -> set[str]:
    """The ids of the topics of which the node has anything."""
    return {ledger.partition("/")[0] for ledger, _ in node.ledgers()}


def test_p7_a_deleted_topic_leaves_nothing_on_any_node_whoever_dies(tmp_path: Path) -> None:
    with small_cluster(tmp_path, brokers=2) as cluster, pxrs.open(cluster.url) as hub:
        registry = cluster.brokers[0].broker.registry
        for name in ("orders", "invoices", "receipts"):
            hub.create_topic(name, partitions=2)
            with hub.producer(name) as producer:
                for _ in range(10):
                    producer.send(b"x")
        deleted = {hub.log.topic(name).id for name in ("orders", "invoices", "receipts")}
        cluster.stop_node(2)  # it misses all that follows
        hub.delete_topic("orders")
        # The broker that deletes the other topic dies after the first commit.
        entry = registry.get(records.topic_key("invoices"))
        assert entry is not None
        topic = TopicRecord.parse(entry.key, entry.value).topic
        gone = DeletedTopic(topic.name, topic.partitions, time.time())
        registry.commit(put={records.deleted_key(topic.id): gone.dump()}, delete=[entry.key])
        assert "invoices" in {each.name for each in status(cluster).deletions}
        cluster.brokers[1].hub.log.finish_deletions()  # as upkeep does it, at whichever broker
        # Of the third one the owners see nothing but that all its keys are gone.
        topic_id = hub.log.topic("receipts").id
        keys = [entry.key for prefix in (records.OWNERS, records.LEDGERS) for entry in registry.scan(prefix)]
        registry.commit(delete=[records.topic_key("receipts"), *(key for key in keys if topic_id in key)])
        for prefix in (records.DELETED, records.OWNERS, records.LEDGERS):
            eventually(lambda prefix=prefix: not [e for e in registry.scan(prefix) if _is_of(e.key, deleted)])
        eventually(lambda: loads(cluster) == [0, 0], what=lambda: loads(cluster))
        owned = [broker.ownership for broker in cluster.brokers]  # whoever owns partitions of a topic that is gone
        eventually(lambda: not {place[0] for each in owned for place in each.partitions()} & deleted)
        cluster.start_node(2)
        assert stored(cluster.nodes[2].node) & deleted == deleted, "there is nothing to remove"
        broker = cluster.brokers[0].broker
        for node in broker.view.refresh().alive:
            broker.links(node).collect(30.0)
        assert [stored(each.node) & deleted for each in cluster.nodes] == [set(), set(), set()]


def _is_of(key: str, topics: set[str]) -> bool:
    return any(topic in key for topic in topics)
