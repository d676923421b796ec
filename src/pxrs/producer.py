"""Sending messages to a topic, in batches, from any number of threads.

`send` puts a message into the open batch of its partition and returns; one background thread appends what is due: full
batches at once, others when they have lingered. While an append is under way the next batches grow, so a slow disk
makes larger batches, not a longer queue; `buffer_bytes` bounds what waits, and `send` blocks beyond it (X16).

Every batch carries the producer's id and its number in the partition, so a retry is stored once (L4). No more batches
of a partition go into one append than the log remembers: whatever became of it, the retry can be answered. When the
tries are used up, the batch fails, and with it every later one of its partition: leaving one out would break the order.
No error is lost: the receipts of the messages raise it, and `flush` and `close` do.

`send` is the hot path. A batch holds an allowance of bytes (`room`) that was taken from the buffer beforehand, so that
one subtraction checks the row limit, the byte limit, the buffer and whether the producer is open: where any of them
needs more thought, the room is not enough, and `_make_room` decides.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Final, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc

from pxrs.errors import AppendFailed, Closed, InvalidRecord, PxrsError, UsedAfterFork
from pxrs.log.batch import FRAME_BYTES_MAX, SCHEMA, Origin
from pxrs.log.contract import Append, TopicLog
from pxrs.log.producers import BATCHES_KEPT
from pxrs.partitioner import hash_named, read_table, split_table

LINGER_S_DEFAULT: Final = 0.005
BATCH_ROWS_DEFAULT: Final = 10_000
BATCH_BYTES_DEFAULT: Final = 1 << 20
BUFFER_BYTES_DEFAULT: Final = 64 << 20
TRIES_MAX_DEFAULT: Final = 8
MESSAGE_BYTES_MAX: Final = FRAME_BYTES_MAX - (1 << 16)
_ROW_BYTES: Final = 64
"""What a message is counted for besides its bytes: roughly what it takes in lists, and never nothing."""
_ALLOWANCE_BYTES: Final = 64 << 10
_BACKOFF_S: Final = (0.01, 1.0)
_TIME: Final = SCHEMA.field("timestamp").type
_HEADERS: Final = SCHEMA.field("headers").type
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_Headers = list[tuple[str, bytes | None]]

_time_ns = time.time_ns
_producers: weakref.WeakSet[Producer] = weakref.WeakSet()


def _after_fork() -> None:
    for producer in _producers:
        producer._disown()


# Asking for the process id at every `send` would cost a system call.
os.register_at_fork(after_in_child=_after_fork)


class _Batch:
    """Messages of one partition on their way."""

    __slots__ = (
        "born",
        "done",
        "error",
        "headers",
        "keys",
        "nanoseconds",
        "offset",
        "partition",
        "records",
        "room",
        "size",
        "times",
        "values",
    )

    def __init__(self, partition: int, done: threading.Condition) -> None:
        self.partition = partition
        self.done = done
        self.room = 0
        self.size = 0
        """What was taken from the buffer for it."""
        self.keys: list[bytes | None] = []
        self.values: list[bytes | None] = []
        self.nanoseconds: list[int] = []
        self.times: dict[int, int] = {}
        """Microseconds given by the sender, by row."""
        self.headers: dict[int, _Headers] = {}
        self.records: pa.RecordBatch | None = None
        self.born = 0.0
        self.offset = -1
        self.error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        return self.offset >= 0 or self.error is not None

    def seal(self) -> pa.RecordBatch:
        """Make the records, once; the lists are let go."""
        if self.records is None:
            count = len(self.values)
            times = pc.divide(pa.array(self.nanoseconds, pa.int64()), 1000)
            if self.times:
                times = pa.array([self.times.get(i, now) for i, now in enumerate(times.to_pylist())], pa.int64())
            headers = pa.nulls(count, _HEADERS)
            if self.headers:
                headers = pa.array([self.headers.get(i) for i in range(count)], _HEADERS)
            keys, values = pa.array(self.keys, pa.binary()), pa.array(self.values, pa.binary())
            self.records = pa.RecordBatch.from_arrays([keys, values, times.cast(_TIME), headers], schema=SCHEMA)
            self.keys, self.values, self.nanoseconds = [], [], []
        return self.records

    def wait(self, timeout: float | None) -> int:
        """The batch's first offset. Raises what the append raised, TimeoutError if it takes longer."""
        if not self.is_done:
            with self.done:
                if not self.done.wait_for(lambda: self.is_done, timeout):
                    raise TimeoutError(f"not stored within {timeout} s; it may be yet")
        if self.error is not None:
            raise self.error
        return self.offset


