"""Errors of consumer groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pxrs.errors.general import InvalidArgument, PxrsError
from pxrs.errors.registry import OutcomeUnknown, RegistryUnavailable
from pxrs.wording import command

Partition = int | tuple[str, int]
"""The number of a partition; or, for a member that reads several topics, a `pxrs.TopicPartition`."""


class GroupError(PxrsError):
    """The base of every error of consumer groups."""

    code = "group"


class InvalidGroup(GroupError, InvalidArgument):
    """The name or a setting of a group is invalid; the message says which, and what is allowed."""

    code = "group.invalid"


class UnknownGroup(GroupError, KeyError):
    """No group of this name exists: no consumer has joined it. Correct the name; `pxrs group list` shows the existing
    groups."""

    code = "group.unknown"

    def __init__(self, group: str) -> None:
        self.group = group
        super().__init__(f"no group {self.group!r}; see `pxrs group list`")


class GroupActive(GroupError):
    """The group has members, and the call would change what they work on. Stop them first, or use `force` where the
    call has it."""

    code = "group.active"


class AssignorMismatch(GroupActive):
    """This member has another assignor than the current members of its group, so it did not join: the leader of a group
    assigns the partitions for all members. `others` maps the names of the other members to their assignors.

    Use the same assignor. To change the assignor of the group, stop all its members before you start the new ones; a
    killed member counts until its lease has ended."""

    code = "group.assignor-mismatch"

    def __init__(self, group: str, assignor: str, others: Mapping[str, str]) -> None:
        self.group, self.assignor, self.others = group, assignor, dict(others)
        shown = [f"{name} has {theirs!r}" for name, theirs in sorted(self.others.items())]
        more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
        super().__init__(
            f"group {group}: this member has the assignor {assignor!r}, but {', '.join(shown[:3])}{more}, and all "
            "members of a group must have the same one. Use theirs (assignor=, --assignor), or stop them before you "
            "start this member; a killed member counts until its lease has ended"
        )


class AssignorFailed(GroupError):
    """An assignor raised an exception, or did not assign each partition to one current member. The leader that called
    it wrote no assignment and leaves the group, and so does every later leader.

    Fix the package that provides the assignor, or use another assignor for all members."""

    code = "group.assignor-failed"

    def __init__(self, assignor: str, reason: str) -> None:
        self.assignor, self.reason = assignor, reason
        super().__init__(f"the assignor {assignor!r} failed: {reason}; fix it, or use another assignor for all members")


class GroupElsewhere(GroupError):
    """The group of this name in this registry reads the topics of another hub: its members would not share the work
    with this one. Use another name, or another registry or namespace; or delete the group with `pxrs group delete`."""

    code = "group.elsewhere"

    def __init__(self, group: str, theirs: str, ours: str) -> None:
        self.group, self.theirs, self.ours = group, theirs, ours
        super().__init__(
            f"group {group} in this registry reads the hub at {theirs}, but this hub is at {ours}: use another group "
            f"name, registry or namespace. If the group is no longer needed there, run `pxrs group delete {group}`; if "
            "this is the same hub and its file hub.record was lost, run `pxrs registry adopt`"
        )


class IdentityChanged(GroupError):
    """The group has checkpoints of this table under another id, `former`, than the one that the table has now, under
    which the group would start from the beginning. Nothing was written; the message says what to do."""

    code = "group.identity-changed"

    def __init__(self, group: str, source: str, id: str, former: str, address: str = "") -> None:
        self.group, self.source, self.id, self.former, self.address = group, source, id, former, address
        spelled = f", from when its address was {address}" if address else ""
        super().__init__(
            f"group {group} has checkpoints of {source} under the id {former}{spelled}, but at its current address the "
            f"table has the id {id}, under which the group would start from the beginning. To continue where the group "
            f"was, keep the former id with `pxrs source add {source} --id {former} ...` or sql_table(..., "
            f"id={former!r}); to start over, use another group, or remove the group's checkpoints under the former id "
            f"with `pxrs group delete {group} --topic {former}`"
        )


class SourceChanged(GroupError):
    """The group has checkpoints of this source that were written for other partitions or columns, so they would refer
    to other rows now. They are stored under the id `former_id`. Nothing was written. Read the source with the former
    settings or in another group, or delete those checkpoints."""

    code = "group.source-changed"

    def __init__(self, group: str, source: str, former: str, now: str, former_id: str) -> None:
        self.group, self.source, self.former, self.now, self.former_id = group, source, former, now, former_id
        super().__init__(
            f"group {group} has checkpoints of {source} with {former}, but it is now read with {now}: the checkpoints "
            "would refer to other rows. Use the former settings; or, to start over or from an imported checkpoint, use "
            f"another group, or remove these checkpoints with `pxrs group delete {group} --topic {former_id}`"
        )


class PartitionLost(GroupError):
    """This member no longer owns the partitions: another member owns them, or will. Nothing was written.

    Messages handled since the last checkpoint will be handled again by the new owner. `reason` says how the partitions
    were lost, and `advice`, if not empty, what to do, as for a streaming query of Spark."""

    code = "group.partition-lost"

    def __init__(self, group: str, partitions: Sequence[Partition], reason: str = "", advice: str = "") -> None:
        self.group, self.partitions, self.reason, self.advice = group, tuple(partitions), reason, advice
        because, then = f": {reason}" if reason else "", f". {advice}" if advice else ""
        super().__init__(f"group {group}: this member has lost {name_partitions(self.partitions)}{because}{then}")


class CommitUnknown(GroupError, OutcomeUnknown):
    """The checkpoints of `partitions` may have been written, or may still be written: the registry did not answer in
    time.

    The member still owns the partitions and writes their checkpoints again about once a second, so continue to read, or
    call `commit` again to find out. After `close` the next owner starts at whichever checkpoint was written: messages
    handled since the last confirmed one may be handled again."""

    code = "group.commit-unknown"

    def __init__(self, group: str, partitions: Sequence[Partition], reason: str) -> None:
        self.group, self.partitions, self.reason = group, tuple(partitions), reason
        super().__init__(
            f"group {group}: the checkpoint of {name_partitions(self.partitions)} may or may not have been written: "
            f"{reason}"
        )


class GroupUnavailable(GroupError, RegistryUnavailable):
    """The registry could not be reached in time; `what` says what was not done.

    From `commit`: the checkpoints of `partitions` were not written; the member tries again about once a second. From
    `close`: they were not written and the partitions were not released; other members claim them when this member's
    lease has ended. From `hub.consumer`: this process has not joined and owns nothing; try again later."""

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
    """`pause`, `resume` or `seek` named a partition of the topic that is not assigned to this consumer.

    `assigned` has the partitions that are. Nothing was changed. Wait for `on_assigned`, or leave the partition to its
    owner."""

    code = "group.partition-not-assigned"

    def __init__(self, group: str, partitions: Sequence[Partition], assigned: Sequence[Partition]) -> None:
        super().__init__(group, partitions)
        self.assigned = tuple(assigned)
        names, here = _listed(self.partitions), _listed(self.assigned)
        GroupError.__init__(  # replaces the text that PartitionLost has made
            self,
            f"group {group}: partition {names} is not assigned to this consumer (assigned: {here or 'none'}); nothing "
            "was changed",
        )


class ConsumerBusy(GroupError):
    """A thread asked a consumer for messages while another thread, `thread`, reads from it or still has its messages.

    Nothing was handed out, and no message was marked as done. Read from one thread, or open a consumer for each; or use
    ack="manual", which lets threads take turns."""

    code = "group.consumer-busy"

    def __init__(self, group: str, thread: str, what: str) -> None:
        self.group, self.thread, self.what = group, thread, what
        super().__init__(f"group {group}: thread {thread!r} {what}")


class CheckpointOutOfRange(GroupError):
    """A checkpoint is beyond the log's end, or before its start without on_trimmed="skip". Reset the group."""

    code = "group.checkpoint-out-of-range"


class PartitionsPaused(GroupError):
    """Every partition was read to its end, except those that are paused because a message could not be handled. Run
    `pxrs group retry` or `pxrs group skip` for each, then continue to read: `advice` has the whole commands."""

    code = "group.partitions-paused"

    def __init__(self, group: str, partitions: Sequence[Partition], advice: str = "") -> None:
        self.group, self.partitions = group, tuple(partitions)
        self.advice = advice or f"`{command('group', 'describe', group)}` shows how to continue"
        names = _listed(self.partitions)
        super().__init__(
            f"group {group}: partition {names} is paused before its end by a message that could not be handled; "
            f"{self.advice}"
        )


class HandlerFailed(GroupError):
    """A handler raised, and the group's `on_error` is "raise". Its exception is the cause."""

    code = "group.handler-failed"
