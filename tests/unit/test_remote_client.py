"""The client of `pxrs serve`, against a peer that answers as the test says: what is sent once, what is sent again, and
what the caller is told when an answer does not come."""

from __future__ import annotations

import gc
import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")

from pxrs import registry as registries
from pxrs.address import open_log
from pxrs.errors import (
    AppendFailed,
    AppendUnknown,
    Closed,
    InvalidRecord,
    InvalidUrl,
    OutcomeUnknown,
    ReadFailed,
    RegistryUnavailable,
    TopicDeleted,
    TopicExists,
    Unauthenticated,
    UsedAfterFork,
    WireMismatch,
)
from pxrs.log.batch import Origin
from pxrs.log.contract import Append, Log, TopicLog
from pxrs.log.outcomes import MaybeStored, NotStored, StoredAt
from pxrs.registry import Registry
from pxrs.remote import flight, wire
from pxrs.remote.client import appends as appends_module
from pxrs.remote.client import arming, connection
from pxrs.remote.client import log as log_module
from pxrs.remote.client.registry import RemoteRegistry
from pxrs.remote.client.topic import RemoteTopic
from pxrs.testing.log_fixtures import new_topic, records
from pxrs.testing.proxy import Proxy
from pxrs.testing.waiting import aside, eventually
from tests.unit.remote_peer import Peer, Stream

TOPIC = new_topic("orders", 4)


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as peer:
        yield peer


def open_registry(peer: Peer, options: str = "") -> tuple[Registry, Stream]:
    opening = aside(lambda: registries.open(peer.url + options))
    control = peer.control()
    return opening.result(), control


def open_topic(peer: Peer, options: str = "") -> tuple[Log, TopicLog, Stream]:
    log = open_log(peer.url + options)
    opening = aside(lambda: log.topic("orders"))
    control = peer.control()
    request = control.next()
    assert (request["call"], request["topic"]) == ("log.topic", "orders")
    control.answer(request, topic=wire.topic_to_dict(TOPIC))
    return log, opening.result(), control