class Receipt:
    """What `send` returns: the promise of a place in the log."""

    __slots__ = ("_batch", "_row")  # no __init__: calling one would cost more than all else that `send` does with it
    _batch: _Batch
    _row: int

    def result(self, timeout: float | None = None) -> tuple[int, int]:
        """(partition, offset), when the message is durable. Raises the error if it could not be stored."""
        return self._batch.partition, self._batch.wait(timeout) + self._row

    @property
    def is_done(self) -> bool:
        return self._batch.is_done

    def __repr__(self) -> str:
        return f"<Receipt partition {self._batch.partition}{' done' if self.is_done else ''}>"


class Stored(NamedTuple):
    """Messages that lie together."""

    partition: int
    offset: int
    rows: int


class TableReceipt:
    """What `send_batch` returns."""

    __slots__ = ("_batches",)

    def __init__(self, batches: Sequence[tuple[_Batch, int]]) -> None:
        self._batches = batches  # each with its number of rows

    def result(self, timeout: float | None = None) -> list[Stored]:
        """Where the rows are, when all are durable; within a partition in the table's order."""
        until = None if timeout is None else time.monotonic() + timeout
        stored = []
        for batch, count in self._batches:
            offset = batch.wait(None if until is None else max(0.0, until - time.monotonic()))
            stored.append(Stored(batch.partition, offset, count))
        return stored

    @property
    def is_done(self) -> bool:
        return all(batch.is_done for batch, _ in self._batches)


