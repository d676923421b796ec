"""A topic of a hub that a server keeps: see `pxrs.log.contract.TopicLog`.

Reads and everything else that may be repeated wait for a server that is away, up to `patience`, and go on with the next
one; then they raise ReadFailed. An append waits in the same way before it is sent, and is sent once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pxrs.errors import (
    AppendFailed,
    AppendUnknown,
    HubMoved,
    InvalidArgument,
    InvalidRecord,
    LogError,
    NoWritePermission,
    PxrsError,
    RemoteError,
    ServerBusy,
    UnknownTopic,
)
from pxrs.log.batch import Batch, check_encoded
from pxrs.log.contract import READ_BYTES_DEFAULT, Append, Bounds, Fetched, RetentionPlan, TopicLog
from pxrs.log.outcomes import MaybeStored, NotStored, Outcome, StoredAt
from pxrs.model import Topic
from pxrs.remote import wire
from pxrs.remote.client.appends import encoded, parts
from pxrs.remote.client.connection import PAUSE_S_MAX, PAUSE_S_MIN, Connection
from pxrs.remote.client.faults import Refused, Unanswered
from pxrs.remote.client.reads import fetch
from pxrs.remote.client.session import Session
from pxrs.waiting import Callback, Subscription

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

    def offset_at(self, partition: int, timestamp: int) -> int:
        self._checked((partition,))
        return int(self._ask("topic.offset_at", partition=partition, timestamp=timestamp)["offset"])

    def end_before(self, partition: int, timestamp: int) -> int:
        self._checked((partition,))
        return int(self._ask("topic.end_before", partition=partition, timestamp=timestamp)["offset"])

    # Appending.

    def check_writable(self) -> None:
        self._ask("topic.check_writable")

    def append(self, appends: Sequence[Append]) -> list[Outcome]:
        for each in appends:
            self._checked((each.partition,))
            check_encoded(each.payload)
        outcomes: dict[int, Outcome] = {}
        stopped: Exception | None = None
        for indexes in parts(appends, self._session.connection().last_hello):
            if stopped is None:
                try:
                    found = self._append([appends[index] for index in indexes])
                except PxrsError as error:
                    if not outcomes:
                        raise
                    stopped = error  # earlier parts have outcomes of their own
                else:
                    if all(not isinstance(each, StoredAt) and isinstance(each.error, AppendFailed) for each in found):
                        stopped = AppendFailed(f"{self._session.url}: not sent, because what came before it failed")
                    outcomes |= zip(indexes, found, strict=True)
                    continue
            outcomes |= dict.fromkeys(indexes, NotStored(stopped))
        return [outcomes[index] for index in range(len(appends))]

    def _append(self, appends: Sequence[Append]) -> list[Outcome]:
        """One append of the wire."""
        connection = self._session.connection()
        last = len(appends) - 1
        batches = [encoded(each, has_more=number < last) for number, each in enumerate(appends)]
        try:
            answers = self._send(connection, batches)
        except Unanswered as error:
            if not error.was_sent:
                return [NotStored(AppendFailed(f"{self._session.url}: {error}; nothing was sent"))] * len(appends)
            text = f"{self._session.url}: {error}; no answer came, so the batch may be stored"
            return [MaybeStored(AppendUnknown(text))] * len(appends)
        except ServerBusy as error:
            return [NotStored(AppendFailed(f"{self._session.url}: {error}"))] * len(appends)
        except AppendUnknown as error:
            return [MaybeStored(error)] * len(appends)
        outcomes = [_outcome(found) for found in answers]
        refusals = [each.error for each in outcomes if isinstance(each, NotStored)]
        if len(refusals) == len(outcomes) and isinstance(refusals[0], _OF_THE_WHOLE):
            raise refusals[0]
        return outcomes

    def _send(self, connection: Connection, batches: Sequence[bytes]) -> list[dict[str, Any]]:
        """Send one append, once. It is tried again only if nothing of it was sent."""
        until = time.monotonic() + connection.patience_s
        pause_s = PAUSE_S_MIN
        while True:
            try:
                with connection.channel(until) as channel:
                    return connection.puts.append(channel, self.name, self.id, batches, connection.patience_s)
            except Unanswered as error:
                if error.was_sent or isinstance(error, Refused) or time.monotonic() + pause_s >= until:
                    raise
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
