"""Gives a producer's batches to the log and resends them until each has a final outcome, stored once (L4, W1).

Each partition is a lane: batches wait in it in order, and at most one group of BATCHES_KEPT batches is being tried, so
the log remembers as many as can be resent. A group carries origins: the lane's producer id, and the number of each
batch under that id. The Appender alone resends, and decides by the outcome of each batch (`pxrs.log.outcomes`):

| outcome of a try                                | what the Appender does                                          |
|-------------------------------------------------|-----------------------------------------------------------------|
| StoredAt                                        | done                                                            |
| NotStored or MaybeStored, with AppendFailed     | after a pause it resends the group under the same origins, until|
|                                                 | `tries_max` tries are made; then the group has failed           |
| NotStored, with UnknownProducer: the log has    | if no try was MaybeStored, the group is not in the log, and     |
| forgotten this producer                         | goes under a new producer id, at once; else: has failed         |
| none, at the group's `expires_at`               | the group has failed                                            |
| anything else                                   | the group has failed; the partition, too, unless it may pass    |

The error of a group that has failed is that of its last try; but if any try was MaybeStored, or is still under way, it
is AppendUnknown: that the last try stored nothing does not mean that the group is not in the log.

When a group has failed, what was sent to its partition after it, and before the failure could be seen, fails as not
stored: to leave out only the group would break the order. What is sent later goes under another producer id. So:

- Nothing is stored twice: a batch is given to the log under one id, but for the change after UnknownProducer.
- Nothing that was reported as not stored appears later: it was never given to the log, or every try of it was answered
  with NotStored.
- A group whose outcome is unknown may land later, under its old id, among or behind newer batches. It is the only
  exception to the order of a partition.

Lanes do not wait for each other. All lanes that are ready are tried by one append (a `Call`), which tells outcomes as
they are known (`TopicLog.append_each`). A lane whose try has failed after more than SLOW_S is tried apart from the
others, together with those that failed with it. Calls may run on several threads (`pxrs.producer.sending`).

If a call does not return, its lanes fail all the same, GRACE_S_MAX after their time. `_Lane.generation` then changes,
and what the call may still tell is ignored. A lane that has left UNRETURNED_MAX such calls behind is not tried until
one of them has returned; what is sent to it meanwhile fails at its time, as not stored.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from pxrs.errors import (
    AppendFailed,
    AppendUnknown,
    InvalidRecord,
    PxrsError,
    ReadFailed,
    RegistryUnavailable,
    SequenceGap,
    ServerBusy,
    UnknownProducer,
)
from pxrs.errors.general import restore
from pxrs.log.batch import FRAME_BYTES_MAX, Origin, Payload, encode
from pxrs.log.contract import Append, TopicLog
from pxrs.log.outcomes import MaybeStored, NotStored, Outcome, StoredAt
from pxrs.log.producers import BATCHES_KEPT
from pxrs.producer.counts import ProducerCounts
from pxrs.producer.outbox import Outbox
from pxrs.producer.receipts import Result, SentBatch
from pxrs.tracing import producer_tracing
from pxrs.waiting import time_limit, time_limit_at
from pxrs.wording import counted

if TYPE_CHECKING:
    from opentelemetry.trace import Span

SLOW_S: Final = 0.05
"""A try that failed after more than this may have waited for something: the lane is tried apart from the others."""
GRACE_S_MAX: Final = 1.0
"""How long after its time a group that the log has been given may still be answered, at most."""
_BACKOFF_S: Final = (0.01, 1.0)
"""The pause before the second try, and the longest one; each is twice the one before."""
_LOOK_UP_S: Final = 0.5
"""How long the ends of several partitions are looked up together. Those that are not found are looked up alone."""
UNRETURNED_MAX: Final = 2
"""How many calls that have not returned a lane may have left behind. Each keeps a thread: if a partition took all of
them, the others could not be tried."""
_LATE: Final = -1
"""The cohort of lanes that have little time left: the time of a call is that of the lane with the least of it."""
_PASSING: Final = (
    *(AppendFailed, UnknownProducer, SequenceGap, InvalidRecord),
    *(ReadFailed, RegistryUnavailable, ServerBusy),
)
"""Errors that say nothing about later batches of the partition."""
_LOOK_FOR_IT: Final = "whether the messages were stored is unknown: check the topic before you send them again"


@dataclass(slots=True)
class _Identity:
    """The id under which the producer appends to one partition."""

    id: uuid.UUID
    since: int | None
    """The end of the partition before the first batch under this id; None if it could not be read."""
    batches: int = 0
    """How many batches have been given an origin with this id."""


@dataclass(slots=True, eq=False)
class _Lane:
    """One partition. Guarded by `Appender.lock`; but while `is_trying`, and `generation` stays as it is, the fields of
    the group and `identity` belong to the thread that performs the call."""

    partition: int
    queue: deque[SentBatch] = field(default_factory=deque)
    """Batches without an origin, in the order in which they were sent."""
    identity: _Identity | None = None
    """None before the first try, and after a failure."""
    is_trying: bool = False
    """The lane is part of a call."""
    is_given: bool = False
    """The log has been given the group by the present call, and has not answered."""
    generation: int = 0
    """Changes when a group fails while it `is_trying`."""
    unreturned: int = 0
    """How many calls have not answered yet, whose group has failed meanwhile."""
    cohort: int | None = None
    """Lanes with the same number are tried together, apart from others. None: together with all that have none."""
    # The group.
    parts: list[list[SentBatch]] = field(default_factory=list)
    """Each is stored as one batch of the log. Batches that were taken in different rounds, because the partition was
    busy meanwhile, are stored together if they are small: else a slow log would get as many tiny ones as it is slow."""
    payloads: list[Payload] = field(default_factory=list)
    """The encoded parts."""
    appends: list[Append] = field(default_factory=list)
    """The payloads with their origins; empty if these have yet to be chosen."""
    tries: int = 0
    began: float = 0.0
    """When the first try began, on the monotonic clock, as are the other times here."""
    due: float = 0.0
    """When the next try may begin."""
    pause_s: float = _BACKOFF_S[0]
    may_be_stored: bool = False
    """A try was MaybeStored."""
    is_renamed: bool = False
    """The group was given a second producer id, after the log had forgotten the first one."""
    error: Exception | None = None
    """That of the last try."""

    @property
    def may_try(self) -> bool:
        """Whether the lane may be part of another call, when it is due."""
        return not self.is_trying and self.unreturned < UNRETURNED_MAX

    @property
    def expires_at(self) -> float:
        """That of the oldest batch, of which there must be one."""
        return (self.parts[0][0] if self.parts else self.queue[0]).expires_at

    def end_group(self) -> None:
        self.parts, self.payloads, self.appends = [], [], []
        self.tries, self.due, self.pause_s = 0, 0.0, _BACKOFF_S[0]
        self.may_be_stored = self.is_renamed = self.is_trying = self.is_given = False
        self.error = None


_ANSWER_S: Final = 0.5
"""A try with less time than that before its messages expire may end without the log's answer."""


