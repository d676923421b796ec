"""A topic whose partitions are served by several servers: the brokers of a cluster.

Each partition has one owner at a time, and it may move. `Routes` says which handle serves a partition now; a handle
that does not serve it any more answers with PartitionMoved, which proves that the call had no effect there. Then the
route is forgotten and asked for again, until `patience_s` is over. A server that does not answer is treated in the same
way, but only for calls that may be repeated: an append whose answer is missing is MaybeStored (W1).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Final, Protocol, TypeVar

from pxrs.errors import (
    AppendFailed,
    AppendUnknown,
    Closed,
    InvalidRecord,
    LogError,
    PartitionMoved,
    PxrsError,
    ReadFailed,
    ServerBusy,
)
from pxrs.log.batch import Batch, check_encoded
from pxrs.log.contract import READ_BYTES_DEFAULT, Append, Bounds, Fetched, RetentionPlan, Tell, TopicLog
from pxrs.log.outcomes import MaybeStored, NotStored, Outcome, StoredAt
from pxrs.model import Topic
from pxrs.remote.client.moving import MovingSubscription
from pxrs.waiting import Callback, Subscription, limit_until, seconds_left, time_limit_at

_logger = logging.getLogger(__name__)

PAUSE_S_MIN, PAUSE_S_MAX = 0.01, 0.25
THREADS_MAX: Final = 4
"""How many servers are asked at the same time."""
LOOK_S: Final = 5.0
"""How often a reader that waits looks again although no server has reported a change."""
SHARED_BYTES_MIN: Final = 1 << 20
"""A read of fewer bytes than this asks one server after the other: each of them returns at least one batch."""
_MOVED: Final = (PartitionMoved, ReadFailed, ServerBusy)
"""Errors of a handle after which another server may serve the partition."""

T = TypeVar("T")


class Routes(Protocol):
    """Which handle serves each partition of one topic. Threads share it."""

    def check(self) -> None:
        """Raise Closed or UsedAfterFork if the topic may not be used any more."""

    def handle(self, partition: int) -> TopicLog:
        """The handle of the partition's owner. Raises PartitionMoved if the partition has none at the moment, and what
        concerns the whole topic: TopicDeleted, Closed, UsedAfterFork."""

    def forget(self, partition: int, handle: TopicLog) -> None:
        """This handle does not serve the partition any more: ask anew for its owner."""

    def owners(self) -> Mapping[int, str]:
        """The address of each partition's owner, as far as it has one."""


_Group = tuple[TopicLog, list[int]]
"""The handle of a server, and the partitions that it is asked for."""


