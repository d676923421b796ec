"""What `pxrs top` shows of a hub, read in one look: topics, groups and queues, with their rates since the last look.

The cost of a look is bounded: the ends of each topic once, one scan over the keys of all groups in pages, and at most
`QUEUE_PAGE` items of each state of a queue. No file of a partition stays open (`glancing.py`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from pxrs.attention import Attention, of_group, of_queue
from pxrs.cli.glancing import Reached, bounds_of, group_entries
from pxrs.errors import HubMoved, InvalidUrl, LogError, MissingDependency, PxrsError, RegistryCorrupt, UnknownTopic
from pxrs.group.lag import Seen, TopicLag, beyond
from pxrs.group.readables import advice, is_topic_id
from pxrs.group.records import Keys
from pxrs.group.snapshot import GroupState
from pxrs.model import Topic

if TYPE_CHECKING:
    from pxrs.hub import Hub
    from pxrs.queue.handle import QueueHandle
    from pxrs.registry.contract import Registry

QUEUE_PAGE: Final = 500
"""How many items of each state of a queue are counted; a queue with more has "at least" as many."""
FAILURE_KEPT_S: Final = 30.0
"""For how long a registered source that could not be opened is not tried again."""


@dataclass(frozen=True, slots=True)
class TopicLook:
    topic: str
    partitions: int | None
    messages: int | None
    rate: float | None
    """Messages that were appended, in a second; None at the first look."""
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class GroupLook:
    group: str
    members: int
    partitions: int
    lag: int | None
    is_lag_exact: bool
    rate: float | None
    """By how much the checkpoints advanced, in a second; None at the first look."""
    owners: dict[str, int]
    """How many partitions each member owns, by its name."""
    unowned: int
    """How many partitions have no owner that is there."""
    paused: int
    stale_s: float | None
    """The age of the oldest checkpoint of a partition with a lag."""
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class QueueLook:
    """Counts up to QUEUE_PAGE: see `is_exact`."""

    queue: str
    ready: int
    delayed: int
    in_flight: int
    dead: int

    @property
    def is_exact(self) -> bool:
        """Whether no state has more items than were counted."""
        return max(self.ready, self.delayed, self.in_flight, self.dead) < QUEUE_PAGE


@dataclass(frozen=True, slots=True)
class Look:
    """A hub as it was while it was read; not at one moment (R1)."""

    time: float
    """When the look began, in wall-clock seconds."""
    topics: list[TopicLook]
    groups: list[GroupLook]
    queues: list[QueueLook]
    attention: list[Attention] = field(default_factory=list)
    """What needs attention, the most urgent first."""


class Looker:
    """Looks at a hub again and again, and remembers the offsets of the last look, for the rates."""

    def __init__(
        self,
        hub: Hub,
        *,
        has_log: bool,
        place: Sequence[str] = (),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """has_log: False for a hub without a directory, which has no topics. place: the options that name the hub on
        the command line. monotonic: the clock of the rates."""
        self._hub, self._has_log, self._place, self._monotonic = hub, has_log, place, monotonic
        self._rates = Rates()
        self._failures: dict[str, tuple[float, Seen]] = {}
        """Registered sources that could not be read: until when they are not tried again, and why."""

    def look(self) -> Look:
        """Raises an error if the registry cannot be read."""
        began = time.time()
        self._rates.begin(self._monotonic())
        # Read the checkpoints before the ends, so that no end is behind a checkpoint.
        states, groups = dict[str, GroupState](), list[GroupLook]()
        for name, entries in group_entries(self._hub.registry):
            try:
                state = GroupState.of(Keys(name), entries)
            except RegistryCorrupt as error:
                groups.append(unreadable(name, error))
            else:
                if state.is_there:
                    states[name] = state
        reached = Reached(states.values())
        topics, seen = list[TopicLook](), dict[str, Seen]()
        if self._has_log:
            for topic in self._hub.topics():
                if (found := self._extents(topic, reached)) is not None:
                    seen[topic.id] = found
                    topics.append(self._topic(topic, found))
            topics += [TopicLook(each.name, None, None, None, str(each.error)) for each in self._hub.damaged_topics()]
        registered = {record.id: record.name for record in self._hub.sources()}
        groups += [self._group(name, state, seen, registered, began) for name, state in states.items()]
        groups.sort(key=lambda each: each.group)
        queues = [queue_look(self._hub.registry, handle) for handle in self._hub.queues()]
        urgent_first = sorted(attention(topics, groups, queues, self._place), key=lambda each: not each.is_urgent)
        return Look(began, topics, groups, queues, urgent_first)

    def _extents(self, topic: Topic, reached: Reached) -> Seen | None:
        """None if the topic was deleted meanwhile."""
        try:
            return Seen(bounds_of(self._hub.topic(topic.name).log, self._hub.log.folder, reached))
        except UnknownTopic:
            return None
        except HubMoved:
            raise
        except LogError as error:
            return Seen(problem=str(error))

    def _topic(self, topic: Topic, seen: Seen) -> TopicLook:
        if seen.count < topic.partitions:  # it could not be read
            return TopicLook(topic.name, topic.partitions, None, None, seen.problem)
        rate = self._rates.of(("topic", topic.id), sum(end for _, end in seen.extents))
        messages = sum(end - start for start, end in seen.extents)
        return TopicLook(topic.name, topic.partitions, messages, rate, seen.problem)

    def _group(
        self, name: str, state: GroupState, topics: Mapping[str, Seen], registered: Mapping[str, str], now: float
    ) -> GroupLook:
        names = {id: read.name for id, read in state.sources.items()} | state.topics_read() | dict(registered)
        lags, places, stale = list[TopicLag](), state.partitions(), list[float]()
        for id in sorted({id for id, _ in places}):
            offsets, called = state.offsets(id), names.get(id) or id
            seen = topics.get(id) or self._source(registered.get(id)) or self._missing(name, called, id, state)
            if (wrong := beyond(seen, offsets, _was_given_out(seen))) is not None:
                why = f"the checkpoint of partition {wrong[0]}, {wrong[1]:,}, is beyond its end"
                seen = replace(seen, problem=f"the lag in {called} is not known: {why}")
            lags.append(seen.total(called, id, offsets))
            places |= {(id, number) for number in range(seen.count)}
            stale += [
                now - each.when
                for number, each in state.checkpoints_of(id).items()
                if each.when and seen.partition_lag(number, each.offset)
            ]
        owners = Counter(
            owner.name or owner.incarnation
            for place in places
            if (owner := state.owner(place)[0]).incarnation is not None and owner.incarnation in state.members
        )
        known = [each.lag for each in lags if each.lag is not None]
        return GroupLook(
            group=name,
            members=len(state.members),
            partitions=len(places),
            lag=sum(known) if len(known) == len(lags) else None,
            is_lag_exact=all(each.is_exact for each in lags),
            rate=self._rates.of(("group", name), sum(each.offset for each, _ in state.checkpoints.values())),
            owners=dict(sorted(owners.items())),
            unowned=len(places) - owners.total(),
            paused=len(state.paused),
            stale_s=max(stale, default=None),
            problem="; ".join(each.problem for each in lags if each.problem) or None,
        )

    def _source(self, name: str | None) -> Seen | None:
        """A registered source; None if there is no such one."""
        if name is None:
            return None
        until, failed = self._failures.get(name, (0.0, None))
        if failed is not None and self._monotonic() < until:
            return failed
        try:
            source = self._hub.source(name)
            problem = source.ends_problem()
            return Seen(source.extents(), source.has_gaps, is_source=True, problem=problem)
        except (LogError, InvalidUrl, MissingDependency) as error:
            failed = Seen(is_source=True, problem=f"the lag in {name} is not known: {error}")
            self._failures[name] = self._monotonic() + FAILURE_KEPT_S, failed
            return failed

    def _missing(self, group: str, name: str, id: str, state: GroupState) -> Seen:
        """For what is neither a topic of this hub nor a registered source, as `pxrs.group.reader` has it."""
        if is_topic_id(id) and id not in state.sources:
            try:
                home = self._hub.check_registry()
                if home is None or state.home.hub in ("", home.hub):
                    return Seen(is_deleted=True)
            except PxrsError:  # this process has another registry than the hub: it may be a topic of that one
                pass
        return Seen(is_source=True, problem=advice(group, name, id, state.sources.get(id)))


def unreadable(name: str, error: RegistryCorrupt) -> GroupLook:
    """A group of which a record is damaged."""
    return GroupLook(name, 0, 0, None, False, None, {}, 0, 0, None, str(error))


class Rates:
    """How fast numbers rise, from one look to the next."""

    def __init__(self) -> None:
        self._before, self._now = dict[tuple[str, str], int](), dict[tuple[str, str], int]()
        self._at: float | None = None
        self._elapsed_s: float | None = None

    def begin(self, now: float) -> None:
        """A look begins. now: the time on a monotonic clock, in seconds."""
        self._elapsed_s = None if self._at is None else now - self._at
        self._at, self._before, self._now = now, self._now, {}

    def of(self, name: tuple[str, str], number: int) -> float | None:
        """The rate in a second since the last look; None if there was none that saw the number. 0 if it has fallen, as
        the checkpoints of a group do that was reset."""
        self._now[name] = number
        if not self._elapsed_s or name not in self._before:
            return None
        return max(0.0, (number - self._before[name]) / self._elapsed_s)


def _was_given_out(seen: Seen) -> Callable[[int, int], bool]:
    """Of a table it is not known: its ids may go further than its rows."""
    return lambda number, offset: seen.has_gaps or offset <= seen.extents[number][1]


def queue_look(registry: Registry, handle: QueueHandle) -> QueueLook:
    queue = handle.settings
    folders = (queue.ready, queue.delayed, queue.inflight, queue.dead)
    return QueueLook(queue.name, *(len(registry.scan(folder, limit=QUEUE_PAGE)) for folder in folders))


def attention(
    topics: list[TopicLook], groups: list[GroupLook], queues: list[QueueLook], place: Sequence[str] = ()
) -> Iterator[Attention]:
    """What somebody should look at. place: the options that name the hub on the command line."""
    for topic in topics:
        if topic.problem is not None:
            yield Attention(topic.messages is None, "topic", topic.topic, topic.problem)
    for group in groups:
        yield from of_group(
            group.group,
            members=group.members,
            partitions=group.partitions,
            lag=group.lag,
            paused=group.paused,
            unowned=group.unowned,
            stale_s=group.stale_s,
            problem=group.problem,
            place=place,
        )
    for queue in queues:
        yield from of_queue(queue.queue, queue.dead, is_exact=queue.dead < QUEUE_PAGE, place=place)
