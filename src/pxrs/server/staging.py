"""Staging for Spark's tasks on other hosts: rows come in by `DoPut`, and are published where they are (K1, K5).

What is staged lies beside the log. In a hub's directory that is where local tasks stage too (`DirectoryStaging`), so a
query may be continued by a driver on either side of the server; in a cluster it lies on storage nodes, so any broker
serves it. A staged file is one stream of `DoPut`: it counts only if the
stream came to its last message, and it is durable before the client gets its name. A stream that breaks leaves nothing;
the client sends the file again, under another name.

The names that a client sends become names of folders and files, so all of them are checked. A sweep reads the manifests
of the hub's own registry: what they name stays, whatever the client says (W4).
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Final

from pxrs.disk import log_error
from pxrs.errors import InvalidArgument, InvalidRecord
from pxrs.log.contract import TopicLog
from pxrs.model import CODECS
from pxrs.publishing.feed import Feed
from pxrs.publishing.forgetting import needed_batches
from pxrs.publishing.staging.contract import StagingStore
from pxrs.publishing.staging.files import NewFile
from pxrs.publishing.staging.frames import Piece
from pxrs.remote import flight, wire
from pxrs.server.appends import AppendStream, Received, receive
from pxrs.server.given import Given
from pxrs.server.pools import run
from pxrs.server.reads import SCHEMA_MESSAGE, ReadStream
from pxrs.server.served import Result, Send, Served

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""The form of names of queries, files and members."""
_TOPIC_ID: Final = re.compile(r"[0-9a-f]{32}")
_BATCH_MAX: Final = (1 << 32) - 1
"""The number of a batch is the epoch of its producer."""
_RUN_MAX: Final = 60
"""How many characters the id of a run may have. It becomes a part of a file's name, where one may take up three."""
_GATHERED_BYTES: Final = 4 << 20
"""About how many bytes of a staged file are read at a time."""


def is_staged(ticket: Mapping[str, Any]) -> bool:
    """Whether a ticket is one for staged files."""
    return "staged" in ticket


# Names that a client has sent.


def _staging(served: Served) -> StagingStore:
    if served.staging is None:
        raise InvalidArgument(
            f"no rows can be staged for the hub {served.hub.url}: only hubs in a directory or a cluster support that"
        )
    return served.staging


def _name(given: Given, argument: str) -> str:
    return _checked(given, argument, given.text(argument))


def _checked(given: Given, argument: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{given.call}: {argument} must be up to 200 letters, digits, dots, dashes and underscores"
        )
    return name


def _names(given: Given, argument: str) -> list[str]:
    return [_checked(given, argument, name) for name in given.texts(argument)]


def _topic_id(given: Given) -> str:
    if not _TOPIC_ID.fullmatch(id := given.text("topic_id")):
        raise InvalidArgument(f"{given.call}: topic_id is not 32 hexadecimal digits")
    return id


def _batch(given: Given) -> int:
    if not 0 <= (batch := given.whole("batch")) <= _BATCH_MAX:
        raise InvalidArgument(f"{given.call}: batch is not between 0 and {_BATCH_MAX}")
    return batch


def _run(given: Given) -> str:
    if len(name := given.text("run")) > _RUN_MAX:
        raise InvalidArgument(f"{given.call}: run has more than {_RUN_MAX} characters")
    return name


def _place(given: Given) -> tuple[str, str, int]:
    """The topic, the query and the batch that a call is about."""
    return _topic_id(given), _name(given, "query"), _batch(given)


# Calls.


def _check_writable(served: Served, given: Given, at: float) -> Result:
    _staging(served).check_writable()
    return {}


def _announce(served: Served, given: Given, at: float) -> Result:
    try:
        feed = Feed.load(given.text("feed"))
        names = feed.incarnation, feed.topic
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise InvalidArgument(f"{given.call}: feed is not valid: {error}") from error
    if not all(isinstance(name, str) and _NAME.fullmatch(name) for name in names):
        raise InvalidArgument(f"{given.call}: feed must name a topic id and a member of a group")
    _staging(served).announce(_name(given, "query"), _batch(given), _run(given), feed)
    return {}


