"""The topics of an open hub: `HubTopics` creates, alters, copies and deletes them.

A topic exists once `create` has made it; asking for another name raises UnknownTopic. Creating a topic needs the
registry only if the topic has `keep_unread`. Deleting one also removes what the registry holds of it; a failure of that
is logged, because the topic itself is gone, and the janitor tries again (`pxrs.upkeep.deleted_topics`).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from pxrs import arguments
from pxrs.errors import InvalidTopic, TopicDiffers, TopicExists, UnknownTopic
from pxrs.events.recording import attempted
from pxrs.hub_parts import HubParts
from pxrs.hub_sources import HubSources
from pxrs.log.contract import TopicLog
from pxrs.model import QUORUMS, Topic, refuse_internal
from pxrs.upkeep import deleted_topics
from pxrs.wording import counted

if TYPE_CHECKING:
    from pxrs.copying.copier import Copied

_logger = logging.getLogger(__name__)

CREATE_ATTEMPTS_MAX: Final = 100
"""How often `HubTopics.create_or_open` tries to create a topic that others create and delete at the same time."""
RETENTION_S_MAX: Final = 100 * 366 * 86_400.0
"""A hundred years. Far more could not be subtracted from the time of a message."""


class HubTopics:
    """Creates, opens, alters, copies and deletes the topics of one open hub. Threads share it."""

    def __init__(self, parts: HubParts, sources: HubSources) -> None:
        self._parts, self._sources = parts, sources

    def open(self, name: str) -> TopicLog:
        """Raises UnknownTopic, and DamagedFrame if the topic's stored description is damaged."""
        self._check_name(name)
        return self._parts.log.topic(name)

    def create(self, name: str, settings: Mapping[str, Any], *, exist_ok: bool) -> TopicLog:
        """Make the topic; settings: by the names of the arguments of `Hub.create_topic`. Raises TopicExists,
        InvalidTopic, and with `exist_ok` TopicDiffers."""
        self._check_new(name, settings["partitioner"])
        arguments.flag(InvalidTopic, "exist_ok", exist_ok)
        topic = Topic(name, uuid.uuid4().hex, **_as_fields(settings))
        if exist_ok:
            return self.create_or_open(topic)
        self._sources.refuse_name(name)
        return self._create(topic)

    def create_described(self, topic: Topic, *, by: str | None) -> TopicLog:
        """Make the topic, whose id was chosen before. Raises TopicExists, InvalidTopic. by: who does it; by default the
        user of this process."""
        self._check_new(topic.name, topic.partitioner)
        self._sources.refuse_name(topic.name)
        return self._create(topic, by)

    def _check_new(self, name: str, partitioner: str) -> None:
        """Raise an error if no topic of this name and partitioner may be created by this process."""
        from pxrs.hashing import hash_named

        self._parts.check_usable()
        self._parts.log.check_topics()
        refuse_internal(name, "created")
        hash_named(arguments.text(InvalidTopic, "partitioner", partitioner, "the partitioner's name"))

    def _check_name(self, given: object) -> None:
        self._parts.check_usable()
        arguments.text(InvalidTopic, "topic", given, "the topic's name")

    def _create(self, topic: Topic, by: str | None = None) -> TopicLog:
        log = self._parts.log
        if not (log.keeps_copies or log.is_kept_by_server) and any(getattr(topic, name) for name in QUORUMS):
            raise InvalidTopic(
                f"{topic.name}: {', '.join(QUORUMS)} are only for a cluster (docs/cluster.md), but {log.url} keeps one "
                "copy of each message: omit them"
            )
        if self._parts.belonging is not None:
            self._parts.belonging.begin(keeps_unread=topic.keeps_unread)
        created = log.create_topic(topic)
        for warning in created.warnings:
            _logger.warning("%s", warning)
        if not log.is_kept_by_server:  # which records it there
            self._audit("create_topic", by, topic=topic.name, topic_id=topic.id, partitions=topic.partitions)
        return created

    def _audit(self, action: str, by: str | None, **fields: object) -> None:
        self._parts.events.audit(action, **({} if by is None else {"who": by}), **fields)

    def create_or_open(self, asked: Topic) -> TopicLog:
        """The topic of this name, created if there is none. Raises TopicDiffers if there is one with other settings.

        A topic's name and all its settings appear at one moment, so a topic that is found here has them all."""
        attempt = 0
        while True:
            attempt += 1
            try:
                found = self._parts.log.topic(asked.name)
            except UnknownTopic:
                # Outside the inner `try`, which takes TopicExists for a race with another process and tries again.
                self._sources.refuse_name(asked.name)
                try:
                    return self._create(asked)
                except TopicExists:
                    if attempt == CREATE_ATTEMPTS_MAX:
                        raise
                    continue  # another process created it between the two calls: compare its settings
            if differences := found.topic.differences(asked):
                raise TopicDiffers(asked.name, differences)
            return found

    def _open_like(self, topic: Topic, name: str, partitions: int | None) -> TopicLog:
        """The topic of this name; if there is none, one with the settings of `topic`. Raises InvalidTopic if it has
        another number of partitions than is given."""
        try:
            found = self._parts.log.topic(name)
        except UnknownTopic:
            count = topic.partitions if partitions is None else partitions
            new = replace(topic, name=name, id=uuid.uuid4().hex, partitions=count, revision=0, extra={})
            if not (self._parts.log.keeps_copies or self._parts.log.is_kept_by_server):
                new = replace(new, **dict.fromkeys(QUORUMS))  # type: ignore[arg-type]  # each may be None
            return self.create_or_open(new)
        if partitions not in (None, found.partitions):
            raise InvalidTopic(f"{name} has {counted(found.partitions, 'partition')}, not {partitions}")
        return found

    def alter(self, name: str, changes: Mapping[str, Any]) -> TopicLog:
        """Change settings of a topic; changes: by the names of the arguments of `Hub.create_topic`. Raises
        UnknownTopic, InvalidTopic."""
        self._check_name(name)
        if "retention_s" in changes:
            raise InvalidTopic(f"{name}: pass the time as retention=")
        fields = _as_fields(changes)
        if not fields:
            raise InvalidTopic(f"{name}: name at least one setting to change")
        return self.alter_described(name, fields)

    def alter_described(self, name: str, changes: Mapping[str, object], *, by: str | None = None) -> TopicLog:
        """Change settings of a topic, given as fields of `Topic`. Raises UnknownTopic, InvalidTopic. by: who does it;
        by default the user of this process."""
        self._parts.check_usable()
        log, belonging = self._parts.log, self._parts.belonging
        log.check_topics()
        if log.is_kept_by_server:
            return log.alter_topic(name, changes)  # which does the rest of this function there
        before = log.topic(name).topic
        if belonging is not None and before.altered(changes).keeps_unread:
            belonging.begin(keeps_unread=True)
        altered = log.alter_topic(name, changes)
        if altered.topic.revision != before.revision:
            self._audit("alter_topic", by, topic=name, topic_id=altered.id, changes=dict(changes))
        return altered

    def names(self) -> dict[str, str]:
        """The names of all topics by their ids; of the damaged ones too, if their id is known."""
        log = self._parts.log
        damaged = {topic.id: topic.name for topic in log.damaged_topics() if topic.id is not None}
        return damaged | {topic.id: topic.name for topic in log.topics()}

    def copy(
        self,
        source: str,
        target: str,
        to: HubTopics,
        partitions: int | None,
        start: int | datetime | None,
        end: int | datetime | None,
        append: bool,
        on_progress: Callable[[Copied], None] | None,
    ) -> Copied:
        """Copy the messages of a topic into one of `to`, this hub or another one: see `Hub.copy_topic`."""
        from pxrs.copying.starting import copy

        self._check_name(source)
        to._check_name(target)
        refuse_internal(target, "copied into")
        read = self._parts.log.topic(source)
        written = to._open_like(read.topic, target, partitions)
        if written.id == read.id:
            raise InvalidTopic(f"{source} cannot be copied into itself")
        written.check_writable()
        to._parts.join_registry()
        registry = to._parts.registry.get()
        with attempted(to._parts.events, "copy_topic", topic=source, target=target) as attempt:

            def tell(copied: Copied) -> None:
                attempt.has_effect = copied.messages > 0
                if on_progress is not None:
                    on_progress(copied)

            done = copy(read, written, registry, start, end, may_add=append, on_progress=tell)
        to._audit("copy_topic", None, topic=source, topic_id=read.id, target=target, messages=done.messages)
        return done

    def delete(self, name: str, *, by: str | None = None) -> str:
        """Remove the topic, its messages, and what the registry and the staging folder hold of it. Returns its id. by:
        who does it; by default the user of this process."""
        self._check_name(name)
        log = self._parts.log
        if log.is_kept_by_server:
            return log.delete_topic(name)  # which does the rest of this function there
        # A damaged topic may have had `keep_unread`: its description cannot be read.
        damaged = {topic.id: topic.name for topic in log.damaged_topics() if topic.id is not None}
        # A topic whose settings were changed may have had it too.
        keeping = {topic.id: topic.name for topic in log.topics() if topic.keeps_unread or topic.revision} | damaged
        for identity, each in keeping.items():
            if each == name:
                deleted_topics.note(self._parts, identity)
        identity = log.delete_topic(name)
        # Before the rest, which may fail: the topic is deleted.
        self._audit("delete_topic", by, topic=name, topic_id=identity)
        if identity in keeping:
            deleted_topics.forget(self._parts, identity)
        deleted_topics.forget_published(self._parts, identity)
        deleted_topics.forget_copies(self._parts, identity)
        return identity


def _as_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by the names of the arguments of `Hub.create_topic`, checked, as fields of `Topic`."""
    fields = dict(settings)
    for name in ("retention", "segment_s"):
        if fields.get(name) is not None:
            fields[name] = arguments.seconds(InvalidTopic, name, fields[name], 0, RETENTION_S_MAX, above=True)
    if "keep_unread" in fields:
        arguments.flag(InvalidTopic, "keep_unread", fields["keep_unread"])
    if "retention" in fields:
        fields["retention_s"] = fields.pop("retention")
    return fields
