"""Spark over a cluster: tasks read from the owners of partitions, and the sink publishes each row once (K1, K5, P5).

The brokers and storage nodes run in this process, and Spark's workers connect to them over loopback.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")
pytest.importorskip("grpc")

import pxrs
from pxrs.cluster import staged
from pxrs.publishing.planning import Range
from pxrs.server.auth import tokens
from pxrs.server.serving import ServerSettings
from pxrs.spark import place as places
from pxrs.spark.place import HubPlace
from pxrs.spark.tasks import Slice, read_slice
from pxrs.testing.clusters import SmallCluster, small_cluster
from pxrs.testing.waiting import eventually

ROWS = 300


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SmallCluster]:
    with small_cluster(tmp_path / "cluster", lease_ttl=5.0) as cluster:
        yield cluster
        places.let_go()


def send(hub: pxrs.Hub, topic: str, numbers: range) -> None:
    with hub.producer(topic) as out:
        out.send_batch(
            pa.table(
                {
                    "key": [b"k%d" % (number % 7) for number in numbers],
                    "value": [b"%d" % number for number in numbers],
                    "partition": [number % 4 for number in numbers],
                }
            )
        )


def values(hub: pxrs.Hub, topic: str) -> Counter[int]:
    log = hub.topic(topic).log
    return Counter(
        int(value)
        for partition in range(log.partitions)
        for batch in log.batches(partition, 0, log.bounds((partition,))[partition].end)
        for value in batch.records.column("value").to_pylist()
    )


def test_k1_topic_to_topic_is_exact_while_brokers_leave_and_join(
    spark: Any, cluster: SmallCluster, tmp_path: Path
) -> None:
    url = cluster.url
    with pxrs.open(url) as hub:
        hub.create_topic("orders", partitions=4)
        hub.create_topic("out", partitions=3)
        send(hub, "orders", range(ROWS))
        source = {"url": url, "topic": "orders", "group": "g", "maxRowsPerTrigger": "100", "leaseTtl": "5"}
        rows = spark.readStream.format("pxrs").options(**source).load().selectExpr("key", "value")
        sink = rows.writeStream.format("pxrs").options(url=url, topic="out", checkpointLocation=str(tmp_path / "c"))
        query = sink.trigger(processingTime="0 seconds").start()
        try:
            eventually(lambda: sum(values(hub, "out").values()) >= 100, 120)
            cluster.stop_broker(0)  # the first of the address, to which the driver and the tasks are connected
            send(hub, "orders", range(ROWS, 2 * ROWS))
            query.processAllAvailable()
        finally:
            query.stop()
        assert values(hub, "out") == Counter(range(2 * ROWS))
        ends = hub.topic("orders").log.bounds(range(4))
        assert {each.partition: each.checkpoint for each in hub.group("g").describe().partitions} == {
            number: bounds.end for number, bounds in ends.items()
        }
    registry = cluster.brokers[1].broker.registry
    left = [staged.StagedName.of_key(entry.key).batch for entry in registry.scan(staged.STAGED)]
    assert left == [], "what is published is removed"


def slices(url: str, topic: str) -> list[Slice]:
    with pxrs.open(url) as hub:
        found = hub.topic(topic)
        ends = found.log.bounds(range(found.log.partitions))
    place = HubPlace.to_read(url, [found.id])
    return [
        Slice(place, topic, found.id, (Range(number, 0, bounds.end),), ("value",), True)
        for number, bounds in ends.items()
    ]


def read(part: Slice) -> list[int]:
    return [int(value) for batch in read_slice(part) for value in batch.column("value").to_pylist()]


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SmallCluster, str]]:
    """A cluster with a tokens file, and the driver's address of it."""
    monkeypatch.delenv("PXRS_TOKEN", raising=False)
    path = str(tmp_path / "tokens.json")
    _, secret = tokens.create(path, "driver", ("hub=admin",), now=0.0)
    assert secret is not None
    (tmp_path / "token").write_text(secret)
    with small_cluster(tmp_path / "cluster", server=ServerSettings(auth=path), token=secret) as cluster:
        yield cluster, f"{cluster.url}?token_file={tmp_path / 'token'}"
        places.let_go()


def test_k5_tasks_with_a_token_of_their_own_read_from_owners_and_follow_partitions(
    guarded: tuple[SmallCluster, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, url = guarded
    with pxrs.open(url) as hub:
        hub.create_topic("orders", partitions=4)
        send(hub, "orders", range(ROWS))
    owners = cluster.brokers[0].hub.topic("orders").log.owners()
    assert set(owners.values()) == set(cluster.addresses), "each broker owns some of them"
    asked: list[tuple[int, str]] = []
    connected_for = HubPlace.connected_for

    @contextlib.contextmanager
    def noted(self: HubPlace, connection: Any, topic: str, topic_id: str, partition: int) -> Iterator[Any]:
        with connected_for(self, connection, topic, topic_id, partition) as nearest:
            asked.append((partition, nearest.settings.targets[0]))
            yield nearest

    monkeypatch.setattr(HubPlace, "connected_for", noted)
    parts = slices(url, "orders")
    assert sorted(value for part in parts for value in read(part)) == list(range(ROWS))
    assert dict(asked) == owners
    part = next(each for each in parts if owners[each.ranges[0].partition] == cluster.addresses[0])
    wanted = [number for number in range(ROWS) if number % 4 == part.ranges[0].partition]
    cluster.stop_broker(0)
    assert read(part) == wanted
    assert asked[-1] == (part.ranges[0].partition, cluster.addresses[1])
    # The owner ends when the task has just asked for it: another broker passes on what the next owner has.
    monkeypatch.setattr(places, "_owner", lambda *_: cluster.addresses[0])
    places.let_go()
    assert read(part) == wanted
    assert asked[-1] == (part.ranges[0].partition, cluster.addresses[0])
