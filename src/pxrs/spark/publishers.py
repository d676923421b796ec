"""The open hubs and publishers of the process that commits batches. They stay open between batches."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import pxrs
from pxrs.errors import BatchRefused, HubMoved, LogError, UnknownTopic
from pxrs.hub import Hub
from pxrs.log.contract import TopicLog
from pxrs.model import Topic
from pxrs.publishing.feed import Feed
from pxrs.publishing.forgetting import forget_deleted_topics
from pxrs.publishing.manifest import PATIENCE_S, Find, Publisher
from pxrs.publishing.records import Part
from pxrs.registry.outage import UNREACHABLE, ride_out
from pxrs.spark.options import WriteOptions
from pxrs.spark.place import staging_at
from pxrs.topics import TopicHandle

_logger = logging.getLogger(__name__)


@dataclass
class _Opened:
    hub: Hub
    publishers: dict[str, Publisher] = field(default_factory=dict)
    """By the topic's name; the publisher of rows that name their topics under an empty name."""
    tidied: set[str] = field(default_factory=set)
    """The ids of the topics of which the routed publisher has finished the manifests of other queries."""


class Publishers:
    """Open hubs, each with the publishers of its topics. At most `hubs_max` hubs are open; beyond that, the least
    recently used one is closed."""

    def __init__(self, hubs_max: int = 8) -> None:
        self._hubs_max = hubs_max
        self._hubs: dict[tuple[str, str | None], _Opened] = {}

    def publish(
        self,
        options: WriteOptions,
        topic: Topic | None,
        query: str,
        batch: int,
        parts: Sequence[Part],
        feeds: Sequence[Feed] = (),
        planned: str = "",
        has_state: bool | None = None,
    ) -> None:
        """Make a batch part of its topics: see `Publisher.publish`.

        topic: the topic that all rows were staged for; None if the rows name their topics.
        Raises UnknownTopic; BatchRefused if another topic has the name of one of the topics now."""
        opened = self._open(options)
        try:
            if topic is None:
                publisher = self._routed(opened, options, parts)
                publisher.publish_routed(query, batch, parts, feeds, planned, has_state)
            else:
                files = [name for part in parts for name in part.files]
                self._single(opened, options, topic).publish(query, batch, files, feeds, planned, has_state)
        except HubMoved:  # the next attempt opens the hub that is there now
            self.forget(options)
            raise

    def forget_job(self, options: WriteOptions, job: str) -> None:
        """Remove the manifest of a write that was published just now, and has no next batch."""
        self._open(options).publishers[options.topic or ""].forget(job)

    def _open(self, options: WriteOptions) -> _Opened:
        place = options.url, options.registry
        opened = self._hubs.pop(place, None) or _Opened(pxrs.open(options.url, registry=options.registry))
        self._hubs[place] = opened  # put at the end: the first entry is the least recently used one
        if len(self._hubs) > self._hubs_max:
            self._close(next(iter(self._hubs)))
        return opened

    def _single(self, opened: _Opened, options: WriteOptions, topic: Topic) -> Publisher:
        handle = _find_topic(opened.hub, topic.name, topic.id)
        publisher = opened.publishers.get(topic.name)
        if publisher is None or publisher.topic_id != topic.id:
            publisher = opened.publishers[topic.name] = _first_publisher(opened.hub, options, handle.log)
            publisher.finish_others()
        return publisher

    def _routed(self, opened: _Opened, options: WriteOptions, parts: Sequence[Part]) -> Publisher:
        for part in parts:
            _find_topic(opened.hub, part.name, part.topic)
        publisher = opened.publishers.get("")
        if publisher is None:
            publisher = opened.publishers[""] = _first_publisher(opened.hub, options, None)
        for part in parts:
            if part.topic not in opened.tidied:
                publisher.finish_others(part.topic)
                opened.tidied.add(part.topic)
        return publisher

    def forget(self, options: WriteOptions) -> None:
        """Close the hub, so that the next batch opens it and its registry again."""
        place = options.url, options.registry
        if place in self._hubs:
            self._close(place)

    def close(self) -> None:
        for place in list(self._hubs):
            self._close(place)

    def _close(self, place: tuple[str, str | None]) -> None:
        self._hubs.pop(place).hub.close()


def made_again(name: str) -> BatchRefused:
    return BatchRefused(
        f"the topic {name} was deleted and created again while rows for it were staged. None of these rows was "
        "written. Start the query again: it writes this batch to the new topic"
    )


def _find_topic(hub: Hub, name: str, topic_id: str) -> TopicHandle:
    """The topic for which rows were staged. Raises UnknownTopic; BatchRefused if another topic has its name now."""
    topic = hub.topic(name)
    if topic.id != topic_id:
        raise made_again(name)
    return topic


def _finder(hub: Hub) -> Find:
    def find(topic_id: str, name: str) -> TopicLog | None:
        names = [name] if name else [topic.name for topic in hub.topics() if topic.id == topic_id]
        for each in names:
            try:
                found = hub.topic(each)
            except UnknownTopic:
                continue
            if found.id == topic_id:
                return found.log
        return None

    return find


def _first_publisher(hub: Hub, options: WriteOptions, topic: TopicLog | None) -> Publisher:
    """A publisher in a process that has none for this topic yet. Removes what was staged for deleted topics. Raises
    WrongRegistry: another registry does not have the manifests of this hub. If the hub has no registry on record, this
    one is recorded: a process with another registry would take the staged files of a batch for abandoned ones, and
    remove them."""
    home = hub.join_registry()
    staging = staging_at(options.url)
    publisher = Publisher(hub.registry, topic, staging, _finder(hub), "" if home is None else home.hub)
    if hub.log.is_kept_by_server:  # the server's own upkeep does the rest
        return publisher
    try:
        damaged = hub.damaged_topics()
        topics = {each.id for each in hub.topics()} | {each.id for each in damaged if each.id is not None}
    except (LogError, OSError) as error:  # an error of another topic must not stop this one
        _logger.warning("rows staged for deleted topics were not removed: %s", error)
        return publisher
    if nameless := [each.name for each in damaged if each.id is None]:
        _logger.warning("rows staged for deleted topics were not removed: the id of topic %s is not known", nameless[0])
        return publisher
    ride_out(lambda: forget_deleted_topics(hub.registry, staging, topics), PATIENCE_S, errors=UNREACHABLE)
    return publisher
