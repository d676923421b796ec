"""A topic of a hub that a server keeps: see `pxrs.log.contract.TopicLog`.

Reads and everything else that may be repeated wait for a server that is away, up to `patience`, and go on with the next
one; then they raise ReadFailed. An append waits in the same way before it is sent, and is sent once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from pxrs.errors import (
    AppendFailed,
    AppendUnknown,
    DamagedFrame,
    HubMoved,
    InvalidArgument,
    InvalidRecord,
    LogError,
    NoWritePermission,
    OffsetOutOfRange,
    PxrsError,
    ReadFailed,
    RegistryUnavailable,
    RemoteError,
    ServerBusy,
    UnknownTopic,
)
from pxrs.log.batch import Batch, check_encoded
from pxrs.log.contract import READ_BYTES_DEFAULT, Append, Bounds, Fetched, RetentionPlan, TopicLog
from pxrs.log.outcomes import MaybeStored, NotStored, Outcome, StoredAt
from pxrs.model import Topic
from pxrs.remote import wire
from pxrs.remote.client.appends import Sent, parts
from pxrs.remote.client.connection import PAUSE_S_MAX, PAUSE_S_MIN, Connection
from pxrs.remote.client.faults import Refused, Unanswered
from pxrs.remote.client.reads import fetch
from pxrs.remote.client.session import Session
from pxrs.remote.client.transfers import read_range
from pxrs.waiting import Callback, Subscription, seconds_left

OWNERS_S: Final = 2.0
"""How long a broker may take to say who owns the partitions of a topic."""
_OF_THE_WHOLE: Final = (UnknownTopic, HubMoved, InvalidArgument, NoWritePermission, RemoteError)
"""Errors that a log raises for a whole append, before anything is stored."""


class RemoteTopic(TopicLog):
    """A handle to one topic. Threads share it."""

    has_latency = True

    def __init__(self, topic: Topic, session: Session) -> None:
        self.topic = topic
        self.name, self.id, self.partitions = topic.name, topic.id, topic.partitions
        self.keeps_unread = topic.keeps_unread
        self._session = session
        self._place = {"topic": topic.name, "topic_id": topic.id}

    # Reading.

    def bounds(self, partitions: Iterable[int]) -> dict[int, Bounds]:
        chosen = self._checked(partitions)
        if not chosen:
            return {}
        found = self._ask("topic.bounds", partitions=chosen)["bounds"]
        return {partition: Bounds(start, end) for partition, start, end in found}

    def read(self, partition: int, offset: int, max_bytes: int = READ_BYTES_DEFAULT) -> list[Batch]:
        found = self._read_all({partition: offset}, max_bytes).get(partition, Fetched())
        if found.error is not None:
            raise found.error
        return list(found.batches)

    def batches(self, partition: int, start: int, end: int | None = None) -> Iterator[Batch]:
        """One stream, on which the server sends the next batches while the last one is handled."""
        self._checked((partition,))
        until = end
        while end is None or start < end:
            try:
                if until is None:
                    until = self.end(partition) if end is None else min(end, self.end(partition))
            except DamagedFrame:  # the end cannot be told, and what lies before the damage can be read
                yield from super().batches(partition, start, end)
                return
            if start == until:
                return
            if start > until:
                raise OffsetOutOfRange(f"{self.name}/{partition}", start, until)
            try:
                for batch in read_range(self._session.connection(), self.name, self.id, partition, start, until):
                    yield batch
                    # A forked child must not read on from the stream: gRPC's thread, which fills it, is not there.
                    self._session.connection()
                    start = batch.next_offset
            except RegistryUnavailable as error:
                raise ReadFailed(str(error)) from error
            except OffsetOutOfRange:  # less is there than was asked for
                if until != end:
                    raise
            until = None

    def readable(self, positions: Mapping[int, int]) -> list[int]:
        found = self.bounds(positions)
        return [partition for partition, offset in positions.items() if found[partition].end != offset]

    def _read_all(self, positions: Mapping[int, int], max_bytes: int) -> dict[int, Fetched]:
        """One request for all partitions, instead of one for each."""
        self._checked(positions)
        if not positions:
            return {}
        ticket = {
            **self._place,
            "positions": [list(each) for each in positions.items()],
            "max_bytes": max(1, max_bytes),
            "schema": False,
        }

        def attempt(connection: Connection, until: float) -> dict[int, Fetched]:
            with connection.channel(until) as channel:
                return fetch(channel, ticket, max(0.001, until - time.monotonic()))

        return self._session.patiently(attempt)

    def subscribe(self, partitions: Iterable[int], callback: Callback) -> Subscription:
        chosen = self._checked(partitions)
        subscriptions = self._session.subscriptions

        def attempt(connection: Connection, until: float) -> Subscription:
            return subscriptions.add(self.name, self.id, chosen, callback, max(0.0, until - time.monotonic()))

        return self._session.patiently(attempt)

    def owners(self) -> dict[int, str]:
        """Any broker answers from memory. One from which nothing comes for OWNERS_S is taken for dead, and the next
        one is asked: the connection itself would notice only after the keep-alive of gRPC."""

        def attempt(connection: Connection, until: float) -> dict[str, Any]:
            left_s = max(0.0, until - time.monotonic())
            return connection.call("topic.owners", self._place, min(OWNERS_S, left_s), is_renewal=True)

        found = self._session.patiently(attempt)
        return {int(partition): str(address) for partition, address in found["owners"]}

    def offset_at(self, partition: int, timestamp: int) -> int:
        self._checked((partition,))
        return int(self._ask("topic.offset_at", partition=partition, timestamp=timestamp)["offset"])

    # Appending.

    def check_writable(self) -> None:
        self._ask("topic.check_writable")

    def append(self, appends: Sequence[Append]) -> list[Outcome]:
        for each in appends:
            self._checked((each.partition,))
            check_encoded(each.payload)
        indexes = parts(appends, self._session.connection().last_hello)
        sent = self._send([[appends[index] for index in part] for part in indexes])
        outcomes: dict[int, Outcome] = {}
        for part, answer in zip(indexes, sent.answers, strict=False):
            outcomes |= zip(part, map(_outcome, answer), strict=True)
        for number in range(len(sent.answers), len(indexes)):
            assert sent.error is not None
            outcomes |= dict.fromkeys(indexes[number], self._unanswered(sent.error, may_be=number < sent.reached))
        found = [outcomes[index] for index in range(len(appends))]
        refusals = [each.error for each in found if isinstance(each, NotStored)]
        if found and len(refusals) == len(found) and isinstance(refusals[0], _OF_THE_WHOLE):
            raise refusals[0]
        return found

    def _unanswered(self, error: Exception, *, may_be: bool) -> Outcome:
        """The outcome of batches without an answer. may_be: they may have reached the server."""
        if not isinstance(error, Unanswered):
            return NotStored(AppendFailed(f"{self._session.url}: {error}") if isinstance(error, ServerBusy) else error)
        if not may_be:
            return NotStored(AppendFailed(f"{self._session.url}: {error}; nothing was sent"))
        return MaybeStored(AppendUnknown(f"{self._session.url}: {error}; no answer, so the batch may have been stored"))

    def _send(self, parts: Sequence[Sequence[Append]]) -> Sent:
        """Send the parts, once. They are tried again only if nothing of them was sent."""
        connection = self._session.connection()
        until = time.monotonic() + seconds_left(connection.patience_s)
        pause_s = PAUSE_S_MIN
        while True:
            try:
                with connection.channel(until) as channel:
                    sent = connection.puts.append(channel, self.name, self.id, parts, connection.patience_s)
            except Unanswered as error:
                sent = Sent([], error)
            if not isinstance(sent.error, Unanswered) or sent.error.was_sent or isinstance(sent.error, Refused):
                return sent
            if connection.settings.is_direct or time.monotonic() + pause_s >= until:
                return sent
            self._session.connection()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    # Retention.

    def plan_retention(self, now: int, unread: Mapping[int, int] | None = None) -> RetentionPlan:
        pairs = None if unread is None else [list(each) for each in unread.items()]
        found = self._ask("topic.plan_retention", now=now, unread=pairs)
        errors = [wire.error_of(each) for each in found["errors"]]
        return RetentionPlan(dict(map(tuple, found["starts"])), [each for each in errors if isinstance(each, LogError)])

    def trim(self, starts: Mapping[int, int]) -> dict[int, int]:
        self._checked(starts)
        return dict(map(tuple, self._ask("topic.trim", starts=[list(each) for each in starts.items()])["moved"]))

    def retention_problem(self) -> str | None:
        found: str | None = self._ask("topic.retention_problem")["problem"]
        return found

    # What they share.

    def _ask(self, call: str, **arguments: Any) -> dict[str, Any]:
        return self._session.ask(call, {**self._place, **arguments})

    def _checked(self, partitions: Iterable[int]) -> list[int]:
        """The partitions as a list. Raises InvalidRecord if the topic has no such partition, Closed, UsedAfterFork."""
        chosen = list(partitions)
        for partition in chosen:
            if not 0 <= partition < self.partitions:
                raise InvalidRecord(f"{self.name} has no partition {partition}; it has 0 to {self.partitions - 1}")
        self._session.connection()
        return chosen


def _outcome(found: Mapping[str, Any]) -> Outcome:
    if "error" not in found:
        return StoredAt(int(found["offset"]), bool(found.get("duplicate")))
    error: PxrsError = wire.error_of(found["error"])
    return MaybeStored(error) if found.get("maybe") else NotStored(error)
