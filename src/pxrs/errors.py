"""Every exception of pxrs, under one base.

Each says what happened and carries the facts as fields; each docstring says when it is raised and
what to do about it. Messages never contain secrets: addresses are shown with their password hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pxrs.producer.outgoing import TableReceipt

from pxrs.wording import counted


class PxrsError(Exception):
    """The base of every error that pxrs raises on purpose."""


class InvalidArgument(PxrsError, ValueError):
    """An argument is not allowed; the message names it, shows what was given and says what is. Nothing was done.

    The base of the errors of this kind that belong to one part: InvalidGroup, InvalidTopic, InvalidQueue and others."""


class InvalidUrl(InvalidArgument):
    """An address cannot be understood: unknown scheme, unknown option, a path that is a file. Correct the address."""


class MissingDependency(PxrsError, ImportError):
    """The chosen store needs a driver that is not installed. Install the extra that the message names."""


class UnsupportedPlatform(PxrsError):
    """The operating system or file system cannot give the guarantees that are needed. Choose another store."""


class Closed(PxrsError):
    """The object was closed before this call. Open a new one."""


class UsedAfterFork(PxrsError):
    """An object made before `fork` was used in the child. Open a new one in the child; the parent's is untouched."""


class NoWritePermission(PxrsError):
    """This process may read the hub or the registry and not write to it, and what was asked for has to write. Nothing
    was written there. `path` is the file or folder that it lacks the permission for.

    Run the process as a user that has the permission, or give it, for all of the directory; then open the hub again.
    What needs no write permission: docs/log.md, "Reading without write permission"."""

    def __init__(self, path: str, what: str) -> None:
        self.path, self.what = path, what
        super().__init__(what)

    def __reduce__(self) -> tuple[type[NoWritePermission], tuple[str, str]]:
        return type(self), (self.path, self.what)


class WrongRegistry(PxrsError):
    """This process has another registry than the one that its hub belongs to, so it may neither apply `keep_unread`
    nor read as a member of a group nor change groups or queues there; nothing was done.

    Give the hub's own registry, which `recorded` shows; or, if the hub is to belong to the registry that was given, run
    `pxrs registry adopt` when no member of a group is left in the old one."""

    def __init__(self, place: str, recorded: str, given: str) -> None:
        self.place, self.recorded, self.given = place, recorded, given
        if recorded == given:
            what = f"the hub {place} belongs to another registry than the one that is at {given} now, which was emptied"
            what += " or replaced: restore it"
        else:
            what = f"the hub {place} belongs to the registry {recorded}, and this process has {given}: give it the "
            what += "former with --registry, PXRS_REGISTRY or pxrs.open(registry=...)"
        super().__init__(
            f"{what}; to make the hub belong to {given}, run `pxrs registry adopt --at {place} --registry {given}`"
        )

    def __reduce__(self) -> tuple[type[WrongRegistry], tuple[str, str, str]]:
        return type(self), (self.place, self.recorded, self.given)


class RetentionPostponed(PxrsError):
    """Retention of a topic with `keep_unread` removes nothing for now; the message says why and what to do."""


class RegistryError(PxrsError):
    """The base of every registry error."""


