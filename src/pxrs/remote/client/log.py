"""The log of a hub that a server keeps: see `pxrs.log.contract.Log`.

The server does all that needs the hub's directory: topics are created and deleted as on the hub itself, with what the
registry holds of them, and upkeep is the server's (W4).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from pxrs.errors import (
    DamagedFrame,
    LogNotReadable,
    OutcomeUnknown,
    ReadFailed,
    RegistryUnavailable,
    TopicExists,
)
from pxrs.log.contract import DamagedTopic, Log, TopicLog
from pxrs.model import Topic
from pxrs.registry.limit import seconds_left
from pxrs.remote import wire
from pxrs.remote.client.faults import AWAY, NothingListens, Unanswered
from pxrs.remote.client.routed import THREADS_MAX, RoutedTopic
from pxrs.remote.client.routes import AskedRoutes, Peers
from pxrs.remote.client.session import Session
from pxrs.remote.client.settings import Settings
from pxrs.remote.client.topic import RemoteTopic

IDENTITY_S: Final = 2.0
"""For how long the identity of the hub is not asked for again. A consumer asks for it with each checkpoint."""


RECORD_S: Final = 5.0
"""How long the server may take to store events."""


class RemoteLog(Log):
    """A handle to the log behind a server. Made without a connection: the first call connects."""

    is_kept_by_server = True

    def __init__(self, settings: Settings, address: str) -> None:
        """address: that of the server, with its options; the registry of the hub has the same."""
        self.url, self.own_registry = settings.shown, address
        self._session = Session(settings)
        self._settings = settings
        self._lock = threading.Lock()
        self._peers: Peers | None = None
        """The brokers of a cluster; None if the server is none of a cluster, or none was asked for yet."""
        self._crew: ThreadPoolExecutor | None = None
        self._routed: weakref.WeakSet[RoutedTopic] = weakref.WeakSet()
        self._identity: tuple[float, tuple[str, str] | None] | None = None
        """When the identity was last asked for, and what it was then."""

    def create_topic(self, topic: Topic) -> TopicLog:
        connection = self._session.connection()
        until = time.monotonic() + connection.patience_s
        was_sent = False
        while True:
            try:
                found = connection.call(
                    "log.create_topic",
                    {"settings": wire.topic_to_dict(topic)},
                    max(0.0, until - time.monotonic()),
                )
                made = self._handle(wire.topic_of(found["topic"]))
                made.warnings = tuple(map(str, found.get("warnings", ())))  # servers before 0.2 tell none
                return made
            except TopicExists:
                # If an earlier try was sent, this may be the topic that it has made: the id says so.
                if was_sent and (there := self._find(topic.name)) is not None and there.id == topic.id:
                    return self._handle(there)
                raise
            except (Unanswered, *AWAY) as error:
                self._session.connection()
                was_sent |= isinstance(error, Unanswered) and error.was_sent
                if time.monotonic() < until and not isinstance(error, NothingListens):
                    continue
                if was_sent:
                    raise OutcomeUnknown(
                        f"{self.url}: {error}; whether the topic {topic.name} was made is not known: look for it"
                    ) from error
                raise ReadFailed(f"{self.url}: {error}; the topic {topic.name} was not made") from error

    def _handle(self, topic: Topic) -> TopicLog:
        """The topic, as far as the server that has just answered can tell: that of one server, or of a cluster."""
        connection = self._session.connection()
        hello = connection.last_hello
        any_of_them = RemoteTopic(topic, self._session)
        if hello is None or not hello.is_cluster:
            return any_of_them
        with self._lock:
            if self._peers is None or self._crew is None:
                self._peers = Peers(self._settings)
                self._crew = ThreadPoolExecutor(THREADS_MAX, "pxrs-brokers")
            routes = AskedRoutes(topic, self._peers, any_of_them.owners, self._session.connection)
            routed = RoutedTopic(topic, routes, self._crew, self._settings.patience_s)
            self._routed.add(routed)
            return routed

    def _find(self, name: str) -> Topic | None:
        return next((each for each in self.topics() if each.name == name), None)

    def topics(self) -> list[Topic]:
        return [wire.topic_of(each) for each in self._session.ask("log.topics", {"internal": True})["topics"]]

    def damaged_topics(self) -> list[DamagedTopic]:
        found = []
        for each in self._session.ask("log.damaged_topics", {})["topics"]:
            error = wire.error_of(each["error"])
            if not isinstance(error, DamagedFrame | LogNotReadable):
                error = DamagedFrame(each["name"], 0, str(error))
            found.append(DamagedTopic(each["name"], each["id"], error))
        return found

    def topic(self, name: str) -> TopicLog:
        return self._handle(wire.topic_of(self._session.ask("log.topic", {"topic": name})["topic"]))

    def alter_topic(self, name: str, changes: Mapping[str, object]) -> TopicLog:
        connection = self._session.connection()
        arguments = {"topic": name, "changes": dict(changes)}
        try:
            found = connection.call("log.alter_topic", arguments, connection.patience_s)
        except Unanswered as error:
            if error.was_sent:
                raise OutcomeUnknown(
                    f"{self.url}: {error}; whether the settings of {name} were changed is not known: look, or repeat it"
                ) from error
            raise ReadFailed(f"{self.url}: {error}; the settings of {name} were not changed") from error
        return self._handle(wire.topic_of(found["topic"]))

    def delete_topic(self, name: str) -> str:
        connection = self._session.connection()
        try:
            return str(connection.call("log.delete_topic", {"topic": name}, connection.patience_s)["id"])
        except Unanswered as error:
            if error.was_sent:
                raise OutcomeUnknown(
                    f"{self.url}: {error}; whether the topic {name} was deleted is not known: look for it"
                ) from error
            raise ReadFailed(f"{self.url}: {error}; the topic {name} was not deleted") from error

    def record_events(self, events: Sequence[bytes]) -> None:
        connection = self._session.connection()
        try:
            # Not repeated here: the writer of events does that, and it must not wait for long.
            connection.call("events.record", {"events": [each.decode() for each in events]}, RECORD_S)
        except Unanswered as error:
            raise ReadFailed(f"{self.url}: {error}") from error

    def identity(self, *, joins: bool) -> tuple[str, str] | None:
        known = self._identity
        if known is not None and time.monotonic() < known[0] + IDENTITY_S and not (joins and known[1] is None):
            return known[1]
        asked_at = time.monotonic()
        connection = self._session.connection()
        try:
            # With the timeout and the error of the registry, and not with the patience of the log: who asks is about to
            # use the registry.
            found = connection.ask("hub.identity", {"joins": joins}, seconds_left(connection.settings.timeout_s))
        except Unanswered as error:
            raise RegistryUnavailable(f"{self.url}: {error}") from error
        identity = None if found["hub"] is None else (str(found["hub"]), str(found["place"]))
        self._identity = asked_at, identity
        return identity

    def close(self) -> None:
        self._session.close()  # a later call raises Closed before it needs what follows
        with self._lock:
            peers, crew, routed = self._peers, self._crew, list(self._routed)
        if peers is not None:
            peers.close()
        if crew is not None:
            crew.shutdown(wait=False, cancel_futures=True)
        for each in routed:
            each.wake()
