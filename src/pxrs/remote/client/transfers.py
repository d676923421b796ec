"""Streams that may take long: ranges of a topic, and staged files (`pxrs.publishing.staging.served`).

Such a stream may take as long as it makes progress: it is ended when the server has sent or taken nothing for
STALLED_S. gRPC's pings notice a connection that is cut sooner, and every stream on it then ends. A stream that breaks
is begun again when a server answers, a range behind the last batch that came. `Patience` counts the breaks, and gives
up after BREAKS_MAX of them without any progress in between.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import grpc
import pyarrow as pa

from pxrs.errors import PxrsError, ReadFailed, RegistryUnavailable
from pxrs.log.batch import Batch
from pxrs.registry.address import parse
from pxrs.remote import flight, wire
from pxrs.remote.client.channel import Channel
from pxrs.remote.client.connection import Connection, acquire, release
from pxrs.remote.client.faults import AWAY, Refused, Unanswered, error_in, is_lasting, text_of
from pxrs.remote.client.limits import Limit
from pxrs.remote.client.reads import read_batch
from pxrs.remote.client.settings import Settings

BREAKS_MAX: Final = 5
"""How many breaks in a row, without any progress, end a transfer. For each of them, a server may be away for the
`patience` of the address."""
STALLED_S: Final = 60.0
"""How long a transfer waits for the next message of the server, or until the server takes one. The server sends each
batch as soon as it has it. Twice as long as a busy server lets a stream wait before it ends the stream itself."""
PAUSE_S: Final = (0.05, 1.0)
"""After a break: the shortest pause, which grows, and the longest."""
_inherited: Final[list[Any]] = []
"""In a forked child: streams that its parent reads, and that the child has let go of. gRPC takes the lock of a stream
to cancel it, and also when it is freed. A thread that only the parent has may have held that lock at the fork, and the
child would wait for ever. So it does neither."""


def settings_of(url: str, token: str | None) -> Settings:
    """How to reach the server at this address. token: as for `connected`. Raises InvalidUrl."""
    settings = Settings.of(parse(url))
    return settings if token is None else replace(settings, token_file=None, given_token=token)


@contextmanager
def connected(url: str, token: str | None) -> Iterator[Connection]:
    """The connection of this process to the server at this address, for the block.

    token: what to show to the server, instead of what the address and the environment say; None: what they say.
    Raises InvalidUrl, UsedAfterFork. Does not connect."""
    connection = acquire(settings_of(url, token))
    try:
        yield connection
    finally:
        release(connection)


def ask(connection: Connection, call: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Make a call that may be repeated. Raises what the server answers; RegistryUnavailable if it stays away."""
    patience_s = connection.patience_s
    try:
        connection.await_first(time.monotonic() + patience_s)
        return connection.ask(call, arguments, patience_s)
    except Unanswered as error:
        raise RegistryUnavailable(f"{connection.settings.shown}: {error}") from error


class Stalled(Unanswered):
    """The server has sent or taken nothing for STALLED_S."""


class Patience:
    """How often one transfer is begun again."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._breaks = connection, 0

    @contextmanager
    def channel(self) -> Iterator[Channel]:
        """The channel to a server, which may be away for a while. Raises Unanswered."""
        until = time.monotonic() + self._connection.patience_s
        self._connection.await_first(until)
        with self._connection.channel(until) as channel:
            yield channel

    def note_progress(self) -> None:
        self._breaks = 0

    def after(self, error: Exception) -> None:
        """Return, after a pause, if the transfer may be tried again; raise RegistryUnavailable otherwise."""
        self._connection.check_open()
        self._breaks += 1
        if isinstance(error, Refused) or self._breaks > BREAKS_MAX:
            raise RegistryUnavailable(f"{self._connection.settings.shown}: {error}") from error
        if isinstance(error, Stalled):
            self._connection.check_answers()
        time.sleep(min(PAUSE_S[1], PAUSE_S[0] * 2**self._breaks) * random.uniform(0.5, 1))


@contextmanager
def answers() -> Iterator[None]:
    """Within it, a stream is begun and read. What gRPC raises becomes the error of pxrs with which the server has ended
    the stream, ReadFailed if trying again will not help, or Unanswered."""
    try:
        yield
    except grpc.RpcError as failure:
        error: PxrsError | None = error_in(failure)
        if error is not None:
            raise error from None
        raise (
            ReadFailed(text_of(failure)) if is_lasting(failure) else Unanswered(text_of(failure), was_sent=True)
        ) from None
    except (flight.MalformedMessage, KeyError, TypeError, pa.ArrowException) as error:
        raise ReadFailed(f"a message of the server cannot be read: {error}") from error
    except ValueError as error:  # the channel is closed
        raise Unanswered(str(error), was_sent=False) from None


@contextmanager
def kept(connection: Connection, limit: Limit, call: Any) -> Iterator[None]:
    """Within it, the stream `call` is used, and ended if it makes no progress. Raises Stalled then."""
    try:
        with connection.limits.kept(limit, call.cancel):
            yield
    except grpc.RpcError:
        if limit.is_over:
            raise Stalled(f"the server did nothing for {limit.seconds:g} s", was_sent=True) from None
        raise


def messages(
    connection: Connection, channel: Channel, ticket: Mapping[str, Any]
) -> Iterator[tuple[flight.FlightData, dict[str, Any]]]:
    """The messages of one stream after the schema, and the `app_metadata` of each. Raises as `answers` says; Stalled.

    channel: that of the connection"""
    call: Any = None
    limit, pid = Limit(STALLED_S), os.getpid()
    try:
        with answers():
            call = channel.get(flight.ticket(wire.dumps(ticket)), metadata=channel.metadata)
            with kept(connection, limit, call):
                for data in call:
                    limit.pause()  # the caller may take any time
                    message = flight.read_flight_data(data)
                    if len(message.app_metadata):
                        yield message, wire.loads(message.app_metadata)
                    limit.wait()
    finally:
        if call is not None and os.getpid() == pid:
            call.cancel()
        elif call is not None:
            _inherited.append(call)


def read_range(
    connection: Connection, topic: str, topic_id: str, partition: int, start: int, end: int
) -> Iterator[Batch]:
    """The batches of exactly this range, in order and without holes.

    Raises OffsetTrimmed or OffsetOutOfRange if a part of the range is not there, TopicDeleted if the topic of this name
    has another id, ReadFailed; RegistryUnavailable if the server stays away."""
    patience = Patience(connection)
    while start < end:
        ticket = {"topic": topic, "topic_id": topic_id, "partition": partition, "start": start, "end": end}
        ticket["schema"] = False
        try:
            with patience.channel() as channel:
                for message, about in messages(connection, channel, ticket):
                    with answers():
                        batch = read_batch(message, about)
                    if batch.base_offset != start or not start < batch.next_offset <= end:
                        raise ReadFailed(
                            f"{channel.target}: the server has sent offsets {batch.base_offset} to "
                            f"{batch.next_offset} of {topic}/{partition}, and {start} to {end} were asked for"
                        )
                    start = batch.next_offset
                    patience.note_progress()
                    yield batch
                if start < end:
                    raise Unanswered(f"{channel.target}: the stream ended at offset {start}", was_sent=True)
        except (Unanswered, *AWAY) as error:
            patience.after(error)
