"""P6, K5: rows that Spark's tasks have staged in a cluster keep their copies until they are published."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("grpc")

import pxrs
from pxrs.cluster import staged
from pxrs.cluster.broker.context import BrokerSettings
from pxrs.cluster.broker.repairing import Repairer
from pxrs.cluster.broker.staged_copies import StagedLedgers, StagedOwner
from pxrs.cluster.broker.staging import ClusterStaging
from pxrs.cluster.copies import Ended, Repaired
from pxrs.cluster.ledgers import LedgerRecord
from pxrs.cluster.status import AWAY, ClusterStatus, LedgerStatus, read_status
from pxrs.errors import NodeUnreachable
from pxrs.log.batch import encode
from pxrs.metrics.instruments import Distribution, snapshot
from pxrs.publishing.staging.frames import Piece
from pxrs.testing.clusters import SmallCluster, small_cluster
from pxrs.testing.log_fixtures import records as rows_of
from pxrs.testing.staging_contract import TOPIC, rows
from pxrs.testing.waiting import eventually

QUICK = BrokerSettings(copies_grace_s=0.2, recent_bytes=0)
"""Nothing is kept in memory: readers get everything from storage nodes."""
FILES = 6


def status(cluster: SmallCluster) -> ClusterStatus:
    return read_status(cluster.brokers[0].broker.registry)


def staged_ledgers(found: ClusterStatus) -> list[LedgerStatus]:
    return [ledger for ledger in found.ledgers if ledger.query is not None]


def nodes_of(ledger: LedgerStatus) -> set[str | None]:
    return {node for _, nodes in ledger.fragments for node in nodes}


def place_of(cluster: SmallCluster) -> ClusterStaging:
    found = cluster.brokers[0].hub.log.staging  # type: ignore[attr-defined]
    assert isinstance(found, ClusterStaging)
    return found


def let_the_first_repair_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = Repairer.run, itertools.count()

    def run_or_fail(self: Repairer) -> Repaired | Ended:
        if next(calls) == 0:
            raise NodeUnreachable("any", "the first repair fails")
        return run(self)

    monkeypatch.setattr(Repairer, "run", run_or_fail)


def counted(name: str, *labels: str) -> float:
    return sum(
        float(each)
        for found, each in snapshot().get(name, [])
        if found == labels and not isinstance(each, Distribution)
    )


@pytest.mark.parametrize("rule", ["one broker", "both at once"])
def test_p6_staged_rows_get_the_copies_of_a_lost_node_back_and_are_published_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """Both at once: as if each broker saw itself alone. The commits on the ledger's record decide."""
    if rule == "both at once":
        monkeypatch.setattr("pxrs.cluster.broker.staged_copies.StagedLedgers.is_mine", lambda self, ledger: True)
    else:
        let_the_first_repair_fail(monkeypatch)
    failed, began = counted("pxrs.broker.repairs", "failed"), time.time()
    with small_cluster(tmp_path, nodes=4, settings=QUICK) as cluster:
        cluster.brokers[0].hub.log.create_topic(TOPIC)
        place = place_of(cluster)
        names = [
            place.stage(TOPIC, "q", 3, task, [rows(b"%d" % task, b"x", partition=0)]).name for task in range(FILES)
        ]
        unfinished = place.create(TOPIC, "q", 3, FILES)
        unfinished.add(Piece(0, encode(rows_of([b"never"]))))
        before = staged_ledgers(status(cluster))
        assert len(before) == FILES + 1
        used = Counter(node for each in before if each.state == "closed" for node in nodes_of(each))
        first, second = sorted(range(4), key=lambda number: -used[cluster.nodes[number].node.id])[:2]
        gone = cluster.nodes[first].node.id
        wanted = {each.id for each in before if gone in nodes_of(each) and each.state == "closed"}
        assert wanted
        cluster.stop_node(first)
        found = status(cluster)
        assert {each.ledger for each in found.shortages if each.why == AWAY} >= wanted
        assert unfinished.name.ledger().id not in {each.ledger for each in found.shortages}, "it may be garbage"

        def repaired() -> list[LedgerStatus] | None:
            closed = [each for each in staged_ledgers(status(cluster)) if each.state == "closed"]
            return None if any(each.shortages or gone in nodes_of(each) for each in closed) else closed

        links = cluster.brokers[0].broker.links
        for ledger in eventually(repaired, what=lambda: status(cluster).to_json()):
            for node in filter(None, nodes_of(ledger)):
                assert [entry for entry, _ in links(node).index(ledger.id).entries] == [0, 1], "about, and one piece"
        counts = [broker.repairs.counts for broker in cluster.brokers]
        assert sum(each.copied_entries for each in counts) >= 2 * len(wanted)
        if rule == "one broker":
            assert counted("pxrs.broker.repairs", "failed") > failed
            assert max(each.failed_at for each in counts) >= began
            assert counted("pxrs.broker.repair_failed") >= began
        cluster.stop_node(second)
        with pxrs.open(cluster.url) as hub:
            topic = hub.topic(TOPIC.name).log
            files = [name for name in names if name is not None]
            for _ in range(2):  # as after a lost reply
                place.publish(topic, "q", 3, files, [0] * TOPIC.partitions)
            values: list[bytes] = []
            for batch in topic.read(0, 0):
                values += batch.records.column("value").to_pylist()
            assert values == [value for task in range(FILES) for value in (b"%d" % task, b"x")]
            told = eventually(lambda: [each for each in hub.events() if each.name == "staged.repaired"])
            assert {each.fields["ledger"] for each in told} & wanted
        assert (told[0].fields["topic"], told[0].fields["query"], told[0].fields["batch"]) == (TOPIC.name, "q", 3)
        place.clear(TOPIC.id, "q", 3)
        assert cluster.brokers[0].broker.registry.scan(staged.STAGED) == []
        if rule == "one broker":
            check_that_a_removed_file_stays_removed(cluster, place)
            check_that_one_broker_finds_a_file_beside_a_damaged_record(cluster, place)


