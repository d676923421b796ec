"""How much a transaction may still hold, so that its commit fits the store's limits. Counted before anything is taken
or put: a transaction that is too large is refused early, and not when it commits."""

from __future__ import annotations

from typing import Final

from pxrs.errors import TransactionTooLarge
from pxrs.queue.items import BYTES_PER_KEY, Put
from pxrs.queue.protocol import TransactionProtocol
from pxrs.queue.records import Queue
from pxrs.registry.contract import Limits
from pxrs.wording import counted

_KEYS_RESERVED: Final = 2
"""The slot, and one to spare."""
_KEYS_SPARE: Final = 16
"""How many keys are added to the estimate of the commit's bytes."""
_BYTES_PER_PARTITION: Final = 1_024
"""An upper bound of what a checkpoint adds for each partition: two keys and a value."""


class Capacity:
    """What one transaction's commit will name, as far as it is known."""

    def __init__(self, limits: Limits, protocol: TransactionProtocol) -> None:
        self._limits, self._protocol = limits, protocol
        self._fifo: set[str] = set()
        """The ids of the FIFO queues that it takes from or puts into: each has two keys of its own."""
        self._targets: set[str] = set()
        """The ids of the queues that it puts into: each has an existence key."""
        self._put_bytes = 0
        self._partitions = 0
        """How many partitions the transaction's checkpoints have."""

    def note_taken(self, queue: Queue) -> None:
        if queue.is_fifo:
            self._fifo.add(queue.id)

    def note_put(self, put: Put) -> None:
        if put.queue.is_fifo:
            self._fifo.add(put.queue.id)
        self._targets.add(put.queue.id)
        self._put_bytes += put.size

    def note_partitions(self, count: int) -> None:
        self._partitions = count

    def check(self, queue: Queue | None = None, *, put: Put | None = None, partitions: int = 0) -> int:
        """How many items of this queue the transaction may take besides what it has.

        put:        an item that is to be put into the queue.
        partitions: how many partitions a checkpoint is to have besides.
        Raises TransactionTooLarge if no item may be taken, or if the put or the partitions are too much."""
        limits, taken, puts = self._limits, len(self._protocol.taken), len(self._protocol.puts)
        fifo, targets = len(self._fifo), len(self._targets)
        partitions += self._partitions
        if queue is not None:
            fifo += queue.is_fifo and queue.id not in self._fifo
            targets += put is not None and queue.id not in self._targets
        keys = taken + puts + 2 * fifo + targets + 2 * partitions + _KEYS_RESERVED
        left = limits.commit_keys_max - keys
        if left < (0 if queue is None else 1):
            raise TransactionTooLarge(
                f"{counted(taken, 'item')} taken, {puts} put and {counted(partitions, 'partition')} of a checkpoint in "
                f"one transaction are too many for this store, which can change {limits.commit_keys_max} keys in one "
                "commit"
            )
        size = self._put_bytes + (0 if put is None else put.size) + partitions * _BYTES_PER_PARTITION
        size += (taken + 2 * fifo + targets + _KEYS_SPARE) * BYTES_PER_KEY
        left_bytes = limits.commit_bytes_max - size
        if left_bytes < (BYTES_PER_KEY if queue is not None and put is None else 0):
            raise TransactionTooLarge(
                f"{size:,} bytes in one transaction are too many: the limit of this store is "
                f"{limits.commit_bytes_max:,}; put less in one transaction"
            )
        return min(left, left_bytes // BYTES_PER_KEY)
