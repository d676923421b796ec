"""Publishing a batch: one commit makes it part of its topic, then its staged rows are appended (K1 to K3).

The driver's commit writes the query's manifest (`records.py`). Before that commit the batch has no effect, whatever is
staged; after it the batch will be published, by this driver or by another one. The staged files are appended by a
producer of the query's own, whose epoch is the number of the batch and whose sequences count the pieces: an append that
was made before is recognised, and not made again. So:

- If a driver dies between the commit and the last append, and the batch is repeated with its rows in another order, no
  row is lost or doubled: the repeated batch finds the manifest, finishes it, and discards its own staged files.
- A batch with a smaller number comes of a checkpoint location that was restored, and is refused (K2). So is a batch
  with the same number that has read something else, or that Spark has planned anew.
- The same commit writes the checkpoints of the groups that the batch was read with, if they are in the same registry.
  It expects the owner keys as they were when the batch was planned: a query that has lost a partition publishes
  nothing of it (K3).
- A registry that cannot be reached is called again for as long as the query's lease may live, and for `PATIENCE_S` at
  least.
- After a lost reply the same commit is made again. It expects the manifest's version, so at most one of the two commits
  succeeds; after a conflict, the manifest in the registry tells whether the first one did.

If a query never comes back, its manifest is finished by the next query that writes to the topic. Before a batch is
published, the manifests of other queries that have read of the same partitions are finished, so that what follows in a
partition after a hand-over is not published before what precedes it. A manifest that cannot be read or finished stops
only its own query. Readers may see a part of a batch for a moment: the pieces are appended one after the other.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from pxrs.errors import (
    BatchRefused,
    Conflict,
    InvalidRecord,
    OutcomeUnknown,
    PartitionLost,
    PxrsError,
    RegistryCorrupt,
    RegistryError,
    RegistryUnavailable,
    SequenceGap,
    UnknownProducer,
)
from pxrs.group.checkpoints import CheckpointWrite, FencedWrite, Outcome
from pxrs.group.records import Checkpoint, Keys
from pxrs.log.batch import Origin
from pxrs.log.contract import Append, TopicLog
from pxrs.log.outcomes import StoredAt
from pxrs.publishing.feed import Feed
from pxrs.publishing.outage import UNREACHABLE, ride_out
from pxrs.publishing.records import (
    Manifest,
    Step,
    epochs_of,
    have_common_partitions,
    manifests_of,
    query_of,
    ranges_of,
    step_for,
)
from pxrs.publishing.staging.contract import Staging
from pxrs.registry.contract import ABSENT, Entry, Registry
from pxrs.registry.identity import fingerprint

_logger = logging.getLogger(__name__)

JOB: Final = "job-"
"""Prefix of the ids of writes that are no streams (`df.write`), which have one batch each."""
_NAMESPACE: Final = uuid.UUID("9d1d6c56-2f0c-5a6e-8a35-3b9f1f0a7c11")
_UNFINISHABLE: Final = (BatchRefused, InvalidRecord, SequenceGap, UnknownProducer)
"""Errors that concern one manifest. All others concern the topic, its disk or the registry."""
_DELETED_S: Final = 86_400.0
"""The minimum age of what was staged or committed for a deleted topic before it is removed. The age protects a topic
that was created after the topics were listed."""
_JOB_S: Final = 86_400.0
"""How long the manifest of a job is kept at least: its commit may be repeated, and must find the manifest."""
PATIENCE_S: Final = 15.0
"""How long a registry that cannot be reached is called again; if the query's lease is longer, as long as that."""
_TRIES_MAX: Final = 20
"""How often a commit whose outcome is unknown is made again."""
_LOOKS_MAX: Final = 100
"""How often `publish` looks at the manifest again, because another driver of the same query has changed it, or because
this driver has finished the batch that it found."""
_PAUSE_S: Final = (0.05, 1.0)
_APPEND_BYTES_MAX: Final = 64 << 20
_TOGETHER_MAX: Final = 4
"""How many pieces of one partition go into one append: fewer than the batches of a producer that a partition
remembers."""

