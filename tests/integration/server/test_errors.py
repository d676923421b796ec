"""Every error of pxrs that a call of the hub raises reaches the client as what it is, on every kind of stream."""

from __future__ import annotations

import json
import logging
from typing import Any

import grpc
import pytest

from pxrs.errors import BY_CODE, Conflict, InvalidArgument, OutcomeUnknown, PxrsError, UnknownTopic
from pxrs.remote import wire
from tests.integration.server.conftest import Running
from tests.integration.server.peer import Control, Put, act, error_of, get, records
from tests.unit.test_errors import made

CLASSES = sorted(BY_CODE.values(), key=lambda each: each.code)
FILTERED = (Conflict, UnknownTopic)
"""The server makes these anew, with the keys and topics that the caller may see."""


def same(found: PxrsError, sent: PxrsError) -> bool:
    return type(found) is type(sent) and str(found) == str(sent)


def test_errors_survive_on_every_kind_of_stream(
    running: Running, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[PxrsError] = []

    def fail(*given: Any, **named: Any) -> Any:
        raise raised[-1]

    running.hub.create_topic("t", partitions=1)
    monkeypatch.setattr(running.hub.registry, "get", fail)
    monkeypatch.setattr(type(running.hub.topic("t").log), "read", fail)
    monkeypatch.setattr(type(running.hub.topic("t").log), "append", fail)
    with Control(channel) as control:
        for kind in CLASSES:
            raised.append(made(kind))
            with pytest.raises(kind) as told:
                control.make("registry.get", key="a")
            assert same(told.value, raised[-1]), kind
            if kind not in FILTERED:
                assert told.value.state().keys() == raised[-1].state().keys()
            with pytest.raises(grpc.RpcError) as failed:
                act(channel, "registry.get", key="a")
            assert same(error_of(failed.value), raised[-1]), kind
            with pytest.raises(grpc.RpcError) as failed:
                list(get(channel, topic="t", partition=0, start=0, end=1))
            assert same(error_of(failed.value), raised[-1]), kind
            with Put(channel, "t") as put:
                put.send(records(1).serialize())
                with pytest.raises(grpc.RpcError) as failed:
                    put.outcome()
                assert same(error_of(failed.value), raised[-1]), kind
    assert {Conflict, OutcomeUnknown} <= {type(each) for each in raised}


@pytest.mark.parametrize("text", ["x" * 100_000, "\U0001f600" * 50_000, "\ud800\0\n" * 5_000])
def test_an_error_with_a_long_text_still_arrives(
    running: Running, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    def fail(key: str) -> Any:
        error = UnknownTopic(text) if not text.startswith("x") else Conflict(["a/" + text[:9_000]])
        error.add_note(text)
        raise error from ValueError(text)

    monkeypatch.setattr(running.hub.registry, "get", fail)
    with pytest.raises(grpc.RpcError) as failed:
        act(channel, "registry.get", key="a")
    metadata = dict(failed.value.trailing_metadata())[wire.ERROR_METADATA]
    assert len(metadata) <= wire.ERROR_TEXT_MAX
    assert json.loads(metadata)["code"] in BY_CODE
    assert not isinstance(error_of(failed.value), InvalidArgument)
    with Control(channel) as control, pytest.raises(PxrsError):
        control.make("registry.get", key="a")


def test_an_unexpected_error_is_logged_and_tells_the_client_nothing(
    running: Running, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(key: str) -> Any:
        raise RuntimeError("something private")

    monkeypatch.setattr(running.hub.registry, "get", fail)
    caplog.set_level(logging.ERROR)
    with pytest.raises(grpc.RpcError) as failed:
        act(channel, "registry.get", key="a")
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    assert "private" not in failed.value.details()
    with Control(channel) as control:
        with pytest.raises(PxrsError) as told:
            control.make("registry.get", key="a")
        assert "private" not in str(told.value)
        assert control.make("server.ping")["wire"] == 1
    assert len([record for record in caplog.records if record.exc_info]) == 2
