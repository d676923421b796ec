"""Errors of consumer groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pxrs.errors.general import InvalidArgument, PxrsError
from pxrs.errors.registry import OutcomeUnknown, RegistryUnavailable
from pxrs.wording import command

Partition = int | tuple[str, int]
"""The number of a partition; or, for a member that was made to read several topics, a `pxrs.TopicPartition`."""


class GroupError(PxrsError):
    """The base of every error of consumer groups."""

    code = "group"


class InvalidGroup(GroupError, InvalidArgument):
    """A group's name or setting is not allowed; the message says which and what is."""

    code = "group.invalid"


class UnknownGroup(GroupError, KeyError):
    """Nobody has ever consumed under this name. Correct it; `pxrs group list` shows those that exist."""

    code = "group.unknown"

    def __init__(self, group: str) -> None:
        self.group = group
        super().__init__(f"no group {self.group!r}; see `pxrs group list`")


class GroupActive(GroupError):
    """The group has members, and what was asked would change their work under them. Stop them, or force it."""

    code = "group.active"


class AssignorMismatch(GroupActive):
    """This member has another assignor than the present members of its group, so it has not joined: the leader of a
    group assigns the partitions for all members. `others` has the assignors of the others by the members' names.

    Give it the same assignor. Or, to change that of the group, stop all its members, and then start the new ones; a
    member that was killed counts until its lease has ended."""

    code = "group.assignor-mismatch"

    def __init__(self, group: str, assignor: str, others: Mapping[str, str]) -> None:
        self.group, self.assignor, self.others = group, assignor, dict(others)
        shown = [f"{name} has {theirs!r}" for name, theirs in sorted(self.others.items())]
        more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
        super().__init__(
            f"group {group}: this member has the assignor {assignor!r}, but {', '.join(shown[:3])}{more}, and all "
            "members of a group must have the same one. Give it theirs (assignor=, --assignor), or stop them before "
            "this member is started; one that was killed counts until its lease has ended"
        )


class AssignorFailed(GroupError):
    """An assignor raised, or did not assign each partition to one member that is there. The leader that has called it
    has written no assignment and leaves the group, and so does every member that leads after it.

    Correct the package that brings the assignor, or give all members another one."""

    code = "group.assignor-failed"

    def __init__(self, assignor: str, reason: str) -> None:
        self.assignor, self.reason = assignor, reason
        super().__init__(f"the assignor {assignor!r} failed: {reason}; correct it, or give all members another one")


class GroupElsewhere(GroupError):
    """The group of this name in this registry reads the topics of another hub: its members would not share the work
    with this one. Use another name, or another registry or namespace; or forget the group with `pxrs group delete`."""

    code = "group.elsewhere"

    def __init__(self, group: str, theirs: str, ours: str) -> None:
        self.group, self.theirs, self.ours = group, theirs, ours
        super().__init__(
            f"group {group} of this registry reads the hub at {theirs}, and this one is at {ours}: use another group "
            f"name, another registry or a namespace of it. If the group is needed there no more, run "
            f"`pxrs group delete {group}`; if this is the same hub, and its file hub.record was lost, run "
            "`pxrs registry adopt`"
        )


class IdentityChanged(GroupError):
    """The group reads this table under another id, `former`, than the one that the table has now: under that it would
    start again from the beginning. Nothing was written; the message says how to go on."""

    code = "group.identity-changed"

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


class SourceChanged(GroupError):
    """The group has checkpoints of this source that were written for other partitions or columns, so they would not
    mean the same rows now. They are kept under the id `former_id`. Nothing was written. Read the source with the former
    settings, or in another group, or have the group forget those checkpoints."""

    code = "group.source-changed"

    def __init__(self, group: str, source: str, former: str, now: str, former_id: str) -> None:
        self.group, self.source, self.former, self.now, self.former_id = group, source, former, now, former_id
        super().__init__(
            f"group {group} has checkpoints of {source} with {former}, and it is read with {now} now: a checkpoint "
            "would not mean the same rows. Read it with the former settings; or, to start anew or from an imported "
            "checkpoint, use another group, or remove these checkpoints with "
            f"`pxrs group delete {group} --topic {former_id}`"
        )