class Call:
    """One append, with the groups of some lanes."""

    __slots__ = ("began", "blocks_since", "id", "is_apart", "is_slow", "told", "unanswered")

    def __init__(self, number: int, lanes: Sequence[_Lane], *, is_apart: bool) -> None:
        self.id, self.is_apart = number, is_apart
        self.unanswered = {lane.partition: (lane, lane.generation) for lane in lanes}
        """The lanes that have no outcome yet, each with its generation when the call began. Guarded by the lock."""
        self.is_slow = is_apart
        """Outcomes are taken one by one, as the log tells them. While False, they are collected in `told` until the
        append returns: each time that receipts get their results, threads that wait for them wake up."""
        self.told: dict[int, Sequence[Outcome]] = {}
        self.began = time.monotonic()
        """When the log was given the groups, once it was."""
        self.blocks_since = math.inf
        """When the thread has begun to wait for the log; infinite while it does something else. Without the lock."""


class Appender:
    """Belongs to one producer. Any thread may call it; each call of `next_call` is followed by `perform`."""

    def __init__(self, log: TopicLog, tries_max: int, outbox: Outbox, on_change: Callable[[bool], object]) -> None:
        """on_change: called after `changes` has been raised, without the lock; with whether lanes that are tried apart
        may be among those that are ready."""
        self._log, self._tries_max, self._outbox, self._on_change = log, tries_max, outbox, on_change
        self._delivery_s = outbox.limits.delivery_s
        self.grace_s = min(GRACE_S_MAX, self._delivery_s / 2)
        self._counts = ProducerCounts(log.name)
        self.tracing = producer_tracing(log.name, FRAME_BYTES_MAX // 2)
        """None unless the program has configured a tracer before it made the producer."""
        self._spans: dict[SentBatch, Span] = {}
        """The spans of the batches that have no final outcome yet."""
        self.lock = threading.Lock()
        """Guards the fields below. Who holds it may take the lock of the outbox, and not the other way round."""
        self._lanes: dict[int, _Lane] = {}
        self._active: dict[int, _Lane] = {}
        """The lanes that have a batch."""
        self._numbers = itertools.count()
        self._is_abandoned = False
        self.changes = 0
        """Raised whenever a lane may have become ready, or the last batch has got its result."""

    @property
    def is_idle(self) -> bool:
        """Whether no batch is without a result."""
        return not self._active

    def is_settled(self) -> bool:
        """Whether no batch is without a result, and the outbox has been told all results. A thread that has just found
        the last one holds the lock until it has told the outbox."""
        with self.lock:
            return not self._active

    def add(self, batches: Sequence[SentBatch]) -> None:
        """Queue batches. Those of partitions that have failed get their results at once."""
        failed: list[Result] = []
        is_apart = False
        with self.lock:
            for batch in batches:
                error = self._outbox.refusal(batch)
                if error is not None:
                    failed.append((batch, error))
                    continue
                lane = self._lanes.get(batch.partition)
                if lane is None:
                    lane = self._lanes[batch.partition] = _Lane(batch.partition)
                lane.queue.append(batch)
                self._active[batch.partition] = lane
                is_apart |= lane.cohort is not None
            self._settle(failed, {})
        if is_apart:
            self._changed()

    # Which lanes are tried when.

    def next_call(self, *, is_apart: bool = False) -> Call | None:
        """Lanes that may be tried now: all that are not tried apart from others, or a cohort of those that are. None if
        there are none. `perform` must follow."""
        now = time.monotonic()
        with self.lock:
            if self._is_abandoned:
                return None
            ready = [lane for lane in self._active.values() if lane.may_try and lane.due <= now < lane.expires_at]
            late = [each for each in ready if each.cohort is None and each.expires_at - now < self._delivery_s / 4]
            for lane in late:
                lane.cohort = _LATE
            if is_apart:
                cohort = next((lane.cohort for lane in ready if lane.cohort is not None), None)
                chosen = [] if cohort is None else [lane for lane in ready if lane.cohort == cohort]
            else:
                chosen = [lane for lane in ready if lane.cohort is None]
                # Lanes that need no look-up do not wait for that of others.
                chosen = [lane for lane in chosen if lane.identity is not None] or chosen
            for lane in chosen:
                lane.is_trying = True
                if not lane.tries:
                    lane.began = now
            call = Call(next(self._numbers), chosen, is_apart=is_apart) if chosen else None
        if late and not is_apart:
            self._changed()
        return call

    def has_apart(self) -> bool:
        """Whether there are lanes to be tried apart from others, now or when they are due."""
        with self.lock:
            return any(lane.cohort is not None and lane.may_try for lane in self._active.values())

    def wake_at(self, *, is_apart: bool = False) -> float:
        """When `next_call` or `expire` may find more although nothing has changed, on the monotonic clock."""
        with self.lock:
            lanes = list(self._active.values())
            due = [lane.due for lane in lanes if lane.may_try and (lane.cohort is not None) == is_apart]
            expiries = [lane.expires_at + self.grace_s * lane.is_given for lane in lanes]
        return min((*due, *expiries), default=math.inf)

    def expire(self) -> None:
        """Fail the groups whose time is over, and what waits behind them."""
        if not self._active:
            return
        now = time.monotonic()
        with self.lock:
            over = [each for each in self._active.values() if now >= each.expires_at + self.grace_s * each.is_given]
            results, failed = list[Result](), dict[int, BaseException]()
            for lane in over:
                cohort = next(self._numbers) if lane.is_trying else lane.cohort
                self._fail(lane, self._timed_out(lane, now), results, failed)
                # A call that has not returned may hold what the next one needs: that one waits apart from others.
                lane.cohort = cohort
            self._settle(results, failed)
        if over:
            self._changed()

    def abandon(self) -> None:
        """Fail everything that has no result, and begin no more calls."""
        with self.lock:
            self._is_abandoned = True
            results, failed = list[Result](), dict[int, BaseException]()
            for lane in list(self._active.values()):
                place = f"{self._log.name}/{lane.partition}"
                if lane.is_given or lane.may_be_stored:
                    error: Exception = AppendUnknown(
                        f"{place}: the producer was closed before the log answered; {_LOOK_FOR_IT}"
                    )
                else:
                    error = AppendFailed(f"{place}: not stored, because the producer was closed{self._tried(lane)}")
                self._fail(lane, error, results, failed)
            self._settle(results, failed)
        self._changed()

    def note_slow(self, call: Call) -> None:
        """The call blocks. What it has told already is taken, and messages without a key go to other partitions than
        those that it has yet to answer."""
        with self.lock:
            call.is_slow = True
            told, call.told = call.told, {}
            # Before the lock is released: the append may return now, and what it has told would count as not told.
            is_apart = self._take(call, told)
            self._outbox.stuck |= {number for number, (lane, _) in call.unanswered.items() if lane.is_trying}
        if told:
            self._changed(is_apart=is_apart)

    # One call.

    def perform(self, call: Call) -> None:
        """Try the groups of these lanes. May block, up to the time of the lane that has the least, or longer if the
        log cannot be interrupted."""
        try:
            self._perform(call)
        finally:
            with self.lock:
                late = [lane for lane, generation in call.unanswered.values() if lane.generation != generation]
                call.unanswered.clear()
                for lane in late:
                    lane.unreturned -= 1
            if late:
                self._changed()

    def _perform(self, call: Call) -> None:
        lanes = [lane for lane, _ in call.unanswered.values()]
        lanes = self._encoded(call, self._looked_up(call, lanes))
        with self.lock:
            given = [lane for lane in lanes if self._is_current(call, lane)]
            for lane in given:
                lane.is_given = True
                lane.tries += 1
            appends = [append for lane in given for append in lane.appends]
            until = min((lane.expires_at for lane in given), default=0.0)
        if not given:
            return
        call.began = call.blocks_since = began = time.monotonic()
        raised: Outcome
        try:
            with time_limit_at(until):
                self._log.append_each(appends, lambda outcomes: self._hear(call, outcomes))
            raised = MaybeStored(AppendUnknown(f"{self._log.name}: the log returned no outcome; {_LOOK_FOR_IT}"))
        except AppendUnknown as error:
            raised = MaybeStored(error)
        except PxrsError as error:  # see `TopicLog.append`: it raises these before anything is stored
            raised = NotStored(error)
        except Exception as error:  # noqa: BLE001 - a defect of the log: the batches may be stored
            raised = MaybeStored(error)
        finally:
            self._counts.append.observe(time.monotonic() - began)
        with self.lock:
            left = {
                number: call.told.get(number) or [raised] * len(lane.parts)
                for number, (lane, _) in call.unanswered.items()
            }
        if left:
            self._answer(call, left)

    def _is_current(self, call: Call, lane: _Lane) -> bool:
        """Whether the lane still waits for this call. Under the lock."""
        return call.unanswered.get(lane.partition) == (lane, lane.generation)

    def _looked_up(self, call: Call, lanes: list[_Lane]) -> list[_Lane]:
        """Give an identity to each lane that has none. Returns the lanes that have one: the others were not found in
        time, and are tried apart."""
        new = [lane for lane in lanes if lane.identity is None]
        if not new:
            return lanes
        call.blocks_since = time.monotonic()
        if call.is_apart and len(lanes) == 1:
            ends = self._look_up_alone(call, lanes[0])
        else:
            with time_limit(_LOOK_UP_S):
                ends = self._look_up_together([lane.partition for lane in new])
        call.blocks_since = math.inf
        found = []
        with self.lock:
            for lane in lanes:
                if not self._is_current(call, lane):
                    continue
                if lane.identity is None and lane.partition in ends:
                    lane.identity = _Identity(uuid.uuid4(), ends[lane.partition])
                if lane.identity is not None:
                    found.append(lane)
                else:
                    del call.unanswered[lane.partition]
                    lane.is_trying, lane.cohort = False, next(self._numbers)
        if len(found) < len(lanes):
            self._changed()
        return found

    def _look_up_alone(self, call: Call, lane: _Lane) -> dict[int, int | None]:
        """The end of the lane's partition. If it is not found until the lane's time is over, that is a failed try."""
        with self.lock:
            until = lane.expires_at if self._is_current(call, lane) else 0.0
        try:
            with time_limit_at(until):
                return {lane.partition: self._log.end(lane.partition)}
        except (AppendFailed, ReadFailed, RegistryUnavailable) as error:
            what = f"{self._log.name}/{lane.partition}: its end cannot be read: {error}; nothing was sent"
            failure = AppendFailed(what)
        except Exception:  # noqa: BLE001 - the append that follows raises the same error, and reports it
            return {lane.partition: None}
        results, failed = list[Result](), dict[int, BaseException]()
        with self.lock:
            if self._is_current(call, lane):
                del call.unanswered[lane.partition]
                lane.is_trying = False
                lane.tries += 1
                self._retry_or_fail(call, lane, failure, time.monotonic(), results, failed)
                self._settle(results, failed)
        return {}

    def _look_up_together(self, partitions: list[int]) -> dict[int, int | None]:
        """The ends of these partitions, as far as they are found within the limit of this thread."""
        ends: dict[int, int | None] = {}
        try:
            if self._log.has_latency:
                return {number: each.end for number, each in self._log.bounds(partitions).items()}
            for partition in partitions:
                ends[partition] = self._log.end(partition)
        except (AppendFailed, ReadFailed, RegistryUnavailable):
            return ends
        except Exception:  # noqa: BLE001 - the append that follows raises the same error, and reports it
            return dict.fromkeys(partitions) | ends
        return ends

    def _encoded(self, call: Call, lanes: list[_Lane]) -> list[_Lane]:
        """Make the groups of lanes that have none, and give origins to those without. Returns the lanes that can be
        appended."""
        ready = []
        for lane in lanes:
            with self.lock:
                if not self._is_current(call, lane):
                    continue
                fresh = [] if lane.parts else self._next_parts(lane)
                records = [_joined([batch.records for batch in part]) for part in fresh]
            payloads: list[Payload] = []
            spans: list[Span] = []
            error: Exception | None = None
            for each in records:
                try:
                    if self.tracing is not None:
                        span, each = self.tracing.begin(lane.partition, each)
                        spans.append(span)
                    payloads.append(encode(each, self._log.topic.codec))
                except Exception as raised:  # noqa: BLE001 - raised by the receipts, flush and close
                    error = raised
                    break
            is_current = not (error is not None and not payloads)
            if not is_current:
                assert error is not None
                self._refuse(call, lane, fresh[0], error)
            with self.lock:
                is_current = is_current and self._is_current(call, lane)
                if self.tracing is not None:
                    count = len(payloads) if is_current else 0
                    self._spans.update((part[0], span) for part, span in zip(fresh[:count], spans, strict=False))
                    for span in spans[count:]:
                        self.tracing.end(span, error)
                if not is_current:
                    continue
                # What stands behind an error is encoded again, and refused then.
                for part, payload in zip(fresh, payloads, strict=False):
                    lane.parts.append([lane.queue.popleft() for _ in part])
                    lane.payloads.append(payload)
                if not lane.appends:
                    lane.appends = [self._with_origin(lane, payload) for payload in lane.payloads]
                ready.append(lane)
        return ready

    def _next_parts(self, lane: _Lane) -> list[list[SentBatch]]:
        """The first batches of the lane's queue, as the parts of a group: see `_Lane.parts`. Under the lock."""
        rows_max, bytes_max = self._outbox.limits.batch_rows, self._outbox.limits.batch_bytes
        parts: list[list[SentBatch]] = []
        rows = size = 0
        for batch in lane.queue:
            if parts and parts[-1][-1].round != batch.round and self.tracing is None:
                # The bytes of a batch are asked for only here, because that costs as much as the hashing of a few keys.
                size = (size or _size(parts[-1][0])[1]) + _size(batch)[1]
                rows = (rows or _size(parts[-1][0])[0]) + _size(batch)[0]
                if rows <= rows_max and size <= bytes_max:
                    parts[-1].append(batch)
                    continue
            if len(parts) == BATCHES_KEPT:
                break
            rows = size = 0
            parts.append([batch])
        return parts

    @staticmethod
    def _with_origin(lane: _Lane, payload: Payload) -> Append:
        """The payload as this producer's next batch of the partition."""
        who = lane.identity
        assert who is not None
        who.batches += 1
        # Only the first batch of an id can be taken for the beginning of a new producer: see `Incoming.since`.
        since = who.since if who.batches == 1 else None
        return Append(lane.partition, payload, Origin(who.id, 0, who.batches - 1), since)

    # What a call has found.

    def _refuse(self, call: Call, lane: _Lane, part: list[SentBatch], error: Exception) -> None:
        """Fail a lane whose next part cannot be encoded."""
        results, failed = list[Result](), dict[int, BaseException]()
        with self.lock:
            if self._is_current(call, lane):
                del call.unanswered[lane.partition]
                lane.parts = [[lane.queue.popleft() for _ in part]]
                lane.is_trying = False
                self._fail(lane, error, results, failed)
                self._settle(results, failed)
        self._changed()

    def _hear(self, call: Call, outcomes: Mapping[int, Sequence[Outcome]]) -> None:
        """The log tells the outcomes of the groups of these partitions."""
        with self.lock:
            if not call.is_slow:
                call.told.update(outcomes)
                return
        self._answer(call, outcomes)

    def _answer(self, call: Call, outcomes: Mapping[int, Sequence[Outcome]]) -> None:
        """Take the outcomes of the groups of these partitions."""
        with self.lock:
            is_apart = self._take(call, outcomes)
        self._changed(is_apart=is_apart)

    def _take(self, call: Call, outcomes: Mapping[int, Sequence[Outcome]]) -> bool:
        """As `_answer`, under the lock. Returns whether lanes that are tried apart may have become ready."""
        now = time.monotonic()
        results, failed = list[Result](), dict[int, BaseException]()
        is_apart = False
        for partition, mine in outcomes.items():
            lane, generation = call.unanswered.pop(partition, (None, -1))
            if lane is None:
                continue
            if lane.generation == generation:
                self._judge(call, lane, mine, now, results, failed)
            else:
                lane.unreturned -= 1
            is_apart |= lane.cohort is not None
        self._settle(results, failed)
        return is_apart

    def _judge(
        self,
        call: Call,
        lane: _Lane,
        outcomes: Sequence[Outcome],
        now: float,
        results: list[Result],
        failed: dict[int, BaseException],
    ) -> None:
        """Decide by the outcomes of a lane's group what to do with it. Under the lock."""
        lane.is_trying = lane.is_given = False
        error = self._take_stored(lane, outcomes, results)
        if error is None:
            lane.end_group()
            lane.cohort = None
            self._outbox.stuck.discard(lane.partition)
            if not lane.queue:
                del self._active[lane.partition]
            return
        self._retry_or_fail(call, lane, error, now, results, failed)

    def _retry_or_fail(
        self,
        call: Call,
        lane: _Lane,
        error: Exception,
        now: float,
        results: list[Result],
        failed: dict[int, BaseException],
    ) -> None:
        """After a try that ended with this error. Under the lock."""
        # A try that had no time left for an answer does not hide why the others have failed.
        if lane.error is None or lane.expires_at - call.began > _ANSWER_S:
            lane.error = error
        if self._may_rename(lane, error):
            lane.identity, lane.appends, lane.is_renamed = None, [], True
        elif isinstance(error, AppendFailed) and lane.tries < self._tries_max:
            self._counts.retries.add(len(lane.parts))
            lane.due = min(now + lane.pause_s, lane.expires_at)
            lane.pause_s = min(lane.pause_s * 2, _BACKOFF_S[1])
            lane.cohort = call.id if now - call.began >= SLOW_S else None
            self._outbox.stuck.add(lane.partition)
        else:
            tried = self._tried(lane)
            if lane.may_be_stored and isinstance(error, PxrsError) and not isinstance(error, AppendUnknown):
                what = f"an earlier attempt may have stored the batch, and the last one failed: {error}"
                final: Exception = AppendUnknown(f"{what}{tried}. {_LOOK_FOR_IT.capitalize()}")
            else:
                final = _with_text(error, tried)
            self._fail(lane, final, results, failed)
            if not isinstance(error, _PASSING):
                self._outbox.broken[lane.partition] = failed[lane.partition] = error

    def _take_stored(self, lane: _Lane, outcomes: Sequence[Outcome], results: list[Result]) -> Exception | None:
        """Move the batches that are stored from the group to `results`. Returns the error of the others; None if all
        are stored."""
        if len(outcomes) != len(lane.parts):
            got = f"the log returned {len(outcomes)} outcomes for {len(lane.parts)} batches"
            what = f"{self._log.name}/{lane.partition}: {got}"
            outcomes = [MaybeStored(AppendUnknown(what))] * len(lane.parts)
        error: Exception | None = None
        kept = []
        for number, (part, payload, outcome) in enumerate(zip(lane.parts, lane.payloads, outcomes, strict=True)):
            if isinstance(outcome, StoredAt):
                offset = outcome.offset
                for batch in part:
                    results.append((batch, offset))
                    assert batch.records is not None
                    offset += batch.records.num_rows
                self._counts.stored(payload.rows, payload.frame_bytes)
                continue
            lane.may_be_stored |= isinstance(outcome, MaybeStored)
            error = error or outcome.error
            kept.append(number)
        if error is not None and len(kept) < len(lane.parts):
            lane.parts = [lane.parts[number] for number in kept]
            lane.payloads = [lane.payloads[number] for number in kept]
            lane.appends = [lane.appends[number] for number in kept]
        return error

    @staticmethod
    def _may_rename(lane: _Lane, error: Exception) -> bool:
        """Whether the log has forgotten the producer, and the group is certain not to be in the log."""
        is_forgotten = isinstance(error, UnknownProducer) and error.stored is None
        return is_forgotten and not lane.may_be_stored and not lane.is_renamed

    def _fail(self, lane: _Lane, error: BaseException, results: list[Result], failed: dict[int, BaseException]) -> None:
        """Fail the lane's group with this error, and what waits behind it as not stored. Under the lock."""
        behind = error
        if isinstance(error, _PASSING):
            behind = AppendFailed(
                f"{self._log.name}/{lane.partition}: not stored, because an earlier batch of the partition failed: "
                f"{error}"
            )
        results += [(batch, error) for part in lane.parts for batch in part]
        results += [(batch, behind if lane.parts else error) for batch in lane.queue]
        failed[lane.partition] = behind
        lane.unreturned += lane.is_trying
        lane.queue.clear()
        lane.end_group()
        lane.generation += 1
        lane.identity = lane.cohort = None
        self._outbox.stuck.discard(lane.partition)
        self._active.pop(lane.partition, None)

    def _timed_out(self, lane: _Lane, now: float) -> Exception:
        place, tried = f"{self._log.name}/{lane.partition}", self._tried(lane, now)
        if lane.is_given or lane.may_be_stored:
            return AppendUnknown(
                f"{place}: no answer within the delivery_timeout of {self._delivery_s:g} s{tried}; {_LOOK_FOR_IT}"
            )
        return AppendFailed(f"{place}: not stored within the delivery_timeout of {self._delivery_s:g} s{tried}")

    def _tried(self, lane: _Lane, now: float | None = None) -> str:
        """How often and for how long the lane's group was tried, as the end of a message; empty if that was once and
        short."""
        took_s = (time.monotonic() if now is None else now) - lane.began
        if now is None and lane.tries <= 1 and took_s < 1:
            return ""
        if not lane.tries:
            return "; it was not sent to the log"
        last = "" if lane.error is None or now is None else f", the last answer: {lane.error}"
        return f"; tried {counted(lane.tries, 'time')} within {took_s:.1f} s{last}"

    def _settle(self, results: list[Result], failed: Mapping[int, BaseException]) -> None:
        """Add final results to metrics and traces, and tell the outbox. Under the lock."""
        for batch, result in results:
            error = result if isinstance(result, BaseException) else None
            if error is not None:
                self._counts.failed(1, error)
            if self.tracing is not None and (span := self._spans.pop(batch, None)) is not None:
                self.tracing.end(span, error)
        if results:
            self._outbox.settle(results, failed)

    def _changed(self, *, is_apart: bool = True) -> None:
        self.changes += 1
        self._on_change(is_apart)


def _size(batch: SentBatch) -> tuple[int, int]:
    """The rows and bytes of a batch that has no result yet."""
    assert batch.records is not None
    return batch.records.num_rows, batch.records.nbytes


def _joined(records: Sequence[pa.RecordBatch | None]) -> pa.RecordBatch:
    """The rows of these batches as one."""
    found = [each for each in records if each is not None]
    return found[0] if len(found) == 1 else pa.Table.from_batches(found).combine_chunks().to_batches()[0]


def _with_text(error: Exception, more: str) -> Exception:
    """The same error with this text behind its own."""
    if not more or not isinstance(error, PxrsError):
        return error
    return restore(type(error), (f"{error}{more}",), vars(error), error.__cause__)
