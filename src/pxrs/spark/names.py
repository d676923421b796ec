"""Finds what the options name: topics of the hub, or a registered source.

Spark reads both as batches; a registered source cannot be read together with others. Streams, pipelines and writes take
only topics; for a registered source they raise InvalidOption, which says what to use instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pxrs.errors import InvalidOption, UnknownTopic
from pxrs.hub import Hub
from pxrs.log.contract import TopicLog
from pxrs.model import refuse_internal
from pxrs.publishing.selection import Topics
from pxrs.topics import TopicHandle

if TYPE_CHECKING:
    from pxrs.sources.catalog import RegisteredSource


def find_source(hub: Hub, name: str) -> RegisteredSource | None:
    """The registered source of this name; None if there is none. Callers look for a topic first: if a topic has the
    same name, the name means the topic."""
    return next((each for each in hub.sources() if each.name == name), None)


def topics_to_read(hub: Hub, topics: Topics) -> list[TopicLog]:
    """The topics that a batch reads. Raises UnknownTopic; InvalidOption if no topic matches a pattern, or if one of
    several names is that of a registered source."""
    names = topics.among(topic.name for topic in hub.topics())
    if not names:
        raise InvalidOption("subscribePattern", f"no topic of the hub matches {topics.pattern}: create one first")
    return [_topic(hub, name, f"{name} is a registered source: read it by itself").log for name in names]


def topics_to_stream(hub: Hub, topics: Topics) -> list[TopicLog]:
    """The topics that a stream reads. Raises UnknownTopic; InvalidOption if no topic matches a pattern, or if a name is
    that of a registered source."""
    names = topics.among(topic.name for topic in hub.topics())
    if not names:
        raise InvalidOption("subscribePattern", f"no topic of the hub matches {topics.pattern}: create one first")
    return [_topic(hub, name, no_stream(name)).log for name in names]


def topic_to_write(hub: Hub, name: str) -> TopicHandle:
    """The topic of this name. Raises UnknownTopic; InvalidTopic if it is an internal topic; InvalidOption if the name
    is that of a registered source."""
    refuse_internal(name, "written to")
    return _topic(
        hub,
        name,
        f"{name} is a registered source: a table that pxrs only reads. Write to a topic, or use your database's own "
        "tools to write to the table, such as Spark's format('jdbc')",
    )


def no_stream(name: str) -> str:
    """The message that a registered source cannot be streamed, and what to use instead."""
    return (
        f"{name} is a registered source: a table, which Spark reads as a batch (spark.read) and not as a stream. To "
        f"handle rows as they come, use a consumer group: hub.consumer({name!r}, group=...), or `pxrs worker HANDLER "
        f"--topic {name} --group GROUP`"
    )


def _topic(hub: Hub, name: str, refusal: str) -> TopicHandle:
    try:
        return hub.topic(name)
    except UnknownTopic:
        if find_source(hub, name) is None:
            raise
    raise InvalidOption("topic", refusal)
