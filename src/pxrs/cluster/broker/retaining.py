"""Pure: which ledgers of a partition retention may remove."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pxrs.cluster.ledgers import LedgerRecord
from pxrs.log.retention import credible_time
from pxrs.model import Topic


class Piece(NamedTuple):
    """The properties of a ledger on which retention depends."""

    end: int
    stored_at: int
    """When the last message was stored, in microseconds since 1970."""
    size: int

    @classmethod
    def of(cls, record: LedgerRecord) -> Piece:
        return cls(record.end or 0, record.stored_at, record.size)


def keep_from(
    topic: Topic, start: int, closed: Sequence[Piece], last: Piece | None, now: int, unread: int | None
) -> int:
    """The first offset to keep. Whole ledgers are removed, the oldest first, while they are too old or the partition
    has too many bytes.

    start: the current start of the partition. closed: the closed ledgers, in order. last: the ledger that is being
    written, if it has messages; it is removed only because of its age. unread: everything from this offset on is kept;
    None if there is no such bound."""
    pieces = [*closed, *(() if last is None else (last,))]
    times = [piece.stored_at for piece in pieces]
    total = sum(piece.size for piece in pieces)
    for at, piece in enumerate(pieces):
        is_old = topic.retention_s is not None and credible_time(times, at, now) < now - int(topic.retention_s * 1e6)
        is_much = topic.retention_bytes is not None and total > topic.retention_bytes and at < len(closed)
        if not (is_old or is_much) or (unread is not None and piece.end > unread):
            break
        start, total = piece.end, total - piece.size
    return start
