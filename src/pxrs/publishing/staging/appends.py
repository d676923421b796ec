"""Appends the staged pieces that a manifest names to the logs of its topics. It may be repeated: each piece is stored
once (K1).

Each query has its own producer: one for rows that name their topics, another one for rows that do not. Its epoch is the
number of the batch, and its sequence in each partition counts the pieces there. The pieces have the same order in every
process, so two drivers that append the same batch give each piece the same origin, and the log stores it once.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from pxrs.errors import UnknownProducer
from pxrs.log.batch import Origin
from pxrs.log.contract import Append, TopicLog
from pxrs.log.outcomes import StoredAt
from pxrs.publishing.staging.frames import Piece

NAMESPACE: Final = uuid.UUID("9d1d6c56-2f0c-5a6e-8a35-3b9f1f0a7c11")
_CALL_BYTES_MAX: Final = 256 << 20
"""How many bytes of pieces go into one call of `TopicLog.append` if they are slices of mapped files, which do not add
to the memory of this process. Fewer calls mean fewer syncs, and all partitions of a call sync at the same time."""
_APPEND_BYTES_MAX: Final = 32 << 20
"""How many bytes of one partition go into one call. Other producers of the partition wait until the call ends."""
_TOGETHER_MAX: Final = 64
"""How many pieces of one partition go into one call."""


def producer_of(writer: str, topic: str) -> uuid.UUID:
    """The producer that appends the batches of a query to a topic. writer: as `writer_of`; topic: the topic's id."""
    return uuid.uuid5(NAMESPACE, f"{writer}/{topic}")


def append_pieces(
    topic: TopicLog,
    writer: str,
    batch: int,
    pieces: Iterable[Piece],
    ends: Sequence[int],
    call_bytes_max: int = _CALL_BYTES_MAX,
) -> None:
    """Append the pieces of a batch. All of them are durable when this returns.

    writer: the name under which they were staged (`writer_of`).
    ends: the ends of the topic's partitions before anything of the batch was appended; empty if they are not known.
    call_bytes_max: how many bytes of pieces go into one call of `TopicLog.append`.
    Raises the first error of a piece that is not stored."""
    producer = producer_of(writer, topic.id)
    sequences: dict[int, int] = {}
    waiting: dict[int, list[Append]] = {}
    sizes: dict[int, int] = {}
    for partition, payload in pieces:
        sequence = sequences[partition] = sequences.get(partition, -1) + 1
        since = ends[partition] if ends else None
        waiting.setdefault(partition, []).append(Append(partition, payload, Origin(producer, batch, sequence), since))
        sizes[partition] = sizes.get(partition, 0) + payload.data.size
        is_full = sizes[partition] >= _APPEND_BYTES_MAX or len(waiting[partition]) == _TOGETHER_MAX
        if is_full or sum(sizes.values()) >= call_bytes_max:
            _append(topic, waiting)
            waiting, sizes = {}, {}
    _append(topic, waiting)


def _append(topic: TopicLog, waiting: Mapping[int, list[Append]]) -> None:
    """Append to all partitions in one call, so that they write and sync in parallel."""
    while together := [append for appends in waiting.values() for append in appends]:
        refused: dict[int, list[Append]] = {}
        for append, outcome in zip(together, topic.append(together), strict=True):
            if isinstance(outcome, StoredAt):
                continue
            number = append.partition
            left = _not_stored(outcome.error, waiting[number])
            if len(left) == len(waiting[number]):
                raise outcome.error
            refused[number] = left
        waiting = refused


def _not_stored(error: Exception, appends: list[Append]) -> list[Append]:
    """Those of these pieces of one partition that are still to be appended after the log has refused all of them.

    A partition remembers few batches of a producer. If another driver, or an earlier try, has stored these pieces and
    more, or a power loss has left some of them, the log no longer knows the first ones, and says which piece was stored
    last. The pieces before that one are stored too, because a partition takes a producer's batches only in order."""
    if not isinstance(error, UnknownProducer) or error.stored is None:
        return appends
    return [append for append in appends if append.origin[1:] > error.stored]
