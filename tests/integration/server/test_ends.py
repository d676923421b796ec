"""How streams end: the server stops, the client is cut off, cancels, or is silent. Nothing of them is left."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

import pxrs
from pxrs.errors import Closed, Unauthenticated
from pxrs.hub import Hub
from pxrs.remote import flight
from pxrs.server.appends import AppendStream
from pxrs.server.auth import tokens
from pxrs.server.auth.gate import Gate
from pxrs.server.auth.names import HubNames
from pxrs.server.budget import Budget
from pxrs.server.calls import Served
from pxrs.server.control import ControlStream
from pxrs.server.given import Given
from pxrs.server.grants import Grants
from pxrs.server.pools import Pools
from pxrs.server.reads import ReadStream, Room
from pxrs.server.settings import ServerLimits
from pxrs.testing.proxy import Proxy
from pxrs.testing.waiting import PATIENCE_S
from tests.integration.server.conftest import Running, Start
from tests.integration.server.peer import (
    CONTROL,
    HELLO,
    SCHEMA_HEADER,
    Control,
    Put,
    act,
    batch_message,
    connect,
    error_of,
    get,
    json_message,
    method,
    records,
)
from tests.integration.server.test_limits import fill, until


def watches(hub: Hub) -> int:
    return len(hub.registry._watches)


def stop(running: Running) -> threading.Thread:
    """Stop the server from another thread."""
    thread = threading.Thread(
        target=lambda: asyncio.run_coroutine_threadsafe(running.server.stop(), running.loop).result(30)
    )
    thread.start()
    return thread


def test_a_stream_whose_hello_comes_while_the_server_stops_is_ended_without_a_goodbye(start: Start) -> None:
    """A goodbye before the hello would be taken for the answer of something that is no server of pxrs."""
    running = start(drain_s=10.0)
    with connect(running.address) as channel, Control(channel, is_greeted=False) as control:
        until(lambda: running.ask(lambda server: len(server.service.streams)) == 1)
        stopping = stop(running)
        with pytest.raises(grpc.RpcError) as ended:
            control.receive()
        assert isinstance(error_of(ended.value), Closed)
        stopping.join(20)
        assert not stopping.is_alive()


def test_a_server_that_stops_says_goodbye_and_ends_idle_streams_in_order(start: Start) -> None:
    running = start(drain_s=60.0)
    running.hub.create_topic("t", partitions=1)
    with connect(running.address) as channel, Control(channel) as control, Put(channel, "t") as put:
        health = channel.unary_stream(method("Watch", "grpc.health.v1.Health"))(b"", timeout=20)
        assert next(health) == b"\x08\x01"
        put.send(records(3).serialize())
        assert put.outcome() == {"offset": 0}
        began = time.monotonic()
        stopping = stop(running)
        assert control.take() == {"goodbye": {"reason": "the server is stopping"}}
        with pytest.raises(StopIteration):
            control.receive()
        assert control.call.code() is grpc.StatusCode.OK
        with pytest.raises(grpc.RpcError) as failed:
            put.outcome()
        assert isinstance(error_of(failed.value), Closed)
        assert list(health) == [b"\x08\x02"]
        stopping.join()
        assert time.monotonic() - began < 30, "nobody waits for drain_s"


def test_what_is_under_way_is_answered_before_the_server_stops(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    running = start(drain_s=20.0)
    log = running.hub.create_topic("t", partitions=1).log
    opened, begun = threading.Event(), threading.Semaphore(0)

    def slow(real: Any, is_meant: Callable[..., bool]) -> Any:
        def wait(*given: Any) -> Any:
            if is_meant(*given):  # the hub itself reads its registry, and appends its events to another topic
                begun.release()
                opened.wait(20)
            return real(*given)

        return wait

    monkeypatch.setattr(type(log), "append", slow(type(log).append, lambda topic, *_: topic.name == "t"))
    monkeypatch.setattr(running.hub.registry, "get", slow(running.hub.registry.get, lambda key, *_: key == "a"))
    with connect(running.address) as channel, Control(channel) as control, Put(channel, "t") as put:
        put.send(records(3).serialize())
        put.send(records(3).serialize())
        number = control.begin("registry.get", key="a")
        begun.acquire(timeout=10)
        begun.acquire(timeout=10)
        stopping = stop(running)
        assert "goodbye" in control.take()
        with pytest.raises(grpc.RpcError) as failed:
            act(channel, "server.ping")
        assert isinstance(error_of(failed.value), Closed), "no new calls"
        opened.set()
        assert control.answer(number)["result"] == {"entry": None}
        assert put.outcome() == {"offset": 0}
        with pytest.raises(grpc.RpcError) as failed:
            put.outcome()
        assert isinstance(error_of(failed.value), Closed), "the second append was not begun"
        stopping.join()
    assert log.end(0) == 3


def test_w1_an_append_that_is_being_stored_when_its_token_is_revoked_is_answered(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the client would be told that nothing was done, although the batch is stored."""
    log = running.hub.create_topic("t", partitions=1).log
    real, begun, opened = type(log).append, threading.Event(), threading.Event()

    def slow(topic: Any, *given: Any) -> Any:
        if topic.name == "t":  # the event that it was created is appended to another topic at some time
            begun.set()
            opened.wait(20)
        return real(topic, *given)

    monkeypatch.setattr(type(log), "append", slow)
    with connect(running.address) as channel, Put(channel, "t") as put:
        put.send(records(3).serialize())
        put.send(records(3).serialize())
        assert begun.wait(20)
        running.ask(lambda server: [stream.end(Unauthenticated("revoked")) for stream in server.service.streams])
        opened.set()
        assert put.outcome() == {"offset": 0}
        with pytest.raises(grpc.RpcError) as failed:
            put.outcome()
        assert isinstance(error_of(failed.value), Unauthenticated)
    assert log.end(0) == 3


