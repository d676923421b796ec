"""One control stream: the calls of this process on their way, and what the server says unasked.

    callers (any thread)     put a `Request` into the outbox, and wait for its answer
    gRPC's sending thread    takes requests from the outbox, one at a time
    the reader (`run`)       hands answers to their requests, and events to `on_event`

States of a `Request`, all of them changed under `_lock`:

| state | becomes | when |
|---|---|---|
| queued | sent | gRPC's thread takes it: from now on it may reach the server |
| queued, sent | answered | the server's answer arrives |
| queued | without effect | the stream ends, or its caller stops waiting: gRPC's thread leaves it out |
| sent | lost | the stream ends, or its caller stops waiting: nobody knows whether it had an effect (W1) |

On failure: every request that has no answer ends at once, and the stream is not used again (`link` makes the next one).
If the server has ended the stream with an error of pxrs, as when the token was revoked, the connection is sound, and
the reads and appends on it may finish: the server answers the append that it is storing. Otherwise it is closed at
once. After a goodbye no request is sent any more, and the stream ends when those under way are answered. They may take
long, so a thread of their own reads their answers, and the reader is free to connect to another server.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any, Final, NamedTuple

import grpc

from pxrs.errors import PxrsError, WireMismatch
from pxrs.registry.values import Limits
from pxrs.remote import flight, wire
from pxrs.remote.client.channel import DRAIN_S_MAX, Channel
from pxrs.remote.client.faults import Refused, Unanswered, error_in, lasting_refusal, text_of
from pxrs.waiting import start_thread

_logger = logging.getLogger(__name__)

Answer = dict[str, Any] | Exception
OnDone = Callable[[Answer], object]
"""Called by the reader, which must not wait."""
_GOODBYE: Final = "the server announced that it is stopping"
_HELLO: Final = {"hello": {"wire": wire.VERSION, "client": f"pxrs {version('pxrs')}"}}


class Hello(NamedTuple):
    """What the server says first."""

    wire: int
    """The version of the protocol that both sides use."""
    instance: str
    """New with each start of the server."""
    limits: Limits
    """Those of one commit of the server's registry."""
    append_batches_max: int = 500
    append_bytes_max: int = 64 << 20
    """How large one append may be. A server that does not say it takes more than this."""
    is_cluster: bool = False
    """Whether the server is a broker of a cluster, whose partitions are served by several brokers."""


class Request:
    """One call. Its fields are guarded by the lock of its stream."""

    __slots__ = ("answer", "done", "is_sent", "message", "number", "on_done", "since")

    def __init__(self, number: int, message: bytes, on_done: OnDone | None) -> None:
        self.number, self.message, self.on_done = number, message, on_done
        self.is_sent = False
        self.since = time.monotonic()
        """When it was queued, or sent."""
        self.answer: Answer | None = None
        self.done = threading.Event()


