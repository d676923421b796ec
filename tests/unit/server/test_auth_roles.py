"""The grants that docs/serve.md gives to each role suffice for real programs, and for nothing else.

Each program runs on a hub whose registry asks a gate before every call, as a server does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.errors import NotPermitted
from pxrs.group.records import Keys
from pxrs.registry import Entry
from pxrs.remote import wire
from pxrs.server.auth import tokens
from pxrs.server.auth.gate import Gate
from pxrs.server.auth.names import HubNames
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
    """The hub, whose registry permits what a token with these grants does."""
    path = f"{url}.tokens"
    _, secret = tokens.create(path, "role", allow, now=0.0)
    with pxrs.open(url, upkeep=False) as server, pxrs.open(url, upkeep=False) as hub:
        gate = Gate(path, HubNames(server.topics, server.registry.get))
        caller = gate.identify({"authorization": f"Bearer {secret}"})
        check = functools.partial(gate.check, caller)
        guard(hub.registry, check, functools.partial(gate.scan, caller))
        yield hub


def guard(registry: pxrs.registry.Registry, check: Callable[..., None], scan: Callable[..., list[Entry]]) -> None:
    get_it, scan_it, commit_it = registry.get, registry.scan, registry.commit
    watch_it, lease_it = registry.watch, registry.lease

    def get(key: str) -> Entry | None:
        check("registry.get", {"key": key})
        return get_it(key)

    def guarded_scan(prefix: str, after: str | None = None, limit: int | None = None) -> list[Entry]:
        check("registry.scan", {"prefix": prefix})
        return scan(scan_it, prefix, after, limit)

    def commit(
        expect: Mapping[str, int] = {},
        put: Mapping[str, bytes] = {},
        ephemeral: Mapping[str, bytes] = {},
        lease: Any = None,
        delete: Iterable[str] = (),
        quiet: bool = False,
    ) -> dict[str, int]:
        delete = list(delete)
        sent = {key: wire.text_of(value) for key, value in put.items()}
        kept = {key: wire.text_of(value) for key, value in ephemeral.items()}
        check("registry.commit", {"expect": dict(expect), "put": sent, "ephemeral": kept, "delete": delete})
        return commit_it(expect, put, ephemeral, lease, delete, quiet)

    def watch(*prefixes: str) -> Any:
        check("registry.watch", {"prefixes": list(prefixes)})
        return watch_it(*prefixes)

    def lease(*given: Any, **options: Any) -> Any:
        check("registry.lease", {})
        return lease_it(*given, **options)

    for name, each in {"get": get, "scan": guarded_scan, "commit": commit, "watch": watch, "lease": lease}.items():
        setattr(registry, name, each)


@pytest.fixture(autouse=True)
def no_refusal_is_only_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Background threads log what they cannot do."""
    yield
    assert "NotPermitted" not in caplog.text
    assert "does not permit" not in caplog.text


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
        with pytest.raises(NotPermitted):
            hub.registry.lease(10)
        with pytest.raises(NotPermitted):
            hub.registry.commit(put={Keys("others").leader: b""})
