"""W4, W5: a running server with a tokens file, asked by nothing but pyarrow's Flight client."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from pyarrow import flight

import pxrs
from pxrs import disk
from pxrs.log.batch import SCHEMA
from pxrs.remote import wire
from pxrs.server.auth import tokens
from pxrs.server.serving import ServerSettings, serving
from pxrs.testing.waiting import PATIENCE_S


class Place(NamedTuple):
    hub: pxrs.Hub
    client: flight.FlightClient
    path: str
    """The tokens file."""

    def token(self, *allow: str) -> flight.FlightCallOptions:
        _, secret = tokens.create(self.path, "ci", allow, now=0.0)
        assert secret is not None
        return options(secret)


def options(token: str | None) -> flight.FlightCallOptions:
    return flight.FlightCallOptions(headers=[] if token is None else [(b"authorization", f"Bearer {token}".encode())])


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    path = str(tmp_path / "tokens.json")
    tokens.create(path, "first", ["topic:orders=read"], now=0.0)
    with pxrs.open(tmp_path / "data", upkeep=False) as hub:
        for topic in ("orders", "secret"):
            hub.create_topic(topic, partitions=1)
            with hub.producer(topic) as out:
                out.send(b"x")
        hub.registry.commit(put={"groups/secret/leader": b"hidden"})
        with serving(hub, ServerSettings(auth=path)) as address:
            client = flight.FlightClient(address.replace("pxrs://", "grpc://"))
            try:
                yield Place(hub, client, path)
            finally:
                client.close()


def accepted(place: Place, given: flight.FlightCallOptions) -> None:
    """Wait until the server has read the file again: it looks once a second."""
    done = threading.Event()
    for _ in range(int(PATIENCE_S * 10)):
        try:
            act(place, given, "server.ping")
            return
        except flight.FlightUnauthenticatedError:
            done.wait(0.1)
    pytest.fail("the new token was not accepted in time")


def act(place: Place, given: flight.FlightCallOptions, call: str, **arguments: Any) -> Any:
    (result,) = place.client.do_action(flight.Action(call, json.dumps(arguments).encode()), given)
    return json.loads(result.body.to_pybytes())


def get(place: Place, given: flight.FlightCallOptions, topic: str) -> pa.Table:
    ticket = flight.Ticket(json.dumps({"topic": topic, "positions": [[0, 0]]}).encode())
    return place.client.do_get(ticket, given).read_all()


def put(place: Place, given: flight.FlightCallOptions, topic: str) -> None:
    descriptor = flight.FlightDescriptor.for_command(json.dumps({"topic": topic}).encode())
    writer, answers = place.client.do_put(descriptor, SCHEMA, given)
    batch = pa.RecordBatch.from_pylist([{"key": None, "value": b"y", "timestamp": 1, "headers": None}], SCHEMA)
    writer.write_with_metadata(batch, b'{"partition": 0}')
    writer.done_writing()
    answer = answers.read()
    assert answer is None or b"offset" in answer.to_pybytes()
    writer.close()


def control(place: Place, given: flight.FlightCallOptions) -> flight.FlightStreamReader:
    writer, reader = place.client.do_exchange(flight.FlightDescriptor.for_command(wire.CONTROL), given)
    writer.write_metadata(wire.dumps({"hello": {"wire": 1, "client": "test"}}))
    assert b"hello" in reader.read_chunk().app_metadata.to_pybytes()
    return writer, reader


METHODS: dict[str, Callable[[Place, flight.FlightCallOptions], object]] = {
    "DoGet": lambda place, given: get(place, given, "orders"),
    "DoPut": lambda place, given: put(place, given, "orders"),
    "DoExchange": control,
    "DoAction": lambda place, given: act(place, given, "log.delete_topic", topic="orders"),
    "a commit": lambda place, given: act(place, given, "registry.commit", put={"a": "eA=="}),
    "ListActions": lambda place, given: list(place.client.list_actions(given)),
    "ListFlights": lambda place, given: list(place.client.list_flights(options=given)),
    "GetFlightInfo": lambda place, given: place.client.get_flight_info(
        flight.FlightDescriptor.for_path("orders"), given
    ),
    "GetSchema": lambda place, given: place.client.get_schema(flight.FlightDescriptor.for_path("orders"), given),
}


@pytest.mark.parametrize("token", [None, "wrong"])
def test_w4_without_a_valid_token_nothing_changes_and_nothing_is_told(place: Place, token: str | None) -> None:
    for name, call in METHODS.items():
        # `get_schema` of pyarrow raises OSError with the same text.
        with pytest.raises((flight.FlightUnauthenticatedError, OSError), match="unauthenticated error") as refused:
            call(place, options(token))
        assert "orders" not in str(refused.value), name
    assert [topic.name for topic in place.hub.topics()] == ["orders", "secret"]
    assert place.hub.topic("orders").log.end(0) == 1
    assert place.hub.registry.get("a") is None


def test_w4_a_token_gets_what_it_permits_and_refusals_tell_nothing(place: Place) -> None:
    given = place.token("topic:orders*=read")
    accepted(place, given)
    assert get(place, given, "orders").num_rows == 1
    assert [each["name"] for each in act(place, given, "log.topics")["topics"]] == ["orders"]
    assert [info.descriptor.path for info in place.client.list_flights(options=given)] == [[b"orders"]]
    refusals = set()
    for topic in ("secret", "never-was"):
        with pytest.raises(flight.FlightUnauthorizedError) as refused:
            get(place, given, topic)
        refusals.add(str(refused.value).replace(topic, "X").partition(". Detail")[0])
    assert len(refusals) == 1
    for read in (
        lambda: get(place, given, "orders2"),
        lambda: act(place, given, "topic.bounds", topic="orders2", partitions=[0]),
        lambda: place.client.get_flight_info(flight.FlightDescriptor.for_path("orders2"), given),
    ):
        with pytest.raises(pa.ArrowException) as unknown:
            read()
        assert "no topic 'orders2'" in str(unknown.value)
        assert "secret" not in str(unknown.value), "the topics that the caller may not see are not named"
    for change in (
        lambda: put(place, given, "orders"),
        lambda: act(place, given, "log.delete_topic", topic="orders"),
        lambda: act(place, given, "registry.commit", put={"groups/secret/leader": "eA=="}),
        lambda: act(place, given, "registry.get", key="groups/secret/leader"),
        lambda: act(place, given, "registry.lease", ttl=10),
    ):
        with pytest.raises(flight.FlightUnauthorizedError):
            change()
    assert act(place, given, "registry.scan", prefix="groups/", after=None, limit=None)["entries"] == []
    assert place.hub.topic("orders").log.end(0) == 1


def ended(place: Place, given: flight.FlightCallOptions, change: Callable[[], object]) -> BaseException:
    """How a control stream ends after the tokens file was changed."""
    writer, reader = control(place, given)
    found: list[BaseException] = []

    def wait() -> None:
        try:
            while True:
                reader.read_chunk()
        except (pa.ArrowException, StopIteration) as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    change()
    thread.join(PATIENCE_S)
    del writer
    assert found, "the stream was not ended"
    return found[0]


def test_w5_a_revoked_token_ends_its_open_streams(place: Place) -> None:
    given = place.token("topic:orders=read,write")
    accepted(place, given)
    assert isinstance(ended(place, given, lambda: tokens.revoke(place.path, "ci")), flight.FlightUnauthenticatedError)
    with pytest.raises(flight.FlightUnauthenticatedError):
        get(place, given, "orders")


def test_w5_a_token_with_other_grants_ends_its_open_streams_and_the_client_may_come_back(place: Place) -> None:
    given = place.token("topic:orders=read,write")
    accepted(place, given)

    def change() -> None:
        text = Path(place.path).read_text()
        disk.replace_file(place.path, text.replace("topic:orders=write", "topic:secret=read").encode())

    assert isinstance(ended(place, given, change), flight.FlightUnavailableError)
    assert get(place, given, "secret").num_rows == 1
    with pytest.raises(flight.FlightUnauthorizedError):
        put(place, given, "orders")
