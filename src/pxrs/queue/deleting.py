"""The deletion of a queue: one commit after which nothing can be put into it, and then the removal of its items.

The first commit deletes the queue's settings and its existence key, which every put expects, and writes a key below
`deleted/`. That key stays until the items are removed, so that another process can finish a deletion that was cut
short. A transaction that has taken an item of the queue cannot be committed once the item is removed, because its
commit expects the item's key (Q2).

The procedures are generators (`pxrs.registry.steps`): no thread, no registry, no clock."""

from __future__ import annotations

from typing import Final

from pxrs.queue.moves import Move
from pxrs.queue.protocol import move_all
from pxrs.queue.puts import PutVersions
from pxrs.queue.records import DELETED, Queue, root_of
from pxrs.registry.contract import Entry, Limits
from pxrs.registry.steps import Scan, Steps, Write

CLEAR_ITEMS: Final = 500
"""How many keys of a deleted queue are read at a time."""


def delete_queue(settings: Entry, versions: PutVersions) -> Steps[Queue]:
    """Delete the queue whose settings were read, and return it. Its items are left to `clear_deleted`. Raises Conflict
    if the queue was deleted already, also if another one has its name."""
    queue = Queue.load(settings.key, settings.value)
    # The version of the settings is not enough: on a store that counts the versions of a key from 1 again when the key
    # is re-created (R4), the settings of another queue may have the same version.
    existence = yield from versions.existence(queue)
    expect = {settings.key: settings.version, queue.existence: existence}
    yield Write(expect, {queue.deleted: queue.name.encode()}, is_leased=False, delete=list(expect))
    return queue


def clear_deleted(deleted: Entry, limits: Limits) -> Steps[None]:
    """Remove the items of a deleted queue in all states, its turn and its last number, and at last its key below
    `deleted/`. deleted: that key, as it was read."""
    root = root_of(deleted.key[len(DELETED) :])
    empty = 0
    while empty < 2:  # an item that is moved during a scan may be missing in it (R1)
        entries: list[Entry] = yield Scan(root, None, CLEAR_ITEMS)
        yield from move_all([Move(entry.key, entry.version, None) for entry in entries], limits)
        empty = 0 if entries else empty + 1
    yield from move_all([Move(deleted.key, deleted.version, None)], limits)
