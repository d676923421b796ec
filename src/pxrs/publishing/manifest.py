"""Publishing a batch: one commit makes it part of its topics, then its staged rows are appended (K1 to K3).

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

If a query never comes back, its manifest is finished by the next query that writes to one of its topics. Before a batch
is published, the manifests of other queries that have read of the same partitions are finished, so that what follows in
a partition after a hand-over is not published before what precedes it. A manifest that cannot be read or finished stops
only its own query. Readers may see a part of a batch for a moment: the pieces are appended one after the other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from pxrs.errors import (
    BatchRefused,
    CommitTooLarge,
    Conflict,
    InvalidRecord,
    LogError,
    PartitionLost,
    RegistryCorrupt,
    RegistryError,
    SequenceGap,
    TopicDeleted,
    UnknownProducer,
    ValueTooLarge,
)
from pxrs.group.checkpoints import CheckpointWrite, FencedWrite
from pxrs.group.records import Checkpoint, Keys
from pxrs.log.contract import TopicLog
from pxrs.publishing.feed import Feed
from pxrs.publishing.planning import RESTART
from pxrs.publishing.records import (
    ROUTED,
    Manifest,
    Part,
    Step,
    epochs_of,
    has_same_plan,
    have_common_partitions,
    is_stripped,
    manifests_of,
    parts_of,
    query_of,
    ranges_of,
    routed_prefix,
    step_for,
    writer_of,
)
from pxrs.publishing.refusals import load_own, refusal
from pxrs.publishing.staging.contract import Staging
from pxrs.publishing.staging.files import query_of_writer
from pxrs.registry.contract import ABSENT, Entry, Registry
from pxrs.registry.identity import fingerprint
from pxrs.registry.outage import UNREACHABLE, PatientCalls, ride_out

_logger = logging.getLogger(__name__)

JOB: Final = "job-"
"""Prefix of the ids of writes that are no streams (`df.write`), which have one batch each."""
_UNFINISHABLE: Final = (BatchRefused, InvalidRecord, SequenceGap, UnknownProducer)
"""Errors that concern one manifest. All others concern the topic, its disk or the registry."""
_JOB_S: Final = 86_400.0
"""How long the manifest of a job is kept at least: its commit may be repeated, and must find the manifest."""
PATIENCE_S: Final = 15.0
"""How long a registry that cannot be reached is called again; if the query's lease is longer, as long as that."""
_LOOKS_MAX: Final = 100
"""How often `publish` looks at the manifest again, because another driver of the same query has changed it, or because
this driver has finished the batch that it found."""

Find = Callable[[str, str], TopicLog | None]
"""Given a topic's id and its name (empty if that is not known), opens the topic; None if it was deleted."""


