"""A peer of the client of `pxrs serve`: real gRPC on loopback, whose answers the test gives one by one."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from pxrs import grpc_fork  # noqa: F401 - first: it imports gRPC in its own way
from pxrs.errors import PxrsError
from pxrs.remote import flight, wire
from pxrs.testing.waiting import aside

import grpc  # isort: skip

BOUND_S = 20.0
PUTS_READ_AHEAD = 4
"""How many messages of a `DoPut` are read that the test has not asked for: flow control holds the others back."""
LIMITS = {"commit_keys_max": 100, "commit_bytes_max": 1 << 20, "value_bytes_max": 1 << 20, "key_bytes_max": 512}


class Stream:
    """One stream of `DoExchange` or `DoPut`, on the server's side."""

    def __init__(self, requests: Iterator[bytes], context: Any, read_ahead: int = 0) -> None:
        """read_ahead: how many messages are read that the test has not asked for; 0: all."""
        self.metadata = dict(context.invocation_metadata())
        self._context = context
        self._received: queue.SimpleQueue[flight.FlightData | None] = queue.SimpleQueue()
        self._may_read = threading.Semaphore(read_ahead) if read_ahead else None
        self._answers: queue.SimpleQueue[bytes | Exception | None] = queue.SimpleQueue()
        self.reading = aside(lambda: self._read(requests))

    def _read(self, requests: Iterator[bytes]) -> None:
        with contextlib.suppress(Exception):  # the stream was cut
            for data in requests:
                self._received.put(flight.read_flight_data(data))
                if self._may_read is not None:
                    self._may_read.acquire()
        self._received.put(None)

    def next_data(self, timeout_s: float = BOUND_S) -> flight.FlightData | None:
        """The next message of the client; None if it has ended the stream."""
        data = self._received.get(timeout=timeout_s)
        if self._may_read is not None:
            self._may_read.release()
        return data

    def next(self, timeout_s: float = BOUND_S) -> dict[str, Any]:
        """The next control message of the client."""
        data = self.next_data(timeout_s)
        assert data is not None, "the client has ended the stream"
        return wire.loads(data.app_metadata)

    def is_quiet(self, seconds: float = 0.2) -> bool:
        """Whether the client sends nothing for this time."""
        try:
            return self.next_data(seconds) is None
        except queue.Empty:
            return True

    def say(self, **message: Any) -> None:
        """Send a control message."""
        self._answers.put(flight.flight_data(flight.FlightData(app_metadata=json.dumps(message).encode())))

    def hello(self, version: int = 1) -> Self:
        """Take the client's hello and answer it."""
        assert self.next()["hello"]["wire"] == wire.VERSION
        self.say(hello={"wire": version, "server": "a test", "instance": "i", "limits": LIMITS})
        return self

    def answer(self, request: dict[str, Any], **result: Any) -> None:
        self.say(id=request["id"], result=result)

    def put_result(self, *outcomes: dict[str, Any]) -> None:
        self._answers.put(flight.result(json.dumps({"outcomes": outcomes}).encode()))

    def cut(self, error: Exception | None = None) -> None:
        """End the stream: with this error of pxrs, or as if the connection had failed."""
        self._answers.put(error or ConnectionResetError())

    def end(self) -> None:
        """End the stream in good order."""
        self._answers.put(None)
        if self._may_read is not None:
            self._may_read.release(1 << 20)  # what has come is read, and then its end

    def answers(self) -> Iterator[bytes]:
        while (answer := self._answers.get()) is not None:
            if isinstance(answer, Exception):
                _abort(self._context, answer)
            else:
                yield answer


def _abort(context: Any, error: Exception) -> None:
    """End the stream: with this error of pxrs, or as if the connection had failed."""
    if isinstance(error, PxrsError):
        context.set_trailing_metadata(((wire.ERROR_METADATA, wire.error_to_metadata(error)),))
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
    context.abort(grpc.StatusCode.UNAVAILABLE, "the test has cut it")


class Peer(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Listens on a port of loopback. The streams that clients open are in `controls` and `puts`, in order; the tickets
    of their reads in `tickets`, which are answered with what is in `reads`."""

    def __init__(self, port: int = 0) -> None:
        self.controls: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self.puts: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self.tickets: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.reads: queue.SimpleQueue[list[bytes] | Exception] = queue.SimpleQueue()
        self._open: list[Stream] = []
        self._server = grpc.server(ThreadPoolExecutor(32), options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((self,))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()

    @property
    def url(self) -> str:
        return f"pxrs://127.0.0.1:{self.port}"

    def service(self, handler_call_details: Any) -> Any:
        name = handler_call_details.method.removeprefix(f"/{flight.SERVICE}/")
        if name == "DoGet":
            return grpc.unary_stream_rpc_method_handler(self._get)
        streams = {"DoExchange": self.controls, "DoPut": self.puts}.get(name)
        if streams is None:
            return None

        def serve(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            stream = Stream(requests, context, PUTS_READ_AHEAD if name == "DoPut" else 0)
            self._open.append(stream)
            context.add_callback(stream.end)
            streams.put(stream)
            yield from stream.answers()

        return grpc.stream_stream_rpc_method_handler(serve)

    def _get(self, request: bytes, context: Any) -> Iterator[bytes]:
        self.tickets.put(wire.loads(flight.read_ticket(request)))
        answer = self.reads.get(timeout=BOUND_S)
        if isinstance(answer, Exception):
            _abort(context, answer)
        else:
            yield from answer

    def control(self, timeout_s: float = BOUND_S) -> Stream:
        """The next control stream, after its hellos."""
        return self.controls.get(timeout=timeout_s).hello()

    def stop(self) -> None:
        """End at once, as a killed server does: every stream breaks."""
        for stream in self._open:
            stream.end()
        self._server.stop(0).wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
