"""Which batches a partition has stored from an offset on, for producers that may have been forgotten (`Producers`).

The headers are read from storage nodes without the partition's lock: the threads that receive the nodes' answers need
the lock, and they serve all partitions of the broker. What was confirmed meanwhile is in the memory of recent entries.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pxrs.cluster.broker.entries import STATE_ENTRY, origin_heads
from pxrs.cluster.broker.reading import LedgerReader
from pxrs.cluster.ledgers import LedgerRecord
from pxrs.log.batch import Origin

Origins = list[tuple[Origin, int]]
"""The origin of each batch, and its offset."""


class Span(NamedTuple):
    """Entries of one ledger."""

    record: LedgerRecord
    first: int
    last: int


class Recalled(NamedTuple):
    """What was read."""

    generation: int
    """That of the partition's writer, when the reading began."""
    upto: int
    """The end of the partition at that time."""
    origins: Origins


class Unread(Exception):
    """The origins from this offset on must be read before a batch can be placed."""

    def __init__(self, since: int, generation: int, upto: int, spans: list[Span]) -> None:
        self.since, self.generation, self.upto, self.spans = since, generation, upto, spans
        super().__init__(since)

    def read(self, reader: LedgerReader, place: int) -> Recalled:
        """Raises ReadFailed, DamagedFrame."""
        return Recalled(self.generation, self.upto, list(_origins(reader, self.spans, place)))


def closed_spans(chain: Iterable[LedgerRecord], since: int) -> list[Span]:
    """The entries with batches of closed ledgers that reach beyond an offset."""
    return [Span(record, STATE_ENTRY + 1, record.last or 0) for record in chain if (record.end or 0) > since]


def _origins(reader: LedgerReader, spans: Iterable[Span], place: int) -> Iterable[tuple[Origin, int]]:
    for record, first, last in spans:
        for read in reader.read(record, first, last, heads=True):
            where = f"entry {read.entry} of ledger {record.id}"
            for head in origin_heads(read.body, where, place):
                yield head.origin, head.base_offset
