"""A hub behind `pxrs serve` while the server is killed, stopped and started again: clients go on without a line of code
for it (W1, W2)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest

pytest.importorskip("grpc")

import pxrs
from pxrs.errors import InvalidUrl, LogNotWritable, RegistryUnavailable
from pxrs.testing.servers import HubServer
from pxrs.testing.waiting import aside, eventually

pytestmark = pytest.mark.sampled(2, of="module")

MESSAGES = 3_000
LEASE_S = 120.0
"""Longer than a restart of the server takes, however busy the machine is."""


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


def values(hub: pxrs.Hub, topic: str) -> Counter[bytes | None]:
    handle = hub.topic(topic)
    return Counter(message.value for number in range(handle.partitions) for message in handle.messages(number))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_killed", [True, False], ids=["kill -9", "SIGTERM"])
def test_w1_producers_and_consumers_survive_a_restart_of_the_server(server: HubServer, is_killed: bool) -> None:
    sent = [b"%d" % number for number in range(MESSAGES)]
    received: Counter[bytes | None] = Counter()
    half, three_quarters = threading.Event(), threading.Event()

    def produce() -> None:
        with pxrs.open(server.url) as hub, hub.producer("orders", linger_s=0.001) as producer:
            for number, value in enumerate(sent):
                producer.send(value)
                if number % 50 == 0:
                    producer.flush()  # so that there are many batches
                if number == MESSAGES // 2:
                    half.set()
                if number == 3 * MESSAGES // 4:
                    three_quarters.set()

    def consume() -> None:
        with pxrs.open(server.url) as hub, hub.consumer("orders", "readers", lease_ttl=LEASE_S) as consumer:
            for message in consumer:
                received[message.value] += 1
                if len(received) == MESSAGES:
                    return

    with pxrs.open(server.url) as hub:
        hub.create_topic("orders", 4)
        producing, consuming = aside(produce), aside(consume)
        for moment in (half, three_quarters):
            assert moment.wait(60)
            if is_killed:
                server.kill()
            else:
                server.stop()
            server.start()
        producing.result(60)
        consuming.result(60)
        assert values(hub, "orders") == Counter(sent), "each message is stored once"
        assert received == Counter(sent), "the same member has kept its partitions"


def test_w2_a_lease_outlives_the_server_that_gave_it(server: HubServer) -> None:
    with pxrs.open(server.url) as hub:
        registry = hub.registry
        lease = registry.lease(20)
        registry.commit(ephemeral={"member": b"me"}, lease=lease)
        server.kill()
        server.start()
        registry.commit(put={"after": b""}, lease=lease)
        assert lease.renew() > registry.clock.now()
        assert registry.get("member") is not None
        lease.end()
        assert registry.get("member") is None


def test_r2_a_change_while_the_server_was_away_wakes_a_watch(server: HubServer) -> None:
    with pxrs.open(server.url) as hub, hub.registry.watch("a/") as watch:
        server.kill()
        with pxrs.open(server.data) as local:
            local.registry.commit(put={"a/b": b"1"})
        server.start()
        assert watch.wait(30)
        assert hub.registry.get("a/b") is not None


def test_queues_and_transactions_work_over_a_server(server: HubServer) -> None:
    with pxrs.open(server.url) as hub:
        hub.create_queue("jobs")
        hub.queue("jobs").put(b"1")
        with hub.transaction() as transaction:
            item = transaction.take("jobs")
            assert item is not None
            assert item.value == b"1"
        server.kill()
        with pytest.raises(RegistryUnavailable):
            pxrs.registry.open(f"{server.url}?timeout=0.5")
        server.start()
        hub.queue("jobs").put(b"2")
        assert hub.queue("jobs").depth().ready == 1


def test_a_topic_is_deleted_with_all_that_the_registry_holds_of_it(server: HubServer) -> None:
    with pxrs.open(server.url) as hub:
        topic = hub.create_topic("kept", 1, retention=3600, keep_unread=True)
        assert topic.retention_problem() is None
        with hub.consumer("kept", "g"):
            eventually(lambda: hub.registry.scan(f"topics/{topic.id}/"))
        with pytest.raises(LogNotWritable, match="the server does the retention"):
            topic.retain()
        with pytest.raises(LogNotWritable, match="the server does the upkeep"):
            hub.run_upkeep()
        with pytest.raises(InvalidUrl, match="pxrs registry adopt"):
            hub.adopt_registry()
        hub.delete_topic("kept")
        assert hub.registry.scan(f"topics/{topic.id}/") == []
        assert hub.topics() == []


def test_a_registry_is_not_given_to_the_hub_of_a_server(server: HubServer) -> None:
    with pytest.raises(InvalidUrl, match="the server provides the registry"):
        pxrs.open(server.url, "memory:")
