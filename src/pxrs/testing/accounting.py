"""An exact account of what a group has done: real workers that write down what they handle, and the checks of it.

Each worker appends a line to its own journal before it asks for the next message: which partition it was assigned,
which message it began to handle, which checkpoints the registry accepted from it. A process that is killed leaves its
journal as it was. `account` then says whether anything was lost, out of order, or done twice beyond the last
checkpoint. It counts messages, not offsets, which may have gaps.

python -m pxrs.testing.accounting URL REGISTRY TOPIC GROUP NAME JOURNAL LEASE_TTL DIES

TOPIC is a name, or the settings of `sql_table` as a JSON object. DIES is the probability with which the worker kills
itself each time that it has changed the owner of a partition, before it records the event.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pxrs
from pxrs.clock import SYSTEM
from pxrs.consumer.consumer import Consumer, TopicsConsumer
from pxrs.consumer.events import GroupEvents
from pxrs.errors import PartitionLost
from pxrs.events.recording import Recorder
from pxrs.events.timeline import Place, owners
from pxrs.group.lane import Lane
from pxrs.group.records import Checkpoint, Keys, Member, Owner, partition_of
from pxrs.log.joined import JoinedSource
from pxrs.log.numbering import TopicPartition
from pxrs.model import Message
from pxrs.registry import Registry
from pxrs.sources import SqlTable, sql_table
from pxrs.testing.forked import Forked

HANDLING_S = 0.0005
DIED = 77
"""The exit code of a worker that has ended itself: see `Mortal`."""
FAILING = b"failing"
"""The value of a message whose handler fails."""


@dataclass
class Ownership:
    """The time during which one member owned a partition, under one epoch."""

    partition: int
    epoch: int
    member: str
    start: int
    claimed_at: float
    handled: list[int] = field(default_factory=list)
    handled_at: list[float] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    """The checkpoints that the registry is known to have accepted from this owner."""
    kept_at: list[float] = field(default_factory=list)
    """When each of these checkpoints was sent."""
    is_lost: bool = False
    """Whether the owner has noticed that it lost the partition, instead of giving it up with a checkpoint."""


@dataclass(frozen=True)
class Account:
    messages: int
    lost: int
    out_of_order: int
    redone: int
    """Messages that were handled again after a member died or was stopped, because no checkpoint covered them."""
    wrong_starts: int
    """Ownerships that began before an accepted checkpoint or behind what was handled."""
    late: int
    """Messages whose handling began after the partition had been claimed by another."""
    ownerships: int
    unfenced: int = 0
    """Checkpoints that the registry accepted although they were sent after another member had claimed the partition."""


class Worker:
    """A consumer in a process of its own. `topic` is a name, several names, or the settings of `sql_table`. Of several
    topics the journal has the numbers of a `JoinedSource`, in the order in which they are given."""

    def __init__(
        self,
        url: str,
        registry: str,
        topic: str | Sequence[str] | Mapping[str, object],
        group: str,
        name: str,
        folder: Path,
        ttl: float,
        dies: float = 0.0,
    ) -> None:
        """dies: how probably it kills itself after each change of an owner, before it records the event of that."""
        self.name, self.topic = name, topic
        self.journal = folder / f"{name}.journal"
        given = topic if isinstance(topic, str) else json.dumps(topic)
        arguments = [url, registry, given, group, name, str(self.journal), str(ttl), str(dies)]
        self.errors = folder / f"{name}.stderr"
        with self.errors.open("wb") as errors:
            self.process = Forked("pxrs.testing.accounting", arguments, stderr=errors.fileno())

    def signal(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def end(self, timeout: float = 20.0) -> int:
        """End the worker gracefully. Returns its exit code."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGABRT)  # which prints what all its threads are doing
            return self.process.wait(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_running:
            self.signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(10)


def read_journals(paths: Iterable[Path]) -> list[Ownership]:
    """The ownerships in the journals, in the order of their epochs."""
    found: dict[tuple[int, int], Ownership] = {}
    kept: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for path in paths:
        if not path.exists():
            continue
        for line in path.read_text().splitlines():
            kind, *rest = line.split()
            if len(rest) != 4 or kind == "owner":
                continue  # cut off by the kill; or for `read_owners`
            partition, epoch, offset = map(int, rest[:3])
            if kind == "assigned":
                found[partition, epoch] = Ownership(partition, epoch, path.stem, offset, float(rest[3]))
            elif kind == "handled":
                found[partition, epoch].handled.append(offset)
                found[partition, epoch].handled_at.append(float(rest[3]))
            elif kind == "lost":
                found[partition, epoch].is_lost = True
            elif kind == "kept":
                kept.setdefault((partition, epoch), []).append((offset, float(rest[3])))
    for place, ownership in found.items():
        # Done last: a checkpoint of an ownership that was given up at once may come before its assignment in the
        # journal.
        ownership.kept = [offset for offset, _ in kept.get(place, ())]
        ownership.kept_at = [moment for _, moment in kept.get(place, ())]
    return sorted(found.values(), key=lambda each: (each.partition, each.epoch))


def read_owners(paths: Iterable[Path]) -> dict[tuple[str, int, int], str]:
    """The owners that the journals tell of: by topic id, partition and epoch, the name of the member; empty if it was
    nobody."""
    found = {}
    for path in paths:
        for line in path.read_text().splitlines() if path.exists() else ():
            kind, *rest = line.split()
            if kind == "owner" and len(rest) == 5:
                found[rest[0], int(rest[1]), int(rest[2])] = rest[3].removeprefix("-")
    return found


def differences_of_timeline(hub: pxrs.Hub, group: str, paths: Iterable[Path]) -> list[str]:
    """What `_events` tells of the owners of a group's partitions that is not so, or does not tell: compared with the
    owner keys as they are now, and with all journals. Every epoch from 1 on must be there, and none twice with
    different owners."""
    events = list(hub.events(group=group))
    told = owners(events)
    differences, names = [], dict[tuple[str, int, int], str]()
    for entry in hub.registry.scan(Keys(group).owners):
        (id, partition), owner = partition_of(entry.key), Owner.load(entry.key, entry.value)
        mine = told.pop(Place(group, id, partition), [])
        if [each.epoch for each in mine] != list(range(1, owner.epoch + 1)):
            differences.append(f"{entry.key}: events {[each.epoch for each in mine]}, last epoch {owner.epoch}")
        elif (mine[-1].incarnation, mine[-1].member) != (owner.incarnation, owner.name):
            differences.append(f"{entry.key}: events report {mine[-1]}, but the owner is {owner}")
        names |= {(id, partition, each.epoch): each.member for each in mine}
    differences += [f"events report {place}, which has no owner key" for place in told]
    for place, member in read_owners(paths).items():
        if names.get(place) != member:
            differences.append(f"partition, epoch {place}: events report {names.get(place)!r}, but it was {member!r}")
    for event in events:
        for tenures in owners([event]).values():
            for each in tenures:
                at = event.fields["topic_id"], event.fields["partition"], each.epoch
                if names.get(at, each.member) != each.member:  # type: ignore[arg-type]
                    differences.append(f"{at}: {event} names another owner than {names[at]!r}")  # type: ignore[index]
    return differences


def account(
    ownerships: Sequence[Ownership], messages: Mapping[int, int | Sequence[int]], starts: Mapping[int, int] = {}
) -> Account:
    """Compute the account. messages: the ends of the partitions or, where offsets have gaps, all offsets in rising
    order. All of them from `starts` on must have been handled, and no others."""
    count = lost = out_of_order = redone = wrong_starts = late = unfenced = 0
    for partition, given in messages.items():
        offsets = range(given) if isinstance(given, int) else given
        mine = [each for each in ownerships if each.partition == partition]
        reached = kept = starts.get(partition, 0)
        todo = set(offsets[bisect_left(offsets, reached) :])
        handled: set[int] = set()
        for at, each in enumerate(mine):
            # An ownership must not begin behind what was handled (a gap), nor before an accepted checkpoint (it went
            # back). A member that was stopped between its claim and its first look finds a later checkpoint, and does
            # nothing.
            if not each.handled and not each.kept:
                continue
            first = bisect_left(offsets, each.start)
            wrong_starts += each.start < kept or first > bisect_left(offsets, reached)
            kept = max([kept, each.start, *each.kept])
            out_of_order += each.handled != list(offsets[first : first + len(each.handled)])
            redone += len(handled.intersection(each.handled))
            handled.update(each.handled)
            reached = max([reached, *(offset + 1 for offset in each.handled[-1:])])
            until = mine[at + 1].claimed_at if at + 1 < len(mine) else float("inf")
            late += sum(moment > until for moment in each.handled_at)
            unfenced += sum(moment > until for moment in each.kept_at)
        count += len(todo)
        lost += len(todo - handled)
    return Account(count, lost, out_of_order, redone, wrong_starts, late, len(ownerships), unfenced)


def redone_without_loss(ownerships: Sequence[Ownership]) -> int:
    """How many messages were handled again although no member that handled them before has lost the partition. Only for
    members that were neither killed nor stopped for good: those write no loss down."""
    count = 0
    for at, each in enumerate(ownerships):
        before = (former for former in ownerships[:at] if former.partition == each.partition and not former.is_lost)
        count += len({offset for former in before for offset in former.handled}.intersection(each.handled))
    return count


def checkpoints(registry: Registry, group: str, *topic_ids: str) -> list[int]:
    """The checkpoints of all partitions of these topics, topic after topic."""
    entries = [entry for id in topic_ids for entry in registry.scan(f"{Keys(group).checkpoints}{id}/")]
    return [Checkpoint.load(entry.key, entry.value).offset for entry in entries]


def members(registry: Registry, group: str) -> set[str]:
    """The names of the members that the group has now."""
    return {Member.load(entry.key, entry.value).name for entry in registry.scan(Keys(group).members)}


class Mortal:
    """A recorder whose process may die between a change of an owner and the event of it."""

    def __init__(self, recorder: Recorder, dies: float) -> None:
        self._recorder, self._dies = recorder, dies

    def record(self, name: str, on_stored: Callable[[], None] | None = None, /, **fields: object) -> None:
        if "past" in fields and random.random() < self._dies:
            os._exit(DIED)  # as a kill does it: nothing is finished, released or flushed
        self._recorder.record(name, on_stored, **fields)

    def audit(self, action: str, /, **fields: object) -> None:
        self._recorder.audit(action, **fields)


def _work(url: str, registry: str, topic: str, group: str, name: str, journal: str, ttl: str, dies: str) -> None:
    # First, as it may come soon. A thread waits for it: the kernel may give it to others than Python's main thread.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    hub = pxrs.open(url, registry=None if registry == "-" else registry)
    descriptor = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(*words: object) -> None:
        os.write(descriptor, (" ".join(map(str, words)) + "\n").encode())

    class NotedEvents(GroupEvents[Any]):
        def lanes_assigned(self, lanes: Sequence[Lane]) -> None:
            for lane in lanes:
                note("assigned", lane.partition, lane.epoch, lane.position, SYSTEM.now())
            super().lanes_assigned(lanes)

        def lane_lost(self, lane: Lane) -> None:
            note("lost", lane.partition, lane.epoch, lane.position, SYSTEM.now())
            super().lane_lost(lane)

    class NotedConsumer(Consumer):
        _events_type = NotedEvents

    class NotedTopicsConsumer(TopicsConsumer):
        _events_type = NotedEvents

    source = _source(hub, topic)
    ids = {part.name: part.id for part in source.parts}

    def number_of(topic_id: str, partition: int) -> int:
        return source.number_of(topic_id, partition) if isinstance(source, JoinedSource) else partition

    def note_kept(place: TopicPartition, checkpoint: Checkpoint, moment: float) -> None:
        if checkpoint.by == name:  # not the start of the group, which no member has written
            note("kept", number_of(*place), checkpoint.epoch, checkpoint.offset, moment)

    def note_owner(place: TopicPartition, owner: Owner) -> None:
        note("owner", *place, owner.epoch, owner.name or "-", SYSTEM.now())

    tell_commits(hub.registry, Keys(group), note_kept, note_owner)
    kind = NotedTopicsConsumer if isinstance(source, JoinedSource) else NotedConsumer
    recorder = Mortal(hub.parts.events, float(dies))
    options: Any = {"name": name, "lease_ttl": float(ttl), "commit_interval": 0.1, "recorder": recorder}
    consumer = kind(source, hub.registry, group, **options)

    def handle(message: Message) -> None:
        number = number_of(ids[message.topic], message.partition)
        note("handled", number, message.epoch, message.offset, SYSTEM.now())
        _do(message)

    def end() -> None:
        signal.sigwait({signal.SIGTERM})
        consumer.stop()

    threading.Thread(target=end, daemon=True).start()
    consumer.run(handle)
    with suppress(PartitionLost):  # its lease ended just before: the account of all journals says whether that is right
        consumer.close()
    if isinstance(source, SqlTable):
        source.close()
    hub.close()


def _do(message: Message) -> None:
    time.sleep(HANDLING_S)
    if message.value == FAILING:
        raise ValueError("this message fails")


def _source(hub: pxrs.Hub, topic: str) -> pxrs.Source:
    """What a worker was given to read: a name; or as JSON a list of names, or the settings of a table."""
    if topic.startswith("{"):
        return sql_table(**json.loads(topic))
    if topic.startswith("["):
        return JoinedSource([hub.log.topic(name) for name in json.loads(topic)])
    return hub.log.topic(topic)


def tell_commits(
    registry: Registry,
    keys: Keys,
    tell: Callable[[TopicPartition, Checkpoint, float], None],
    tell_owner: Callable[[TopicPartition, Owner], None],
) -> None:
    """Record every checkpoint that the registry accepts from now on, and when it was sent; and every owner."""
    commit = registry.commit
    told: dict[str, bytes] = {}

    def telling(expect: Mapping[str, int] = {}, put: Mapping[str, bytes] = {}, *rest: Any, **named: Any) -> Any:
        moment = SYSTEM.now()
        versions = commit(expect, put, *rest, **named)
        for key, value in put.items():
            # A checkpoint that is written again unchanged is not new: it may even be of an earlier ownership.
            if key.startswith(keys.checkpoints) and told.get(key) != value:
                told[key] = value
                tell(partition_of(key), Checkpoint.load(key, value), moment)
            if key.startswith(keys.owners):
                tell_owner(partition_of(key), Owner.load(key, value))
        return versions

    setattr(registry, "commit", telling)  # noqa: B010 - for this one, and not for its class


if __name__ == "__main__":
    faulthandler.enable()  # see `Worker.end`
    _work(*sys.argv[1:])
