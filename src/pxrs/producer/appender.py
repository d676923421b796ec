"""A producer's batches into the log, each stored once whatever is tried again (L4).

Every batch carries the producer's id and its number in the partition. No more batches of a partition go into one append
than the log remembers: whatever became of it, the retry can be answered. When the tries are used up, the batch fails,
and with it every later one of its partition: leaving one out would break the order.

A partition that has forgotten the producer refuses its next batch. If that was the batch's first try, nothing of it can
be stored: it goes under a new id. After another try only its outcome is unknown, and that is what is said.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from pxrs.errors import AppendFailed, LogError, UnknownProducer
from pxrs.log.batch import Origin
from pxrs.log.contract import Append, TopicLog
from pxrs.log.producers import BATCHES_KEPT
from pxrs.producer.outgoing import SentBatch

Outcome = tuple[SentBatch, int | BaseException]
"""A batch, and its offset or why it has none."""
_BACKOFF_S: Final = (0.01, 1.0)


@dataclass(slots=True)
class _Identity:
    """Who the producer is to one partition."""

    id: uuid.UUID
    since: int | None
    """Where the partition ended before; None if it could not be told."""
    batches: int = 0


class Appender:
    """Of one producer, for its thread alone."""

    def __init__(self, log: TopicLog, tries_max: int) -> None:
        self._log, self._tries_max = log, tries_max
        self._identities: dict[int, _Identity] = {}
        self.broken: dict[int, BaseException] = {}
        """The partitions that take no more, and why."""

    def store(self, batches: list[SentBatch]) -> Iterator[list[Outcome]]:
        """Append them, in order; a part of them at a time."""
        counts = [0] * self._log.partitions
        parts: dict[int, list[SentBatch]] = {}
        for batch in batches:
            parts.setdefault(counts[batch.partition] // BATCHES_KEPT, []).append(batch)
            counts[batch.partition] += 1
        for part in parts.values():
            yield self._store(part)

    def _store(self, batches: list[SentBatch]) -> list[Outcome]:
        outcomes: list[Outcome] = [(each, self.broken[each.partition]) for each in batches if self._is_broken(each)]
        sound = [each for each in batches if not self._is_broken(each)]
        if not sound:
            return outcomes
        appends = [self._append_of(batch) for batch in sound]
        try:
            return outcomes + self._append(sound, appends)
        except Exception:  # noqa: BLE001 - tried again below, where each partition gets its own error
            return outcomes + self._store_apart(sound, appends)

    def _store_apart(self, batches: list[SentBatch], appends: list[Append]) -> list[Outcome]:
        """One append for each partition, so that one that fails does not fail the others."""
        outcomes: list[Outcome] = []
        for partition in dict.fromkeys(batch.partition for batch in batches):
            mine = [batch for batch in batches if batch.partition == partition]
            try:
                offsets = self._log.append([append for append in appends if append.partition == partition])
                outcomes += zip(mine, offsets, strict=True)
            except Exception as error:  # noqa: BLE001 - raised by the receipts, flush and close
                self.broken[partition] = error
                outcomes += [(batch, error) for batch in mine]
        return outcomes

    def _append(self, batches: list[SentBatch], appends: list[Append]) -> list[Outcome]:
        """Try until it is stored. Raises the last AppendFailed, and any other error; `appends` are then as they are to
        be tried next."""
        wait_s, wait_s_max = _BACKOFF_S
        tries = 0
        while True:
            tries += 1
            try:
                return list(zip(batches, self._log.append(appends), strict=True))
            except LogError as error:
                refused = error.refused if tries == 1 else frozenset()
                self._rename(appends, refused)
                if isinstance(error, UnknownProducer) and refused:
                    continue
                if not isinstance(error, AppendFailed) or tries >= self._tries_max:
                    raise
                time.sleep(wait_s)
                wait_s = min(wait_s * 2, wait_s_max)

    def _rename(self, appends: list[Append], partitions: frozenset[int]) -> None:
        for partition in partitions:
            del self._identities[partition]
        for at, append in enumerate(appends):
            if append.partition in partitions:
                appends[at] = self._next(append)

    def _append_of(self, batch: SentBatch) -> Append:
        assert batch.records is not None
        return self._next(Append(batch.partition, batch.records))

    def _next(self, append: Append) -> Append:
        """The same records, as this producer's next batch."""
        who = self._identities.get(append.partition)
        if who is None:
            who = self._identities[append.partition] = _Identity(uuid.uuid4(), self._end(append.partition))
        who.batches += 1
        # Only a first one looks like a producer that begins: a later one says itself that others went before it.
        since = who.since if who.batches == 1 else None
        return Append(append.partition, append.records, Origin(who.id, 0, who.batches - 1), since)

    def _end(self, partition: int) -> int | None:
        with suppress(Exception):  # the append will tell
            return self._log.end(partition)
        return None

    def _is_broken(self, batch: SentBatch) -> bool:
        return batch.partition in self.broken