def stop(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    """Stop the peer, and wait until the client has noticed it: until then it may send a batch on the dead connection,
    and not know whether that arrived."""
    caplog.set_level(logging.INFO, "pxrs.remote.client.link")
    peer.stop()
    eventually(lambda: "reconnecting" in caplog.text)


def say_goodbye(registry: Registry, control: Stream) -> None:
    """Say goodbye, and wait until the client has noticed it."""
    assert isinstance(registry, RemoteRegistry)
    link = registry._connection._link
    control.say(goodbye={"reason": "a test"})
    control.say(goodbye={"reason": "said twice"})
    eventually(lambda: link._stream is None)


def append(partition: int = 0, sequence: int = 0) -> Append:
    return Append.encoded(partition, records([b"x"]), Origin(uuid.UUID(int=7), 0, sequence))


# Calls.


def test_w1_a_commit_whose_answer_is_lost_has_an_unknown_outcome_and_is_not_sent_again(peer: Peer) -> None:
    registry, control = open_registry(peer)
    with registry:
        committing = aside(lambda: registry.commit(put={"a": b"1"}))
        assert control.next()["call"] == "registry.commit"
        control.cut()
        assert isinstance(committing.exception(), OutcomeUnknown)
        reading = aside(lambda: registry.get("a"))
        control = peer.control()
        request = control.next()
        assert request["call"] == "registry.get", "the commit was sent again"
        control.answer(request, entry=None)
        assert reading.result() is None


def test_w1_a_commit_that_was_not_answered_in_time_has_an_unknown_outcome(peer: Peer) -> None:
    registry, control = open_registry(peer)
    registry.timeout_s = 0.3
    with registry:
        committing = aside(lambda: registry.commit(put={"a": b"1"}))
        assert control.next()["call"] == "registry.commit"
        assert isinstance(committing.exception(), OutcomeUnknown)


def test_w1_a_commit_that_only_looks_had_no_effect(peer: Peer) -> None:
    registry, control = open_registry(peer)
    with registry:
        committing = aside(lambda: registry.commit({"a": 1}))
        assert control.next()["call"] == "registry.commit"
        control.cut()
        assert type(committing.exception()) is RegistryUnavailable


def test_w1_a_commit_that_was_not_sent_had_no_effect(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    registry, _ = open_registry(peer)
    with registry:
        stop(peer, caplog)
        registry.timeout_s = 0.3
        with pytest.raises(RegistryUnavailable):
            registry.commit(put={"a": b"1"})


def test_a_failure_of_the_server_itself_leaves_the_outcome_of_a_commit_unknown(peer: Peer) -> None:
    registry, control = open_registry(peer)
    with registry:
        committing = aside(lambda: registry.commit(put={"a": b"1"}))
        control.say(id=control.next()["id"], error={"code": "error", "message": "the server failed unexpectedly"})
        assert isinstance(committing.exception(), OutcomeUnknown)


def test_a_read_is_made_again_on_the_next_stream(peer: Peer) -> None:
    registry, control = open_registry(peer)
    with registry:
        reading = aside(lambda: registry.get("a"))
        assert control.next()["call"] == "registry.get"
        control.cut()
        control = peer.control()
        control.answer(control.next(), entry=["a", wire.text_of(b"1"), 2**70])
        found = reading.result()
        assert found is not None
        assert (found.value, found.version) == (b"1", 2**70)


def test_answers_come_in_any_order_and_pages_of_a_scan_are_put_together(peer: Peer) -> None:
    registry, control = open_registry(peer)
    with registry:
        first, second = aside(lambda: registry.get("a")), aside(lambda: registry.scan("k/", limit=3))
        requests = {each["call"]: each for each in (control.next(), control.next())}
        page = requests["registry.scan"]
        assert (page["prefix"], page["after"], page["limit"]) == ("k/", None, 3)
        control.answer(page, entries=[["k/1", "", 1], ["k/2", "", 2]], more=True)
        page = control.next()
        assert (page["after"], page["limit"]) == ("k/2", 1)
        control.answer(page, entries=[["k/3", "", 3]], more=False)
        assert [entry.key for entry in second.result()] == ["k/1", "k/2", "k/3"]
        control.answer(requests["registry.get"], entry=None)
        assert first.result() is None


def test_after_a_goodbye_calls_are_finished_and_later_ones_use_the_next_stream(peer: Peer) -> None:
    registry, control = open_registry(peer)
    with registry:
        watching = aside(lambda: registry.watch("a/"))
        armed = control.next()
        control.answer(armed)
        watch = watching.result()
        committing = aside(lambda: registry.commit(put={"a": b"1"}))
        request = control.next()
        control.say(goodbye={"reason": "a test"})
        control.say(event=armed["number"])
        assert watch.wait(20), "the goodbye has come before"
        reading = aside(lambda: registry.get("a"))
        aside(lambda: registry.watch("b/"))
        assert control.is_quiet(), "a request was sent after the goodbye"
        assert not committing.done()
        control.answer(request, versions={"a": 5})
        assert committing.result() == {"a": 5}
        following = peer.control()
        asked = [following.next() for _ in range(3)]
        (read,) = (each for each in asked if each["call"] == "registry.get")
        following.answer(read, entry=None)
        assert reading.result() is None
        assert sorted(each["prefixes"] for each in asked if each is not read) == [["a/"], ["b/"]]
        following.answer(next(each for each in asked if each.get("number") == armed["number"]))
        assert watch.wait(20)


def test_after_a_goodbye_nothing_waits_for_the_calls_that_are_under_way(peer: Peer) -> None:
    """A slow commit on a server that stops must not keep a lease from being renewed by the next server."""
    registry, control = open_registry(peer)
    with registry:
        committing = aside(lambda: registry.commit(put={"a": b"1"}))
        request = control.next()
        say_goodbye(registry, control)
        leasing = aside(lambda: registry.lease(5.0))
        following = peer.control()
        following.answer(following.next(), id="l", secret="s", ttl=5.0, left_s=5.0)
        leasing.result().abandon()
        assert not committing.done()
        control.answer(request, versions={"a": 5})
        assert committing.result() == {"a": 5}
        ending = aside(registry.close)
        following.answer(following.next())
        ending.result()


def test_closing_ends_a_call_that_is_under_way_after_a_goodbye(peer: Peer) -> None:
    registry, control = open_registry(peer)
    committing = aside(lambda: registry.commit(put={"a": b"1"}))
    control.next()
    say_goodbye(registry, control)
    reading = aside(lambda: registry.get("a"))
    following = peer.control()
    following.answer(following.next(), entry=None)
    assert reading.result() is None
    registry.close()
    assert isinstance(committing.exception(), OutcomeUnknown)


def test_a_message_that_cannot_be_handled_ends_its_stream_and_not_the_client(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, control = open_registry(peer)
    assert isinstance(registry, RemoteRegistry)
    with registry:
        monkeypatch.setattr(registry._connection._link._begun, "_on_event", lambda _: {}["a defect"])
        reading = aside(lambda: registry.get("a"))
        control.next()
        control.say(event=1)
        following = peer.control()
        following.answer(following.next(), entry=None)
        assert reading.result() is None


def test_calls_that_wait_are_bounded_and_a_renewal_does_not_wait_for_them(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CALLS_MAX", 2)
    registry, control = open_registry(peer)
    with registry:
        leasing = aside(lambda: registry.lease(30, renewed=False))
        control.answer(control.next(), id="l", secret="s", ttl=30.0, left_s=30.0)
        lease = leasing.result()
        reads = [aside(lambda: registry.get("a")) for _ in range(2)]
        requests = [control.next() for _ in range(2)]
        assert [each["call"] for each in requests] == ["registry.get"] * 2
        registry.timeout_s = 0.2
        with pytest.raises(RegistryUnavailable, match="this process already has 2 calls in flight"):
            registry.get("a")
        renewing = aside(lease.renew)
        request = control.next()
        assert request["call"] == "registry.renew", "a third read was sent"
        control.answer(request, left_s=30.0)
        assert renewing.result() == lease.deadline
        for each in requests:
            control.answer(each, entry=None)
        assert [each.result() for each in reads] == [None, None]


# Leases.


def test_w3_the_deadline_is_counted_from_before_the_request_was_sent(peer: Peer) -> None:
    registry, control = open_registry(peer)
    with registry:
        before = registry.clock.now()
        leasing = aside(lambda: registry.lease(30, renewed=False))
        request = control.next()
        arrived = registry.clock.now()
        control.answer(request, id="l", secret="s", ttl=30.0, left_s=20.0)
        lease = leasing.result()
        assert before + 20 <= lease.deadline <= arrived + 20
        assert (lease.id, lease.ttl, lease.secret) == ("l", 30.0, "s")
        before = registry.clock.now()
        renewing = aside(lease.renew)
        request = control.next()
        assert (request["call"], request["secret"]) == ("registry.renew", "s")
        arrived = registry.clock.now()
        control.answer(request, left_s=25.0)
        assert before + 25 <= renewing.result() <= arrived + 25


def test_a_renewal_that_is_not_answered_makes_the_connection_anew(peer: Peer) -> None:
    """A connection that is cut without a message looks alive: the lease would expire before gRPC notices."""
    registry, control = open_registry(peer)
    with registry:
        leasing = aside(lambda: registry.lease(3.0))
        control.answer(control.next(), id="l", secret="s", ttl=3.0, left_s=3.0)
        lease = leasing.result()
        assert control.next()["call"] == "registry.renew"
        control = peer.control()
        control.answer(control.next(), left_s=3.0)
        assert lease.alive
        lease.abandon()
        ending = aside(lease.close)
        request = eventually(lambda: (found := control.next())["call"] == "registry.end" and found)
        control.answer(request)
        ending.result()


def test_a_renewal_that_cannot_be_sent_makes_the_connection_anew_with_the_next_server(peer: Peer) -> None:
    """A long request fills a connection that is cut without a message, and gRPC sends nothing after it."""
    with Peer() as other, Proxy("127.0.0.1", peer.port) as proxy:
        opening = aside(lambda: registries.open(f"pxrs://127.0.0.1:{proxy.port},127.0.0.1:{other.port}"))
        control = peer.control()
        with opening.result() as registry:
            leasing = aside(lambda: registry.lease(3.0))
            control.answer(control.next(), id="l", secret="s", ttl=3.0, left_s=3.0)
            lease = leasing.result()
            proxy.stall()
            commits = [aside(lambda: registry.commit(put={"a": bytes(700_000)})) for _ in range(3)]
            next_control = other.control()
            request = eventually(lambda: (found := next_control.next())["call"] == "registry.renew" and found)
            next_control.answer(request, left_s=3.0)
            assert lease.alive
            for commit in commits:
                assert isinstance(commit.exception(), OutcomeUnknown | RegistryUnavailable)
            lease.abandon()
            ending = aside(lease.close)
            next_control.answer(eventually(lambda: (found := next_control.next())["call"] == "registry.end" and found))
            ending.result()


# Watches and subscriptions.


def test_r2_a_watch_is_armed_again_on_the_next_stream_and_then_woken(peer: Peer) -> None:
    registry, control = open_registry(peer)
    with registry:
        watching = aside(lambda: registry.watch("a/"))
        request = control.next()
        assert (request["call"], request["prefixes"]) == ("registry.watch", ["a/"])
        assert not watching.done(), "the server has not confirmed it"
        control.answer(request)
        watch = watching.result()
        assert not watch.wait(0)
        control.say(event=request["number"])
        assert watch.wait(20)
        control.cut()
        control = peer.control()
        again = control.next()
        assert (again["call"], again["prefixes"], again["number"]) == ("registry.watch", ["a/"], request["number"])
        assert not watch.wait(0.1), "what changes now would not wake it"
        control.answer(again)
        assert watch.wait(20), "a change may have been missed"
        control.say(event=request["number"])
        assert watch.wait(20)
        watch.close()
        ended = control.next()
        assert (ended["call"], ended["number"]) == ("registry.unwatch", request["number"])


def test_r2_a_watch_that_cannot_be_armed_again_is_woken_and_asked_for_until_it_is(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arming, "AGAIN_S", 0.05)
    registry, control = open_registry(peer)
    with registry:
        watching = aside(lambda: registry.watch("a/"))
        control.answer(control.next())
        watch = watching.result()
        control.cut()
        control = peer.control()
        away = {"code": "registry.unavailable", "message": "the store is away"}
        control.say(id=control.next()["id"], error=away)
        assert watch.wait(20)
        control.say(id=control.next()["id"], error=away)
        again = control.next()
        assert not watch.wait(0), "once for each refusal is too often"
        control.answer(again)
        assert watch.wait(20)


def test_r2_a_watch_that_the_server_refuses_for_long_is_woken_now_and_then(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next server may have no room for it: whoever waits must not sleep for ever, although nothing tells of a
    change."""
    monkeypatch.setattr(arming, "AGAIN_S", 0.02)
    monkeypatch.setattr(arming, "LOOK_S", 0.1)
    registry, control = open_registry(peer)
    with registry:
        watching = aside(lambda: registry.watch("a/"))
        control.answer(control.next())
        watch = watching.result()
        began = time.monotonic()
        control.cut()
        control = peer.control()
        wakes = 0
        for _ in range(40):
            control.say(id=control.next()["id"], error={"code": "remote.busy", "message": "full"})
            wakes += watch.wait(0)
        # At most one wake for the lost stream, one for the first refusal, and one in each LOOK_S.
        assert 3 <= wakes <= 2 + (time.monotonic() - began) / arming.LOOK_S


def test_w6_renewals_do_not_wait_for_many_watches_that_are_armed_again(peer: Peer) -> None:
    """A server reads no further request while too many have no answer."""
    registry, control = open_registry(peer)
    with registry:
        count = 2 * arming.ASKED_MAX + 3
        for number in range(count):
            watching = aside(lambda number=number: registry.watch(f"{number}/"))
            control.answer(control.next())
            watching.result()
        control.cut()
        control = peer.control()
        asked = [control.next() for _ in range(arming.ASKED_MAX)]
        leasing = aside(lambda: registry.lease(60.0))
        request = control.next()
        assert request["call"] == "registry.lease", "it waits for watches"
        control.answer(request, id="l", secret="s", ttl=60.0, left_s=60.0)
        leasing.result().abandon()
        while len(asked) < count:
            control.answer(asked[len(asked) - arming.ASKED_MAX])
            asked.append(control.next())
        assert len({each["number"] for each in asked}) == count
        for each in asked[-arming.ASKED_MAX :]:
            control.answer(each)
        ending = aside(registry.close)
        while (data := control.next_data()) is not None:
            control.answer(wire.loads(data.app_metadata))
        ending.result()


def test_a_watch_is_not_asked_for_twice_on_one_stream(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number is in use on the server once it is confirmed: asked for again, it would be refused for ever."""
    monkeypatch.setattr(arming, "AGAIN_S", 0.3)
    registry, control = open_registry(peer)
    with registry:
        watching = aside(lambda: registry.watch("a/"))
        control.answer(control.next())
        watch = watching.result()
        control.cut()
        control = peer.control()
        error = {"code": "registry.unavailable", "bases": ["registry"], "message": "not now"}
        control.say(id=control.next()["id"], error=error)
        assert watch.wait(20)
        control.cut()  # before it is asked for again
        control = peer.control()
        assert control.next()["call"] == "registry.watch"
        assert control.is_quiet(1.0), "it was asked for again before the answer"


def test_a_watch_that_the_server_refuses_raises(peer: Peer) -> None:
    registry, control = open_registry(peer)
    with registry:
        watching = aside(lambda: registry.watch("a/"))
        control.say(id=control.next()["id"], error={"code": "registry.access-denied", "message": "not this one"})
        with pytest.raises(registries_error("registry.access-denied"), match="not this one"):
            watching.result()


def registries_error(code: str) -> type[Exception]:
    return type(wire.error_of({"code": code, "message": ""}))


def test_readers_that_wait_one_after_the_other_share_a_subscription(peer: Peer) -> None:
    log, topic, control = open_topic(peer)
    called = threading.Event()
    subscribing = aside(lambda: topic.subscribe([1, 0], called.set))
    request = control.next()
    assert (request["call"], request["partitions"], request["topic_id"]) == ("topic.subscribe", [0, 1], TOPIC.id)
    control.answer(request)
    subscribing.result().close()
    with topic.subscribe([0, 1], called.set):
        assert control.is_quiet(), "it is armed already"
        control.say(event=request["number"])
        assert called.wait(20)
        called.clear()
        control.cut()
        control = peer.control()
        control.answer(control.next())
        assert called.wait(20), "a change may have been missed"
        called.clear()
    control.say(event=request["number"])
    ended = control.next()
    assert (ended["call"], ended["number"]) == ("topic.unsubscribe", request["number"]), "nobody waits for it"
    assert not called.is_set()
    log.close()


def test_a_subscription_that_the_server_refuses_ends_with_its_last_reader(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a topic that was deleted while the connection was cut, say: it must not be asked for, for ever."""
    monkeypatch.setattr(arming, "AGAIN_S", 0.05)
    log, topic, control = open_topic(peer)
    woken = threading.Event()
    subscribing = aside(lambda: topic.subscribe([0], woken.set))
    control.answer(control.next())
    subscription = subscribing.result()
    control.cut()
    control = peer.control()
    error = wire.error_to_dict(TopicDeleted("orders", TOPIC.id, is_made_again=False))
    control.say(id=control.next()["id"], error=error)
    assert woken.wait(20)
    control.say(id=control.next()["id"], error=error)
    subscription.close()
    calls: list[str] = []

    def refuse_next(timeout_s: float) -> None:
        request = control.next(timeout_s)
        calls.append(request["call"])
        control.say(id=request["id"], error=error)

    while "topic.unsubscribe" not in calls and len(calls) < 10:
        refuse_next(20.0)
    with suppress(queue.Empty):
        for _ in range(10):
            refuse_next(0.5)
    assert "topic.unsubscribe" in calls
    assert calls.count("topic.subscribe") <= 1, "more than the one that was on its way"
    log.close()


def test_a_closed_log_asks_for_no_subscription(peer: Peer) -> None:
    """Another log may share the connection, on which the subscription would stay."""
    log, topic, control = open_topic(peer)
    assert isinstance(topic, RemoteTopic)
    subscriptions = topic._session.subscriptions
    with closing(open_log(peer.url)):
        log.close()
        with pytest.raises(Closed):
            subscriptions.add("orders", TOPIC.id, [0], print, 1.0)
        assert control.is_quiet()


# Topics.


def test_a_topic_whose_creation_was_not_answered_is_known_by_its_id(peer: Peer) -> None:
    log = open_log(peer.url)
    exists = {"code": "log.topic-exists", "bases": ["log"], "message": "topic 'orders' already exists"}
    for there in (TOPIC, new_topic("orders")):
        creating = aside(lambda: log.create_topic(TOPIC))
        control = peer.control()
        request = control.next()
        assert (request["call"], request["settings"]["id"]) == ("log.create_topic", TOPIC.id)
        control.cut()
        control = peer.control()
        control.say(id=control.next()["id"], error=exists)
        request = control.next()
        assert request["call"] == "log.topics"
        control.answer(request, topics=[wire.topic_to_dict(there)])
        if there is TOPIC:
            assert creating.result().topic == TOPIC, "the first try has made it"
        else:
            assert isinstance(creating.exception(), TopicExists)
        control.cut()
    log.close()


def test_a_deletion_is_sent_once(peer: Peer) -> None:
    log, _, control = open_topic(peer)
    deleting = aside(lambda: log.delete_topic("orders"))
    assert control.next()["call"] == "log.delete_topic"
    control.cut()
    assert isinstance(deleting.exception(), OutcomeUnknown)
    listing = aside(log.topics)
    control = peer.control()
    request = control.next()
    assert request["call"] == "log.topics", "the deletion was sent again"
    control.answer(request, topics=[])
    listing.result()
    log.close()


def test_the_identity_of_the_hub_is_asked_for_now_and_then(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    log, _, control = open_topic(peer)
    asking = aside(lambda: log.identity(joins=True))
    request = control.next()
    assert (request["call"], request["joins"]) == ("hub.identity", True)
    control.answer(request, hub="h", place="there")
    assert asking.result() == ("h", "there")
    assert log.identity(joins=False) == ("h", "there")
    assert control.is_quiet()
    monkeypatch.setattr(log_module, "IDENTITY_S", 0.0)
    asking = aside(lambda: log.identity(joins=False))
    control.answer(control.next(), hub=None, place="")
    assert asking.result() is None
    log.close()


# Reading.


def batch_message(partition: int, offset: int, values: list[bytes]) -> bytes:
    header, body = flight.ipc_message(records(values).serialize())
    return flight.flight_data(flight.FlightData(header, body, wire.dumps({"partition": partition, "offset": offset})))


def test_many_partitions_are_read_by_one_request(peer: Peer) -> None:
    log, topic, _ = open_topic(peer)
    gap = flight.FlightData(app_metadata=wire.dumps({"partition": 2, "offset": 3, "next": 9}))
    trimmed = {"code": "log.offset-trimmed", "bases": ["log"], "message": "gone"}
    trimmed["fields"] = {"place": "orders/3", "offset": 0, "first_offset": 5}
    error = flight.FlightData(app_metadata=wire.dumps({"partition": 3, "error": trimmed}))
    messages = [batch_message(0, 7, [b"a", b"b"]), flight.flight_data(gap), flight.flight_data(error)]
    peer.reads.put(messages)
    found = topic.fetch({0: 7, 1: 2, 2: 3, 3: 0}, 1000)
    ticket = peer.tickets.get(timeout=20)
    assert ticket["positions"] == [[0, 7], [1, 2], [2, 3], [3, 0]]
    assert (ticket["topic"], ticket["topic_id"], ticket["max_bytes"]) == ("orders", TOPIC.id, 1000)
    assert found.keys() == {0, 2, 3}
    assert [each.base_offset for each in found[0].batches] == [7]
    assert found[0].batches[0].records.column("value").to_pylist() == [b"a", b"b"]
    assert found[2].batches[0].next_offset == 9
    assert getattr(found[3].error, "first_offset", None) == 5
    assert peer.tickets.empty()
    log.close()


def test_a_read_survives_a_server_that_is_away(peer: Peer) -> None:
    log, topic, _ = open_topic(peer)
    port = peer.port
    peer.stop()
    reading = aside(lambda: topic.read(0, 7))
    with Peer(port) as next_peer:
        next_peer.reads.put(ConnectionResetError())
        next_peer.reads.put([batch_message(0, 7, [b"a"])])
        next_peer.control()
        assert [each.base_offset for each in reading.result()] == [7]
        log.close()


def test_an_error_that_ends_a_read_is_raised(peer: Peer) -> None:
    log, topic, _ = open_topic(peer)
    peer.reads.put(TopicDeleted("orders", TOPIC.id, is_made_again=True))
    with pytest.raises(TopicDeleted) as deleted:
        topic.fetch({0: 7})
    assert deleted.value.is_made_again
    log.close()


def test_a_read_fails_when_the_patience_is_over(peer: Peer) -> None:
    log, topic, _ = open_topic(peer, "?patience=0.3")
    peer.stop()
    with pytest.raises(ReadFailed, match=r"127\.0\.0\.1"):
        topic.read(0, 7)
    log.close()
    with pytest.raises(Closed):
        topic.read(0, 7)


# Appending.


def test_an_append_is_sent_as_one_and_answered_for_each_batch(peer: Peer) -> None:
    log, topic, _ = open_topic(peer)
    appending = aside(lambda: topic.append([append(1), append(2)]))
    put = peer.puts.get(timeout=20)
    first = put.next_data()
    assert first is not None
    assert wire.loads(first.command or b"") == {"topic": "orders", "topic_id": TOPIC.id}
    about = [put.next(), put.next()]
    origin = {"producer": uuid.UUID(int=7).hex, "epoch": 0, "sequence": 0}
    assert about == [{"partition": 1, **origin, "more": True}, {"partition": 2, **origin}]
    assert not appending.done()
    put.put_result({"offset": 4}, {"offset": 9, "duplicate": True})
    assert appending.result() == [StoredAt(4), StoredAt(9, is_duplicate=True)]
    again = aside(lambda: topic.append([append(sequence=1)]))
    assert put.next()["sequence"] == 1, "the stream is kept"
    error = {"code": "log.sequence-gap", "bases": ["log"], "message": "send 0 first"}
    put.put_result({"error": error, "maybe": False})
    (outcome,) = again.result()
    assert isinstance(outcome, NotStored)
    assert wire.error_of(error).args == outcome.error.args
    log.close()


def test_many_batches_are_sent_as_several_appends_and_each_partition_in_one(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server bounds what one append may have, and a topic may have more partitions than that."""
    monkeypatch.setattr(appends_module, "PART_BATCHES", 2)
    log, topic, _ = open_topic(peer)
    appending = aside(lambda: topic.append([append(0), append(1), append(0, 1), append(2), append(3)]))
    put = peer.puts.get(timeout=20)
    put.next_data()
    first = [put.next(), put.next()]
    assert [(each["partition"], each["sequence"], "more" in each) for each in first] == [(0, 0, True), (0, 1, False)]
    others = [put.next(), put.next(), put.next()]
    assert [(each["partition"], "more" in each) for each in others] == [(1, True), (2, False), (3, False)], (
        "they are sent before the first append is answered"
    )
    put.put_result({"offset": 4}, {"offset": 5})
    put.put_result({"offset": 7}, {"offset": 8})
    put.cut()
    outcomes = appending.result()
    assert [type(each) for each in outcomes] == [StoredAt, StoredAt, StoredAt, StoredAt, MaybeStored]
    log.close()


def test_w1_appends_that_were_not_sent_when_the_stream_broke_are_known_not_to_be_stored(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer reads a few batches and no more, so gRPC's flow control keeps the client from sending all of them."""
    monkeypatch.setattr(appends_module, "PART_BATCHES", 1)
    log, topic, _ = open_topic(peer)
    batches = [
        Append.encoded(0, records([bytes(1 << 20)]), Origin(uuid.UUID(int=7), 0, number)) for number in range(40)
    ]
    # Of one partition each, because batches of one partition are one append.
    monkeypatch.setattr(topic, "partitions", len(batches))
    appending = aside(lambda: topic.append([each._replace(partition=n) for n, each in enumerate(batches)]))
    put = peer.puts.get(timeout=20)
    for _ in range(3):  # the schema and two batches
        put.next_data()
    put.put_result({"offset": 4})
    put.cut()
    first, second, *_, last = appending.result()
    assert first == StoredAt(4)
    assert isinstance(second, MaybeStored)
    assert isinstance(last, NotStored)
    assert isinstance(last.error, AppendFailed)
    assert not isinstance(last.error, AppendUnknown)
    log.close()


@pytest.mark.parametrize("outcomes", [[], [{"offset": 1}, {"offset": 2}], None])
def test_w1_an_answer_of_the_wrong_length_proves_nothing(peer: Peer, outcomes: list[dict[str, int]] | None) -> None:
    log, topic, _ = open_topic(peer)
    appending = aside(lambda: topic.append([append()]))
    put = peer.puts.get(timeout=20)
    put.next_data()
    put.next_data()
    if outcomes is None:
        put._answers.put(flight.result(b'{"offset": 4}'))
    else:
        put.put_result(*outcomes)
    (outcome,) = appending.result()
    assert isinstance(outcome, MaybeStored)
    log.close()


def test_w1_an_error_after_the_first_of_several_appends_hides_nothing_of_what_is_stored(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appends_module, "PART_BATCHES", 1)
    log, topic, _ = open_topic(peer)
    appending = aside(lambda: topic.append([append(0), append(1), append(2)]))
    put = peer.puts.get(timeout=20)
    for _ in range(2):
        put.next_data()
    put.put_result({"offset": 4})
    put.next_data()
    put.cut(TopicDeleted("orders", TOPIC.id, is_made_again=False))
    stored, *refused = appending.result()
    assert stored == StoredAt(4)
    assert [type(each.error) for each in refused if isinstance(each, NotStored)] == [TopicDeleted] * 2
    log.close()


def test_w1_an_append_whose_answer_is_lost_may_be_stored_and_is_not_sent_again(peer: Peer) -> None:
    log, topic, _ = open_topic(peer)
    appending = aside(lambda: topic.append([append(), append(1)]))
    put = peer.puts.get(timeout=20)
    put.next_data()
    put.next_data()
    put.next_data()
    put.cut()
    for outcome in appending.result():
        assert isinstance(outcome, MaybeStored)
        assert isinstance(outcome.error, AppendUnknown)
    assert peer.puts.empty(), "the append was sent again"
    log.close()


def test_an_append_waits_for_a_server_before_it_is_sent(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    log, topic, _ = open_topic(peer)
    port = peer.port
    stop(peer, caplog)
    appending = aside(lambda: topic.append([append()]))
    with Peer(port) as next_peer:
        next_peer.control()
        put = next_peer.puts.get(timeout=20)
        put.next_data()
        put.next_data()
        put.put_result({"offset": 4})
        assert appending.result() == [StoredAt(4)]
        log.close()


def test_an_append_that_was_not_sent_within_the_patience_is_not_stored(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    log, topic, _ = open_topic(peer, "?patience=0.3")
    stop(peer, caplog)
    (outcome,) = topic.append([append()])
    assert isinstance(outcome, NotStored)
    assert type(outcome.error) is AppendFailed
    log.close()


def test_an_append_that_is_not_answered_in_time_may_be_stored(peer: Peer) -> None:
    log, topic, _ = open_topic(peer, "?patience=0.3")
    (outcome,) = aside(lambda: topic.append([append()])).result(10)
    assert isinstance(outcome, MaybeStored)
    log.close()


def test_an_idle_stream_that_the_server_has_ended_is_replaced(peer: Peer) -> None:
    log, topic, _ = open_topic(peer)
    for offset in range(3):
        appending = aside(lambda: topic.append([append()]))
        put = peer.puts.get(timeout=20)
        put.next_data()
        put.next_data()
        put.put_result({"offset": offset})
        assert appending.result() == [StoredAt(offset)]
        put.end()
        assert put.next_data() is None
        eventually(lambda: not any(each.is_active for each in topic._session.connection().puts._idle))
    log.close()


def test_an_error_that_ends_the_stream_of_an_append_is_raised(peer: Peer) -> None:
    log, topic, _ = open_topic(peer)
    appending = aside(lambda: topic.append([append()]))
    peer.puts.get(timeout=20).cut(TopicDeleted("orders", TOPIC.id, is_made_again=True))
    with pytest.raises(TopicDeleted):
        appending.result()
    with pytest.raises(InvalidRecord, match="has no partition 4"):
        topic.append([append(4)])
    log.close()


def test_w1_an_append_whose_stream_ends_with_the_token_is_not_stored(peer: Peer) -> None:
    """The server answers what it stores before it ends the stream. Without its error nothing is known: the connection
    may have been lost while the server stored the append, before the token was revoked. The same append may be sent
    again after Closed, and its origin then says whether it is stored."""
    log, topic, _ = open_topic(peer)
    cuts: list[tuple[Exception | None, type[Exception]]] = [
        (Unauthenticated("revoked"), Unauthenticated),
        (None, AppendUnknown),
        (Closed("the permissions have changed: connect again"), AppendUnknown),
    ]
    for error, expected in cuts:
        appending = aside(lambda: topic.append([append()]))
        put = peer.puts.get(timeout=20)
        put.next_data()
        put.next_data()
        put.cut(error)
        if expected is Unauthenticated:
            with pytest.raises(Unauthenticated, match="revoked"):
                appending.result()
            continue
        (outcome,) = appending.result()
        assert isinstance(outcome, MaybeStored)
        assert isinstance(outcome.error, expected)
    log.close()


# Connecting.


def test_a_goodbye_instead_of_a_hello_is_a_server_that_is_away(peer: Peer) -> None:
    opening = aside(lambda: registries.open(peer.url))
    first = peer.controls.get(timeout=20)
    first.say(goodbye={"reason": "the server is stopping"})
    peer.control()
    opening.result().close()


def test_a_server_that_ends_every_stream_at_once_is_not_asked_without_a_pause(peer: Peer) -> None:
    registry, control = open_registry(peer)
    with registry:
        watching = aside(lambda: registry.watch("a/"))  # so that there must be a stream
        control.answer(control.next())
        watch = watching.result()
        control.cut()
        began = time.monotonic()
        for _ in range(8):
            peer.control().cut()
        assert time.monotonic() - began > 0.5, "pauses of 0.025 s at least, then of 0.125 s"
        watch.close()


def test_handles_with_one_address_share_one_stream_until_the_last_is_closed(peer: Peer) -> None:
    registry, control = open_registry(peer)
    log = open_log(peer.url)
    with registries.open(peer.url) as other:
        listing = aside(log.topics)
        control.answer(control.next(), topics=[])
        assert listing.result() == []
        registry.close()
        reading = aside(lambda: other.get("a"))
        control.answer(control.next(), entry=None)
        reading.result()
    log.close()
    assert control.next_data() is None, "the stream ends with the last handle"
    assert peer.controls.empty()


def test_handles_that_were_dropped_without_close_let_go_of_the_connection(peer: Peer) -> None:
    handles: list[object] = []
    registry, control = open_registry(peer)
    handles += [registry, open_log(peer.url)]
    del registry
    with pytest.warns(ResourceWarning, match="dropped without close"):
        handles.clear()
    gc.collect()
    assert control.next_data() is None, "the stream ends with the last handle"


def test_the_next_address_is_tried(peer: Peer) -> None:
    with Peer() as gone:
        dead = gone.port
    opening = aside(lambda: registries.open(f"pxrs://127.0.0.1:{dead},127.0.0.1:{peer.port}"))
    peer.control()
    opening.result().close()


def test_a_server_of_another_version_is_told(peer: Peer) -> None:
    opening = aside(lambda: registries.open(peer.url))
    peer.controls.get(timeout=20).hello(version=0)
    with pytest.raises(WireMismatch, match="upgrade pxrs on the server"):
        opening.result()
    opening = aside(lambda: registries.open(peer.url))
    peer.controls.get(timeout=20).cut(WireMismatch(1, 2, 3))
    with pytest.raises(WireMismatch, match="upgrade pxrs on the client"):
        opening.result()


def test_a_later_version_of_the_server_is_spoken_to(peer: Peer) -> None:
    opening = aside(lambda: registries.open(peer.url))
    peer.controls.get(timeout=20).hello(version=7)
    opening.result().close()


def test_a_token_is_sent_and_never_shown(peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "token").write_text("from-the-file\n")
    for options, secret in (("", "from-the-environment"), (f"?token_file={file}", "from-the-file")):
        monkeypatch.setenv("PXRS_TOKEN", "from-the-environment")
        opening = aside(lambda options=options: registries.open(peer.url + options))  # type: ignore[misc]
        control = peer.controls.get(timeout=20)
        assert control.metadata["authorization"] == f"Bearer {secret}"
        control.cut(Unauthenticated("the token is not known"))
        error = opening.exception()
        assert isinstance(error, Unauthenticated)
        assert secret not in f"{error!r} {error}"


def test_an_address_where_no_server_is_fails_in_time() -> None:
    with Peer() as gone:
        url = gone.url
    with pytest.raises(RegistryUnavailable, match=r"127\.0\.0\.1"):
        registries.open(f"{url}?timeout=0.3")


@pytest.mark.parametrize(
    ("address", "names"),
    [
        ("pxrs://localhost/folder", "no path"),
        ("pxrs://", "the host is empty"),
        ("pxrs://localhost?colour=red", "colour"),
        ("pxrs://localhost?namespace=prod", "namespace"),
        ("pxrs://localhost?patience=soon", "patience"),
        ("pxrs://localhost?ca_file=/nowhere/ca.pem", "no such file"),
        ("pxrs://localhost?cert_file={file}", "together"),
        ("pxrs://localhost?ca_file={file}&tls=false", "contradicts"),
        ("pxrs://user:secret@localhost", "token_file"),
        ("pxrs://localhost?token_file={empty}", "contains no token"),
    ],
)
def test_a_bad_address_is_refused_at_once(address: str, names: str, tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("secret")
    (empty := tmp_path / "empty").write_text("")
    for opener in (registries.open, open_log):
        with pytest.raises(InvalidUrl, match=names) as refused:
            opener(address.format(file=file, empty=empty))
        assert "secret" not in str(refused.value)


def test_r11_a_forked_child_is_told_at_once(peer: Peer) -> None:
    log, topic, _ = open_topic(peer)
    calls: list[Any] = [
        lambda: topic.read(0, 0),
        lambda: topic.append([append()]),
        log.topics,
        lambda: registries.open(peer.url),
        lambda: open_log(peer.url),
    ]
    pid = os.fork()
    if pid == 0:  # the child reports by its exit code alone
        refused = 0
        try:
            for call in calls:
                try:
                    call()
                except UsedAfterFork:
                    refused += 1
            log.close()
        finally:
            os._exit(refused)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == len(calls)
    log.close()
