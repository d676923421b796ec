"""The staging contract over a cluster, and what only several brokers and storage nodes can do wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")

import pxrs
from pxrs.cluster import records
from pxrs.cluster.ledgers import LedgerRecord
from pxrs.cluster.staged import FEEDS, KEPT, STAGED, StagedName
from pxrs.errors import BatchRefused, NotPermitted, OutcomeUnknown, TopicDeleted
from pxrs.log.batch import encode
from pxrs.model import Topic
from pxrs.publishing.staging.contract import Staging
from pxrs.publishing.staging.frames import Piece
from pxrs.publishing.staging.places import staging_of
from pxrs.publishing.staging.served import ServedStaging
from pxrs.registry.contract import Registry
from pxrs.remote.client.transfers import connected
from pxrs.testing.clusters import SmallCluster, small_cluster
from pxrs.testing.log_fixtures import records as rows_of
from pxrs.testing.staging_contract import DAY_S, OTHER, TOPIC, StagingContract, feed, rows, staged

from .test_remote import FEW_THREADS


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallCluster]:
    """Two brokers and three storage nodes, with the topics of the contract."""
    with small_cluster(Path(tmp_path_factory.mktemp("cluster")), server=FEW_THREADS) as cluster:
        for topic in (TOPIC, replace(TOPIC, name="returns", id=OTHER)):
            cluster.brokers[0].hub.log.create_topic(topic)
        with connected(cluster.url, None):  # the connection stays open for all tests
            yield cluster


@pytest.fixture
def registry(cluster: SmallCluster) -> Iterator[Registry]:
    """The cluster's registry. Nothing is staged afterwards."""
    found = cluster.brokers[0].broker.registry
    yield found
    staging = staging_of(cluster.brokers[0].hub.log)
    assert staging is not None
    for topic in staging.topics():
        staging.forget_topic(topic)
    for entry in found.scan(FEEDS):
        found.commit(delete=[entry.key])


@pytest.fixture
def places(cluster: SmallCluster, registry: Registry) -> tuple[ServedStaging, ServedStaging]:
    """The staging place as the clients of either broker see it."""
    one, other = (ServedStaging(f"pxrs://{address}") for address in cluster.addresses)
    return one, other


def make_older(registry: Registry, seconds: float) -> None:
    for prefix, field in ((STAGED, "begun_at"), (FEEDS, "at"), (KEPT, "at")):
        for entry in registry.scan(prefix):
            found = json.loads(entry.value)
            found[field] -= seconds
            registry.commit(put={entry.key: json.dumps(found).encode()})


def ledgers(registry: Registry) -> list[str]:
    """The keys of the ledgers of staged files."""
    return [entry.key for entry in registry.scan(records.LEDGERS) if "staged-" in entry.key]


class TestCluster(StagingContract):
    @pytest.fixture
    def staging(self, cluster: SmallCluster, registry: Registry) -> Staging:
        self.registry = registry
        return ServedStaging(cluster.url)

    def make_older(self, staging: Staging, seconds: float) -> None:
        make_older(self.registry, seconds)


def test_k1_what_one_broker_staged_another_one_publishes_once_and_clears(
    cluster: SmallCluster, registry: Registry, places: tuple[ServedStaging, ServedStaging]
) -> None:
    one, other = places
    name = one.stage(TOPIC, "q", 3, 0, [rows(b"a", b"b", partition=2), rows(b"c", partition=1)]).name
    assert name is not None
    assert other.make_durable(TOPIC.id, "q", 3, [name])
    with pxrs.open(cluster.url) as hub:
        topic = hub.topic(TOPIC.name).log
        for place in (other, one, other):  # as by other drivers, or after a lost reply
            place.publish(topic, "q", 3, [name], [0, 0, 0])
        with pytest.raises(FileNotFoundError):
            other.publish(topic, "q", 3, ["missing"], [])
        found = {number: topic.read(number, 0) for number in range(3)}
    assert {
        number: [batch.records.column("value").to_pylist() for batch in each] for number, each in found.items()
    } == {
        0: [],
        1: [[b"c"]],
        2: [[b"a", b"b"]],
    }
    assert len(ledgers(registry)) == 1
    other.clear(TOPIC.id, "q", 3)
    assert ledgers(registry) == [], "storage nodes collect a ledger that has no record"
    assert not one.make_durable(TOPIC.id, "q", 3, [name])


