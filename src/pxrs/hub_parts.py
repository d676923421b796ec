"""What one open hub consists of, shared by the modules that do its work: topics, sources, upkeep.

None of them refers to the `Hub` itself. A reference from a part back to the hub would be a cycle, and a hub that nobody
uses any more would stay open, with its files and threads, until the garbage collector looks for cycles.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from pxrs import arguments
from pxrs.address import LazyRegistry
from pxrs.belonging import Belonging
from pxrs.errors import Closed, InvalidArgument, InvalidUrl, UsedAfterFork
from pxrs.events.storing import EventStore
from pxrs.events.writer import EventWriter
from pxrs.hub_record import HubRecordFile
from pxrs.log.contract import Log
from pxrs.registry.address import parse

if TYPE_CHECKING:
    from pxrs.events import Event
    from pxrs.events.model import Json
    from pxrs.events.reading import Since, Wanted
    from pxrs.group.records import Home
    from pxrs.queue.store import QueueStore

FLUSH_S: Final = 1.0
"""How long `read_events` waits for events that this process has recorded and not stored yet."""


class HubParts:
    """A log, a registry, and whether they may be used by this process now."""

    def __init__(self, log: Log, registry: LazyRegistry, lease_ttl: float) -> None:
        """lease_ttl: that of the queues, in seconds."""
        self.log, self.registry = log, registry
        self.belonging = (
            None if log.folder is None else Belonging(log.url, HubRecordFile(log.folder), registry, log.check_place)
        )
        """Compares the registry with the one that the log's directory records. None for a log that is in no directory
        of this process: nothing here records which registry it belongs to. Of a log that a server keeps, the server
        compares them (`Log.identity`)."""
        store = EventStore(log, self._prepare_topic)
        self.events = EventWriter(store, log.url, now_us=lambda: self.log.clock.wall_time_us())
        """Records what happens to the hub."""
        self._lock = threading.Lock()
        self._lease_ttl = lease_ttl
        self._queues: QueueStore | None = None
        self.pid = os.getpid()
        self.is_closed = False
        """Set by `HubClients.end`, under its lock, before `Hub.close` closes anything."""

    def _prepare_topic(self) -> None:
        """Before an internal topic is created."""
        if self.belonging is not None:
            self.belonging.begin(keeps_unread=False)

    @property
    def url(self) -> str:
        return self.log.url

    @property
    def place(self) -> tuple[str, ...]:
        """The options that name this hub on the command line, for commands in messages; none for a hub in memory, which
        no command reaches."""
        log, registry = self.log, self.registry
        if registry.is_in_memory:
            return ()
        if log.is_kept_by_server:
            return "--at", log.url
        given = "--registry", registry.shown
        if log.folder is None:
            return given
        is_own = log.own_registry is not None and parse(log.own_registry) == registry.address
        return ("--at", log.url) if is_own else ("--at", log.url, *given)

    def check_usable(self) -> None:
        """Raise UsedAfterFork, Closed or HubMoved if this process may not use the hub, or not any more."""
        if os.getpid() != self.pid:
            raise UsedAfterFork(f"the hub {self.url} was opened before a fork: open it again in the child")
        self.check_open()
        self.log.check_place()

    def check_open(self) -> None:
        if self.is_closed:
            raise Closed(f"the hub {self.url} was closed")

    def check_registry(self) -> Home | None:
        """The identity of the hub, None if it has none yet. Raises WrongRegistry if the hub belongs to another registry
        than the one that it was opened with: then nothing of the hub may be coordinated through that."""
        self.check_usable()
        return self._told_by_server(joins=False) if self.belonging is None else self.belonging.check()

    def join_registry(self) -> Home | None:
        """As `check_registry`, before a member joins a group or a batch is published: if no registry is recorded for
        the hub, this one is recorded."""
        return self._told_by_server(joins=True) if self.belonging is None else self.belonging.join()

    def _told_by_server(self, *, joins: bool) -> Home | None:
        identity = self.log.identity(joins=joins)
        if identity is None:
            return None
        from pxrs.group.records import Home

        return Home(*identity)

    def check_registry_of_topics(self) -> Home | None:
        """As `check_registry`, before a group that reads topics is changed. Raises NoDirectory too: without a directory
        it is not known whether this registry is that of the topics."""
        self.log.check_topics()
        return self.check_registry()

    def adopt_registry(self) -> tuple[str, str]:
        """Make the hub belong to the registry that it was opened with. The addresses of the registry that it belonged
        to, empty if none is known, and of this one."""
        self.check_usable()
        self.log.check_topics()
        if self.log.is_kept_by_server:
            raise InvalidUrl(
                f"{self.url}: the server has the registry that it was started with: stop it, and run `pxrs registry "
                "adopt` with the hub's directory, where it is"
            )
        if self.belonging is None:
            raise InvalidUrl("a hub in memory always has the registry that it was opened with")
        former, now = self.belonging.adopt(topic.id for topic in self.log.topics())
        self.events.audit("adopt_registry", registry=now, former=former)
        self.events.record("hub.adopted_registry", registry=now, former=former)
        return former, now

    def record_audit(self, action: str, fields: Mapping[str, Json]) -> None:
        """See `Hub.record_audit`."""
        from pxrs.events.model import ACTION

        if not isinstance(action, str) or ACTION.fullmatch(action) is None:
            wanted = "give up to 50 lower-case letters and underscores, such as rolled_out"
            raise InvalidArgument(f"action is {arguments.shown(action)}: {wanted}")
        self.events.audit(action, **fields)

    def read_events(self, topic: str, wanted: Wanted, since: Since, *, follow: bool) -> Iterator[Event]:
        """The events of an internal topic that are wanted and not older than `since`, oldest first."""
        from pxrs.events.reading import read, since_us

        self.check_usable()
        self.log.check_topics()
        arguments.flag(InvalidArgument, "follow", follow)
        wanted = wanted._replace(since_us=since_us(since, self.log.clock.wall_time_us()))
        self.events.flush(FLUSH_S)  # a process finds what it has recorded itself
        return read(self.log, topic, wanted, self.check_usable, follow=follow)

    def queue_store(self) -> QueueStore:
        """What all queues of this hub share: this process's lease, and the threads that take and sweep."""
        from pxrs.queue.store import QueueStore

        self.check_registry()
        registry = self.registry.get()
        with self._lock:
            self.check_open()
            if self._queues is None:
                self._queues = QueueStore(registry, self._lease_ttl, self.events)
            return self._queues

    def close_queues(self) -> None:
        """After `is_closed` was set: no store can be made from then on."""
        with self._lock:
            queues = self._queues
        if queues is not None:
            queues.close()