class RoutedTopic(TopicLog):
    """A handle to one topic. Threads share it."""

    # Over the limit: the 17 calls of TopicLog, and how each finds the servers that it needs.

    has_latency = True

    def __init__(self, topic: Topic, routes: Routes, crew: ThreadPoolExecutor, patience_s: float) -> None:
        """crew: threads on which several servers are asked at once. patience_s: how long a call waits until each of its
        partitions has an owner that answers."""
        self.topic = topic
        self.name, self.id, self.partitions = topic.name, topic.id, topic.partitions
        self._routes, self._crew, self._patience_s = routes, crew, patience_s
        self._lock = threading.Lock()
        self._waiting: set[MovingSubscription] = set()

    @property
    def keeps_unread(self) -> bool:  # type: ignore[override]  # it may be changed
        return self.topic.keeps_unread

    def owners(self) -> dict[int, str]:
        self._routes.check()
        return dict(self._routes.owners())

    # Reading.

    def bounds(self, partitions: Iterable[int]) -> dict[int, Bounds]:
        asked = self._checked(partitions)
        found = self._gather(asked, lambda log, chosen: log.bounds(chosen))
        return {partition: found[partition] for partition in asked}  # in this order, as other logs return them

    def read(self, partition: int, offset: int, max_bytes: int = READ_BYTES_DEFAULT) -> list[Batch]:
        return self._at(partition, lambda log: log.read(partition, offset, max_bytes))

    def batches(self, partition: int, start: int, end: int | None = None) -> Iterator[Batch]:
        """One stream of the owner, and another one of the next owner if the partition moves meanwhile."""
        until = time.monotonic() + self._patience_s
        while True:
            handle = self._at(partition, _same)
            try:
                for batch in handle.batches(partition, start, end):
                    yield batch
                    start = batch.next_offset
                    until = time.monotonic() + self._patience_s
                return
            except _MOVED as error:
                self._routes.forget(partition, handle)
                if time.monotonic() > until:
                    raise _late(error) from error

    def readable(self, positions: Mapping[int, int]) -> list[int]:
        found = self.bounds(positions)
        return [partition for partition, offset in positions.items() if found[partition].end != offset]

    def _read_all(self, positions: Mapping[int, int], max_bytes: int) -> dict[int, Fetched]:
        """One request to each server, for all partitions that it owns."""
        chosen = self._checked(positions)
        if max_bytes < SHARED_BYTES_MIN and len(chosen) > 1:
            return self._read_in_turn(positions, max_bytes)

        def fetch(log: TopicLog, mine: list[int]) -> dict[int, Fetched]:
            wanted = max(1, max_bytes * len(mine) // len(chosen))
            found = log.fetch({each: positions[each] for each in mine}, wanted, 0.0)
            moved = [each for each, what in found.items() if isinstance(what.error, _MOVED)]
            for partition in moved:
                self._routes.forget(partition, log)
                del found[partition]  # the next look finds it at its new owner
            return found

        return self._first_found(chosen, fetch)

    def _first_found(
        self, partitions: list[int], fetch: Callable[[TopicLog, list[int]], Mapping[int, Fetched]]
    ) -> dict[int, Fetched]:
        """What the owners that answer have. Partitions without one hold up nothing: only while there is nothing to read
        in the others, all are asked again. Raises ReadFailed once that has taken too long."""
        until = time.monotonic() + self._patience_s
        pause_s = PAUSE_S_MIN
        while True:
            found: dict[int, Fetched] = {}

            def collect(log: TopicLog, mine: list[int], found: dict[int, Fetched] = found) -> dict[int, None]:
                found.update(fetch(log, mine))
                return dict.fromkeys(mine)

            errors: dict[int, LogError] = {}
            done = self._ask_once(partitions, collect, _MOVED, errors)
            if found or len(done) == len(partitions):
                return found
            if time.monotonic() + pause_s > until:
                raise next(iter(errors.values()))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def look_again_s(self, positions: Mapping[int, int]) -> float | None:
        """A server that hangs reports nothing, and its partitions may have another owner."""
        return LOOK_S

    def _read_in_turn(self, positions: Mapping[int, int], max_bytes: int) -> dict[int, Fetched]:
        """One partition after the other, until there are enough bytes."""
        found: dict[int, Fetched] = {}
        left = max(1, max_bytes)
        for partition in self.readable(positions):
            if left <= 0:
                break
            found |= self._read_all({partition: positions[partition]}, left)
            batches = found[partition].batches if partition in found else ()
            left -= sum(batch.records.nbytes for batch in batches)
        return found

    def subscribe(self, partitions: Iterable[int], callback: Callback) -> Subscription:
        chosen = self._checked(partitions)
        waiting = MovingSubscription(callback)
        with self._lock:
            self._waiting.add(waiting)
        subscription = Subscription(lambda: self._unsubscribe(waiting))
        try:
            for partition in chosen:  # known before the first handle is asked: a partition may move meanwhile
                waiting.handles[partition] = None
            self._gather(chosen, lambda log, mine: self._arm(waiting, log, mine))
        except BaseException:
            subscription.close()
            raise
        return subscription

    def _arm(self, waiting: MovingSubscription, log: TopicLog, partitions: Collection[int]) -> dict[int, None]:
        waiting.add(log, partitions, log.subscribe(partitions, waiting.callback))
        return dict.fromkeys(partitions)

    def _rearm(self, log: TopicLog, partitions: Collection[int]) -> None:
        """These partitions are served by this handle now: whoever waits for one of them waits there."""
        with self._lock:
            waiting = list(self._waiting)
        for each in waiting:
            moved = each.moved(log, partitions)
            if moved:
                self._arm(each, log, moved)
                each.callback()

    def wake(self) -> None:
        """The log was closed: everybody who waits looks again."""
        with self._lock:
            waiting = list(self._waiting)
        for each in waiting:
            each.callback()

    def _unsubscribe(self, waiting: MovingSubscription) -> None:
        with self._lock:
            self._waiting.discard(waiting)
        waiting.close()

    def offset_at(self, partition: int, timestamp: int) -> int:
        return self._at(partition, lambda log: log.offset_at(partition, timestamp))

    # Appending.

    def check_writable(self) -> None:
        self._at(0, lambda log: log.check_writable())

    def append(self, appends: Sequence[Append]) -> list[Outcome]:
        found: dict[int, Iterator[Outcome]] = {}

        def tell(outcomes: Mapping[int, Sequence[Outcome]]) -> None:
            found.update((partition, iter(each)) for partition, each in outcomes.items())

        self.append_each(appends, tell)
        return [next(found[each.partition]) for each in appends]

    def append_each(self, appends: Sequence[Append], tell: Tell) -> None:
        by_partition: dict[int, list[int]] = {}
        for number, each in enumerate(appends):
            self._checked((each.partition,))
            check_encoded(each.payload)
            by_partition.setdefault(each.partition, []).append(number)
        told: set[int] = set()
        refused: dict[int, PxrsError] = {}
        """Partitions whose owner has refused the whole call, not told yet: if all are, the first error is raised."""
        errors: dict[int, LogError] = {}

        telling = threading.Lock()

        def tell_once(outcomes: Mapping[int, Sequence[Outcome]]) -> None:
            # After Closed, servers that were asked may still answer, on threads of the crew.
            with telling:
                new = {each: found for each, found in outcomes.items() if each not in told}
                told.update(new)
            if new:
                tell(new)

        def tell_others(outcome: Outcome) -> None:
            """Tell this outcome for every partition that has none."""
            for each, numbers in by_partition.items():
                tell_once({each: [NotStored(refused[each]) if each in refused else outcome] * len(numbers)})

        def store(log: TopicLog, mine: list[int]) -> dict[int, None]:
            # Nothing but PartitionMoved is raised: the servers of the other partitions may have stored theirs.
            numbers = [number for partition in mine for number in by_partition[partition]]
            try:
                stored = dict(zip(numbers, log.append([appends[number] for number in numbers]), strict=True))
            except PartitionMoved:
                raise
            except AppendUnknown as error:
                stored = dict.fromkeys(numbers, MaybeStored(error))
            except PxrsError as error:  # see `TopicLog.append`: raised before anything is stored
                refused.update(dict.fromkeys(mine, error))
                stored = dict.fromkeys(numbers, NotStored(error))
            except Exception as error:
                _logger.exception("%s: an append failed", self.name)
                stored = dict.fromkeys(numbers, MaybeStored(AppendUnknown(f"{self.name}: {error!r}")))
            done: dict[int, list[Outcome]] = {}
            for partition in mine:
                found = [stored[number] for number in by_partition[partition]]
                if not all(isinstance(each, StoredAt) for each in found):
                    self._routes.forget(partition, log)
                if not all(_may_work_elsewhere(each) for each in found):
                    done[partition] = found
                elif isinstance(found[0], NotStored):
                    errors[partition] = _late(found[0].error)
            tell_once({partition: found for partition, found in done.items() if partition not in refused})
            return dict.fromkeys(done)

        try:
            missing = self._try_all(list(by_partition), store, PartitionMoved, errors=errors)
        except Closed as error:  # by another thread, perhaps while servers are asked, which may store what was sent
            tell_others(MaybeStored(AppendUnknown(f"{self.name}: {error}; the batch may have been stored")))
            return
        except PxrsError as error:  # such as TopicDeleted, between two tries
            if not told and not refused:
                raise
            tell_others(NotStored(error))
            return
        for partition, late in missing.items():
            tell_once({partition: [_not_stored(f"{self.name}/{partition}: ", late)] * len(by_partition[partition])})
        if refused and len(refused) == len(by_partition):
            raise next(iter(refused.values()))
        for partition, refusal in refused.items():
            tell_once({partition: [NotStored(refusal)] * len(by_partition[partition])})

    # Retention.

    def plan_retention(self, now: int, unread: Mapping[int, int] | None = None) -> RetentionPlan:
        plan = RetentionPlan({}, [])

        def ask(log: TopicLog, mine: list[int]) -> dict[int, None]:
            found = log.plan_retention(now, unread)
            plan.starts.update((each, start) for each, start in found.starts.items() if each in mine)
            plan.errors.extend(found.errors)
            return dict.fromkeys(mine)

        self._gather(list(range(self.partitions)), ask)
        return plan

    def trim(self, starts: Mapping[int, int]) -> dict[int, int]:
        moved: dict[int, int] = {}

        def ask(log: TopicLog, mine: list[int]) -> dict[int, None]:
            moved.update(log.trim({each: starts[each] for each in mine}))
            return dict.fromkeys(mine)

        self._gather(self._checked(starts), ask)
        return moved

    # What they share.

    def _at(self, partition: int, ask: Callable[[TopicLog], T]) -> T:
        """Ask the owner of this partition."""
        (chosen,) = self._checked((partition,))
        return self._gather([chosen], lambda log, _: {chosen: ask(log)})[chosen]

    def _gather(self, partitions: list[int], ask: Callable[[TopicLog, list[int]], Mapping[int, T]]) -> dict[int, T]:
        """What the owners answer. Raises ReadFailed if a partition has no owner that answers in time.

        ask: is given a handle and the partitions that it serves, and returns what it has found. Partitions that are not
             in the result of a call without an error have nothing to tell."""
        found: dict[int, T] = {}

        def collect(log: TopicLog, mine: list[int]) -> dict[int, None]:
            found.update(ask(log, mine))
            return dict.fromkeys(mine)

        for error in self._try_all(partitions, collect, *_MOVED).values():
            raise error
        return found

    def _try_all(
        self,
        partitions: list[int],
        ask: Callable[[TopicLog, list[int]], Mapping[int, None]],
        *moved: type[Exception],
        errors: dict[int, LogError] | None = None,
    ) -> dict[int, LogError]:
        """Ask the owners until each partition is done, or the patience is over. Returns why the others are not done.

        ask: returns the partitions that are done. moved: errors of it after which other servers are asked. The limit of
        this thread (`waiting.time_limit`) bounds the patience. errors: why each partition was not done when it was last
        asked for, to which `ask` may add."""
        until = time.monotonic() + seconds_left(self._patience_s)
        pause_s = PAUSE_S_MIN
        left = partitions
        errors = {} if errors is None else errors
        while True:
            done = self._ask_once(left, ask, moved, errors)
            left = [partition for partition in left if partition not in done]
            if not left:
                return {}
            if time.monotonic() + pause_s > until:
                why = f"{self.name}: no broker serves the partition"
                return {each: errors.get(each, ReadFailed(why)) for each in left}
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def _ask_once(
        self,
        partitions: list[int],
        ask: Callable[[TopicLog, list[int]], Mapping[int, None]],
        moved: tuple[type[Exception], ...],
        errors: dict[int, LogError],
    ) -> set[int]:
        """Ask each owner once. Returns the partitions that are done, and puts into `errors` why others are not."""

        limit = limit_until()  # of this thread, and `ask` may be called on another one

        def run(group: _Group) -> Mapping[int, None]:
            log, mine = group
            try:
                with time_limit_at(limit):
                    return ask(log, mine)
            except moved as error:
                for partition in mine:
                    self._routes.forget(partition, log)
                    errors[partition] = _late(error)
                return {}

        groups = self._groups(partitions, errors)
        try:
            answers = map(run, groups) if len(groups) < 2 else self._run_together(run, groups)
            return {partition for done in answers for partition in done}
        except (CancelledError, RuntimeError):  # raised by the crew if the log is closed meanwhile
            self._routes.check()  # which then raises Closed
            raise

    def _run_together(
        self, run: Callable[[_Group], Mapping[int, None]], groups: list[_Group]
    ) -> list[Mapping[int, None]]:
        """Ask these servers at once: the first one on this thread, the others on threads of the crew. Once this thread
        is free, it also asks those that no thread of the crew has begun with. Calls that wait for servers which do not
        answer may occupy the whole crew, and other calls must not wait for them. And while the interpreter ends, when a
        producer that was not closed stores what it has, the crew takes no more work."""
        futures: list[tuple[Future[Mapping[int, None]], _Group]] = []
        try:
            for group in groups[1:]:
                try:
                    futures.append((self._crew.submit(run, group), group))
                except RuntimeError as error:
                    self._routes.check()
                    if not str(error).startswith("cannot schedule new futures"):
                        raise  # the work was accepted, and no thread could be started for it
                    break
            answers = [run(group) for group in (groups[0], *groups[1 + len(futures) :])]
            for each, group in futures:
                if not each.cancel():
                    answers.append(each.result())
                    continue
                self._routes.check()  # it may be cancelled because the log was closed
                answers.append(run(group))
            return answers
        finally:
            for each, _ in futures:
                each.cancel()

    def _groups(self, partitions: list[int], errors: dict[int, LogError]) -> list[tuple[TopicLog, list[int]]]:
        """The handles of these partitions, and which of them each serves."""
        groups: dict[int, tuple[TopicLog, list[int]]] = {}
        for partition in partitions:
            try:
                log = self._routes.handle(partition)
            except _MOVED as error:
                errors[partition] = _late(error)
                continue
            groups.setdefault(id(log), (log, []))[1].append(partition)
        return [(log, mine) for log, mine in groups.values() if self._can_wait_at(log, mine, errors)]

    def _can_wait_at(self, log: TopicLog, mine: list[int], errors: dict[int, LogError]) -> bool:
        """Have those who wait for these partitions wait at this handle. False if it does not serve them either."""
        try:
            if self._waiting:
                self._rearm(log, mine)
        except _MOVED as error:
            for partition in mine:
                self._routes.forget(partition, log)
                errors[partition] = _late(error)
            return False
        return True

    def _checked(self, partitions: Iterable[int]) -> list[int]:
        """Raises InvalidRecord if the topic has no such partition; Closed, UsedAfterFork."""
        chosen = list(partitions)
        self._routes.check()
        for partition in chosen:
            if not 0 <= partition < self.partitions:
                raise InvalidRecord(f"{self.name} has no partition {partition}; it has 0 to {self.partitions - 1}")
        return chosen


def _same(log: TopicLog) -> TopicLog:
    return log


def _not_stored(place: str, why: LogError) -> NotStored:
    """The outcome of a batch that no server has stored in time."""
    return NotStored(AppendFailed(f"{place}{f'{why}'.removeprefix(place)}; nothing was stored"))


def _may_work_elsewhere(outcome: Outcome) -> bool:
    """Whether this proves that nothing was stored, and another server may store it."""
    return isinstance(outcome, NotStored) and isinstance(outcome.error, AppendFailed)


def _late(error: Exception) -> LogError:
    return error if isinstance(error, LogError) else ReadFailed(str(error))