class Conflict(RegistryError):
    """A commit's expectation did not hold, and nothing was written. Read `keys` again and decide anew."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = tuple(keys)
        super().__init__(f"not as expected: {', '.join(self.keys)}; nothing was written")

    def __reduce__(self) -> tuple[type[Conflict], tuple[tuple[str, ...]]]:
        return type(self), (self.keys,)


class OutcomeUnknown(RegistryError):
    """The reply to a commit was lost: it may have happened, may not have, and may still land.

    Reading the keys and not finding the change is not proof that it will not come. Where you must
    know, let the commit also put a marker key that it expects ABSENT, and settle it by putting
    the opposite marker there yourself: one of the two wins.
    """


class OutcomeLost(OutcomeUnknown):
    """What became of a transaction is not on record any more, and never will be: it was out of reach for too long. Look
    whether what it did is there."""


class RegistryUnavailable(RegistryError):
    """The store could not be reached or did not answer in time, and the call had no effect. Try again later."""


class StorageFull(RegistryUnavailable):
    """There is no room left where the store keeps its data, and the call had no effect. Make room, then try again."""


class AccessDenied(RegistryError):
    """The store refused the credentials or the permission, and the call had no effect. Correct them."""


class RegistryNotWritable(NoWritePermission, AccessDenied):
    """This process may read the registry and not write to it: see NoWritePermission."""


class SchemaMissing(RegistryError):
    """The tables are not there and were not to be created. Run what `pxrs registry ddl` prints."""


class RegistryReplaced(RegistryError):
    """The registry's file or directory was removed, moved, or replaced by another one while this handle was open.

    Nothing was written. If the original is put back, the handle works again. If what lies there now is meant to be
    used, such as a restored copy, close this handle and open a new one."""


class RegistryCorrupt(RegistryError):
    """Stored data is damaged or missing. Nothing is guessed: `where` names the place. Stop the processes that use the
    registry, and restore what is named from a copy (docs/registry.md, "A damaged file registry")."""

    def __init__(self, where: str, what: str) -> None:
        self.where, self.what = where, what
        super().__init__(f"{where}: {what}")

    def __reduce__(self) -> tuple[type[RegistryCorrupt], tuple[str, str]]:
        return type(self), (self.where, self.what)


class LeaseExpired(RegistryError):
    """The lease has ended or may have; nothing was written. It never comes back: take a new one and claim again."""


class InvalidKey(RegistryError, InvalidArgument):
    """A key or prefix is not a plain slash path. Use segments of printable ASCII, none empty, `.` or `..`."""


class InvalidCommit(RegistryError, InvalidArgument):
    """A commit contradicts itself, such as a key both put and deleted, or an ephemeral key without a lease."""


class ValueTooLarge(RegistryError, ValueError):
    """A value is larger than `limits.value_bytes_max`. Store it elsewhere and keep its address here."""


class CommitTooLarge(RegistryError, ValueError):
    """A commit holds more keys or bytes than `limits` allows. Split it, if its parts may happen apart."""


class LogError(PxrsError):
    """The base of every error of the message log."""


class LogNotWritable(NoWritePermission, LogError):
    """This process may read the hub's directory and not write to it: see NoWritePermission."""


class UnknownTopic(LogError, KeyError):
    """There is no such topic. Create it, or correct the name; `choices` are those that exist."""

    def __init__(self, topic: str, choices: Sequence[str] = ()) -> None:
        self.topic, self.choices = topic, tuple(choices)
        super().__init__(topic, self.choices)

    def __str__(self) -> str:
        known = f"; there are {', '.join(self.choices[:10])}" if self.choices else ""
        return f"no topic {self.topic!r}{known}; create it with create_topic or `pxrs topic create`"


class TopicDeleted(UnknownTopic):
    """The topic that this handle, producer or consumer was opened for has been deleted.

    `id` is the deleted topic's. `is_made_again`: a new topic has the name now. It is another topic, with messages and
    offsets of its own: open the topic, producer or consumer again to use it. `advice` says what to do instead where
    there is no handle to open again, as in a query of Spark."""

    def __init__(self, topic: str, id: str, is_made_again: bool, advice: str = "") -> None:
        super().__init__(topic)
        self.id, self.is_made_again, self.advice = id, is_made_again, advice

    def __str__(self) -> str:
        if self.is_made_again and self.advice:
            return f"topic {self.topic!r} was deleted and made again, so that it is another topic now. {self.advice}"
        if self.is_made_again:
            return (
                f"topic {self.topic!r} was deleted and made again, and this is a handle to the deleted one "
                f"(id {self.id}): to use the new one, open it again"
            )
        return f"topic {self.topic!r} was deleted; create it with create_topic or `pxrs topic create`, then open it"

    def __reduce__(self) -> tuple[type[TopicDeleted], tuple[str, str, bool, str]]:
        return type(self), (self.topic, self.id, self.is_made_again, self.advice)


