"""P6 in clusters within one process: copies that were lost are made anew, by the owner of the partition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("grpc")

import pxrs
from pxrs.cluster import deciding
from pxrs.cluster.broker.context import BrokerSettings
from pxrs.cluster.status import AWAY, NO_NODE, ClusterStatus, LedgerStatus, read_status
from pxrs.errors import InvalidArgument
from pxrs.testing.clusters import SmallCluster, small_cluster
from pxrs.testing.waiting import eventually

QUICK = BrokerSettings(copies_grace_s=0.2, recent_bytes=0)
"""Nothing is kept in memory: readers get everything from storage nodes."""


def status(cluster: SmallCluster) -> ClusterStatus:
    return read_status(cluster.brokers[0].broker.registry)


def wait_for(cluster: SmallCluster, is_reached: Callable[[ClusterStatus], bool]) -> ClusterStatus:
    def look() -> ClusterStatus | None:
        found = status(cluster)
        return found if is_reached(found) else None

    return eventually(look, what=lambda: status(cluster).to_json())


def send(hub: pxrs.Hub, count: int, first: int = 0) -> None:
    with hub.producer("orders") as producer:
        for number in range(first, first + count):
            producer.send(b"%d" % number)
            producer.flush()  # an entry for each


def received(hub: pxrs.Hub) -> list[bytes]:
    topic = hub.log.topic("orders")
    found: list[bytes] = []
    while len(found) < topic.bounds([0])[0].end:
        for batch in topic.read(0, len(found)):
            found += batch.records.column("value").to_pylist()
    return found


def number_of(cluster: SmallCluster, node: str) -> int:
    return next(number for number, each in enumerate(cluster.nodes) if each.node.id == node)


def of_orders(found: ClusterStatus) -> set[str | None]:
    """The nodes that have anything of the topic."""
    return {node for ledger in ledgers_of_orders(found) for _, nodes in ledger.fragments for node in nodes}


def ledgers_of_orders(found: ClusterStatus) -> list[LedgerStatus]:
    (topic,) = [each for each in found.topics if each.name == "orders"]
    return [ledger for ledger in found.ledgers if ledger.topic_id == topic.id]


def test_p6_the_copies_of_a_lost_node_are_made_anew_and_told(tmp_path: Path) -> None:
    with small_cluster(tmp_path, nodes=4, brokers=1, settings=QUICK) as cluster, pxrs.open(cluster.url) as hub:
        hub.create_topic("orders", partitions=1)
        send(hub, 12)
        first, second = sorted(filter(None, of_orders(status(cluster))))[:2]
        cluster.stop_node(number_of(cluster, first))
        assert any(shortage.why == AWAY for shortage in status(cluster).shortages)
        # Nobody appends: the broker itself ends the ledger that has lost copies.
        wait_for(cluster, lambda found: first not in of_orders(found) and not found.under_replicated)
        broker, (closed, _) = cluster.brokers[0].broker, ledgers_of_orders(status(cluster))
        for _, nodes in closed.fragments:
            for node in filter(None, nodes):
                assert [entry for entry, _ in broker.links(node).index(closed.id).entries] == list(range(13))
        cluster.stop_node(number_of(cluster, second))
        expected = [b"%d" % number for number in range(12)]
        assert received(hub) == expected, "the copies are not where the records say"
        send(hub, 1, 12)

        def told() -> list[dict[str, object]] | None:
            found = [dict(event.fields) for event in hub.events() if event.name == "ledger.repaired"]
            return [event for event in found if event["topic"] == "orders"]

        (event, *_) = eventually(told)
        assert event["entries"] == 13  # with the state of the producers
        assert (
            eventually(lambda: [each for each in hub.events() if each.name == "node.lost"])[0].fields["node"] == first
        )
        assert cluster.brokers[0].repairs.counts.copied_entries >= 13


def test_p6_without_a_spare_it_is_degraded_until_a_node_comes(tmp_path: Path) -> None:
    with small_cluster(tmp_path, nodes=3, brokers=1, settings=QUICK) as cluster, pxrs.open(cluster.url) as hub:
        hub.create_topic("orders", partitions=1)
        send(hub, 5)
        cluster.stop_node(2)
        send(hub, 5, 5)
        found = wait_for(cluster, lambda found: any(shortage.why == NO_NODE for shortage in found.shortages))
        assert not found.is_whole
        assert received(hub) == [b"%d" % number for number in range(10)]
        cluster.start_node(3)
        wait_for(cluster, lambda found: found.is_whole)
        assert cluster.nodes[3].node.id in of_orders(status(cluster))
        cluster.stop_node(0)
        assert received(hub) == [b"%d" % number for number in range(10)]


def test_a_retired_node_serves_until_its_copies_are_moved_and_is_then_forgotten(tmp_path: Path) -> None:
    with small_cluster(tmp_path, nodes=4, brokers=1, settings=QUICK) as cluster, pxrs.open(cluster.url) as hub:
        registry = cluster.brokers[0].broker.registry
        hub.create_topic("orders", partitions=2)
        send(hub, 20)
        node = sorted(filter(None, of_orders(status(cluster))))[0]
        with pytest.raises(InvalidArgument, match="there is no storage node"):
            deciding.retire(registry, "nobody")
        deciding.retire(registry, node, "ann")
        with pytest.raises(InvalidArgument, match="is alive"):
            deciding.forget(registry, node)
        cluster.brokers[0].broker.view.refresh()
        found = wait_for(
            cluster, lambda found: found.is_whole and not next(e for e in found.nodes if e.id == node).named
        )
        assert [each.id for each in found.nodes if each.is_retired and each.is_alive] == [node]
        number = number_of(cluster, node)
        cluster.stop_node(number)
        assert cluster.start_node(number).node.id == node, "a retired node stays itself until it is forgotten"
        cluster.stop_node(number)
        deciding.forget(registry, node, "ann")
        assert node not in {each.id for each in status(cluster).nodes}
        assert cluster.start_node(number).node.id != node

        def audited() -> bool:
            names = [event.name for event in hub.audit() if event.fields["who"] == "ann"]
            return names == ["audit.retire_node", "audit.forget_node"]

        eventually(audited)
        eventually(lambda: not registry.scan("cluster/decisions/"))


def test_c6_a_partition_goes_on_without_nodes_that_never_return_if_an_operator_decides_so(tmp_path: Path) -> None:
    settings = BrokerSettings(copies_grace_s=0.2, recent_bytes=0)
    with small_cluster(tmp_path, nodes=3, brokers=1, settings=settings) as cluster, pxrs.open(cluster.url) as hub:
        broker = cluster.brokers[0].broker
        hub.create_topic("orders", partitions=1)
        send(hub, 5)
        topic_id = hub.log.topic("orders").id
        eventually(lambda: len(broker.links(cluster.nodes[0].node.id).index(f"{topic_id}/0/0").entries) == 6)
        lost = [cluster.nodes[1].node.id, cluster.nodes[2].node.id]
        with pytest.raises(InvalidArgument, match="is alive"):
            deciding.losses(broker.registry, lost)
        cluster.stop_node(1)
        cluster.stop_node(2)
        (partition,) = [
            each for place, each in cluster.brokers[0].ownership.partitions().items() if place[0] == topic_id
        ]
        partition.get_stuck("an append was not acknowledged")  # as by an append that has no quorum
        cluster.start_node(3)
        (loss,) = [each for each in deciding.losses(broker.registry, lost) if each.topic == "orders"]
        assert (loss.ledger, loss.nodes, loss.first, loss.end) == (f"{topic_id}/0/0", tuple(sorted(lost)), 0, None)
        (alone,) = [each for each in deciding.losses(broker.registry, lost[:1]) if each.topic == "orders"]
        assert alone.waits_for == (lost[1],), "if one is abandoned, the recovery hears all the others"
        with pytest.raises(InvalidArgument, match="do not need the decision"):
            deciding.abandon(broker.registry, lost, ["nothing/0/0"])
        eventually(lambda: status(cluster).partitions[-1].ledgers == {"recovering": 1})
        assert partition.is_stuck
        assert len(deciding.abandon(broker.registry, lost, who="ann")) >= 1
        eventually(lambda: not partition.is_stuck)
        send(hub, 1, 5)
        assert received(hub) == [b"%d" % number for number in range(6)]
        wait_for(cluster, lambda found: not found.abandoned)
        (ledger,) = [each for each in status(cluster).ledgers if each.id == loss.ledger]
        assert ledger.abandoned == tuple(sorted(lost))
        event = eventually(lambda: [each for each in hub.audit() if each.name == "audit.abandon_nodes"])[0]
        assert event.fields["who"] == "ann"
        assert loss.ledger in event.fields["ledgers"]
        # A node that comes back after all changes nothing.
        cluster.start_node(1)
        wait_for(cluster, lambda found: found.is_whole)
        assert received(hub) == [b"%d" % number for number in range(6)]