class PartitionLost(GroupError):
    """This member does not own the partitions any more: another member owns them, or will. Nothing was written.

    What was handled since the last checkpoint will be handled again by the new owner. `reason` says how it was lost,
    `advice` what to do where that is not plain, as for a streaming query of Spark."""

    code = "group.partition-lost"

    def __init__(self, group: str, partitions: Sequence[Partition], reason: str = "", advice: str = "") -> None:
        self.group, self.partitions, self.reason, self.advice = group, tuple(partitions), reason, advice
        because, then = f": {reason}" if reason else "", f". {advice}" if advice else ""
        super().__init__(f"group {group}: this member has lost {name_partitions(self.partitions)}{because}{then}")


class CommitUnknown(GroupError, OutcomeUnknown):
    """The checkpoints of `partitions` may have been written, or may still be: the registry did not answer in time.

    The partitions are not lost by this. A member that is still there writes their checkpoints again about once a
    second, so read on, or call `commit` again to know. After `close` the next owner begins at whichever was written:
    what was handled since the last confirmed checkpoint may be handled again."""

    code = "group.commit-unknown"

    def __init__(self, group: str, partitions: Sequence[Partition], reason: str) -> None:
        self.group, self.partitions, self.reason = group, tuple(partitions), reason
        super().__init__(
            f"group {group}: the checkpoint of {name_partitions(self.partitions)} may have been written: {reason}"
        )


class GroupUnavailable(GroupError, RegistryUnavailable):
    """The registry could not be reached in time, and what was asked of the group was not done: `what` says what.

    From `commit`: the checkpoints of `partitions` were not written; the member tries again about once a second. From
    `close`: they were not written and the partitions not released; others claim them when this member's lease has
    ended. From `hub.consumer`: this process has not joined and owns nothing; try again later."""

    code = "group.unavailable"

    def __init__(self, group: str, partitions: Sequence[Partition], what: str, reason: str) -> None:
        self.group, self.partitions, self.what, self.reason = group, tuple(partitions), what, reason
        super().__init__(f"group {group}: {what}: {reason}")


def name_partitions(partitions: Sequence[Partition]) -> str:
    """Partitions in a message."""
    if not partitions:
        return "its partitions"
    return f"partition{'s' if len(partitions) > 1 else ''} {_listed(partitions)}"


def _listed(partitions: Sequence[Partition]) -> str:
    return ", ".join(str(each) if isinstance(each, int) else f"{each[0]}/{each[1]}" for each in partitions)


class PartitionNotAssigned(PartitionLost):
    """`pause`, `resume` or `seek` named a partition that the topic has and that is not assigned to this consumer now.

    `assigned` are those that are. Nothing was changed. Wait for `on_assigned`, or leave the partition to its owner."""

    code = "group.partition-not-assigned"

    def __init__(self, group: str, partitions: Sequence[Partition], assigned: Sequence[Partition]) -> None:
        super().__init__(group, partitions)
        self.assigned = tuple(assigned)
        names, here = _listed(self.partitions), _listed(self.assigned)
        GroupError.__init__(  # replaces the text that PartitionLost has made
            self,
            f"group {group}: partition {names} is not assigned to this consumer now; it has {here or 'none'}; nothing "
            "was changed",
        )


class ConsumerBusy(GroupError):
    """A thread asked a consumer for messages while another thread, `thread`, reads from it or still has its messages.

    Nothing was handed out, and nothing counts as done. Read from one thread, or make a consumer for each; or use
    ack="manual", which lets threads take turns."""

    code = "group.consumer-busy"

    def __init__(self, group: str, thread: str, what: str) -> None:
        self.group, self.thread, self.what = group, thread, what
        super().__init__(f"group {group}: thread {thread!r} {what}")


class CheckpointOutOfRange(GroupError):
    """A checkpoint lies beyond the log's end, or before its start and the group does not skip. Reset the group."""

    code = "group.checkpoint-out-of-range"


class PartitionsPaused(GroupError):
    """Every partition was read up to its end, except those that are paused because a message could not be handled.
    Decide with `pxrs group retry` or `skip`, then read on. `advice` has the whole commands."""

    code = "group.partitions-paused"

    def __init__(self, group: str, partitions: Sequence[Partition], advice: str = "") -> None:
        self.group, self.partitions = group, tuple(partitions)
        self.advice = advice or f"`{command('group', 'describe', group)}` shows how to continue"
        names = _listed(self.partitions)
        super().__init__(
            f"group {group}: a message that could not be handled holds up partition {names}, short of the end; "
            f"{self.advice}"
        )


class HandlerFailed(GroupError):
    """A handler raised, and the group's `on_error` is "raise". Its exception is the cause."""

    code = "group.handler-failed"