class UnknownSource(LogError, KeyError):
    """No source is registered under this name. Register it, or correct the name; `choices` are those that exist."""

    def __init__(self, source: str, choices: Sequence[str] = ()) -> None:
        self.source, self.choices = source, tuple(choices)
        super().__init__(source, self.choices)

    def __str__(self) -> str:
        known = f"; there are {', '.join(self.choices[:10])}" if self.choices else ""
        return f"no source {self.source!r} is registered{known}; register it with add_source or `pxrs source add`"


class SourceExists(LogError):
    """A source of this name is registered, or a topic has the name; the message says which settings differ. Use it,
    choose another name, or remove it first."""


class WrongSource(LogError):
    """The address that this process gave for a registered source is that of another database. Nothing was read.

    Correct the address; or, if the database has moved there, register the source again under its id."""


class HubMoved(LogError):
    """The hub's directory is not where it was when it was opened: it was renamed or removed, or another one was put in
    its place. This partition was neither written nor read. Open the hub again, where it is now."""

    def __init__(self, place: str, what: str) -> None:
        self.place, self.what = place, what
        super().__init__(f"{place}: {what} while this process had it open; open the hub again, where it is now")

    def __reduce__(self) -> tuple[type[HubMoved], tuple[str, str]]:
        return type(self), (self.place, self.what)


class NoDirectory(LogError):
    """A hub that was opened with a registry and no directory was asked for topics, or to change a group that reads
    them; nothing was done. Give the directory too: `pxrs.open(DIRECTORY, registry=...)`. Of a group that reads another
    source than topics, name that: `hub.group(NAME, source)`."""

    def __init__(self, registry: str) -> None:
        self.registry = registry
        super().__init__(
            f"the hub with the registry {registry} was opened without a directory, so it has no topics and changes no "
            "group of topics: write pxrs.open(DIRECTORY, registry=...), or give --at"
        )

    def __reduce__(self) -> tuple[type[NoDirectory], tuple[str]]:
        return type(self), (self.registry,)


class TopicExists(LogError):
    """A topic of this name is there already. Use it, or choose another name."""


class TopicDiffers(TopicExists):
    """`create_topic(exist_ok=True)` found a topic of this name that has other settings. Nothing was changed. Ask for
    the settings that the topic has, or choose another name.

    `differences` names each argument that differs: the topic's value, then the value that was asked for."""

    def __init__(self, topic: str, differences: Mapping[str, tuple[object, object]]) -> None:
        self.topic, self.differences = topic, dict(differences)
        super().__init__(_differing(f"topic {topic!r}", self.differences))

    def __reduce__(self) -> tuple[type[TopicDiffers], tuple[str, dict[str, tuple[object, object]]]]:
        return type(self), (self.topic, self.differences)


class InvalidTopic(LogError, InvalidArgument):
    """A topic's name, partition count or setting is not allowed; the message says which and what is."""


class InvalidRecord(LogError, InvalidArgument):
    """A message or table does not fit the log's columns or limits. Nothing of it was stored."""


class PartlySent(LogError):
    """A part of a table was sent when the sending failed. `receipt` tells of the rows that were; send the others."""

    def __init__(self, topic: str, rows: int, receipt: TableReceipt) -> None:
        self.topic, self.rows, self.receipt = topic, rows, receipt
        super().__init__(
            f"{topic}: only a part of a table of {counted(rows, 'row')} was sent; see the receipt of this error"
        )

    def __reduce__(self) -> tuple[type[PartlySent], tuple[str, int, TableReceipt]]:
        return type(self), (self.topic, self.rows, self.receipt)