@pytest.fixture
def guarded(start: Start, tmp_path: Path) -> Iterator[tuple[Running, Hub, Callable[[], object]]]:
    """A server with a tokens file, a hub that a client has opened there, and a function that revokes its token."""
    path, held = str(tmp_path / "tokens.json"), tmp_path / "token"
    _, secret = tokens.create(path, "ci", ["topic:t=read,write"], now=0.0)
    held.write_text(secret or "")
    held.chmod(0o600)
    running = start(auth=path)
    running.hub.create_topic("t", partitions=3)
    with pxrs.open(f"pxrs://{running.address}?token_file={held}") as client:
        yield running, client, lambda: tokens.revoke(path, "ci")


def test_w5_what_a_producer_sends_after_its_token_was_revoked_is_unauthenticated(
    guarded: tuple[Running, Hub, Callable[[], object]],
) -> None:
    """Also while the streams of the token are open: the server looks at its tokens, and then ends the streams."""
    running, client, revoke = guarded
    out = client.producer("t")
    assert out.send(b"before", partition=0).result(PATIENCE_S) == (0, 0)
    revoke()
    running.ask(lambda server: server.service._served.gate.refresh())
    for partition in (0, 1, 0):
        with pytest.raises(Unauthenticated):
            out.send(b"after", partition=partition).result(PATIENCE_S)
    until(lambda: not running.ask(lambda server: server.service.streams))
    with pytest.raises(Unauthenticated):
        out.send(b"after", partition=2).result(PATIENCE_S)
    with pytest.raises(Unauthenticated):
        out.close()
    assert [running.hub.topic("t").log.end(partition) for partition in range(3)] == [1, 0, 0]


