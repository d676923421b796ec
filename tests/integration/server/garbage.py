"""Random and mutated requests, by a seed."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pyarrow as pa

from pxrs.log.batch import SCHEMA
from pxrs.remote import flight
from pxrs.server.calls import CALLS, WATCHING
from tests.integration.server.peer import CONTROL, SCHEMA_HEADER, batch_message, records

VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 3, 2**31, 2**32, 2**63 - 1, 2**63, -(2**63), 2**64, 10**40, -(10**40)),
    *(0.5, -0.0, 1e308, "", "t", "u", "a/b", "a/", "/", "../../x", "t\0", "\ud800", "\U0001f600", "x" * 10_000),
    *([], [0], [0, 0], [-1], [10**30], [[0, 0]], [[0, -1]], [["a", 0]], [[0]], [[0, 2**70]], ["a/"], ["a", "b/"]),
    *({}, {"a/b": 0}, {"a/b": 10**30}, {"a/b": "eA=="}, {"a/b": "!"}, {"": 1}, {"a/\u00e9": "eA=="}, {"$map": 1}),
]
NO_JSON = [b"", b"[]", b"NaN", b"[" * 50_000, b'{"a":' * 5_000, b"\xff", b'{"id":1e999}']
TICKETS: list[dict[str, Any]] = [
    {"topic": "t", "positions": [[0, 0], [1, 0]], "max_bytes": 100},
    {"topic": "t", "partition": 0, "start": 0, "end": 3},
]
_TOPIC = {"topic": "t"}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "log.create_topic": {"settings": {"name": "made", "id": "0" * 32, "partitions": 1, "retention_s": 60.0}},
    "log.topic": _TOPIC,
    "log.delete_topic": {"topic": "made"},
    "topic.bounds": {**_TOPIC, "partitions": [0, 1]},
    "topic.offset_at": {**_TOPIC, "partition": 0, "timestamp": 0},
    "topic.plan_retention": {**_TOPIC, "now": 0, "unread": [[0, 0]]},
    "topic.trim": {**_TOPIC, "starts": [[0, 0]]},
    "topic.check_writable": _TOPIC,
    "topic.retention_problem": _TOPIC,
    "topic.subscribe": {**_TOPIC, "partitions": [0], "number": 1},
    "topic.unsubscribe": {"number": 1},
    "registry.get": {"key": "a/b"},
    "registry.scan": {"prefix": "a/", "after": "a/a", "limit": 3},
    "registry.commit": {"expect": {"a/b": 0}, "put": {"a/b": "eA=="}, "delete": ["a/c"], "lease": "x", "quiet": True},
    "registry.lease": {"ttl": 1},
    "registry.attach": {"secret": "x"},
    "registry.renew": {"secret": "x"},
    "registry.end": {"secret": "x"},
    "registry.watch": {"prefixes": ["a/"], "number": 2},
    "registry.unwatch": {"number": 2},
    "hub.identity": {"joins": False},
}
METHODS = (
    "DoGet",
    "DoAction",
    "ListFlights",
    "ListActions",
    "GetFlightInfo",
    "GetSchema",
    "Handshake",
    "PollFlightInfo",
)


class Garbage:
    """Makes requests. Most are nearly right: a request that is refused at once tests little."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def bytes(self, most: int = 200) -> bytes:
        return self.random.randbytes(self.random.randrange(most))

    def mutated(self, data: bytes) -> bytes:
        """The bytes with a few of them changed, cut out or doubled."""
        found = bytearray(data)
        for _ in range(self.random.randrange(1, 5)):
            at = self.random.randrange(len(found) + 1)
            match self.random.randrange(4):
                case 0 if at < len(found):
                    found[at] = self.random.randrange(256)
                case 1:
                    del found[at : at + self.random.randrange(20)]
                case 2:
                    found[at:at] = self.bytes(20)
                case _:
                    found[at:at] = found[at : at + 8]
        return bytes(found)

    def changed(self, value: dict[str, Any]) -> dict[str, Any]:
        """The object with some fields left out, replaced or changed inside."""
        found = copy.deepcopy(value)
        for name in list(found):
            match self.random.randrange(6):
                case 0:
                    del found[name]
                case 1 | 2:
                    found[name] = self.random.choice(VALUES)
                case 3 if isinstance(found[name], dict):
                    found[name] = self.changed(found[name])
        return found

    def json(self, value: dict[str, Any]) -> bytes:
        data = json.dumps(value).encode()
        match self.random.randrange(12):
            case 0:
                return self.mutated(data)
            case 1:
                return self.random.choice(
                    [b"", b"[]", b"NaN", b"[" * 50_000, b'{"a":' * 5_000, b"\xff", b'{"id":1e999}']
                )
            case 2:
                return data.replace(b"0", self.random.choice([b"NaN", b"-Infinity", b"9" * 5_000, b"1e400"]))
        return data

    def call(self) -> tuple[str, dict[str, Any]]:
        name = self.random.choice([*CALLS, *WATCHING, "none", ""])
        arguments = self.changed(ARGUMENTS.get(name, {}))
        if name == "log.delete_topic" and arguments.get("topic") == "t":
            arguments["topic"] = "made"  # the others need a topic
        return name, arguments

    def control(self, number: int) -> tuple[bytes, bool]:
        """A control message, and whether it is one that must be answered."""
        name, arguments = self.call()
        found = {"id": number, "call": name, **arguments}
        if self.random.randrange(40):
            return flight.flight_data(flight.FlightData(app_metadata=json.dumps(found).encode())), True
        changed = found if name == "log.delete_topic" else self.changed(found)
        data = flight.flight_data(flight.FlightData(app_metadata=self.json(changed)))
        return (self.mutated(data) if self.random.randrange(2) else data), False

    def action(self) -> bytes:
        name, arguments = self.call()
        data = flight.action(name, self.json(arguments))
        return data if self.random.randrange(5) else self.mutated(data)

    def ticket(self) -> bytes:
        data = flight.ticket(self.json(self.changed(self.random.choice(TICKETS))))
        return data if self.random.randrange(5) else self.mutated(data)

    def request(self) -> tuple[str, bytes]:
        """A method with one request, and the request."""
        match self.random.randrange(6):
            case 0:
                return self.random.choice(METHODS), self.bytes()
            case 1 | 2:
                return "DoGet", self.ticket()
            case 3:
                return "GetFlightInfo", self.mutated(flight.descriptor(flight.Descriptor(path=("t",))))
        return "DoAction", self.action()

    def batch(self) -> bytes:
        """A batch of an append: its metadata, its Arrow message, or all of its bytes are changed."""
        about = {"partition": 0, "producer": "0" * 31 + "1", "epoch": 0, "sequence": 0, "since": 0}
        if self.random.randrange(2):
            about = self.changed(about)
        sink = pa.BufferOutputStream()
        codec = self.random.choice([None, None, "lz4", "zstd"])
        with pa.ipc.new_stream(sink, SCHEMA, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
            start = sink.tell()
            writer.write_batch(records(self.random.randrange(4), 100))
            data = sink.getvalue()[start : sink.tell()].to_pybytes() if start else b""
        data = data or records(1).serialize().to_pybytes()
        if self.random.randrange(2):
            data = data[:8] + self.mutated(data[8:])
        try:
            message = batch_message(data, **about, more=not self.random.randrange(4))
        except flight.MalformedMessage:
            message = self.bytes()
        return self.mutated(message) if not self.random.randrange(4) else message

    def put(self) -> list[bytes]:
        """The messages of a stream of appends."""
        command = self.json(self.changed({"topic": "t"}) if not self.random.randrange(4) else {"topic": "t"})
        first = flight.flight_data(flight.FlightData(SCHEMA_HEADER, command=command))
        first = first if self.random.randrange(8) else self.mutated(first)
        return [first, *(self.batch() for _ in range(self.random.randrange(1, 4)))]

    def exchange(self, count: int) -> tuple[list[bytes], int]:
        """The messages of a control stream with about so many calls, and how many of them must be answered unless the
        stream ends with an error."""
        messages, answered = [CONTROL, flight.flight_data(flight.FlightData(app_metadata=b'{"hello":{"wire":1}}'))], 0
        for number in range(count):
            message, is_answered = self.control(number)
            messages.append(message)
            answered += is_answered
        return messages, answered
