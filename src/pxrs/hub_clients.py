"""The producers and consumers that an open hub makes, and closes with itself; and its groups seen from outside.

A hub knows them by weak references: one that nobody uses any more is collected and closes itself. Each of them refers
to the `Hub`, because a hub that nothing refers to closes its log and registry.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, Unpack

from pxrs import arguments
from pxrs.errors import Closed, InvalidGroup
from pxrs.hub_parts import HubParts
from pxrs.hub_sources import HubSources
from pxrs.hub_topics import HubTopics
from pxrs.log.contract import Source, TopicLog
from pxrs.log.joined import JoinedSource
from pxrs.model import refuse_internal
from pxrs.topics import TopicHandle
from pxrs.upkeep.janitor import Janitor

if TYPE_CHECKING:
    # Imported by the methods that need them: a process of Spark that opens a hub starts in half the time without them.
    from pxrs.consumer.consumer import Consumer, TopicsConsumer
    from pxrs.consumer.dead_letters import DeadLetterTopic
    from pxrs.group.admin import GroupHandle
    from pxrs.options import EitherConsumerOptions, ProducerOptions
    from pxrs.producer.producer import Producer
    from pxrs.producer.sending import SendingThread

Readable = str | Source
"""The name of a topic or registered source, or a source itself."""


CLOSING_MAX: Final = 32
"""How many consumers are closed at the same time."""


def _call_together(closes: Sequence[Callable[[], None]]) -> None:
    """Close the consumers at the same time, because each of them may wait for the registry's whole `timeout`. Raises
    the first error, when all are closed."""
    if len(closes) < 2:
        for close in closes:
            close()
        return
    with ThreadPoolExecutor(min(len(closes), CLOSING_MAX), "pxrs-closing") as pool:
        futures = [_submitted(pool, close) for close in closes]
    errors = [error for each in futures if (error := each.exception()) is not None]
    if errors:
        raise errors[0]


def _submitted(pool: ThreadPoolExecutor, close: Callable[[], None]) -> Future[None]:
    try:
        return pool.submit(close)
    except RuntimeError:  # the interpreter is exiting, or the process has as many threads as it may have
        done: Future[None] = Future()
        try:
            close()
            done.set_result(None)
        except Exception as error:  # noqa: BLE001 - raised by the caller
            done.set_exception(error)
        return done


class HubClients:
    """Makes producers, consumers and handles of groups; knows the producers and consumers in use. Threads share it."""

    def __init__(self, parts: HubParts, topics: HubTopics, sources: HubSources, janitor: Janitor) -> None:
        self._parts, self._topics, self._sources, self._janitor = parts, topics, sources, janitor
        self._lock = threading.Lock()
        self._producers: weakref.WeakSet[SendingThread] = weakref.WeakSet()
        self._consumers: weakref.WeakSet[Consumer | TopicsConsumer] = weakref.WeakSet()

    def producer(self, topic: str, hub: object, **options: Unpack[ProducerOptions]) -> Producer:
        """A producer of the topic. hub: what it refers to. Raises UnknownTopic, NoWritePermission."""
        from pxrs.producer.producer import Producer

        self._parts.check_usable()
        refuse_internal(topic, "written to")
        log = self._topics.open(topic)
        log.check_writable()
        producer = Producer(log, **options)
        producer.hub = hub
        with self._lock:
            if not self._parts.is_closed:
                self._producers.add(producer.sending)
                self._janitor.take_part(log.topic, sends=True)
                return producer
        producer.close()
        raise self._closed()

    def consumer(
        self,
        topic: Readable | Sequence[Readable],
        group: str,
        hub: object,
        dead_letters: str | None,
        **options: Unpack[EitherConsumerOptions],
    ) -> Consumer | TopicsConsumer:
        """A member of the group, which reads what is given. hub: what it refers to. Raises UnknownTopic."""
        from pxrs.consumer.consumer import Consumer, TopicsConsumer

        self._parts.check_usable()
        if dead_letters is not None:
            arguments.text(InvalidGroup, "dead_letters", dead_letters, "the name of a topic")
        source, has_own_topics = self._to_be_read(topic)
        if has_own_topics:
            self._parts.join_registry()
        letters = None if dead_letters is None else self._letters(dead_letters, source, hub)
        kind: Callable[..., Consumer | TopicsConsumer] = (
            TopicsConsumer if isinstance(source, JoinedSource) else Consumer
        )
        consumer = kind(
            source,
            self._parts.registry.get(),
            group,
            dead_letters=letters,
            topic_names=self._topics.names,
            home=self._parts.join_registry if has_own_topics else None,
            recorder=self._parts.events,
            place=self._parts.place,
            **options,
        )
        consumer.hub = hub
        with self._lock:
            if not self._parts.is_closed:
                self._consumers.add(consumer)
                for part in source.parts:
                    if isinstance(part, TopicLog):
                        self._janitor.take_part(part.topic, sends=False)
                return consumer
        consumer.close()
        raise self._closed()

    def _to_be_read(self, topic: Readable | Sequence[Readable]) -> tuple[Source, bool]:
        """What `consumer` was given to read, and whether it has topics of this hub that were given by name. Raises
        UnknownTopic, InvalidTopic."""
        is_joined = isinstance(topic, Sequence) and not isinstance(topic, str | bytes)
        given: Sequence[Any] = topic if is_joined else [topic]  # type: ignore[assignment]
        parts, has_own_topics = list[Source](), False
        for each in given:
            part = each if isinstance(each, Source) else self._sources.readable(each)
            has_own_topics |= part is not each and isinstance(part, TopicLog)
            parts.append(part)
        return JoinedSource(parts) if is_joined else parts[0], has_own_topics

    def _letters(self, topic: str, source: Source, hub: object) -> DeadLetterTopic:
        """The topic for messages that a handler fails on. It must be there before the first one fails."""
        from pxrs.consumer.dead_letters import DeadLetterTopic, check_other_topic

        refuse_internal(topic, "written to")
        target = self._parts.log.topic(topic)
        check_other_topic(source.parts, target.id)
        target.check_writable()
        return DeadLetterTopic(lambda: self.producer(topic, hub, linger_s=0))

    def group(self, name: str, sources: Sequence[Source]) -> GroupHandle:
        """A group from outside. sources: what it reads beside topics and registered sources. Raises InvalidGroup."""
        from pxrs.group.admin import GroupHandle

        parts = self._parts
        parts.check_usable()
        for source in sources:
            if not isinstance(source, Source | TopicHandle):
                raise InvalidGroup(
                    f"the source {arguments.shown(source)} is no Source; topics of this hub need not be named here"
                )
        home, catalog = parts.check_registry_of_topics, self._sources.catalog()
        return GroupHandle(parts.registry.get(), name, parts.log, sources, home, catalog, parts.events)

    def end(self) -> list[Callable[[], None]]:
        """Mark the hub as closed, so that no producer or consumer is added any more. The functions that close those
        that are there: first the consumers, which may still send dead letters."""
        with self._lock:
            self._parts.is_closed = True
            consumers, producers = list(self._consumers), list(self._producers)
        # A consumer in whose callback the hub is closed recognizes that by the thread which closes it.
        calling = [each.close for each in consumers if each.is_in_callback]
        others = [each.close for each in consumers if not each.is_in_callback]
        return [*calling, lambda: _call_together(others), *(each.close for each in producers)]

    def _closed(self) -> Closed:
        return Closed(f"the hub {self._parts.url} was closed")