class OffsetOutOfRange(LogError):
    """The offset lies beyond the log's end. Read from an offset up to `end`."""

    def __init__(self, place: str, offset: int, end: int) -> None:
        self.place, self.offset, self.end = place, offset, end
        super().__init__(f"{place}: offset {offset} is beyond the end, {end}")

    def __reduce__(self) -> tuple[type[OffsetOutOfRange], tuple[str, int, int]]:
        return type(self), (self.place, self.offset, self.end)


class OffsetTrimmed(LogError):
    """The offset predates retention. Resume at `first_offset`, or accept the loss explicitly."""

    def __init__(self, place: str, offset: int, first_offset: int) -> None:
        self.place, self.offset, self.first_offset = place, offset, first_offset
        super().__init__(f"{place}: offset {offset} was removed by retention; the first one is {first_offset}")

    def __reduce__(self) -> tuple[type[OffsetTrimmed], tuple[str, int, int]]:
        return type(self), (self.place, self.offset, self.first_offset)


class DamagedFrame(LogError):
    """Stored bytes are damaged. Nothing is guessed or skipped: `file` and `position` name the place."""

    def __init__(self, file: str, position: int, what: str) -> None:
        self.file, self.position, self.what = file, position, what
        super().__init__(f"{file} at byte {position:,}: {what}")

    def __reduce__(self) -> tuple[type[DamagedFrame], tuple[str, int, str]]:
        return type(self), (self.file, self.position, self.what)


class MisplacedFile(DamagedFrame):
    """A file of the log belongs to another topic or partition, as after a mistake in a restore. Nothing was changed.
    Put the right file in its place; `pxrs check` names all that are misplaced."""


class AppendFailed(LogError):
    """The append could not be made durable and is not part of the log. Try again: a retry is stored once."""


class AppendUnknown(AppendFailed):
    """The append may have been stored: a sync failed, or the reply to the append was lost. Resend the batch under the
    same origin (producer id, epoch, sequence): a batch that was stored is answered with its offset and not stored again
    (L4). A batch without an origin must not be resent: it would be stored twice."""


class BufferFull(AppendFailed):
    """A producer's buffer stayed full for its `buffer_timeout`. Nothing of this message was sent; try again later."""


class LogBusy(AppendFailed):
    """Another process held the append lock for too long, perhaps stopped in the middle. Try again, or look at it."""


class ReadFailed(LogError):
    """The operating system could not read the log. Nothing was changed; try again, or look at the disk."""


class UnknownProducer(LogError):
    """The log does not remember this producer's earlier batches, so the log cannot tell a retry from a new batch, and
    nothing was stored. Open a new producer.

    `stored` is (epoch, sequence) of the last batch that the log remembers of this producer; None if it remembers none.
    """

    def __init__(self, what: str, stored: tuple[int, int] | None = None) -> None:
        self.what, self.stored = what, stored
        super().__init__(what)

    def __reduce__(self) -> tuple[type[UnknownProducer], tuple[str, tuple[int, int] | None]]:
        return type(self), (self.what, self.stored)


def _differing(what: str, differences: Mapping[str, tuple[object, object]]) -> str:
    settings = "; ".join(
        f"{name} is {there!r}, and {asked!r} was asked for" for name, (there, asked) in differences.items()
    )
    return f"there is a {what} already, with other settings: {settings}"


class SequenceGap(LogError):
    """A producer's batch came before the one that precedes it. It was not stored; send the missing one first."""


class GroupError(PxrsError):
    """The base of every error of consumer groups."""


class InvalidGroup(GroupError, InvalidArgument):
    """A group's name or setting is not allowed; the message says which and what is."""


class UnknownGroup(GroupError, KeyError):
    """Nobody has ever consumed under this name. Correct it; `pxrs group list` shows those that exist."""

    def __init__(self, group: str) -> None:
        self.group = group
        super().__init__(group)

    def __str__(self) -> str:
        return f"no group {self.group!r}; see `pxrs group list`"


