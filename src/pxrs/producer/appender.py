"""Gives a producer's batches to the log and resends them until each has a final outcome, stored once (L4, W1).

Each batch carries an origin: the producer's id, and the batch's number in its partition. The Appender alone resends,
and decides by the outcome of each batch (`pxrs.log.outcomes`):

| outcome of a try                                | what the Appender does                                          |
|-------------------------------------------------|-----------------------------------------------------------------|
| StoredAt                                        | done                                                            |
| NotStored or MaybeStored, with AppendFailed     | after a pause it resends the batch under the same origin, until |
|                                                 | `tries_max` tries are made; then the partition has failed       |
| NotStored, with UnknownProducer: the log has    | if no try was MaybeStored, the batch is not in the log, and     |
| forgotten this producer                         | goes under a new producer id, at once; else: has failed         |
| anything else                                   | the partition has failed                                        |

The error of a batch that has failed is that of its last try; but if an earlier try was MaybeStored, it is
AppendUnknown: that the last try stored nothing does not mean that the batch is not in the log.

A partition that has failed takes no more batches of this producer: to leave one out would break the order. One append
has at most BATCHES_KEPT batches of a partition, as many as the log remembers, so that the resending of any of them is
recognised. The other partitions of the append are acknowledged while one is resent.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Final

from pxrs.errors import AppendFailed, AppendUnknown, PxrsError, UnknownProducer
from pxrs.log.batch import FRAME_BYTES_MAX, Origin, encode
from pxrs.log.contract import Append, TopicLog
from pxrs.log.outcomes import MaybeStored, NotStored, Outcome, StoredAt
from pxrs.log.producers import BATCHES_KEPT
from pxrs.producer.counts import ProducerCounts
from pxrs.producer.receipts import SentBatch
from pxrs.tracing import producer_tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span

Result = tuple[SentBatch, int | BaseException]
"""A batch, and its offset or why it has none."""
_BACKOFF_S: Final = (0.01, 1.0)
"""The pause before the second try, and the longest one; each is twice the one before."""


@dataclass(slots=True)
class _Identity:
    """The id under which the producer appends to one partition."""

    id: uuid.UUID
    since: int | None
    """The end of the partition before the first batch under this id; None if it could not be read."""
    batches: int = 0
    """How many batches have been given an origin with this id."""


@dataclass(slots=True)
class _Pending:
    """The batches of one partition in the present append that have no final outcome yet."""

    batches: list[SentBatch]
    appends: list[Append]
    may_be_stored: bool = False
    """An earlier try was MaybeStored."""
    is_renamed: bool = False
    """The batches were given a second producer id, after the log had forgotten the first one."""


class Appender:
    """Belongs to one producer. Not thread-safe: the producer's background thread alone calls it."""

    def __init__(self, log: TopicLog, tries_max: int) -> None:
        self._log, self._tries_max = log, tries_max
        self._counts = ProducerCounts(log.name)
        self.tracing = producer_tracing(log.name, FRAME_BYTES_MAX // 2)
        """None unless the program has configured a tracer before it made the producer."""
        self._spans: dict[SentBatch, Span] = {}
        """The spans of the batches that have no final outcome yet."""
        self._identities: dict[int, _Identity] = {}
        self.broken: dict[int, BaseException] = {}
        """The partitions that have failed, each with its error. The producer reads it under its own lock."""

    def store(self, batches: list[SentBatch]) -> Iterator[list[Result]]:
        """Append the batches in order. Yields results as they become final."""
        counts = [0] * self._log.partitions
        parts: dict[int, list[SentBatch]] = {}
        for batch in batches:
            parts.setdefault(counts[batch.partition] // BATCHES_KEPT, []).append(batch)
            counts[batch.partition] += 1
        for part in parts.values():
            yield from self._store(part)

    def _store(self, batches: list[SentBatch]) -> Iterator[list[Result]]:
        pending, results = self._prepare(batches)
        pause_s, pause_s_max = _BACKOFF_S
        tries = 0
        while pending:
            tries += 1
            outcomes = self._append([append for each in pending.values() for append in each.appends])
            is_paused = False
            for partition, each in list(pending.items()):
                mine = [next(outcomes) for _ in each.appends]
                was_doubtful = each.may_be_stored
                error = self._take_stored(each, mine, results)
                if error is None:
                    del pending[partition]
                elif self._may_rename(each, error):
                    self._rename(partition, each)
                elif isinstance(error, AppendFailed) and tries < self._tries_max:
                    is_paused = True
                    self._counts.retries.add(len(each.batches))
                else:
                    self.broken[partition] = error
                    final = _unknown(error) if was_doubtful else error
                    results += [(batch, final) for batch in each.batches]
                    del pending[partition]
            if results:
                yield self._noted(results)
                results = []
            if is_paused:
                time.sleep(pause_s)
                pause_s = min(pause_s * 2, pause_s_max)
        if results:
            yield self._noted(results)

    def _noted(self, results: list[Result]) -> list[Result]:
        """Add final results to metrics and traces."""
        for batch, result in results:
            error = result if isinstance(result, BaseException) else None
            if error is not None:
                self._counts.failed(1, error)
            if self.tracing is not None and (span := self._spans.pop(batch, None)) is not None:
                self.tracing.end(span, error)
        return results

    def _prepare(self, batches: list[SentBatch]) -> tuple[dict[int, _Pending], list[Result]]:
        """Encode the batches. Returns them by partition, and the results of those that cannot be sent."""
        pending: dict[int, _Pending] = {}
        failed: list[Result] = []
        for batch in batches:
            partition = batch.partition
            if partition not in self.broken:
                try:
                    assert batch.records is not None
                    if self.tracing is not None:
                        self._spans[batch], batch.records = self.tracing.begin(partition, batch.records)
                    payload = encode(batch.records, self._log.topic.codec)
                except Exception as error:  # noqa: BLE001 - raised by the receipts, flush and close
                    self.broken[partition] = error
                else:
                    mine = pending.setdefault(partition, _Pending([], []))
                    mine.batches.append(batch)
                    mine.appends.append(self._next(Append(partition, payload)))
                    continue
            failed.append((batch, self.broken[partition]))
        return pending, failed

    def _append(self, appends: list[Append]) -> Iterator[Outcome]:
        """Make one try. An error that the log raises is the outcome of every batch."""
        began = time.monotonic()
        try:
            return iter(self._log.append(appends))
        except AppendUnknown as error:
            raised: Outcome = MaybeStored(error)
        except PxrsError as error:  # see `TopicLog.append`: it raises these before anything is stored
            raised = NotStored(error)
        except Exception as error:  # noqa: BLE001 - a defect of the log: the batches may be stored
            raised = MaybeStored(error)
        finally:
            self._counts.append.observe(time.monotonic() - began)
        return repeat(raised, len(appends))

    def _take_stored(self, pending: _Pending, outcomes: list[Outcome], results: list[Result]) -> Exception | None:
        """Move the batches that are stored from `pending` to `results`. Returns the error of the others; None if all
        are stored."""
        error: Exception | None = None
        batches, appends = [], []
        for batch, append, outcome in zip(pending.batches, pending.appends, outcomes, strict=True):
            if isinstance(outcome, StoredAt):
                results.append((batch, outcome.offset))
                assert batch.records is not None
                self._counts.stored(batch.records.num_rows, append.payload.frame_bytes)
                continue
            pending.may_be_stored |= isinstance(outcome, MaybeStored)
            error = error or outcome.error
            batches.append(batch)
            appends.append(append)
        pending.batches, pending.appends = batches, appends
        return error

    @staticmethod
    def _may_rename(pending: _Pending, error: Exception) -> bool:
        """Whether the log has forgotten the producer, and the batches are certain not to be in the log."""
        is_forgotten = isinstance(error, UnknownProducer) and error.stored is None
        return is_forgotten and not pending.may_be_stored and not pending.is_renamed

    def _rename(self, partition: int, pending: _Pending) -> None:
        del self._identities[partition]
        pending.appends = [self._next(append) for append in pending.appends]
        pending.is_renamed = True

    def _next(self, append: Append) -> Append:
        """The same payload, as this producer's next batch of the partition."""
        who = self._identities.get(append.partition)
        if who is None:
            who = self._identities[append.partition] = _Identity(uuid.uuid4(), self._end(append.partition))
        who.batches += 1
        # Only the first batch of an id can be taken for the beginning of a new producer: see `Incoming.since`.
        since = who.since if who.batches == 1 else None
        return Append(append.partition, append.payload, Origin(who.id, 0, who.batches - 1), since)

    def _end(self, partition: int) -> int | None:
        with suppress(Exception):  # the append that follows raises the same error, and reports it
            return self._log.end(partition)
        return None


def _unknown(error: Exception) -> AppendUnknown:
    """The error of a batch whose last try failed with `error`, and of which an earlier try may have been stored."""
    if isinstance(error, AppendUnknown):
        return error
    return AppendUnknown(
        f"an earlier try may have stored the batch, and the last one failed: {error}. Whether the messages are in the "
        "log is not known: look for them before you send them again"
    )
