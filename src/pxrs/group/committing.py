"""How a member writes the checkpoints of what it owns: commits, releases, pauses, and what it concludes from an
outcome.

Rules, each with a mutation of the simulator that fails without it:
- A checkpoint is written only together with the owner key's version at which this member claimed, and its own (G4): see
  `group/checkpoints.py`.
- The last checkpoint and the release are one commit, with a new epoch (G5, X9).
- A reply that was lost leaves the version of the checkpoint unknown: it is read again before the next write, and
  nothing is concluded from not seeing what was sent (R5).
- A pause is written at most once, in one commit with a checkpoint that names the failure: see `pause`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

from pxrs.errors import Conflict, OutcomeUnknown, PartitionLost, RegistryUnavailable
from pxrs.group.checkpoints import FencedWrite, Outcome
from pxrs.group.incarnation import RELEASED, TAKEN, Incarnation
from pxrs.group.records import Checkpoint, Paused
from pxrs.metrics.instruments import CONSUMER_COMMITS
from pxrs.registry.contract import ABSENT, Entry
from pxrs.registry.steps import Get, Steps, Write

PAUSE_ATTEMPTS_MAX: Final = 10
_COUNTED_AS: Final = {
    Outcome.WRITTEN: "written",
    Outcome.LOST: "refused",
    Outcome.STALE: "changed",
    Outcome.NOT_WRITTEN: "changed",  # together with one that was refused or changed
    Outcome.UNKNOWN: "unknown",
}
"""The label `outcome` of the metric `pxrs.consumer.commits`."""

CommitMore = Callable[[Mapping[str, int], Mapping[str, bytes]], dict[str, int]]
"""Makes one registry commit of these expectations and writes, and of more of its own. Returns the new versions."""
T = TypeVar("T")


class Committing(Incarnation):
    def lose(self, partition: int, reason: str = TAKEN) -> None:
        holding = self.held.pop(partition)
        lane = holding.lane
        lane.has_undone, lane.lost_reason = lane.position > holding.checkpoint.offset, reason
        lane.is_stopping = lane.is_lost = True
        self.hooks.lost(lane)

    def lose_all(self, reason: str) -> None:
        """Nothing here is owned any more, or may be: the lease is gone, or this member has left."""
        for partition in list(self.held):
            self.lose(partition, reason)

    def due(self) -> list[int]:
        """The partitions whose checkpoint is behind what is done."""
        holdings = list(self.held.items())  # at once: a thread that could not get the mutex in time reads it too
        return [number for number, holding in holdings if holding.lane.done > holding.checkpoint.offset]

    def is_in_doubt(self, partitions: Iterable[int]) -> bool:
        """Whether a checkpoint of any of these was sent without an answer, and may have been written."""
        holdings = dict(self.held)
        return any(number in holdings and holdings[number].checkpoint_version is None for number in partitions)

    def commit(self, partitions: Iterable[int], *, is_last: bool = False) -> Steps[list[int]]:
        """Write the checkpoints of what is done; with `is_last` release the partitions in the same commit (G5).

        The partitions that turned out to be lost."""
        lost: list[int] = []
        for some in in_parts(list(partitions), self.keys_max // 2):
            lost += yield from self._commit_some([number for number in some if number in self.held], is_last)
        return lost

    def _commit_some(self, partitions: list[int], is_last: bool) -> Steps[list[int]]:
        lost: list[int] = []
        refused: list[int] = []
        while partitions:
            for number in partitions:
                if self.held[number].checkpoint_version is None and not (yield from self.read_again(number)):
                    lost.append(number)
            done = self._written_by_others(refused)
            partitions = [number for number in partitions if number in self.held and number not in done]
            if not partitions:
                break
            write = self.checkpoint_write(partitions, is_last=is_last)
            try:
                versions = yield Write(write.expect, write.put, is_leased=False, is_quiet=not is_last)
            except Conflict as conflict:
                lost += self._settle(write, conflict)
                partitions = [number for number in partitions if number in self.held]
                refused = [] if is_last else partitions
                continue
            except OutcomeUnknown as unknown:
                self._settle(write, unknown)
                raise
            self._settle(write, versions)
            if is_last:
                self._release(partitions)
            break
        return lost

    def _written_by_others(self, refused: list[int]) -> set[int]:
        """Which of these partitions, whose checkpoints were found changed, need not be written any more: Spark's
        sink writes checkpoints too, in its own commits.

        A partition of which a release may still be applied is written in any case: that changes the version which the
        release expects (R5)."""
        due = set(self.due()) if refused else set()
        held = {number: self.held[number] for number in refused if number in self.held}
        return {number for number, holding in held.items() if number not in due and not holding.may_be_released}

    def _release(self, partitions: list[int]) -> None:
        """The registry has confirmed the release: these are not owned any more."""
        for number in partitions:
            holding = self.held.pop(number)
            place = self.place(number)
            is_stored = self.reports.is_stored(place, holding.epoch)
            self.reports.owner_changed("released", place, holding.owner, holding.released(is_stored=is_stored))
            # Compare with the checkpoint that was written: more may have been done since, which the next owner will do
            # again.
            holding.lane.has_undone = holding.lane.handed > holding.checkpoint.offset
            holding.lane.lost_reason = RELEASED
            holding.lane.is_stopping = holding.lane.is_lost = True
            self.hooks.released(holding.lane)

    def commit_with(self, partitions: list[int], write: CommitMore) -> Steps[dict[str, int]]:
        """The checkpoints of what is done, fenced as ever, in a commit that `write` makes of them and of more.

        Raises PartitionLost if any of it is owned no more, and what `write` raises."""
        for number in partitions:
            if self.held[number].checkpoint_version is None and not (yield from self.read_again(number)):
                raise PartitionLost(self.keys.group, self.named([number]), TAKEN)
        planned = self.checkpoint_write(partitions)
        try:
            versions = write(planned.expect, planned.put)
        except Conflict as conflict:
            if lost := self._settle(planned, conflict):
                raise PartitionLost(self.keys.group, self.named(lost), TAKEN) from conflict
            raise
        except OutcomeUnknown as unknown:
            self._settle(planned, unknown)
            raise
        self._settle(planned, versions)
        return versions

    def pause(self, partition: int, paused: Paused) -> Steps[bool]:
        """Write that a message could not be handled. False if the partition turned out to be lost.

        The pause is written in one commit with a checkpoint that names the failure. If the reply is lost, call this
        again: the checkpoint then tells whether the first write landed. If it has not, it never will once this one is
        written, as both expect the same version of the checkpoint. So an administrator who has removed the pause in
        between, to have the message tried again, does not see it come back."""
        key = self.keys.pause(*self.place(partition))
        for _ in range(PAUSE_ATTEMPTS_MAX):
            holding = self.held.get(partition)
            if holding is None:
                return False
            if holding.checkpoint_version is None and not (yield from self.read_again(partition)):
                return False
            if holding.checkpoint.failure == paused.failure:
                return True
            there: Entry | None = yield Get(key)
            if there is not None and Paused.load(key, there.value).offset == paused.offset:
                return True  # it stands already, and an administrator may have decided on it
            planned = self.checkpoint_write([partition], failure=paused.failure)
            expect = {**planned.expect, key: ABSENT if there is None else there.version}
            try:
                versions = yield Write(expect, {**planned.put, key: paused.dump()}, is_leased=False)
            except Conflict as conflict:
                self._settle(planned, conflict)
                continue
            except OutcomeUnknown as unknown:
                self._settle(planned, unknown)
                raise
            self._settle(planned, versions)
            return True
        raise RegistryUnavailable(f"{key} was changed by other processes {PAUSE_ATTEMPTS_MAX} times; try again")

    def checkpoint_write(
        self, partitions: Iterable[int], *, is_last: bool = False, failure: str | None = None
    ) -> FencedWrite:
        """The checkpoints of what is done, as a value: see `Holding.write`. Their versions must be known."""
        when, name = self.wall(), self.member.name
        return FencedWrite(
            [
                self.held[number].write(
                    self.keys,
                    self.place(number),
                    when,
                    name,
                    is_last=is_last,
                    failure=failure,
                    is_stored=is_last and self.reports.is_stored(self.place(number), self.held[number].epoch),
                )
                for number in partitions
            ]
        )

    def _settle(self, write: FencedWrite, outcome: Mapping[str, int] | Conflict | OutcomeUnknown) -> list[int]:
        """Note what a commit of this write has returned or raised. The partitions that turned out to be lost."""
        lost = []
        for part, settled in write.settle(outcome):
            number = self.numbering.number_of(*part.partition)
            assert number is not None, "the write is of partitions that this member holds"
            self.held[number].settle(part, settled)
            CONSUMER_COMMITS.of(self.keys.group, _COUNTED_AS[settled.outcome]).add()
            if settled.outcome is Outcome.LOST:
                self.reports.checkpoint_refused(self.held[number].lane)
                self.lose(number)
                lost.append(number)
        return lost

    def read_again(self, partition: int) -> Steps[bool]:
        """Read a checkpoint and its version again, because a write of this member may have been applied late. False if
        the partition turned out to be lost."""
        holding = self.held[partition]
        place = self.place(partition)
        owner: Entry | None = yield Get(self.keys.owner(*place))
        if owner is None or owner.version != holding.version:
            self.lose(partition)
            return False
        entry: Entry | None = yield Get(self.keys.checkpoint(*place))
        if entry is None:
            self.lose(partition)
            return False
        holding.checkpoint, holding.checkpoint_version = Checkpoint.load(entry.key, entry.value), entry.version
        return True


def in_parts(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """The items in parts of at most this size."""
    return [items[at : at + size] for at in range(0, len(items), size)]