class GroupActive(GroupError):
    """The group has members, and what was asked would change their work under them. Stop them, or force it."""


class AssignorMismatch(GroupActive):
    """This member has another assignor than members of its group that are there, so it has not joined: the leader of a
    group assigns the partitions for all of them. `others` has their assignors by their names.

    Give it the same assignor. Or, to change that of the group, stop all its members, and then start the new ones; a
    member that was killed counts until its lease has ended."""

    def __init__(self, group: str, assignor: str, others: Mapping[str, str]) -> None:
        self.group, self.assignor, self.others = group, assignor, dict(others)
        shown = [f"{name} has {theirs!r}" for name, theirs in sorted(self.others.items())]
        more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
        super().__init__(
            f"group {group}: this member has the assignor {assignor!r}, but {', '.join(shown[:3])}{more}, and all "
            "members of a group must have the same one. Give it theirs (assignor=, --assignor), or stop them before "
            "this member is started; one that was killed counts until its lease has ended"
        )

    def __reduce__(self) -> tuple[type[AssignorMismatch], tuple[str, str, dict[str, str]]]:
        return type(self), (self.group, self.assignor, self.others)


class AssignorFailed(GroupError):
    """An assignor raised, or did not assign each partition to one member that is there. The leader that has called it
    has written no assignment and leaves the group, and so does every member that leads after it.

    Correct the package that brings the assignor, or give all members another one."""

    def __init__(self, assignor: str, reason: str) -> None:
        self.assignor, self.reason = assignor, reason
        super().__init__(f"the assignor {assignor!r} failed: {reason}; correct it, or give all members another one")

    def __reduce__(self) -> tuple[type[AssignorFailed], tuple[str, str]]:
        return type(self), (self.assignor, self.reason)


class GroupElsewhere(GroupError):
    """The group of this name in this registry reads the topics of another hub: its members would not share the work
    with this one. Use another name, or another registry or namespace; or forget the group with `pxrs group delete`."""

    def __init__(self, group: str, theirs: str, ours: str) -> None:
        self.group, self.theirs, self.ours = group, theirs, ours
        super().__init__(
            f"group {group} of this registry reads the hub at {theirs}, and this one is at {ours}: use another group "
            f"name, another registry or a namespace of it. If the group is needed there no more, run "
            f"`pxrs group delete {group}`; if this is the same hub, and its file hub.record was lost, run "
            "`pxrs registry adopt`"
        )

    def __reduce__(self) -> tuple[type[GroupElsewhere], tuple[str, str, str]]:
        return type(self), (self.group, self.theirs, self.ours)


class IdentityChanged(GroupError):
    """The group reads this table under another id, `former`, than the one that the table has now: under that it would
    start again from the beginning. Nothing was written; the message says how to go on."""

    def __init__(self, group: str, source: str, id: str, former: str, address: str = "") -> None:
        self.group, self.source, self.id, self.former, self.address = group, source, id, former, address
        spelled = f", when it was addressed as {address}" if address else ""
        super().__init__(
            f"group {group} has checkpoints of {source} under the id {former}{spelled}, and does not go on from them "
            f"under {id}, which the table has as it is addressed now: messages would be handled again. To go on where "
            f"the group was, keep the former id, by `pxrs source add {source} --id {former} ...` or "
            f"sql_table(..., id={former!r}); to start anew, use another group, or remove the group's checkpoints under "
            f"the former id with `pxrs group delete {group} --topic {former}`"
        )

    def __reduce__(self) -> tuple[type[IdentityChanged], tuple[str, str, str, str, str]]:
        return type(self), (self.group, self.source, self.id, self.former, self.address)


