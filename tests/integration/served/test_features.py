"""What the other files of this folder do not cover: producers, registered sources, FIFO queues, delays, retention, the
user's own database, upkeep."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest

import pxrs
from pxrs import clock
from pxrs.errors import DamagedFrame, LogNotReadable, LogNotWritable, OffsetTrimmed, TransactionLost
from pxrs.hub import Hub
from pxrs.log.contract import DamagedTopic
from pxrs.server.serving import serving
from pxrs.testing.waiting import eventually

PATIENCE_S = 30.0
WEEK_US = 7 * 86_400 * 1_000_000


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Hub]:
    """The hub behind the server, in a directory."""
    with pxrs.open(tmp_path / "data", upkeep=False) as hub:
        yield hub


@pytest.fixture
def client(kept: Hub) -> Iterator[Hub]:
    with serving(kept) as url, pxrs.open(url) as hub:
        yield hub


# Producers.


def test_a_receipt_says_where_each_message_was_stored(hub: Hub) -> None:
    hub.create_topic("orders", partitions=3, codec="zstd")
    with hub.producer("orders") as out:
        receipts = [out.send(b"%d" % number, key=b"k%d" % (number % 5)) for number in range(100)]
        out.flush()
        places = [receipt.result(PATIENCE_S) for receipt in receipts]
    assert len(set(places)) == 100
    stored = {(p, message.offset): message.value for p in range(3) for message in hub.topic("orders").messages(p)}
    assert [stored[place] for place in places] == [b"%d" % number for number in range(100)]


def test_tables_are_sent_and_read_as_tables(hub: Hub) -> None:
    topic = hub.create_topic("orders", partitions=4)
    keys, values = [b"k%d" % (number % 7) for number in range(1_000)], [b"%d" % number for number in range(1_000)]
    with hub.producer("orders") as out:
        out.send_batch(pa.table({"key": keys, "value": values}))
        out.flush()
        found = topic.to_arrow()
        out.send_batch(found.select(["partition", "key", "value", "timestamp", "headers"]))
    assert sorted(found["value"].to_pylist()) == sorted(values)
    again = topic.to_arrow()
    for partition in range(4):
        rows = again.filter(pa.compute.equal(again["partition"], partition))["value"].to_pylist()
        assert rows[: len(rows) // 2] == rows[len(rows) // 2 :], "as it was read, it was stored"


def test_several_producers_of_several_threads_store_each_message_once(url: str, hub: Hub) -> None:
    hub.create_topic("orders", partitions=2)

    def produce(name: int) -> None:
        with pxrs.open(url) as own, own.producer("orders", linger_s=0) as out:
            for number in range(100):
                out.send(b"%d-%d" % (name, number), key=b"%d" % name)

    threads = [threading.Thread(target=produce, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    found = hub.topic("orders").to_arrow()["value"].to_pylist()
    assert sorted(found) == sorted(b"%d-%d" % (name, number) for name in range(4) for number in range(100))


# Registered sources.


def test_a_registered_source_is_read_by_a_group_through_the_clients_own_connection(hub: Hub, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "shop.db") as shop:
        shop.execute("CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, account TEXT, body TEXT)")
        shop.executemany("INSERT INTO events (account, body) VALUES (?, ?)", [(f"a{n % 3}", f"{n}") for n in range(20)])
    options = {"table": "events", "key_column": "account", "value_column": "body", "partitions": 2}
    hub.add_source("events", f"sqlite:///{tmp_path}/shop.db", **options)  # type: ignore[arg-type]
    assert [each.name for each in hub.sources()] == ["events"]
    with hub.consumer("events", "g", until="end") as inbox:
        assert sorted(int(message.value or b"") for message in inbox) == list(range(20))
    assert hub.group("g").describe().lag == 0
    hub.remove_source("events")
    assert hub.sources() == []


# Queues.


def test_z6_a_fifo_queue_gives_items_in_their_order_to_one_transaction_at_a_time(url: str, hub: Hub) -> None:
    hub.create_queue("mail", fifo=True).put_many(["1", "2", "3"])
    with pxrs.open(url) as other:
        with hub.transaction() as tx:
            first = tx.take("mail", timeout=PATIENCE_S)
            with other.transaction() as second:
                assert second.take("mail", timeout=0.1) is None, "another transaction has the turn"
            tx.rollback("not yet")
        with other.transaction() as tx:
            again = tx.take("mail", timeout=PATIENCE_S)
            assert first is not None
            assert again is not None
            assert (first.value, again.value, again.deliveries) == (b"1", b"1", 2)
            assert [item.value for item in tx.take_many("mail", 5)] == [b"2", b"3"]


def test_an_item_with_a_delay_comes_when_it_is_due_and_wakes_who_waits(url: str, hub: Hub) -> None:
    hub.create_queue("mail")
    with pxrs.open(url) as other, hub.transaction() as tx:
        other.queue("mail").put("later", delay=timedelta(seconds=0.3))
        assert other.queue("mail").depth().delayed == 1
        item = tx.take("mail", timeout=PATIENCE_S)
        assert item is not None
        assert item.value == b"later"


def test_an_item_of_a_client_that_is_gone_goes_to_another(url: str, hub: Hub) -> None:
    hub.create_queue("mail", pxrs.ConsumeTimes(2)).put("hello")
    with pxrs.open(url) as other:
        tx = other.transaction()
        assert tx.take("mail", timeout=PATIENCE_S) is not None
        (taker,) = hub.registry.scan("takers/")
        hub.registry.commit({taker.key: taker.version}, delete=[taker.key])  # as when its lease ends
        with hub.transaction() as mine:
            item = mine.take("mail", timeout=PATIENCE_S)
            assert item is not None
            assert item.deliveries == 2
        with pytest.raises(TransactionLost):
            tx.commit()


# Retention and upkeep.


def send_old(hub: Hub, topic: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that fill a segment each, stored a week ago by the clock of the server."""
    week_ago = clock.wall_time_us() - WEEK_US
    with monkeypatch.context() as patched, hub.producer(topic, linger_s=0) as out:
        patched.setattr(clock, "wall_time_us", lambda: week_ago)
        for _ in range(count):
            out.send(b"x" * 4_096).result(PATIENCE_S)


