"""A partition in a consumer's hands: how far it was handed out, and how far it is done."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable


class Lane:
    """Written by the threads that hand out, read by the member's thread: plain fields, each written by one side.

    The offsets before `done` are done; those from `done` up to `position` are in hand."""

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
        "is_failed",
        "is_halted",
        "is_lost",
        "lost_reason",
        "partition",
        "position",
        "seeks",
    )

    def __init__(self, partition: int, epoch: int, offset: int) -> None:
        self.partition, self.epoch = partition, epoch
        self.position = self.handed = self.done = offset
        self.seeks = 0
        """How often it was set elsewhere: rises before that is done, so that a hand-out under way finds out."""
        self.handed_at = 0.0
        """When what is in hand was handed out, on the registry's clock."""
        self._flags = threading.Lock()
        self._is_stopping = self._is_paused = False
        self.is_halted = False
        """Stopping or paused: what every hand-out asks."""
        self.is_lost = False
        self.lost_reason = ""
        """Why this member does not own the partition any more; empty while it does."""
        self.has_undone = False
        """It was lost, or given up, with something handed out that no checkpoint covers."""
        self.is_failed = False
        """A message could not be handled, and holds it up until somebody decides."""
        self._open: deque[int] = deque()
        self._acked: set[int] = set()

    @property
    def is_stopping(self) -> bool:
        """Nothing more is to be handed out: it will be somebody else's."""
        return self._is_stopping

    @is_stopping.setter
    def is_stopping(self, value: bool) -> None:
        with self._flags:
            self._is_stopping = value
            self.is_halted = value or self._is_paused

    @property
    def is_paused(self) -> bool:
        """By the user, or because it is failed."""
        return self._is_paused

    @is_paused.setter
    def is_paused(self, value: bool) -> None:
        with self._flags:
            self._is_paused = value
            self.is_halted = value or self._is_stopping

    @property
    def is_drained(self) -> bool:
        return self.done >= self.position

    def expect(self, offsets: Iterable[int]) -> None:
        """These will be handed out, to be acknowledged one by one. Before the position is moved: one that comes in
        between must not take what is not acknowledged for done."""
        self._open.extend(offsets)

    def seek(self, offset: int) -> None:
        self.seeks += 1
        self._open.clear()
        self._acked.clear()
        self.position = self.handed = self.done = offset

    def retract(self, offset: int) -> None:
        """From this one on they were not handed out after all."""
        while self._open and self._open[-1] >= offset:
            self._open.pop()

    def ack(self, offset: int) -> None:
        """Done in any order: the checkpoint is the contiguous watermark (X22)."""
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
