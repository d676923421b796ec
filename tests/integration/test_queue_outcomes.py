"""The connection is cut between a transaction's commit and its reply, on real servers; and requests land late.

And a consumer whose store stops answering: each of its calls ends in its time.
"""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

import pxrs
from pxrs.errors import CommitUnknown, GroupUnavailable, OutcomeUnknown, RegistryUnavailable
from pxrs.hub import Hub
from pxrs.queue.outcomes import resolve
from pxrs.queue.transaction import Transaction
from pxrs.registry.steps import drive
from pxrs.testing.proxy import Proxy
from pxrs.testing.servers import EtcdServer, PostgresServer, ZooKeeperServer
from pxrs.testing.waiting import aside

pytestmark = pytest.mark.sampled(2, of="module")

TIMEOUT_S = 2.0
PATIENCE_S = 30.0
LEASE_S = 20.0


class Place:
    """A server, and a network before it that loses and delays on demand."""

    def __init__(self, kind: str, url: str, proxy: Proxy) -> None:
        self.kind, self.url, self.proxy = kind, url, proxy
        self.namespace = f"n{uuid.uuid4().hex[:8]}"

    def open(self, *, through: bool, timeout_s: float = TIMEOUT_S) -> Hub:
        address = f"{self.proxy.host}:{self.proxy.port}"
        match self.kind:
            case "postgresql":
                host = self.url.rpartition("@")[2].partition("/")[0]
                url = self.url.replace(host, address) if through else self.url
                mark = "&" if "?" in url else "?"
            case _:
                url = f"{self.kind}://{address}" if through else self.url
                mark = "?"
        registry = f"{url}{mark}namespace={self.namespace}&timeout={timeout_s}"
        return pxrs.open("memory:", registry=registry, lease_ttl=LEASE_S)


SERVERS: dict[str, Any] = {"postgresql": PostgresServer, "etcd": EtcdServer, "zookeeper": ZooKeeperServer}


@pytest.fixture(scope="module", params=list(SERVERS))
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, Any]]:
    settings = {"session_ms_max": 40_000} if request.param == "zookeeper" else {}
    with SERVERS[request.param](**settings) as server:
        yield request.param, server


@pytest.fixture
def place(server: tuple[str, Any]) -> Iterator[Place]:
    kind, running = server
    with Proxy(running.host, running.port) as proxy:
        yield Place(kind, running.url, proxy)


@contextmanager
def story(place: Place) -> Iterator[tuple[Hub, Transaction]]:
    """An observer, and a transaction through the network that has taken an item and will put another."""
    with ExitStack() as stack:
        observer = stack.enter_context(place.open(through=False))
        observer.create_queue("a")
        observer.create_queue("b")
        hub = stack.enter_context(place.open(through=True))
        stack.callback(place.proxy.restore)  # before the hub is closed
        with hub.transaction() as first:  # so that ZooKeeper has all folders: else a commit is answered, and sent again
            first.put("a", "x")
            first.put("b", "first")
        tx = hub.transaction()
        assert tx.take("a", timeout=PATIENCE_S) is not None
        tx.put("b", "y")
        yield observer, tx


def depths(hub: Hub) -> tuple[int, int, int]:
    a, b = hub.queue("a").depth(), hub.queue("b").peek(10)
    return a.ready, a.in_flight, sum(item.value == b"y" for item in b)


