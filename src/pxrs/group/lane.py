"""A partition in a consumer's hands: how far it was handed out, and how far it is done."""

from __future__ import annotations

import heapq


class Lane:
    """Written by the threads that hand out, read by the member's thread: plain fields, each written by one side.

    The offsets before `done` are done; those from `done` up to `position` are in hand."""

    __slots__ = (
        "_acked",
        "done",
        "epoch",
        "handed_at",
        "is_failed",
        "is_lost",
        "is_paused",
        "is_stopping",
        "partition",
        "position",
    )

    def __init__(self, partition: int, epoch: int, offset: int) -> None:
        self.partition, self.epoch = partition, epoch
        self.position = self.done = offset
        self.handed_at = 0.0
        """When what is in hand was handed out, on the registry's clock."""
        self.is_stopping = False
        """Nothing more is to be handed out."""
        self.is_lost = False
        self.is_paused = False
        """By the user, or because it is failed."""
        self.is_failed = False
        """A message could not be handled, and holds it up until somebody decides."""
        self._acked: list[int] = []

    @property
    def is_drained(self) -> bool:
        return self.done >= self.position

    def ack(self, offset: int) -> None:
        """Done in any order: the checkpoint is the contiguous watermark (X22)."""
        if offset < self.done:
            return
        heapq.heappush(self._acked, offset)
        while self._acked and self._acked[0] <= self.done:
            if heapq.heappop(self._acked) == self.done:
                self.done += 1

    def __repr__(self) -> str:
        state = "lost" if self.is_lost else "stopping" if self.is_stopping else "active"
        return f"<Lane {self.partition} epoch {self.epoch} done {self.done} position {self.position} {state}>"
