"""What a recovery asks for, and how it ends (`recovery`)."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from pxrs.cluster.ledgers import EntryHead, LedgerRecord
from pxrs.cluster.replication import Change

FENCED: Final = "fenced"
CHANGED: Final = "changed"
DAMAGED: Final = "damaged"


class FenceNode(NamedTuple):
    """Fence the ledger on the node: then call `fenced`, `refused` or `failed`."""

    node: str
    recovery: int


class ReadEntry(NamedTuple):
    """Read the entry from the node, with the recovery number: then call `found`, `missing`, `refused` or `failed`."""

    node: str
    entry: int
    recovery: int


class AddEntry(NamedTuple):
    """Add the entry on the node: then call `acked`, `refused` or `failed`."""

    node: str
    entry: int
    head: EntryHead
    body: Any
    lac: int
    recovery: int


class Measure(NamedTuple):
    """Find out how long the ledger's entries from 1 up to this one are together, in bytes, for `measured`."""

    last: int


class NeedSpares(NamedTuple):
    """Too few nodes can take an entry: call `offer` with others."""


class Closed(NamedTuple):
    """The ledger is closed, and the partition may be served."""

    record: LedgerRecord
    version: int


class Stopped(NamedTuple):
    """Recovery has ended without closing the ledger."""

    why: str
    """FENCED or CHANGED: another recovery was begun, or the record has changed; read it again, and begin anew if the
    partition is still owned. DAMAGED: a confirmed entry is on none of its nodes."""
    record: LedgerRecord | None = None
    version: int = 0


Action = Change | FenceNode | ReadEntry | AddEntry | Measure | NeedSpares | Closed | Stopped
