"""A streaming query as a member of its group: the part that lives in the driver's Python process. No Spark in here.

The query owns partitions like any consumer: a lane for each, whose `position` is the end of what Spark has been given
and whose `done` is the end of what Spark has committed. So everything a member does works as it does for others: its
thread renews the lease, writes the fenced checkpoints, and releases a partition that is to move as soon as the batch
that reads it is over.

    latest(start)        start is what Spark has finished: it is done. Then plan the next batch.
    ranges(start, end)   what the batch reads; if it is one of before a restart, whether it may still be read.

Alone in its group, the query waits until it has every partition before it plans anything, and refuses company (K4).
With a shared group it takes what it is given; what moves away is left out of the next batch.

On failure: a registry that cannot be reached is asked again for as long as the lease lives. If the lease ends, the
member takes another one and claims the partitions again; a batch that no task has been given yet is then read as after
a restart. What tasks are reading by then is refused by the sink's fence, and ends the query: a restart reads it again.

A partition that a worker has paused (X14) is never passed over in silence: alone, the query ends with PartitionsPaused;
shared, it warns and goes on with the others, and ends so if it was to read up to an end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Final, Self, TypeVar

from pxrs.errors import (
    CheckpointOutOfRange,
    DataLost,
    GroupActive,
    OffsetTrimmed,
    PartitionLost,
    PartitionsPaused,
    RegistryUnavailable,
)
from pxrs.group.lane import Lane
from pxrs.group.member import HANDOVER_TIMEOUT_DEFAULT, LEASE_TTL_DEFAULT, GroupMember, Timings
from pxrs.group.positions import check_start
from pxrs.group.records import Checkpoint, partition_of
from pxrs.hub import Hub
from pxrs.log.contract import Source
from pxrs.publishing.manifest import RESTART, published_spans
from pxrs.publishing.outage import UNREACHABLE, ride_out, with_advice
from pxrs.publishing.planning import (
    Span,
    Spans,
    batch_between,
    first_of,
    is_reached,
    may_replay,
    resolve_within,
    resume_at,
    share_out,
)
from pxrs.registry.identity import fingerprint
from pxrs.spark.names import topic_to_stream
from pxrs.spark.options import Offsets, ReadOptions
from pxrs.wording import counted

_logger = logging.getLogger(__name__)
T = TypeVar("T")

SETTLE_S_MAX: Final = 30.0
"""How long, beyond a lease and a hand-over, a query waits for its partitions."""
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
    """The member, and what it has planned. Spark calls it from one thread."""

    def __init__(self, hub: Hub, options: ReadOptions) -> None:
        """Join the group. Raises GroupActive if the query must be alone and is not, when the others had time to go."""
        assert options.group is not None
        self.source: Source = topic_to_stream(hub, options.where.topic).log
        self._options = options
        hub.join_registry()
        self._registry, self._home = hub.registry, hub.join_registry
        self._changed = threading.Condition()
        self._lanes: dict[int, Lane] = {}
        self._fresh: dict[int, Lane] = {}
        """Owned, and not yet set to where Spark left them."""
        self._targets: dict[int, int] | None = None
        self._in_hand: dict[int, tuple[Lane, Span]] = {}
        """What Spark was given last."""
        self._answer: tuple[Spans, Spans, Spans, dict[int, int]] | None = None
        """What `ranges` was asked last, and said."""
        self._idle: tuple[Spans, list[int], int] | None = None
        """Of the last time that `latest` found nothing to read: what Spark had finished, the ends of the partitions,
        and `_changes`. As long as these are the same, there is nothing to read."""
        self._changes = 0
        """How often the member has told of a change of its lanes or its group."""
        self._turn = -1
        self._paused: list[int] = []
        """The partitions of which was told last that they are paused."""
        self._starts = start_offsets(self.source, options)
        timings = Timings(
            lease_ttl=options.lease_ttl or LEASE_TTL_DEFAULT,
            handover_timeout=options.handover_timeout or HANDOVER_TIMEOUT_DEFAULT,
            progress_timeout=None,
        )
        self.lease_s = timings.lease_ttl
        """How long the lease lives without a renewal."""
        self._registry_id = ""
        self._settle_s = timings.lease_ttl + timings.handover_timeout + SETTLE_S_MAX
        self._member = self._join(options.group, timings)

    def _join(self, group: str, timings: Timings) -> GroupMember:
        """One that died may be listed for as long as its lease would have lived."""
        until = time.monotonic() + 2 * timings.lease_ttl
        while True:
            member = GroupMember(
                self._registry,
                group,
                self.source,
                self,
                start_of=self._start_of,
                name=None,
                timings=timings,
                assignor=self._options.assignor,
                is_alone=not self._options.is_shared,
                home=self._home,
            )
            with self._registry.watch(member.keys.members) as watch:
                try:
                    member.start()
                    return member
                except GroupActive:
                    left = until - time.monotonic()
                    if left <= 0:
                        raise
                    watch.wait(left)

    def _start_of(self, number: int, first: int) -> int:
        """first: what lies before it may be removed at any moment. Offsets that the user gave stay as they are: if one
        lies before it, that is reported as DataLost, or logged."""
        check_start(self.source, number, first)
        is_given = isinstance(self._options.starting, dict) and self._options.starting.get(number, -1) >= 0
        return self._starts[number] if is_given else max(first, self._starts[number])

    # What Spark asks.

    def target_now(self) -> None:
        """Read nothing that comes later than this moment (Trigger.AvailableNow)."""
        self._targets = dict(enumerate(self.source.ends()))
        self._idle = None

    def latest(self, start: Spans, rows_max: int | None, bytes_max: int | None) -> Spans:
        """What Spark will have come to with the next batch; `start` as it is if there is nothing to read.

        An idle query asks many times a second: then it costs the same, however many partitions there are."""
        if self._is_idle(start):
            return start
        changes = self._changes
        self.finish(start)
        for lane, _ in self._in_hand.values():
            lane.position = lane.done  # what Spark has not finished by now, it will never ask for again
        self._in_hand.clear()
        self._answer = None
        until = time.monotonic() + self._settle_s
        while True:
            lanes, counts, ends = self._chosen(start, rows_max, bytes_max, until)
            self._commit()  # the sink expects the checkpoint to stand where the batch begins, also behind what was lost
            if self._is_leased:
                break
            if time.monotonic() >= until:  # it is had and lost again and again
                raise self._without_lease()
        planned = {}
        for number, count in counts.items():
            lane = lanes[number]
            span = Span(lane.epoch, lane.position, lane.position + count)
            if count > 0 and self._hand_out(lane, span):
                planned[number] = span
        if self._paused and not planned and self._targets is not None:
            raise PartitionsPaused(self._member.keys.group, self._paused)
        self._idle = None if counts else (start, ends, changes)
        return {**start, **planned}

    def _is_idle(self, start: Spans) -> bool:
        """Whether nothing has changed since `latest` last found nothing to read."""
        if self._idle is None or self._in_hand or not self._is_leased:
            return False
        self._member.check()
        finished, ends, changes = self._idle
        return changes == self._changes and finished == start and ends == self.source.ends()

    def _chosen(
        self, start: Mapping[int, Span], rows_max: int | None, bytes_max: int | None, until: float
    ) -> tuple[dict[int, Lane], dict[int, int], list[int]]:
        """The lanes, of how many rows of each the next batch is made, and where the partitions end."""
        placed = self._placed(start, until)
        self._look_at_paused(placed)
        lanes = {number: lane for number, lane in placed.items() if not lane.is_halted}
        ends = self.source.ends()  # after the lanes are placed: the last owner may have come further than an older look
        available = {number: self._available(lane, ends[number]) for number, lane in lanes.items()}
        available = {number: count for number, count in available.items() if count > 0}
        # The sink's one commit names two keys for each partition, and its own; each of them has one row at least.
        count_max = (self._registry.limits.commit_keys_max - 1) // 2
        chosen = first_of(available, self._turn, count_max if rows_max is None else min(count_max, rows_max))
        if chosen:
            self._turn = chosen[-1] if len(chosen) < len(available) else -1
        counts = {number: available[number] for number in chosen}
        if rows_max is not None:
            counts = share_out(counts, rows_max)
        if bytes_max is not None:
            counts = self._within_bytes(lanes, counts, bytes_max)
        return lanes, counts, ends

    def ranges(self, start: Mapping[int, Span], end: Mapping[int, Span]) -> tuple[Spans, dict[int, int]]:
        """What the batch between these reads, and the version of the owner's key of each of its partitions.

        Spark asks once for each place where the stream stands in its plan, as for a union with itself: all are told the
        same, whatever is lost meanwhile. What the sink checks must be what every task has read."""
        if self._answer is None or self._answer[:2] != (start, end):
            self._answer = dict(start), dict(end), *self._ranges(start, end)
        return self._answer[2:]

    def _ranges(self, start: Mapping[int, Span], end: Mapping[int, Span]) -> tuple[Spans, dict[int, int]]:
        planned = spans = batch_between(start, end)
        done: set[int] = set()
        if not self._is_leased:
            self._settle(time.monotonic() + self._settle_s)
        is_planned = all(number in self._in_hand and self._in_hand[number][1] == span for number, span in spans.items())
        # Of a shared group, what is lost is left out, and read in the next batch by whoever has it then. A query alone
        # takes it again: no task has been given anything of this batch yet, so it is as after a restart.
        if not is_planned or not (self._options.is_shared or all(map(self._is_in_hand, spans))):
            spans, done = self._replayed(start, spans)
        held = {number: self._member.checkpoint(self._in_hand[number][0]) for number in spans}
        fences = {number: found[1] for number, found in held.items() if found is not None}
        missing = sorted(planned.keys() - fences.keys() - done)
        if missing and not self._options.is_shared:
            # A batch without them would count as one with them: what Spark has finished is not read again.
            if paused := [number for number in missing if number in self._lanes and self._lanes[number].is_paused]:
                raise PartitionsPaused(self._member.keys.group, paused)
            raise PartitionLost(self._member.keys.group, missing, advice=RESTART)
        return {number: spans[number] for number in fences}, fences

    def _is_in_hand(self, number: int) -> bool:
        """Whether Spark was given a range of this partition that is still owned as it was then."""
        return number in self._in_hand and self._member.checkpoint(self._in_hand[number][0]) is not None

    def finish(self, finished: Mapping[int, Span]) -> None:
        """Spark has committed all this: write the checkpoints. What was taken away meanwhile is not ours to write."""
        self._member.check()
        for number, (lane, span) in self._in_hand.items():
            if finished.get(number) == span:
                lane.done = max(lane.done, span.end)
        self._commit()
        if any(lane.is_stopping for lane in self._lanes.copy().values()):
            self._member.wake()

    def _commit(self) -> None:
        """Write the checkpoints of what is done."""
        try:
            self._ride_out(self._member.commit)
        except PartitionLost as error:  # found again in the next batch, or refused by the sink's own fence
            _logger.warning("%s", error)
        except UNREACHABLE as error:
            if self._is_leased:
                raise
            # The lanes end with the lease. With the next one they go on where Spark says that it is.
            _logger.warning("group %s: the lease has run out: %s", self._member.keys.group, error)

    def _ride_out(self, call: Callable[[], T]) -> T:
        """A registry call that may be made twice, tried again while the lease lives: for one lease's time at most.

        A checkpoint may be written twice because it expects its own version, which the member reads again after a lost
        reply."""
        try:
            return ride_out(call, self.lease_s, lambda: self._is_leased, UNREACHABLE)
        except UNREACHABLE as error:
            raise with_advice(
                error,
                f"group {self._member.keys.group}: the registry could not be reached for as long as the lease lived, "
                f"{self.lease_s:g} s: {error}. Start the query again: it goes on where it was",
            ) from error

    @property
    def registry_id(self) -> str:
        """Names the registry without its address; asked for once."""
        if not self._registry_id:
            self._registry_id = self._ride_out(lambda: fingerprint(self._registry))
        return self._registry_id

    def _hand_out(self, lane: Lane, span: Span) -> bool:
        # In hand first, then the look: who stops the lane does it the other way round, so one sees the other.
        lane.position = span.end
        if lane.is_halted or lane.is_lost:
            lane.position = lane.done
            return False
        self._in_hand[lane.partition] = lane, span
        return True

    @property
    def incarnation(self) -> str | None:
        return self._member.incarnation

    def close(self) -> None:
        """Release everything at what is done, and leave."""
        self._member.close()

    # Lanes.

    def _settle(self, until: float) -> None:
        """Wait until the partitions are here: alone, all of them; else those that the assignment gives us.

        until: on the monotonic clock, when to give up."""
        while True:
            self._member.check()
            with self._changed:
                missing = self.source.partitions - len(self._lanes)
                has_them = self._member.is_settled if self._options.is_shared else not missing
                if has_them and self._is_leased:
                    return
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, 0.5))
        if not self._is_leased:
            raise self._without_lease()
        if not self._options.is_shared:
            raise GroupActive(
                f"group {self._member.keys.group}: others still own {counted(missing, 'partition')} of "
                f"{self.source.name} after {self._settle_s:g} s; see `pxrs group describe`"
            )

    def _without_lease(self) -> RegistryUnavailable:
        return RegistryUnavailable(
            f"group {self._member.keys.group}: the lease has run out, and no other was had in {self._settle_s:g} s. "
            "Start the query again when the registry can be reached: it goes on where it was"
        )

    def _placed(self, finished: Mapping[int, Span], until: float) -> dict[int, Lane]:
        """The lanes. New ones are set to where they go on, by Spark's word and the group's.

        Not without a lease: that there is nothing to read now would end a query with Trigger.AvailableNow."""
        while True:
            self._settle(until)
            for lane, checkpoint in self._take_fresh():
                place = f"{self.source.name}/{lane.partition}"
                lane.seek(resume_at(self._finished(lane, finished), checkpoint, self._options.is_shared, place))
            self._commit()
            with self._changed:  # all may be new ones again, if the lease was lost meanwhile
                is_placed, lanes = not self._fresh, dict(self._lanes)
            if is_placed and self._is_leased and (self._options.is_shared or len(lanes) == self.source.partitions):
                return lanes

    def _look_at_paused(self, lanes: Mapping[int, Lane]) -> None:
        """Tell of what a message holds up that a worker could not handle. Raises PartitionsPaused if alone."""
        paused = [number for number, lane in lanes.items() if lane.is_paused and not lane.is_stopping]
        if self._targets is None:
            ends = {number: found.end for number, found in self.source.bounds(paused).items()}
        else:
            ends = self._targets
        before, self._paused = self._paused, sorted(n for n in paused if lanes[n].position < ends[n])
        if not self._paused:
            return
        told = PartitionsPaused(self._member.keys.group, self._paused)
        if not self._options.is_shared:
            raise told
        if self._paused != before:
            _logger.warning("%s", told)

    @property
    def _is_leased(self) -> bool:
        """Whether anything may be handed out now (G8)."""
        return self._registry.clock.now() < self._member.deadline

    def _finished(self, lane: Lane, spans: Mapping[int, Span]) -> Span | None:
        """Spark's word on how far this is, where it counts. In a shared group the group's checkpoint alone does: what a
        batch was planned with and could not read, because it had moved, is finished in Spark's eyes, and in nobody's
        hands."""
        return None if self._options.is_shared else spans.get(lane.partition)

    def _take_fresh(self) -> list[tuple[Lane, Checkpoint]]:
        with self._changed:
            fresh, self._fresh = self._fresh, {}
        held = [(lane, self._member.checkpoint(lane)) for lane in fresh.values()]
        return [(lane, found[0]) for lane, found in held if found is not None]

    def _replayed(self, start: Mapping[int, Span], spans: Spans) -> tuple[Spans, set[int]]:
        """What may be read of a batch that was planned before a restart, or before partitions were lost; and the
        partitions of which nothing need be read, because what the batch made of them is published."""
        kept = [] if self._options.is_shared else [number for number in spans if self._is_in_hand(number)]
        self._in_hand = {number: self._in_hand[number] for number in kept}
        self._settle(time.monotonic() + self._settle_s)
        if self._options.is_shared and self._may_be_published(spans):
            spans = {}
        fresh = self._take_fresh()
        published = self._published(fresh, spans)
        allowed: list[tuple[Lane, Span]] = []
        done: set[int] = set()
        for lane, checkpoint in fresh:
            number = lane.partition
            span, finished, place = spans.get(number), self._finished(lane, start), f"{self.source.name}/{number}"
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
        self._commit()  # the sink expects the checkpoint to stand where the batch begins
        for lane, span in allowed:
            self._hand_out(lane, span)
        return {number: span for number, (_, span) in self._in_hand.items()}, done

    def _published(self, fresh: Sequence[tuple[Lane, Checkpoint]], spans: Spans) -> dict[int, bool | None]:
        """The partitions whose part of the batch the sink has published, and whether the query keeps state.

        Without state, nothing is read of them: the sink finds the batch in its manifest and takes nothing more of it.
        With state, Spark needs the rows to make the state of this batch again."""
        reached = {
            lane.partition: spans[lane.partition]
            for lane, checkpoint in fresh
            if lane.partition in spans and is_reached(spans[lane.partition], checkpoint)
        }
        if not reached or self._options.is_shared:
            return {}
        group = self._member.keys.group
        return self._ride_out(lambda: published_spans(self._registry, group, self.source.id, reached))

    def _check_kept(self, number: int, span: Span, has_state: bool | None) -> None:
        """Raise DataLost, with the reason, if retention took rows of a published batch that are to be read again."""
        first = self.source.start(number)
        if span.start < first:
            place = f"{self.source.name}/{number}"
            raise DataLost(place, span.start, min(first, span.end), _FOR_STATE if has_state else _FOR_STATE_PERHAPS)

    def _may_be_published(self, spans: Spans) -> bool:
        """Whether the sink may have published the batch, with some of these ranges, before the restart. Then the others
        are no part of it any more: they are read in the next one, from where the group is."""
        prefix = f"{self._member.keys.checkpoints}{self.source.id}/"
        for entry in self._ride_out(lambda: self._registry.scan(prefix)):
            span = spans.get(partition_of(entry.key)[1])
            if span is not None and Checkpoint.load(entry.key, entry.value).offset >= span.end:
                return True
        return False

    def _available(self, lane: Lane, end: int) -> int:
        number = lane.partition
        if lane.position > end:
            raise CheckpointOutOfRange(
                f"group {self._member.keys.group} is at offset {lane.position} of {self.source.name}/{number}, which "
                f"ends at {end}; is this the same log? Reset the group if it is"
            )
        if self._targets is not None:
            end = min(end, self._targets[number])
        if end <= lane.position:
            return 0
        first = self.source.start(number)
        if lane.position < first:
            lost = DataLost(f"{self.source.name}/{number}", lane.position, first)
            if self._options.fails_on_loss:
                raise lost
            _logger.warning("%s", lost)
            lane.seek(first)
        return end - lane.position

    def _within_bytes(self, lanes: Mapping[int, Lane], counts: Mapping[int, int], bytes_max: int) -> dict[int, int]:
        """As many rows of each as fit into an equal part of the bytes; at least a stored batch of one of them."""
        share = max(1, bytes_max // max(1, len(counts)))
        result = {}
        for number, count in counts.items():
            lane, batches = lanes[number], None
            while count > 0 and batches is None:
                try:
                    batches = self.source.read(number, lane.position, share)
                except OffsetTrimmed:  # by a retention that came since it was looked at
                    count = min(count, self._available(lane, self.source.end(number)))
            result[number] = min(count, batches[-1].next_offset - lane.position) if batches else 0
        return result

    # What the member tells, on its own thread.

    def lanes_assigned(self, lanes: Sequence[Lane]) -> None:
        with self._changed:
            for lane in lanes:
                self._lanes[lane.partition] = self._fresh[lane.partition] = lane
            self._notify()

    def lane_revoked(self, lane: Lane) -> None:
        self.group_changed()

    def lane_resumed(self, lane: Lane) -> None:
        self.group_changed()

    def _gone(self, lane: Lane) -> None:
        with self._changed:
            for lanes in (self._lanes, self._fresh):
                if lanes.get(lane.partition) is lane:
                    del lanes[lane.partition]
            self._notify()

    lane_released = lane_lost = _gone

    def call_back(self) -> None:
        """There are no callbacks of a user's."""

    def group_changed(self) -> None:
        with self._changed:
            self._notify()

    def member_failed(self) -> None:
        self.group_changed()

    def _notify(self) -> None:
        """Holds `_changed`."""
        self._changes += 1
        self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start_offsets(source: Source, options: ReadOptions) -> dict[int, int]:
    """Where each partition begins: what a batch reads from, or a stream whose group has no checkpoint yet."""
    if options.starting_us is not None:
        return {number: source.offset_at(number, options.starting_us) for number in range(source.partitions)}
    starting = "earliest" if options.starting in (None, "committed") else options.starting
    assert starting is not None
    return resolve_offsets(source, starting, "startingOffsets")


def resolve_offsets(source: Source, offsets: Offsets, option: str) -> dict[int, int]:
    """As numbers. Raises InvalidOption if a partition is missing or unknown, or an offset is beyond the end."""
    extents: list[tuple[int, int]] = list(source.bounds(range(source.partitions)).values())
    return resolve_within(source.name, extents, offsets, option)
