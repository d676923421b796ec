"""Values that a partition exchanges with `opening` and with the callers of appends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pxrs.cluster.broker.beginning import Claim
from pxrs.cluster.broker.writing import LedgerShell
from pxrs.cluster.ledgers import LedgerRecord
from pxrs.cluster.records import AliveNode
from pxrs.errors import PxrsError
from pxrs.log.producers import Placement, Producers


class Ticket(NamedTuple):
    """An append whose batches have offsets and are not confirmed yet."""

    placed: list[Placement]
    needed: int
    """The append is confirmed when the end of the partition is at least this offset."""
    generation: int
    """The generation of the partition. If it has changed, a recovery may have dropped the entry."""
    began_at: float
    """When the entry was sent, on the monotonic clock."""


class NodeCount(NamedTuple):
    """Tells whether a storage node may have changed the records of its ledgers (`AliveNode`)."""

    starts: int
    cleared: int


def counts(alive: Mapping[str, AliveNode]) -> dict[str, NodeCount]:
    return {node: NodeCount(found.starts, found.cleared) for node, found in alive.items()}


class Opened(NamedTuple):
    """The result of `opening`: the chain of closed ledgers, the writer of the next ledger, and the producers' state."""

    chain: list[LedgerRecord]
    writer: LedgerShell
    producers: Producers
    counted: dict[str, NodeCount]
    """By live storage node: as of before the chain was read."""
    claim: Claim
    """As the writer's ledger has left it."""


def fresh(error: PxrsError) -> PxrsError:
    """The error without its traceback, to be raised again. Each raise extends the traceback, which would keep the
    frames of all earlier callers alive."""
    return error.with_traceback(None)
