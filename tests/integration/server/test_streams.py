"""What streams do when all goes well, and how they end."""

from __future__ import annotations

import json

import grpc
import pytest

from pxrs.errors import InvalidArgument, WireMismatch
from pxrs.remote import flight
from tests.integration.server.conftest import Running
from tests.integration.server.peer import (
    CONTROL,
    HELLO,
    Control,
    Put,
    act,
    error_of,
    json_message,
    method,
    records,
    rows,
)


def test_a_control_stream_answers_calls_and_sends_events(running: Running, channel: grpc.Channel) -> None:
    running.hub.create_topic("t", partitions=2)
    with Control(channel) as control:
        assert control.hello["wire"] == 1
        assert control.hello["calls_max"] > 0
        control.make("topic.subscribe", topic="t", partitions=[0, 1], number=1)
        control.make("registry.watch", prefixes=["a/"], number=2)
        with Put(channel, "t") as put:
            put.send(records(3).serialize(), 1)
            assert put.outcome() == {"offset": 0}
        control.wait_for(1)
        control.make("registry.commit", expect={"a/b": 0}, put={"a/b": "eA=="})
        control.wait_for(2)
    assert [row[:2] for row in rows(channel, topic="t", positions=[[0, 0], [1, 0]])] == [(1, 0), (1, 1), (1, 2)]
    assert rows(channel, topic="t", partition=1, start=1, end=2) == [(1, 1, b"1.........")]


def test_a_client_that_ends_its_half_gets_all_answers(running: Running, channel: grpc.Channel) -> None:
    control = Control(channel)
    numbers = [control.begin("server.ping") for _ in range(50)]
    control.sender.end()
    assert sorted(found["id"] for found in iter_messages(control)) == numbers
    assert control.call.code() is grpc.StatusCode.OK


def iter_messages(control: Control) -> list[dict[str, object]]:
    return [json.loads(bytes(flight.read_flight_data(data).app_metadata)) for data in control.call]


@pytest.mark.parametrize("hello", [{"hello": {"wire": 0}}, {"hello": {"wire": -(10**30)}}])
def test_a_version_that_is_too_old_is_refused(channel: grpc.Channel, hello: object) -> None:
    with Control(channel, is_greeted=False) as control:
        control.tell(hello)
        with pytest.raises(grpc.RpcError) as failed:
            control.take()
        assert isinstance(error_of(failed.value), WireMismatch)


def test_a_newer_client_is_answered_with_the_servers_version(channel: grpc.Channel) -> None:
    with Control(channel, is_greeted=False) as control:
        control.tell({"hello": {"wire": 999}})
        assert control.take()["hello"]["wire"] == 1


def test_another_command_than_the_control_streams_is_refused(channel: grpc.Channel) -> None:
    message = flight.flight_data(flight.FlightData(command=b"other", app_metadata=json.dumps(HELLO).encode()))
    call = channel.stream_stream(method("DoExchange"))(iter([message]), timeout=10)
    with pytest.raises(grpc.RpcError) as failed:
        next(call)
    assert isinstance(error_of(failed.value), InvalidArgument)


def test_health_is_told_for_the_server_and_its_services(channel: grpc.Channel) -> None:
    check = channel.unary_unary(method("Check", "grpc.health.v1.Health"))
    for name in (b"", flight.SERVICE.encode(), b"grpc.health.v1.Health"):
        assert check(flight.field(1, name), timeout=10) == b"\x08\x01"
    with pytest.raises(grpc.RpcError) as failed:
        check(flight.field(1, b"other"), timeout=10)
    assert failed.value.code() is grpc.StatusCode.NOT_FOUND


def test_an_action_is_a_call(channel: grpc.Channel) -> None:
    assert act(channel, "server.ping")["wire"] == 1


def test_a_stream_whose_first_answer_is_cut_by_an_error_still_ends(channel: grpc.Channel) -> None:
    """The error may come while the hello is being sent."""
    messages = [CONTROL, json_message(HELLO), b"\xff"]
    for _ in range(100):
        call = channel.stream_stream(method("DoExchange"))(iter(messages), timeout=10)
        with pytest.raises(grpc.RpcError) as failed:
            list(call)
        assert isinstance(error_of(failed.value), InvalidArgument)
