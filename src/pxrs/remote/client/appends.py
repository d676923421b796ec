"""Appends: batches go out on a stream of `DoPut`, and each is answered when it is durable (W1).

A stream is used by one thread at a time and is kept for the next one. Many batches are sent as several appends of the
wire, the parts, one after another without a wait for the answers: the server stores one part while the next one comes.
Nothing is ever resent here. What a failure proves of the parts that have no answer:

| when the stream fails | what is known of a part |
|---|---|
| before gRPC has taken a batch of it | it was not sent |
| the server has ended the stream with an error of `CERTAIN` | it is not stored: the server decides before it stores |
| otherwise, as when the connection is lost | nothing: each of its batches may be stored |

The errors of `CERTAIN` prove this because the server sends the answers to what it has stored before the error, and gRPC
delivers them in that order.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import grpc

from pxrs.errors import (
    HubMoved,
    InvalidArgument,
    NotPermitted,
    NoWritePermission,
    ServerBusy,
    Unauthenticated,
    UnknownTopic,
)
from pxrs.log.batch import ANONYMOUS
from pxrs.log.contract import Append
from pxrs.model import CODECS
from pxrs.remote import flight, wire
from pxrs.remote.client.channel import Channel
from pxrs.remote.client.control import Hello
from pxrs.remote.client.faults import Unanswered, error_in, text_of
from pxrs.remote.client.limits import Limit, Limits
from pxrs.waiting import limit_until

IDLE_MAX: Final = 8
"""How many idle streams are kept. Each has a thread of gRPC's, which sends."""
CERTAIN: Final = (
    *(InvalidArgument, UnknownTopic, HubMoved, NoWritePermission, NotPermitted, ServerBusy),
    Unauthenticated,  # the token was revoked or has expired since the stream began
)
"""Errors that end a stream of appends before the append that is under way is stored."""
PART_BATCHES, PART_BYTES = 500, 4 << 20
"""How large one append of the wire becomes, unless one partition has more. Smaller parts are synced to disk more often;
larger ones let the server wait longer before it begins to store."""


