"""What passes between a partition and those that open it and append to it."""

from __future__ import annotations

from typing import NamedTuple

from pxrs.cluster.broker.writing import LedgerShell
from pxrs.cluster.ledgers import LedgerRecord
from pxrs.errors import PxrsError
from pxrs.log.producers import Placement, Producers


class Ticket(NamedTuple):
    """An append that was given offsets and waits for its acknowledgements."""

    placed: list[Placement]
    needed: int
    """The end that the partition has once all of it is confirmed."""
    generation: int
    """That of the writer: a later one has been opened by a recovery, which may have lost the entry."""
    began_at: float
    """When the entry was sent, on the monotonic clock."""


class Opened(NamedTuple):
    """What `opening` has found and made: a chain of closed ledgers, and the next one, open for this broker."""

    chain: list[LedgerRecord]
    writer: LedgerShell
    producers: Producers


def fresh(error: PxrsError) -> PxrsError:
    """The error, to be raised once more. Each raise adds to its traceback, which holds what every caller had."""
    return error.with_traceback(None)