def eventually(check: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < until, "not in time"
        time.sleep(0.01)


def patiently(ask: Callable[[], str]) -> str:
    """The network is well again, and the clients find out."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask()
        except (RegistryUnavailable, OutcomeUnknown):
            assert time.monotonic() < until


def test_z2_a_lost_reply_is_unknown_and_turns_out_to_be_committed(place: Place) -> None:
    with story(place) as (observer, tx):
        _commit_and_lose_the_reply(place, tx)
        assert patiently(tx.outcome) == "committed"
        assert depths(observer) == (0, 0, 1)


def _commit_and_lose_the_reply(place: Place, tx: Transaction) -> None:
    """If the lease is being renewed on the connection, a second one is opened, whose replies are lost before the commit
    is sent: then the error says so, and the commit is tried again."""
    for _ in range(10):
        place.proxy.drop_replies(close_after=0.2)
        try:
            with pytest.raises(OutcomeUnknown):
                tx.commit()
            return
        except RegistryUnavailable:
            continue
        finally:
            place.proxy.restore()
    raise AssertionError("no commit was sent")


def test_z2_a_lost_request_is_unknown_and_turns_out_to_be_rolled_back(place: Place) -> None:
    with story(place) as (observer, tx):
        _commit_into_the_void(place, tx)
        place.proxy.cut()  # what was held is lost
        place.proxy.restore()
        assert patiently(tx.outcome) == "rolled back"
        eventually(lambda: depths(observer) == (1, 0, 0))


def test_r5_a_request_that_lands_after_it_was_settled_does_nothing(place: Place) -> None:
    with story(place) as (observer, tx):
        _commit_into_the_void(place, tx)
        assert tx._slot is not None
        slot = tx._slot
        # By the same steps as `outcome`, from where the network is well.
        registry = observer.registry

        def outcome() -> str:
            return str(drive(resolve(copy.copy(slot), tx.id, registry.clock.now, time.time()), registry))

        assert patiently(outcome) == "False"
        place.proxy.release_requests()
        assert patiently(tx.outcome) == "rolled back"
        eventually(lambda: depths(observer) == (1, 0, 0))
        with observer.transaction() as other:
            item = other.take("a", timeout=PATIENCE_S)
            assert item is not None
            assert item.deliveries == 2
        assert depths(observer) == (0, 0, 0)


def test_r5_a_request_that_lands_before_it_is_settled_counts(place: Place) -> None:
    with story(place) as (observer, tx):
        tx._store.keeper.close()  # it would settle it, perhaps first
        _commit_into_the_void(place, tx)
        place.proxy.release_requests()
        eventually(lambda: depths(observer) == (0, 0, 1))
        assert patiently(tx.outcome) == "committed"


def _commit_into_the_void(place: Place, tx: Transaction) -> None:
    """The commit is under way when the connection breaks; it may land later. If the lease is being renewed on the
    connection, a second one is opened, and breaks before the commit is sent: then the error says so, and the commit is
    tried again."""
    for _ in range(10):
        place.proxy.hold_requests()
        commit = aside(tx.commit)
        place.proxy.wait_for_request(PATIENCE_S)
        # The rest of the request, which may be several packets; the request itself, if a renewal was seen before it.
        time.sleep(0.3)
        place.proxy.reset_connections()
        error = commit.exception(PATIENCE_S)
        if not isinstance(error, RegistryUnavailable):
            break
        place.proxy.restore()
    assert type(error) is OutcomeUnknown


CALL_S = 3.0
SLACK_S = CALL_S
"""What a busy machine may add to a call: less than another wait for the store would."""


@pytest.mark.parametrize("call", ["commit", "close"])
def test_a_call_of_a_consumer_ends_in_its_time_while_the_store_is_paused(place: Place, call: str) -> None:
    """Several calls of the store have to wait: those of the member's thread, which holds the mutex, then its own."""
    with ExitStack() as stack:
        hub = stack.enter_context(place.open(through=True, timeout_s=CALL_S))
        stack.callback(place.proxy.restore)  # before the hub is closed
        hub.create_topic("t", partitions=2)
        for partition in range(2):
            with hub.producer("t") as out:
                out.send(b"1", partition=partition)
                out.send(b"2", partition=partition)
        inbox = hub.consumer("t", "g", lease_ttl=LEASE_S)
        eventually(lambda: inbox.assignment == [0, 1])
        seen: set[int] = set()
        while len(seen) < 2:
            seen.update(message.partition for message in inbox.poll(1, timeout=PATIENCE_S))
        place.proxy.stall()
        inbox._member.wake()  # as a change of the group would
        began = time.monotonic()
        with pytest.raises((CommitUnknown, GroupUnavailable)) as raised:
            inbox.commit() if call == "commit" else inbox.close()
        assert time.monotonic() - began < CALL_S + SLACK_S
        assert set(raised.value.partitions) <= {0, 1}
        place.proxy.restore()
        if call == "commit":
            until = time.monotonic() + PATIENCE_S
            while True:
                try:
                    inbox.commit()
                    break
                except (CommitUnknown, GroupUnavailable):
                    assert time.monotonic() < until
            found = {row.partition: row.checkpoint for row in hub.group("g").describe().partitions}
            assert found == {0: 1, 1: 1}
