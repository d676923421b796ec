"""Reads the origins of the batches that a partition has stored from an offset on, for `Producers.recall`.

`Producers` keeps the state of a bounded number of producers. Before a batch of a producer whose state may have been
dropped is placed, the stored batches are searched for that producer.

The headers are read from storage nodes without the partition's lock, because the threads that receive the nodes'
answers need the lock and serve all partitions of the broker. Entries that are confirmed during the read are in the
cache of recent entries.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pxrs.cluster.broker.entries import STATE_ENTRY, origin_heads
from pxrs.cluster.broker.reading import LedgerReader
from pxrs.cluster.ledgers import LedgerRecord
from pxrs.log.batch import Origin

Origins = list[tuple[Origin, int]]
"""The origin and the offset of each batch."""


class Span(NamedTuple):
    """A range of entries of one ledger; both ends are included."""

    record: LedgerRecord
    first: int
    last: int


class Recalled(NamedTuple):
    """The origins that were read."""

    generation: int
    """The generation of the partition when the read began."""
    upto: int
    """The end of the partition when the read began."""
    origins: Origins


class Unread(Exception):
    """Raised under the partition's lock: the origins from the offset `since` on must be read, without the lock, before
    a batch can be placed."""

    def __init__(self, since: int, generation: int, upto: int, spans: list[Span]) -> None:
        self.since, self.generation, self.upto, self.spans = since, generation, upto, spans
        super().__init__(since)

    def read(self, reader: LedgerReader, place: int) -> Recalled:
        """Read the origins from storage nodes. Raises ReadFailed, DamagedFrame."""
        return Recalled(self.generation, self.upto, list(_origins(reader, self.spans, place)))


def closed_spans(chain: Iterable[LedgerRecord], since: int) -> list[Span]:
    """The entries with batches of those closed ledgers that end after the offset `since`."""
    return [Span(record, STATE_ENTRY + 1, record.last or 0) for record in chain if (record.end or 0) > since]


def _origins(reader: LedgerReader, spans: Iterable[Span], place: int) -> Iterable[tuple[Origin, int]]:
    for record, first, last in spans:
        for read in reader.read(record, first, last, heads=True):
            where = f"entry {read.entry} of ledger {record.id}"
            for head in origin_heads(read.body, where, place):
                yield head.origin, head.base_offset
