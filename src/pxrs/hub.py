"""`Hub`, which `pxrs.open` returns: a log and a registry, and everything that users do with them.

This file is the reference of the public operations. Each method calls the object that does the work (`pxrs.open_hub`
has them all) and lets what it returns refer to the hub. Nothing is created by a mistyped name: a topic exists once
`create_topic` has made it, and asking for another name is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Unpack, overload

from pxrs.log.contract import DamagedTopic, Source, TopicLog
from pxrs.model import (
    AUDIT_TOPIC,
    EVENTS_TOPIC,
    PARTITIONS_DEFAULT,
    SEGMENT_BYTES_DEFAULT,
    TABLE_POLL_S_DEFAULT,
    Topic,
    is_internal,
)
from pxrs.open_hub import OpenHub
from pxrs.topics import TopicHandle
from pxrs.upkeep.janitor import UpkeepStatus
from pxrs.upkeep.records import RoundReport

if TYPE_CHECKING:
    # Imported by the methods that need them: a process of Spark that opens a hub starts in half the time without them.
    from pxrs.consumer.consumer import Consumer, TopicsConsumer
    from pxrs.copying.copier import Copied
    from pxrs.events import Event
    from pxrs.events.model import Json
    from pxrs.events.reading import Since
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
    from pxrs.queue.handle import QueueHandle
    from pxrs.queue.policy import Backoff, Policy
    from pxrs.queue.transaction import Transaction
    from pxrs.sources.catalog import RegisteredSource
    from pxrs.sources.sql_table import SqlTable


class Hub(OpenHub):
    """A log and a registry that are open: topics, producers, consumers, groups, queues. Threads share it; a forked
    child must open its own.

    Close it, by `close` or a `with` block. A hub that is dropped without that closes itself, with a ResourceWarning,
    when neither it nor a consumer, producer, transaction or handle that it made is referenced any more."""

    # Over the limit: a user finds every operation here, with its documentation.

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
        ensemble: int | None = None,
        write_quorum: int | None = None,
        ack_quorum: int | None = None,
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
        ensemble, write_quorum, ack_quorum: in a cluster, over how many nodes messages are spread, how many copies each
                    has, and how many are durable before it is acknowledged: 3, 3, 2. Fixed (docs/cluster.md).
        exist_ok:   if a topic of this name is there, return it, provided that each of its settings is the one given
                    here, or the default where none is given; otherwise TopicDiffers is raised, which names the
                    settings that differ. Several processes may call this at once: one of them creates the topic.
        Raises TopicExists, InvalidTopic; with `exist_ok` DamagedFrame, if the topic's stored description is damaged.
        """
        settings = {
            "partitions": partitions,
            "partitioner": partitioner,
            "codec": codec,
            "retention": retention,
            "retention_bytes": retention_bytes,
            "segment_bytes": segment_bytes,
            "durability": durability,
            "keep_unread": keep_unread,
            "segment_s": segment_s,
            "ensemble": ensemble,
            "write_quorum": write_quorum,
            "ack_quorum": ack_quorum,
        }
        return self._handle(self._topics.create(name, settings, exist_ok=exist_ok))

    def create_described(self, topic: Topic, *, by: str | None = None) -> TopicHandle:
        """Make a topic from its description, which has its id: for a server, whose client has chosen the id. Raises
        TopicExists, InvalidTopic.

        by: who does it, for the event log; by default the user of this process."""
        return self._handle(self._topics.create_described(topic, by=by))

    def _handle(self, log: TopicLog) -> TopicHandle:
        return TopicHandle(log, self.parts, self)

    def topics(self, *, internal: bool = False) -> list[Topic]:
        """All topics that can be opened, in the order of their names. See `damaged_topics` for the others.

        internal: with those that pxrs writes itself, `_events` and `_audit`."""
        self.parts.check_usable()
        self.log.check_topics()
        return [topic for topic in self.log.topics() if internal or not is_internal(topic.name)]

    def damaged_topics(self) -> list[DamagedTopic]:
        """The topics that cannot be opened, because their stored description is damaged, or because this process may
        not read it (`error` is LogNotReadable then), in the order of their names.

        Restore a damaged `topic.json` from a copy; or delete the topic, with all its messages, and make it again."""
        self.parts.check_usable()
        self.log.check_topics()
        return self.log.damaged_topics()

    def topic(self, name: str) -> TopicHandle:
        """A topic to read. Raises UnknownTopic; DamagedFrame if its stored description is damaged; LogNotReadable if
        this process may not read that."""
        return self._handle(self._topics.open(name))

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
        settings = {
            "table": table,
            "key_column": key_column,
            "value_column": value_column,
            "value_columns": value_columns,
            "id_column": id_column,
            "timestamp_column": timestamp_column,
            "partitions": partitions,
            "partitioner": partitioner,
            "notify_channel": notify_channel,
            "settle_s": settle_s,
            "poll_s": poll_s,
            "id": id,
        }
        return self._sources.add(name, url, settings, identity=identity, exist_ok=exist_ok)

    def sources(self) -> list[RegisteredSource]:
        """The registered sources, in the order of their names."""
        return self._sources.records()

    def source(self, name: str, url: str | None = None) -> SqlTable:
        """A registered source, to be read without a group. The hub keeps it open for all who ask, and closes it.

        url: the address with user and password. By default that in the environment variable PXRS_SOURCE_<NAME> (in
             upper case, every other character as `_`), or else the registered address, for which libpq takes PGUSER and
             PGPASSWORD or PGPASSFILE from the environment.
        Raises UnknownSource, WrongSource if the address leads to another database, ReadFailed."""
        return self._sources.open(name, url)

    def remove_source(self, name: str) -> None:
        """Forget a registered source. Its table stays as it is, and so do the checkpoints of groups, under the source's
        id: registered again with the same settings, groups go on where they were.

        Raises UnknownSource, and GroupActive while a group has members that read it."""
        self._sources.remove(name)

    def readable(self, name: str) -> Source:
        """The topic of this name; without one, the registered source. Raises UnknownTopic, and what `source` raises."""
        return self._sources.readable(name)

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
        return self.parts.adopt_registry()

    def alter_topic(self, name: str, **changes: Unpack[TopicChanges]) -> TopicHandle:
        """Change settings of a topic; those that are not given stay. They are those of `create_topic`; None for
        `retention` or `retention_bytes` keeps everything. Partition count and partitioner are fixed: `copy_topic`
        copies a topic into one that has others.

        The change is durable when this returns. Appends of every process use it from the next one on, and retention
        from the next round of upkeep on; clients of a server that send use another `codec` once they open the topic
        again. `keep_unread` and `durability` count for all processes when this returns. Processes of version 0.1 go on
        with the settings that they have read.

        Raises UnknownTopic, InvalidTopic, and OutcomeUnknown if a server's reply was lost: repeat it."""
        altered = self._topics.alter(name, changes)
        self._janitor.take_part(altered.topic, sends=False)
        return self._handle(altered)

    def alter_described(self, name: str, changes: Mapping[str, object], *, by: str | None = None) -> TopicHandle:
        """As `alter_topic`, with the fields of a topic's description: for a server. by: as for `delete_topic`."""
        return self._handle(self._topics.alter_described(name, changes, by=by))

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
        into = self._topics_of(self if to is None else to)
        return self._topics.copy(source, target, into, partitions, start, end, append, on_progress)

    def delete_topic(self, name: str, *, by: str | None = None) -> str:
        """Remove a topic and its messages, also one that is damaged. Returns its id. Raises UnknownTopic.

        by: who does it, for the event log; by default the user of this process."""
        return self._topics.delete(name, by=by)

    def producer(self, topic: str, **options: Unpack[ProducerOptions]) -> Producer:
        """A producer of the topic; `options` are those of `Producer`. Raises UnknownTopic, NoWritePermission."""
        return self._clients.producer(topic, self, **options)

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
        return self._clients.consumer(topic, group, self, dead_letters, **options)

    def group(self, name: str, *sources: Source) -> GroupHandle:
        """A group to look at or to administer. It finds the hub's topics and the registered sources; sources that are
        neither are given."""
        return self._keep(self._clients.group(name, sources))

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
        return self._keep(self._queues.create(name, policy, fifo, backoff, exist_ok=exist_ok))

    def alter_queue(self, name: str, **changes: Unpack[QueueChanges]) -> QueueHandle:
        """Change `policy` or `backoff` of a queue; what is not given stays. `fifo` is fixed.

        The change is durable when this returns, and every process uses it for items that it takes a second later or
        more. An item counts as before what was delivered of it: one that is ready is delivered once more even if the
        new policy allows fewer deliveries than it has had, and becomes a dead letter if it is returned then.

        Raises UnknownQueue, InvalidQueue, and OutcomeUnknown if the reply was lost: repeat it."""
        return self._keep(self._queues.alter(name, changes))

    def queue(self, name: str) -> QueueHandle:
        """A queue to put into and to look at. Raises UnknownQueue."""
        return self._keep(self._queues.find(name))

    def queues(self) -> list[QueueHandle]:
        """All queues, in the order of their names."""
        return [self._keep(queue) for queue in self._queues.every()]

    def delete_queue(self, name: str) -> None:
        """Remove a queue and all that is in it. Raises UnknownQueue."""
        self._queues.delete(name)

    def transaction(self) -> Transaction:
        """Take and put items of queues, all or nothing. Commits on a clean exit, rolls back on an exception."""
        return self._keep(self._queues.transaction())

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

        return self.parts.read_events(EVENTS_TOPIC, Wanted(group, topic), since, follow=follow)

    def audit(self, *, since: Since = None, follow: bool = False) -> Iterator[Event]:
        """What administrators have done to the hub, with who and when, oldest first. It is kept for a year.

        since, follow: as of `events`."""
        from pxrs.events.reading import Wanted

        return self.parts.read_events(AUDIT_TOPIC, Wanted(), since, follow=follow)

    def record_audit(self, action: str, **fields: Json) -> None:
        """Keep what an administrator has done, as the event `audit.<action>` with these fields; `pxrs.events.names` has
        the actions of pxrs. It is stored soon; a failure of that is logged, and never raised.

        action: its name: lower-case letters and underscores. Raises InvalidArgument if it has others.

        who: by default the user of this process and the host. Behind a server, the server writes the caller's
             token."""
        self.parts.record_audit(action, fields)

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
