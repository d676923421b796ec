"""W4, W5: a request is received only after its caller is identified, so that nobody without a token can make the server
hold messages that are half sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from pxrs.errors import ServerBusy
from pxrs.hub import Hub
from pxrs.server import health
from pxrs.server.auth import tokens
from pxrs.server.serving import ServerSettings, serving
from pxrs.server.settings import ServerLimits
from tests.integration.server.conftest import Running
from tests.integration.server.peer import (
    CONTROL,
    HELLO,
    Sender,
    Streaming,
    connect,
    error_of,
    get,
    json_message,
    method,
)
from tests.integration.server.test_limits import SMALL_WINDOW, until

METHODS = ("DoGet", "DoPut", "DoExchange", "DoAction", "ListActions", "ListFlights", "GetFlightInfo", "GetSchema")
CHECK = method("Check", health.SERVICE)
SERVING = b"\x08\x01"


@pytest.fixture
def guarded(hub: Hub, tmp_path: Path) -> Iterator[grpc.Channel]:
    """A connection to a server with a tokens file."""
    path = str(tmp_path / "tokens.json")
    tokens.create(path, "ci", ["topic:orders=read"], now=0.0)
    with serving(hub, ServerSettings(auth=path)) as address, connect(address) as channel:
        yield channel


@pytest.mark.parametrize("name", METHODS)
def test_a_call_without_a_token_is_refused_before_its_request_arrives(guarded: grpc.Channel, name: str) -> None:
    with Streaming(guarded, name) as stream:  # which sends nothing
        with pytest.raises(grpc.RpcError) as failed:
            stream.receive()
        refused: Any = failed.value
        assert refused.code() is grpc.StatusCode.UNAUTHENTICATED


def test_w5_a_revoked_token_ends_its_stream_although_its_calls_block_all_threads(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = str(tmp_path / "tokens.json"), threading.Event()
    _, token = tokens.create(path, "ci", ["registry:k/=read"], now=0.0)
    settings = ServerSettings(auth=path, limits=ServerLimits(threads=1))
    with serving(hub, settings) as address, connect(address) as channel, monkeypatch.context() as patched:
        patched.setattr(hub.registry, "get", lambda key: opened.wait(60) and None)
        try:
            with Streaming(channel, "DoExchange", [("authorization", f"Bearer {token}")]) as stream:
                for message in (
                    CONTROL,
                    json_message(HELLO),
                    json_message({"id": 1, "call": "registry.get", "key": "k/a"}),
                ):
                    stream.sender.put(message)
                stream.receive()
                tokens.revoke(path, "ci")
                with pytest.raises(grpc.RpcError) as failed:
                    stream.receive()
            refused: Any = failed.value
            assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
            assert not opened.is_set()
        finally:
            opened.set()


def test_w5_one_token_cannot_take_all_streams(hub: Hub, tmp_path: Path) -> None:
    path = str(tmp_path / "tokens.json")
    greedy, other = (tokens.create(path, name, ["topic:t=read"], now=0.0)[1] for name in ("greedy", "other"))
    settings = ServerSettings(auth=path, limits=ServerLimits(token_streams_max=2))
    with serving(hub, settings) as address, connect(address) as channel, ExitStack() as stack:

        def open_stream(token: str | None) -> Streaming:
            stream = stack.enter_context(Streaming(channel, "DoExchange", [("authorization", f"Bearer {token}")]))
            stream.sender.put(CONTROL)
            stream.sender.put(json_message(HELLO))
            return stream

        first, second = open_stream(greedy), open_stream(greedy)
        assert first.receive()
        assert second.receive()
        with pytest.raises(grpc.RpcError) as failed:
            open_stream(greedy).receive()
        assert isinstance(error_of(failed.value), ServerBusy)
        assert open_stream(other).receive()
        first.sender.end()
        assert not list(first.call)  # it has ended, and there is room again
        assert open_stream(greedy).receive()


@pytest.mark.parametrize("name", METHODS)
def test_a_call_that_ends_without_a_request_is_refused_or_empty(channel: grpc.Channel, name: str) -> None:
    with Streaming(channel, name) as stream:
        stream.sender.end()
        try:
            assert not list(stream.call)
        except grpc.RpcError as failed:
            refused: Any = failed
            assert refused.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNKNOWN)


def test_health_is_answered_while_others_do_not_send_their_requests(running: Running) -> None:
    with connect(running.address) as channel:
        silent = [_Silent(channel) for _ in range(health.REQUESTS_MAX + 2)]
        try:
            assert channel.unary_unary(CHECK)(b"", timeout=20) == SERVING
            for each in silent:  # the server waits for the requests of some, for a moment
                assert each.receive() == SERVING
        finally:
            for each in silent:
                each.cancel()


class _Silent(Streaming):
    """A call of health checking that sends nothing."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.sender = Sender()
        self.call = channel.stream_stream(CHECK)(iter(self.sender), timeout=20)


def test_a_client_that_cancels_its_reads_does_not_fill_the_log_of_the_server(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    running.hub.create_topic("t", partitions=1)
    with running.hub.producer("t") as out:
        for _ in range(40):
            out.send(bytes(500_000))
    with connect(running.address, SMALL_WINDOW) as channel:
        for _ in range(20):
            read = get(channel, topic="t", partition=0, start=0, end=40)
            next(read)
            until(lambda: running.ask(lambda server: server.service.reading._sending))  # and waits for the client
            read.cancel()
        until(lambda: running.ask(lambda server: server.service.open) == 0)
    assert not [each for each in caplog.records if each.name == "pxrs.server.service"]
