"""The actions that `recovery.Recovery` returns."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from pxrs.cluster.ledgers import EntryHead, LedgerRecord
from pxrs.cluster.replication import Change

FENCED: Final = "fenced"
CHANGED: Final = "changed"
DAMAGED: Final = "damaged"


class FenceNode(NamedTuple):
    """Fence the ledger on the node, then call `fenced`, `refused` or `failed`."""

    node: str
    recovery: int


class ReadEntry(NamedTuple):
    """Read the entry from the node, with the recovery number; then call `found`, `missing`, `doubtful`,
    `unreadable`, `refused` or `failed`."""

    node: str
    entry: int
    recovery: int


class AddEntry(NamedTuple):
    """Add the entry on the node, then call `acked`, `refused` or `failed`."""

    node: str
    entry: int
    head: EntryHead
    body: Any
    lac: int
    recovery: int


class Measure(NamedTuple):
    """Determine the total length in bytes of the entries 1 to `last`, then call `measured` with `last`."""

    last: int


class NeedSpares(NamedTuple):
    """Too few nodes can store an entry: call `offer` with other nodes when there are any."""


class Closed(NamedTuple):
    """The ledger is closed, and the partition may be served."""

    record: LedgerRecord
    version: int


class Stopped(NamedTuple):
    """The recovery has ended without closing the ledger."""

    why: str
    """FENCED: a later recovery has fenced a node. CHANGED: another process has changed the record. In both cases read
    the record again, and begin a new recovery if this broker still owns the partition. DAMAGED: none of its nodes has
    an entry that was confirmed, or a node that is in doubt had it."""
    record: LedgerRecord | None = None
    version: int = 0


Action = Change | FenceNode | ReadEntry | AddEntry | Measure | NeedSpares | Closed | Stopped