class SourceChanged(GroupError):
    """The group has checkpoints of this source that were written for other partitions or columns, so they would not
    mean the same rows now. They are kept under the id `former_id`. Nothing was written. Read the source with the former
    settings, or in another group, or have the group forget those checkpoints."""

    def __init__(self, group: str, source: str, former: str, now: str, former_id: str) -> None:
        self.group, self.source, self.former, self.now, self.former_id = group, source, former, now, former_id
        super().__init__(
            f"group {group} has checkpoints of {source} with {former}, and it is read with {now} now: a checkpoint "
            "would not mean the same rows. Read it with the former settings; or, to start anew or from an imported "
            "checkpoint, use another group, or remove these checkpoints with "
            f"`pxrs group delete {group} --topic {former_id}`"
        )

    def __reduce__(self) -> tuple[type[SourceChanged], tuple[str, str, str, str, str]]:
        return type(self), (self.group, self.source, self.former, self.now, self.former_id)


class PartitionLost(GroupError):
    """This member does not own the partitions any more: another member owns them, or will. Nothing was written.

    What was handled since the last checkpoint will be handled again by the new owner. `reason` says how it was lost,
    `advice` what to do where that is not plain, as for a streaming query of Spark."""

    def __init__(self, group: str, partitions: Sequence[int], reason: str = "", advice: str = "") -> None:
        self.group, self.partitions, self.reason, self.advice = group, tuple(partitions), reason, advice
        because, then = f": {reason}" if reason else "", f". {advice}" if advice else ""
        super().__init__(f"group {group}: this member has lost {name_partitions(self.partitions)}{because}{then}")

    def __reduce__(self) -> tuple[type[PartitionLost], tuple[str, tuple[int, ...], str, str]]:
        return type(self), (self.group, self.partitions, self.reason, self.advice)


class CommitUnknown(GroupError, OutcomeUnknown):
    """The checkpoints of `partitions` may have been written, or may still be: the registry did not answer in time.

    The partitions are not lost by this. A member that is still there writes their checkpoints again about once a
    second, so read on, or call `commit` again to know. After `close` the next owner begins at whichever was written:
    what was handled since the last confirmed checkpoint may be handled again."""

    def __init__(self, group: str, partitions: Sequence[int], reason: str) -> None:
        self.group, self.partitions, self.reason = group, tuple(partitions), reason
        super().__init__(
            f"group {group}: the checkpoint of {name_partitions(self.partitions)} may have been written: {reason}"
        )

    def __reduce__(self) -> tuple[type[CommitUnknown], tuple[str, tuple[int, ...], str]]:
        return type(self), (self.group, self.partitions, self.reason)


class GroupUnavailable(GroupError, RegistryUnavailable):
    """The registry could not be reached in time, and what was asked of the group was not done: `what` says what.

    From `commit`: the checkpoints of `partitions` were not written; the member tries again about once a second. From
    `close`: they were not written and the partitions not released; others claim them when this member's lease has
    ended. From `hub.consumer`: this process has not joined and owns nothing; try again later."""

    def __init__(self, group: str, partitions: Sequence[int], what: str, reason: str) -> None:
        self.group, self.partitions, self.what, self.reason = group, tuple(partitions), what, reason
        super().__init__(f"group {group}: {what}: {reason}")

    def __reduce__(self) -> tuple[type[GroupUnavailable], tuple[str, tuple[int, ...], str, str]]:
        return type(self), (self.group, self.partitions, self.what, self.reason)


def name_partitions(partitions: Sequence[int]) -> str:
    """Partitions in a message."""
    if not partitions:
        return "its partitions"
    return f"partition{'s' if len(partitions) > 1 else ''} {', '.join(map(str, partitions))}"