def test_retention_is_the_servers_and_a_reader_is_told_what_it_took(
    kept: Hub, client: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.create_topic("t", partitions=1, retention=2, segment_bytes=4_096)
    send_old(client, "t", 5, monkeypatch)
    with pytest.raises(LogNotWritable, match="its server does the retention of t"):
        client.topic("t").retain()
    with pytest.raises(LogNotWritable, match="its server does the upkeep"):
        client.run_upkeep()
    assert client.topic("t").start(0) == 0
    kept.run_upkeep()
    start = client.topic("t").start(0)
    assert start > 0
    with pytest.raises(OffsetTrimmed):
        client.topic("t").read(0, 0)
    with client.consumer("t", "g", until="end") as inbox:
        assert [message.offset for message in inbox] == list(range(start, 5))
    assert client.topic("t").retention_problem() is None


def test_what_a_group_has_yet_to_read_stays_although_the_server_alone_retains(
    kept: Hub, client: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.create_topic("t", partitions=1, retention=2, segment_bytes=4_096, keep_unread=True)
    client.consumer("t", "slow").close()
    send_old(client, "t", 5, monkeypatch)
    kept.run_upkeep()
    assert client.topic("t").start(0) == 0, "the group has read nothing"
    with client.consumer("t", "slow") as inbox:
        for _ in range(3):
            assert inbox.poll(1, timeout=PATIENCE_S)
        inbox.commit()
    kept.run_upkeep()
    assert client.topic("t").start(0) == 3
    client.group("slow").reset("earliest")
    with client.consumer("t", "slow", until="end") as inbox:
        assert [message.offset for message in inbox] == [3, 4]


def test_the_janitor_is_the_server(kept: Hub, client: Hub) -> None:
    client.create_topic("t", partitions=1, retention=100)
    kept.start_upkeep()
    eventually(lambda: kept.upkeep().role == "elected" and client.upkeep().janitor != "")
    found = client.upkeep()
    assert (found.janitor, found.since) == (kept.upkeep().janitor, kept.upkeep().since)
    assert found.role == "idle"


def test_damaged_topics_are_named_with_their_damage(kept: Hub, client: Hub, tmp_path: Path) -> None:
    topic = client.create_topic("t", partitions=1)
    (tmp_path / "data" / "logs" / topic.id / "topic.json").write_text("{}")
    (damaged,) = client.damaged_topics()
    assert (damaged.name, damaged.id) == ("t", topic.id)
    assert isinstance(damaged.error, DamagedFrame)
    assert client.topics() == []
    with pytest.raises(DamagedFrame):
        client.topic("t")
    client.delete_topic("t")
    assert client.damaged_topics() == []


def test_a_topic_that_the_server_may_not_read_is_not_named_as_damaged(
    kept: Hub, client: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    unread = DamagedTopic("t", "0" * 32, LogNotReadable("/data/t", "user nobody may not read /data/t"))
    monkeypatch.setattr(kept.log, "damaged_topics", lambda: [unread])
    (found,) = client.damaged_topics()
    assert isinstance(found.error, LogNotReadable)
    assert (found.error.path, str(found.error)) == ("/data/t", "user nobody may not read /data/t")
