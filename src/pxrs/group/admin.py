"""A group seen from outside: what it does, and what an administrator may do to it.

Looking takes no lock and needs no member: it is one scan of the group's keys, then the log's ends (X17).

Changing goes through the fence. Whatever an administrator writes about a partition also writes its owner key, free and
with a new epoch, in the same commit and expecting its version (G5). So
- a checkpoint that the last owner still had on its way is refused, and cannot undo what was done here;
- the change itself, if its reply is lost and it lands late, is refused once anybody has owned the partition since;
- a member that owns the partition finds that it has lost it, claims it again and starts at what was written. It looks
  because the same commit raises `taken` in its target, expecting the target's version: every member watches its target,
  and reads all its owner keys when `taken` has changed. So the member notices even if this process dies right after the
  commit. A member that waits for the partition watches the owner key itself.

A checkpoint that is written here may lie before those of all other groups. For a topic with `keep_unread` the commit
therefore expects `start` as it was read, and writes the gate (O10, see `retention.py`).

Each partition is changed as a whole or not at all; several go together as far as one commit can hold them. If an error
ends a change half-way, run it again: each of them may be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from pxrs import arguments
from pxrs.errors import Conflict, GroupActive, GroupElsewhere, GroupError, InvalidGroup
from pxrs.events.recording import LOGGED_ONLY, Recorder, attempted
from pxrs.group.changes import Guard, in_commits, write_of
from pxrs.group.checkpoints import CheckpointWrite
from pxrs.group.description import GroupDescription
from pxrs.group.foreign import check_meaning, foreign_of
from pxrs.group.positions import Offsets, To, resolve_offsets, resolve_position
from pxrs.group.projection import projection_of
from pxrs.group.readables import Listing, Readables, Sources, Topics
from pxrs.group.reader import GroupReader
from pxrs.group.records import (
    Home,
    Keys,
    Leader,
    Paused,
    Pinned,
    SourceRead,
    Starts,
    gate_key,
    partition_of,
    start_key,
)
from pxrs.group.snapshot import GroupState
from pxrs.log.contract import Source
from pxrs.log.numbering import TopicPartition
from pxrs.registry.contract import ABSENT, Registry

ATTEMPTS_MAX: Final = 100
"""How often a change is tried again because the group has changed meanwhile."""
_ACTIONS: Final = {"import": "import_checkpoint", "delete": "delete_group"}
"""The names of actions in `_audit`, where they differ from the names that checkpoints have in `by`."""


class GroupHandle:
    """A group by name. The group need not exist: methods that need it raise UnknownGroup."""

    def __init__(
        self,
        registry: Registry,
        name: str,
        topics: Topics,
        sources: Iterable[Offsets] = (),
        home: Callable[[], Home | None] | None = None,
        registered: Sources | None = None,
        recorder: Recorder = LOGGED_ONLY,
    ) -> None:
        """sources: what the group reads beside the `topics` and the `registered` sources, such as somebody's table.
        home:    gives the identity of the hub that the `topics` are of, and raises WrongRegistry if its groups may not
                 be changed through this registry. Asked before every change that concerns one of the `topics`.
        recorder: keeps the events of what is done here."""
        self.name, self._recorder = name, recorder
        self._keys = Keys(name)
        self._registry = registry
        readables = Readables(topics, sources, registered)
        self._reader = GroupReader(registry, self._keys, readables, (lambda: None) if home is None else home)
        self.hub: object = None
        """The hub that made this handle. The handle refers to it because a hub that nothing refers to closes itself."""

    def describe(self) -> GroupDescription:
        """The members of the group, and the owner, checkpoint and lag of each partition. Raises UnknownGroup."""
        return self.described(self._reader.read_there())

    def described(self, state: GroupState, listing: Listing | None = None) -> GroupDescription:
        """As `describe`, from records that were read before: for a caller that watches many groups, and reads the
        records of a group again only after they have changed.

        listing: the topics, if the caller has listed them before, for several groups."""
        return self._reader.described(state, listing or self._reader.readables.listing())

    def preview_reset(self, to: To, topic: str | None = None) -> list[tuple[str, str, dict[int, int]]]:
        """Where `reset` would set the checkpoints now: the name and the id of each topic or source, and the new offsets
        by partition. Writes nothing. Raises what `reset` raises, except GroupActive."""
        sources = self._reader.sources_to_reset(to, topic)
        starts = self._guard(sources).starts
        return [
            (source.name, source.id, resolve_offsets(to, source, starts.get(source.id, Starts()))) for source in sources
        ]

    def reset(self, to: To, topic: str | None = None, force: bool = False) -> dict[str, dict[int, int]]:
        """Set the checkpoints of the group. Returns the new offsets, by topic and partition.

        to:    "earliest", "latest", an offset for every partition, a time (the first message of that time or later),
               or offsets by partition; partitions that are not named stay where they are.
        topic: its name; by default every topic that the group reads and that still exists.
        force: reset even while the group has members. They lose their partitions, claim them again and continue at the
               new offsets; messages in hand are still handled, but their checkpoint is refused.

        A paused partition is resumed too. Nothing is written if an offset is not in the log: OffsetOutOfRange,
        OffsetTrimmed, or CheckpointOutOfRange if the log is an older copy than the registry. Raises UnknownGroup,
        UnknownTopic, GroupActive.
        """
        arguments.flag(InvalidGroup, "force", force)
        sources = self._reader.sources_to_reset(to, topic)
        written = self._set(sources, lambda source, starts: resolve_offsets(to, source, starts), "reset", force=force)
        offsets = {
            source.name: {number: offset for (id, number), offset in sorted(written.items()) if id == source.id}
            for source in sources
        }
        self._recorder.audit("reset", group=self.name, topic=topic, offsets=offsets, force=force)
        return offsets

    def import_checkpoint(self, offset: int | Mapping[int, int], topic: str, force: bool = False) -> dict[int, int]:
        """Import the checkpoint of a consumer of another kind that was used before (X21). Returns the written offsets,
        by partition.

        offset: of the next message to read, by partition. A single number is accepted for a table, whose ids are the
                offsets of all its partitions, and for a topic with one partition. For a topic with several partitions,
                each of which counts from 0, it is refused: InvalidGroup.
        force:  replace existing checkpoints; without it they stay as they are.

        Nothing is written if an offset is not in the log: OffsetOutOfRange, OffsetTrimmed. The group need not exist.
        Raises GroupActive while it has members, whatever `force` says: see `reset`.
        """
        arguments.flag(InvalidGroup, "force", force)
        source = self._reader.source(topic)

        def resolve(source: Offsets, starts: Starts) -> dict[int, int]:
            if isinstance(offset, Mapping):
                return resolve_offsets(offset, source, starts)
            return resolve_position(offset, source, starts, self.name)

        written = self._set([source], resolve, "import", replaces=force)
        offsets = {number: each for (_, number), each in sorted(written.items())}
        self._recorder.audit("import_checkpoint", group=self.name, topic=topic, offsets=offsets, force=force)
        return offsets

    def delete(self, force: bool = False, topic: str | None = None) -> None:
        """Delete the group: a consumer that uses its name later starts over.

        topic: delete only the checkpoints and pauses of this topic or source, given by its name or id; it need not
               exist any more. The members that do not read it stay, and so do the checkpoints of all other topics.

        Its checkpoints, pauses and targets are removed. Its owner keys and its leader key stay, free and with a new
        epoch and term: they are the guards of all other writes, and a guard that is deleted and made again may get an
        old version again (R4). So no write from before the deletion can pass after it, on any store: a checkpoint
        expects its owner's old version, a target its leader's, a claim and a start need a live lease, and what an
        administrator writes expects the owner too. A partition that nobody has owned gets its owner key now.

        force: delete even while the group has members. Their keys are deleted, so they join again as new members and
               start over; so does a member that joins at this moment.

        Raises UnknownGroup, GroupActive, and GroupError if the group does not read the topic.
        """
        arguments.flag(InvalidGroup, "force", force)
        asked = topic
        state = self._reader.read_there()
        ids = None if topic is None else self._reader.ids_to_forget(state, topic)
        state = state.only(ids)
        self._reader.check_registry((id for id, _ in state.partitions()), state)
        self._check_idle(state, force)
        owned = {place for place, (owner, _) in state.owners.items() if owner.incarnation is not None}
        gone = dict.fromkeys(state.checkpoints.keys() | state.paused.keys() | owned)
        self._change(lambda: Guard(self._keys), lambda _: gone, "delete", force=True)
        self._recorder.audit("delete_group", group=self.name, topic=asked, force=force)
        # In this order: a member that joins before `starts` is reset may assume that every partition has a checkpoint,
        # but its key is deleted below, so that it joins anew; a member that joins later reads the checkpoints, which
        # are all gone.
        read = {id for id in state.topics_read() if ids is None or id in ids}
        for topic in sorted({topic for topic, _ in gone} | read):
            self._registry.commit(put={self._keys.starts(topic): Pinned().dump()})
        state = self._reader.read().only(ids)
        self._delete([self._keys.member(incarnation) for incarnation in state.members])
        self._retire_sources(state)
        if ids is None or not (left := self._reader.read()).is_there:
            self._retire_leader(state if ids is None else left)
        self._project()

    def retry(self, topic: str, partition: int, offset: int | None = None) -> None:
        """Retry the message that a partition is paused at. Raises GroupError if the partition is not
        paused.

        topic:  its name or id.
        offset: retry only this message. Raises GroupError if the partition is paused at another one.
        """
        offset = None if offset is None else arguments.whole(InvalidGroup, "offset", offset, 0)
        for _ in range(ATTEMPTS_MAX):
            name, key, paused, version = self._pause(topic, partition)
            if offset not in (None, paused.offset):
                raise self._paused_elsewhere(name, partition)
            try:
                with attempted(self._recorder, "retry", group=self.name, topic=name, partition=partition):
                    self._registry.commit({key: version}, delete=[key])
                self._audit_decision("retry", name, key, paused)
                return
            except Conflict:  # the partition is paused at another message, or somebody has decided otherwise
                continue
        raise self._too_lively()

    def skip(self, topic: str, partition: int, offset: int | None = None) -> int:
        """Skip the message that a partition is paused at, and resume after it. Returns the offset of the message.

        topic:  its name or id.
        offset: skip only this message. Raises GroupError if the partition is paused at another one, or not paused.
        """
        offset = None if offset is None else arguments.whole(InvalidGroup, "offset", offset, 0)
        name, key, paused, version = self._pause(topic, partition)
        is_other = offset is not None and paused.offset != offset
        if not is_other and not paused.skip:
            order = replace(paused, skip=True)
            try:
                with attempted(self._recorder, "skip", group=self.name, topic=name, partition=partition):
                    self._registry.commit({key: version}, {key: order.dump()})
                self._audit_decision("skip", name, key, paused)
            except Conflict:  # the decision is only about the message that was seen
                is_other = True
        if is_other:
            raise self._paused_elsewhere(name, partition)
        return paused.offset

    def _paused_elsewhere(self, topic: str, partition: int) -> GroupError:
        return GroupError(
            f"group {self.name}: {topic}/{partition} is now paused at another message; check that message first"
        )

    def paused(self, topic: str, partition: int) -> Paused:
        """The message that a partition is paused at, and why. Raises GroupError if the partition is not paused."""
        return self._pause(topic, partition, is_changed=False)[2]

    def _audit_decision(self, action: str, topic: str, key: str, paused: Paused) -> None:
        """action: "retry" or "skip"."""
        id, partition = partition_of(key)
        place = {"group": self.name, "topic": topic, "topic_id": id, "partition": partition}
        self._recorder.audit(action, **place, offset=paused.offset)

    # Reading.

    def _pause(self, topic: str, partition: int, is_changed: bool = True) -> tuple[str, str, Paused, int]:
        """The name of the topic, and the key, the record and the version of a pause.

        is_changed: raise WrongRegistry if it may not be changed from here."""
        arguments.text(InvalidGroup, "topic", topic, "the topic's name")
        partition = arguments.whole(InvalidGroup, "partition", partition, 0)
        state = self._reader.read_there()
        names = self._reader.names(state, self._reader.readables.listing())
        ids = sorted(self._reader.ids_named(state, topic))
        for id in ids:  # the name of a deleted topic may belong to another one now
            if (id, partition) in state.paused:
                if is_changed:
                    self._reader.check_registry([id], state)
                return names.get(id, id), self._keys.pause(id, partition), *state.paused[id, partition]
        nameless = sorted(id for id, number in state.paused if number == partition and id not in names)
        if ids == [topic] and nameless:
            raise GroupError(
                f"group {self.name} reads no topic or source named {topic}, but has paused partition {partition} of a "
                f"source that is not registered: {self._reader.missing(nameless[0], nameless[0], state)}; or pass its "
                "id as TOPIC"
            )
        raise GroupError(
            f"group {self.name}: partition {partition} of {topic} is not paused, so there is nothing to retry or skip"
        )

    def _check_idle(self, state: GroupState, force: bool) -> None:
        if state.members and not force:
            names = sorted(member.name for member in state.members.values())
            some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise GroupActive(f"group {self.name} has members: {some}; stop them first, or force it")

    def _too_lively(self) -> GroupActive:
        return GroupActive(f"group {self.name} kept changing while it was being written; stop its members first")

    # Changing.

    def _set(
        self,
        sources: Sequence[Offsets],
        resolve: Callable[[Offsets, Starts], Mapping[int, int]],
        by: str,
        *,
        force: bool = False,
        replaces: bool = True,
    ) -> dict[TopicPartition, int]:
        """Write the checkpoints that `resolve` gives for each source. Returns what was written."""

        def choose(guard: Guard) -> dict[TopicPartition, int | None]:
            return {
                (source.id, number): offset
                for source in sources
                for number, offset in resolve(source, guard.starts.get(source.id, Starts())).items()
            }

        written = self._change(lambda: self._guard(sources), choose, by, force=force, replaces=replaces)
        return {place: offset for place, offset in written.items() if offset is not None}

    def _guard(self, sources: Sequence[Offsets]) -> Guard:
        """The guard of a change that writes checkpoints. Raises WrongRegistry, and GroupElsewhere if the group reads
        the topics of another hub."""
        guard = Guard(self._keys)
        home = self._reader.check_registry(source.id for source in sources)
        if home is not None:
            # Read before the rest of the group: see `Joining._read_home`.
            entry = self._registry.get(self._keys.home)
            known = Home() if entry is None else Home.load(entry.key, entry.value)
            if known.hub not in ("", home.hub) and self._reader.read().is_there:
                raise GroupElsewhere(self.name, known.place, home.place)
            guard.expect[self._keys.home] = ABSENT if entry is None else entry.version
            guard.put[self._keys.home] = home.dump()
        for source in sources:
            foreign = foreign_of(self._keys, source) if isinstance(source, Source) else None
            if foreign is not None:  # in one commit with its first checkpoints: see `SourceRead`
                state = self._reader.read()
                check_meaning(self.name, foreign, state.sources.values(), state.checkpoints_of(source.id))
                entry = self._registry.get(foreign.key)
                guard.expect[foreign.key] = ABSENT if entry is None else entry.version
                guard.put[foreign.key] = foreign.read.dump()
            if foreign is None and not source.keeps_unread and self._registry.get(gate_key(source.id)) is None:
                guard.ungated.add(source.id)
            elif foreign is None:
                entry = self._registry.get(start_key(source.id))
                guard.starts[source.id] = Starts() if entry is None else Starts.load(entry.key, entry.value)
                guard.versions[source.id] = ABSENT if entry is None else entry.version
        return guard

    def _change(
        self,
        guarded: Callable[[], Guard],
        choose: Callable[[Guard], Mapping[TopicPartition, int | None]],
        by: str,
        *,
        force: bool = False,
        replaces: bool = True,
    ) -> dict[TopicPartition, int | None]:
        """Write the checkpoints that `choose` gives, remove those for which it gives None, and raise the epochs of the
        owners. Returns what was written.

        replaces: False leaves existing checkpoints as they are."""
        written: dict[TopicPartition, int | None] = {}
        with attempted(self._recorder, _ACTIONS.get(by, by), group=self.name) as audited:
            for attempt in range(ATTEMPTS_MAX):
                guard = guarded()
                todo = {place: offset for place, offset in choose(guard).items() if place not in written}
                state = self._reader.read()
                self._check_idle(state, force)
                if not replaces:
                    todo = {place: offset for place, offset in todo.items() if place not in state.checkpoints}
                guard.take(state)
                writes = [write_of(self._keys, state, place, offset, by) for place, offset in todo.items()]
                # All keys in one commit first; if another commit has changed one of them, one commit for each key.
                for some in in_commits(writes, guard, self._registry.limits, None if attempt == 0 else 1):
                    if self._commit(some, guard):
                        audited.has_effect = True
                        self._record_freed(some, by, state)
                        written |= {write.partition: todo[write.partition] for write in some}
                if todo.keys() <= written.keys():
                    if not state.members:
                        self._project()
                    return written
            raise self._too_lively()

    def _commit(self, writes: Sequence[CheckpointWrite], guard: Guard) -> bool:
        expect, put, delete = guard.merged(writes)
        try:
            versions = self._registry.commit(expect, put, delete=delete)
        except Conflict:
            return False
        guard.committed(writes, versions)
        return True

    def _record_freed(self, writes: Sequence[CheckpointWrite], by: str, state: GroupState) -> None:
        """by: the operation that has written these owner keys."""
        names = self._reader.names(state, self._reader.readables.listing())
        for write in writes:
            (id, partition), owner = write.partition, write.owner
            assert owner is not None
            place = {"group": self.name, "topic": names.get(id, id), "topic_id": id, "partition": partition}
            past = [list(each) for each in owner.past]
            nobody = {"member": "", "incarnation": None}
            self._recorder.record("partition.freed", **place, **nobody, epoch=owner.epoch, by=by, past=past)

    def _project(self) -> None:
        """Write the readable files of the group, if there is a place for them and no member writes them."""
        found = self._reader.readables
        projection = projection_of(self._registry, self._keys, lambda: found.names(None, found.listing()))
        if projection is not None:
            projection.refresh()

    def _retire_sources(self, state: GroupState) -> None:
        """Empty the records of the ids under which the group has read its sources: it may begin under others."""
        for key, (_, version) in state.source_records.items():
            try:
                self._registry.commit({key: version}, {key: SourceRead().dump()})
            except Conflict:
                continue  # a member has joined since, and has written what it reads

    def _retire_leader(self, state: GroupState) -> None:
        """Raise the term of the leader, so that commits of the last leader that are still on their way are refused;
        then delete the targets that it has written."""
        if state.leader is not None:
            leader, version = state.leader
            try:
                retired = Leader("", leader.term + 1)
                self._registry.commit({self._keys.leader: version}, {self._keys.leader: retired.dump()})
            except Conflict:
                return  # a new member leads already, by a new term, and deletes them
        # Delete the targets of members that are gone: an incarnation that joins later has another key. All of `members`
        # too: the last leader may have written a member's first target after `state` was read.
        targets = [self._keys.target(incarnation) for incarnation in sorted({*state.targets, *state.members})]
        self._delete([*targets, self._keys.legacy_assignment])

    def _delete(self, keys: Sequence[str]) -> None:
        size = self._registry.limits.commit_keys_max
        for at in range(0, len(keys), size):
            self._registry.commit(delete=keys[at : at + size])