def test_p4_staged_rows_are_on_as_many_nodes_as_the_topic_says_and_go_with_their_record(
    cluster: SmallCluster,
    registry: Registry,
    places: tuple[ServedStaging, ServedStaging],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pxrs.cluster.broker.staged_files.SPREAD_S", 20.0)  # this machine may be busy
    one, _ = places
    name = one.stage(TOPIC, "q", 0, 0, [rows(b"v")]).name
    assert name is not None
    ledger = StagedName(TOPIC.id, "q", 0, name).ledger().id

    def keepers() -> int:
        return sum(ledger in dict(server.node.ledgers()) for server in cluster.nodes)

    entry = registry.get(StagedName(TOPIC.id, "q", 0, name).ledger().key)
    assert entry is not None
    assert LedgerRecord.parse(entry.key, entry.value).is_complete, (
        "all nodes have answered before the ledger was closed"
    )
    assert keepers() == 3
    one.clear(TOPIC.id, "q", 0)
    for server in cluster.nodes:
        cluster.brokers[0].broker.links(server.node.id).collect()
    assert keepers() == 0


def test_k5_a_file_whose_broker_died_counts_for_nothing_and_is_swept_after_a_day(
    cluster: SmallCluster, registry: Registry, places: tuple[ServedStaging, ServedStaging]
) -> None:
    one, _ = places
    staging = cluster.brokers[1].hub.log.staging  # type: ignore[attr-defined]
    file = staging.create(TOPIC, "q", 0, 0)
    file.add(Piece(0, encode(rows_of([b"v"]))))
    name = file.name.file  # never finished
    assert not one.make_durable(TOPIC.id, "q", 0, [name])
    with pytest.raises(FileNotFoundError):
        staged(one, "q", 0, name)
    one.sweep(TOPIC.id, {})
    assert len(ledgers(registry)) == 1
    make_older(registry, 1.1 * DAY_S)
    one.sweep(TOPIC.id, {})
    assert ledgers(registry) == []
    assert file.finish().name == name, "as if another driver had published the batch and removed its files"
    assert not one.make_durable(TOPIC.id, "q", 0, [name])


def test_k5_a_file_is_finished_although_another_broker_has_changed_its_ledger_before_the_reply_came(
    cluster: SmallCluster, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = cluster.brokers[0].hub.log.staging  # type: ignore[attr-defined]
    file = staging.create(TOPIC, "q", 0, 0)
    file.add(Piece(0, encode(rows_of([b"v"]))))
    key = file.name.ledger().key
    commit = registry.commit

    def lost(expect: Mapping[str, int] = {}, put: Mapping[str, bytes] = {}, **rest: Any) -> Mapping[str, int]:
        """The reply to the commit that closes the ledger is lost. Until it is made again, a repair has ended."""
        versions = commit(expect, put, **rest)
        if key not in put or not LedgerRecord.parse(key, put[key]).is_closed:
            return versions
        monkeypatch.undo()
        changed = replace(LedgerRecord.parse(key, put[key]), recovery=7)
        commit({key: versions[key]}, {key: changed.dump()})
        raise OutcomeUnknown("the reply was lost")

    monkeypatch.setattr(registry, "commit", lost)
    assert file.finish().rows == 1
    assert staging.make_durable(TOPIC.id, "q", 0, [file.name.file])


def test_a_large_file_goes_through_bounded_memory_and_comes_back_in_order(
    cluster: SmallCluster, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pxrs.cluster.broker.staged_files.PENDING_BYTES_MAX", 1000)
    staging = cluster.brokers[0].hub.log.staging  # type: ignore[attr-defined]
    file = staging.create(TOPIC, "q", 0, 0)
    values = [bytes([number]) * 400 for number in range(40)]
    for value in values:
        file.add(Piece(1, encode(rows_of([value]))))
        assert file.pending_bytes < 3000
    name = file.finish().name
    assert [value for _, found in staged(staging, "q", 0, name) for value in found] == values


def test_an_entry_that_is_no_piece_is_refused(
    cluster: SmallCluster, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pxrs.cluster.broker.staged_files.piece_head", lambda piece: b"X" * 64)
    staging = cluster.brokers[0].hub.log.staging  # type: ignore[attr-defined]
    name = staging.stage(TOPIC, "q", 0, 0, [rows(b"v")]).name
    with pytest.raises(BatchRefused, match="not a piece of a staged file"):
        staged(staging, "q", 0, name)


def test_g7_nothing_is_staged_for_another_topic_of_the_same_name(
    cluster: SmallCluster, registry: Registry, places: tuple[ServedStaging, ServedStaging]
) -> None:
    for place in (places[0], cluster.brokers[0].hub.log.staging):  # type: ignore[attr-defined]
        with pytest.raises(TopicDeleted):
            place.stage(Topic(TOPIC.name, "f" * 32, 3), "q", 0, 0, [rows(b"v")])
    assert ledgers(registry) == []


def test_c6_clients_cannot_touch_the_keys_of_staged_files(cluster: SmallCluster) -> None:
    with pxrs.open(cluster.url) as hub, pytest.raises(NotPermitted):
        hub.registry.commit(put={StagedName(TOPIC.id, "q", 0, "f").key: b"{}"})


def test_p7_what_was_staged_for_a_topic_goes_when_the_topic_is_deleted(
    cluster: SmallCluster, registry: Registry, places: tuple[ServedStaging, ServedStaging]
) -> None:
    with pxrs.open(cluster.url) as hub:
        topic = hub.create_topic("short-lived", partitions=1).log.topic
        places[1].stage(topic, "q", 0, 0, [rows(b"v")])
        places[1].announce("q", 0, "run", feed())
        assert len(ledgers(registry)) == 1
        hub.delete_topic("short-lived")
    assert ledgers(registry) == []
    assert places[0].topics() == []


def test_k1_a_round_of_a_brokers_upkeep_sweeps(cluster: SmallCluster, registry: Registry) -> None:
    staging = cluster.brokers[0].hub.log.staging  # type: ignore[attr-defined]
    staging.stage(TOPIC, "q", 0, 0, [rows(b"v")])
    cluster.brokers[0].hub.run_upkeep()
    assert len(ledgers(registry)) == 1
    make_older(registry, 2 * DAY_S)
    cluster.brokers[0].hub.run_upkeep()
    assert ledgers(registry) == []
