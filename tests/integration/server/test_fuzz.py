"""Random and mutated requests: each gets a valid answer or a typed error, and afterwards nothing of them is left."""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest

from pxrs.errors import Unauthenticated
from pxrs.remote import flight, wire
from pxrs.server.auth import tokens
from pxrs.server.serving import Server
from tests.integration.server.conftest import Running, Start
from tests.integration.server.garbage import Garbage
from tests.integration.server.peer import (
    PATIENCE_S,
    Control,
    Put,
    WithToken,
    connect,
    error_of,
    method,
    records,
    rows,
    target,
)

REQUESTS = 10_000 if os.environ.get("PXRS_SOAK") else 1_000
"""Each run has a seed of its own."""
SEED = int(os.environ.get("SEED", random.SystemRandom().randrange(1 << 32)))
FIRST_USES = 4
"""Descriptors that the hub opens by the first use of a partition or a folder and keeps: a leak would open hundreds."""
TYPED = frozenset({grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED})
"""Statuses that gRPC itself answers with: there is no such method, or the message is too long."""


def check_status(call: grpc.Call, seen: Counter[str]) -> None:
    """The call has ended with OK, or with an error of pxrs."""
    code = call.code()
    found = dict(call.trailing_metadata() or ())
    if code is grpc.StatusCode.OK:
        seen["ok"] += 1
    elif wire.ERROR_METADATA in found:
        error = wire.error_of(json.loads(found[wire.ERROR_METADATA]))
        seen[error.code] += 1
    else:
        assert code in TYPED, (code, call.details())
        seen[code.name] += 1


def check_answer(data: bytes) -> bool:
    """A message of a control stream is well-formed. Returns whether it answers a call."""
    found = json.loads(bytes(flight.read_flight_data(data).app_metadata))
    if "error" in found:
        assert "unexpectedly" not in found["error"]["message"], found
    return "id" in found


def exchange(channel: grpc.Channel, garbage: Garbage, count: int, seen: Counter[str]) -> None:
    messages, wanted = garbage.exchange(count)
    call = channel.stream_stream(method("DoExchange"))(iter(messages), timeout=PATIENCE_S)
    answered = 0
    try:
        for data in call:
            answered += check_answer(data)
    except grpc.RpcError:
        pass
    else:
        assert answered >= wanted
    seen["answers"] += answered
    check_status(call, seen)


def put(channel: grpc.Channel, garbage: Garbage, seen: Counter[str]) -> None:
    call = channel.stream_stream(method("DoPut"))(iter(garbage.put()), timeout=PATIENCE_S)
    try:
        for data in call:
            json.loads(flight.read_result(data))
    except grpc.RpcError:
        pass
    check_status(call, seen)


def ask(channel: grpc.Channel, garbage: Garbage, seen: Counter[str]) -> None:
    name, request = garbage.request()
    call = channel.unary_stream(method(name))(request, timeout=PATIENCE_S)
    try:
        for _ in call:
            pass
    except grpc.RpcError:
        pass
    check_status(call, seen)


def send_raw(address: str, garbage: Garbage) -> None:
    """Bytes that are no HTTP/2, or that begin as it does. The server closes the connection, or ignores them."""
    host, _, port = target(address).rpartition(":")
    with socket.create_connection((host, int(port)), 10) as raw:
        data = garbage.bytes(2_000)
        raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + data if garbage.random.randrange(2) else data)


def state(server: Server) -> dict[str, int]:
    service = server.service
    return {
        "open": service.open,
        "streams": len(service.streams),
        "appending": service.appending.held,
        "reading": service.reading.budget.held,
    }