class ControlStream:
    """A stream from its hello to its end. Threads share it; one thread calls `greet` and then `run`."""

    def __init__(self, channel: Channel, on_event: Callable[[int], object], on_goodbye: Callable[[], object]) -> None:
        """on_event: called by the reader with the number of a watch or subscription. on_goodbye: called by the reader
        when the server will end."""
        self.channel = channel
        self.hello = Hello(0, "", Limits(0, 0, 0))
        self._on_event, self._on_goodbye = on_event, on_goodbye
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._unanswered: dict[int, Request] = {}
        self._why: str | None = None
        """Why the stream has ended; None if it has not."""
        self._is_leaving = False
        """The server has said goodbye."""
        self._is_refused = False
        """The server has ended the stream with an error of pxrs."""
        self._heard_at = 0.0
        """When the last message came, on the monotonic clock."""
        self._call: Any = None
        self._is_given_up = False
        """Whether `greet` has cancelled the stream because no hello came in time."""

    # Beginning and ending.

    def greet(self, timeout_s: float) -> None:
        """Begin the stream. Raises Unanswered, Refused, and the error with which the server refuses this client."""
        timer: threading.Timer | None = None
        where = self.channel.target
        try:
            with self._lock:
                if self._why is not None:
                    raise Unanswered(f"{where}: {self._why}", was_sent=False)
                self._call = self.channel.exchange(self._messages(), metadata=self.channel.metadata)
            timer = threading.Timer(timeout_s, self._give_up)
            timer.daemon = True
            timer.start()
            self._take_hello(next(self._call))
        except grpc.RpcError as failure:
            error = lasting_refusal(failure, where) or error_in(failure)
            why = f"the server sent no hello within {timeout_s:g} s" if self._is_given_up else text_of(failure)
            raise error or Unanswered(f"{where}: {why}", was_sent=False) from None
        except StopIteration:
            raise Unanswered(f"{where}: the server ended the stream before its hello", was_sent=False) from None
        except (ValueError, TypeError, AttributeError, KeyError, flight.MalformedMessage) as error:
            raise Refused(f"{where}: not a pxrs server: {error}") from error
        finally:
            if timer is not None:
                timer.cancel()

    def _give_up(self) -> None:
        self._is_given_up = True
        self._call.cancel()

    def _take_hello(self, data: bytes) -> None:
        first = wire.loads(flight.read_flight_data(data).app_metadata)
        if "goodbye" in first:
            raise Unanswered(f"{self.channel.target}: the server is stopping", was_sent=False)
        found = first["hello"]
        theirs = found.get("wire")
        if not isinstance(theirs, int) or theirs < wire.VERSION_MIN:
            theirs = theirs if isinstance(theirs, int) else 0
            raise WireMismatch(wire.VERSION, theirs, theirs)
        known = {name: int(value) for name, value in found["limits"].items() if name in Limits.__dataclass_fields__}
        self.hello = Hello(
            min(theirs, wire.VERSION),
            str(found.get("instance")),
            Limits(**known),
            int(found.get("append_batches_max", Hello._field_defaults["append_batches_max"])),
            int(found.get("append_bytes_max", Hello._field_defaults["append_bytes_max"])),
            found.get("cluster") is True,
        )
        self._heard_at = time.monotonic()

    def run(self) -> str:
        """Read the stream until it has ended, or its server has said goodbye; why it takes no more requests."""
        why = self._read()
        if why is not None:
            return self.end(why)
        try:
            start_thread(self._read_rest, "pxrs-remote-leaving")
        except RuntimeError:  # the process has as many threads as it may have
            self._read_rest()
        return _GOODBYE

    @property
    def is_ended(self) -> bool:
        return self._why is not None

    def _read_rest(self) -> None:
        self.end(self._read(is_rest=True) or _GOODBYE)

    def _read(self, *, is_rest: bool = False) -> str | None:
        """Read until the stream has ended; why it has. is_rest: the server has said goodbye. If it says so now, None is
        returned while requests have no answer."""
        why = "the server ended the stream"
        try:
            for data in self._call:
                self._take(data)
                if self._is_leaving and not is_rest and self._why is None:
                    return None
        except grpc.RpcError as failure:
            error = error_in(failure)
            self._is_refused = error is not None
            why = str(error or text_of(failure))
        except (ValueError, TypeError, flight.MalformedMessage) as error:
            why = f"malformed message from the server: {error}"
        return why

    def end(self, why: str) -> str:
        """End the stream, and every request that has no answer. Any thread may call it. Returns the reason of the first
        call."""
        with self._lock:
            if self._why is not None:
                return self._why
            self._why = why
            unanswered, call = list(self._unanswered.values()), self._call
            self._unanswered.clear()
            for request in unanswered:
                text = f"{self.channel.target}: {why}"
                request.answer = Unanswered(text, was_sent=request.is_sent)
        self._outbox.put(None)
        if call is not None:
            call.cancel()
        if self._is_leaving or self._is_refused:
            self.channel.retire()
        else:
            self.channel.close()
        for request in unanswered:
            _tell(request)
        return why

    # Calls.

    def send(self, call: str, arguments: Mapping[str, Any], on_done: OnDone | None = None) -> Request:
        """Send a request without waiting for the answer. Raises Unanswered if the stream takes no more requests."""
        with self._lock:
            if self._why is not None or self._is_leaving:
                raise Unanswered(f"{self.channel.target}: {self._why or 'the server is stopping'}", was_sent=False)
            number = next(self._numbers)
            request = Request(number, wire.dumps({"id": number, "call": call, **arguments}), on_done)
            self._unanswered[number] = request
        self._outbox.put(request)
        return request

    def wait(self, request: Request, until: float) -> dict[str, Any]:
        """The result of the call. Raises the error that the server answered with, or Unanswered."""
        request.done.wait(max(0.0, until - time.monotonic()))
        with self._lock:
            if request.answer is None:
                self._unanswered.pop(request.number, None)
                text = f"{self.channel.target} did not answer within {time.monotonic() - request.since:.1f} s"
                request.answer = Unanswered(text, was_sent=request.is_sent)
        if isinstance(request.answer, Exception):
            raise request.answer
        return request.answer

    def is_silent_since(self, request: Request) -> bool:
        """Whether nothing has come from the server since the request was sent. One that is not sent waits until gRPC
        has sent what is before it: for ever, if the connection is cut without a message. That may also only be slow, so
        the silence must be twice as long as the request has waited."""
        with self._lock:
            waited_s = 0.0 if request.is_sent else time.monotonic() - request.since
            return self._heard_at < request.since - waited_s

    def _messages(self) -> Iterator[bytes]:
        """Called by gRPC, on a thread of its own."""
        yield flight.flight_data(flight.FlightData(command=wire.CONTROL, app_metadata=wire.dumps(_HELLO)))
        while (request := self._outbox.get()) is not None:
            with self._lock:
                if request.answer is not None:
                    continue
                request.is_sent, request.since = True, time.monotonic()
            yield flight.flight_data(flight.FlightData(app_metadata=request.message))

    # What the server says.

    def _take(self, data: bytes) -> None:
        found = wire.loads(flight.read_flight_data(data).app_metadata)
        self._heard_at = time.monotonic()
        if "event" in found:
            self._on_event(int(found["event"]))
        elif "goodbye" in found:
            _logger.info("the server %s is about to stop: %s", self.channel.target, found["goodbye"])
            self._leave()
        elif "id" in found:
            self._take_answer(found)

    def _take_answer(self, found: Mapping[str, Any]) -> None:
        with self._lock:
            request = self._unanswered.pop(int(found["id"]), None)
            if request is not None:
                error = found.get("error")
                request.answer = dict(found.get("result") or {}) if error is None else wire.error_of(error)
            is_done = self._is_leaving and not self._unanswered
        if request is not None:
            _tell(request)
        if is_done:
            self.end(_GOODBYE)

    def _leave(self) -> None:
        with self._lock:
            if self._is_leaving:
                return
            self._is_leaving = True
            is_done = not self._unanswered
        self._on_goodbye()
        if is_done:
            self.end(_GOODBYE)
            return
        timer = threading.Timer(DRAIN_S_MAX, self.end, (_GOODBYE,))
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # as above: nobody could end the stream later
            self.end(_GOODBYE)


def _tell(request: Request) -> None:
    request.done.set()
    if request.on_done is not None and request.answer is not None:
        try:
            request.on_done(request.answer)
        except PxrsError:  # pragma: no cover - a defect here must not end the reader
            _logger.exception("failed to handle an answer from the server")
