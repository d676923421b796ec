"""The record of one partition that a consumer owns: which of its messages were handed out, and which are done.

The offsets fall into three ranges:

    before `done`                 done: the next checkpoint covers them
    from `done` to `position`     in hand: handed out, or being handed out right now
    from `position` on            not handed out

Which call moves a message from one range to another:

    call                          done            in hand             not handed out
    `position = end`                                                  before `end`: in hand
    `handed = end`                                (confirms that; `handed` is what users see as their position)
    `position = handed`                           back to not handed out, if the hand-out was not confirmed
    `finish()`                                    up to `handed`: done
    `ack(offset)`                                 done, once every offset before it is acknowledged too
    `put_back()`                                  not handed out
    `seek(offset)`                before `offset` is done, everything else is not handed out

Threads: the thread that hands out messages writes `position` and then reads `is_halted`. The member's thread sets
`is_halted` (by `is_stopping`) and then reads `position`. So at least one of the two sees the other's write, and no
message is handed out of a partition that is being released. Several threads may call `ack`, `seek` and `retract`; they
hold the consumer's lock (`Lanes.lock`) while they do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable


class Lane:
    """One partition from a claim to its release or loss. A later claim of the same partition makes another lane."""

    __slots__ = (
        "_acked",
        "_flags",
        "_is_paused",
        "_is_stopping",
        "_open",
        "done",
        "epoch",
        "handed",
        "handed_at",
        "has_undone",
        "incarnation",
        "is_failed",
        "is_halted",
        "is_lost",
        "lost_reason",
        "partition",
        "position",
        "seeks",
    )

    def __init__(self, partition: int, epoch: int, offset: int, incarnation: str | None = None) -> None:
        """incarnation: of the member that claimed the partition, for events; None if nobody asks for it."""
        self.partition, self.epoch, self.incarnation = partition, epoch, incarnation
        self.position = self.handed = self.done = offset
        self.seeks = 0
        """How often `seek` was called. `seek` raises it before it changes the offsets, so that a hand-out under way on
        another thread notices the call."""
        self.handed_at = 0.0
        """When the message in hand was handed out, on the registry's clock; 0 before the first one."""
        self._flags = threading.Lock()
        self._is_stopping = self._is_paused = False
        self.is_halted = False
        """`is_stopping` or `is_paused`: the one field that every hand-out reads."""
        self.is_lost = False
        """The member does not own the partition any more."""
        self.lost_reason = ""
        """Why the member does not own the partition any more; empty while it does."""
        self.has_undone = False
        """Set when the partition is lost or released: some of what was handed out is covered by no checkpoint."""
        self.is_failed = False
        """A handler failed on the message at `done`; the partition is paused until an administrator decides on it."""
        self._open: deque[int] = deque()
        """With ack="manual": offsets in hand, rising, from the first one that is not acknowledged."""
        self._acked: set[int] = set()
        """With ack="manual": offsets that are acknowledged although an earlier one is not."""

    @property
    def is_stopping(self) -> bool:
        """Nothing more may be handed out: the partition is being released, or is lost."""
        return self._is_stopping

    @is_stopping.setter
    def is_stopping(self, value: bool) -> None:
        with self._flags:
            self._is_stopping = value
            self.is_halted = value or self._is_paused

    @property
    def is_paused(self) -> bool:
        """Nothing may be handed out for now: the user has called `pause`, or `is_failed` is set."""
        return self._is_paused

    @is_paused.setter
    def is_paused(self, value: bool) -> None:
        with self._flags:
            self._is_paused = value
            self.is_halted = value or self._is_stopping

    @property
    def is_drained(self) -> bool:
        """Nothing is in hand."""
        return self.done >= self.position

    @property
    def has_unacknowledged(self) -> bool:
        """With ack="manual": an offset in hand waits for its `ack`."""
        return bool(self._open)

    def finish(self) -> None:
        """Count everything that was handed out as done."""
        self.done = self.handed

    def put_back(self) -> None:
        """Count what is in hand as not handed out. For the thread that has it in hand, without ack="manual"."""
        self.position = self.handed = self.done

    def expect(self, offsets: Iterable[int]) -> None:
        """Note offsets that are about to be handed out and will be acknowledged one by one.

        Called before `position` is raised: otherwise an `ack` on another thread, between the two, would find no offset
        that is not acknowledged and would set `done` to the new `position`."""
        self._open.extend(offsets)

    def seek(self, offset: int) -> None:
        """Go on at this offset; forget what is in hand."""
        self.seeks += 1
        self._open.clear()
        self._acked.clear()
        self.position = self.handed = self.done = offset

    def retract(self, offset: int) -> None:
        """Undo `expect` for the offsets from this one on: they were not handed out."""
        while self._open and self._open[-1] >= offset:
            self._open.pop()

    def ack(self, offset: int) -> None:
        """Acknowledge one offset, in any order. `done` becomes the first offset that is not acknowledged (X22)."""
        if not self._open or offset < self._open[0]:
            return  # acknowledged before, or forgotten by a `seek`
        self._acked.add(offset)
        while self._open and self._open[0] in self._acked:
            self._acked.discard(self._open.popleft())
        if not self._open:
            self._acked.clear()
        self.done = self._open[0] if self._open else self.position

    def __repr__(self) -> str:
        state = "lost" if self.is_lost else "stopping" if self.is_stopping else "active"
        return f"<Lane {self.partition} epoch {self.epoch} done {self.done} position {self.position} {state}>"
