"""The fenced checkpoint: the one form in which a group's checkpoints are written, whoever writes them.

A checkpoint says which message of a partition the group reads next. A process that has lost the partition must not
write it, also if its write was sent before and arrives late. So every write of a checkpoint

- expects the version of the partition's owner key. That version changes with each claim, release, fence and reset, so
  the write is refused if the partition was owned by anybody else since (X9);
- expects the version of the checkpoint key itself. Otherwise a write whose reply was lost could be applied after a
  later write of the same owner, and set the checkpoint back (G4).

A release and a reset also write the owner key, in the same commit (G5): nobody can own the partition before its last
checkpoint is there, and no write of the former owner is accepted after it.

`CheckpointWrite` is such a write of one partition, and `FencedWrite` is several of them, all or nothing. They are
values: what they expect, put and delete goes into a registry commit, alone or with keys of the caller's. They are used
by the members' commits and releases (`group/protocol.py`), by `Transaction.checkpoint` of the work queues, by the
administrator's resets, imports and deletions (`group/admin.py`), by transactions of the user's own database
(`consumer/transactions.py`), and by the manifests of published batches (`publishing/manifest.py`).

What the outcome of that commit means for each partition is `FencedWrite.settle`, and no caller decides it anew:

    commit             keys that differed       Outcome        still owned?    the checkpoint's version
    ---------------    ---------------------    -----------    ------------    ----------------------------------------
    done               -                        WRITTEN        yes (*)         as the registry returned it
    Conflict           the owner key            LOST           no              not needed any more
    Conflict           the checkpoint key       STALE          yes             unknown: an earlier write of this owner
                                                                               was applied late; read it again
    Conflict           keys of others only      NOT_WRITTEN    yes             as before
    OutcomeUnknown     -                        UNKNOWN        as before (*)   unknown: read it again before the next
                                                                               write, which then refuses this one (R5)

(*) If the write puts the owner key too, the partition is not owned any more, or may not be.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pxrs.errors import Conflict, OutcomeUnknown
from pxrs.group.lane import Lane
from pxrs.group.records import BY_HAND, NOBODY, Checkpoint, Keys, Owner
from pxrs.log.numbering import TopicPartition


class Outcome(enum.Enum):
    """What became of one partition's part of a commit: see the table at the head of this module."""

    WRITTEN = "written"
    LOST = "lost"
    STALE = "stale"
    NOT_WRITTEN = "not written"
    UNKNOWN = "unknown"


class Settled(NamedTuple):
    outcome: Outcome
    version: int | None
    """The version of the checkpoint key. None if it is not known, or if the key was deleted."""


@dataclass(frozen=True, slots=True)
class CheckpointWrite:
    """One partition's checkpoint, and what must be true for it to be written."""

    keys: Keys
    partition: TopicPartition
    owner_version: int
    """Expected: of the owner key when the writer claimed the partition, or read the key."""
    checkpoint_version: int
    """Expected: of the checkpoint key as the writer has read or written it last."""
    checkpoint: Checkpoint | None
    """None deletes the checkpoint: the group is being deleted."""
    owner: Owner | None = None
    """Written to the owner key in the same commit: a release or a reset. None leaves the owner key as it is."""

    @property
    def owner_key(self) -> str:
        return self.keys.owner(*self.partition)

    @property
    def checkpoint_key(self) -> str:
        return self.keys.checkpoint(*self.partition)

    @property
    def expect(self) -> dict[str, int]:
        return {self.owner_key: self.owner_version, self.checkpoint_key: self.checkpoint_version}

    @property
    def put(self) -> dict[str, bytes]:
        put = {} if self.checkpoint is None else {self.checkpoint_key: self.checkpoint.dump()}
        if self.owner is not None:
            put[self.owner_key] = self.owner.dump()
        return put

    @property
    def delete(self) -> list[str]:
        return [self.checkpoint_key] if self.checkpoint is None else []