def _feeds(served: Served, given: Given, at: float) -> Result:
    found = _staging(served).feeds(_name(given, "query"), _batch(given), _run(given))
    return {"feeds": [feed.dump() for feed in found]}


def _make_durable(served: Served, given: Given, at: float) -> Result:
    return {"durable": _staging(served).make_durable(*_place(given), _names(given, "files"))}


def _publish(served: Served, given: Given, at: float) -> Result:
    topic, (_, query, batch) = served.topic(given), _place(given)
    if (ends := given.wholes("ends")) and len(ends) != topic.partitions:
        raise InvalidArgument(f"{given.call}: {len(ends)} ends, but {topic.name} has {topic.partitions} partitions")
    try:
        _staging(served).publish(topic, query, batch, _names(given, "files"), ends)
    except FileNotFoundError:
        return {"gone": True}
    return {"gone": False}


def _remove(served: Served, given: Given, at: float) -> Result:
    _staging(served).remove(*_place(given), _name(given, "file"))
    return {}


def _clear(served: Served, given: Given, at: float) -> Result:
    _staging(served).clear(*_place(given))
    return {}


def _forget_query(served: Served, given: Given, at: float) -> Result:
    _staging(served).forget_query(_topic_id(given), _name(given, "query"))
    return {}


def _sweep(served: Served, given: Given, at: float) -> Result:
    """What this hub's manifests need stays too: the client may have read them long ago, or in another registry. Ages
    count on this machine's clock, from before the manifests are read."""
    topic, theirs = _topic_id(given), given.mapping("needed")
    if not all(batch is None or type(batch) is int for batch in theirs.values()):
        raise InvalidArgument(f"{given.call}: needed has a batch that is neither an integer nor null")
    now = time.time()
    served.hub.check_registry()
    needed: dict[str, int | None] = dict(needed_batches(served.hub.registry, topic))
    for query, batch in theirs.items():
        # Two batches of one query: the staged files of both are needed, so nothing of the query is removed.
        needed[query] = batch if needed.get(query, batch) == batch else None
    _staging(served).sweep(topic, needed, now)
    return {}


def _keep_topic(served: Served, given: Given, at: float) -> Result:
    _staging(served).keep_topic(_topic_id(given))
    return {}


def _topics(served: Served, given: Given, at: float) -> Result:
    return {"topics": _staging(served).topics()}


def _changed_at(served: Served, given: Given, at: float) -> Result:
    return {"at": _staging(served).changed_at(_topic_id(given))}


def _forget_topic(served: Served, given: Given, at: float) -> Result:
    _staging(served).forget_topic(_topic_id(given))
    return {}


Function = Callable[[Served, Given, float], Result]


def _told(function: Function) -> Function:
    """The function; an error of the operating system becomes one of the log."""

    def call(served: Served, given: Given, at: float) -> Result:
        try:
            return function(served, given, at)
        except OSError as error:
            raise log_error(error) from error

    return call


CALLS: Final[dict[str, Function]] = {
    "staging.check_writable": _told(_check_writable),
    "staging.announce": _told(_announce),
    "staging.feeds": _told(_feeds),
    "staging.make_durable": _told(_make_durable),
    "staging.publish": _told(_publish),
    "staging.remove": _told(_remove),
    "staging.clear": _told(_clear),
    "staging.forget_query": _told(_forget_query),
    "staging.sweep": _told(_sweep),
    "staging.keep_topic": _told(_keep_topic),
    "staging.topics": _told(_topics),
    "staging.changed_at": _told(_changed_at),
    "staging.forget_topic": _told(_forget_topic),
}


# Streams.


