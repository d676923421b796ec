"""What publishing keeps in the registry: the manifest of each query, and the states that it goes through.

    spark/<topic id>/<query>    the last batch of the query: its staged files, what it has read, whether it is published
    spark/routed/<hub id>.<query>
                                the same of a query whose rows name their topics: the staged files of all topics

There is one manifest for each query and topic, or one for a query whose rows name their topics (decision 0038); it is
that of the query's last batch alone. A query that has written in both ways has both kinds. `TRANSITIONS` lists how a
manifest changes, and `ON_ARRIVAL` what a driver that comes with a batch does with the one that it finds (K1, K2).
"""

from __future__ import annotations

import enum
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final, NamedTuple

from pxrs.errors import BatchRefused, RegistryCorrupt
from pxrs.group.records import Checkpoint, Keys, partition_of
from pxrs.log.numbering import TopicPartition
from pxrs.publishing.feed import Feed
from pxrs.publishing.planning import Span
from pxrs.publishing.staging.files import routed_writer
from pxrs.registry.contract import Entry, Registry

_logger = logging.getLogger(__name__)

MANIFESTS: Final = "spark/"
"""The prefix of all manifests. Spark was the first user of this package; the name stays because stored keys have it."""

ROUTED: Final = f"{MANIFESTS}routed/"
"""The prefix of the manifests of queries whose rows name their topics. No topic has this id."""

APP: Final = "app-"
"""Prefix of the ids of writers to which the user has given a name (`txnAppId`)."""

Ranges = dict[str, dict[str, list[int]]]
"""What was read: by "<group>/<topic id>" and partition, the first offset and the one behind the last."""


def manifests_of(topic: str) -> str:
    """The prefix of the manifests of all queries that write to the topic with this id alone."""
    return f"{MANIFESTS}{topic}/"


def routed_prefix(hub: str) -> str:
    """The key prefix of the manifests of all queries whose rows name topics of the hub with this id."""
    return f"{ROUTED}{hub}."


def query_of(key: str) -> str:
    """The query that the manifest with this key belongs to."""
    name = key.rpartition("/")[2]
    return name.partition(".")[2] if key.startswith(ROUTED) else name


def writer_of(key: str) -> str:
    """The name under which the rows of the manifest with this key are staged and appended."""
    return routed_writer(query_of(key)) if key.startswith(ROUTED) else query_of(key)


class ManifestState(enum.Enum):
    """The state of the manifest of a query in the registry."""

    ABSENT = "absent"
    """The query has committed no batch."""
    COMMITTED = "committed"
    """The batch is part of its topics, and its staged files are being appended, by this driver or by any other one."""
    PUBLISHED = "published"
    """All staged files of the batch are appended."""


class Event(enum.Enum):
    """What changes the manifest of a query, by one commit each. COMMIT and FINISH expect the manifest's version as
    read; FORGET expects nothing, because no driver uses the id of a finished job again."""

    COMMIT = "a driver commits the next batch, together with the group's checkpoints"
    FINISH = "all pieces are appended"
    FORGET = "the write was a job, which has no next batch"


TRANSITIONS: Final[Mapping[tuple[ManifestState, Event], ManifestState]] = {
    (ManifestState.ABSENT, Event.COMMIT): ManifestState.COMMITTED,
    (ManifestState.COMMITTED, Event.FINISH): ManifestState.PUBLISHED,
    (ManifestState.PUBLISHED, Event.COMMIT): ManifestState.COMMITTED,
    (ManifestState.PUBLISHED, Event.FORGET): ManifestState.ABSENT,
}
"""The states that follow each other. What is not listed does not happen: a committed batch is finished before the next
one is committed over it, or the next one is refused. Deleting a topic removes its manifests in any state."""


class Order(enum.Enum):
    """The order of a driver's batch and the batch of the query's manifest."""

    EARLIER = "earlier"
    SAME = "same"
    LATER = "later"


class Step(enum.Enum):
    """What a driver does next with its batch."""

    COMMIT = "write the manifest of its own batch"
    FINISH_THEN_LOOK = "finish the manifest that is there, and look at it again"
    FINISH_THEN_STOP = "finish the manifest that is there, and discard its own staged files"
    STOP = "discard its own staged files"
    REFUSE = "raise BatchRefused"


