"""What waits to be stored: the state that a producer's senders share with its background thread.

`send` is the hot path and takes no lock (`Producer.send`). It adds a row to the open chunk, and then reads
`Chunk.is_watched`. Whoever seals a chunk sets `is_watched` first and counts the rows afterwards. So a sender that reads
False has added its row before the rows were counted, and the row is stored. A sender that reads True asks under the
lock (`recheck`) whether its row was counted, and sends the message again if it was not. The background thread sets
`is_watched` of the open chunk before it sleeps, so that the sender of the first row wakes it.

Everything else is read and written under `lock`, unless its comment says otherwise. An interrupt may be raised between
any two bytecodes that call something; sequences that must not be divided contain no call.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from pxrs.errors import AppendFailed, BufferFull, Closed, UsedAfterFork
from pxrs.hashing import Hash
from pxrs.producer.chunks import Chunk, RowDetails
from pxrs.producer.condition import Condition
from pxrs.producer.keyless import RUN_ROWS, KeylessSpread
from pxrs.producer.receipts import WIDTH, Result, RowReceipt, SentBatch, SortedRows, copy_of

SMALL_BYTES: Final = 448
"""The size of a small message: its key and value have at most this number of bytes. It counts for SMALL_COUNTED_BYTES
in the buffer, whatever its size, so that the number of rows bounds the bytes of a chunk of such messages."""
SMALL_COUNTED_BYTES: Final = 512


class Limits(NamedTuple):
    """The settings of a producer: see `Producer`."""

    linger_s: float
    batch_rows: int
    batch_bytes: int
    buffer_bytes: int
    buffer_timeout: float
    delivery_s: float


class Outbox:
    """Threads share it."""

    # With slots, because looking up an attribute of an object with this number of attributes is slow otherwise, and
    # `send` needs two.
    __slots__ = (
        "_chunk_rows",
        "_hash",
        "_keyless",
        "_partitions",
        "_sealed_bytes_max",
        "_settled",
        "_unsettled",
        "barriers",
        "broken",
        "chunk",
        "chunk_end",
        "counted",
        "done",
        "error",
        "fatal",
        "in_hand",
        "is_closing",
        "is_drained",
        "is_ended",
        "is_forked",
        "is_held",
        "is_pressed",
        "limits",
        "lingers_since",
        "lock",
        "name",
        "ready",
        "sent",
        "serial",
        "settled_serial",
        "stuck",
        "taken_serial",
        "work",
    )

    def __init__(self, name: str, partitions: int, hash_of: Hash, limits: Limits):
        """name: the name of the topic."""
        self.name, self.limits = name, limits
        self.broken: dict[int, BaseException] = {}
        """The partitions that take no more messages, each with the error. The Appender adds to it."""
        self.stuck: set[int] = set()
        """The partitions that are being tried again, or block. Messages without a key go to others. Kept by the
        Appender, under its own lock."""
        self._partitions, self._hash = partitions, hash_of
        self.lock = threading.Lock()
        self.work = Condition()
        """Notified when there may be work for the background thread."""
        self.done = Condition()
        """Notified when the background thread has stored something or has ended. `flush`, `close`, receipts and senders
        without room wait for it."""
        self.chunk = Chunk(self.done)
        """The open chunk. `send` reads it without the lock."""
        self._chunk_rows = max(1, min(limits.batch_rows, limits.buffer_bytes // 3 // SMALL_COUNTED_BYTES))
        self.chunk_end = self._chunk_rows * WIDTH
        """Length of the open chunk up to which `send` takes the fast path. 0 disables the fast path: the producer is
        closed, or a partition takes no more messages. `send` reads it without the lock."""
        # How full the buffer may be for the open chunk to be sealed, so that another one can still be filled.
        self._sealed_bytes_max = limits.buffer_bytes - 2 * self._chunk_rows * SMALL_COUNTED_BYTES
        self.ready: list[Chunk | SentBatch] = []
        """Sealed chunks, and batches of tables, in the order in which they were sent."""
        self.serial = 0
        """How many chunks were sealed, and batches of tables added to `ready`; numbers them."""
        self.barriers: dict[int, tuple[int, BaseException]] = {}
        """By partition: what has a serial up to this one was sent before a failure of the partition could be seen, and
        fails with this error."""
        self.in_hand: list[Chunk | SentBatch] = []
        """The chunks and batches that the background thread is cutting into batches now."""
        self.sent: dict[SentBatch, None] = {}
        """The batches that have no result yet."""
        self.counted = 0
        """Bytes of `ready`, `in_hand` and `sent`, and of the messages in the open chunk that are not small."""
        self.lingers_since = time.monotonic()
        """A moment of the monotonic clock: nothing in the open chunk was added before it."""
        self.taken_serial = self.settled_serial = 0
        """The serial up to which the background thread has taken everything; up to which everything has its result."""
        self._unsettled: dict[int, int] = {}
        """By the serial with which a round begins: how many batches of the round have no result yet. A round is what
        was taken together; while it is being cut into batches it counts as one more."""
        self._settled = 0
        """How often batches got their results. It changes when the buffer has more room."""
        self.error: BaseException | None = None
        """The first error of a batch, or of the background thread, since `flush` or `close` has last raised one."""
        self.fatal: BaseException | None = None
        """The error that has ended the background thread."""
        rows = min(RUN_ROWS, limits.batch_rows)
        self._keyless = KeylessSpread(partitions, uuid.uuid4().int % partitions, rows, limits.batch_bytes)
        """Chooses the partitions of messages without a key."""
        self.is_pressed = False
        """Whether everything is to be taken at once, without lingering."""
        self.is_held = False
        """The open chunk is due, and was not taken because the buffer is full: until a batch has got its result."""
        self.is_closing = self.is_drained = self.is_ended = False
        """is_closing: no more messages are accepted. is_drained: the background thread has taken the last ones.
        is_ended: everything has its result."""
        self.is_forked = False
        """Whether this process is a forked child of the one that made the producer."""

    # Called by senders.

    def add(
        self, chunk: Chunk, key: bytes | None, value: bytes | None, time: float | RowDetails, size: int
    ) -> RowReceipt:
        """Add a row to the chunk that `chunk_with_room` has returned. The caller holds the lock.

        size: the bytes of the message if it is not small, otherwise 0."""
        chunk.has_details = chunk.has_details or isinstance(time, RowDetails)
        index = len(chunk.rows)
        # No call in between: an interrupt comes before all three or after.
        chunk.large_bytes += size
        self.counted += size
        chunk.rows += key, value, time
        receipt = chunk.receipt_of(index, time)
        if chunk.large_bytes >= self.limits.batch_bytes:
            self.seal()
        self.work.notify_all()
        return receipt

    def recheck(self, chunk: Chunk, index: int, time: float) -> RowReceipt | None:
        """Called if another sender added a row to the chunk, or the chunk was sealed, while `send` added one. Returns
        the receipt; None if the row came too late to be stored."""
        with self.lock:
            receipt = chunk.receipt_of(index, time)
            if not chunk.is_sealed or receipt.index < chunk.decide_taken():
                self.work.notify_all()
                chunk.is_watched = chunk.is_sealed  # the background thread was woken, and finds the row
                return receipt
        return None

    def put(self, partition: int, records: pa.RecordBatch) -> SentBatch:
        """Add records that are a batch of their own, behind everything that was sent before. Waits for room."""
        size = records.nbytes + SMALL_COUNTED_BYTES
        until = time.monotonic() + self.limits.buffer_timeout
        while True:
            with self.lock:
                self._check_sound(partition)
                if self.chunk_with_room(size) is not None:
                    self.seal()
                    expires_at = time.monotonic() + self.limits.delivery_s
                    batch = SentBatch(partition, self.done, records, size, expires_at, self.serial + 1)
                    # No call before the last of these, as in `seal`.
                    self.serial += 1
                    self.counted += size
                    self.ready.append(batch)
                    self.work.notify_all()
                    return batch
                settled = self.press()
            self.await_room(settled, until)

    def chunk_with_room(self, size: int) -> Chunk | None:
        """The open chunk, another one if it is full; None if the buffer has no room. The caller holds the lock.

        size: the bytes that are to be counted besides those of a small message."""
        while True:
            self.check_usable()
            chunk = self.chunk
            is_large = chunk.large_bytes > 0 and chunk.large_bytes + size > self.limits.batch_bytes
            is_full = len(chunk.rows) >= self._chunk_rows * WIDTH or (is_large and bool(chunk.rows))
            more = size + (self._chunk_rows * SMALL_COUNTED_BYTES if is_full else 0)
            if more and self.counted and self.counted + more > self._sealed_bytes_max:
                return None
            if not is_full:
                return chunk
            self.seal()
            self.work.notify_all()

    def await_room(self, settled: int, until: float) -> None:
        """Without the lock: wait until more batches got their results than when `press` returned `settled`. Raises
        BufferFull at the moment `until` of the monotonic clock."""
        left = until - time.monotonic()
        if left <= 0:
            raise BufferFull(
                f"{self.name}: the buffer has been full for {self.limits.buffer_timeout:g} s; "
                "the log is slower than the sender: try again later, or raise buffer_bytes"
            )
        self.done.wait_for(lambda: self._settled != settled or self.is_closing, left)

    def press(self) -> int:
        """Make the background thread take everything at once. The caller holds the lock. Returns the argument for
        `await_room`."""
        self.is_pressed = True
        self.work.notify_all()
        return self._settled

    def check_target(self, key: bytes | None, partition: int | None) -> None:
        """Raise the error of the partition that a message must go to, if that has failed. A message that may go to any
        partition is refused only if all have failed. The caller holds the lock."""
        if partition is None and key is not None:
            partition = self._hash(key) % self._partitions
        if partition is not None:
            self._check_sound(partition)
        elif len(self.broken) == self._partitions:
            self._check_sound(0)

    def _check_sound(self, partition: int) -> None:
        self.check_usable()
        if partition in self.broken:
            raise copy_of(self.broken[partition])

    def check_usable(self) -> None:
        if self.is_forked:
            raise UsedAfterFork(
                f"the producer of {self.name} was created before a fork: create another one in the child"
            )
        if self.is_closing:
            raise Closed(f"the producer of {self.name} was closed")

    def choose_keyless(self, chosen: pa.Array, size: int, serial: int | None = None) -> pa.Array:
        """The partitions of some messages of `size` bytes, with one chosen for each message that has neither a key nor
        a partition. serial: that of the last message; None if they are being sent."""
        with self.lock:
            avoided = {*self.broken, *self.stuck}
            if serial is not None:
                avoided |= {number for number, (upto, _) in self.barriers.items() if serial <= upto}
            return self._keyless.fill(chosen, size, avoided)

    def raise_first(self) -> None:
        """Raise the first error since the last call that has raised one. The caller holds the lock."""
        if self.error is not None:
            error = copy_of(self.error)
            # No call before it is raised: an interrupt must not come when the error is in neither place.
            self.error = None
            raise error

    # Called by both sides.

    def has_work(self) -> bool:
        return bool(self.ready) or (bool(self.chunk.rows) and not self.is_held)

    def last_serial(self) -> int:
        """The serial of the last message that was sent. The caller holds the lock."""
        return self.serial + bool(self.chunk.rows)

    def seal(self) -> None:
        """Seal the open chunk, if it has any rows, and open another one. The caller holds the lock."""
        chunk = self.chunk
        if not chunk.rows:
            return
        fresh = Chunk(self.done)
        # No call before the last of these: an interrupt must not leave the chunk in neither place.
        chunk.is_watched = chunk.is_sealed = True
        chunk.since = chunk.opened_at if chunk.opened_at > self.lingers_since else self.lingers_since
        self.serial += 1
        chunk.serial = self.serial
        self.chunk = fresh
        self.ready.append(chunk)
        counted = chunk.decide_taken() // WIDTH * SMALL_COUNTED_BYTES
        chunk.counted = counted
        self.counted += counted

    # Called by the background thread.

    def take(self) -> bool:
        """Move what is due to `in_hand`. False if the producer is closing and nothing is left."""
        with self.lock:
            if self.is_closing:
                self._seal_for_good()
                self.is_drained = True
            is_due = time.monotonic() >= self.lingers_since + self.limits.linger_s
            if self.is_pressed or self.is_closing or is_due:  # then the open chunk is taken too, which saves appends
                size = len(self.chunk.rows) // WIDTH * SMALL_COUNTED_BYTES
                is_full = self.counted + size > self._sealed_bytes_max
                if is_full and size and self.sent and not self.is_closing:
                    self.is_held = True  # partitions that are stuck must not make the buffer larger than it may be
                else:
                    self.is_pressed = False
                    self.seal()  # before the next line, because the time of the messages counts from `lingers_since`
                    self.lingers_since = time.monotonic()
            if not self.ready:
                return False
            self.in_hand, self.ready = self.ready, []
            self._unsettled[self.in_hand[0].serial] = 1
            self.taken_serial = self.in_hand[-1].serial
            return True

    def is_cut_behind(self, item: Chunk | SentBatch) -> bool:
        """Whether messages behind this one must not be in one batch with it: only it was sent before a failure."""
        if not self.barriers:
            return False
        with self.lock:
            return any(upto == item.serial for upto, _ in self.barriers.values())

    def note_sorted(self, chunks: Sequence[Chunk], firsts: Sequence[int], found: SortedRows) -> bool:
        """Tell the receipts of these chunks where their rows are. False if everything has failed meanwhile."""
        with self.lock:
            if self.is_ended:
                return False
            for chunk, first in zip(chunks, firsts, strict=False):
                chunk.places.first, chunk.places.sorted = first, found
            return True

    def begin_round(self, batches: Sequence[SentBatch]) -> bool:
        """What was taken is these batches. False if everything has failed meanwhile."""
        with self.lock:
            if self.is_ended:
                return False
            begins = self.in_hand[0].serial
            self.in_hand = []
            for batch in batches:
                batch.round = begins
                self.sent[batch] = None
            self._unsettled[begins] += len(batches)
            return True

    def end_round(self) -> None:
        """The Appender has all batches of the round that was taken last."""
        with self.lock:
            if self._unsettled:
                self._count_settled(next(reversed(self._unsettled)))
            is_done = self.settled_serial == self.taken_serial
        if is_done:
            self.done.notify_all()

    def _count_settled(self, begins: int) -> None:
        """One more batch of the round that begins with this serial has its result."""
        left = self._unsettled.get(begins, 0) - 1
        if left > 0:
            self._unsettled[begins] = left
        else:
            self._unsettled.pop(begins, None)
        self.settled_serial = next(iter(self._unsettled), self.taken_serial + 1) - 1

    def refusal(self, batch: SentBatch) -> BaseException | None:
        """Why the batch cannot be stored: its partition takes no more, or has failed after the batch was sent."""
        if not self.broken and not self.barriers:
            return None
        with self.lock:
            upto, error = self.barriers.get(batch.partition, (-1, None))
            if batch.partition in self.broken:
                return self.broken[batch.partition]
            return error if batch.serial <= upto else None

    def _seal_for_good(self) -> None:
        """When the producer is closing: a sender that comes too late finds its chunk sealed, and is refused."""
        chunk = self.chunk
        chunk.is_watched = chunk.is_sealed = True  # before the rows are counted, see the module's docstring
        if chunk.rows:
            fresh = Chunk(self.done)
            fresh.is_watched = fresh.is_sealed = True
            fresh.taken = 0
            chunk.since = max(chunk.opened_at, self.lingers_since)
            self.serial += 1
            chunk.serial = self.serial
            self.chunk = fresh
            self.ready.append(chunk)
        elif chunk.taken < 0:
            chunk.taken = 0

    def settle(self, results: Sequence[Result], failed: Mapping[int, BaseException]) -> None:
        """Set the results of batches that have none, and free their share of the buffer.

        failed: partitions that have failed; what was sent to them before now fails with this error."""
        with self.lock:
            for batch, result in results:
                if batch not in self.sent:
                    continue
                del self.sent[batch]
                if isinstance(result, BaseException):
                    batch.error = result
                    self.error = self.error or result
                else:
                    batch.offset = result
                self.counted -= batch.size
                batch.records = None  # a receipt that is kept must not keep the messages
                self._count_settled(batch.round)
            if failed:
                if not self.is_drained:
                    self.seal()  # so that everything that was sent before the errors could be seen has a serial
                self.barriers |= {partition: (self.serial, error) for partition, error in failed.items()}
            if self.broken:
                self.chunk_end = 0  # from now on `send` checks whether its partition takes messages
            self._settled += 1
            self.is_held = False
        if failed:
            self.work.notify_all()
        self.done.notify_all()

    def end(self, error: BaseException | None) -> None:
        """The background thread stores nothing more, because all is done or because of this error."""
        with self.lock:
            if self.is_ended:
                return
            if error is not None:
                for partition in range(self._partitions):
                    self.broken.setdefault(partition, error)
                self.error, self.fatal = self.error or error, error
                self._fail_all(error)
            self.is_ended = True
            self.chunk_end = 0
        self.done.notify_all()

    def abandon(self) -> None:
        """The producer was closed before everything was stored. What the Appender does not have fails as not stored."""
        with self.lock:
            if not self.is_ended:
                rest = (*self.in_hand, *self.ready, *((self.chunk,) if self.chunk.rows else ()))
                why = "not stored, because the producer was closed; it was not sent to the log"
                error = AppendFailed(f"{self.name}: {why}")
                self.error = self.error or (error if rest else None)
                self._fail_all(error)
            self.is_drained = self.is_ended = True
            self.chunk_end = 0
        self.done.notify_all()

    def disown(self) -> None:
        """In a forked child: the parent sends what waits, and a thread that does not exist here may hold the lock."""
        self.is_forked = True
        self.chunk_end = 0
        self.lock = threading.Lock()
        self.done.forget_waiters()
        self._fail_all(UsedAfterFork("the message was sent before a fork: only the parent process gets its result"))

    def _fail_all(self, error: BaseException) -> None:
        """Set this error as the result of everything that has none yet."""
        for item in (*self.in_hand, *self.sent, *self.ready, self.chunk):
            if isinstance(item, Chunk):
                item.is_watched = item.is_sealed = True
                item.places.fail(error)
                for batch in item.places.batches:
                    batch.error = batch.error if batch.is_done else error
            elif not item.is_done:
                item.error = error
        self.in_hand, self.ready = [], []
        self.sent.clear()
        self._unsettled.clear()