def check_that_a_removed_file_stays_removed(cluster: SmallCluster, place: ClusterStaging) -> None:
    """K5: a file is published and removed while a broker begins to repair its ledger."""
    broker = cluster.brokers[0].broker
    name = place.stage(TOPIC, "q", 4, 0, [rows(b"v")]).name
    assert name is not None
    key = staged.StagedName(TOPIC.id, "q", 4, name).ledger().key
    entry = broker.registry.get(key)
    assert entry is not None
    record = LedgerRecord.parse(entry.key, entry.value)
    (file,) = [staged.StagedName.of_key(each.key) for each in broker.registry.scan(staged.STAGED)]
    owner = StagedOwner(StagedLedgers(broker), file, broker.view.seen.topics[TOPIC.name][0])
    unchecked = replace(record, is_complete=False)
    repairer = Repairer(broker, owner, unchecked, entry.version, record.named, [])
    place.clear(TOPIC.id, "q", 4)
    assert isinstance(repairer.run(), Ended)
    assert broker.registry.get(key) is None


def check_that_one_broker_finds_a_file_beside_a_damaged_record(cluster: SmallCluster, place: ClusterStaging) -> None:
    name = place.stage(TOPIC, "q", 5, 0, [rows(b"v")]).name
    assert name is not None
    registry = cluster.brokers[0].broker.registry
    registry.commit(put={staged.StagedName(TOPIC.id, "q", 5, "00000-damaged").key: b"[]"})
    found = []
    for each in cluster.brokers:
        ledgers = StagedLedgers(each.broker)
        assert ledgers.look(0.0) == [], "a file that is seen for the first time may be gone soon"
        found += [record.id for _, record in ledgers.look(10.0)]
    assert found == [staged.StagedName(TOPIC.id, "q", 5, name).ledger().id]
