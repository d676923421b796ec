"""Groups, the work queue and copies over a cluster, while brokers leave and join (P5, G1, W2, Q1).

The clients are those of any hub behind a server. They have leases in the registry, which they renew through whichever
broker they are connected to: a broker that leaves takes none of them along.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

pytest.importorskip("grpc")

import pxrs
from pxrs.errors import Closed
from pxrs.hub import Hub
from pxrs.testing.clusters import SmallCluster, small_cluster
from pxrs.testing.waiting import eventually
from pxrs.waiting import start_thread

PARTITIONS, ROWS = 4, 600


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SmallCluster]:
    with small_cluster(tmp_path / "cluster", lease_ttl=5.0) as cluster:
        yield cluster


def send(hub: Hub, topic: str, numbers: range) -> None:
    with hub.producer(topic) as out:
        for first in numbers[::10]:
            some = range(first, first + 10)
            out.send_batch(
                pa.table({"value": [b"%d" % number for number in some], "partition": [n % PARTITIONS for n in some]})
            )


class Member:
    """A member of the group `g`, on a thread of its own, which notes what it was given."""

    def __init__(self, url: str) -> None:
        self.hub = pxrs.open(url, lease_ttl=10.0)
        self.inbox = self.hub.consumer("orders", "g", lease_ttl=10.0)
        self.handled: list[tuple[int, int, int]] = []
        """Of each message: the partition, the offset, the number that it holds."""
        self._thread = start_thread(self._run, "member")

    def _run(self) -> None:
        with suppress(Closed):
            for message in self.inbox:
                self.handled.append((message.partition, message.offset, int(message.value or b"")))

    def close(self) -> None:
        self.inbox.close()
        self._thread.join(20)
        self.hub.close()


def test_g1_a_group_reads_each_message_once_while_a_broker_leaves_and_another_joins(cluster: SmallCluster) -> None:
    """No member leaves the group, so nothing is handed out twice; then all checkpoints are at the ends."""
    with pxrs.open(cluster.url) as hub:
        hub.create_topic("orders", partitions=PARTITIONS)
        members = [Member(cluster.url), Member(cluster.url)]
        try:

            def count() -> int:
                return sum(len(member.handled) for member in members)

            eventually(lambda: len(hub.group("g").describe().members) == 2)
            send(hub, "orders", range(ROWS // 2))
            eventually(lambda: count() >= ROWS // 4)
            cluster.stop_broker(0)  # both members are connected to it: it is the first of their address
            cluster.start_broker()
            send(hub, "orders", range(ROWS // 2, ROWS))
            eventually(lambda: count() >= ROWS, 30)
        finally:
            for member in members:
                member.close()
        handled = [each for member in members for each in member.handled]
        assert Counter(number for _, _, number in handled) == Counter(range(ROWS))
        for member in members:
            for partition in range(PARTITIONS):
                offsets = [offset for number, offset, _ in member.handled if number == partition]
                assert offsets == sorted(offsets)
        ends = hub.topic("orders").log.bounds(range(PARTITIONS))
        found = {each.partition: each.checkpoint for each in hub.group("g").describe().partitions}
        assert found == {partition: bounds.end for partition, bounds in ends.items()}
        assert list(ends) == list(range(PARTITIONS)), "in the order in which they were asked for, whoever owns them"


def test_w2_a_member_that_ends_is_followed_from_its_last_checkpoint(cluster: SmallCluster) -> None:
    """With `ack="manual"`: what was handed out behind the last checkpoint is handed out again, and nothing else."""
    with pxrs.open(cluster.url) as hub:
        hub.create_topic("orders", partitions=1)
        with hub.producer("orders") as out:
            out.send_batch(pa.table({"value": [b"%d" % number for number in range(20)]}))
        with pxrs.open(f"pxrs://{cluster.addresses[0]},{cluster.addresses[1]}") as one:
            inbox = one.consumer("orders", "g", ack="manual")
            taken = []
            for message in inbox:
                taken.append(message.offset)
                if message.offset < 12:
                    inbox.ack(message)
                if message.offset == 15:
                    break
            cluster.stop_broker(0)
            inbox.close()
        assert taken == list(range(16))
        with hub.consumer("orders", "g", until="end") as again:
            assert [message.offset for message in again] == list(range(12, 20))


def test_q1_transactions_of_a_queue_survive_the_end_of_the_broker_that_they_began_at(cluster: SmallCluster) -> None:
    """The lease of the taker is attached to at the other broker; items are delivered once, or dead after two."""
    with pxrs.open(cluster.url, lease_ttl=10.0) as hub:
        jobs = hub.create_queue("jobs", policy=pxrs.ConsumeTimes(2), fifo=True)
        jobs.put_many([b"%d" % number for number in range(10)])
        done: list[int] = []
        with hub.transaction() as transaction:
            items = transaction.take_many("jobs", 3, timeout=10)
            assert len(items) == 3
            cluster.stop_broker(0)
            done += [int(item.value) for item in items]
        for _ in range(2):  # the next item fails twice, and is dead then
            transaction = hub.transaction()
            item = transaction.take("jobs", timeout=10)
            assert item is not None
            assert item.value == b"3"
            transaction.rollback(ValueError("no"))
        (dead,) = jobs.dead_letters()
        assert dead.value == b"3"
        while len(done) < 9:
            with hub.transaction() as transaction:
                item = transaction.take("jobs", timeout=10)
                assert item is not None
                assert item.deliveries == 1
                done.append(int(item.value))
        assert sorted(done) == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_a_listener_goes_on_while_a_broker_ends(cluster: SmallCluster) -> None:
    with pxrs.open(cluster.url, lease_ttl=10.0) as hub:
        jobs = hub.create_queue("jobs")
        handled: list[int] = []
        first = threading.Event()

        def handle(transaction: pxrs.Transaction, item: pxrs.Item) -> None:
            handled.append(int(item.value))
            first.set()

        with pxrs.QueueListener(jobs, handle, threads=2):
            jobs.put_many([b"%d" % number for number in range(5)])
            assert first.wait(20)
            cluster.stop_broker(0)
            jobs.put_many([b"%d" % number for number in range(5, 20)])
            eventually(lambda: len(handled) >= 20, 30)
        assert sorted(handled) == list(range(20))


def test_a_topic_is_copied_into_a_cluster_and_out_of_it(cluster: SmallCluster, tmp_path: Path) -> None:
    with pxrs.open(tmp_path / "hub", upkeep=False) as near, pxrs.open(cluster.url) as far:
        near.create_topic("orders", partitions=PARTITIONS)
        send(near, "orders", range(200))
        assert near.copy_topic("orders", "orders", to=far).messages == 200
        cluster.stop_broker(0)
        send(near, "orders", range(200, 300))
        assert near.copy_topic("orders", "orders", to=far).messages == 100
        assert far.copy_topic("orders", "back", to=near).messages == 300
        assert near.topic("back").to_arrow().num_rows == 300
        assert sorted(map(int, near.topic("back").to_arrow().column("value").to_pylist())) == list(range(300))
