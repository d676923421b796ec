"""`pxrs.open`, and the `Hub` that it returns: a log and a registry, and everything that users do with them.

Nothing is created by a mistyped name: a topic exists once `create_topic` has made it, and asking for another name is an
error. `close` goes from the users of the log and the registry to those two: queues; consumers, which still write
checkpoints; producers, which still append; upkeep; sources; the event log, into which all of these write; the log; the
registry.
"""

from __future__ import annotations

import os
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar, Unpack, overload

from pxrs import arguments, dropped
from pxrs.address import LazyRegistry, open_log
from pxrs.errors import Closed, InvalidArgument, InvalidGroup, InvalidQueue, InvalidTopic, InvalidUrl
from pxrs.hub_parts import HubParts
from pxrs.hub_sources import HubSources
from pxrs.log.contract import DamagedTopic, Log, Source, TopicLog
from pxrs.log.joined import JoinedSource
from pxrs.metrics import otel
from pxrs.model import (
    AUDIT_TOPIC,
    EVENTS_TOPIC,
    PARTITIONS_DEFAULT,
    SEGMENT_BYTES_DEFAULT,
    TABLE_POLL_S_DEFAULT,
    Topic,
    is_internal,
    refuse_internal,
)
from pxrs.registry.contract import Registry
from pxrs.registry.lease import LEASE_TTL_MIN
from pxrs.topics import TopicHandle, Topics
from pxrs.upkeep.janitor import Janitor, UpkeepStatus
from pxrs.upkeep.records import RoundReport

LEASE_TTL_DEFAULT: Final = 10.0
EVENTS_S: Final = 1.0
"""How long `events` and `audit` wait for events that this process has recorded and not stored yet."""
RETENTION_S_MAX: Final = 100 * 366 * 86_400.0
"""A hundred years. Far more could not be subtracted from the time of a message."""

# Over the limit: this file is the reference of the public operations, each with its documentation. The work is done in
# the modules that it calls.
if TYPE_CHECKING:
    # Imported by the methods that need them: a process of Spark that opens a hub starts in half the time without them.
    from pxrs.consumer.consumer import Consumer, TopicsConsumer
    from pxrs.copying.copier import Copied
    from pxrs.events import Event
    from pxrs.events.model import Json
    from pxrs.events.reading import Since, Wanted
    from pxrs.group.admin import GroupHandle
    from pxrs.group.records import Home
    from pxrs.options import (
        ConsumerOptions,
        EitherConsumerOptions,
        ProducerOptions,
        QueueChanges,
        TopicChanges,
        TopicsConsumerOptions,
    )
    from pxrs.producer.producer import Producer
    from pxrs.producer.sending import SendingThread
    from pxrs.queue.handle import QueueHandle
    from pxrs.queue.policy import Backoff, Policy
    from pxrs.queue.transaction import Transaction
    from pxrs.sources.catalog import RegisteredSource
    from pxrs.sources.sql_table import SqlTable


class _Made(Protocol):
    """What a hub makes: it refers to the hub."""

    hub: object


M = TypeVar("M", bound=_Made)


def open(
    url: str | os.PathLike[str] | None = None,
    registry: str | os.PathLike[str] | None = None,
    *,
    lease_ttl: float | timedelta = LEASE_TTL_DEFAULT,
    upkeep: bool = True,
) -> Hub:
    """Open a hub: a log and its registry.

    url:       a directory, `memory:` for this process alone, or `pxrs://HOST:PORT` for the hub of a server
               (docs/serve.md). The first `create_topic` makes the directory. Without a url, `registry` must be given:
               such a hub has the queues of that registry and the groups of sources that are no topics; what needs
               topics raises NoDirectory.
    registry:  the address of the store that keeps the coordination, as `pxrs.registry.open` takes it. By default it is
               kept with the messages. Not with `pxrs://`: the server has the registry of its hub.
    lease_ttl: how long after its last renewal the lease of this process ends; then other processes get the queue items
               that it has taken.
    upkeep:    whether this hub may be elected to do the upkeep of its directory, such as retention: see `pxrs.upkeep`.
    """
    ttl = arguments.seconds(InvalidQueue, "lease_ttl", lease_ttl, LEASE_TTL_MIN, arguments.DAY_S)
    arguments.flag(InvalidArgument, "upkeep", upkeep)
    given = None if registry is None else LazyRegistry(registry)
    if url is None:
        if given is None:
            raise InvalidUrl("the url was not given: give a directory, memory:, or registry=... for queues alone")
        from pxrs.log.absent import AbsentLog

        return Hub(AbsentLog(given.shown), given, lease_ttl=ttl, upkeep=upkeep)
    log = open_log(url)
    if given is None:
        if log.own_registry is None:
            log.close()
            raise InvalidUrl(f"{log.url} keeps no registry of its own: give its address as registry=...")
        given = LazyRegistry(log.own_registry)
    elif log.is_kept_by_server:
        log.close()
        raise InvalidUrl(
            f"{log.url}: the server has the registry of its hub: give none (registry=..., --registry, PXRS_REGISTRY)"
        )
    return Hub(log, given, lease_ttl=ttl, upkeep=upkeep)


