"""W5: what one client can make the server hold is bounded, and it slows down itself alone."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

import pxrs
from pxrs.errors import InvalidArgument, InvalidRecord, LeaseExpired, ServerBusy
from pxrs.hub import Hub
from pxrs.log.outcomes import Outcome
from pxrs.remote import flight, wire
from pxrs.server.appends import AppendStream
from pxrs.server.auth import tokens
from pxrs.server.given import ITEMS_MAX, Given
from pxrs.server.grants import Grants
from pxrs.server.served import Send
from pxrs.server.serving import Server
from tests.integration.server.conftest import Running, Start
from tests.integration.server.peer import (
    Control,
    Put,
    WithToken,
    act,
    connect,
    error_of,
    get,
    method,
    records,
    rows,
)

SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 65_536), ("grpc.http2.bdp_probe", 0))


def until(look: Callable[[], object], timeout_s: float = 15.0) -> None:
    """Wait until the function returns a true value."""
    end = time.monotonic() + timeout_s
    while not look():
        assert time.monotonic() < end, "waited too long"
        threading.Event().wait(0.01)


def one(server: Server) -> Any:
    (stream,) = server.service.streams
    return stream


@contextmanager
def blocked_gets(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """While the block runs, `registry.get` waits. Gives the keys that were asked for."""
    opened, asked, real = threading.Event(), [], hub.registry.get

    def slow(key: str) -> Any:
        asked.append(key)
        opened.wait(20)
        return real(key)

    with monkeypatch.context() as patched:
        patched.setattr(hub.registry, "get", slow)
        try:
            yield asked
        finally:
            opened.set()


def test_calls_max_unanswered_calls_are_read_and_no_more(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    running = start(calls_max=5, threads=2, answer_bytes_max=100 << 20)
    with connect(running.address) as channel, Control(channel) as control:
        with blocked_gets(running.hub, monkeypatch) as asked:
            numbers = [control.begin("registry.get", key="a") for _ in range(50)]
            until(lambda: len(asked) == 2)  # as many as there are threads
            until(lambda: running.ask(lambda server: len(one(server)._tasks)) == 5)
            threading.Event().wait(0.1)
            assert running.ask(lambda server: len(one(server)._tasks)) == 5
        assert [control.answer(number)["result"] for number in numbers] == [{"entry": None}] * 50


def test_a_renewal_does_not_wait_behind_blocked_calls(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    running = start(threads=2)
    with connect(running.address) as channel, Control(channel) as control:
        secret = control.make("registry.lease", ttl=5)["secret"]
        with blocked_gets(running.hub, monkeypatch) as asked:
            numbers = [control.begin("registry.get", key="a") for _ in range(40)]
            until(lambda: len(asked) == 2)
            assert control.make("registry.renew", secret=secret)["left_s"] > 0
        for number in numbers:
            control.answer(number)


def test_answers_that_nobody_takes_stop_further_calls(start: Start) -> None:
    running = start(answer_bytes_max=2 << 20, threads=4)
    value = "A" * 400_000
    with connect(running.address, SMALL_WINDOW) as channel, Control(channel) as control:
        control.make("registry.commit", put={"a": value})
        numbers = [control.begin("registry.get", key="a") for _ in range(100)]

        def held() -> int:
            answers = running.ask(lambda server: [len(message) for message, _ in one(server)._answers])
            return sum(answers)

        until(lambda: held() > 1 << 20)
        seen = 0
        for _ in range(20):
            threading.Event().wait(0.02)
            seen = max(seen, held())
        assert seen < 2 * (2 << 20), "not the 40 MB that 100 answers have"
        with connect(running.address) as other:
            assert act(other, "server.ping")["wire"] == 1
        assert all(control.answer(number)["result"]["entry"][1] == value for number in numbers)


def test_bytes_of_unanswered_calls_are_bounded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    running = start(control_bytes_max=1 << 20, threads=2)
    with connect(running.address) as channel, Control(channel) as control:
        with blocked_gets(running.hub, monkeypatch) as asked:
            numbers = [control.begin("registry.get", key="a", padding="x" * 300_000) for _ in range(20)]
            until(lambda: len(asked) == 2)
            until(lambda: running.ask(lambda server: len(one(server)._tasks)) == 3)
            threading.Event().wait(0.1)
            assert running.ask(lambda server: len(one(server)._tasks)) == 3
        for number in numbers:
            control.answer(number)


def test_a_control_message_that_is_too_long_ends_the_stream(start: Start) -> None:
    running = start(request_bytes_max=10_000)
    with connect(running.address) as channel:
        with Control(channel) as control:
            control.begin("registry.get", key="a" * 10_000)
            with pytest.raises(grpc.RpcError) as failed:
                control.take()
            assert isinstance(error_of(failed.value), InvalidArgument)
        with pytest.raises(grpc.RpcError) as failed:
            act(channel, "registry.get", key="a" * 10_000)
        assert isinstance(error_of(failed.value), InvalidArgument)


def test_watched_prefixes_of_a_stream_are_bounded(start: Start) -> None:
    running = start(watches_max=3)
    with connect(running.address) as channel, Control(channel) as control:
        control.make("registry.watch", prefixes=["a/", "b/"], number=1)
        with pytest.raises(ServerBusy):
            control.make("registry.watch", prefixes=["c/", "d/"], number=2)
        control.make("registry.watch", prefixes=["c/"], number=2)
        with pytest.raises(InvalidArgument, match="number 2 is in use"):
            control.make("topic.subscribe", topic="t", partitions=[0], number=2)
        control.make("registry.unwatch", number=1)
        control.make("registry.watch", prefixes=["d/", "e/"], number=1)
        with Control(channel) as other:
            other.make("registry.watch", prefixes=["a/"], number=1)


def test_subscriptions_of_a_stream_are_bounded(start: Start) -> None:
    running = start(subscriptions_max=2)
    running.hub.create_topic("t", partitions=2)
    with connect(running.address) as channel, Control(channel) as control:
        for number in (1, 2):
            control.make("topic.subscribe", topic="t", partitions=[0], number=number)
        with pytest.raises(ServerBusy):
            control.make("topic.subscribe", topic="t", partitions=[1], number=3)
        control.make("topic.unsubscribe", number=1)
        control.make("topic.subscribe", topic="t", partitions=[1], number=3)


def test_open_streams_are_bounded_and_health_is_still_told(start: Start) -> None:
    running = start(streams_max=2)
    with connect(running.address) as channel, Control(channel), Control(channel):
        with pytest.raises(grpc.RpcError) as failed:
            act(channel, "server.ping")
        assert isinstance(error_of(failed.value), ServerBusy)
        assert channel.unary_unary(method("Check", "grpc.health.v1.Health"))(b"", timeout=10) == b"\x08\x01"


def test_connections_are_bounded(start: Start) -> None:
    running = start(connections_max=2)
    with connect(running.address) as first, connect(running.address) as second, connect(running.address) as third:
        assert act(first, "server.ping")
        assert act(second, "server.ping")
        with pytest.raises(grpc.RpcError) as failed:
            act(third, "server.ping")
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert act(first, "server.ping")


# Appends.


def test_half_sent_appends_give_their_room_back(start: Start) -> None:
    """Two streams hold all room with the beginnings of their appends, and wait for room for the rest."""
    running = start(append_bytes_max=1 << 20, append_rest_s=2.0)
    running.hub.create_topic("t", partitions=1)
    data = records(100, 4_500).serialize()
    with connect(running.address) as channel, Put(channel, "t") as first, Put(channel, "t") as second:
        for put in (first, second):
            put.send(data, more=True)
        until(lambda: running.ask(lambda server: server.service.appending.held) > 800_000)
        with Put(channel, "t") as third:
            third.send(data)
            for put in (first, second):
                with pytest.raises(grpc.RpcError) as failed:
                    put.outcome()
                assert isinstance(error_of(failed.value), ServerBusy)
            assert third.outcome() == {"offset": 0}
        assert running.ask(lambda server: server.service.appending.held) == 0
        assert len(rows(channel, topic="t", positions=[[0, 0]])) == 100


def test_appends_that_wait_for_room_are_stored_in_the_end(start: Start) -> None:
    running = start(append_bytes_max=200_000)
    running.hub.create_topic("t", partitions=1)
    data = records(100, 1_500).serialize()
    with connect(running.address) as channel:
        puts = [Put(channel, "t") for _ in range(8)]
        for put in puts:
            for _ in range(3):
                put.send(data)
        offsets = sorted(put.outcome()["offset"] for put in puts for _ in range(3))
        assert offsets == list(range(0, 2400, 100))
        for put in puts:
            put.cancel()
    until(lambda: running.ask(lambda server: server.service.appending.held) == 0)


def test_answers_to_appends_that_nobody_reads_hold_no_room(start: Start) -> None:
    running = start(append_bytes_max=1 << 20)
    running.hub.create_topic("t", partitions=1)
    data = records(100, 3_000).serialize()
    with connect(running.address) as channel, Put(channel, "t") as silent:
        for _ in range(8):
            silent.send(data)
        until(lambda: running.hub.topic("t").log.end(0) == 800)
        until(lambda: running.ask(lambda server: server.service.appending.held) == 0)


def test_w1_a_client_that_does_not_take_its_answers_loses_its_stream_and_is_not_told_that_nothing_was_stored(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = AppendStream._answer

    async def answer_soon(stream: AppendStream, outcomes: Sequence[Outcome], send: Send) -> None:
        """`_answer` with a short `append_rest_s`, which is also the limit for the rest of an append: that one stays."""
        limits = dataclasses.replace(stream._limits, append_rest_s=0.3)
        await answer(cast("AppendStream", SimpleNamespace(_limits=limits)), outcomes, send)

    monkeypatch.setattr(AppendStream, "_answer", answer_soon)
    auth = str(tmp_path / "tokens.json")
    created, token = tokens.create(auth, "silent", ["topic:t=write"], now=0.0)
    running = start(auth)
    topic = running.hub.create_topic("t", partitions=2).log
    data, wrong = records(1).serialize(), {"producer": "1" * 32, "epoch": 0, "sequence": 7, "more": True}
    with connect(running.address, SMALL_WINDOW) as plain:
        silent = Put(grpc.intercept_channel(plain, WithToken(token)), "t")
        for _ in range(8):
            for _ in range(200):  # refused, so that the answer is long
                silent.send(data, 1, **wrong)
            silent.send(data, 0)

        def held() -> tuple[int, int]:
            found: tuple[int, int] = running.ask(
                lambda server: (len(server.service.streams), server.service.appending.held)
            )
            return found

        until(lambda: topic.end(0) > 0)
        until(lambda: held() == (0, 0))
        stored = topic.end(0)
        # gRPC sends the status behind the answers, so the call stays open until the client takes them, and is counted.
        counted = running.ask(lambda server: (server.service.open, dict(server.service._open_by_token)))
        assert counted == (1, {created.id: 1})
        outcomes: list[dict[str, Any]] = []
        with pytest.raises(grpc.RpcError) as failed:
            outcomes += iter(silent.outcome, None)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert wire.ERROR_METADATA not in dict(failed.value.trailing_metadata())
        assert stored < 8, "the server has not stored what came behind the answer that was not taken"
        assert stored - 1 <= sum("offset" in each for each in outcomes) <= stored
        until(lambda: running.ask(lambda server: server.service.open) == 0)


def test_an_append_that_is_cut_stores_nothing_and_holds_nothing(running: Running) -> None:
    running.hub.create_topic("t", partitions=1)
    data = records(100, 1_000).serialize()
    for is_ended in (False, True):
        with connect(running.address) as channel:
            put = Put(channel, "t")
            put.send(data, more=True)
            until(lambda: running.ask(lambda server: server.service.appending.held) > 100_000)
            if is_ended:
                put.sender.end()
                with pytest.raises(grpc.RpcError) as failed:
                    put.outcome()
                assert isinstance(error_of(failed.value), InvalidRecord)
            else:
                put.cancel()
            until(lambda: running.ask(lambda server: server.service.appending.held) == 0)
    assert running.hub.topic("t").log.end(0) == 0


def test_an_append_has_a_bounded_number_of_batches(start: Start) -> None:
    running = start(append_batches_max=3)
    running.hub.create_topic("t", partitions=1)
    with connect(running.address) as channel, Put(channel, "t") as put:
        for _ in range(4):
            put.send(records().serialize(), more=True)
        with pytest.raises(grpc.RpcError) as failed:
            put.outcome()
        assert "3 batches" in str(error_of(failed.value))


def test_an_append_that_has_more_bytes_than_there_is_room_is_refused_at_once(start: Start) -> None:
    """It would wait for the room that it holds itself."""
    running = start(append_bytes_max=250_000)
    running.hub.create_topic("t", partitions=1)
    data = records(100, 1_000).serialize()
    with connect(running.address) as channel, Put(channel, "t") as put:
        for _ in range(3):
            put.send(data, more=True)
        with pytest.raises(grpc.RpcError) as failed:
            put.outcome()
        assert "250,000 bytes" in str(error_of(failed.value))
    until(lambda: running.ask(lambda server: server.service.appending.held) == 0)


@pytest.mark.parametrize("limits", [{"append_batches_max": 10}, {"append_bytes_max": 1 << 20, "append_rest_s": 1.0}])
def test_a_producer_keeps_to_the_bounds_of_an_append(start: Start, limits: dict[str, Any]) -> None:
    running = start(**limits)
    running.hub.create_topic("t", partitions=25)
    with pxrs.open(f"pxrs://{running.address}") as hub, hub.producer("t") as producer:
        for partition in range(25):
            producer.send(bytes(100_000), partition=partition)
        producer.flush()
    log = running.hub.topic("t").log
    assert [bounds.end for bounds in log.bounds(range(25)).values()] == [1] * 25


# Reads.


def fill(hub: Hub, count: int, size: int = 1 << 20) -> None:
    from pxrs.log.contract import Append

    log = hub.create_topic("t", partitions=1).log
    log.append([Append.encoded(0, records(16, size // 16, 16 * number)) for number in range(count)])


def test_a_slow_reader_holds_two_batches_and_slows_nobody(start: Start) -> None:
    running = start(threads=2)
    fill(running.hub, 40)
    with connect(running.address, SMALL_WINDOW) as slow, connect(running.address) as channel:
        calls = [get(slow, topic="t", partition=0, start=0, end=640) for _ in range(20)]
        until(lambda: running.ask(lambda server: server.service.reading.budget.held) > 10 << 20)
        threading.Event().wait(0.2)
        assert running.ask(lambda server: server.service.reading.budget.held) < 50 << 20, "of 800 MB"
        assert len(rows(channel, topic="t", partition=0, start=0, end=640)) == 640
        for call in calls:
            call.cancel()
        until(lambda: running.ask(lambda server: server.service.reading.budget.held) == 0)


def test_stalled_readers_lose_their_streams_when_others_need_the_room(start: Start) -> None:
    running = start(read_held_bytes_max=8 << 20, read_stalled_s=2.0)
    fill(running.hub, 20)
    with connect(running.address, SMALL_WINDOW) as slow, connect(running.address) as channel:
        calls = [get(slow, topic="t", partition=0, start=0, end=320) for _ in range(8)]
        until(lambda: running.ask(lambda server: server.service.reading.budget.held) >= 6 << 20)
        assert len(rows(channel, topic="t", partition=0, start=0, end=320)) == 320
        ended = []
        for call in calls:
            try:
                list(call)
            except grpc.RpcError as failure:
                ended.append(type(error_of(failure)))
        assert set(ended) == {ServerBusy}


def test_w5_readers_that_pause_keep_no_others_waiting(start: Start) -> None:
    """Each has read ahead what there is room for, and pauses for less than `read_stalled_s`."""
    running = start(read_held_bytes_max=8 << 20, read_stalled_s=20.0)
    fill(running.hub, 60, 200_000)
    with connect(running.address, SMALL_WINDOW) as paused, connect(running.address) as channel:
        calls = [get(paused, topic="t", partition=0, start=0, end=960) for _ in range(12)]
        until(lambda: running.ask(lambda server: server.service.reading.budget.held) > 6 << 20)
        began = time.monotonic()
        everything = [(0, number) for number in range(960)]
        assert [row[:2] for row in rows(channel, topic="t", partition=0, start=0, end=960)] == everything
        assert time.monotonic() - began < 10
        for call in calls:  # they get all rows, though some were read twice
            offsets = []
            for data in call:
                message = flight.read_flight_data(data)
                if len(message.app_metadata):
                    offsets.append(json.loads(bytes(message.app_metadata))["offset"])
            assert offsets == list(range(0, 960, 16))
    until(lambda: running.ask(lambda server: server.service.reading.budget.held) == 0)


def test_readers_of_large_batches_hold_no_more_than_there_is_room(start: Start) -> None:
    """The size of a batch is known only when it is read."""
    running = start(read_held_bytes_max=16 << 20, threads=8)
    fill(running.hub, 3, 6 << 20)
    with connect(running.address, SMALL_WINDOW) as slow:
        calls = [get(slow, topic="t", partition=0, start=0, end=48) for _ in range(12)]
        until(lambda: running.ask(lambda server: server.service.reading.budget.held) > 6 << 20)
        most = 0
        for _ in range(30):
            threading.Event().wait(0.02)
            most = max(most, running.ask(lambda server: server.service.reading.budget.held))
        assert most <= 16 << 20
        for call in calls:
            call.cancel()
        until(lambda: running.ask(lambda server: server.service.reading.budget.held) == 0)


def test_one_read_returns_no_more_than_read_bytes_max(start: Start) -> None:
    running = start(read_bytes_max=3 << 20)
    fill(running.hub, 10)
    with connect(running.address) as channel:
        assert len(rows(channel, topic="t", positions=[[0, 0]], max_bytes=10**30)) == 48
        assert len(rows(channel, topic="t", positions=[[0, 0]], max_bytes=1)) == 16


# Leases.


def test_a_lease_that_was_let_go_is_attached_to_again(hub: Hub) -> None:
    grants = Grants(hub.registry, 2)
    secrets = [grants.take(20.0).secret for _ in range(5)]
    assert len(grants) <= 2
    for number, secret in enumerate(secrets):
        with grants.using(secret) as lease:
            hub.registry.commit(ephemeral={f"a/{number}": b""}, lease=lease)
    assert len(hub.registry.scan("a/")) == 5
    assert len(grants) <= 2
    restarted = Grants(hub.registry, 2)
    with restarted.using(secrets[0], is_renewed=True) as lease:
        assert lease.alive
    restarted.end(secrets[0])
    assert [entry.key for entry in hub.registry.scan("a/")] == ["a/1", "a/2", "a/3", "a/4"]
    with pytest.raises(LeaseExpired), restarted.using(secrets[0]):
        pass
    assert len(restarted) == 0


def test_a_lease_is_not_let_go_while_a_call_uses_it(hub: Hub) -> None:
    """Else its commit would be refused although the lease lives."""
    grants = Grants(hub.registry, 1)
    first = grants.take(20.0).secret
    with grants.using(first) as lease:
        others = [grants.take(20.0).secret for _ in range(3)]
        for other in others:
            with grants.using(other):
                pass
        with grants.using(first, is_renewed=True) as again:
            assert again is lease
        hub.registry.commit(ephemeral={"a": b""}, lease=lease)


def test_calls_at_the_same_time_share_one_grant_of_a_lease(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = Grants(hub.registry, 10).take(20.0).secret
    grants, attached, real = Grants(hub.registry, 10), [], hub.registry.attach

    def attach(secret: str, renewed: bool = False) -> Any:
        attached.append(secret)
        threading.Event().wait(0.1)
        return real(secret, renewed)

    monkeypatch.setattr(hub.registry, "attach", attach)
    failures: list[BaseException] = []

    def commit(number: int) -> None:
        try:
            with grants.using(secret) as lease:
                hub.registry.commit(ephemeral={f"a/{number}": b""}, lease=lease)
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=commit, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(attached) == 1


def test_w2_nobody_renews_a_lease_of_a_silent_client(running: Running, channel: grpc.Channel) -> None:
    with Control(channel) as control:
        lease = control.make("registry.lease", ttl=3.0)
        control.make("registry.commit", ephemeral={"a/me": ""}, lease=lease["secret"])
        control.make("registry.watch", prefixes=["a/"], number=1)
        control.wait_for(1)  # the client is there, the connection lives, and the lease ends
        assert control.make("registry.get", key="a/me")["entry"] is None
        with pytest.raises(LeaseExpired):
            control.make("registry.renew", secret=lease["secret"])
        with pytest.raises(LeaseExpired):
            control.make("registry.commit", put={"b": ""}, lease=lease["secret"])


def test_w3_a_clients_deadline_is_never_later_than_the_stores(running: Running, channel: grpc.Channel) -> None:
    clock = running.hub.registry.clock
    with Control(channel) as control:
        sent_at = clock.now()
        lease = control.make("registry.lease", ttl=5.0)
        secret = lease["secret"]
        for name in ("registry.lease", "registry.renew", "registry.attach"):
            if name != "registry.lease":
                sent_at = clock.now()
                lease = control.make(name, secret=secret)
            with running.server.grants.using(secret) as granted:
                assert sent_at < sent_at + lease["left_s"] <= granted.deadline
        control.make("registry.end", secret=secret)
        with pytest.raises(LeaseExpired):
            control.make("registry.attach", secret=secret)


def test_a_scan_is_answered_in_parts_that_fit_a_message(running: Running, channel: grpc.Channel) -> None:
    for number in range(5):
        running.hub.registry.commit(put={f"a/{number}": bytes(600_000)})
    with Control(channel) as control:
        found: list[Any] = []
        after, is_more = None, True
        while is_more:
            answer = control.make("registry.scan", prefix="a/", after=after, limit=None)
            assert sum(len(entry[1]) for entry in answer["entries"]) < 3 << 20
            found += answer["entries"]
            after, is_more = found[-1][0], answer["more"]
        assert [entry[0] for entry in found] == [f"a/{number}" for number in range(5)]


def test_a_json_object_of_too_many_values_is_refused_before_it_is_parsed(channel: grpc.Channel) -> None:
    """Two bytes of JSON can take a hundred bytes of memory."""
    with pytest.raises(grpc.RpcError) as failed:
        act(channel, "log.topics", x=[{}] * ITEMS_MAX)
    assert isinstance(error_of(failed.value), InvalidArgument)
    with Control(channel) as control:
        control.begin("log.topics", x=[[]] * ITEMS_MAX)
        with pytest.raises(grpc.RpcError) as failed:
            control.take()
        assert "values" in str(error_of(failed.value))


def test_a_partition_that_is_named_often_is_looked_at_once() -> None:
    """For a million times the same partition, `topic.bounds` took a minute of a thread."""
    assert Given("topic.bounds", {"partitions": [1, 0, 1, 0]}).partitions() == [1, 0]
    assert Given("staging.publish", {"ends": [7, 7]}).wholes("ends") == [7, 7]


@pytest.mark.parametrize("limit", [0, -1])
def test_a_scan_with_no_limit_to_speak_of_is_refused(channel: grpc.Channel, limit: int) -> None:
    for prefix in ("", "groups/"):
        with pytest.raises(grpc.RpcError) as failed:
            act(channel, "registry.scan", prefix=prefix, limit=limit)
        assert isinstance(error_of(failed.value), InvalidArgument)


def test_w2_a_lease_that_another_server_has_renewed_is_not_told_to_have_ended(hub: Hub, tmp_path: Path) -> None:
    """The deadline that this server knows passes while it renews the lease, which lives on in the store."""
    with pxrs.open(tmp_path / "hub") as second:
        first, other = Grants(hub.registry, 10), Grants(second.registry, 10)
        lease = first.take(1.5)
        renew = lease.stored.renew

        def slow() -> float:
            while lease.alive:
                with other.using(lease.secret, is_renewed=True):
                    threading.Event().wait(0.1)
            return renew()

        lease.stored.renew = slow  # type: ignore[method-assign]
        with first.using(lease.secret, is_renewed=True) as renewed:
            assert renewed.alive
        with first.using(lease.secret) as ended:
            ended.end()
        with pytest.raises(LeaseExpired), first.using(lease.secret, is_renewed=True):
            pass
        first.close()
        other.close()