class PartitionNotAssigned(PartitionLost):
    """`pause`, `resume` or `seek` named a partition that the topic has and that is not assigned to this consumer now.

    `assigned` are those that are. Nothing was changed. Wait for `on_assigned`, or leave the partition to its owner."""

    def __init__(self, group: str, partitions: Sequence[int], assigned: Sequence[int]) -> None:
        super().__init__(group, partitions)
        self.assigned = tuple(assigned)

    def __str__(self) -> str:
        names, here = (", ".join(map(str, numbers)) for numbers in (self.partitions, self.assigned))
        return (
            f"group {self.group}: partition {names} is not assigned to this consumer now; "
            f"it has {here or 'none'}; nothing was changed"
        )

    def __reduce__(self) -> tuple[type[PartitionNotAssigned], tuple[str, tuple[int, ...], tuple[int, ...]]]:  # type: ignore[override]
        return type(self), (self.group, self.partitions, self.assigned)


class ConsumerBusy(GroupError):
    """A thread asked a consumer for messages while another thread, `thread`, reads from it or still has its messages.

    Nothing was handed out, and nothing counts as done. Read from one thread, or make a consumer for each; or use
    ack="manual", which lets threads take turns."""

    def __init__(self, group: str, thread: str, what: str) -> None:
        self.group, self.thread, self.what = group, thread, what
        super().__init__(f"group {group}: thread {thread!r} {what}")

    def __reduce__(self) -> tuple[type[ConsumerBusy], tuple[str, str, str]]:
        return type(self), (self.group, self.thread, self.what)


class CheckpointOutOfRange(GroupError):
    """A checkpoint lies beyond the log's end, or before its start and the group does not skip. Reset the group."""


class PartitionsPaused(GroupError):
    """All is read up to the end, but for partitions that a message holds up. Decide with `pxrs group retry` or `skip`,
    then read on."""

    def __init__(self, group: str, partitions: Sequence[int]) -> None:
        self.group, self.partitions = group, tuple(partitions)
        names = ", ".join(map(str, self.partitions))
        super().__init__(
            f"group {group}: a message that could not be handled holds up partition {names}, short of the end; see "
            f"`pxrs group describe {group}`, then `pxrs group retry` or `skip`"
        )

    def __reduce__(self) -> tuple[type[PartitionsPaused], tuple[str, tuple[int, ...]]]:
        return type(self), (self.group, self.partitions)


class HandlerFailed(GroupError):
    """A handler raised, and the group's `on_error` is "raise". Its exception is the cause."""


class QueueError(PxrsError):
    """The base of every error of work queues."""


class UnknownQueue(QueueError, KeyError):
    """There is no such queue, or no more. Create it, or correct the name; `choices` are those that exist."""

    def __init__(self, queue: str, choices: Sequence[str] = ()) -> None:
        self.queue, self.choices = queue, tuple(choices)
        super().__init__(queue, self.choices)

    def __str__(self) -> str:
        known = f"; there are {', '.join(self.choices[:10])}" if self.choices else ""
        return f"no queue {self.queue!r}{known}; create it with create_queue or `pxrs queue create`"


class QueueExists(QueueError):
    """A queue of this name is there already. Use it, or choose another name."""


class QueueDiffers(QueueExists):
    """`create_queue(exist_ok=True)` found a queue of this name that has other settings. Nothing was changed. Ask for
    the settings that the queue has, or choose another name.

    `differences` names each argument that differs: the queue's value, then the value that was asked for."""

    def __init__(self, queue: str, differences: Mapping[str, tuple[object, object]]) -> None:
        self.queue, self.differences = queue, dict(differences)
        super().__init__(_differing(f"queue {queue!r}", self.differences))

    def __reduce__(self) -> tuple[type[QueueDiffers], tuple[str, dict[str, tuple[object, object]]]]:
        return type(self), (self.queue, self.differences)


class InvalidQueue(QueueError, InvalidArgument):
    """A queue's name or setting is not allowed; the message says which and what is."""


class InvalidItem(QueueError, InvalidArgument):
    """An item cannot be put as it is: its type, its size, its priority or delay. Nothing was put."""