RESTART: Final = (
    "The query's lease ran out, or another member took the partition, before the batch was finished. Start the query "
    "again: it reads the batch again with the same offsets, and nothing is lost or doubled"
)
"""The advice for a batch whose partitions were lost before it was published."""


def forget_topic(registry: Registry, staging: Staging, topic: str) -> None:
    """Remove the manifests of a deleted topic, and what was staged for it. topic: its id."""
    for entry in registry.scan(manifests_of(topic)):
        registry.commit(delete=[entry.key])
    staging.forget_topic(topic)


def forget_deleted_topics(registry: Registry, staging: Staging, topics: Collection[str]) -> None:
    """Remove what tasks and drivers have staged or committed for topics after their deletion, which they may notice
    late. What is younger than a day stays.

    topics: the ids of the topics that exist. Deleted topics are found in the staging place only: a manifest of an
    unknown topic may belong to another log that shares the registry."""
    before = time.time() - _DELETED_S
    for topic in staging.topics():
        if topic not in topics and max(staging.changed_at(topic), _written_at(registry, topic)) < before:
            forget_topic(registry, staging, topic)


def needed_batches(registry: Registry, topic: str) -> dict[str, int | None]:
    """The batches of a topic whose staged files are needed, because a manifest names them and they are not published.
    By query; None if the manifest is damaged, so that any batch of that query may be needed."""
    needed: dict[str, int | None] = {}
    for entry in registry.scan(f"spark/{topic}/"):
        query = entry.key.rpartition("/")[2]
        try:
            manifest = Manifest.load(entry)
        except RegistryCorrupt:  # the query's own publisher reports it
            needed[query] = None
            continue
        if not manifest.is_published:
            needed[query] = manifest.batch
    return needed


def _written_at(registry: Registry, topic: str) -> float:
    """When the last manifest of the topic was written, in seconds since 1970; 0 if there is none."""
    last = 0.0
    for entry in registry.scan(manifests_of(topic)):
        with contextlib.suppress(RegistryCorrupt):
            last = max(last, Manifest.load(entry).at)
    return last