class Hub:
    """A log and a registry that are open: topics, producers, consumers, groups, queues. Threads share it; a forked
    child must open its own.

    Close it, by `close` or a `with` block. A hub that is dropped without that closes itself, with a ResourceWarning,
    when neither it nor a consumer, producer, transaction or handle that it made is referenced any more."""

    # Over the limit: a user finds every operation here, with its documentation. Each method checks its arguments and
    # calls the module that does the work: `topics`, `hub_sources`, `belonging`, `upkeep`, `group.admin`, `queue.store`.
    # The rest is the life of the hub: what refers to it, and in which order it closes.

    def __init__(
        self,
        log: Log,
        registry: Registry | LazyRegistry,
        *,
        lease_ttl: float = LEASE_TTL_DEFAULT,
        upkeep: bool = True,
    ) -> None:
        """`pxrs.open` makes the log and the registry from their addresses. The hub closes them.

        lease_ttl, upkeep: see `open`; lease_ttl in seconds."""
        self.log = log
        """The topics by name, without what the hub adds to them."""
        lazy = registry if isinstance(registry, LazyRegistry) else LazyRegistry(registry)
        self.parts = HubParts(log, lazy, lease_ttl)
        """What the hub consists of, for the modules that do its work."""
        self.url = log.url
        """The directory, memory:, the server's address without its options, or of a hub without a directory the
        registry's address without a password."""
        self.registry_address = lazy.shown
        """The address of the registry, without a password."""
        self._sources = HubSources(self.parts)
        self._topics = Topics(self.parts, self._sources)
        self._lock = threading.Lock()
        self._producers: weakref.WeakSet[SendingThread] = weakref.WeakSet()
        self._consumers: weakref.WeakSet[Consumer | TopicsConsumer] = weakref.WeakSet()
        self._janitor = Janitor(self.parts, takes_part=upkeep)
        otel.attach()

    @property
    def registry(self) -> Registry:
        """Where the coordination is kept, opened by the first use. It is closed with the hub: keep the hub."""
        self.parts.check_usable()
        return self.parts.registry.get()

    def create_topic(
        self,
        name: str,
        partitions: int = PARTITIONS_DEFAULT,
        partitioner: str = "xxh64",
        codec: str = "none",
        retention: float | timedelta | None = None,
        retention_bytes: int | None = None,
        segment_bytes: int = SEGMENT_BYTES_DEFAULT,
        durability: str = "disk",
        keep_unread: bool = False,
        segment_s: float | timedelta | None = None,
        *,
        exist_ok: bool = False,
    ) -> TopicHandle:
        """Make a topic. Its partition count and partitioner are fixed for good; `alter_topic` changes the rest.

        partitioner: xxh64, murmur2 as Kafka's clients hash, or the name of an entry point pxrs.partitioners.
        retention:  how long a message is kept, in seconds or as a timedelta, counted from when it was stored, whatever
                    its own time says; retention_bytes: how much of each partition. None keeps everything.
        segment_bytes, segment_s: how large a segment gets, and for how long it takes appends (by default a quarter of
                    `retention`). Retention removes whole segments: messages stay for up to that much longer.
        durability: what an append waits for. "disk": that it survives a power loss. "os": that it survives the death
                    of every process; a power loss takes what the operating system had not written yet.
        keep_unread: retention takes nothing that a group of the hub's registry has yet to read. A group that nobody
                    needs must be deleted. With a retention, such a topic needs the registry to be reachable now if no
                    registry is on record for the hub: this one is recorded.
        exist_ok:   if a topic of this name is there, return it, provided that each of its settings is the one given
                    here, or the default where none is given; otherwise TopicDiffers is raised, which names the
                    settings that differ. Several processes may call this at once: one of them creates the topic.
        Raises TopicExists, InvalidTopic; with `exist_ok` DamagedFrame, if the topic's stored description is damaged.
        """
        from pxrs.hashing import hash_named

        self.parts.check_usable()
        self.log.check_topics()
        refuse_internal(name, "created")
        hash_named(arguments.text(InvalidTopic, "partitioner", partitioner, "its name"))  # is known here
        arguments.flag(InvalidTopic, "keep_unread", keep_unread)
        arguments.flag(InvalidTopic, "exist_ok", exist_ok)
        if retention is not None:
            retention = arguments.seconds(InvalidTopic, "retention", retention, 0, RETENTION_S_MAX, above=True)
        if segment_s is not None:
            segment_s = arguments.seconds(InvalidTopic, "segment_s", segment_s, 0, RETENTION_S_MAX, above=True)
        topic = Topic(
            name,
            uuid.uuid4().hex,
            partitions,
            partitioner,
            codec,
            segment_bytes,
            retention,
            retention_bytes,
            durability,
            keep_unread,
            segment_s,
        )
        create = self._topics.create_or_open if exist_ok else self._topics.create
        return self._handle(create(topic))

    def create_described(self, topic: Topic, *, by: str | None = None) -> TopicHandle:
        """Make a topic from its description, which has its id: for a server, whose client has chosen the id. Raises
        TopicExists, InvalidTopic.

        by: who does it, for the event log; by default the user of this process."""
        from pxrs.hashing import hash_named

        self.parts.check_usable()
        self.log.check_topics()
        refuse_internal(topic.name, "created")
        hash_named(topic.partitioner)
        return self._handle(self._topics.create(topic, by=by))

    def _handle(self, log: TopicLog) -> TopicHandle:
        return TopicHandle(log, self.parts, self)

    def topics(self, *, internal: bool = False) -> list[Topic]:
        """All topics that can be opened, in the order of their names. See `damaged_topics` for the others.

        internal: with those that pxrs writes itself, `_events` and `_audit`."""
        self.parts.check_usable()
        self.log.check_topics()
        return [topic for topic in self.log.topics() if internal or not is_internal(topic.name)]

    def damaged_topics(self) -> list[DamagedTopic]:
        """The topics that cannot be opened, because their stored description is damaged, in the order of their names.

        Restore a topic's `topic.json` from a copy; or delete the topic, with all its messages, and make it again."""
        self.parts.check_usable()
        self.log.check_topics()
        return self.log.damaged_topics()

    def topic(self, name: str) -> TopicHandle:
        """A topic to read. Raises UnknownTopic, and DamagedFrame if its stored description is damaged."""
        self.parts.check_usable()
        _check_topic_name(name)
        return self._handle(self.log.topic(name))

    # Registered sources: tables of other systems, under names.

    def add_source(
        self,
        name: str,
        url: str,
        *,
        table: str,
        key_column: str | None = None,
        value_column: str | None = None,
        value_columns: Sequence[str] | None = None,
        id_column: str = "id",
        timestamp_column: str | None = None,
        partitions: int = PARTITIONS_DEFAULT,
        partitioner: str = "xxh64",
        notify_channel: str | None = None,
        settle_s: float | timedelta | None = None,
        poll_s: float | timedelta = TABLE_POLL_S_DEFAULT,
        identity: str | None = None,
        id: str | None = None,
        exist_ok: bool = False,
    ) -> RegisteredSource:
        """Register a table of a SQL database under a name, to be read wherever a topic is. What is registered.

        The table is opened once, to see that it is there and has these columns. The registry keeps the address without
        user and password: see `source` for where a process takes those from. The settings are those of
        `pxrs.sources.sql_table`, and are fixed.

        id:       keep checkpoints under this id, such as one that `pxrs group describe` shows for a table that was read
                  before it was registered. By default it is computed from the address, the table and the partitions.
        exist_ok: one of this name and these settings may be registered already.
        Raises SourceExists, InvalidTopic, InvalidUrl, and ReadFailed if the database cannot be reached.
        """
        from pxrs.sources.catalog import RegisteredSource, checked_name

        self.check_registry()
        checked_name(name)
        arguments.flag(InvalidTopic, "exist_ok", exist_ok)
        _check_source_url(url)
        if settle_s is not None:
            settle_s = arguments.seconds(InvalidTopic, "settle_s", settle_s)
        if isinstance(value_columns, str):
            raise InvalidTopic(f"value_columns is {value_columns!r}: give a list of names")
        wanted = RegisteredSource(
            name,
            id or "",
            "",
            arguments.text(InvalidTopic, "table", table, "its name"),
            id_column=id_column,
            key_column=key_column,
            value_column=value_column,
            value_columns=None if value_columns is None else tuple(value_columns),
            timestamp_column=timestamp_column,
            partitions=partitions,
            partitioner=partitioner,
            notify_channel=notify_channel,
            settle_s=settle_s,
            poll_s=arguments.seconds(InvalidTopic, "poll_s", poll_s, 0, arguments.DAY_S, above=True),
        )
        return self._sources.add(wanted, url, identity, exist_ok=exist_ok)

    def sources(self) -> list[RegisteredSource]:
        """The registered sources, in the order of their names."""
        self.parts.check_usable()
        catalog = self._sources.catalog_if_there()
        return [] if catalog is None else catalog.records()

    def source(self, name: str, url: str | None = None) -> SqlTable:
        """A registered source, to be read without a group. The hub keeps it open for all who ask, and closes it.

        url: the address with user and password. By default that in the environment variable PXRS_SOURCE_<NAME> (in
             upper case, every other character as `_`), or else the registered address, for which libpq takes PGUSER and
             PGPASSWORD or PGPASSFILE from the environment.
        Raises UnknownSource, WrongSource if the address leads to another database, ReadFailed."""
        self.parts.check_usable()
        arguments.text(InvalidTopic, "source", name, "its name")
        if url is not None:
            _check_source_url(url)
        return self._sources.catalog().open(name, url)

    def remove_source(self, name: str) -> None:
        """Forget a registered source. Its table stays as it is, and so do the checkpoints of groups, under the source's
        id: registered again with the same settings, groups go on where they were.

        Raises UnknownSource, and GroupActive while a group has members that read it."""
        self.check_registry()
        arguments.text(InvalidTopic, "source", name, "its name")
        self._sources.remove(name)

    def readable(self, name: str) -> Source:
        """The topic of this name; without one, the registered source. Raises UnknownTopic, and what `source` raises."""
        self.parts.check_usable()
        _check_topic_name(name)
        return self._sources.readable(name)

    def _keep(self, made: M) -> M:
        """Make an object that this hub made refer to the hub, because a hub that nothing refers to closes its log and
        registry."""
        made.hub = self
        return made

    # The registry that the hub belongs to.

    def check_registry(self) -> Home | None:
        """The identity of this hub, None if it has none yet. Raises WrongRegistry if the hub belongs to another
        registry than the one that it was opened with: then nothing of the hub may be coordinated through that."""
        return self.parts.check_registry()

    def join_registry(self) -> Home | None:
        """As `check_registry`, before a member joins a group or a batch is published: if no registry is recorded for
        the hub, this one is recorded."""
        return self.parts.join_registry()

    def adopt_registry(self) -> tuple[str, str]:
        """Make the hub belong to the registry that it was opened with: `pxrs registry adopt`. The addresses of the
        registry that it belonged to, empty if none is known, and of this one.

        Stop the members of all groups first: those that go on in the old registry end with WrongRegistry at their next
        checkpoint. Checkpoints are not copied: groups begin anew in this registry, or where they were in it, and what
        they have read in the other one counts no more for `keep_unread`."""
        self.parts.check_usable()
        self.log.check_topics()
        if self.log.is_kept_by_server:
            raise InvalidUrl(
                f"{self.url}: the server has the registry that it was started with: stop it, and run `pxrs registry "
                "adopt` with the hub's directory, where it is"
            )
        if self.parts.belonging is None:
            raise InvalidUrl("a hub in memory always has the registry that it was opened with")
        former, now = self.parts.belonging.adopt(topic.id for topic in self.log.topics())
        self.record_audit("adopt_registry", registry=now, former=former)
        self.parts.events.record("hub.adopted_registry", registry=now, former=former)
        return former, now

    def alter_topic(self, name: str, **changes: Unpack[TopicChanges]) -> TopicHandle:
        """Change settings of a topic; those that are not given stay. They are those of `create_topic`; None for
        `retention` or `retention_bytes` keeps everything. Partition count and partitioner are fixed: `copy_topic`
        copies a topic into one that has others.

        The change is durable when this returns. Appends of every process use it from the next one on, and retention
        from the next round of upkeep on; clients of a server that send use another `codec` once they open the topic
        again. `keep_unread` and `durability` count for all processes when this returns. Processes of version 0.1 go on
        with the settings that they have read.

        Raises UnknownTopic, InvalidTopic, and OutcomeUnknown if a server's reply was lost: repeat it."""
        self.parts.check_usable()
        _check_topic_name(name)
        given: dict[str, Any] = dict(changes)
        if "retention_s" in given:
            raise InvalidTopic(f"{name}: give the time as retention=")
        for each in ("retention", "segment_s"):
            if given.get(each) is not None:
                given[each] = arguments.seconds(InvalidTopic, each, given[each], 0, RETENTION_S_MAX, above=True)
        if "keep_unread" in given:
            arguments.flag(InvalidTopic, "keep_unread", given["keep_unread"])
        if "retention" in given:
            given["retention_s"] = given.pop("retention")
        if not given:
            raise InvalidTopic(f"{name}: no setting is given to change")
        handle = self.alter_described(name, given)
        self._janitor.take_part(handle.topic, sends=False)
        return handle

    def alter_described(self, name: str, changes: Mapping[str, object], *, by: str | None = None) -> TopicHandle:
        """As `alter_topic`, with the fields of a topic's description: for a server. by: as for `delete_topic`."""
        self.parts.check_usable()
        self.log.check_topics()
        return self._handle(self._topics.alter(name, changes, by=by))

    def copy_topic(
        self,
        source: str,
        target: str,
        *,
        to: Hub | None = None,
        partitions: int | None = None,
        start: int | datetime | None = None,
        end: int | datetime | None = None,
        append: bool = False,
        on_progress: Callable[[Copied], None] | None = None,
    ) -> Copied:
        """Copy the messages of a topic into another one: keys, values, headers and times, each message once, in the
        order of their keys. Returns when all that was there at the beginning is copied.

        If this ends early, by an error or a kill -9, call it again: it goes on where it was. Called again later, it
        copies what has come since. One process at a time may copy a topic into another one.

        target:     created with the settings of the source if it is not there.
        to:         the hub of the target; by default this one.
        partitions: how many the target has; by default as many as the source. With as many, and the same partitioner,
                    each message stays in the partition of its number.
        start:      where the copy begins in each partition: an offset, or a time; by default at the first message.
                    A copy that has begun goes on where it is.
        end:        where it ends, this time: an offset, or the first message of a time; by default at the end.
        append:     allow a new copy into a topic that has or had messages.
        on_progress: called after each piece.
        Raises CopyFailed, UnknownTopic, InvalidTopic, and what the log and the registry raise."""
        from pxrs.copying.starting import copy
        from pxrs.events.recording import attempted

        self.parts.check_usable()
        _check_topic_name(source)
        _check_topic_name(target)
        hub = self if to is None else to
        hub.parts.check_usable()
        refuse_internal(target, "copied into")
        read = self.log.topic(source)
        written = hub._topics.open_like(read.topic, target, partitions)
        if written.id == read.id:
            raise InvalidTopic(f"{source} cannot be copied into itself")
        written.check_writable()
        hub.join_registry()
        with attempted(hub.parts.events, "copy_topic", topic=source, target=target) as attempt:

            def tell(copied: Copied) -> None:
                attempt.has_effect = copied.messages > 0
                if on_progress is not None:
                    on_progress(copied)

            done = copy(read, written, hub.registry, start, end, may_add=append, on_progress=tell)
        hub.record_audit("copy_topic", topic=source, topic_id=read.id, target=target, messages=done.messages)
        return done

    def delete_topic(self, name: str, *, by: str | None = None) -> str:
        """Remove a topic and its messages, also one that is damaged. Returns its id. Raises UnknownTopic.

        by: who does it, for the event log; by default the user of this process."""
        self.parts.check_usable()
        _check_topic_name(name)
        return self._topics.delete(name, by=by)

    def producer(self, topic: str, **options: Unpack[ProducerOptions]) -> Producer:
        """A producer of the topic; `options` are those of `Producer`. Raises UnknownTopic, NoWritePermission."""
        from pxrs.producer.producer import Producer

        self.parts.check_usable()
        refuse_internal(topic, "written to")
        handle = self.topic(topic)
        handle.log.check_writable()
        producer = self._keep(Producer(handle.log, **options))
        with self._lock:
            if not self.parts.is_closed:
                self._producers.add(producer.sending)
                self._janitor.take_part(handle.topic, sends=True)
                return producer
        producer.close()
        raise Closed(f"the hub {self.url} was closed")

    @overload
    def consumer(  # type: ignore[overload-overlap]  # a str is a sequence of str too: this signature is for it
        self, topic: str | Source, group: str, *, dead_letters: str | None = None, **options: Unpack[ConsumerOptions]
    ) -> Consumer: ...

    @overload
    def consumer(
        self,
        topic: Sequence[str | Source],
        group: str,
        *,
        dead_letters: str | None = None,
        **options: Unpack[TopicsConsumerOptions],
    ) -> TopicsConsumer: ...

    def consumer(
        self,
        topic: str | Source | Sequence[str | Source],
        group: str,
        *,
        dead_letters: str | None = None,
        **options: Unpack[EitherConsumerOptions],
    ) -> Consumer | TopicsConsumer:
        """A member of the group, which reads the topic; `options` are those of `Consumer`. Raises UnknownTopic.

        topic:        the name of a topic or of a registered source, or anything that is a `Source`. A sequence of them
                      makes a `TopicsConsumer`: one member that reads them all, with one lease, and names partitions by
                      `TopicPartition`.
        dead_letters: the name of another topic, for messages that a handler fails on; needed by
                      on_error="dead-letter"."""
        from pxrs.consumer.consumer import Consumer, TopicsConsumer
        from pxrs.consumer.dead_letters import DeadLetterTopic, check_other_topic

        self.parts.check_usable()
        if dead_letters is not None:
            arguments.text(InvalidGroup, "dead_letters", dead_letters, "the name of a topic")
        source, has_own_topics = self._to_be_read(topic)
        if has_own_topics:
            self.join_registry()
        letters: DeadLetterTopic | None = None
        if dead_letters is not None:
            refuse_internal(dead_letters, "written to")
            # The topic must be there before the first message fails.
            target = self.log.topic(dead_letters)
            check_other_topic(source.parts, target.id)
            target.check_writable()
            letters = DeadLetterTopic(lambda: self.producer(dead_letters, linger_s=0))
        kind: Callable[..., Consumer | TopicsConsumer] = (
            TopicsConsumer if isinstance(source, JoinedSource) else Consumer
        )
        consumer = self._keep(
            kind(
                source,
                self.registry,
                group,
                dead_letters=letters,
                topic_names=self._topics.names,
                home=self.join_registry if has_own_topics else None,
                recorder=self.parts.events,
                **options,
            )
        )
        with self._lock:
            if not self.parts.is_closed:
                self._consumers.add(consumer)
                for part in source.parts:
                    if isinstance(part, TopicLog):
                        self._janitor.take_part(part.topic, sends=False)
                return consumer
        consumer.close()
        raise Closed(f"the hub {self.url} was closed")

    def _to_be_read(self, topic: str | Source | Sequence[str | Source]) -> tuple[Source, bool]:
        """What `consumer` was given to read, and whether it has topics of this hub that were given by name. Raises
        UnknownTopic, InvalidTopic."""
        is_joined = isinstance(topic, Sequence) and not isinstance(topic, str | bytes)
        given: Sequence[Any] = topic if is_joined else [topic]  # type: ignore[assignment]
        parts, has_own_topics = list[Source](), False
        for each in given:
            part = each if isinstance(each, Source) else self.readable(each)
            has_own_topics |= part is not each and isinstance(part, TopicLog)
            parts.append(part)
        return JoinedSource(parts) if is_joined else parts[0], has_own_topics

    def group(self, name: str, *sources: Source) -> GroupHandle:
        """A group to look at or to administer. It finds the hub's topics and the registered sources; sources that are
        neither are given."""
        from pxrs.group.admin import GroupHandle

        self.parts.check_usable()
        for source in sources:
            if not isinstance(source, Source | TopicHandle):
                raise InvalidGroup(
                    f"the source {arguments.shown(source)} is no Source; topics of this hub need not be named here"
                )
        catalog = self._sources.catalog()
        events = self.parts.events
        return self._keep(GroupHandle(self.registry, name, self.log, sources, self._home_of_topics, catalog, events))

    def _home_of_topics(self) -> Home | None:
        """As `check_registry`, before a group that reads topics is changed. Raises NoDirectory too: without a directory
        it is not known whether this registry is that of the topics."""
        self.log.check_topics()
        return self.check_registry()

    def groups(self) -> list[str]:
        """The names of all groups."""
        from pxrs.group.listing import groups

        self.parts.check_usable()
        return groups(self.registry)

    # Work queues.

    def create_queue(
        self,
        name: str,
        policy: Policy | None = None,
        fifo: bool = False,
        backoff: Backoff | None = None,
        *,
        exist_ok: bool = False,
    ) -> QueueHandle:
        """Make a work queue. `fifo` is fixed for good; `alter_queue` changes the rest.

        policy:  how often an item may be delivered: AtLeastOnce() (the default), ConsumeTimes(k) or ConsumeOnce().
        fifo:    strictly first in, first out: one transaction at a time takes, and an item that comes back is the next.
        backoff: how long an item waits that came back: FixedBackoff(...), ExponentialBackoff(...), or None, not at all.
        exist_ok: if a queue of this name is there, return it, provided that its settings are those given here, or the
                 defaults where none are given; otherwise QueueDiffers is raised, which names the settings that differ.
                 Several processes may call this at once: one of them creates the queue.
        Raises QueueExists, InvalidQueue, and OutcomeUnknown if the reply was lost: with `exist_ok`, call it again."""
        from pxrs.queue.handle import QueueHandle
        from pxrs.queue.policy import AtLeastOnce

        arguments.flag(InvalidQueue, "fifo", fifo)
        arguments.flag(InvalidQueue, "exist_ok", exist_ok)
        store = self.parts.queue_store()
        rule = AtLeastOnce() if policy is None else policy
        queue = store.catalog.create(name, rule, fifo, backoff, exist_ok=exist_ok)
        return self._keep(QueueHandle(store, queue))

    def alter_queue(self, name: str, **changes: Unpack[QueueChanges]) -> QueueHandle:
        """Change `policy` or `backoff` of a queue; what is not given stays. `fifo` is fixed.

        The change is durable when this returns, and every process uses it for items that it takes a second later or
        more. An item counts as before what was delivered of it: one that is ready is delivered once more even if the
        new policy allows fewer deliveries than it has had, and becomes a dead letter if it is returned then.

        Raises UnknownQueue, InvalidQueue, and OutcomeUnknown if the reply was lost: repeat it."""
        from pxrs.queue.handle import QueueHandle

        store = self.parts.queue_store()
        if unknown := sorted(set(changes) - {"policy", "backoff"}):
            raise InvalidQueue(f"{name}: {unknown[0]} cannot be changed: make another queue, and move its items there")
        if not changes:
            raise InvalidQueue(f"{name}: no setting is given to change")
        altered = store.catalog.alter(name, dict(changes))
        return self._keep(QueueHandle(store, altered))

    def queue(self, name: str) -> QueueHandle:
        """A queue to put into and to look at. Raises UnknownQueue."""
        from pxrs.queue.handle import QueueHandle

        store = self.parts.queue_store()
        return self._keep(QueueHandle(store, store.catalog.queue(name)))

    def queues(self) -> list[QueueHandle]:
        """All queues, in the order of their names."""
        from pxrs.queue.handle import QueueHandle

        store = self.parts.queue_store()
        return [self._keep(QueueHandle(store, queue)) for queue in store.catalog.queues()]

    def delete_queue(self, name: str) -> None:
        """Remove a queue and all that is in it. Raises UnknownQueue."""
        self.parts.queue_store().catalog.delete(name)

    def transaction(self) -> Transaction:
        """Take and put items of queues, all or nothing. Commits on a clean exit, rolls back on an exception."""
        from pxrs.queue.transaction import Transaction

        return self._keep(Transaction(self.parts.queue_store()))

    # Events.

    def events(
        self, *, group: str | None = None, topic: str | None = None, since: Since = None, follow: bool = False
    ) -> Iterator[Event]:
        """What has happened to the hub, oldest first: joins, hand-overs, fences, dead letters and more; docs/events.md
        lists all. They are kept for a week.

        group, topic: only events of this group, or of this topic; both are names.
        since:  only events from then on: a datetime with a time zone, or how long ago, in seconds or as a timedelta.
        follow: wait for further events, until the hub is closed; then Closed is raised."""
        from pxrs.events.reading import Wanted

        return self._read_events(EVENTS_TOPIC, Wanted(group, topic), since, follow)

    def audit(self, *, since: Since = None, follow: bool = False) -> Iterator[Event]:
        """What administrators have done to the hub, with who and when, oldest first. It is kept for a year.

        since, follow: as of `events`."""
        from pxrs.events.reading import Wanted

        return self._read_events(AUDIT_TOPIC, Wanted(), since, follow)

    def _read_events(self, name: str, wanted: Wanted, since: Since, follow: bool) -> Iterator[Event]:
        from pxrs.events.reading import read, since_us

        self.parts.check_usable()
        self.log.check_topics()
        arguments.flag(InvalidArgument, "follow", follow)
        wanted = wanted._replace(since_us=since_us(since, self.log.clock.wall_time_us()))
        self.parts.events.flush(EVENTS_S)  # a process finds what it has recorded itself
        return read(self.log, name, wanted, self.parts.check_usable, follow=follow)

    def record_audit(self, action: str, **fields: Json) -> None:
        """Keep what an administrator has done, as the event `audit.<action>` with these fields; `pxrs.events.names` has
        the actions of pxrs. It is stored soon; a failure of that is logged, and never raised.

        action: its name: lower-case letters and underscores. Raises InvalidArgument if it has others.

        who: by default the user of this process and the host. Behind a server, the server writes the caller's
             token."""
        from pxrs.events.model import ACTION

        if not isinstance(action, str) or ACTION.fullmatch(action) is None:
            wanted = "give up to 50 lower-case letters and underscores, such as rolled_out"
            raise InvalidArgument(f"action is {arguments.shown(action)}: {wanted}")
        self.parts.events.audit(action, **fields)

    # Upkeep.

    def upkeep(self) -> UpkeepStatus:
        """Who does the upkeep of this hub's directory, since when, and how the last round went."""
        self.parts.check_usable()
        return self._janitor.status()

    def run_upkeep(self) -> RoundReport:
        """Do one round of upkeep now, whoever is the janitor, and return what it did and what failed.

        Raises LogNotWritable if this process may not write to the directory; nothing was done then."""
        self.parts.check_usable()
        self.log.check_topics()
        return self._janitor.run_round()

    def start_upkeep(self) -> None:
        """Stand for election as the janitor now, instead of with the first producer or consumer of a topic with a
        retention: for a process that is there for upkeep alone, as `pxrs upkeep` is."""
        self.parts.check_usable()
        self.log.check_topics()
        self._janitor.start()

    def close(self) -> None:
        """Close the queues, the consumers, the producers, sending what waits in them, the upkeep, the sources, the
        event log, the log and the registry, in this order.

        Raises the first error, when all are closed."""
        if os.getpid() != self.parts.pid:
            return  # in a forked child: the hub belongs to the parent
        with self._lock:
            self.parts.is_closed = True  # what follows is done again if an interrupt ended it the first time
            closing: list[Callable[[], None]] = [self.parts.close_queues]
            closing += [consumer.close for consumer in self._consumers]
            closing += [sending.close for sending in self._producers]
            closing += [
                self._janitor.close,
                self._sources.close,
                self.parts.events.close,
                self.log.close,
                self.parts.registry.close,
            ]
        errors = []
        for close in closing:
            try:
                close()
            except Exception as error:  # noqa: BLE001 - raised below, when the rest is closed too
                errors.append(error)
        if errors:
            raise errors[0]

    def __del__(self) -> None:
        parts = getattr(self, "parts", None)
        if parts is None or parts.is_closed or os.getpid() != parts.pid or sys.is_finalizing():
            return
        name = repr(self)
        dropped.apart(self.close)
        dropped.warn(name, "its files, threads and registry are closed now", self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"pxrs: closing the hub {self.url} failed too: {failure}")

    def __repr__(self) -> str:
        return f"<Hub {self.url}{' closed' if self.parts.is_closed else ''}>"


def _check_topic_name(given: object) -> None:
    arguments.text(InvalidTopic, "topic", given, "its name")


def _check_source_url(given: object) -> None:
    """Without showing it: there may be a password in it."""
    if not isinstance(given, str):
        raise InvalidUrl(f"url is of the type {type(given).__name__}: give the address of the database, a str")