def parts(appends: Sequence[Append], hello: Hello | None) -> list[list[int]]:
    """How to send many batches: as one or more appends of the wire, each given by the indexes of its batches. Batches
    of one partition are stored all or none, so they stay together, and in order."""
    batches_max, bytes_max = PART_BATCHES, PART_BYTES
    if hello is not None:
        # Half of the bytes: the server also counts what it decompresses.
        batches_max, bytes_max = min(batches_max, hello.append_batches_max), min(bytes_max, hello.append_bytes_max // 2)
    by_partition: dict[int, list[int]] = {}
    for index, append in enumerate(appends):
        by_partition.setdefault(append.partition, []).append(index)
    found: list[list[int]] = []
    size = 0
    for indexes in by_partition.values():
        more = sum(len(appends[index].payload.data) for index in indexes)
        if not found or len(found[-1]) + len(indexes) > batches_max or size + more > bytes_max:
            found.append([])
            size = 0
        found[-1] += indexes
        size += more
    return found


class Sent(NamedTuple):
    """What became of the parts that were sent together."""

    answers: list[list[dict[str, Any]]]
    """The answers to the first parts: the outcome of each batch."""
    error: Exception | None = None
    """Why the other parts have no answer: an error of `CERTAIN`, or Unanswered."""
    reached: int = 0
    """With Unanswered: how many of the first parts may have reached the server."""


def encoded(append: Append, *, has_more: bool) -> bytes:
    """One batch as a message. Its bytes are those that the log will store."""
    about: dict[str, Any] = {"partition": append.partition}
    if append.origin != ANONYMOUS:
        about["producer"] = append.origin.producer.hex
        about["epoch"], about["sequence"] = append.origin.epoch, append.origin.sequence
    if append.since is not None:
        about["since"] = append.since
    if append.payload.codec:
        about["codec"] = CODECS[append.payload.codec]
    if has_more:
        about["more"] = True
    header, body = flight.ipc_message(append.payload.data)
    return flight.flight_data(flight.FlightData(header, body, wire.dumps(about)))


class PutStream:
    """One stream. Used by one thread at a time."""

    def __init__(self, channel: Channel, topic: str, topic_id: str) -> None:
        """Raises Unanswered if the channel was closed."""
        self.channel, self.topic_id = channel, topic_id
        self._outbox: queue.SimpleQueue[tuple[Append, bool] | None] = queue.SimpleQueue()
        """Batches, and whether another one of the same part follows."""
        self._taken = 0
        """How many batches gRPC's thread has taken: those may have been sent."""
        self._command = wire.dumps({"topic": topic, "topic_id": topic_id})
        try:
            self.call: Any = channel.put(self._messages(), metadata=channel.metadata)
        except ValueError as error:  # the channel is closed
            raise Unanswered(f"{channel.target}: {error}", was_sent=False) from None

    @property
    def is_active(self) -> bool:
        return bool(self.call.is_active())

    def append(self, parts: Sequence[Sequence[Append]], progress: Callable[[], None]) -> Sent:
        """Send the parts, and wait for the answer to each. progress: is called after each answer. After an error the
        stream must not be used again."""
        before = self._taken
        for part in parts:
            for number, append in enumerate(part, 1):
                self._outbox.put((append, number < len(part)))
        answers: list[list[dict[str, Any]]] = []
        try:
            for part in parts:
                found = wire.loads(flight.read_result(next(self.call)))["outcomes"]
                if len(found) != len(part):
                    raise ValueError(f"expected {len(part)} outcomes, got {len(found)}")
                answers.append(found)
                progress()
            return Sent(answers)
        except grpc.RpcError as failure:
            error = error_in(failure)
            if isinstance(error, CERTAIN):
                return Sent(answers, error)
            text = f"{error or text_of(failure)}"
        except StopIteration:
            text = "the server ended the stream"
        except (KeyError, TypeError, ValueError, flight.MalformedMessage) as error:
            # The call has not ended, so gRPC may take and send a batch at this moment.
            unreadable = Unanswered(f"{self.channel.target}: malformed answer: {error}", was_sent=True)
            return Sent(answers, unreadable, len(parts))
        # The call has ended: what gRPC takes from now on is not sent.
        starts = accumulate((len(part) for part in parts), initial=before)
        reached = sum(self._taken > start for start, _ in zip(starts, parts, strict=False))
        return Sent(answers, Unanswered(f"{self.channel.target}: {text}", was_sent=reached > 0), reached)

    def end(self) -> None:
        """Idempotent."""
        self.call.cancel()
        self._outbox.put(None)

    def _messages(self) -> Iterator[bytes]:
        """Called by gRPC, on a thread of its own. A batch is copied into a message only when gRPC can send it."""
        yield flight.flight_data(flight.FlightData(flight.SCHEMA_HEADER, command=self._command))
        while (item := self._outbox.get()) is not None:
            append, has_more = item
            self._taken += 1
            yield encoded(append, has_more=has_more)


class PutStreams:
    """The streams of one connection. Threads share it."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._idle: deque[PutStream] = deque()
        """The one that was used last comes last."""
        self._is_closed = False

    def append(
        self, channel: Channel, topic: str, topic_id: str, parts: Sequence[Sequence[Append]], timeout_s: float
    ) -> Sent:
        """Send the parts on a stream, and wait for the answers, for each no longer than this after the one before it.
        Raises Unanswered if there can be no stream. The limit of this thread (`waiting.time_limit`) counts too."""
        stream = self._idle_one(channel, topic_id) or PutStream(channel, topic, topic_id)
        sent: Sent | None = None
        limit = Limit(timeout_s, limit_until())
        try:
            with self._limits.kept(limit, stream.end):
                sent = stream.append(parts, limit.wait)
            return sent
        finally:
            self._give_back(stream, is_good=sent is not None and sent.error is None)

    def end_idle(self) -> None:
        """End the streams that nobody uses now: the server waits for them before it ends."""
        with self._lock:
            idle = list(self._idle)
            self._idle.clear()
        for stream in idle:
            stream.end()

    def close(self) -> None:
        """End the streams that nobody uses, and keep none from now on. Idempotent."""
        with self._lock:
            self._is_closed = True
        self.end_idle()

    def _idle_one(self, channel: Channel, topic_id: str) -> PutStream | None:
        found, dead = None, []
        with self._lock:
            for stream in list(self._idle):
                if not stream.is_active or stream.channel is not channel:
                    self._idle.remove(stream)
                    dead.append(stream)
                elif stream.topic_id == topic_id and found is None:
                    self._idle.remove(stream)
                    found = stream
        for stream in dead:
            stream.end()
        return found

    def _give_back(self, stream: PutStream, *, is_good: bool) -> None:
        ended: PutStream | None = stream
        with self._lock:
            if is_good and not self._is_closed:
                self._idle.append(stream)
                ended = self._idle.popleft() if len(self._idle) > IDLE_MAX else None
        if ended is not None:
            ended.end()