class Publisher:
    """Publishes batches to one topic, or to the topics that their rows name. A query should have one driver at a time.
    If a second driver publishes the same batch, the batch is still stored once."""

    def __init__(
        self, registry: Registry, topic: TopicLog | None, staging: Staging, find: Find | None = None, hub: str = ""
    ) -> None:
        """
        topic: the topic of all batches, for `publish`; None for `publish_routed`.
        find:  opens other topics. Without it, the manifests of routed batches are left to other publishers.
        hub:   the id of the hub that has the topics. Other hubs may share the registry.
        """
        self._registry, self._topic, self._staging, self._find = registry, topic, staging, find
        self._calls = PatientCalls(registry, PATIENCE_S)
        self.topic_id = "" if topic is None else topic.id
        self._prefix = routed_prefix(hub) if topic is None else manifests_of(topic.id)
        self._registry_id = ""
        self._strangers: set[str] = set()
        """Groups in other registries for which a warning was logged."""
        self._unfinished: dict[str, int] = {}
        """By key, the version of the manifest that `_finish_before` last found unpublished and left to its driver."""
        self._own = {self.topic_id}
        """The ids of the topics that this publisher is writing to now."""
        self._given_up: dict[str, int] = {}
        """By key, the version of a manifest that cannot be read or finished and for which an error was logged."""

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
        ours = Manifest(batch, list(files), ranges_of(feeds), planned=planned, has_state=has_state)
        self._publish(query, replace(ours, epochs=epochs_of(feeds)), feeds)

    def publish_routed(
        self,
        query: str,
        batch: int,
        parts: Sequence[Part],
        feeds: Sequence[Feed] = (),
        planned: str = "",
        has_state: bool | None = None,
    ) -> None:
        """Make the batch part of several topics, in one commit. Other arguments and errors: see `publish`.

        parts: what was staged for each topic that the batch has rows for, without the ends."""
        ours = Manifest(batch, [], ranges_of(feeds), planned=planned, has_state=has_state, parts=list(parts))
        self._publish(query, replace(ours, epochs=epochs_of(feeds)), feeds)

    def _publish(self, query: str, ours: Manifest, feeds: Sequence[Feed]) -> None:
        self._calls.patience_s = max([PATIENCE_S, *(feed.lease_s for feed in feeds)])
        key = self._prefix + query
        writer, staged = writer_of(key), parts_of(key, ours)
        self._own = {part.topic for part in staged}
        feeds = [feed for feed in feeds if self._is_ours(feed)]
        if self._finish_before(key, ours):
            self._clear(writer, ours.batch, staged)
            return
        for _ in range(_LOOKS_MAX):
            entry = self._calls.get(key)
            last = None if entry is None else load_own(entry)
            step = step_for(query, last, ours)
            if entry is not None and last is not None:
                # If the batch is published, this only removes staged files.
                self._finish_own(key, last, entry.version)
            if step in (Step.STOP, Step.FINISH_THEN_STOP):
                self._clear(writer, ours.batch, staged)  # a repeated batch may have rows for other topics
                return
            if step is Step.FINISH_THEN_LOOK:
                continue  # finishing has changed the manifest's version, and another driver may have gone on since
            if not any(part.files for part in staged) and not any(ours.ranges.values()):
                # The batch has neither input nor output. No manifest is written, because the batch may read more when
                # it is repeated.
                self._clear(writer, ours.batch, staged)
                return
            if not all(self._staging.make_durable(part.topic, writer, ours.batch, part.files) for part in staged):
                if self._calls.get(key) != entry:
                    continue  # another driver of this query has published the batch, and removed the staged files
                raise BatchRefused(f"the staged files of batch {ours.batch} of query {query} are gone")
            ours = replace(ours.with_ends({part.topic: self._ends(part) for part in staged}), at=time.time())
            version = self._write(key, ours, ABSENT if entry is None else entry.version, feeds)
            if version is not None:
                for part in staged:
                    self._staging.keep_topic(part.topic)
                self._finish_own(key, ours, version)
                return
        raise BatchRefused(
            f"other drivers have changed the manifest of query {query} {_LOOKS_MAX} times while this one was "
            f"publishing batch {ours.batch}. Run one driver for each checkpoint location"
        )

    def finish_others(self, topic: str = "") -> None:
        """Finish the manifests of queries that died between their commit and their last append, and remove staged files
        that no manifest names.

        topic: the id of the topic whose manifests are finished and whose folder is swept; by default the publisher's
        own topic."""
        topic = topic or self.topic_id
        self._own = {topic}
        needed: dict[str, int | None] = {}
        now = time.time()  # before the manifests are read: see `Staging.sweep`
        for entry in self._manifests_of(topic):
            writer, manifest = writer_of(entry.key), self._load_other(entry)
            if manifest is None:
                needed[writer] = None
            elif not self._concerns_own(entry.key, manifest):
                continue
            elif not manifest.is_published:
                needed[writer] = manifest.batch
                self._finish_other(entry.key, manifest, entry.version)
            elif query_of(entry.key).startswith(JOB) and now - manifest.at > _JOB_S:
                self._forget(entry.key)  # the job's driver died before it removed its manifest
        self._staging.sweep(topic, needed, now)

    def _finish_before(self, key: str, ours: Manifest) -> bool:
        """Finish the manifests of other queries that have read of the same partitions as this batch: their rows precede
        those of this batch. A manifest that concerns other partitions is left to its own driver at first, and is
        finished here if it is still unfinished at the next batch.

        If the sink of a query was changed from the option `topic` to a column, or back, the query has a second
        manifest under another key. Returns whether that manifest names this batch: then the batch is committed
        already, and Spark repeats it for the new sink."""
        unfinished, is_repeated = {}, False
        for entry in self._manifests_of(*self._own):
            manifest = None if entry.key == key else self._load_other(entry)
            if manifest is None or not self._concerns_own(entry.key, manifest):
                continue
            is_own = query_of(entry.key) == query_of(key)
            is_repeated = is_repeated or (is_own and has_same_plan(manifest, ours))
            if manifest.is_published:
                continue
            is_left = self._unfinished.get(entry.key) == entry.version
            if is_own:
                self._finish_own(entry.key, manifest, entry.version)
            elif is_left or have_common_partitions(manifest.ranges, ours.ranges):
                self._finish_other(entry.key, manifest, entry.version)
            else:
                unfinished[entry.key] = entry.version
        self._unfinished = unfinished
        return is_repeated

    def _manifests_of(self, *topics: str) -> list[Entry]:
        """The manifests of the queries that write to these topics, and of all queries whose rows name their topics."""
        found = [entry for topic in topics for entry in self._calls.scan(manifests_of(topic))]
        return found if self._find is None else [*found, *self._calls.scan(ROUTED)]

    def _concerns_own(self, key: str, manifest: Manifest) -> bool:
        return any(part.topic in self._own for part in parts_of(key, manifest))

    def _load_other(self, entry: Entry) -> Manifest | None:
        """None if the manifest is damaged, which is logged once."""
        try:
            return Manifest.load(entry)
        except RegistryCorrupt as error:
            if self._given_up.get(entry.key) != entry.version:
                self._given_up[entry.key] = entry.version
                _logger.error("the last batch of query %s is not finished: %s", query_of(entry.key), error)
            return None

    def _finish_other(self, key: str, manifest: Manifest, version: int) -> None:
        if self._given_up.get(key) == version:
            return
        try:
            self._finish(key, manifest, version)
        except _UNFINISHABLE as error:  # logged here, and raised to its own query when that comes back
            self._given_up[key] = version
            what = "batch %d of query %s is not finished and cannot be finished: %s"
            _logger.error(what, manifest.batch, query_of(key), error)

    def _finish_own(self, key: str, manifest: Manifest, version: int) -> None:
        # The topics of the manifest count as own, even if the repeated batch has no rows for some of them: `_append`
        # raises the errors of own topics unchanged.
        self._own = self._own | {part.topic for part in parts_of(key, manifest)}
        try:
            self._finish(key, manifest, version)
        except _UNFINISHABLE as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno is not None:
                raise error.__cause__ from error  # such as too many open files: the batch can be finished later
            raise BatchRefused(
                f"batch {manifest.batch} of query {query_of(key)} cannot be finished: {error}. It may be stored in "
                f"{self._topics_named(key, manifest)} in part or completely: look at the end of the topic, then start "
                "with a new checkpoint location"
            ) from error

    def _topics_named(self, key: str, manifest: Manifest) -> str:
        """The names of a manifest's topics, for errors."""
        own = "" if self._topic is None else self._topic.name
        names = [part.name or own or part.topic for part in parts_of(key, manifest)]
        return f"the topic{'' if len(names) == 1 else 's'} {', '.join(names)}"

    def forget(self, query: str) -> None:
        """Remove the manifest of a job, which has no next batch. A failure is only logged, because the job's rows are
        published."""
        self._forget(key := self._prefix + query)
        for topic in self._own:
            self._staging.forget_query(topic, writer_of(key))

    def _forget(self, key: str) -> None:
        try:
            self._registry.commit(delete=[key])
        except RegistryError as error:
            _logger.warning("the manifest of %s was not removed from the registry: %s", query_of(key), error)

    def _is_ours(self, feed: Feed) -> bool:
        self._registry_id = self._registry_id or ride_out(
            lambda: fingerprint(self._registry), self._calls.patience_s, errors=UNREACHABLE
        )
        if feed.registry == self._registry_id:
            return True
        if feed.group in self._strangers:
            return False
        self._strangers.add(feed.group)
        _logger.warning(
            "the group %s is in another registry than the topics that are written: its checkpoints are committed after "
            "each batch, not together with it",
            feed.group,
        )
        return False

    # The manifest.

    def _write(self, key: str, manifest: Manifest, version: int, feeds: Sequence[Feed]) -> int | None:
        """Commit the manifest and the checkpoints. Returns the new version of the manifest's key; None if the key has
        changed meanwhile, so that the caller must read the manifest again."""
        parts: dict[str, CheckpointWrite] = {}
        for feed in feeds:
            self._add_checkpoints(feed, parts)
        checkpoints = FencedWrite(list(parts.values()))
        try:
            expect, put = {key: version, **checkpoints.expect}, {key: manifest.dump(), **checkpoints.put}
            return self._calls.commit(expect, put)[key]
        except Conflict as conflict:
            entry = self._calls.get(key)
            if entry is not None and load_own(entry).batch == manifest.batch:
                return None  # written by a try whose reply was lost, or by another driver
            if entry is not None and key.startswith(ROUTED) and conflict.keys == (key,):
                return None  # the deletion of a topic has changed the manifest of the last batch (`forget_topic`)
            names = {feed.topic: feed.name for feed in feeds}
            raise refusal(query_of(key), manifest, conflict, checkpoints, names) from conflict
        except (CommitTooLarge, ValueTooLarge) as error:
            raise BatchRefused(
                f"batch {manifest.batch} of query {query_of(key)} does not fit into one commit of this registry: "
                f"{error}. None of it was written. Read fewer partitions in one batch, or write it in fewer tasks "
                "(coalesce) and to fewer topics; or use a registry with larger limits"
            ) from error

    def _add_checkpoints(self, feed: Feed, parts: dict[str, CheckpointWrite]) -> None:
        """Add the checkpoints of what the batch has read. They expect the owner keys as they were when the batch was
        planned.

        parts: the checkpoints so far, by their keys."""
        keys = Keys(feed.group)
        for number, span in feed.spans.items():
            key = keys.checkpoint(feed.topic, number)
            if key in parts:  # two sources of this query have read the partition, one before and one after it was lost
                raise PartitionLost(feed.group, [number], advice=RESTART)
            entry = self._calls.get(key)
            offset = None if entry is None else Checkpoint.load(key, entry.value).offset
            if entry is None or offset != span.start:
                is_done = "the batch was published before its topic was deleted and created again, "
                raise BatchRefused(
                    f"the batch reads {feed.group}'s partition {feed.name}/{number} from offset {span.start}, but the "
                    f"group's checkpoint is {offset}: {is_done if offset == span.end else ''}another consumer moved "
                    "it, or the group was reset while the batch was running. To follow the group, start with a new "
                    f"checkpoint location; to follow Spark, reset the group to offset {span.start}"
                )
            checkpoint = Checkpoint(span.end, time.time(), "spark", span.epoch)
            parts[key] = CheckpointWrite(keys, (feed.topic, number), feed.fences[number], entry.version, checkpoint)

    # The appends.

    def _finish(self, key: str, manifest: Manifest, version: int) -> None:
        """Append what the manifest names, unless it is published, and remove what was staged for it."""
        if not manifest.is_published:
            try:
                self._append(key, manifest)
            except FileNotFoundError:
                self._check_published(key, manifest)
                return
            self._mark_published(key, manifest, version)
        self._clear(writer_of(key), manifest.batch, parts_of(key, manifest))

    def _mark_published(self, key: str, manifest: Manifest, version: int) -> None:
        while True:
            try:
                self._calls.commit({key: version}, {key: manifest.as_published().dump()})
                return
            except Conflict:
                entry = self._calls.get(key)
                now = None if entry is None else load_own(entry)
                if entry is None or now is None or not is_stripped(now, manifest):
                    # Another driver has finished the manifest too, and may have committed the next batch.
                    self._check_published(key, manifest)
                    return
                manifest, version = now, entry.version

    def _clear(self, writer: str, batch: int, parts: Sequence[Part]) -> None:
        for part in parts:
            self._staging.clear(part.topic, writer, batch)

    def _check_published(self, key: str, manifest: Manifest) -> None:
        entry = self._calls.get(key)
        now = None if entry is None else load_own(entry)
        if now is not None and now.batch == manifest.batch and not now.is_published:
            raise BatchRefused(
                f"the staged files of batch {manifest.batch} of query {query_of(key)} are gone, and only a part of it "
                "is published"
            )

    def _append(self, key: str, manifest: Manifest) -> None:
        """Append the parts of a manifest, those for this publisher's own topics first: an error of another topic must
        not stop this publisher."""
        for part in sorted(parts_of(key, manifest), key=lambda part: part.topic not in self._own):
            try:
                self._append_part(writer_of(key), manifest.batch, part)
            except (LogError, OSError) as error:
                if part.topic in self._own or isinstance(error, (FileNotFoundError, *_UNFINISHABLE)):
                    raise
                raise BatchRefused(f"the topic {part.name}: {error}") from error

    def _append_part(self, writer: str, batch: int, part: Part) -> None:
        log = self._log_of(part)
        try:
            if log is not None:
                self._staging.publish(log, writer, batch, part.files, part.ends)
                return
        except (FileNotFoundError, TopicDeleted):
            if self._log_of(part) is not None:
                raise
        what = "the rows of batch %d of query %s for the topic %s are dropped: the topic was deleted"
        _logger.warning(what, batch, query_of_writer(writer), part.name)

    def _log_of(self, part: Part) -> TopicLog | None:
        """The log of the part's topic; None if the topic was deleted."""
        if self._topic is not None and part.topic == self._topic.id:
            return self._topic
        assert self._find is not None, "without it, this publisher does not look at the manifests of other topics"
        return self._find(part.topic, part.name)

    def _ends(self, part: Part) -> list[int]:
        log = self._log_of(part)
        if log is None:
            raise BatchRefused(f"the topic {part.name} was deleted while rows for it were staged. Nothing was written")
        return log.ends()