@dataclass(frozen=True, slots=True)
class FencedWrite:
    """Checkpoints of several partitions, written together or not at all."""

    parts: Sequence[CheckpointWrite]

    @property
    def expect(self) -> dict[str, int]:
        return {key: version for part in self.parts for key, version in part.expect.items()}

    @property
    def put(self) -> dict[str, bytes]:
        return {key: value for part in self.parts for key, value in part.put.items()}

    @property
    def delete(self) -> list[str]:
        return [key for part in self.parts for key in part.delete]

    def settle(self, outcome: Mapping[str, int] | Conflict | OutcomeUnknown) -> list[tuple[CheckpointWrite, Settled]]:
        """What became of each part.

        outcome: what the commit with this write in it has returned, or raised."""
        return [(part, _settle(part, outcome)) for part in self.parts]

    def lost(self, conflict: Conflict) -> list[CheckpointWrite]:
        """The parts whose partition is not the writer's any more."""
        return [part for part, settled in self.settle(conflict) if settled.outcome is Outcome.LOST]


def _settle(part: CheckpointWrite, outcome: Mapping[str, int] | Conflict | OutcomeUnknown) -> Settled:
    if isinstance(outcome, OutcomeUnknown):
        return Settled(Outcome.UNKNOWN, None)
    if not isinstance(outcome, Conflict):
        return Settled(Outcome.WRITTEN, None if part.checkpoint is None else outcome[part.checkpoint_key])
    if part.owner_key in outcome.keys:
        return Settled(Outcome.LOST, None)
    if part.checkpoint_key in outcome.keys:
        return Settled(Outcome.STALE, None)
    return Settled(Outcome.NOT_WRITTEN, part.checkpoint_version)


@dataclass(slots=True)
class Holding:
    """A partition that a member owns: what the member has to expect when it writes the partition's checkpoint."""

    epoch: int
    version: int
    """The version of the owner key as the claim wrote it: the fence."""
    checkpoint: Checkpoint
    """The checkpoint as it was last read from the registry or confirmed by it."""
    checkpoint_version: int | None
    """None after `STALE` or `UNKNOWN`: the checkpoint has to be read again before it can be written."""
    lane: Lane
    is_revoking: bool = False
    """The partition is to be released when nothing of it is in hand any more."""
    may_be_released: bool = False
    """A release was sent and its reply lost: it may still be applied."""
    owner: Owner = NOBODY
    """The owner key as the claim wrote it."""

    def write(
        self,
        keys: Keys,
        place: TopicPartition,
        when: float,
        by: str,
        *,
        is_last: bool = False,
        failure: str | None = None,
        is_stored: bool = False,
    ) -> CheckpointWrite:
        """The checkpoint of what is done. `checkpoint_version` must be known.

        place:   the partition as its keys name it.
        is_last: release the partition in the same commit.
        failure: the id of a pause that the same commit writes; by default that of the last one stays.
        is_stored: see `Owner.history`; of a release."""
        if self.checkpoint_version is None:
            raise ValueError(f"the version of the checkpoint of {place[0]}/{place[1]} is not known")
        offset = max(self.lane.done, self.checkpoint.offset)
        # A checkpoint that a person has set stays as it is until this owner comes further: when it was set, and that it
        # was, decides where a streaming query goes on (`publishing/planning.py`).
        is_set = offset == self.checkpoint.offset and self.checkpoint.by in BY_HAND
        new = Checkpoint(offset, when, by, self.epoch, self.checkpoint.failure)
        checkpoint = self.checkpoint if is_set else new
        if failure is not None:
            checkpoint = replace(checkpoint, failure=failure)
        return CheckpointWrite(
            keys,
            place,
            self.version,
            self.checkpoint_version,
            checkpoint,
            self.released(is_stored=is_stored) if is_last else None,
        )

    def released(self, *, is_stored: bool) -> Owner:
        """The owner key as a release writes it."""
        return Owner(None, self.epoch + 1, past=self.owner.history(is_stored=is_stored))

    def settle(self, write: CheckpointWrite, settled: Settled) -> None:
        """Note what is known since a write of this partition has ended. A loss is the caller's to deal with."""
        match settled.outcome:
            case Outcome.WRITTEN:
                assert write.checkpoint is not None
                self.checkpoint, self.checkpoint_version = write.checkpoint, settled.version
                self.may_be_released = False
            case Outcome.STALE:
                self.checkpoint_version = None
            case Outcome.UNKNOWN:
                self.checkpoint_version = None
                self.may_be_released |= write.owner is not None
            case Outcome.LOST | Outcome.NOT_WRITTEN:
                pass
