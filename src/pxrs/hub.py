"""What `pxrs.open` returns: one place's topics, and the doors to send and read.

Nothing is made by accident: a topic exists once `create_topic` made it, and asking for another name is an error.
Closing goes from the outside in: consumers first, which still write checkpoints; then producers, which still write
messages; then the log; then the registry.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self, TypeVar, Unpack

import pyarrow as pa

from pxrs import arguments, dropped
from pxrs import registry as registries
from pxrs.belonging import Belonging, retain_unread
from pxrs.errors import (
    Closed,
    Conflict,
    GroupActive,
    InvalidGroup,
    InvalidQueue,
    InvalidRecord,
    InvalidTopic,
    InvalidUrl,
    NoDirectory,
    OffsetTrimmed,
    PxrsError,
    RetentionPostponed,
    SourceExists,
    TopicDiffers,
    TopicExists,
    UnknownTopic,
    UsedAfterFork,
)
from pxrs.hub_record import HubRecordFile
from pxrs.log.batch import SCHEMA, Batch
from pxrs.log.contract import READ_BYTES_DEFAULT, DamagedTopic, Log, Source, TopicLog
from pxrs.log.messages import messages_of
from pxrs.model import PARTITIONS_DEFAULT, SEGMENT_BYTES_DEFAULT, TABLE_POLL_S_DEFAULT, Message, Topic
from pxrs.registry import Registry
from pxrs.registry.address import Address, parse
from pxrs.registry.lease import LEASE_TTL_MIN
from pxrs.wording import counted

_logger = logging.getLogger(__name__)

REMOVE_ATTEMPTS_MAX: Final = 10
"""How often `remove_source` looks again because the source was registered anew meanwhile."""
LEASE_TTL_DEFAULT: Final = 10.0
CREATE_ATTEMPTS_MAX: Final = 100
"""How often `create_topic(exist_ok=True)` tries to create a topic that others create and delete at the same time."""
RETENTION_S_MAX: Final = 100 * 366 * 86_400.0
"""A hundred years. Far more could not be subtracted from the time of a message."""

if TYPE_CHECKING:
    # Imported by those who ask for one: a process of Spark's that opens a hub starts in half the time without them.
    from pxrs.consumer.consumer import Consumer
    from pxrs.group.admin import GroupHandle
    from pxrs.group.records import Home
    from pxrs.options import ConsumerOptions, ProducerOptions
    from pxrs.producer.producer import Producer
    from pxrs.producer.sending import SendingThread
    from pxrs.queue.handle import QueueHandle
    from pxrs.queue.policy import Backoff, Policy
    from pxrs.queue.store import QueueStore
    from pxrs.queue.transaction import Transaction
    from pxrs.sources.catalog import Catalog, RegisteredSource
    from pxrs.sources.sql_table import SqlTable

TABLE_SCHEMA: Final = pa.schema(
    [pa.field("partition", pa.int32(), nullable=False), pa.field("offset", pa.int64(), nullable=False), *SCHEMA]
)


class _Kept(Protocol):
    """What a hub makes: it keeps the hub."""

    _hub: object


K = TypeVar("K", bound=_Kept)


def open(
    url: str | os.PathLike[str] | None = None,
    registry: str | os.PathLike[str] | None = None,
    *,
    lease_ttl: float | timedelta = LEASE_TTL_DEFAULT,
) -> Hub:
    """Open a place for messages: a directory, or `memory:` for this process alone.

    url:       the directory, which the first `create_topic` makes. Without it, `registry` must be given: such a hub has
               the queues of that registry and the groups of sources that are no topics; what needs topics raises
               NoDirectory.
    registry:  the address of the store that keeps the coordination, as `pxrs.registry.open` takes it. By default it is
               kept with the messages.
    lease_ttl: how long after its last sign of life the queue items that this process has taken go to others.
    """
    ttl = arguments.seconds(InvalidQueue, "lease_ttl", lease_ttl, LEASE_TTL_MIN, arguments.DAY_S)
    if registry is not None:
        _check_registry(registry)
    if url is None:
        if registry is None:
            raise InvalidUrl("the url was not given: give a directory, memory:, or registry=... for queues alone")
        from pxrs.log.absent import AbsentLog

        shown = parse(registry).shown
        return Hub(shown, AbsentLog(shown), registry, ttl)
    address = parse(url)
    if address.scheme == "memory":
        if address.rest or address.options:
            raise InvalidUrl(f"{address.text}: write memory: and nothing more")
        from pxrs.log.memory import MemoryLog

        return Hub("memory:", MemoryLog(), "memory:" if registry is None else registry, ttl)
    if address.scheme != "file":
        raise InvalidUrl(_refusal(address))
    path = address.directory()
    if address.options:
        raise InvalidUrl(f"{address.text}: a directory takes no options; unknown: {', '.join(address.options)}")
    from pxrs.log.directory.log import DirectoryLog

    return Hub(str(path), DirectoryLog(path), path / "registry" if registry is None else registry, ttl, path)


class TopicHandle:
    """A topic to look at: its settings, its offsets and its messages. Reading here moves no checkpoint."""

    def __init__(self, log: TopicLog, hub: Hub) -> None:
        self._hub = hub
        """The hub that made this handle. It closes its log with its last reference, which is here."""
        self.log = log
        """The topic itself, for those who append batches of their own or read it as a member of a group."""
        self.topic = log.topic
        self.name, self.id, self.partitions = log.name, log.id, log.partitions
        self.has_gaps, self.keeps_unread = log.has_gaps, log.keeps_unread

    def start(self, partition: int) -> int:
        """The first offset that is still there."""
        return self.log.start(self._partition(partition))

    def end(self, partition: int) -> int:
        """The offset that the next message will get."""
        return self.log.end(self._partition(partition))

    def offset_at(self, partition: int, timestamp: int) -> int:
        """The first offset whose message is of that time or later, in microseconds since 1970; the end if none is."""
        timestamp = arguments.whole(InvalidRecord, "timestamp", timestamp, -(1 << 63), (1 << 63) - 1)
        return self.log.offset_at(self._partition(partition), timestamp)

    def read(self, partition: int, offset: int, max_bytes: int = READ_BYTES_DEFAULT) -> list[Batch]:
        """Batches from exactly this offset on, about `max_bytes` of them; none at the end."""
        partition, offset = self._partition(partition), self._offset("offset", offset)
        return self.log.read(partition, offset, arguments.whole(InvalidRecord, "max_bytes", max_bytes, 1))

    def retain(self) -> dict[int, int]:
        """Remove what the topic's retention allows, now; the new starts of the partitions that moved.

        Producers do it by themselves: see `pxrs.producer.sending.RETAIN_EVERY_S`. Of a topic with `keep_unread`:
        raises WrongRegistry if this process has another registry than the hub, RetentionPostponed if it is not known
        which one the hub has."""
        return self._hub._retain(self.log)

    def retention_problem(self) -> str | None:
        """Why `retain` removes nothing in this process; None if nothing stands against it."""
        return self._hub._retention_problem(self.log)

    def wait(self, positions: Mapping[int, int], timeout: float | timedelta | None = None) -> set[int]:
        """Wait until any of these partitions has messages from its offset on; those that have. Empty: time is up."""
        if not isinstance(positions, Mapping):
            raise InvalidRecord(
                f"positions is {arguments.shown(positions)}: give offsets by partition, such as {{0: 120}}"
            )
        places = {self._partition(number): self._offset("offset", offset) for number, offset in positions.items()}
        return self.log.wait(places, None if timeout is None else arguments.seconds(InvalidRecord, "timeout", timeout))

    def messages(self, partition: int, offset: int = 0) -> Iterator[Message]:
        """The messages from this offset on, up to the end as it is when it is reached."""
        return self._messages(self._partition(partition), self._offset("offset", offset))

    def _messages(self, partition: int, offset: int) -> Iterator[Message]:
        while batches := self.log.read(partition, offset):
            for batch in batches:
                yield from messages_of(batch, self.name, partition)
                offset = batch.next_offset

    def to_arrow(self, partition: int | None = None, start: int | None = None, end: int | None = None) -> pa.Table:
        """The messages as a table: partition, offset, key, value, timestamp, headers.

        start, end: offsets, in each partition; by default all that is there when this is called.
        """
        numbers = range(self.partitions) if partition is None else (self._partition(partition),)
        start = None if start is None else self._offset("start", start)
        end = None if end is None else self._offset("end", end)
        parts = [part for number in numbers for part in self._parts(number, start, end)]
        return pa.Table.from_batches(parts, TABLE_SCHEMA)

    def _parts(self, partition: int, start: int | None, end: int | None) -> Iterator[pa.RecordBatch]:
        last = self.log.end(partition)
        end = last if end is None else min(end, last)
        offset = self.log.start(partition) if start is None else start
        while offset < end:
            try:
                batches = self.log.read(partition, offset)
            except OffsetTrimmed as error:
                if start is not None:
                    raise
                offset = error.first_offset  # retention was faster
                continue
            for batch in batches:
                batch = batch.within(offset, end)
                if batch.records.num_rows:
                    yield _with_place(batch.records, partition, batch.base_offset)
                offset = batch.next_offset

    def _partition(self, given: int) -> int:
        return arguments.partition(InvalidRecord, self.name, given, self.partitions)

    def _offset(self, name: str, given: int) -> int:
        return arguments.whole(InvalidRecord, name, given, 0)

    def __repr__(self) -> str:
        return f"<TopicHandle {self.name} with {counted(self.partitions, 'partition')}>"


class Hub:
    """An open place: topics, producers, a registry beside them. Threads share it; a forked child must open its own.

    Close it, by `close` or a `with` block. A hub that is dropped without that closes itself, with a ResourceWarning,
    when neither it nor a consumer, producer, transaction or handle that it made is referenced any more."""

    def __init__(
        self,
        url: str,
        log: Log,
        registry: str | os.PathLike[str] | Registry,
        lease_ttl: float = LEASE_TTL_DEFAULT,
        folder: Path | None = None,
    ) -> None:
        """`pxrs.open` makes it. registry: an address, opened when it is first needed, or, of a hub in memory, an open
        registry, which is closed with the hub. folder: the directory that the messages are in; None if they are in
        memory or there are none."""
        self.url = url
        """The directory, memory:, or of a hub without a directory the registry's address without a password."""
        self._lease_ttl = lease_ttl
        self._queues: QueueStore | None = None
        self._sources: Catalog | None = None
        self._log = log
        self._registry = registry if isinstance(registry, Registry) else None
        self._registry_url = registry.url if isinstance(registry, Registry) else registry
        self._lock = threading.Lock()
        self._producers: weakref.WeakSet[SendingThread] = weakref.WeakSet()
        self._consumers: weakref.WeakSet[Consumer] = weakref.WeakSet()
        self._pid = os.getpid()
        self._is_closed = False
        self._belonging: Belonging | None = None
        """None of a hub in memory or without a directory: nothing records which registry it belongs to."""
        if folder is not None:
            weak = weakref.ref(self)

            def open_registry() -> Registry:
                """Holds the hub weakly: a reference cycle would keep a hub that nobody has any more from closing."""
                hub = weak()
                assert hub is not None, "the caller came through the hub"
                return hub.registry

            self._belonging = Belonging(
                url, HubRecordFile(folder), self._registry_url, open_registry, self._log.check_place
            )

    @property
    def registry(self) -> Registry:
        """Where the coordination is kept, opened by the first use. It is closed with the hub: keep that."""
        self._check_usable()
        with self._lock:
            if self._registry is None:
                self._registry = registries.open(self._registry_url)
            return self._registry

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
        """Make a topic. Its partition count and partitioner are fixed for good.

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
        from pxrs.producer.hashing import hash_named

        self._check_usable()
        self._log.check_topics()
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
        if exist_ok:
            return TopicHandle(self._create_or_open(topic), self)
        self._refuse_name_of_source(topic.name)
        return TopicHandle(self._create(topic), self)

    def _create(self, topic: Topic) -> TopicLog:
        if self._belonging is not None:
            self._belonging.begin(keeps_unread=topic.keeps_unread)
        return self._log.create_topic(topic)

    def _create_or_open(self, asked: Topic) -> TopicLog:
        """The topic of this name, if its settings are those asked for; created if there is none.

        A topic's name and all its settings appear at one moment, so a topic that is found here has them all."""
        attempt = 0
        while True:
            attempt += 1
            try:
                found = self._log.topic(asked.name)
            except UnknownTopic:
                # Outside the inner `try`, which takes TopicExists for a race with another process and tries again.
                self._refuse_name_of_source(asked.name)
                try:
                    return self._create(asked)
                except TopicExists:
                    if attempt == CREATE_ATTEMPTS_MAX:
                        raise
                    continue  # another process created it between the two calls: compare its settings
            if differences := found.topic.differences(asked):
                raise TopicDiffers(asked.name, differences)
            return found

    def _refuse_name_of_source(self, name: str) -> None:
        """Topics and registered sources share their names. A registry that cannot be asked does not keep a topic from
        being made: if the name is a source's, the topic is the one that is found by it."""
        try:
            catalog = self._catalog_if_there()
            is_taken = catalog is not None and catalog.find(name) is not None
        except PxrsError as error:
            _logger.warning("topic %s: whether a registered source has this name is not known: %s", name, error)
            return
        if is_taken:
            raise TopicExists(f"{name} is a registered source: choose another name, or remove that first")

    def topics(self) -> list[Topic]:
        """All topics that can be opened, in the order of their names. See `damaged_topics` for the others."""
        self._check_usable()
        self._log.check_topics()
        return self._log.topics()

    def damaged_topics(self) -> list[DamagedTopic]:
        """The topics that cannot be opened, because their stored description is damaged, in the order of their names.

        Restore a topic's `topic.json` from a copy; or delete the topic, with all its messages, and make it again."""
        self._check_usable()
        self._log.check_topics()
        return self._log.damaged_topics()

    def topic(self, name: str) -> TopicHandle:
        """A topic to read. Raises UnknownTopic, and DamagedFrame if its stored description is damaged."""
        self._check_usable()
        _check_topic_name(name)
        return TopicHandle(self._log.topic(name), self)

    # Registered sources: somebody else's table, under a name.

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
        taken = {each.name for each in self._log.topics()} | {each.name for each in self._log.damaged_topics()}
        if name in taken:
            raise SourceExists(f"{name} is a topic: choose another name for the source")
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
        return self._catalog().add(wanted, url, identity, exist_ok=exist_ok)

    def sources(self) -> list[RegisteredSource]:
        """The registered sources, in the order of their names."""
        self._check_usable()
        catalog = self._catalog_if_there()
        return [] if catalog is None else catalog.records()

    def source(self, name: str, url: str | None = None) -> SqlTable:
        """A registered source, to be read without a group. The hub keeps it open for all who ask, and closes it.

        url: the address with user and password. By default that in the environment variable PXRS_SOURCE_<NAME> (in
             upper case, every other character as `_`), or else the registered address, for which libpq takes PGUSER and
             PGPASSWORD or PGPASSFILE from the environment.
        Raises UnknownSource, WrongSource if the address leads to another database, ReadFailed."""
        self._check_usable()
        arguments.text(InvalidTopic, "source", name, "its name")
        if url is not None:
            _check_source_url(url)
        return self._catalog().open(name, url)

    def remove_source(self, name: str) -> None:
        """Forget a registered source. Its table stays as it is, and so do the checkpoints of groups, under the source's
        id: registered again with the same settings, groups go on where they were.

        Raises UnknownSource, and GroupActive while a group has members that read it."""
        from pxrs.group.admin import members_of

        self.check_registry()
        arguments.text(InvalidTopic, "source", name, "its name")
        catalog = self._catalog()
        for attempt in range(REMOVE_ATTEMPTS_MAX):
            record = catalog.get(name)
            if readers := members_of(self.registry, record.id):
                group, member = readers[0]
                raise GroupActive(f"source {name} is read by {member} of group {group}: stop its members first")
            try:
                catalog.remove(record)
                return
            except Conflict:  # another process has registered it anew, and members may read that: look again
                if attempt == REMOVE_ATTEMPTS_MAX - 1:
                    raise

    def readable(self, name: str) -> Source:
        """A topic, or else a registered source, as groups read it. Raises UnknownTopic, and what `source` raises."""
        self._check_usable()
        _check_topic_name(name)
        try:
            return self._log.topic(name)
        except (UnknownTopic, NoDirectory):
            catalog = self._catalog_if_there()
            if catalog is None or catalog.find(name) is None:
                raise
            return catalog.open(name)

    def _catalog(self) -> Catalog:
        from pxrs.sources.catalog import Catalog

        registry = self.registry
        with self._lock:
            if self._sources is None:
                self._sources = Catalog(registry)
            return self._sources

    def _catalog_if_there(self) -> Catalog | None:
        """None if the registry is a directory that is not there: to look for a name must not make an empty one."""
        address = parse(self._registry_url)
        if self._registry is None and address.scheme == "file" and not address.directory().is_dir():
            return None
        return self._catalog()

    def _kept_by(self, made: K) -> K:
        """Have what this hub made keep the hub, which else closes log and registry when nobody has it any more."""
        made._hub = self
        return made

    def _retain(self, log: TopicLog) -> dict[int, int]:
        if not log.keeps_unread:
            return log.retain(log.clock.wall_time_us())
        self._check_usable()
        if self._belonging is not None:
            self._belonging.check_retention(log.name)  # before the registry is opened, which may make an empty one
        return retain_unread(log, self.registry, self._belonging)

    def _retention_problem(self, log: TopicLog) -> str | None:
        self._check_usable()
        if not log.keeps_unread or self._belonging is None:
            return None
        try:
            self._belonging.check_retention(log.name)
        except PxrsError as error:
            return str(error)
        return None

    # The registry that the hub belongs to.

    def check_registry(self) -> Home | None:
        """The identity of this hub, None if it has none yet. Raises WrongRegistry if the hub belongs to another
        registry than the one that it was opened with: then nothing of the hub may be coordinated through that."""
        self._check_usable()
        return None if self._belonging is None else self._belonging.check()

    def join_registry(self) -> Home | None:
        """As `check_registry`, before a member joins a group: if no registry is on record for the hub, this one is from
        now on."""
        return None if self._belonging is None else self._belonging.join()

    def adopt_registry(self) -> tuple[str, str]:
        """Make the hub belong to the registry that it was opened with: `pxrs registry adopt`. The addresses of the
        registry that it belonged to, empty if none is known, and of this one.

        Stop the members of all groups first: those that go on in the old registry end with WrongRegistry at their next
        checkpoint. Checkpoints are not copied: groups begin anew in this registry, or where they were in it, and what
        they have read in the other one counts no more for `keep_unread`."""
        self._check_usable()
        self._log.check_topics()
        if self._belonging is None:
            raise InvalidUrl("a hub in memory always has the registry that it was opened with")
        return self._belonging.adopt(topic.id for topic in self._log.topics())

    def delete_topic(self, name: str) -> None:
        """Remove a topic and its messages, also one that is damaged. Raises UnknownTopic."""
        self._check_usable()
        _check_topic_name(name)
        keeping = {topic.id for topic in self._log.topics() if topic.keeps_unread}
        identity = self._log.delete_topic(name)
        if identity in keeping:
            self._forget_start(name, identity)
        if os.path.isdir(os.path.join(self.url, "staging")):  # Spark has written here
            from pxrs.publishing.manifest import forget_topic
            from pxrs.publishing.staging import Staging

            forget_topic(self.registry, Staging(self.url), identity)

    def _forget_start(self, name: str, identity: str) -> None:
        """Remove the two registry keys of a deleted topic. A failure is only logged: the topic itself is gone."""
        from pxrs.group.records import gate_key, start_key

        try:
            if self._belonging is not None:
                self._belonging.check_retention(name)
            self.registry.commit(delete=[start_key(identity), gate_key(identity)])
        except RetentionPostponed:
            return  # no registry is on record: nothing was ever written there
        except PxrsError as error:
            _logger.warning("topics/%s/ of the deleted topic %s stays in the registry: %s", identity, name, error)

    def producer(self, topic: str, **options: Unpack[ProducerOptions]) -> Producer:
        """A producer of the topic; `options` are those of `Producer`. Raises UnknownTopic, NoWritePermission."""
        from pxrs.producer.producer import Producer

        self._check_usable()
        handle = self.topic(topic)
        handle.log.check_writable()
        producer = self._kept_by(Producer(handle.log, retain=handle.retain, **options))
        with self._lock:
            if not self._is_closed:
                self._producers.add(producer.sending)
                return producer
        producer.close()
        raise Closed(f"the hub {self.url} was closed")

    def consumer(
        self, topic: str | Source, group: str, *, dead_letters: str | None = None, **options: Unpack[ConsumerOptions]
    ) -> Consumer:
        """A member of the group, which reads the topic; `options` are those of `Consumer`. Raises UnknownTopic.

        topic:        the name of a topic or of a registered source, or anything that is a `Source`.
        dead_letters: the name of another topic, for messages that a handler fails on; needed by
                      on_error="dead-letter"."""
        from pxrs.consumer.consumer import Consumer
        from pxrs.consumer.dead_letters import DeadLetterTopic, check_other_topic

        self._check_usable()
        if dead_letters is not None:
            arguments.text(InvalidGroup, "dead_letters", dead_letters, "the name of a topic")
        home: Callable[[], Home | None] | None = None
        if isinstance(topic, Source):
            source: Source = topic
        else:
            source = self.readable(topic)
            if isinstance(source, TopicLog):
                self.join_registry()
                home = self.join_registry
        letters: DeadLetterTopic | None = None
        if dead_letters is not None:
            # The topic must be there before the first message fails.
            target = self._log.topic(dead_letters)
            check_other_topic(source.name, source.id, target.id)
            target.check_writable()
            letters = DeadLetterTopic(lambda: self.producer(dead_letters, linger_s=0))
        consumer = self._kept_by(
            Consumer(
                source,
                self.registry,
                group,
                dead_letters=letters,
                topic_names=self._topic_names,
                home=home,
                **options,
            )
        )
        with self._lock:
            if not self._is_closed:
                self._consumers.add(consumer)
                return consumer
        consumer.close()
        raise Closed(f"the hub {self.url} was closed")

    def group(self, name: str, *sources: Source) -> GroupHandle:
        """A group to look at or to administer. It finds the hub's topics and the registered sources; sources that are
        neither are given."""
        from pxrs.group.admin import GroupHandle

        self._check_usable()
        for source in sources:
            if not isinstance(source, Source | TopicHandle):
                raise InvalidGroup(
                    f"the source {arguments.shown(source)} is no Source; topics of this hub need not be named here"
                )
        catalog = self._catalog()
        return self._kept_by(GroupHandle(self.registry, name, self._log, sources, self._home_of_topics, catalog))

    def _home_of_topics(self) -> Home | None:
        """As `check_registry`, before a group that reads topics is changed. Raises NoDirectory too: without a directory
        it is not known whether this registry is that of the topics."""
        self._log.check_topics()
        return self.check_registry()

    def _topic_names(self) -> dict[str, str]:
        damaged = {topic.id: topic.name for topic in self._log.damaged_topics() if topic.id is not None}
        return damaged | {topic.id: topic.name for topic in self._log.topics()}

    def groups(self) -> list[str]:
        """The names of all groups."""
        from pxrs.group.admin import groups

        self._check_usable()
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
        """Make a work queue. Its settings are fixed for good.

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
        store = self._queue_store()
        queue = store.create(name, AtLeastOnce() if policy is None else policy, fifo, backoff, exist_ok=exist_ok)
        return self._kept_by(QueueHandle(store, queue))

    def queue(self, name: str) -> QueueHandle:
        """A queue to put into and to look at. Raises UnknownQueue."""
        from pxrs.queue.handle import QueueHandle

        store = self._queue_store()
        return self._kept_by(QueueHandle(store, store.queue(name)))

    def queues(self) -> list[QueueHandle]:
        """All queues, in the order of their names."""
        from pxrs.queue.handle import QueueHandle

        store = self._queue_store()
        return [self._kept_by(QueueHandle(store, queue)) for queue in store.queues()]

    def delete_queue(self, name: str) -> None:
        """Remove a queue and all that is in it. Raises UnknownQueue."""
        self._queue_store().delete(name)

    def transaction(self) -> Transaction:
        """Take and put items of queues, all or nothing. Commits on a clean exit, rolls back on an exception."""
        from pxrs.queue.transaction import Transaction

        return self._kept_by(Transaction(self._queue_store()))

    def _queue_store(self) -> QueueStore:
        from pxrs.queue.store import QueueStore

        self.check_registry()
        registry = self.registry
        with self._lock:
            if self._is_closed:
                raise Closed(f"the hub {self.url} was closed")
            if self._queues is None:
                self._queues = QueueStore(registry, self._lease_ttl)
            return self._queues

    def close(self) -> None:
        """Close the queues, the consumers, the producers, sending what waits in them, the sources, the log and the
        registry, in this order.

        Raises the first error, when all are closed."""
        if os.getpid() != self._pid:
            return  # it is the parent's
        with self._lock:
            self._is_closed = True  # what follows is done again if an interrupt ended it the first time
            closing: list[Callable[[], None]] = [] if self._queues is None else [self._queues.close]
            closing += [consumer.close for consumer in self._consumers]
            closing += [sending.close for sending in self._producers]
            if self._sources is not None:
                closing.append(self._sources.close)
            closing.append(self._log.close)
            if self._registry is not None:
                closing.append(self._registry.close)
        errors = []
        for close in closing:
            try:
                close()
            except Exception as error:  # noqa: BLE001 - raised below, when the rest is closed too
                errors.append(error)
        if errors:
            raise errors[0]

    def __del__(self) -> None:
        if getattr(self, "_is_closed", True) or os.getpid() != self._pid or sys.is_finalizing():
            return
        name = repr(self)
        dropped.apart(self.close)
        dropped.warn(name, "its files, threads and registry are closed now", self)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise UsedAfterFork(f"the hub {self.url} was opened before a fork: open it again in the child")
        if self._is_closed:
            raise Closed(f"the hub {self.url} was closed")
        self._log.check_place()

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
        return f"<Hub {self.url}{' closed' if self._is_closed else ''}>"


def _check_topic_name(given: object) -> None:
    arguments.text(InvalidTopic, "topic", given, "its name")


def _check_source_url(given: object) -> None:
    """Without showing it: there may be a password in it."""
    if not isinstance(given, str):
        raise InvalidUrl(f"url is of the type {type(given).__name__}: give the address of the database, a str")


def _with_place(records: pa.RecordBatch, partition: int, offset: int) -> pa.RecordBatch:
    rows = records.num_rows
    partitions = pa.repeat(pa.scalar(partition, pa.int32()), rows)
    offsets = pa.array(range(offset, offset + rows), pa.int64())
    return pa.RecordBatch.from_arrays([partitions, offsets, *records.columns], schema=TABLE_SCHEMA)


def _check_registry(registry: str | os.PathLike[str]) -> None:
    """The registry is opened later, but a scheme that nobody knows is an error now."""
    try:
        scheme = parse(registry).scheme
    except InvalidUrl as error:
        raise InvalidUrl(f"registry: {error}") from None
    if scheme not in registries.SCHEMES:
        raise InvalidUrl(f"registry: unknown scheme {scheme!r}; choose from {', '.join(registries.SCHEMES)}")


def _refusal(address: Address) -> str:
    if address.scheme in registries.SCHEMES:
        return (
            f"{address.text} keeps no messages: write pxrs.open(DIRECTORY, registry='{address.scheme}:...'), or "
            f"pxrs.open(registry='{address.scheme}:...') for queues alone"
        )
    return f"unknown scheme {address.scheme!r}; give a directory or memory:"
