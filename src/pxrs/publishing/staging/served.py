"""Staging through the server of a hub, for tasks and drivers on other hosts (K5). docs/wire.md says what is sent.

What is staged lies in the hub's directory, on the server's side (`directory.py`). A task keeps the pieces of its file
in memory, beyond SPOOL_BYTES in a temporary file of its own machine, and sends them when the file is finished. If the
connection breaks, or the server is started again, it sends the whole file once more, and the server gives it another
name. Only a name that was answered can get into a manifest; the other file is removed with its batch.

The driver sends names alone. Rows go to the server once, and are appended there.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import IO, Any, Final, NamedTuple

import pyarrow as pa
import xxhash

from pxrs.errors import PxrsError, RegistryUnavailable
from pxrs.log.batch import SCHEMA, Payload
from pxrs.log.contract import TopicLog
from pxrs.model import CODECS, Topic
from pxrs.publishing.feed import Feed
from pxrs.publishing.staging.contract import Staging
from pxrs.publishing.staging.files import NewFile, Staged
from pxrs.publishing.staging.frames import Piece
from pxrs.remote import flight, wire
from pxrs.remote.client import transfers
from pxrs.remote.client.connection import Connection
from pxrs.remote.client.faults import AWAY, Unanswered
from pxrs.remote.client.limits import Limit
from pxrs.remote.client.transfers import Patience, answers, ask, connected, kept, messages

_logger = logging.getLogger(__name__)

SPOOL_BYTES: Final = 256 << 10
"""How many bytes of one file are kept in memory. A task may have files for many topics."""
PUBLISH_S_MAX: Final = 600.0
"""How long one call that publishes a batch may take. A longer one is made again: what is appended is not appended
twice."""


class _Spooled(NamedTuple):
    """One piece of a file that is not sent yet."""

    partition: int
    codec: int
    position: int
    size: int


class Spool:
    """The bytes of the pieces of one file: in memory while they are few, otherwise in a temporary file."""

    def __init__(self) -> None:
        self.pieces: list[_Spooled] = []
        self._kept: list[pa.Buffer] = []
        self._size = 0
        self._file: IO[bytes] | None = None

    def add(self, piece: Piece) -> None:
        data = piece.payload.data
        self.pieces.append(_Spooled(piece.partition, piece.payload.codec, self._size, data.size))
        self._size += data.size
        if self._file is not None:
            self._file.write(data)
            return
        self._kept.append(data)
        if self._size > SPOOL_BYTES:
            self._file = tempfile.TemporaryFile(prefix="pxrs-staged-")  # noqa: SIM115 - closed by `close`
            self._file.writelines(self._kept)
            self._kept = []

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def data(self, number: int) -> bytes | pa.Buffer:
        """The bytes of a piece. It does not move the position of the file: two threads of gRPC may be at work, of which
        one belongs to a stream that is broken."""
        if self._file is None:
            return self._kept[number]
        piece = self.pieces[number]
        return os.pread(self._file.fileno(), piece.size, piece.position)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class ServedFile(NewFile):
    """A staged file. It is sent by `finish`."""

    def __init__(self, staging: ServedStaging, place: Mapping[str, Any], task: int) -> None:
        """place: the topic by name and id, the query and the batch."""
        self._staging, self._place, self._task = staging, place, task
        self._spool = Spool()
        self._rows = 0
        self._name: str | None = None
        """The name that the server has answered."""
        self._is_discarded = False

    def add(self, piece: Piece) -> None:
        self._spool.add(piece)
        self._rows += piece.payload.rows

    def finish(self) -> Staged:
        if self._is_discarded:
            raise ValueError("this staged file was discarded and cannot be finished: create a new one")
        self._spool.flush()
        with self._staging.connected() as connection:
            self._name = self._send(connection)
        self._spool.close()
        return Staged(self._name, self._rows)

    def discard(self) -> None:
        self._is_discarded = True
        self._spool.close()
        if self._name is None:
            return  # the server keeps nothing of a file that is not finished
        try:
            self._staging.remove(self._place, self._name)
        except (
            PxrsError
        ) as error:  # not raised: the caller has an error of its own, and files that no manifest names go
            _logger.warning(
                "the staged file %s could not be discarded and stays until the next sweep: %s", self._name, error
            )

    def _send(self, connection: Connection) -> str:
        patience = Patience(connection)
        while True:
            call: Any = None
            try:
                with patience.channel() as channel, answers():
                    limit = Limit(transfers.STALLED_S)
                    call = channel.put(self._messages(limit), metadata=channel.metadata)
                    with kept(connection, limit, call):
                        answer = next(call, None)
                    if answer is not None:
                        return str(wire.loads(flight.read_result(answer))["file"])
                    raise Unanswered("the server has ended the stream without an answer", was_sent=True)
            except (Unanswered, *AWAY) as error:
                patience.after(error)
            finally:
                if call is not None:
                    call.cancel()

    def _messages(self, limit: Limit) -> Iterator[bytes]:
        """Called by gRPC, on a thread of its own: for the next message when the server has room for more."""
        command = wire.dumps({**self._place, "stage": self._place["query"], "task": self._task})
        yield flight.flight_data(flight.FlightData(flight.SCHEMA_HEADER, command=command))
        for number, piece in enumerate(self._spool.pieces):
            limit.wait()
            about: dict[str, Any] = {"partition": piece.partition}
            if piece.codec:
                about["codec"] = CODECS[piece.codec]
            header, body = flight.ipc_message(memoryview(self._spool.data(number)))
            yield flight.flight_data(flight.FlightData(header, body, wire.dumps(about)))
        limit.wait()
        yield flight.flight_data(flight.FlightData(app_metadata=wire.dumps({"rows": self._rows})))


class ServedStaging(Staging):
    """The staging place of the hub behind a server."""

    def __init__(self, url: str, token: str | None = None) -> None:
        """url: the address of the server. token: what to show to it, instead of what the address and the environment
        say."""
        self.url, self._token = url, token

    def __reduce__(self) -> tuple[type[ServedStaging], tuple[str, str | None]]:
        return ServedStaging, (self.url, self._token)

    def connected(self) -> AbstractContextManager[Connection]:
        """The connection of this process to the server."""
        return connected(self.url, self._token)

    def _ask(self, call: str, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Make a call that may be repeated. Raises what the server answers; RegistryUnavailable if it stays away."""
        with self.connected() as connection:
            return ask(connection, f"staging.{call}", arguments or {})

    def check_writable(self) -> None:
        self._ask("check_writable")

    # Feeds.

    def announce(self, query: str, batch: int, run: str, feed: Feed) -> None:
        self._ask("announce", {"query": query, "batch": batch, "run": run, "feed": feed.dump()})

    def feeds(self, query: str, batch: int, run: str) -> list[Feed]:
        return [Feed.load(text) for text in self._ask("feeds", {"query": query, "batch": batch, "run": run})["feeds"]]

    # Staged rows.

    def create(self, topic: Topic, query: str, batch: int, task: int) -> ServedFile:
        place = {"topic": topic.name, "topic_id": topic.id, "query": query, "batch": batch}
        return ServedFile(self, place, task)

    def pieces(self, topic: Topic, query: str, batch: int, files: Iterable[str]) -> Iterator[Piece]:
        """Reads the files from the server. `publish` does not: it appends them where they are."""
        ticket = {"staged": query, "topic": topic.name, "topic_id": topic.id, "batch": batch, "files": list(files)}
        with self.connected() as connection:
            try:
                with Patience(connection).channel() as channel:
                    for message, about in messages(connection, channel, ticket):
                        if about.get("gone"):
                            raise FileNotFoundError(f"staged files of batch {batch} of query {query} are gone")
                        yield _piece(message, about)
            except (Unanswered, *AWAY) as error:
                raise RegistryUnavailable(f"{connection.settings.shown}: {error}") from error

    def publish(self, topic: TopicLog, query: str, batch: int, files: Sequence[str], ends: Sequence[int]) -> None:
        place = {"topic": topic.name, "topic_id": topic.id, "query": query, "batch": batch}
        arguments = {**place, "files": list(files), "ends": list(ends)}
        with self.connected() as connection:
            patience = Patience(connection)
            while True:
                try:
                    with patience.channel():  # waits for a server that is away, no longer than the patience
                        found = connection.call("staging.publish", arguments, PUBLISH_S_MAX)
                    break
                except (Unanswered, *AWAY) as error:
                    patience.after(error)
        if found["gone"]:
            raise FileNotFoundError(f"staged files of batch {batch} of query {query} are gone")

    def make_durable(self, topic: str, query: str, batch: int, files: Sequence[str]) -> bool:
        arguments = {"topic_id": topic, "query": query, "batch": batch, "files": list(files)}
        return bool(self._ask("make_durable", arguments)["durable"])

    # Removing.

    def remove(self, place: Mapping[str, Any], file: str) -> None:
        """Remove one staged file, which no manifest names. place: as that of `ServedFile`."""
        self._ask("remove", {**place, "file": file})

    def clear(self, topic: str, query: str, batch: int) -> None:
        self._ask("clear", {"topic_id": topic, "query": query, "batch": batch})

    def forget_query(self, topic: str, query: str) -> None:
        self._ask("forget_query", {"topic_id": topic, "query": query})

    def sweep(self, topic: str, needed: Mapping[str, int | None], now: float | None = None) -> None:
        """The server reads the manifests itself, and counts ages on its own clock: `now` is not sent."""
        self._ask("sweep", {"topic_id": topic, "needed": dict(needed)})

    # Topics.

    def keep_topic(self, topic: str) -> None:
        self._ask("keep_topic", {"topic_id": topic})

    def topics(self) -> list[str]:
        return list(self._ask("topics")["topics"])

    def changed_at(self, topic: str) -> float:
        return float(self._ask("changed_at", {"topic_id": topic})["at"])

    def forget_topic(self, topic: str) -> None:
        self._ask("forget_topic", {"topic_id": topic})


def _piece(message: flight.FlightData, about: Mapping[str, Any]) -> Piece:
    import pyarrow.compute as pc  # imported here because tasks, which read no staged files, need not wait for it

    data = flight.encapsulated(message.header, message.body)
    records = pa.ipc.read_record_batch(data, SCHEMA)
    times = pc.min_max(records.column("timestamp").cast(pa.int64())).as_py()
    codec = CODECS.index(about.get("codec", CODECS[0]))
    checksum = xxhash.xxh3_64_intdigest(data)
    return Piece(int(about["partition"]), Payload(data, checksum, records.num_rows, times["min"], times["max"], codec))