def settle(running: Running, descriptors: int) -> None:
    """Wait until the server holds nothing for clients any more."""
    until = time.monotonic() + 10
    while True:
        found = running.ask(state) | {
            "watches": len(running.hub.registry._watches),
            "descriptors": max(0, len(os.listdir("/proc/self/fd")) - descriptors - FIRST_USES),
        }
        if not any(found.values()):
            return
        assert time.monotonic() < until, json.dumps(found)
        threading.Event().wait(0.05)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("grants", "requests"), [(None, REQUESTS), (["hub=admin"], REQUESTS // 2), (["topic:t=read"], REQUESTS // 2)]
)
def test_w5_no_request_crashes_or_hangs_the_server(
    start: Start, caplog: pytest.LogCaptureFixture, tmp_path: Path, grants: list[str] | None, requests: int
) -> None:
    """On a server without tokens, and with a token that permits all or little."""
    print(f"SEED={SEED}")  # noqa: T201 - shown if the test fails: it replays the requests
    caplog.set_level(logging.WARNING)
    auth, token = (None, "") if grants is None else (str(tmp_path / "tokens.json"), "")
    if auth is not None:
        _, token = tokens.create(auth, "fuzz", [*(grants or ()), "topic:t=write"], now=0.0)
    running = start(auth, append_rest_s=1.0, threads=4, renewal_threads=2)
    running.hub.create_topic("t", partitions=2)
    garbage, seen = Garbage(SEED), Counter[str]()
    with connect(running.address) as plain:
        warm_up(grpc.intercept_channel(plain, WithToken(token)), grants)
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    made = 0
    while made < requests:
        with connect(running.address) as plain:
            channel = grpc.intercept_channel(plain, WithToken(token)) if token else plain
            for _ in range(40):
                exchange(channel, garbage, 40, seen)
                for _ in range(4):
                    put(channel, garbage, seen)
                for _ in range(5):
                    ask(channel, garbage, seen)
                send_raw(running.address, garbage)
                made += 50
    settle(running, descriptors)
    assert threading.active_count() <= threads + 4 + 4 + 2 + 1, "no more than the pools have"
    errors = [record.getMessage() for record in caplog.records if record.name.startswith("pxrs.server")]
    assert errors == []
    kinds = ("ok", "answers", "log.invalid-record", "invalid-argument")
    assert min(seen[kind] for kind in kinds) > requests // 200, seen
    with connect(running.address) as plain:
        warm_up(grpc.intercept_channel(plain, WithToken(token)), grants)


NO_TOKENS = (
    (),
    (("authorization", ""),),
    (("authorization", "Bearer"),),
    (("authorization", "Bearer " + "x" * 5_000),),
    (("authorization", "Basic dDp0"),),
    (("authorization-bin", b"\xff\0"),),
)
"""Metadata of calls without a token, or with something that is none."""


def begin(channel: grpc.Channel, garbage: Garbage, metadata: tuple[tuple[str, str | bytes], ...]) -> Any:
    match garbage.random.randrange(4):
        case 0:
            name, messages = "DoExchange", garbage.exchange(3)[0]
        case 1:
            name, messages = "DoPut", garbage.put()
        case _:
            name, request = garbage.request()
            return channel.unary_stream(method(name))(request, timeout=PATIENCE_S, metadata=metadata)
    return channel.stream_stream(method(name))(iter(messages), timeout=PATIENCE_S, metadata=metadata)


def refusal(call: Any) -> str | None:
    """The text with which the call is refused, which brings no message; None if there is no such method."""
    with pytest.raises(grpc.RpcError):
        next(call)
    if call.code() is grpc.StatusCode.UNIMPLEMENTED:
        return None
    assert call.code() is grpc.StatusCode.UNAUTHENTICATED, call.details()
    error = error_of(call)
    assert isinstance(error, Unauthenticated)
    return str(error)


def test_w4_no_call_without_a_token_learns_or_changes_anything(
    start: Start, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    print(f"SEED={SEED}")  # noqa: T201 - shown if the test fails: it replays the requests
    caplog.set_level(logging.WARNING)
    auth = str(tmp_path / "tokens.json")
    revoked, old_token = tokens.create(auth, "revoked", ["hub=admin"], now=0.0)
    _, token = tokens.create(auth, "valid", ["hub=admin"], now=0.0)
    tokens.revoke(auth, revoked.id)
    assert token is not None
    running = start(auth, threads=4, renewal_threads=2)
    running.hub.create_topic("t", partitions=2)
    with connect(running.address) as plain:
        warm_up(grpc.intercept_channel(plain, WithToken(token)), [])
    settle(running, len(os.listdir("/proc/self/fd")))

    def contents() -> object:
        hub = running.hub
        return hub.topics(), hub.topic("t").log.bounds((0, 1)), hub.registry.scan("")

    before, descriptors, threads = contents(), len(os.listdir("/proc/self/fd")), threading.active_count()
    garbage, told = Garbage(SEED), set[str | None]()
    others = [(("authorization", f"Bearer {each}"),) for each in (old_token, token[:-1], token + "x", token.upper())]
    for _ in range(REQUESTS // 200):
        with connect(running.address) as channel:
            calls = [begin(channel, garbage, garbage.random.choice((*NO_TOKENS, *others))) for _ in range(100)]
            told |= set(map(refusal, calls))
    settle(running, descriptors)
    assert len(told - {None}) <= 2, "what is refused depends on nothing but whether there is a token"
    assert contents() == before
    assert threading.active_count() <= threads + 4 + 4 + 2 + 1, "no more than the pools have"
    assert [record.getMessage() for record in caplog.records if record.name.startswith("pxrs.server")] == []


def warm_up(channel: grpc.Channel, grants: list[str] | None) -> None:
    """Append, read and call as a client does."""
    with Put(channel, "t") as stream:
        stream.send(records(3).serialize(), 1)
        offset = stream.outcome()["offset"]
    found = rows(channel, topic="t", partition=1, start=offset, end=offset + 3)
    assert [row[1] for row in found] == [offset, offset + 1, offset + 2]
    with Control(channel) as control:
        control.make("topic.subscribe", topic="t", partitions=[0, 1], number=1)
        if grants is not None and "hub=admin" not in grants:
            return
        control.make("registry.watch", prefixes=["a/"], number=2)
        assert control.make("registry.lease", ttl=1)["left_s"] > 0
        assert control.make("server.ping")["wire"] == 1
        assert control.make("registry.scan", prefix="", after=None, limit=1)["more"] in (True, False)
