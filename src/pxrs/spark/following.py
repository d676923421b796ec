"""The topics that a stream reads, and what the query does when they change.

A stream reads the topics that the user has named, or all topics whose names match a pattern. The query reads them as
one member of its group, under one lease. A change of the topics is a new membership: at a batch boundary, when Spark
has finished everything that was planned, the query writes its checkpoints, leaves the group, and joins it again with
the topics that are there. Spark's offsets name the topics by their ids, so they mean the same before and after.

- A new topic that matches the pattern is read from its first offset on (G6). The query looks for new topics at most
  once every `LOOK_S`.
- A topic that was deleted ends the query with TopicDeleted. With failOnDataLoss=false the query logs a warning and goes
  on with the others, if there are others.
- A query that reads up to an end (Trigger.AvailableNow) reads nothing of topics that were created after it began.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from pxrs.errors import (
    CheckpointsDiffer,
    CommitUnknown,
    GroupUnavailable,
    PartitionLost,
    TopicDeleted,
    UnknownTopic,
)
from pxrs.group.timings import HANDOVER_TIMEOUT_DEFAULT, LEASE_TTL_DEFAULT
from pxrs.hub import Hub
from pxrs.log.contract import TopicLog
from pxrs.log.joined import JoinedSource
from pxrs.publishing.membership import QueryOptions
from pxrs.publishing.offsets import OffsetForm
from pxrs.publishing.planning import REPLACED, Spans
from pxrs.publishing.query import Query
from pxrs.spark.names import topics_to_stream
from pxrs.spark.options import ReadOptions

_logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""How often a query looks for new topics that match its pattern."""
_GONE: Final = (
    "Start with a new checkpoint location: the group goes on where it is with the other topics; or set "
    "failOnDataLoss=false, to go on without it"
)