class Publisher:
    """Publishes batches to one topic. A query has one driver at a time; a second driver that publishes the same batch
    does no harm."""

    def __init__(self, registry: Registry, topic: TopicLog, staging: Staging) -> None:
        self._registry, self._topic, self._staging = registry, topic, staging
        self.topic_id = topic.id
        self._prefix = manifests_of(topic.id)
        self._registry_id = ""
        self._patience_s = PATIENCE_S
        self._strangers: set[str] = set()
        """Groups in other registries for which a warning was logged."""
        self._unfinished: dict[str, int] = {}
        """By query, the version of the manifest that `_finish_before` last found unpublished and left to its driver."""
        self._given_up: dict[str, int] = {}
        """By query, the version of a manifest that cannot be read or finished and for which an error was logged."""

    def publish(
        self,
        query: str,
        batch: int,
        files: Sequence[str],
        feeds: Sequence[Feed] = (),
        planned: str = "",
        has_state: bool | None = None,
    ) -> None:
        """Make the batch part of the topic, once. All its rows are durable and visible when this returns.

        planned:   a hash of Spark's plan of the batch, which is the same whenever Spark repeats it.
        has_state: whether the query keeps state; None if that is not known.
        Raises BatchRefused, PartitionLost; RegistryUnavailable if the registry could not be reached, OutcomeUnknown if
        it is not known whether the batch was committed."""
        self._patience_s = max([PATIENCE_S, *(feed.lease_s for feed in feeds)])
        ranges, epochs = ranges_of(feeds), epochs_of(feeds)
        ours = Manifest(batch, list(files), ranges, planned=planned, epochs=epochs, has_state=has_state)
        feeds = [feed for feed in feeds if self._is_ours(feed)]
        self._finish_before(query, ours)
        for _ in range(_LOOKS_MAX):
            entry = self._get(self._prefix + query)
            last = None if entry is None else _load(entry)
            step = step_for(query, last, ours)
            if entry is not None and last is not None:
                # If the batch is published, this only removes staged files.
                self._finish_own(query, last, entry.version)
            if step in (Step.STOP, Step.FINISH_THEN_STOP):
                return
            if step is Step.FINISH_THEN_LOOK:
                continue  # finishing has changed the manifest's version, and another driver may have gone on since
            if not files and not any(ours.ranges.values()):
                # The batch has neither input nor output. No manifest is written, because the batch may read more when
                # it is repeated.
                self._staging.clear(self._topic.id, query, batch)
                return
            if not self._staging.make_durable(self._topic.id, query, batch, files):
                if self._get(self._prefix + query) != entry:
                    continue  # another driver of this query has published the batch, and removed the staged files
                raise BatchRefused(f"the staged files of batch {batch} of query {query} are gone")
            ends = self._topic.ends()
            ours = replace(ours, ends=ends, at=time.time())
            version = self._write(query, ours, ABSENT if entry is None else entry.version, feeds)
            if version is not None:
                self._staging.keep_topic(self._topic.id)
                self._finish_own(query, ours, version)
                return
        raise BatchRefused(
            f"query {query}: other drivers have changed its manifest {_LOOKS_MAX} times while this one came with batch "
            f"{batch}. Run one driver for each checkpoint location"
        )

    def finish_others(self) -> None:
        """Finish the manifests of queries that died between their commit and their last append, and remove staged files
        that no manifest names."""
        needed: dict[str, int | None] = {}
        now = time.time()  # before the manifests are read: see `Staging.sweep`
        for entry in self._scan(self._prefix):
            query, manifest = query_of(entry.key), self._load_other(entry)
            if manifest is None:
                needed[query] = None
            elif not manifest.is_published:
                needed[query] = manifest.batch
                self._finish_other(query, manifest, entry.version)
            elif query.startswith(JOB) and now - manifest.at > _JOB_S:
                self.forget(query)  # the job's driver died before it removed its manifest
        self._staging.sweep(self._topic.id, needed, now)

    def _finish_before(self, query: str, ours: Manifest) -> None:
        """Finish the manifests of other queries that have read of the same partitions as this batch: their rows precede
        those of this batch. A manifest that concerns other partitions is left to its own driver first, and is finished
        here if it is still unfinished at the next batch."""
        unfinished = {}
        for entry in self._scan(self._prefix):
            other = query_of(entry.key)
            manifest = None if other == query else self._load_other(entry)
            if manifest is None or manifest.is_published:
                continue
            is_left = self._unfinished.get(other) == entry.version
            if is_left or have_common_partitions(manifest.ranges, ours.ranges):
                self._finish_other(other, manifest, entry.version)
            else:
                unfinished[other] = entry.version
        self._unfinished = unfinished

    def _load_other(self, entry: Entry) -> Manifest | None:
        """None if the manifest is damaged, which is logged once."""
        query = query_of(entry.key)
        try:
            return Manifest.load(entry)
        except RegistryCorrupt as error:
            if self._given_up.get(query) != entry.version:
                self._given_up[query] = entry.version
                _logger.error("the last batch of query %s is left as it is: %s", query, error)
            return None

    def _finish_other(self, query: str, manifest: Manifest, version: int) -> None:
        if self._given_up.get(query) == version:
            return
        try:
            self._finish(query, manifest, version)
        except _UNFINISHABLE as error:  # logged here, and raised to its own query when that comes back
            self._given_up[query] = version
            _logger.error("batch %d of query %s is not finished, and cannot be: %s", manifest.batch, query, error)

    def _finish_own(self, query: str, manifest: Manifest, version: int) -> None:
        try:
            self._finish(query, manifest, version)
        except _UNFINISHABLE as error:
            raise BatchRefused(
                f"batch {manifest.batch} of query {query} cannot be finished: {error}. It may be in the topic "
                f"{self._topic.name} in part, or whole: look at its end. Then start with a new checkpoint location"
            ) from error

    def forget(self, query: str) -> None:
        """Remove the manifest of a job, which has no next batch. A failure is only logged, because the job's rows are
        published."""
        try:
            self._registry.commit(delete=[self._prefix + query])
        except RegistryError as error:
            _logger.warning("the manifest of %s was not removed from the registry: %s", query, error)

    def _is_ours(self, feed: Feed) -> bool:
        self._registry_id = self._registry_id or ride_out(
            lambda: fingerprint(self._registry), self._patience_s, errors=UNREACHABLE
        )
        if feed.registry == self._registry_id:
            return True
        if feed.group in self._strangers:
            return False
        self._strangers.add(feed.group)
        _logger.warning(
            "the group %s is in another registry than the topic %s: its checkpoints follow after each batch instead of "
            "together with it",
            feed.group,
            self._topic.name,
        )
        return False

    # The registry.

    def _get(self, key: str) -> Entry | None:
        return ride_out(lambda: self._registry.get(key), self._patience_s)

    def _scan(self, prefix: str) -> list[Entry]:
        return ride_out(lambda: self._registry.scan(prefix), self._patience_s)

    def _commit(self, expect: Mapping[str, int], put: Mapping[str, bytes]) -> dict[str, int]:
        """Commit, and repeat the commit while its outcome is unknown. If an earlier try took effect, the next one
        raises Conflict."""
        pause, pause_max = _PAUSE_S
        unknown: OutcomeUnknown | None = None
        for _ in range(_TRIES_MAX):
            try:
                return ride_out(lambda: self._registry.commit(expect, put), self._patience_s)
            except OutcomeUnknown as error:
                unknown = error
            except RegistryUnavailable as error:
                if unknown is None:
                    raise
                raise unknown from error  # this try had no effect, but an earlier one may have had, or may still have
            time.sleep(pause)
            pause = min(2 * pause, pause_max)
        assert unknown is not None
        raise unknown

    # The manifest.

    def _write(self, query: str, manifest: Manifest, version: int, feeds: Sequence[Feed]) -> int | None:
        """The version of the manifest as written; None if the registry has a manifest of this batch already."""
        key = self._prefix + query
        parts: dict[str, CheckpointWrite] = {}
        for feed in feeds:
            self._add_checkpoints(feed, parts)
        checkpoints = FencedWrite(list(parts.values()))
        try:
            return self._commit({key: version, **checkpoints.expect}, {key: manifest.dump(), **checkpoints.put})[key]
        except Conflict as conflict:
            entry = self._get(key)
            if entry is not None and _load(entry).batch == manifest.batch:
                return None  # written by a try whose reply was lost, or by another driver
            raise _refusal(query, manifest, conflict, checkpoints) from conflict

    def _add_checkpoints(self, feed: Feed, parts: dict[str, CheckpointWrite]) -> None:
        """Add the checkpoints of what the batch has read. They expect the owner keys as they were when the batch was
        planned.

        parts: the checkpoints so far, by their keys."""
        keys = Keys(feed.group)
        for number, span in feed.spans.items():
            key = keys.checkpoint(feed.topic, number)
            if key in parts:  # two sources of this query have read the partition, one before and one after it was lost
                raise PartitionLost(feed.group, [number], advice=RESTART)
            entry = self._get(key)
            offset = None if entry is None else Checkpoint.load(key, entry.value).offset
            if entry is None or offset != span.start:
                is_done = f"the batch was published before the topic {self._topic.name} was deleted and made again, "
                raise BatchRefused(
                    f"the batch reads {feed.group}'s partition {number} from offset {span.start}, and the group's "
                    f"checkpoint is {offset}: {is_done if offset == span.end else ''}somebody else went on, or the "
                    "group was reset while the batch was on its way. To follow the group, start with a new checkpoint "
                    f"location; to follow Spark, reset the group to offset {span.start}"
                )
            checkpoint = Checkpoint(span.end, time.time(), "spark", span.epoch)
            parts[key] = CheckpointWrite(keys, (feed.topic, number), feed.fences[number], entry.version, checkpoint)

    # The appends.

    def _finish(self, query: str, manifest: Manifest, version: int) -> None:
        """Append what the manifest names, unless it is published, and remove what was staged for it."""
        if not manifest.is_published:
            try:
                self._append(query, manifest)
            except FileNotFoundError:
                self._check_published(query, manifest)
                return
            done = replace(manifest, files=[], is_published=True, ends=[])
            try:
                self._commit({self._prefix + query: version}, {self._prefix + query: done.dump()})
            except Conflict:  # another driver has finished the manifest too, and may have committed the next batch
                self._check_published(query, manifest)
        self._staging.clear(self._topic.id, query, manifest.batch)

    def _check_published(self, query: str, manifest: Manifest) -> None:
        entry = self._get(self._prefix + query)
        now = None if entry is None else _load(entry)
        if now is not None and now.batch == manifest.batch and not now.is_published:
            raise BatchRefused(
                f"the staged files of batch {manifest.batch} of query {query} are gone, and it is not published whole"
            )

    def _append(self, query: str, manifest: Manifest) -> None:
        producer = uuid.uuid5(_NAMESPACE, f"{query}/{self._topic.id}")
        sequences: dict[int, int] = {}
        waiting: dict[int, list[Append]] = {}
        size = 0
        for partition, records in self._staging.chunks(self._topic.id, query, manifest.batch, manifest.files):
            sequence = sequences[partition] = sequences.get(partition, -1) + 1
            origin = Origin(producer, manifest.batch, sequence)
            since = manifest.ends[partition] if manifest.ends else None
            append = Append.encoded(partition, records, origin, since, codec=self._topic.topic.codec)
            waiting.setdefault(partition, []).append(append)
            size += records.nbytes
            if size >= _APPEND_BYTES_MAX or len(waiting[partition]) == _TOGETHER_MAX:
                self._append_all(waiting)
                waiting, size = {}, 0
        self._append_all(waiting)

    def _append_all(self, waiting: Mapping[int, Sequence[Append]]) -> None:
        """Append to all partitions in one call, because they then wait for their syncs at the same time. Raises the
        first error of a batch that is not stored."""
        together = [append for appends in waiting.values() for append in appends]
        for append, outcome in zip(together, self._topic.append(together) if together else [], strict=True):
            if not isinstance(outcome, StoredAt) and not _was_stored(outcome.error, waiting[append.partition]):
                raise outcome.error