class Producer:
    """Sends to one topic. Threads share it; a forked child must open its own."""

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
        batch_rows, batch_bytes: when a batch is full. A message larger than `batch_bytes` goes alone.
        buffer_bytes:   how much may wait to be stored before `send` blocks.
        buffer_timeout: how long `send` blocks before it raises AppendFailed.
        tries_max:      how often a batch is tried when the log raises AppendFailed.
        """
        self._log = log
        self._linger_s = _seconds("linger_s", linger_s, 60)
        self._batch_rows = _whole("batch_rows", batch_rows, 1, 1 << 20)
        self._batch_bytes = _whole("batch_bytes", batch_bytes, 1, FRAME_BYTES_MAX // 2)
        self._buffer_bytes = _whole("buffer_bytes", buffer_bytes, 1 << 10, 1 << 40)
        self._buffer_timeout = _seconds("buffer_timeout", buffer_timeout, 86_400)
        self._tries_max = _whole("tries_max", tries_max, 1, 1_000)
        self.id = uuid.uuid4()
        self._is_forked = False
        self._partitions = log.partitions
        self._hash = hash_named(log.topic.partitioner)
        # One lock; those who work and those who wait are woken apart.
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        # Without room: stands wherever no batch is open, so that `send` needs no other check.
        self._none = _Batch(-1, self._done)
        self._open = [self._none] * self._partitions
        self._ready: deque[_Batch] = deque()
        self._pending: dict[_Batch, None] = {}
        """Ready or being appended, in order."""
        self._sequences = [0] * self._partitions
        self._broken: dict[int, BaseException] = {}
        self._error: BaseException | None = None
        self._error_is_known = False
        self._buffered = 0
        self._keyless = uuid.uuid4().int % self._partitions
        self._is_pressed = False
        self._is_closing = False
        self._is_asleep = self._is_idle = False
        self._thread = threading.Thread(target=self._run, name=f"pxrs-producer-{log.name}", daemon=True)
        self._thread.start()
        _producers.add(self)
        # The thread is a daemon, so that a forgotten producer does not keep the process; what it holds is still sent.
        atexit.register(self.close)

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
        partition: else that of the key's hash; without a key one after the other, a batch at a time.
        Raises InvalidRecord, Closed, UsedAfterFork, AppendFailed if the buffer stays full, and the error of a
        partition that has failed.
        """
        if headers is None and timestamp is None and partition is None and type(key) is bytes and type(value) is bytes:
            size = len(key) + len(value) + _ROW_BYTES
            place = self._hash(key) % self._partitions
            receipt = Receipt()
            with self._lock:
                batch = self._open[place]
                room = batch.room - size
                if room < 0:
                    batch = self._make_room(place, size)
                    room = batch.room - size
                batch.room = room
                receipt._batch = batch
                values = batch.values
                receipt._row = len(values)
                # The clock is asked first: an interrupt comes after such a call, and must not leave half a row.
                now = _time_ns()
                batch.keys.append(key)
                batch.nanoseconds.append(now)
                values.append(value)
            return receipt
        return self._send_any(value, key, headers, timestamp, partition)

    def send_batch(self, table: pa.Table | pa.RecordBatch) -> TableReceipt:
        """Send the rows of a table with the columns value and, if there, key, timestamp, headers, partition.

        A null timestamp is now, a null partition that of the key. Rows of one partition keep their order, also with
        what was sent before. Raises InvalidRecord before anything of the table was sent."""
        with self._lock:
            self._check_usable()
        batches: list[tuple[_Batch, int]] = []
        rows = read_table(table, self._partitions, min(MESSAGE_BYTES_MAX, self._buffer_bytes - _ROW_BYTES))
        rows_max = self._batch_rows * min(self._partitions, 64)
        for start in range(0, rows.num_rows, rows_max):
            with self._lock:
                keyless = self._turn()
            pieces = split_table(rows.slice(start, rows_max), self._hash, self._partitions, keyless)
            for partition, records in pieces:
                batches += [(self._put(partition, part), part.num_rows) for part in self._cut(records)]
        return TableReceipt(batches)

    def flush(self) -> None:
        """Wait until everything sent before is durable. Raises the first error of those that could not be stored."""
        with self._lock:
            self._check_usable()
            self._close_open()
            self._wake()
            for batch in list(self._pending):
                self._done.wait_for(lambda b=batch: b.is_done)  # type: ignore[misc]
            if self._error is not None:
                self._error_is_known = True
                raise self._error

    def close(self) -> None:
        """Send what waits, then stop. Raises an error that no `flush` has raised yet."""
        if self._is_forked:
            return  # it is the parent's
        with self._lock:
            self._is_closing = True
            self._close_open()
            self._wake()
            self._done.notify_all()
        self._thread.join()
        atexit.unregister(self.close)
        with self._lock:
            if self._error is not None and not self._error_is_known:
                self._error_is_known = True
                raise self._error

    # The way in, under the lock unless said otherwise.

    def _send_any(
        self,
        value: bytes | str | None,
        key: bytes | str | None,
        headers: Iterable[tuple[str, bytes | None]] | None,
        timestamp: int | datetime | None,
        partition: int | None,
    ) -> Receipt:
        """Without the lock: what is not two byte strings and nothing else."""
        plain_key, plain_value = _bytes("key", key), _bytes("value", value)
        size = len(plain_key or b"") + len(plain_value or b"") + _ROW_BYTES
        header_list = None if headers is None else _header_list(headers)
        if header_list:
            size += sum(len(name) * 4 + len(content or b"") + 16 for name, content in header_list)
        time_us = None if timestamp is None else _microseconds(timestamp)
        is_placeless = partition is None and plain_key is None
        if partition is None:
            partition = 0 if plain_key is None else self._hash(plain_key) % self._partitions
        elif not isinstance(partition, int) or not 0 <= partition < self._partitions:
            raise InvalidRecord(f"{self._log.name} has no partition {partition}; it has 0 to {self._partitions - 1}")
        receipt = Receipt()
        with self._lock:
            batch = self._open[self._keyless if is_placeless else partition]
            if batch.room < size:
                batch = self._make_room(partition, size, is_placeless)
            batch.room -= size
            receipt._batch, receipt._row = batch, len(batch.values)
            if header_list is not None:
                batch.headers[receipt._row] = header_list
            if time_us is not None:
                batch.times[receipt._row] = time_us
            now = _time_ns()
            batch.keys.append(plain_key)
            batch.nanoseconds.append(now)
            batch.values.append(plain_value)
        return receipt

    def _make_room(self, partition: int, size: int, is_placeless: bool = False) -> _Batch:
        """The open batch of the partition, with room for `size`: a new one if it is full, after a wait if all is.

        is_placeless: whichever partition's turn it is, which may pass while this waits."""
        if size > min(MESSAGE_BYTES_MAX, self._buffer_bytes):
            most = min(MESSAGE_BYTES_MAX, self._buffer_bytes)
            raise InvalidRecord(f"{self._log.name}: a message of {size:,} bytes, and {most:,} is the most")
        until = None
        while True:
            self._check_usable()
            if is_placeless:
                partition = self._keyless
            if partition in self._broken:
                raise self._broken[partition]
            batch = self._open[partition]
            rows_left = self._batch_rows - len(batch.values)
            used = batch.size - batch.room
            if batch is not self._none and (rows_left <= 0 or (used and used + size > self._batch_bytes)):
                self._close_open(partition)
                self._wake()
                continue
            # Each row takes at least _ROW_BYTES, so this much room cannot hold more rows than are left.
            room = min(_ALLOWANCE_BYTES, rows_left * _ROW_BYTES, self._batch_bytes - used)
            free = self._buffer_bytes - self._buffered
            lacking = max(size, min(room, free + batch.room)) - batch.room
            if lacking <= free:
                return self._allow(partition, lacking)
            until = self._wait_for_buffer(until)

    def _allow(self, partition: int, size: int) -> _Batch:
        batch = self._open[partition]
        if batch is self._none:
            batch = self._open[partition] = _Batch(partition, self._done)
            batch.born = time.monotonic()
            if self._is_idle:  # else it wakes for an older batch, and takes this one along
                self._wake()
        batch.size += size
        batch.room += size
        self._buffered += size
        return batch

    def _wait_for_buffer(self, until: float | None) -> float:
        now = time.monotonic()
        until = now + self._buffer_timeout if until is None else until
        if now >= until:
            raise AppendFailed(
                f"{self._log.name}: {self._buffered:,} bytes still wait to be stored after {self._buffer_timeout:g} s; "
                "the log is slower than the sender: try again later, or raise buffer_bytes"
            )
        self._is_pressed = True  # no lingering while somebody waits
        self._wake()
        self._done.wait(until - now)
        return until

    def _put(self, partition: int, records: pa.RecordBatch) -> _Batch:
        """Without the lock: queue records that are a batch of their own."""
        # Counted for no more than the buffer: it then goes alone.
        size = min(self._buffer_bytes, records.nbytes + _ROW_BYTES)
        until = None
        with self._lock:
            while True:
                self._check_usable()
                if partition in self._broken:
                    raise self._broken[partition]
                if self._buffered + size <= self._buffer_bytes:
                    break
                until = self._wait_for_buffer(until)
            self._close_open(partition)
            batch = _Batch(partition, self._done)
            batch.records, batch.size = records, size
            self._buffered += size
            self._ready.append(batch)
            self._pending[batch] = None
            self._wake()
        return batch

    def _cut(self, records: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Parts that are no larger than a batch may be."""
        if records.num_rows > 1 and (records.num_rows > self._batch_rows or records.nbytes > self._batch_bytes):
            half = records.num_rows // 2
            yield from self._cut(records.slice(0, half))
            yield from self._cut(records.slice(half))
        else:
            yield records

    def _turn(self) -> int:
        """Let messages without a key go to the next partition that has not failed, if there is one."""
        turns = ((self._keyless + step) % self._partitions for step in range(1, self._partitions + 1))
        self._keyless = next((number for number in turns if number not in self._broken), self._keyless)
        return self._keyless

    def _close_open(self, partition: int | None = None) -> None:
        """Move open batches to those that are ready: all, or that of one partition."""
        for number in range(self._partitions) if partition is None else (partition,):
            batch = self._open[number]
            if batch is self._none:
                continue
            self._open[number] = self._none
            # What it did not need goes back, and a late sender that still holds it finds no room.
            self._buffered -= batch.room
            batch.size -= batch.room
            batch.room = 0
            if batch.values:
                self._ready.append(batch)
                self._pending[batch] = None
            if number == self._keyless:
                self._turn()

    def _wake(self) -> None:
        if self._is_asleep:
            self._work.notify()

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
        self._lock = threading.Lock()
        for batch in (*self._open, *self._pending):
            batch.error = UsedAfterFork("the message was sent before a fork: only the parent learns of its place")
        self._open = [self._none] * self._partitions
        atexit.unregister(self.close)

    # The background thread.

    def _run(self) -> None:
        taken: list[_Batch] = []
        try:
            while True:
                taken = self._take()
                if not taken:
                    return
                self._store(taken)
        except BaseException as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            with self._lock:
                for partition in range(self._partitions):
                    self._broken.setdefault(partition, error)
                self._close_open()
                self._ready.clear()
                self._settle([(batch, error) for batch in list(self._pending)])

    def _take(self) -> list[_Batch]:
        """The batches to append next; none when the producer is closing and all is done."""
        with self._lock:
            while True:
                self._close_due()
                if self._ready:
                    return self._next_batches()
                if self._is_closing:
                    return []
                born = min((batch.born for batch in self._open if batch is not self._none), default=None)
                self._is_asleep, self._is_idle = True, born is None
                self._work.wait(None if born is None else max(0.0, born + self._linger_s - time.monotonic()))
                self._is_asleep = self._is_idle = False

    def _close_due(self) -> None:
        due = time.monotonic() - self._linger_s
        if self._is_pressed or any(batch is not self._none and batch.born <= due for batch in self._open):
            # One append for all: those that are not due yet save one of their own.
            self._close_open()
        self._is_pressed = False

    def _next_batches(self) -> list[_Batch]:
        counts = dict.fromkeys(range(self._partitions), 0)
        taken: list[_Batch] = []
        left: deque[_Batch] = deque()
        for batch in self._ready:
            counts[batch.partition] += 1
            (taken if counts[batch.partition] <= BATCHES_KEPT else left).append(batch)
        self._ready = left
        return taken

    def _store(self, batches: list[_Batch]) -> None:
        outcomes: list[tuple[_Batch, int | BaseException]] = []
        sound: list[tuple[_Batch, Origin]] = []
        for batch in batches:
            if batch.partition in self._broken:
                outcomes.append((batch, self._broken[batch.partition]))
                continue
            sound.append((batch, Origin(self.id, 0, self._sequences[batch.partition])))
            self._sequences[batch.partition] += 1
        try:
            outcomes += self._append(sound, self._tries_max)
        except Exception:  # noqa: BLE001 - tried again below, where each partition gets its own error
            outcomes += self._store_apart(sound)
        with self._lock:
            self._settle(outcomes)

    def _store_apart(self, batches: list[tuple[_Batch, Origin]]) -> list[tuple[_Batch, int | BaseException]]:
        """One append for each partition, so that one that fails does not fail the others. A retry is stored once."""
        outcomes: list[tuple[_Batch, int | BaseException]] = []
        for partition in dict.fromkeys(batch.partition for batch, _ in batches):
            mine = [each for each in batches if each[0].partition == partition]
            try:
                outcomes += self._append(mine, 1)
            except Exception as error:  # noqa: BLE001 - raised by the receipts, flush and close
                self._broken[partition] = error
                outcomes += [(batch, error) for batch, _ in mine]
        return outcomes

    def _append(self, batches: list[tuple[_Batch, Origin]], tries_max: int) -> list[tuple[_Batch, int]]:
        """Try until it is stored; the same origins each time. Raises the last AppendFailed, and any other error."""
        appends = [Append(batch.partition, batch.seal(), origin) for batch, origin in batches]
        wait_s, wait_s_max = _BACKOFF_S
        for last in (number == tries_max for number in range(1, tries_max + 1)):
            try:
                offsets = self._log.append(appends) if appends else []
                return [(batch, offset) for (batch, _), offset in zip(batches, offsets, strict=True)]
            except AppendFailed:
                if last:
                    raise
            time.sleep(wait_s)
            wait_s = min(wait_s * 2, wait_s_max)
        raise AssertionError("tries_max is at least 1")

    def _settle(self, outcomes: Sequence[tuple[_Batch, int | BaseException]]) -> None:
        """Under the lock: tell those who wait, and give the buffer back."""
        for batch, outcome in outcomes:
            if isinstance(outcome, BaseException):
                batch.error = outcome
                self._error = self._error or outcome
                self._close_open(batch.partition)
            else:
                batch.offset = outcome
            self._buffered -= batch.size
            self._pending.pop(batch, None)
            if self._keyless in self._broken:
                self._turn()
            batch.records = None  # a receipt that is kept must not keep the messages
        self._done.notify_all()

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


def _bytes(name: str, given: object) -> bytes | None:
    if given is None or isinstance(given, bytes):
        return given
    if isinstance(given, str):
        return given.encode()
    if isinstance(given, bytearray | memoryview):
        return bytes(given)
    raise InvalidRecord(f"the {name} is {type(given).__name__}; give bytes, str or None")


def _header_list(headers: Iterable[tuple[str, bytes | None]]) -> _Headers:
    try:
        pairs = [(name, _bytes("header", content)) for name, content in headers]
    except (TypeError, ValueError) as error:
        raise InvalidRecord(f"headers are pairs of a name and bytes: {error}") from None
    for name, _ in pairs:
        if not isinstance(name, str):
            raise InvalidRecord(f"the header name {name!r} is no str")
    return pairs


def _microseconds(timestamp: int | datetime) -> int:
    if isinstance(timestamp, datetime):
        if timestamp.tzinfo is None:
            raise InvalidRecord(f"the time {timestamp} has no time zone; give one, such as UTC")
        return (timestamp - _EPOCH) // timedelta(microseconds=1)
    if not isinstance(timestamp, int) or not -(1 << 63) <= timestamp < 1 << 63:
        raise InvalidRecord(f"the time {timestamp!r} is not in whole microseconds since 1970")
    return timestamp


def _seconds(name: str, given: float | timedelta, most: float) -> float:
    seconds = given.total_seconds() if isinstance(given, timedelta) else float(given)
    if not 0 <= seconds <= most:
        raise ValueError(f"{name} is {seconds:g} s: it must be from 0 to {most:g}")
    return seconds


def _whole(name: str, given: int, least: int, most: int) -> int:
    if not isinstance(given, int) or not least <= given <= most:
        raise ValueError(f"{name} is {given!r}: it must be from {least:,} to {most:,}")
    return given
