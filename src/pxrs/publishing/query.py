"""What the batches of a streaming query read.

The streaming engine (Spark) asks two questions, always from one thread:

    latest(start)        `start` is what the engine has finished. Write its checkpoints, then plan the next batch.
    ranges(start, end)   The offsets that the batch between the two reads. For a batch that was planned before a restart
                         this also decides whether it may still be read.

How the query owns partitions, and what happens if the registry or the lease is lost, is in `membership.py`. If
partitions are lost before any task was given the batch, the batch is planned again as after a restart. If tasks are
reading it already, the fence of the sink's commit refuses the batch and the query ends; a restart reads it again.

A partition that a worker has paused because of a message (X14) is never passed over in silence. A query that is alone
in its group ends with PartitionsPaused. In a shared group the query logs a warning and goes on with the other
partitions; if it is to read up to an end (`target_now`), it ends with PartitionsPaused as soon as only paused
partitions are left.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

from pxrs.errors import CheckpointOutOfRange, DataLost, OffsetTrimmed, PartitionLost, PartitionsPaused
from pxrs.events.recording import LOGGED_ONLY, Recorder
from pxrs.group.lane import Lane
from pxrs.group.positions import check_start
from pxrs.group.records import Checkpoint, Home
from pxrs.log.contract import Source
from pxrs.log.numbering import TopicPartition
from pxrs.publishing.feed import Feed
from pxrs.publishing.membership import Membership, QueryOptions
from pxrs.publishing.planning import (
    RESTART,
    Delay,
    Span,
    Spans,
    batch_between,
    first_of,
    is_reached,
    may_replay,
    resume_at,
    share_out,
)
from pxrs.publishing.records import is_any_reached, published_spans
from pxrs.publishing.starting import first_offsets
from pxrs.registry.contract import Registry
from pxrs.wording import paused_advice

_logger = logging.getLogger(__name__)

_FOR_STATE: Final = (
    "the batch is published, but Spark has not recorded it as finished, and reads its rows again to rebuild the "
    "query's state. Start with a new checkpoint location: the state begins empty, and the group goes on where it is"
)
_FOR_STATE_PERHAPS: Final = (
    "the batch is published, but Spark has not recorded it as finished, and whether the query keeps state is not "
    "known: its checkpoint location is no folder of this machine. If it keeps none, start with a new checkpoint "
    "location, and nothing is lost"
)


class Query:
    """A streaming query as a member of its group. Called from one thread."""

    def __init__(
        self,
        source: Source,
        registry: Registry,
        options: QueryOptions,
        home: Callable[[], Home | None] | None = None,
        recorder: Recorder = LOGGED_ONLY,
        place: Sequence[str] = (),
    ) -> None:
        """Join the group. Raises GroupActive if the query must be alone and other members stay for two leases.

        home, recorder: as `GroupMember` takes them: the hub to which the source belongs, and its events.
        place: the options that name the hub on the command line, for messages."""
        self.source, self._place = source, place
        self._registry, self._options = registry, options
        self.targets: dict[TopicPartition, int] | None = None
        """By topic id and partition, the offset up to which the query reads; None if it goes on for ever."""
        self._in_hand: dict[int, tuple[Lane, Span]] = {}
        """By partition, what the last planned batch reads. Emptied when the next batch is planned."""
        self._answer: tuple[Spans, Spans, Spans, dict[int, int]] | None = None
        """The arguments of the last call of `ranges`, and its result."""
        self._idle: tuple[Spans, list[int], int, float] | None = None
        """Set when `latest` finds nothing to read: its argument, the ends of the partitions, `Membership.changes`, and
        the moment when a delayed batch is due. While these stay as they are, there is nothing to read."""
        self._last_chosen = -1
        """The last partition of a batch that could not take all partitions; the next batch begins behind it."""
        self._paused: list[int] = []
        """The paused partitions that the last warning named."""
        self._only = None if options.only is None else _numbers(source, options.only)
        self._starts = first_offsets(source, registry, options)
        self.membership = Membership(source, registry, options, self._start_of, home, recorder)

    def _start_of(self, number: int, first: int) -> int:
        """The offset at which a partition without a checkpoint begins. first: the first offset that retention has left.

        An offset that the user gave is kept even if it is before `first`: the loss is then reported as DataLost, or
        logged."""
        part, partition = self.source.place(number)
        check_start(part, partition, first)
        start = self._starts[number]
        return start.offset if start.is_given else max(first, start.offset)

    # What the streaming engine asks.

    def target_now(self) -> None:
        """Read nothing that comes later than this moment (Trigger.AvailableNow)."""
        self.read_until({topic_partition(self.source, number): end for number, end in enumerate(self.source.ends())})

    def read_until(self, ends: Mapping[TopicPartition, int]) -> None:
        """Read nothing from these offsets on, by topic id and partition, and nothing of other partitions."""
        self.targets = dict(ends)
        self._idle = None

    def latest(self, start: Spans, rows_max: int | None, bytes_max: int | None, delay: Delay | None = None) -> Spans:
        """What the engine will have finished with the next batch; `start` itself if there is nothing to read, or if the
        batch is delayed.

        The engine calls this many times a second while the query is idle. `_is_idle` keeps the cost of such a call
        independent of the number of partitions."""
        if self._is_idle(start):
            return start
        changes = self.membership.changes
        self.finish(start)
        for lane, _ in self._in_hand.values():
            lane.position = lane.done  # the engine never asks again for what it has not finished by now
        self._in_hand.clear()
        self._answer = None
        until = time.monotonic() + self.membership.settle_s
        while True:
            lanes, counts, ends = self._chosen(start, rows_max, bytes_max, delay, until)
            # The sink's commit expects each checkpoint at the offset where the batch begins, also if messages were lost
            # before it.
            self.membership.commit()
            if self.membership.is_leased:
                break
            if time.monotonic() >= until:  # leases were granted and lost again until the time was up
                raise self.membership.without_lease()
        planned = {}
        for number, count in counts.items():
            lane = lanes[number]
            span = Span(lane.epoch, lane.position, lane.position + count)
            if count > 0 and self._hand_out(lane, span):
                planned[number] = span
        if self._paused and not planned and self.targets is not None:
            raise self._held_up(self._paused)
        self._idle = None if counts else (start, ends, changes, math.inf if delay is None else delay.due)
        return {**start, **planned}

    def ranges(self, start: Mapping[int, Span], end: Mapping[int, Span]) -> tuple[Spans, dict[int, int]]:
        """The offsets that the batch between these two reads, and the version of the owner key of each of its
        partitions.

        The engine asks once for each place at which the stream occurs in its plan, for example twice in a union with
        itself. All calls get the same answer, whatever is lost meanwhile: the sink's commit must check exactly what
        every task has read."""
        if self._answer is None or self._answer[:2] != (start, end):
            self._answer = dict(start), dict(end), *self._ranges(start, end)
        return self._answer[2:]

    def feeds(self, spans: Spans, fences: dict[int, int]) -> list[Feed]:
        """The feeds of a batch that reads what `ranges` has returned, for the sink: one for each topic that the batch
        reads. A batch that reads nothing has one feed without spans, because the sink needs the name of the group."""
        member, names = self.membership, {part.id: part.name for part in self.source.parts}
        found: dict[str, tuple[Spans, dict[int, int]]] = {}
        for number, span in spans.items():
            part, partition = self.source.place(number)
            of_part = found.setdefault(part.id, ({}, {}))
            of_part[0][partition], of_part[1][partition] = span, fences[number]
        return [
            Feed(
                self._options.group,
                topic,
                member.incarnation or "",
                member.registry_id,
                *of_part,
                self._options.is_shared,
                member.lease_s,
                names[topic],
            )
            for topic, of_part in (found or {self.source.parts[0].id: ({}, {})}).items()
        ]

    def finish(self, finished: Mapping[int, Span]) -> None:
        """Write the checkpoints of what the engine has committed. Partitions that were lost meanwhile are left out."""
        self.membership.member.check()
        for number, (lane, span) in self._in_hand.items():
            if finished.get(number) == span:
                lane.done = max(lane.done, span.end)
        self.membership.commit()
        self.membership.release_drained()

    def close(self) -> None:
        """Write the last checkpoints, release every partition, and leave the group."""
        self.membership.close()

    # The next batch.

    def _is_idle(self, start: Spans) -> bool:
        """Whether nothing has changed since `latest` last found nothing to read."""
        if self._idle is None or self._in_hand or not self.membership.is_leased:
            return False
        self.membership.member.check()
        finished, ends, changes, due = self._idle
        if self._registry.clock.now() >= due:
            return False
        return changes == self.membership.changes and finished == start and ends == self.source.ends()

    def _chosen(
        self,
        start: Mapping[int, Span],
        rows_max: int | None,
        bytes_max: int | None,
        delay: Delay | None,
        until: float,
    ) -> tuple[dict[int, Lane], dict[int, int], list[int]]:
        """The lanes, how many rows of each lane the next batch reads, and the ends of the partitions."""
        placed = self._placed(start, until)
        if self._only is not None:
            placed = {number: lane for number, lane in placed.items() if number in self._only}
        self._look_at_paused(placed)
        lanes = {number: lane for number, lane in placed.items() if not lane.is_halted}
        # Read the ends after the lanes are placed: a previous owner may have read beyond an end that was read before.
        ends = self.source.ends()
        available = {number: self._available(lane, ends[number]) for number, lane in lanes.items()}
        available = {number: count for number, count in available.items() if count > 0}
        # With `targets` (AvailableNow) a batch is not delayed, because no further rows will be read.
        if delay is not None and self.targets is None:
            available = available if delay.is_due(sum(available.values()), self._registry.clock.now()) else {}
        # The sink's commit is one commit. It names two keys for each partition, and the manifest's key. Each chosen
        # partition has at least one row.
        count_max = (self._registry.limits.commit_keys_max - 1) // 2
        chosen = first_of(available, self._last_chosen, count_max if rows_max is None else min(count_max, rows_max))
        if chosen:
            self._last_chosen = chosen[-1] if len(chosen) < len(available) else -1
        counts = {number: available[number] for number in chosen}
        if rows_max is not None:
            counts = share_out(counts, rows_max)
        if bytes_max is not None:
            counts = self._within_bytes(lanes, counts, bytes_max)
        return lanes, counts, ends

    def _placed(self, finished: Mapping[int, Span], until: float) -> dict[int, Lane]:
        """The lanes. New ones are first set to the offset at which they go on, given what the engine has finished and
        the group's checkpoints.

        Waits for a lease: an answer that there is nothing to read would end a query with Trigger.AvailableNow."""
        while True:
            self.membership.settle(until)
            for lane, checkpoint in self.membership.take_unplaced():
                place = place_name(self.source, lane.partition)
                lane.seek(resume_at(self._finished(lane, finished), checkpoint, self._options.is_shared, place))
            self.membership.commit()
            if (lanes := self.membership.placed_lanes()) is not None:
                return lanes

    def _finished(self, lane: Lane, spans: Mapping[int, Span]) -> Span | None:
        """What the engine has finished of a partition, None if only the group's checkpoint counts.

        In a shared group only the checkpoint counts. A batch may have been planned with a range that it could not read,
        because the partition had moved: the engine counts this range as finished although nobody has read it."""
        return None if self._options.is_shared else spans.get(lane.partition)

    def _look_at_paused(self, lanes: Mapping[int, Lane]) -> None:
        """Warn of partitions that are paused because a worker could not handle a message. Raises PartitionsPaused if
        the query is alone in its group."""
        paused = [number for number, lane in lanes.items() if lane.is_paused and not lane.is_stopping]
        ends = {number: self._within_target(number, found.end) for number, found in self.source.bounds(paused).items()}
        before, self._paused = self._paused, sorted(n for n in paused if lanes[n].position < ends[n])
        if not self._paused:
            return
        error = self._held_up(self._paused)
        if not self._options.is_shared:
            raise error
        if self._paused != before:
            _logger.warning("%s", error)

    def _held_up(self, paused: Sequence[int]) -> PartitionsPaused:
        group, places = self._options.group, [self.source.place(number) for number in paused]
        advice = paused_advice(group, [(part.name, number) for part, number in places], self._place)
        return PartitionsPaused(group, self.source.named(paused), advice)

    def _available(self, lane: Lane, end: int) -> int:
        """How many offsets of a lane can be read. Raises DataLost if retention has removed some of them."""
        number = lane.partition
        if lane.position > end:
            raise CheckpointOutOfRange(
                f"group {self._options.group} is at offset {lane.position} of {place_name(self.source, number)}, which "
                f"ends at {end}; is this the same log? Reset the group if it is"
            )
        end = self._within_target(number, end)
        if end <= lane.position:
            return 0
        first = self.source.start(number)
        if lane.position < first:
            lost = DataLost(place_name(self.source, number), lane.position, first)
            if self._options.fails_on_loss:
                raise lost
            _logger.warning("%s", lost)
            lane.seek(first)
        return end - lane.position

    def _within_target(self, number: int, end: int) -> int:
        """The offset up to which a partition with this end is read: `targets` limits it."""
        if self.targets is None:
            return end
        return min(end, self.targets.get(topic_partition(self.source, number), 0))

    def _within_bytes(self, lanes: Mapping[int, Lane], counts: Mapping[int, int], bytes_max: int) -> dict[int, int]:
        """As many rows of each partition as fit into an equal share of the bytes; at least one stored batch of one
        partition."""
        share = max(1, bytes_max // max(1, len(counts)))
        result = {}
        for number, count in counts.items():
            lane, batches = lanes[number], None
            while count > 0 and batches is None:
                try:
                    batches = self.source.read(number, lane.position, share)
                except OffsetTrimmed:  # retention has removed messages since `_available` looked
                    count = min(count, self._available(lane, self.source.end(number)))
            result[number] = min(count, batches[-1].next_offset - lane.position) if batches else 0
        return result

    def _hand_out(self, lane: Lane, span: Span) -> bool:
        """Add this range to the batch. False if the partition is being released or was lost."""
        # Write `position`, then read `is_halted`. The member's thread sets `is_halted`, then reads `position`, so at
        # least one of the two sees the other's write.
        lane.position = span.end
        if lane.is_halted or lane.is_lost:
            lane.position = lane.done
            return False
        self._in_hand[lane.partition] = lane, span
        return True

    # A batch that was planned before.

    def _ranges(self, start: Mapping[int, Span], end: Mapping[int, Span]) -> tuple[Spans, dict[int, int]]:
        planned = spans = batch_between(start, end)
        done: set[int] = set()
        if not self.membership.is_leased:
            self.membership.settle(time.monotonic() + self.membership.settle_s)
        is_planned = all(number in self._in_hand and self._in_hand[number][1] == span for number, span in spans.items())
        # In a shared group, a partition that was lost is left out of the batch; its next owner reads it. A query that
        # is alone claims it again: no task has been given anything of this batch yet, so it is as after a restart.
        if not is_planned or not (self._options.is_shared or all(map(self._is_in_hand, spans))):
            spans, done = self._replayed(start, spans)
        held = {number: self.membership.holding(self._in_hand[number][0]) for number in spans}
        fences = {number: found[1] for number, found in held.items() if found is not None}
        missing = sorted(planned.keys() - fences.keys() - done)
        if missing and not self._options.is_shared:
            # The engine would count the batch as finished with all its ranges, and never read the missing ones.
            lanes = self.membership.lanes
            if paused := [number for number in missing if number in lanes and lanes[number].is_paused]:
                raise self._held_up(paused)
            raise PartitionLost(self._options.group, self.source.named(missing), advice=RESTART)
        return {number: spans[number] for number in fences}, fences

    def _is_in_hand(self, number: int) -> bool:
        """Whether the planned batch reads this partition, and the partition is still owned under the same claim."""
        return number in self._in_hand and self.membership.holding(self._in_hand[number][0]) is not None

    def _replayed(self, start: Mapping[int, Span], spans: Spans) -> tuple[Spans, set[int]]:
        """The offsets that may be read of a batch that was planned before a restart, or before partitions were lost;
        and the partitions of which nothing need be read, because the batch is published."""
        kept = [] if self._options.is_shared else [number for number in spans if self._is_in_hand(number)]
        self._in_hand = {number: self._in_hand[number] for number in kept}
        self.membership.settle(time.monotonic() + self.membership.settle_s)
        if self._options.is_shared:
            ends = {topic_partition(self.source, number): span.end for number, span in spans.items()}
            if self.membership.ride_out(lambda: is_any_reached(self._registry, self._options.group, ends)):
                # The sink may have published the batch with some of these ranges. The others are then not part of the
                # batch: the next batch reads them, from the group's checkpoints on.
                spans = {}
        unplaced = self.membership.take_unplaced()
        published = self._published(unplaced, spans)
        allowed: list[tuple[Lane, Span]] = []
        done: set[int] = set()
        for lane, checkpoint in unplaced:
            number = lane.partition
            span, finished, place = spans.get(number), self._finished(lane, start), place_name(self.source, number)
            if span is None:
                lane.seek(resume_at(finished, checkpoint, self._options.is_shared, place))
            elif may_replay(span, finished, checkpoint, self._options.is_shared, place):
                lane.seek(max(span.start, checkpoint.offset))
                if published.get(number, True) is False:
                    done.add(number)
                    continue
                if number in published and self._options.fails_on_loss:
                    self._check_kept(number, span, published[number])
                allowed.append((lane, span))
        self.membership.commit()  # the sink's commit expects each checkpoint at the offset where the batch begins
        for lane, span in allowed:
            self._hand_out(lane, span)
        return {number: span for number, (_, span) in self._in_hand.items()}, done

    def _published(self, unplaced: Sequence[tuple[Lane, Checkpoint]], spans: Spans) -> dict[int, bool | None]:
        """The partitions whose part of the batch the sink has published, and whether the query keeps state.

        Without state, nothing is read of them: the sink finds the batch in its manifest and takes nothing more of it.
        With state, the engine needs the rows to rebuild the state of this batch."""
        reached = {
            lane.partition: spans[lane.partition]
            for lane, checkpoint in unplaced
            if lane.partition in spans and is_reached(spans[lane.partition], checkpoint)
        }
        if not reached or self._options.is_shared:
            return {}
        places = {number: topic_partition(self.source, number) for number in reached}
        spans_by_place = {places[number]: span for number, span in reached.items()}
        group = self._options.group
        found = self.membership.ride_out(lambda: published_spans(self._registry, group, spans_by_place))
        return {number: found[place] for number, place in places.items() if place in found}

    def _check_kept(self, number: int, span: Span, has_state: bool | None) -> None:
        """Raise DataLost if retention has removed rows of a published batch that are to be read again for its state."""
        first = self.source.start(number)
        if span.start < first:
            advice = _FOR_STATE if has_state else _FOR_STATE_PERHAPS
            raise DataLost(place_name(self.source, number), span.start, min(first, span.end), advice)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _numbers(source: Source, only: Mapping[str, Collection[int]]) -> frozenset[int]:
    places = map(source.place, range(source.partitions))
    return frozenset(number for number, (part, partition) in enumerate(places) if partition in only[part.name])


def topic_partition(source: Source, number: int) -> TopicPartition:
    """The topic id and the partition's number in that topic, as registry keys and manifests have them."""
    part, partition = source.place(number)
    return part.id, partition


def place_name(source: Source, number: int) -> str:
    """The partition as `<topic name>/<number>`, for errors and log lines."""
    part, partition = source.place(number)
    return f"{part.name}/{partition}"
