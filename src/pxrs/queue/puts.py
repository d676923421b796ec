"""What a put writes, and what it expects: that the queue is there, and in a FIFO queue the number of the last item.

Both are keys whose versions a process mostly knows already (`PutVersions`), so that a put is one commit and no read. A
version that is out of date makes a refused commit, never a wrong one; the caller then forgets it and tries again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pxrs.errors import Conflict, RegistryCorrupt
from pxrs.queue.items import Put
from pxrs.queue.moves import Changes, Move
from pxrs.queue.records import Queue, first_key, in_sequence, load_number
from pxrs.registry.contract import ABSENT, Entry
from pxrs.registry.steps import Get, Steps, Write

Numbers = dict[str, tuple[Queue, int]]
"""By the id of a FIFO queue: the queue, and the number of the last item that a commit puts into it."""


class PutVersions:
    """The versions of the keys that puts expect, as this process saw them last. Threads share it: each call reads or
    writes one entry of a dictionary, which Python does in one step."""

    def __init__(self) -> None:
        self._existence: dict[str, int] = {}
        """By queue id: the version of the existence key, which is written once."""
        self._sequences: dict[str, tuple[int, int]] = {}
        """By id of a FIFO queue: the number of its last item, and the version of the key that holds it."""

    def created(self, queue: Queue, version: int) -> None:
        """The queue's existence key was written with this version."""
        self._existence[queue.id] = version

    def forget(self, queue: Queue) -> None:
        self._existence.pop(queue.id, None)
        self._sequences.pop(queue.id, None)

    def forget_number(self, queue: Queue) -> None:
        """Another process may have put an item: read the last number again."""
        self._sequences.pop(queue.id, None)

    def note(self, numbers: Numbers, written: Mapping[str, int]) -> None:
        """A commit has put items up to these numbers. written: the versions of the keys that it wrote."""
        for queue, number in numbers.values():
            self._sequences[queue.id] = number, written[queue.sequence]

    @property
    def is_empty(self) -> bool:
        return not self._sequences

    def existence(self, queue: Queue) -> Steps[int]:
        """The version of the existence key. Raises Conflict if the key is gone, and the queue with it."""
        version = self._existence.get(queue.id)
        if version is not None:
            return version
        entry: Entry | None = yield Get(queue.existence)
        if entry is None:
            settings: Entry | None = yield Get(queue.key)
            if settings is not None and Queue.load(settings.key, settings.value).id == queue.id:
                raise RegistryCorrupt(queue.existence, f"it is missing, although queue {queue.name} exists")
            raise Conflict([queue.existence])
        self._existence[queue.id] = entry.version
        return entry.version

    def last_number(self, queue: Queue) -> Steps[tuple[int, int]]:
        """The number of a FIFO queue's last item, and the version of the key that holds it."""
        found = self._sequences.get(queue.id)
        if found is not None:
            return found
        entry: Entry | None = yield Get(queue.sequence)
        found = (0, ABSENT) if entry is None else (load_number(entry.key, entry.value), entry.version)
        self._sequences[queue.id] = found
        return found


def add_puts(puts: Iterable[Put], versions: PutVersions, changes: Changes, now: float) -> Steps[Numbers]:
    """Add items to a commit. The commit expects each queue's existence key, and gives the items of a FIFO queue the
    next numbers, expecting the key of the last number as it was read: so numbers are in the order of the commits (Q3).

    Returns the last numbers, for `PutVersions.note` once the commit is acknowledged."""
    numbers: Numbers = {}
    for queue, record, delay_s in puts:
        if queue.existence not in changes.expect:
            changes.expect[queue.existence] = yield from versions.existence(queue)
        if queue.is_fifo:
            if queue.id in numbers:
                number = numbers[queue.id][1]
            else:
                number, changes.expect[queue.sequence] = yield from versions.last_number(queue)
            number += 1
            numbers[queue.id] = queue, number
            changes.put[queue.sequence] = str(number).encode()
            record = in_sequence(record, number)
        key = first_key(queue, record, delay_s, now)
        changes.expect[key], changes.put[key] = ABSENT, record.dump()
    return numbers


def put(puts: Iterable[Put], versions: PutVersions, now: float, removed: Sequence[Move] = ()) -> Steps[None]:
    """Put items in one commit, outside a transaction.

    removed: moves of the same commit, such as that of the dead letter which is put again."""
    changes = Changes.of(removed)
    numbers = yield from add_puts(puts, versions, changes, now)
    written = yield Write(changes.expect, changes.put, is_leased=False, delete=changes.delete)
    versions.note(numbers, written)
