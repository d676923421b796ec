"""Pure: which ledgers of a partition retention may remove."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pxrs.cluster.ledgers import LedgerRecord
from pxrs.log.retention import credible_time
from pxrs.model import Topic


class Piece(NamedTuple):
    """A ledger, as retention sees it."""

    end: int
    stored_at: int
    """When its last message was stored, in microseconds since 1970."""
    size: int

    @classmethod
    def of(cls, record: LedgerRecord) -> Piece:
        return cls(record.end or 0, record.stored_at, record.size)


def keep_from(
    topic: Topic, start: int, closed: Sequence[Piece], last: Piece | None, now: int, unread: int | None
) -> int:
    """The first offset to keep: whole ledgers are removed, the oldest first, while they are too old or while there are
    too many bytes.

    start: of the partition now. closed: the closed ledgers, in order. last: the one that is written, if it has
    messages; it is removed only by its age. unread: from this offset on everything is kept, unless it is None."""
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
