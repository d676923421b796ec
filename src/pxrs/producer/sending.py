"""The background thread of a producer: takes what is due, sorts it by partition, and appends it.

The thread refers to the outbox and never to the producer, so that a producer that nothing else refers to is
garbage-collected although its thread runs. The producer's finalizer then makes this thread store what waits, and end.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Final

import pyarrow.compute as pc

from pxrs.hashing import Hash, partitions_of
from pxrs.log.contract import TopicLog
from pxrs.metrics import instruments
from pxrs.producer.appender import Appender
from pxrs.producer.chunks import Chunk, columns_of
from pxrs.producer.outbox import Limits, Outbox
from pxrs.producer.receipts import WIDTH, SentBatch, SortedRows, copy_of
from pxrs.producer.tables import cut, sort_by_partition

SLICE_BYTES_MAX: Final = 256 << 20
"""How many bytes of messages are sorted together at most."""
_logger: Final = logging.getLogger(__name__)


class SendingThread:
    """One thread for one outbox, which runs until it is closed. `close` may be called by any thread."""

    def __init__(self, log: TopicLog, hash_of: Hash, limits: Limits, tries_max: int) -> None:
        self._log, self._hash = log, hash_of
        self._appender = Appender(log, tries_max)
        self.tracing = self._appender.tracing
        self.outbox = Outbox(log.name, log.partitions, hash_of, self._appender.broken, limits)
        if self.tracing is not None:
            self.outbox.chunk_end = 0  # `send` then looks for the current span, which the fast path does not
        instruments.PRODUCER_BUFFER.watch(self, SendingThread._buffered)
        self._kept: tuple[object, ...] = ()
        """Objects that must not be garbage-collected before the thread has ended, once the producer was dropped."""
        self._is_dropped = False
        self._at_exit = functools.partial(_close, weakref.ref(self))
        """Refers to this object weakly: what has ended, and whose producer was dropped, is collected."""
        self.thread = threading.Thread(target=self._run, name=f"pxrs-producer-{log.name}", daemon=True)

    def _buffered(self) -> list[instruments.Read]:
        return [] if self.outbox.is_ended else [((self._log.name,), self.outbox.counted)]

    def start(self) -> None:
        self.thread.start()
        _running.add(self)
        # The thread is a daemon, so that a producer that was not closed does not keep the process from ending. What
        # waits in it is stored when the interpreter ends.
        atexit.register(self._at_exit)

    def close(self) -> None:
        """Store what waits, then end. Raises the first error, unless `flush` or an earlier call has raised it."""
        outbox = self.outbox
        if outbox.is_forked:
            return  # the parent process stores it
        with outbox.lock:
            outbox.is_closing = True
            outbox.chunk_end = 0
            outbox.press()
        outbox.done.notify_all()
        # Not `Thread.join`: if one call of it is interrupted, the next one returns at once.
        outbox.done.wait_for(lambda: outbox.is_ended)
        atexit.unregister(self._at_exit)
        with outbox.lock:
            if outbox.error is not None and not outbox.is_error_raised:
                outbox.is_error_raised = True
                raise copy_of(outbox.error)

    def close_dropped(self, *kept: object) -> None:
        """For the producer's finalizer: as `close`, without a wait and without a lock (see `pxrs.dropped`). An error is
        logged.

        kept: is not collected before everything is stored."""
        outbox = self.outbox
        self._kept, self._is_dropped = kept, True
        outbox.is_closing = outbox.is_pressed = True
        outbox.chunk_end = 0
        outbox.work.notify_all()
        if outbox.is_ended:  # just now, before it could see that the producer was dropped
            self._kept = ()

    def disown(self) -> None:
        """Give up the outbox in a forked child, where the thread does not exist."""
        self.outbox.disown()
        atexit.unregister(self._at_exit)

    def _run(self) -> None:
        """Wait for messages, let more of them come for `linger_s`, store them, and so on."""
        outbox = self.outbox
        error: BaseException | None = None
        try:
            is_open = True
            while is_open:
                self._wait()
                is_open = outbox.take()
                if is_open:
                    self._store(list(self._cut_in_hand()))
        except BaseException as raised:  # noqa: BLE001 - raised by `flush`, `close` and the receipts
            error = raised
        outbox.end(error)
        if self._is_dropped:
            self._end_dropped()

    def _wait(self) -> None:
        outbox = self.outbox
        if not outbox.has_work():
            # Set before the first check of `wait_for`: a sender that adds a row after that check reads it.
            outbox.chunk.is_watched = True
            outbox.work.wait_for(lambda: outbox.is_pressed or outbox.is_closing or outbox.has_work())
            outbox.lingers_since = time.monotonic()
        left = max(0.0, outbox.lingers_since + outbox.limits.linger_s - time.monotonic())
        outbox.work.wait_for(lambda: outbox.is_pressed or outbox.is_closing or bool(outbox.ready), left)

    def _end_dropped(self) -> None:
        outbox = self.outbox
        atexit.unregister(self._at_exit)
        if outbox.error is not None and not outbox.is_error_raised:
            _logger.error(
                "the producer of %s was dropped without close(), and not all of what it had was stored: %s",
                self._log.name,
                outbox.error,
            )
        self._kept = ()

    def _cut_in_hand(self) -> Iterator[SentBatch]:
        """What was taken, as batches. Chunks that follow each other are sorted together: the more rows are sorted, the
        larger the batches."""
        chunks: list[Chunk] = []
        size = 0
        for item in self.outbox.in_hand:
            more = item.counted + item.large_bytes if isinstance(item, Chunk) else 0
            if chunks and (isinstance(item, SentBatch) or size + more > SLICE_BYTES_MAX):
                yield from self._batches_of(chunks)
                chunks, size = [], 0
            if isinstance(item, SentBatch):
                yield item
            else:
                chunks.append(item)
                size += more
        if chunks:
            yield from self._batches_of(chunks)

    def _batches_of(self, chunks: list[Chunk]) -> list[SentBatch]:
        outbox = self.outbox
        with outbox.lock:
            ends = [chunk.decide_taken() for chunk in chunks]
        records, given = columns_of(chunks, ends)
        chosen = partitions_of(records.column("key"), self._hash, self._log.partitions)
        if given.null_count < len(given):
            chosen = pc.coalesce(given, chosen)
        if chosen.null_count:
            chosen = outbox.choose_keyless(chosen, records.nbytes)
        order, pieces = sort_by_partition(records, chosen)
        limits = outbox.limits
        parts = [(number, part) for number, all_ in pieces for part in cut(all_, limits.batch_rows, limits.batch_bytes)]
        starts = list(accumulate((part.num_rows for _, part in parts), initial=0))
        # Each batch gives its share of the buffer back.
        counted = sum(chunk.counted + chunk.large_bytes for chunk in chunks)
        shares = pairwise(counted * start // starts[-1] for start in starts)
        batches = [
            SentBatch(number, outbox.done, part, after - before)
            for (number, part), (before, after) in zip(parts, shares, strict=True)
        ]
        found = SortedRows(order, starts[:-1], batches)
        for chunk, first in zip(chunks, accumulate(ends, initial=0), strict=False):
            chunk.places.first, chunk.places.sorted = first // WIDTH, found
        return batches

    def _store(self, batches: list[SentBatch]) -> None:
        self.outbox.in_hand = list(batches)
        for results in self._appender.store(batches):
            self.outbox.settle(results)
        self.outbox.end_round()


def _close(reference: weakref.ref[SendingThread]) -> None:
    sending = reference()
    if sending is not None:
        sending.close()


_running: weakref.WeakSet[SendingThread] = weakref.WeakSet()


def _after_fork() -> None:
    for each in list(_running):
        each.disown()


# A hook of `fork`, because checking the process id at every `send` would cost a system call.
os.register_at_fork(after_in_child=_after_fork)
