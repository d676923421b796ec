"""The grants that docs/serve.md gives to each role suffice for real programs, and for nothing else.

Each program runs over a server that has a tokens file, with a token that has these grants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import pxrs
from pxrs import disk
from pxrs.errors import NotPermitted
from pxrs.group.records import Keys
from pxrs.server.auth import tokens
from pxrs.server.serving import ServerSettings, serving
from pxrs.testing.waiting import eventually


@pytest.fixture
def data(tmp_path: Path) -> str:
    """A hub with two topics, which keep unread messages, three queues and a group."""
    url = str(tmp_path / "data")
    with pxrs.open(url, upkeep=False) as hub:
        for topic in ("orders", "secret"):
            hub.create_topic(topic, partitions=2, keep_unread=True, retention=3_600)
            with hub.producer(topic) as out:
                for number in range(10):
                    out.send(b"%d" % number, key=b"%d" % number)
        hub.create_queue("mail")
        hub.create_queue("fifo", fifo=True)
        hub.create_queue("secret").put("hidden")
        hub.consumer("secret", "others").close()
    return url


@contextmanager
def hub_with(url: str, *allow: str) -> Iterator[pxrs.Hub]:
    """The hub over a server that permits what a token with these grants does."""
    path, shown = f"{url}.tokens", Path(f"{url}.token")
    _, secret = tokens.create(path, "role", allow, now=0.0)
    shown.write_text(f"{secret}\n")
    with (
        pxrs.open(url, upkeep=False) as served,
        serving(served, ServerSettings(auth=path)) as address,
        pxrs.open(f"{address}?token_file={shown}") as hub,
    ):
        yield hub


@pytest.fixture(autouse=True)
def no_refusal_is_only_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Background threads log what they cannot do."""
    yield
    assert "NotPermitted" not in caplog.text
    assert "does not permit" not in caplog.text


def test_a_producer(data: str) -> None:
    with hub_with(data, "topic:orders=write") as hub:
        with hub.producer("orders") as out:
            out.send(b"more").result()
        assert [topic.name for topic in hub.topics()] == ["orders"]
        log = hub.topic("orders").log
        assert sum(log.ends()) == 11
        with pytest.raises(NotPermitted):
            log.fetch({0: 0})
        with pytest.raises(NotPermitted):
            hub.producer("secret")
        with pytest.raises(NotPermitted):
            hub.create_topic("new")
        with pytest.raises(NotPermitted):
            hub.delete_topic("orders")
        with pytest.raises(NotPermitted):
            hub.consumer("orders", "billing")


def test_a_consumer(data: str) -> None:
    with hub_with(data, "topic:orders=read", "group:billing=member") as hub:
        with hub.consumer("orders", "billing") as one, hub.consumer("orders", "billing") as two:
            found: set[bytes] = set()

            def all_are_read() -> bool:
                for consumer in (one, two):
                    found.update(message.value or b"" for message in consumer.poll(timeout=0.1))
                return len(found) == 10

            assert eventually(all_are_read)
            one.commit()
            two.commit()
        with pytest.raises(NotPermitted):
            hub.consumer("orders", "others")
        with pytest.raises(NotPermitted):
            hub.consumer("secret", "billing")
        with pytest.raises(NotPermitted):
            hub.group("billing").delete()


def test_a_consumer_goes_on_when_its_token_gets_other_grants(data: str) -> None:
    with (
        hub_with(data, "topic:orders=read,write", "group:billing=member") as hub,
        hub.consumer("orders", "billing") as consumer,
    ):
        assert eventually(lambda: consumer.poll(timeout=0.1))
        path = Path(f"{data}.tokens")
        disk.replace_file(str(path), path.read_text().replace("billing=member", "bill*=admin").encode())

        def is_read_again() -> bool:
            try:
                hub.registry.get("groups/billed/leader")
            except NotPermitted:
                return False
            return True

        assert eventually(is_read_again)
        with hub.producer("orders") as out:
            for number in range(10):
                out.send(b"new", key=b"%d" % number)
        count = 0

        def all_are_read() -> bool:
            nonlocal count
            count += sum(message.value == b"new" for message in consumer.poll(timeout=0.1))
            return count == 10

        assert eventually(all_are_read)
        consumer.commit()


def test_a_program_that_puts(data: str) -> None:
    with hub_with(data, "queue:mail=put", "queue:fifo=put") as hub:
        for queue in ("mail", "fifo"):
            hub.queue(queue).put("one")
            hub.queue(queue).put_many(["two", "three"])
        hub.queue("mail").put("later", delay=60)
        with hub.transaction() as tx:
            tx.put("mail", "four")
            tx.put("fifo", "five")
        with pytest.raises(NotPermitted):
            hub.queue("mail").peek()
        with pytest.raises(NotPermitted), hub.transaction() as tx:
            tx.take("mail", timeout=1)
        with pytest.raises(NotPermitted):
            hub.queue("secret")
        with pytest.raises(NotPermitted):
            hub.delete_queue("mail")
    with pxrs.open(data, upkeep=False) as hub:
        assert (hub.queue("mail").depth().ready, hub.queue("fifo").depth().ready) == (4, 4)


def test_a_queue_worker(data: str) -> None:
    with pxrs.open(data, upkeep=False) as setup:
        for queue in ("mail", "fifo"):
            setup.queue(queue).put_many(["one", "two"])
    with hub_with(data, "queue:mail=take", "queue:fifo=take") as hub:
        for queue in ("mail", "fifo"):
            with hub.transaction() as tx:
                assert tx.take(queue, timeout=10) is not None
                tx.rollback("try again")
            for _ in range(2):
                with hub.transaction() as tx:
                    item = tx.take(queue, timeout=10)
                    assert item is not None
            assert hub.queue(queue).depth().ready == 0
        with pytest.raises(NotPermitted), hub.transaction() as tx:
            tx.take("secret", timeout=1)
        assert [queue.name for queue in hub.queues()] == ["fifo", "mail"]


def test_an_operator_of_queues_and_groups(data: str) -> None:
    with hub_with(data, "queue:eu-*=admin", "group:eu-*=admin", "topic:orders=read") as hub:
        hub.create_queue("eu-mail").put("x")
        assert [queue.name for queue in hub.queues()] == ["eu-mail"]
        hub.delete_queue("eu-mail")
        hub.consumer("orders", "eu-billing").close()
        assert hub.groups() == ["eu-billing"], "groups of others are not listed"
        group = hub.group("eu-billing")
        assert group.describe().partitions
        group.reset("latest")
        group.delete()
        with pytest.raises(NotPermitted):
            hub.create_queue("us-mail")
        with pytest.raises(NotPermitted):
            hub.group("others").delete()


def test_a_dashboard(data: str) -> None:
    with hub_with(data, "topic:*=describe", "group:*=read") as hub:
        assert hub.groups() == ["others"]
        assert hub.group("others").describe().partitions
        assert sum(hub.topic("secret").log.ends()) == 10
        with pytest.raises(NotPermitted):
            hub.topic("secret").log.read(0, 0)
        with pytest.raises(NotPermitted):
            hub.producer("orders")
        with pytest.raises(NotPermitted):
            hub.registry.lease(10)
        with pytest.raises(NotPermitted):
            hub.registry.commit(put={Keys("others").leader: b""})
