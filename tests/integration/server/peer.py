"""A client of the wire that has no code of the client package: gRPC, and the messages of docs/wire.md."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator, Sequence
from typing import Any, Self

import grpc
import pyarrow as pa

from pxrs.errors import PxrsError
from pxrs.log.batch import SCHEMA
from pxrs.remote import flight, wire

PATIENCE_S = 30.0
HELLO = {"hello": {"wire": 1, "client": "peer"}}
CONTROL = flight.flight_data(flight.FlightData(command=b"pxrs.control"))
SCHEMA_HEADER = bytes(flight.ipc_message(SCHEMA.serialize())[0])


def target(address: str) -> str:
    return address.removeprefix("pxrs://")


def connect(address: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
    """A connection of its own."""
    given = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1), *options]
    return grpc.insecure_channel(target(address), given)


class WithToken(grpc.StreamStreamClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[misc]
    """Adds a token to each call."""

    def __init__(self, token: str) -> None:
        self._token = token

    def _intercept(self, call: Any, details: Any, request: Any) -> Any:
        metadata = (*(details.metadata or ()), ("authorization", f"Bearer {self._token}"))
        return call(details._replace(metadata=metadata), request)

    intercept_stream_stream = intercept_unary_stream = _intercept


def method(name: str, service: str = flight.SERVICE) -> str:
    return f"/{service}/{name}"


def json_message(value: Any) -> bytes:
    return flight.flight_data(flight.FlightData(app_metadata=json.dumps(value).encode()))


def error_of(failure: Any) -> PxrsError:
    """The error that the trailing metadata of a failed call has."""
    found = dict(failure.trailing_metadata() or ())
    assert wire.ERROR_METADATA in found, (failure.code(), failure.details())
    return wire.error_of(json.loads(found[wire.ERROR_METADATA]))


class Sender:
    """The messages that one side of a stream sends."""

    def __init__(self) -> None:
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def put(self, message: bytes) -> None:
        self._outbox.put(message)

    def end(self) -> None:
        self._outbox.put(None)

    def __iter__(self) -> Iterator[bytes]:
        while (message := self._outbox.get()) is not None:
            yield message


class Streaming:
    """A stream with messages both ways."""

    def __init__(self, channel: grpc.Channel, name: str, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self.sender = Sender()
        self.call: Any = channel.stream_stream(method(name))(
            iter(self.sender), timeout=PATIENCE_S, metadata=tuple(metadata)
        )

    def receive(self) -> bytes:
        return bytes(next(self.call))

    def cancel(self) -> None:
        self.call.cancel()
        self.sender.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class Control(Streaming):
    """A control stream."""

    def __init__(self, channel: grpc.Channel, *, is_greeted: bool = True) -> None:
        super().__init__(channel, "DoExchange")
        self._number = 0
        self.events: list[int] = []
        self.others: dict[int, dict[str, Any]] = {}
        self.sender.put(CONTROL)
        if is_greeted:
            self.tell(HELLO)
            self.hello = self.take()["hello"]

    def tell(self, value: Any) -> None:
        self.sender.put(json_message(value))

    def take(self) -> dict[str, Any]:
        return dict(json.loads(bytes(flight.read_flight_data(self.receive()).app_metadata)))

    def begin(self, name: str, **arguments: Any) -> int:
        self._number += 1
        self.tell({"id": self._number, "call": name, **arguments})
        return self._number

    def answer(self, number: int) -> dict[str, Any]:
        """The answer to this call; events that come meanwhile are kept."""
        while number not in self.others:
            found = self.take()
            if "event" in found:
                self.events.append(found["event"])
            elif "id" in found:
                self.others[found["id"]] = found
        return self.others.pop(number)

    def make(self, name: str, **arguments: Any) -> dict[str, Any]:
        """The result of a call. Raises the error that the server answers with."""
        found = self.answer(self.begin(name, **arguments))
        if "error" in found:
            raise wire.error_of(found["error"])
        return dict(found["result"])

    def wait_for(self, number: int) -> None:
        """Wait for an event of this number. Others are dropped."""
        while self.events:
            if self.events.pop(0) == number:
                return
        while self.take().get("event") != number:
            pass


class Put(Streaming):
    """A stream of appends."""

    def __init__(self, channel: grpc.Channel, topic: str, **about: Any) -> None:
        super().__init__(channel, "DoPut")
        self._outcomes: list[dict[str, Any]] = []
        command = json.dumps({"topic": topic, **about}).encode()
        self.sender.put(flight.flight_data(flight.FlightData(SCHEMA_HEADER, command=command)))

    def send(self, data: pa.Buffer | bytes, partition: int = 0, **about: Any) -> None:
        self.sender.put(batch_message(data, partition=partition, **about))

    def outcome(self) -> dict[str, Any]:
        """The outcome of the next batch."""
        if not self._outcomes:
            self._outcomes += json.loads(flight.read_result(self.receive()))["outcomes"]
        return self._outcomes.pop(0)


def batch_message(data: pa.Buffer | bytes, **about: Any) -> bytes:
    header, body = flight.ipc_message(data)
    return flight.flight_data(flight.FlightData(header, body, json.dumps(about).encode()))


def records(count: int = 3, size: int = 10, start: int = 0) -> pa.RecordBatch:
    values = [str(start + number).encode().ljust(size, b".") for number in range(count)]
    times = pa.array([1_700_000_000_000_000 + number for number in range(count)], SCHEMA.field("timestamp").type)
    return pa.RecordBatch.from_arrays(
        [pa.nulls(count, pa.binary()), pa.array(values, pa.binary()), times, pa.nulls(count, SCHEMA.field(3).type)],
        schema=SCHEMA,
    )


def act(channel: grpc.Channel, name: str, **arguments: Any) -> dict[str, Any]:
    """A call by `DoAction`."""
    request = flight.action(name, json.dumps(arguments).encode())
    (found,) = channel.unary_stream(method("DoAction"))(request, timeout=PATIENCE_S)
    return dict(json.loads(flight.read_result(found)))


def get(channel: grpc.Channel, **ticket: Any) -> Any:
    """The messages of `DoGet`, to be iterated."""
    request = flight.ticket(json.dumps(ticket).encode())
    return channel.unary_stream(method("DoGet"))(request, timeout=PATIENCE_S)


def rows(channel: grpc.Channel, **ticket: Any) -> list[tuple[int, int, bytes]]:
    """Partition, offset and value of each message that `DoGet` brings."""
    found = []
    for data in get(channel, **ticket):
        message = flight.read_flight_data(data)
        if len(message.app_metadata) and len(message.header):
            about = json.loads(bytes(message.app_metadata))
            batch = pa.ipc.read_record_batch(flight.encapsulated(message.header, message.body), SCHEMA)
            values = batch.column("value").to_pylist()
            found += [(about["partition"], about["offset"] + number, value) for number, value in enumerate(values)]
    return found
