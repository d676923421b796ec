"""V2: what brokers count and tell: partitions, entries, replaced nodes, recoveries, repairs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("grpc")

import pxrs
from pxrs.cluster.broker.context import BrokerSettings
from pxrs.cluster.ledgers import LedgerRecord
from pxrs.cluster.records import ledgers_prefix
from pxrs.cluster.status import read_status
from pxrs.metrics.instruments import Distribution, Snapshot, snapshot
from pxrs.testing.clusters import SmallCluster, small_cluster
from pxrs.testing.waiting import eventually

QUICK = BrokerSettings(copies_grace_s=0.2)


def value(name: str, *labels: str) -> float:
    return value_in(snapshot(), name, *labels)


def value_in(moment: Snapshot, name: str, *labels: str) -> float:
    for found, each in moment.get(name, []):
        if found == labels:
            return float(sum(each.counts)) if isinstance(each, Distribution) else float(each)
    return 0.0


def open_ledger(cluster: SmallCluster) -> LedgerRecord:
    """The last ledger of the partition of `orders`."""
    registry = cluster.brokers[0].broker.registry
    (topic,) = [each for each in read_status(registry).topics if each.name == "orders"]
    entry = registry.scan(ledgers_prefix(topic.id, 0))[-1]
    return LedgerRecord.parse(entry.key, entry.value)


def test_v2_a_broker_counts_its_entries_and_tells_of_a_node_that_fails(tmp_path: Path) -> None:
    before = {name: value(name) for name in ("pxrs.broker.confirmed", "pxrs.broker.confirm", "pxrs.broker.replaced")}
    repaired = value("pxrs.broker.repairs", "repaired")
    copied = value("pxrs.broker.copied_entries"), value("pxrs.broker.copied")

    def was_timed_once() -> bool:
        """Of one moment: the broker stores its events in `_events` meanwhile, which are entries too."""
        moment = snapshot()
        timed, confirmed = (value_in(moment, name) - before[name] for name in before if "confirm" in name)
        return timed == confirmed

    with small_cluster(tmp_path, nodes=4, brokers=1, settings=QUICK) as cluster, pxrs.open(cluster.url) as hub:
        hub.create_topic("orders", partitions=1)
        with hub.producer("orders") as producer:
            for number in range(5):
                producer.send(b"%d" % number).result(60)
            assert value("pxrs.broker.partitions", "serving") >= 1
            assert value("pxrs.broker.confirmed") >= before["pxrs.broker.confirmed"] + 6, "with the producers' state"
            eventually(was_timed_once, what="each confirmed entry was timed once")
            nodes = open_ledger(cluster).named
            named = next(number for number, each in enumerate(cluster.nodes) if each.node.id in nodes)
            gone = cluster.nodes[named].node.id
            cluster.stop_node(named)
            producer.send(b"without it").result(60)
        eventually(lambda: value("pxrs.broker.replaced") > before["pxrs.broker.replaced"])
        eventually(lambda: value("pxrs.broker.repairs", "repaired") > repaired)
        eventually(lambda: value("pxrs.broker.copied_entries") >= copied[0] + 6)
        assert value("pxrs.broker.copied") > copied[1]
        eventually(lambda: value("pxrs.broker.lacking", "partition") == value("pxrs.broker.repairing") == 0)

        def told(name: str) -> list[dict[str, object]]:
            return [dict(event.fields) for event in hub.events() if event.name == name]

        replaced = eventually(lambda: [each for each in told("node.replaced") if each["topic"] == "orders"])
        assert replaced[0]["node"] == gone
        opened = [each for each in eventually(lambda: told("partition.opened")) if each["topic"] == "orders"]
        assert [(each["partition"], each["recovered"]) for each in opened] == [(0, False)]
        assert told("broker.joined")[0]["address"] == cluster.url.removeprefix("pxrs://").split("?")[0]