ON_ARRIVAL: Final[Mapping[tuple[ManifestState, Order], Step]] = {
    (ManifestState.ABSENT, Order.LATER): Step.COMMIT,
    (ManifestState.COMMITTED, Order.LATER): Step.FINISH_THEN_LOOK,
    (ManifestState.COMMITTED, Order.SAME): Step.FINISH_THEN_STOP,
    (ManifestState.COMMITTED, Order.EARLIER): Step.REFUSE,
    (ManifestState.PUBLISHED, Order.LATER): Step.COMMIT,
    (ManifestState.PUBLISHED, Order.SAME): Step.STOP,
    (ManifestState.PUBLISHED, Order.EARLIER): Step.REFUSE,
}
"""What a driver does with its batch. If the batch is earlier than the one of the manifest, an old checkpoint location
was restored (K2)."""


class Part(NamedTuple):
    """What a batch has staged for one topic."""

    topic: str
    """The topic's id."""
    name: str
    """The topic's name, for a part of a routed batch. Another topic may have the name later: the id counts."""
    files: list[str]
    """Names of the staged files. Empty once the batch is published."""
    ends: list[int]
    """The ends of the topic's partitions before anything of the batch was appended. Empty in manifests of version
    0.1."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The last batch of a query that was committed."""

    batch: int
    files: list[str]
    """As `Part.files`, of a batch for one topic."""
    ranges: Ranges = field(default_factory=dict)
    is_published: bool = False
    ends: list[int] = field(default_factory=list)
    """As `Part.ends`, of a batch for one topic."""
    planned: str = ""
    """A hash of what Spark has planned for the batch; empty if the plan could not be read."""
    at: float = 0.0
    """When the manifest was written, in seconds since 1970."""
    epochs: dict[str, dict[str, int]] = field(default_factory=dict)
    """Keys as in `ranges`; values are the epochs of the owner keys under which the batch was planned. They distinguish
    the batch from others that read the same offsets. Empty in manifests of version 0.1."""
    has_state: bool | None = None
    """Whether the query keeps state in its checkpoint location; None if that could not be found out."""
    parts: list[Part] = field(default_factory=list)
    """Of a routed batch: what is staged for each topic. `files` and `ends` are then empty."""

    @property
    def state(self) -> ManifestState:
        return ManifestState.PUBLISHED if self.is_published else ManifestState.COMMITTED

    def with_ends(self, ends: Mapping[str, list[int]]) -> Manifest:
        """The same with the ends of the topics, by their ids; of a batch for one topic, those of that topic."""
        if self.parts:
            return replace(self, parts=[part._replace(ends=ends[part.topic]) for part in self.parts])
        return replace(self, ends=next(iter(ends.values()), []))

    def as_published(self) -> Manifest:
        parts = [part._replace(files=[], ends=[]) for part in self.parts]
        return replace(self, files=[], is_published=True, ends=[], parts=parts)

    def dump(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def load(cls, entry: Entry) -> Manifest:
        try:
            found = json.loads(entry.value)
            if "parts" in found:
                found["parts"] = [Part(*part) for part in found["parts"]]
            return cls(**{name: found[name] for name in cls.__dataclass_fields__ if name in found})
        except (ValueError, TypeError) as error:
            raise RegistryCorrupt(entry.key, f"not a valid manifest record: {error}") from error


def parts_of(key: str, manifest: Manifest) -> list[Part]:
    """The parts of the manifest with this key: one for a single topic, or those that a routed manifest lists."""
    if key.startswith(ROUTED):
        return manifest.parts
    return [Part(key.removeprefix(MANIFESTS).partition("/")[0], "", manifest.files, manifest.ends)]


def is_stripped(now: Manifest, manifest: Manifest) -> bool:
    """Whether `now` is `manifest` without the part of a topic that was deleted meanwhile (`forget_topic`)."""
    return now.batch == manifest.batch and not now.is_published and len(now.parts) < len(manifest.parts)


def has_same_plan(one: Manifest, other: Manifest) -> bool:
    """Whether both manifests are of the same batch, with the same hash of Spark's plan. False if the hash is not known:
    then several different writes of a batch may have the same number."""
    return one.batch == other.batch and one.planned != "" and one.planned == other.planned


def step_for(query: str, last: Manifest | None, ours: Manifest) -> Step:
    """What a driver that comes with the batch `ours` does if the query's manifest is `last`. Raises BatchRefused."""
    state = ManifestState.ABSENT if last is None else last.state
    step = ON_ARRIVAL[state, _order(last, ours)]
    if step is Step.REFUSE:
        assert last is not None
        if query.startswith(APP):
            raise BatchRefused(
                f"txnAppId {query.removeprefix(APP)} has already written version {last.batch}, and now comes with "
                f"{ours.batch}. If another query uses this name, or this one has a new checkpoint location, use "
                "another txnAppId; otherwise an old checkpoint location was restored"
            )
        raise BatchRefused(
            f"query {query} has already published batch {last.batch}, and now comes with batch {ours.batch}: an old "
            "checkpoint location was restored. Start with a new one"
        )
    if last is not None and last.batch == ours.batch:
        _check_repeat(query, last, ours)
    return step


def _order(last: Manifest | None, ours: Manifest) -> Order:
    if last is None or ours.batch > last.batch:
        return Order.LATER
    return Order.SAME if ours.batch == last.batch else Order.EARLIER


def _check_repeat(query: str, last: Manifest, ours: Manifest) -> None:
    """Raise BatchRefused if a batch with the number of the last one is not the same batch."""
    if last.planned and ours.planned and last.planned != ours.planned:
        raise BatchRefused(
            f"query {query} has already published batch {ours.batch}, but Spark has planned it again: an old "
            "checkpoint location was restored. Restore the latest one; or start with a new one, and have the source "
            "begin after what is in the topic"
        )
    for source, ranges in ours.ranges.items():
        for number, read in ranges.items():
            if last.ranges.get(source, {}).get(number) != read:
                raise BatchRefused(
                    f"query {query} repeats batch {ours.batch} with other input: offsets {read[0]} to {read[1]} of "
                    f"{source}/{number}. Start with a new checkpoint location"
                )


def ranges_of(feeds: Sequence[Feed]) -> Ranges:
    ranges: Ranges = {}
    for feed in feeds:
        of_topic = ranges.setdefault(f"{feed.group}/{feed.topic}", {})
        of_topic.update({str(number): [span.start, span.end] for number, span in feed.spans.items()})
    return ranges


def epochs_of(feeds: Sequence[Feed]) -> dict[str, dict[str, int]]:
    epochs: dict[str, dict[str, int]] = {}
    for feed in feeds:
        of_topic = epochs.setdefault(f"{feed.group}/{feed.topic}", {})
        of_topic.update({str(number): span.epoch for number, span in feed.spans.items()})
    return epochs


def have_common_partitions(one: Ranges, other: Ranges) -> bool:
    """Whether two batches have read from the same partition of the same group."""
    return any(parts.keys() & other.get(source, {}).keys() for source, parts in one.items())


def published_spans(
    registry: Registry, group: str, spans: Mapping[TopicPartition, Span]
) -> dict[TopicPartition, bool | None]:
    """Which of these ranges of a group a manifest in this registry names: by topic id and partition, whether the query
    of that manifest keeps state (None: not known).

    A query's manifest names its last batch, and the commit that wrote it moved the group's checkpoints to the ends of
    these ranges. So publishing this batch again has no effect. A manifest counts only if it names the same range and
    the same epoch: another query may have read the same offsets before a reset."""
    found: dict[TopicPartition, bool | None] = {}
    for entry in registry.scan(MANIFESTS):
        if entry.key.count("/") != 2:  # the keys of manifests are spark/<topic id>/<query>
            continue
        try:
            manifest = Manifest.load(entry)
        except RegistryCorrupt as error:
            _logger.warning(
                "%s cannot be read, so whether this query's last batch is published is not known: %s", entry.key, error
            )
            continue
        for (topic, partition), span in spans.items():
            source, number = f"{group}/{topic}", str(partition)
            read, epoch = manifest.ranges.get(source, {}).get(number), manifest.epochs.get(source, {}).get(number)
            if read == [span.start, span.end] and epoch == span.epoch:
                found[topic, partition] = manifest.has_state
    return found


def is_any_reached(registry: Registry, group: str, ends: Mapping[TopicPartition, int]) -> bool:
    """Whether the group's checkpoint of one of these partitions is at or after the given offset."""
    for topic in {topic for topic, _ in ends}:
        for entry in registry.scan(Keys(group).checkpoints_of(topic)):
            end = ends.get(partition_of(entry.key))
            if end is not None and Checkpoint.load(entry.key, entry.value).offset >= end:
                return True
    return False