class DrainLimitReached(QueueError):
    """`pxrs.testing.drain_queue` has made as many deliveries as it may, and the queue has an item that can be taken.

    Look for a handler that puts an item for each one that it takes, or that fails every time on an item which comes
    back at once; the last exception, if there was one, is the cause. Give a larger `deliveries_max` if so many are
    meant."""

    def __init__(self, queue: str, deliveries: int, failures: int) -> None:
        self.queue, self.deliveries, self.failures = queue, deliveries, failures
        super().__init__(
            f"queue {queue} still has an item that can be taken after {deliveries:,} deliveries, of which {failures:,} "
            "failed: does the handler put an item for each one, or fail on one that comes back at once? "
            "deliveries_max allows more"
        )

    def __reduce__(self) -> tuple[type[DrainLimitReached], tuple[str, int, int]]:
        return type(self), (self.queue, self.deliveries, self.failures)


class TransactionTooLarge(QueueError, ValueError):
    """A transaction takes and puts more than the store changes at once. What it had before this call, it still has."""


class TransactionEnded(QueueError):
    """The transaction was committed or rolled back before this call. Begin another one."""


class TransactionLost(QueueError):
    """The commit was refused, because this process lost its lease or the queue was deleted; nothing of it happened.

    The items that it had taken, `items` by their ids, are given to others, or were."""

    def __init__(self, items: Sequence[str], reason: str) -> None:
        self.items, self.reason = tuple(items), reason
        super().__init__(
            f"the transaction with {counted(len(self.items), 'taken item')} was refused and rolled back: {reason}; "
            "others get its items"
        )

    def __reduce__(self) -> tuple[type[TransactionLost], tuple[tuple[str, ...], str]]:
        return type(self), (self.items, self.reason)


class SparkError(PxrsError):
    """The base of every error of the Spark source, sink and pipelines."""


class InvalidOption(SparkError, ValueError):
    """An option of the Spark source or sink is unknown, missing, or has a value that is none. `option` names it."""

    def __init__(self, option: str, what: str) -> None:
        self.option, self.what = option, what
        super().__init__(f"option {option}: {what}")

    def __reduce__(self) -> tuple[type[InvalidOption], tuple[str, str]]:
        return type(self), (self.option, self.what)


class DataLost(SparkError):
    """Retention removed messages before the query read them: the offsets from `start` up to `end`.

    Accept it with the option failOnDataLoss=false: the query then goes on behind them, and says so in its log. `why`
    says for what the query needs messages that it had read once, before a restart."""

    def __init__(self, place: str, start: int, end: int, why: str = "") -> None:
        self.place, self.start, self.end, self.why = place, start, end, why
        super().__init__(
            f"{place}: the offsets {start} to {end - 1} ({counted(end - start, 'message')}) were removed by retention "
            + (f"and must be read again: {why}" if why else "before they were read")
            + "; set failOnDataLoss=false to go on behind them"
        )

    def __reduce__(self) -> tuple[type[DataLost], tuple[str, int, int, str]]:
        return type(self), (self.place, self.start, self.end, self.why)


class CheckpointsDiffer(SparkError):
    """Spark's checkpoint and the group's tell of different work, and neither can be believed without a word from you.

    Start the query with a new checkpoint location, and leave the group as it is. To reset the group to the offsets that
    the message names is only for a sink that takes any batch: neither a topic nor files."""


class BatchRefused(SparkError):
    """A micro-batch was not published: one with a higher number was before it, or its input was another one's.

    An old checkpoint location was restored, or two queries write under one. Start with a new location."""


class WrongMachine(SparkError):
    """An executor runs on another machine than the driver, where the hub's directory is not. Put a server before it."""


class InvalidPipeline(SparkError, ValueError):
    """A pipeline cannot be run as it is written, or not at this place. Nothing was started; correct the file."""


class PipelineFailed(SparkError):
    """A running pipeline ended with an error, or Spark did. Mend that and run it again: it goes on where it was."""


class SharedState(SparkError):
    """A query that keeps state was to share its group: partitions would move to others, and their state would not.

    Give the query a group of its own."""
