"""Sending messages to a topic, in batches, from any number of threads.

`send` puts a message into the open chunk and returns; one background thread takes what is due: a full chunk at once,
another when it has lingered. It hashes the keys, each once, sorts the rows by partition and cuts them into batches.
While an append is under way more is collected, so a slow disk makes larger batches, not a longer queue; `buffer_bytes`
bounds what waits, and `send` blocks beyond it (X16).

No error of an append is lost: the receipts of the messages raise it, and `flush` and `close` do.

The thread holds the producer weakly while it waits (`ProducerLink`), so that a producer that nobody has any more is
collected. Its finalizer warns and gives the producer back to the thread, which stores what waits and ends.

`send` is the hot path and takes no lock. A chunk is one flat list to which a sender adds key, value and time in one
step that nothing can divide, neither another thread nor an interrupt. Then it looks whether the row is where it must
be, which fails if two senders met, and whether the chunk is watched. It is when it was sealed meanwhile: whoever seals
sets the mark first and counts the rows then, so a sender that sees no mark was counted. One that sees it asks, under
the lock, and sends again if it came too late. An empty chunk is watched too while the thread sleeps, to be woken by the
first row. A small message counts for a fixed size, so that the length of a chunk bounds its bytes.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import accumulate, pairwise
from types import TracebackType
from typing import Final, Self, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from pxrs import arguments, dropped
from pxrs.errors import BufferFull, Closed, InvalidArgument, InvalidRecord, PartlySent, PxrsError, UsedAfterFork
from pxrs.log.batch import FRAME_BYTES_MAX
from pxrs.log.contract import TopicLog
from pxrs.model import microseconds_of
from pxrs.producer.appender import Appender, Result
from pxrs.producer.hashing import hash_named, partitions_of, read_table, slices, sort_by_partition, split_table
from pxrs.producer.keyless import RUN_ROWS, KeylessSpread
from pxrs.producer.outgoing import (
    WIDTH,
    Bell,
    Chunk,
    Extra,
    Headers,
    Receipt,
    SentBatch,
    Sorted,
    TableReceipt,
    again,
    columns_of,
    receipt_of,
    taken_of,
)

LINGER_S_DEFAULT: Final = 0.005
BATCH_ROWS_DEFAULT: Final = 10_000
BATCH_BYTES_DEFAULT: Final = 1 << 20
BUFFER_BYTES_DEFAULT: Final = 64 << 20
TRIES_MAX_DEFAULT: Final = 8
MESSAGE_BYTES_MAX: Final = FRAME_BYTES_MAX - (1 << 16)
SLICE_BYTES_MAX: Final = 256 << 20
SMALL_BYTES: Final = 448
"""A message of up to so many bytes of key and value counts for SMALL_COUNTED_BYTES in the buffer, whatever its size."""
SMALL_COUNTED_BYTES: Final = 512

T = TypeVar("T")
_logger: Final = logging.getLogger(__name__)
_time = time.time
_links: weakref.WeakSet[ProducerLink] = weakref.WeakSet()


def _after_fork() -> None:
    for link in _links:
        producer = link.producer()
        if producer is not None:
            producer._disown()


class ProducerLink:
    """The producer as its thread, its hub and the end of the process have it: weakly, as long as anybody else has it;
    after its finalizer has run, strongly, until its thread has stored what waited."""

    def __init__(self, producer: Producer) -> None:
        self._producer = weakref.ref(producer)
        self.dropped: Producer | None = None
        """Set by the finalizer."""

    def producer(self) -> Producer | None:
        """None between the moment the garbage collector clears `_producer` and the run of the finalizer, which rings
        the thread's bell; and when the thread has ended and the producer is gone."""
        return self.dropped if self.dropped is not None else self._producer()

    def close(self) -> None:
        producer = self.producer()
        if producer is not None:
            producer.close()

    # What the thread waits for. It holds the producer only for the moment of the look.

    def has_work(self) -> bool:
        producer = self.producer()
        return producer is not None and (producer._is_pressed or producer._is_closing or producer._has_work())

    def is_due(self) -> bool:
        producer = self.producer()
        return producer is not None and (producer._is_pressed or producer._is_closing or bool(producer._ready))

    def look(self, step: Callable[[Producer], T], otherwise: T) -> T:
        producer = self.producer()
        return otherwise if producer is None else step(producer)