def _was_stored(error: Exception, appends: Sequence[Append]) -> bool:
    """Whether the log refuses these batches of one partition because they are stored: another driver that published
    this manifest has stored them, and enough later batches that the log remembers only those."""
    return isinstance(error, UnknownProducer) and error.stored is not None and error.stored >= appends[-1].origin[1:]


def _load(entry: Entry) -> Manifest:
    """The query's own manifest. Raises BatchRefused, with advice, if it is damaged."""
    try:
        return Manifest.load(entry)
    except RegistryCorrupt as error:
        raise BatchRefused(
            f"what the query has published last is not known: {error}. Restore the key from a copy; or look at the end "
            "of the topic, delete the key, and start with a new checkpoint location"
        ) from error


def _refusal(query: str, manifest: Manifest, conflict: Conflict, checkpoints: FencedWrite) -> PxrsError:
    # STALE: somebody has written the checkpoint since this publisher read it.
    lost = [each for each, settled in checkpoints.settle(conflict) if settled.outcome in (Outcome.LOST, Outcome.STALE)]
    if lost:
        group = lost[0].keys.group
        return PartitionLost(group, [e.partition[1] for e in lost if e.keys.group == group], advice=RESTART)
    return BatchRefused(f"query {query}: another driver publishes beside batch {manifest.batch}")