def test_w1_a_producer_gets_the_answer_to_what_is_being_stored_when_its_token_is_revoked(
    guarded: tuple[Running, Hub, Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control stream ends first. The client must not close the connection, on which the answer comes."""
    running, client, revoke = guarded
    log = running.hub.topic("t").log
    real, begun, opened = type(log).append, threading.Event(), threading.Event()

    def slow(topic: Any, *given: Any) -> Any:
        if topic.name == "t":
            begun.set()
            opened.wait(PATIENCE_S)
        return real(topic, *given)

    monkeypatch.setattr(type(log), "append", slow)
    topic, out = client.topic("t"), client.producer("t")
    receipt = out.send(b"under way", partition=0)
    assert begun.wait(PATIENCE_S)
    later = out.send(b"later", partition=0)  # waits behind the first: another partition would be sent beside it
    revoke()
    until(lambda: running.ask(lambda server: len(server.service.streams)) <= 1)
    with pytest.raises(Unauthenticated):
        topic.log.end(0)  # the client has noticed the end of its control stream
    opened.set()
    assert receipt.result(PATIENCE_S) == (0, 0)
    with pytest.raises(Unauthenticated):
        later.result(PATIENCE_S)
    with pytest.raises(Unauthenticated):
        out.close()


def test_a_server_stops_in_time_though_a_client_does_not_read(start: Start) -> None:
    running = start(drain_s=3.0)
    fill(running.hub, 30)
    with connect(running.address, (("grpc.http2.lookahead_bytes", 65_536),)) as channel:
        call = get(channel, topic="t", partition=0, start=0, end=480)
        until(lambda: running.ask(lambda server: server.service.reading.budget.held) > 0)
        began = time.monotonic()
        stop(running).join()
        assert time.monotonic() - began < 10
        call.cancel()


def test_a_client_that_is_cut_off_leaves_no_watch_and_no_subscription(running: Running) -> None:
    log = running.hub.create_topic("t", partitions=1).log
    before = watches(running.hub)
    with through_proxy(running) as (proxy, control):
        control.make("registry.watch", prefixes=["a/"], number=1)
        control.make("topic.subscribe", topic="t", partitions=[0], number=2)
        assert watches(running.hub) == before + 1
        proxy.cut()
        until(lambda: watches(running.hub) == before)
        until(lambda: not running.ask(lambda server: len(server.service.streams)))
    assert subscriptions(log) == 0


def test_a_black_holed_client_is_noticed_by_keepalive(start: Start) -> None:
    running = start(keepalive_s=1.0, keepalive_timeout_s=1.0)
    before = watches(running.hub)
    with through_proxy(running) as (proxy, control):
        control.make("registry.watch", prefixes=["a/"], number=1)
        proxy.stall()
        until(lambda: watches(running.hub) == before, 20)
        until(lambda: running.ask(lambda server: server.service.open) == 0)


@contextmanager
def through_proxy(running: Running) -> Iterator[tuple[Proxy, Control]]:
    with (
        Proxy("127.0.0.1", int(running.address.rpartition(":")[2])) as proxy,
        connect(f"{proxy.host}:{proxy.port}") as channel,
        Control(channel) as control,
    ):
        yield proxy, control


def test_waits_that_end_while_they_are_made_are_closed(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once by the client's `unwatch`, and once by its cancellation."""
    hub, before, real = running.hub, watches(running.hub), running.hub.registry.watch
    begun, opened = threading.Semaphore(0), threading.Semaphore(0)

    def slow(*prefixes: str) -> Any:
        begun.release()
        opened.acquire(timeout=20)
        return real(*prefixes)

    monkeypatch.setattr(hub.registry, "watch", slow)
    with connect(running.address) as channel:
        with Control(channel) as control:
            number = control.begin("registry.watch", prefixes=["a/"], number=1)
            begun.acquire(timeout=20)
            control.make("registry.unwatch", number=1)
            opened.release()
            assert control.answer(number)["result"] == {}
            until(lambda: watches(hub) == before)
            control.begin("registry.watch", prefixes=["a/"], number=1)
            begun.acquire(timeout=20)
        until(lambda: not running.ask(lambda server: len(server.service.streams)))
        opened.release()
        running.ask(lambda server: server.pools.calls.submit(lambda: None))
        until(lambda: watches(hub) == before)


# Cancelled at every await.


async def messages_of(messages: list[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        await asyncio.sleep(0)
        yield message
    await asyncio.Event().wait()


async def cancel_after(serving: Any, steps: int) -> bool:
    """Let the coroutine run for so many turns of the event loop, then cancel it. Returns whether it was cancelled."""
    task = asyncio.ensure_future(serving)
    for _ in range(steps):
        await asyncio.sleep(0.0005)
        if task.done():
            break
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return bool(task.cancelled())


async def drop(message: bytes) -> None:
    await asyncio.sleep(0.0005)


def served(hub: Hub) -> Served:
    return Served(hub, Grants(hub.registry, 10), "", Gate(None, HubNames(hub.topics, hub.registry.get)))


def test_a_stream_of_appends_that_is_cancelled_anywhere_holds_no_room(hub: Hub) -> None:
    hub.create_topic("t", partitions=1)
    first = flight.flight_data(flight.FlightData(SCHEMA_HEADER, command=b'{"topic":"t"}'))
    batches = [batch_message(records(30, 3_000).serialize(), partition=0, more=bool(n % 3)) for n in range(1, 8)]

    async def run() -> None:
        limits = ServerLimits(threads=2, append_bytes_max=250_000)
        pools, budget = Pools(limits), Budget(limits.append_bytes_max, "appends")
        try:
            for steps in range(60):
                streams = [AppendStream(served(hub), pools, limits, budget) for _ in range(3)]
                await asyncio.gather(
                    *(cancel_after(each.serve(messages_of([first, *batches]), drop), steps) for each in streams)
                )
                assert budget.held == 0
        finally:
            pools.close()

    asyncio.run(run())


def test_a_stream_holds_no_message_beside_the_append_that_it_stores_if_there_is_no_room(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stream would hold one that no budget counts."""
    log = hub.create_topic("t", partitions=1).log
    real, begun, opened = type(log).append, threading.Event(), threading.Event()

    def slow(topic: Any, *given: Any) -> Any:
        if topic.name == "t":  # the event that it was created is appended to another topic at some time
            begun.set()
            opened.wait(20)
        return real(topic, *given)

    monkeypatch.setattr(type(log), "append", slow)
    data = batch_message(records(30, 3_000).serialize(), partition=0)
    taken: list[int] = []

    async def messages() -> AsyncIterator[bytes]:
        yield flight.flight_data(flight.FlightData(SCHEMA_HEADER, command=b'{"topic":"t"}'))
        for number in range(3):
            taken.append(number)
            yield data

    async def run() -> None:
        limits = ServerLimits(threads=2, append_bytes_max=len(data))
        pools, budget, answers = Pools(limits), Budget(limits.append_bytes_max, "appends"), []

        async def send(message: bytes) -> None:
            answers.append(message)

        serving = asyncio.ensure_future(AppendStream(served(hub), pools, limits, budget).serve(messages(), send))
        await asyncio.to_thread(begun.wait, 20)
        await asyncio.sleep(0.05)
        seen = list(taken)
        opened.set()
        await serving
        pools.close()
        assert seen == [0]
        assert len(answers) == 3
        assert budget.held == 0

    asyncio.run(run())


def test_a_read_of_a_range_that_is_cancelled_anywhere_holds_no_room(hub: Hub) -> None:
    fill(hub, 4, 600_000)
    range_of_all = Given("DoGet", {"topic": "t", "partition": 0, "start": 0, "end": 64})

    async def run() -> None:
        limits = ServerLimits(threads=2, read_held_bytes_max=3 << 20)
        pools, room = Pools(limits), Room(limits)
        try:
            for steps in range(40):
                streams = [ReadStream(served(hub), pools, limits, room) for _ in range(3)]
                await asyncio.gather(*(cancel_after(each.serve(range_of_all, drop), steps) for each in streams))
                await asyncio.sleep(0)
                assert room.budget.held == 0
        finally:
            pools.close()

    asyncio.run(run())


def test_a_read_whose_first_message_is_not_taken_gives_its_room_back(hub: Hub) -> None:
    fill(hub, 1)

    async def run() -> None:
        limits = ServerLimits(threads=2)
        pools, room, asked = Pools(limits), Room(limits), asyncio.Event()

        async def never(message: bytes) -> None:
            asked.set()
            await asyncio.Event().wait()

        stream = ReadStream(served(hub), pools, limits, room)
        given = Given("DoGet", {"topic": "t", "partition": 0, "start": 0, "end": 16})
        reading = asyncio.ensure_future(stream.serve(given, never))
        await asyncio.wait_for(asked.wait(), 20)
        assert room.budget.held > 0
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert room.budget.held == 0
        pools.close()

    asyncio.run(run())


def test_a_control_stream_that_is_cancelled_anywhere_leaves_no_wait(hub: Hub) -> None:
    log, before = hub.create_topic("t", partitions=1).log, watches(hub)
    calls: list[Any] = [HELLO]
    for number in range(1, 6):
        calls += [
            {"id": number, "call": "registry.watch", "prefixes": [f"a{number}/"], "number": number},
            {"id": 10 + number, "call": "topic.subscribe", "topic": "t", "partitions": [0], "number": 10 + number},
            {"id": 20 + number, "call": "registry.unwatch", "number": number},
        ]
    messages = [CONTROL, *map(json_message, calls)]

    async def run() -> None:
        limits = ServerLimits(threads=2)
        pools = Pools(limits)
        try:
            for steps in range(60):
                stream = ControlStream(served(hub), pools, limits)
                await cancel_after(stream.serve(messages_of(messages), drop), steps)
        finally:
            pools.close()

    asyncio.run(run())
    until(lambda: watches(hub) == before)
    assert subscriptions(log) == 0


def subscriptions(log: Any) -> int:
    return len(log._ends._subscribers)


def test_room_that_is_granted_to_a_cancelled_waiter_is_given_on() -> None:
    async def run() -> None:
        budget = Budget(10, "bytes")
        assert await budget.take(10) == 10
        waiting = [asyncio.ensure_future(budget.take(5)) for _ in range(3)]
        await asyncio.sleep(0)
        budget.give_back(10)  # the first two have it, and do not know yet
        waiting[0].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [each.done() for each in waiting] == [True, True, True]
        assert waiting[0].cancelled()
        assert budget.held == 10

    asyncio.run(run())