class PutStream(AppendStream):
    """A stream of `DoPut`: appends, or the batches of one staged file."""

    async def _serve_begun(self, given: Given, messages: AsyncIterator[bytes], send: Send) -> None:
        if "stage" not in given.found:
            await super()._serve_begun(given, messages, send)
            return
        staged = Given("staging.stage", {**given.found, "query": given.found["stage"]})
        _, query, batch = _place(staged)
        task, staging, pool = staged.whole("task"), _staging(self._served), self._pools.staging
        topic = await run(pool, functools.partial(self._served.permitted_topic, staged))
        upload = _Upload(topic, lambda: staging.create(topic.topic, query, batch, task))
        is_finished = False
        try:
            while True:
                # A client sends its file at once: one that stops in the middle must not hold it for ever.
                async with self._in_time():
                    message = await self._next(messages)
                if message is None:
                    break
                data = flight.read_flight_data(message)
                if not len(data.header):
                    found = await run(pool, functools.partial(upload.finish, data))
                    is_finished = True
                    await send(flight.result(wire.dumps(found)))
                    return
                received = receive(message, self._limits.append_decoded_bytes_max)
                size = len(message) + received.layout.decoded_bytes
                taken = await self._budget.take(size, self._limits.append_rest_s)
                try:
                    await run(pool, functools.partial(upload.add, received))
                finally:
                    self._budget.give_back(taken)
            raise InvalidRecord(
                "the stream ended before its last message, and the staged file was discarded: send it again"
            )
        except OSError as error:
            raise log_error(error) from error
        finally:
            if not is_finished:
                await run(self._pools.releases, upload.discard)


class _Upload:
    """The file of one stream. Its methods run on threads of a pool. If the stream breaks, `discard` is called although
    another call may still run, which then leaves nothing either."""

    def __init__(self, topic: TopicLog, create: Callable[[], NewFile]) -> None:
        self._topic, self._create = topic, create
        self._lock = threading.Lock()
        self._file: NewFile | None = None
        self._is_discarded = False

    def _opened(self) -> NewFile:
        """Under the lock: the file, which is made for the first batch."""
        if self._is_discarded:
            raise InvalidRecord("the stream has ended")
        if self._file is None:
            self._file = self._create()
        return self._file

    def add(self, received: Received) -> None:
        append = received.append()
        number, most = append.partition, self._topic.partitions - 1
        if not 0 <= number <= most:
            raise InvalidRecord(f"{self._topic.name} has no partition {number}; it has 0 to {most}")
        with self._lock:
            self._opened().add(Piece(number, append.payload))

    def finish(self, data: flight.FlightData) -> Result:
        """The last message says how many rows there are: a client that has sent fewer has a fault."""
        try:
            rows = Given("DoPut", wire.loads(data.app_metadata)).whole("rows")
        except (ValueError, RecursionError) as error:
            raise InvalidRecord("the last message of a staged file must say how many rows it has") from error
        with self._lock:
            staged = self._opened().finish()
        if staged.rows != rows:
            raise InvalidRecord(f"received {staged.rows:,} rows of a staged file that has {rows:,}")
        return {"file": staged.name, "rows": staged.rows}

    def discard(self) -> None:
        with self._lock:
            self._is_discarded = True
            if self._file is not None:
                self._file.discard()


class StagedReadStream(ReadStream):
    """The batches of staged files, for a driver that reads them."""

    async def _answer(self, given: Given, send: Send) -> None:
        staged = Given("staging.read", {**given.found, "query": given.found["staged"]})
        _, query, batch = _place(staged)
        files, staging, pool = _names(staged, "files"), _staging(self._served), self._pools.staging
        topic = await run(pool, functools.partial(self._served.permitted_topic, staged))
        await send(SCHEMA_MESSAGE)
        pieces = staging.pieces(topic.topic, query, batch, files)
        while messages := await run(pool, functools.partial(_some, pieces)):
            for message in messages:
                taken = await self._room.take(len(message))
                try:
                    await self._room.send(self, message, send)
                finally:
                    self._room.budget.give_back(taken)


def _some(pieces: Iterator[Piece]) -> list[bytes]:
    """The messages of the next pieces; none at the end."""
    messages: list[bytes] = []
    size = 0
    try:
        for partition, payload in pieces:
            about: dict[str, Any] = {"partition": partition}
            if payload.codec:
                about["codec"] = CODECS[payload.codec]
            header, body = flight.ipc_message(payload.data)
            messages.append(flight.flight_data(flight.FlightData(header, body, wire.dumps(about))))
            size += payload.data.size
            if size > _GATHERED_BYTES:
                break
    except FileNotFoundError:
        messages.append(flight.flight_data(flight.FlightData(app_metadata=wire.dumps({"gone": True}))))
    except OSError as error:
        raise log_error(error) from error
    return messages