# Asking for the process id at every `send` would cost a system call.
os.register_at_fork(after_in_child=_after_fork)


class Producer:
    """Sends to one topic. Threads share it; a forked child must open its own."""

    # Slots: an object with so many attributes would else be slow to look them up, and `send` needs two.
    __slots__ = (
        "__weakref__",
        "_appender",
        "_batch_bytes",
        "_batch_rows",
        "_broken",
        "_buffer_bytes",
        "_buffer_timeout",
        "_chunk",
        "_chunk_end",
        "_chunk_rows",
        "_counted",
        "_done",
        "_error",
        "_error_is_known",
        "_hash",
        "_in_hand",
        "_is_closing",
        "_is_ended",
        "_is_forked",
        "_is_pressed",
        "_keyless",
        "_linger_s",
        "_link",
        "_lock",
        "_log",
        "_partitions",
        "_ready",
        "_rounds_begun",
        "_rounds_done",
        "_sealed_bytes_max",
        "_settled",
        "_since",
        "_thread",
        "_work",
        "hub",
        "link",
    )

    def __init__(
        self,
        log: TopicLog,
        *,
        linger_s: float | timedelta = LINGER_S_DEFAULT,
        batch_rows: int = BATCH_ROWS_DEFAULT,
        batch_bytes: int = BATCH_BYTES_DEFAULT,
        buffer_bytes: int = BUFFER_BYTES_DEFAULT,
        buffer_timeout: float | timedelta = 60.0,
        tries_max: int = TRIES_MAX_DEFAULT,
    ) -> None:
        """
        linger_s:       how long a batch that is not full waits for more messages.
        batch_rows, batch_bytes: the most in one batch; when so much waits, of all partitions together, it is taken. A
                        message larger than `batch_bytes` goes alone.
        buffer_bytes:   how much may wait to be stored before `send` blocks; a message larger than that goes alone.
                        A small message counts as 512.
        buffer_timeout: how long `send` blocks before it raises BufferFull.
        tries_max:      how often a batch is tried when the log raises AppendFailed.
        """
        self._log = log
        self.hub: object = None
        """The hub that made this producer. It closes its log with its last reference, which is here."""
        self._linger_s = arguments.seconds(InvalidArgument, "linger_s", linger_s, 0, 60)
        self._batch_rows = arguments.whole(InvalidArgument, "batch_rows", batch_rows, 1, 1 << 20)
        self._batch_bytes = arguments.whole(InvalidArgument, "batch_bytes", batch_bytes, 1, FRAME_BYTES_MAX // 2)
        self._buffer_bytes = arguments.whole(InvalidArgument, "buffer_bytes", buffer_bytes, 1 << 10, 1 << 40)
        self._buffer_timeout = arguments.seconds(InvalidArgument, "buffer_timeout", buffer_timeout, 0, 86_400)
        self._is_forked = False
        self._partitions = log.partitions
        self._hash = hash_named(log.topic.partitioner)
        self._lock = threading.Lock()
        self._work = Bell()
        """Heard by the background thread."""
        self._done = Bell()
        """Heard by those who wait for it."""
        self._chunk = Chunk(self._done)
        """The open one."""
        self._chunk_rows = max(1, min(self._batch_rows, self._buffer_bytes // 3 // SMALL_COUNTED_BYTES))
        self._chunk_end = self._chunk_rows * WIDTH
        """Up to this length of a chunk `send` needs no second thought; 0 once the producer is closed or has failed."""
        # The open chunk is taken though this is reached, and then another one may fill.
        self._sealed_bytes_max = self._buffer_bytes - 2 * self._chunk_rows * SMALL_COUNTED_BYTES
        self._ready: list[Chunk | SentBatch] = []
        """Sealed chunks and tables, in order."""
        self._counted = 0
        """Bytes of these and of those that are being appended, and of messages in open chunks that are not small."""
        self._in_hand: list[Chunk | SentBatch] = []
        self._since = 0.0
        """Nothing that waits in an open chunk is older."""
        self._rounds_begun = self._rounds_done = self._settled = 0
        self._appender = Appender(log, arguments.whole(InvalidArgument, "tries_max", tries_max, 1, 1_000))
        self._broken = self._appender.broken
        self._error: BaseException | None = None
        self._error_is_known = False
        rows = min(RUN_ROWS, self._batch_rows)
        self._keyless = KeylessSpread(self._partitions, uuid.uuid4().int % self._partitions, rows, self._batch_bytes)
        """Chooses the partitions of messages without a key. Used under `_lock`."""
        self._is_pressed = False
        self._is_closing = self._is_ended = False
        self.link = self._link = ProducerLink(self)
        """`link`: what a hub refers to in order to close this producer, which may still be dropped without `close`."""
        name = f"pxrs-producer-{log.name}"
        self._thread = threading.Thread(target=_serve, args=(self._link, self._work), name=name, daemon=True)
        self._thread.start()
        _links.add(self._link)
        # The thread is a daemon, so that a forgotten producer does not keep the process; what it holds is still sent.
        atexit.register(self._link.close)

    @property
    def topic_id(self) -> str:
        """The id of the topic that it sends to."""
        return self._log.id

    def send(
        self,
        value: bytes | str | None,
        key: bytes | str | None = None,
        headers: Iterable[tuple[str, bytes | None]] | None = None,
        timestamp: int | datetime | None = None,
        partition: int | None = None,
    ) -> Receipt:
        """Send one message; str is taken as UTF-8. The receipt's `result()` waits until it is durable.

        timestamp: microseconds since 1970, or a datetime with a time zone; now if none is given.
        partition: else that of the key's hash. Messages without a key are spread over the partitions in runs: see
                   docs/log.md.
        Raises InvalidRecord, Closed, UsedAfterFork, BufferFull, and the error of a
        partition that has failed. If an interrupt ends it, the message may have been sent.
        """
        if (
            headers is None
            and timestamp is None
            and partition is None
            and type(key) is bytes
            and type(value) is bytes
            and len(key) + len(value) <= SMALL_BYTES
        ):
            chunk = self._chunk
            rows = chunk.rows
            at = len(rows)
            if at < self._chunk_end:
                now = _time()
                rows.extend((key, value, now))
                if rows[at + 2] is not now or chunk.is_watched:
                    return self._look_again(chunk, at, now, key, value)
                receipt = Receipt()
                receipt._fate = chunk.fate
                receipt._at = at
                return receipt
        return self._send_any(value, key, headers, timestamp, partition)

    def send_batch(self, table: pa.Table | pa.RecordBatch) -> TableReceipt:
        """Send the rows of a table with the columns value and, if there, key, timestamp, headers, partition.

        A null timestamp is now, a null partition that of the key; rows with neither a key nor a partition are spread as
        `send` does it. Rows of one partition keep their order, also with what was sent before. Raises InvalidRecord
        before anything of the table was sent, and PartlySent, whose `receipt` tells of the rows that were, if the
        buffer stays full or a partition has failed."""
        with self._lock:
            self._check_usable()
        batches: list[tuple[SentBatch, int]] = []
        rows = read_table(table, self._partitions, MESSAGE_BYTES_MAX)
        rows_max = self._batch_rows * min(self._partitions, 64)
        for piece in slices(rows, rows_max, SLICE_BYTES_MAX):
            for partition, records in split_table(piece, self._hash, self._partitions, self._fill_keyless):
                for part in self._cut(records):
                    try:
                        batches.append((self._put(partition, part), part.num_rows))
                    except PxrsError as error:
                        if not batches:
                            raise
                        raise PartlySent(self._log.name, rows.num_rows, TableReceipt(batches)) from error
        return TableReceipt(batches)

    def flush(self) -> None:
        """Wait until everything sent before is durable. Raises the first error of those that could not be stored."""
        with self._lock:
            self._check_usable()
            target = self._rounds_begun + self._has_work()
            self._press()
        self._done.wait_for(lambda: self._rounds_done >= target or self._is_ended)
        with self._lock:
            if self._error is not None:
                self._error_is_known = True
                raise again(self._error)

    def close(self) -> None:
        """Send what waits, then stop. Raises an error that no `flush` has raised yet."""
        if self._is_forked:
            return  # it is the parent's
        with self._lock:
            self._is_closing = True
            self._chunk_end = 0
            self._press()
        self._done.ring()
        # Not `Thread.join`: after one that was interrupted, the next returns at once.
        self._done.wait_for(lambda: self._is_ended)
        atexit.unregister(self._link.close)
        with self._lock:
            if self._error is not None and not self._error_is_known:
                self._error_is_known = True
                raise again(self._error)

    # The way in.

    def _send_any(
        self,
        value: bytes | str | None,
        key: bytes | str | None,
        headers: Iterable[tuple[str, bytes | None]] | None,
        timestamp: int | datetime | None,
        partition: int | None,
    ) -> Receipt:
        """What is not two short byte strings and nothing else, or finds its chunk full."""
        plain_key, plain_value = _bytes("key", key), _bytes("value", value)
        if plain_key is not key or plain_value is not value:
            return self.send(plain_value, plain_key, headers, timestamp, partition)
        size = len(plain_key or b"") + len(plain_value or b"")
        header_list = None if headers is None else _header_list(headers)
        if header_list:
            size += sum(len(name) * 4 + len(content or b"") + 16 for name, content in header_list)
        if size > MESSAGE_BYTES_MAX:
            raise InvalidRecord(f"{self._log.name}: a message of {size:,} bytes, and {MESSAGE_BYTES_MAX:,} is the most")
        counted = 0 if size <= SMALL_BYTES else size
        time_us = None if timestamp is None else _microseconds(timestamp)
        if partition is not None and not self._is_partition(partition):
            raise InvalidRecord(f"{self._log.name} has no partition {partition!r}; it has 0 to {self._partitions - 1}")
        until = time.monotonic() + self._buffer_timeout
        while True:
            with self._lock:
                if self._broken:
                    self._check_target(plain_key, partition)
                chunk = self._chunk_with_room(counted)
                if chunk is not None:
                    now = _time()
                    is_plain = time_us is None and header_list is None and partition is None
                    moment = now if is_plain else Extra(now, time_us, header_list, partition)
                    return self._add(chunk, plain_key, plain_value, moment, counted)
                settled = self._settled
                self._press()
            self._await_room(settled, until)

    def _add(
        self, chunk: Chunk, key: bytes | None, value: bytes | None, moment: float | Extra, counted: int
    ) -> Receipt:
        """Under the lock."""
        chunk.has_extras = chunk.has_extras or isinstance(moment, Extra)
        at = len(chunk.rows)
        # No call in between: an interrupt comes before all three or after.
        chunk.large_bytes += counted
        self._counted += counted
        chunk.rows += key, value, moment
        receipt = receipt_of(chunk, at, moment)
        if chunk.large_bytes >= self._batch_bytes:
            self._seal()
        self._work.ring()
        return receipt

    def _look_again(self, chunk: Chunk, at: int, now: float, key: bytes, value: bytes) -> Receipt:
        """A row was added to a chunk that another sender added to or somebody sealed at the same moment."""
        with self._lock:
            receipt = receipt_of(chunk, at, now)
            if not chunk.is_sealed or receipt._at < taken_of(chunk):
                self._work.ring()
                chunk.is_watched = chunk.is_sealed  # the thread has heard, and finds the row
                return receipt
        return self._send_any(value, key, None, None, None)

    def _put(self, partition: int, records: pa.RecordBatch) -> SentBatch:
        """Queue records that are a batch of their own."""
        size = records.nbytes + SMALL_COUNTED_BYTES
        until = time.monotonic() + self._buffer_timeout
        while True:
            with self._lock:
                self._check_sound(partition)
                if self._chunk_with_room(size) is not None:
                    self._seal()
                    batch = SentBatch(partition, self._done, records, size)
                    self._counted += size
                    self._ready.append(batch)
                    self._work.ring()
                    return batch
                settled = self._settled
                self._press()
            self._await_room(settled, until)

    def _await_room(self, settled: int, until: float) -> None:
        """Without the lock: until something more is stored."""
        left = until - time.monotonic()
        if left <= 0:
            raise BufferFull(
                f"{self._log.name}: the buffer has been full for {self._buffer_timeout:g} s; "
                "the log is slower than the sender: try again later, or raise buffer_bytes"
            )
        self._done.wait_for(lambda: self._settled != settled or self._is_closing, left)

    def _chunk_with_room(self, size: int) -> Chunk | None:
        """Under the lock. `size`: what will be counted besides a row."""
        while True:
            self._check_usable()
            chunk = self._chunk
            is_large = chunk.large_bytes > 0 and chunk.large_bytes + size > self._batch_bytes
            is_full = len(chunk.rows) >= self._chunk_rows * WIDTH or (is_large and bool(chunk.rows))
            more = size + (self._chunk_rows * SMALL_COUNTED_BYTES if is_full else 0)
            fits = not more or not self._counted or self._counted + more <= self._sealed_bytes_max
            if not fits:
                return None
            if not is_full:
                return chunk
            self._seal()
            self._work.ring()

    def _seal(self) -> None:
        """Under the lock: nothing more goes into the open chunk, if it has anything; it is ready to be stored."""
        chunk = self._chunk
        if not chunk.rows:
            return
        fresh = Chunk(self._done)
        # No call before the last of these: an interrupt must not leave the chunk in neither place.
        chunk.is_watched = chunk.is_sealed = True
        self._chunk = fresh
        self._ready.append(chunk)
        counted = taken_of(chunk) // WIDTH * SMALL_COUNTED_BYTES
        chunk.counted = counted
        self._counted += counted

    def _has_work(self) -> bool:
        return bool(self._ready) or bool(self._chunk.rows)

    def _is_partition(self, given: object) -> bool:
        # A bool is a number in Python, and no partition.
        return isinstance(given, int) and not isinstance(given, bool) and 0 <= given < self._partitions

    def _check_target(self, key: bytes | None, partition: int | None) -> None:
        """Under the lock: raise the error of the partition that a message must go to. A message that may go to any is
        refused only if all have failed."""
        if partition is None and key is not None:
            partition = self._hash(key) % self._partitions
        if partition is not None:
            self._check_sound(partition)
        elif len(self._broken) == self._partitions:
            self._check_sound(0)

    def _check_sound(self, partition: int) -> None:
        self._check_usable()
        if partition in self._broken:
            raise again(self._broken[partition])

    def _press(self) -> None:
        """Under the lock: have everything taken now."""
        self._is_pressed = True
        self._work.ring()

    def _cut(self, records: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Parts that are no larger than a batch may be."""
        for start in range(0, records.num_rows, self._batch_rows):
            yield from self._halve(records.slice(start, self._batch_rows))

    def _halve(self, records: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        if records.num_rows > 1 and records.nbytes > self._batch_bytes:
            half = records.num_rows // 2
            yield from self._halve(records.slice(0, half))
            yield from self._halve(records.slice(half))
        else:
            yield records

    def _fill_keyless(self, chosen: pa.Array, size: int) -> pa.Array:
        """The partitions of some messages, with one chosen for each message that has neither a key nor a partition."""
        with self._lock:
            return self._keyless.fill(chosen, size, self._broken)

    def _check_usable(self) -> None:
        if self._is_forked:
            raise UsedAfterFork(
                f"the producer of {self._log.name} was made before a fork: make another one in the child"
            )
        if self._is_closing:
            raise Closed(f"the producer of {self._log.name} was closed")

    def _disown(self) -> None:
        """In a forked child: what waits is the parent's to send, and a thread that is not here may hold the lock."""
        self._is_forked = True
        self._chunk_end = 0
        self._lock = threading.Lock()
        self._done._waiters.clear()
        self._fail_all(UsedAfterFork("the message was sent before a fork: only the parent learns of its place"))
        atexit.unregister(self._link.close)

    # The background thread.

    def _begin_wait(self) -> bool:
        """Before the wait for something to store. Whether there is nothing yet."""
        if self._has_work():
            return False
        # Set before the chunk is looked at once more: a row that is added after the look finds it.
        self._chunk.is_watched = True
        return True

    def _begin_linger(self, was_idle: bool) -> float:
        """There is something to store: for how many seconds more may follow."""
        if was_idle:
            self._since = time.monotonic()
        return max(0.0, self._since + self._linger_s - time.monotonic())

    def _make_round(self) -> bool:
        """Store what is due; False when the producer is closing and all is done."""
        if not self._take():
            return False
        self._store(list(self._cut_in_hand()))
        return True

    def _end(self, error: BaseException | None) -> None:
        """The thread stores nothing more, because all is done or because of this error."""
        with self._lock:
            if error is not None:
                for partition in range(self._partitions):
                    self._broken.setdefault(partition, error)
                self._error = self._error or error
                self._fail_all(error)
            self._is_ended = True
            self._chunk_end = 0
        self._done.ring()
        if self._link.dropped is not None:
            atexit.unregister(self._link.close)
            if self._error is not None and not self._error_is_known:
                _logger.error(
                    "the producer of %s was dropped without close(), and not all of what it had was stored: %s",
                    self._log.name,
                    self._error,
                )
            self._link.dropped = None

    def _take(self) -> bool:
        """Take in hand what to append next; False when the producer is closing and all is done."""
        with self._lock:
            if self._is_closing:
                self._seal_for_good()
                if not self._ready:
                    return False
            is_due = time.monotonic() >= self._since + self._linger_s
            if self._is_pressed or self._is_closing or is_due:  # then everything is taken, to save appends
                self._is_pressed = False
                self._since = time.monotonic()
                self._seal()
            self._in_hand, self._ready = self._ready, []
            self._rounds_begun += 1
            return True

    def _seal_for_good(self) -> None:
        """Under the lock, at the end: a sender that comes too late finds its chunk sealed, and is refused."""
        chunk = self._chunk
        chunk.is_watched = chunk.is_sealed = True  # first, as always; a row that is there now is taken, a later one not
        if chunk.rows:
            fresh = Chunk(self._done)
            fresh.is_watched = fresh.is_sealed = True
            fresh.taken = 0
            self._chunk = fresh
            self._ready.append(chunk)
        elif chunk.taken < 0:
            chunk.taken = 0

    def _cut_in_hand(self) -> Iterator[SentBatch]:
        """Chunks that follow each other are sorted together: the more rows, the larger the batches."""
        chunks: list[Chunk] = []
        size = 0
        for item in self._in_hand:
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
        with self._lock:
            ends = [taken_of(chunk) for chunk in chunks]
        records, asked = columns_of(chunks, ends)
        chosen = partitions_of(records.column("key"), self._hash, self._partitions)
        if asked.null_count < len(asked):
            chosen = pc.coalesce(asked, chosen)
        order, pieces = sort_by_partition(records, self._fill_keyless(chosen, records.nbytes))
        parts = [(number, part) for number, piece in pieces for part in self._cut(piece)]
        starts = list(accumulate((part.num_rows for _, part in parts), initial=0))
        # Each batch gives back its share of the buffer.
        counted = sum(chunk.counted + chunk.large_bytes for chunk in chunks)
        shares = pairwise(counted * start // starts[-1] for start in starts)
        batches = [
            SentBatch(number, self._done, part, after - before)
            for (number, part), (before, after) in zip(parts, shares, strict=True)
        ]
        found = Sorted(order, starts[:-1], batches)
        for chunk, first in zip(chunks, accumulate(ends, initial=0), strict=False):
            chunk.fate.first, chunk.fate.sorted = first // WIDTH, found
        return batches

    def _store(self, batches: list[SentBatch]) -> None:
        self._in_hand = list(batches)
        for outcomes in self._appender.store(batches):
            with self._lock:
                self._settle(outcomes)
        with self._lock:
            self._in_hand = []
            self._rounds_done = self._rounds_begun
        self._done.ring()

    def _settle(self, outcomes: Sequence[Result]) -> None:
        """Under the lock: tell those who wait, and give the buffer back."""
        for batch, outcome in outcomes:
            if isinstance(outcome, BaseException):
                batch.error = outcome
                self._error = self._error or outcome
                self._chunk_end = 0  # from now on `send` asks whether its partition is sound
            else:
                batch.offset = outcome
            self._counted -= batch.size
            batch.records = None  # a receipt that is kept must not keep the messages
        self._settled += 1
        self._done.ring()

    def _fail_all(self, error: BaseException) -> None:
        """Nothing that is not stored yet will be, as far as this process can know."""
        for item in (*self._in_hand, *self._ready, self._chunk):
            if isinstance(item, Chunk):
                item.is_watched = item.is_sealed = True
                item.fate.fail(error)
                for batch in item.fate.batches:
                    batch.error = batch.error if batch.is_done else error
            elif not item.is_done:
                item.error = error
        self._in_hand, self._ready = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except PxrsError as failure:
            if error is None:
                raise
            # The block's own error goes on; that messages were lost too must not be lost with it.
            error.add_note(f"pxrs: closing the producer of {self._log.name} failed too: {failure}")

    def __del__(self) -> None:
        is_ended = getattr(self, "_is_ended", None)
        if is_ended is None or self._is_forked or sys.is_finalizing():
            return
        name, was_closing = repr(self), self._is_closing
        if is_ended:  # its thread has ended by an error, or because it was closed
            if not was_closing:
                dropped.warn(name, f"not all of what it had was stored: {self._error}", self)
            return
        # Without the lock, see `pxrs.dropped`. Nobody else has this producer: its thread has it only while it looks.
        self._is_closing = self._is_pressed = True
        self._chunk_end = 0
        self._link.dropped = self
        self._work.ring()
        if not was_closing:
            dropped.warn(name, "what waits in it is stored now, and an error of that is only logged", self)

    def __repr__(self) -> str:
        return f"<Producer of {self._log.name}{' closed' if self._is_closing else ''}>"


def _serve(link: ProducerLink, work: Bell) -> None:
    """The background thread: wait for messages, let more of them come for `linger_s`, store them, and so on."""
    error: BaseException | None = None
    try:
        is_open = True
        while is_open:
            was_idle = link.look(Producer._begin_wait, True)
            work.wait_for(link.has_work)
            left = link.look(lambda producer, was_idle=was_idle: producer._begin_linger(was_idle), 0.0)  # type: ignore[misc]
            work.wait_for(link.is_due, left)
            is_open = link.look(Producer._make_round, True)
    except BaseException as raised:  # noqa: BLE001 - whatever it is, those who wait must hear of it
        error = raised
    work.wait_for(lambda: link.producer() is not None)  # not while it is in between, see `ProducerLink.producer`
    link.look(lambda producer: producer._end(error), None)


def _bytes(name: str, given: object) -> bytes | None:
    if given is None or isinstance(given, bytes):
        return given
    if isinstance(given, str):
        return _utf8(name, given)
    if isinstance(given, bytearray | memoryview):
        return bytes(given)
    raise InvalidRecord(f"the {name} is {type(given).__name__}; give bytes, str or None")


def _header_list(headers: Iterable[tuple[str, bytes | None]]) -> Headers:
    try:
        pairs = [(name, _bytes("header", content)) for name, content in headers]
    except (TypeError, ValueError) as error:
        raise InvalidRecord(f"headers are pairs of a name and bytes: {error}") from None
    for name, _ in pairs:
        if not isinstance(name, str):
            raise InvalidRecord(f"the header name {name!r} is no str")
        _utf8("header name", name)
    return pairs


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRecord(f"the {name} is no text that UTF-8 can hold: {error}") from None


def _microseconds(timestamp: int | datetime) -> int:
    if isinstance(timestamp, datetime):
        if timestamp.tzinfo is None:
            raise InvalidRecord(f"the time {timestamp} has no time zone; give one, such as UTC")
        return microseconds_of(timestamp)
    if not isinstance(timestamp, int) or isinstance(timestamp, bool) or not -(1 << 63) <= timestamp < 1 << 63:
        raise InvalidRecord(f"the time {timestamp!r} is not in whole microseconds since 1970")
    return timestamp