class Followed:
    """A streaming query that has joined its group, and its present topics. Its methods are called from one thread."""

    def __init__(self, hub: Hub, options: ReadOptions) -> None:
        """Join the group. Raises UnknownTopic, InvalidOption, GroupActive, and what `Hub.join_registry` raises."""
        self._hub, self._options = hub, options
        self._looked_at = time.monotonic()
        self._loaded: tuple[Mapping[str, Any], Spans] | None = None
        """The offset that Spark gave last, and its spans: for an idle query, Spark gives the same one each time."""
        self._ignored: set[str] = set()
        """Ids of deleted topics for which a warning was logged."""
        self._join(topics_to_stream(hub, options.where.topics))

    def _join(self, topics: Sequence[TopicLog]) -> None:
        self.query = join_query(self._hub, self._options, topics)
        self.form = OffsetForm.of(self.query.source.parts)
        self._loaded = None

    def load(self, offset: Mapping[str, Any]) -> Spans:
        """The spans of an offset. Raises CheckpointsDiffer if it names topics that are not read, unless the query goes
        on without them."""
        if self._loaded is None or self._loaded[0] != offset:
            missing = self.form.missing(offset)
            if missing:
                self._check_missing(missing, has_others=not self.form.is_of_others(offset))
            self._loaded = offset, self.form.load(offset)
        return self._loaded[1]

    def _check_missing(self, missing: Mapping[str, str], *, has_others: bool) -> None:
        now = self.query.source.name
        if not has_others:
            were = f"the topic {now} was" if len(self.form.names) == 1 else f"the topics {now} were"
            raise CheckpointsDiffer(
                f"{were} deleted and made again since Spark wrote its checkpoint, or the query has read other topics "
                f"with this checkpoint location before. {REPLACED}"
            )
        named = ", ".join(sorted(name or f"with the id {id}" for id, name in missing.items()))
        if self._options.fails_on_loss:
            raise CheckpointsDiffer(
                f"Spark's checkpoint names the topic {named}, which was deleted since, or which the query does not "
                f"name any more; it reads {now}. {_GONE}"
            )
        if not missing.keys() <= self._ignored:
            _logger.warning("the query goes on without the topic %s, which its checkpoint names", named)
            self._ignored |= missing.keys()

    def follow(self, start: Mapping[str, Any]) -> None:
        """Join again if there are new topics. start: the offset up to which Spark has finished; no batch is running."""
        if self._options.where.topics.pattern is None or self.query.targets is not None:
            return
        now = time.monotonic()
        if now < self._looked_at + LOOK_S:
            return
        self._looked_at = now
        existing = self._hub.topics()
        matching = set(self._options.where.topics.among(topic.name for topic in existing))
        new = [topic for topic in existing if topic.name in matching and topic.id not in self.form.names]
        if not new:
            return
        try:
            topics = topics_to_stream(self._hub, self._options.where.topics)
        except UnknownTopic:  # one of them was deleted meanwhile: the next look lists the topics again
            return
        _logger.info("new topics match the pattern: %s", ", ".join(topic.name for topic in new))
        self._join_again(start, topics)

    def _join_again(self, start: Mapping[str, Any], topics: Sequence[TopicLog]) -> None:
        """Leave the group, and join it with these topics."""
        targets, spans = self.query.targets, self.load(start)
        for step in (partial(self.query.finish, spans), self.query.close):
            try:
                step()
            except (PartitionLost, CommitUnknown, GroupUnavailable) as error:
                # The new member continues as after a crash: at Spark's offset, to which it moves the group's
                # checkpoints.
                _logger.warning("the last checkpoints before the topics changed may not be written: %s", error)
        self._join(topics)
        if targets is not None:
            self.query.read_until(targets)

    @contextlib.contextmanager
    def topics_there(self) -> Iterator[None]:
        """Replace UnknownTopic by TopicDeleted, with advice, if a topic of the query was deleted."""
        try:
            yield
        except UnknownTopic as error:
            existing = {topic.name: topic.id for topic in self._hub.topics()}
            for id, name in self.form.names.items():
                if existing.get(name) != id:
                    advice = REPLACED if len(self.form.names) == 1 else _GONE
                    if name in existing or len(self.form.names) > 1:
                        raise TopicDeleted(name, id, is_made_again=name in existing, advice=advice) from error
            raise

    def drop_deleted(self, start: Mapping[str, Any]) -> bool:
        """Join again without the topics that were deleted. False if the query must end instead: data loss is an error,
        or no topic is left."""
        if self._options.fails_on_loss:
            return False
        existing = {topic.id for topic in self._hub.topics()}
        left = [part for part in self.query.source.parts if part.id in existing]
        if not left or len(left) == len(self.form.names):
            return False
        if self._options.where.topics.pattern is not None:
            left = list(topics_to_stream(self._hub, self._options.where.topics))
        gone = {id: name for id, name in self.form.names.items() if id not in existing}
        _logger.warning("the query goes on without topics that were deleted: %s", ", ".join(gone.values()))
        self._ignored |= gone.keys()
        self._join_again(start, [part for part in left if isinstance(part, TopicLog)])
        return True


def join_query(hub: Hub, options: ReadOptions, topics: Sequence[TopicLog] | None = None) -> Query:
    """A streaming query that has joined its group. Raises UnknownTopic, InvalidOption, GroupActive and what
    `Hub.join_registry` raises.

    topics: what is read; by default what the options name"""
    assert options.group is not None
    chosen = options.where.topics
    topics = topics_to_stream(hub, chosen) if topics is None else topics
    hub.join_registry()
    how = QueryOptions(
        options.group,
        options.starting,
        options.fails_on_loss,
        options.is_shared,
        options.assignor,
        options.lease_ttl or LEASE_TTL_DEFAULT,
        options.handover_timeout or HANDOVER_TIMEOUT_DEFAULT,
        None
        if chosen.assigned is None
        else {each.name: chosen.partitions_of(each.name, each.partitions) for each in topics},
    )
    source = topics[0] if len(topics) == 1 else JoinedSource(topics)
    return Query(source, hub.registry, how, hub.join_registry, hub.parts.events, hub.parts.place)
