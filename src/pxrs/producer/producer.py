"""Sending messages to a topic, in batches, from any number of threads.

`send` adds a message to the open chunk and returns. One background thread (`sending.py`) takes a chunk when it is full,
or when its first message has waited for `linger_s`. It hashes each distinct key once, sorts the rows by partition, cuts
them into batches, and appends these. While an append is under way more messages are collected, so that a slow disk
makes the batches larger, and not the queue longer. `buffer_bytes` bounds what waits; beyond it `send` blocks (X16).

No error of an append is lost: the receipts of its messages raise it, and so does `flush` or `close`. Every message has
its result at its `delivery_timeout`, or a moment later, whatever the log does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from types import TracebackType
from typing import Final, Self

import pyarrow as pa

from pxrs import arguments, dropped
from pxrs.errors import InvalidArgument, InvalidRecord, PartlySent, PxrsError
from pxrs.hashing import hash_named
from pxrs.log.batch import FRAME_BYTES_MAX
from pxrs.log.contract import TopicLog
from pxrs.producer.chunks import RowDetails
from pxrs.producer.fields import GivenHeaders, bytes_of, headers_of, microseconds
from pxrs.producer.outbox import SMALL_BYTES, Limits
from pxrs.producer.receipts import Receipt, RowReceipt, SentBatch, TableReceipt, copy_of
from pxrs.producer.sending import LATE_S, SLICE_BYTES_MAX, SendingThread
from pxrs.producer.tables import MESSAGE_BYTES_MAX, PAIR_BYTES, cut, read_table, slices, split_table

LINGER_S_DEFAULT: Final = 0.005
BATCH_ROWS_DEFAULT: Final = 10_000
BATCH_BYTES_DEFAULT: Final = 1 << 20
BUFFER_BYTES_DEFAULT: Final = 64 << 20
TRIES_MAX_DEFAULT: Final = 8
DELIVERY_S_DEFAULT: Final = 120.0
_UTF8_BYTES_MAX: Final = 4
"""How many bytes a character has at most in UTF-8."""
_time = time.time


class Producer:
    """Sends to one topic. Threads share it; a forked child must open its own."""

    __slots__ = ("__weakref__", "_hash", "_log", "_outbox", "_partitions", "hub", "sending")

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
        delivery_timeout: float | timedelta = DELIVERY_S_DEFAULT,
    ) -> None:
        """
        linger_s:       how long a batch that is not full waits for more messages.
        batch_rows, batch_bytes: the most in one batch; when this amount waits, for all partitions together, it is sent.
                        A message larger than `batch_bytes` is a batch by itself.
        buffer_bytes:   how much may wait to be stored before `send` blocks; a larger message is accepted if nothing
                        else waits. A small message counts as 512 bytes.
        buffer_timeout: how long `send` blocks before it raises BufferFull.
        tries_max:      how often a batch is tried if the log answers with AppendFailed.
        delivery_timeout: how long after it was sent a message fails if it is not stored: with AppendUnknown if a try
                        may have stored it or is still under way, else as not stored. All tries of a batch, and what
                        they wait for, stay within it. Messages that were sent one by one and are stored together
                        count from the first of them. Must be longer than `linger_s`.
        """
        limits = Limits(
            arguments.seconds(InvalidArgument, "linger_s", linger_s, 0, 60),
            arguments.whole(InvalidArgument, "batch_rows", batch_rows, 1, 1 << 20),
            arguments.whole(InvalidArgument, "batch_bytes", batch_bytes, 1, FRAME_BYTES_MAX // 2),
            arguments.whole(InvalidArgument, "buffer_bytes", buffer_bytes, 1 << 10, 1 << 40),
            arguments.seconds(InvalidArgument, "buffer_timeout", buffer_timeout, 0, 86_400),
            arguments.seconds(InvalidArgument, "delivery_timeout", delivery_timeout, 0, 86_400, above=True),
        )
        if limits.delivery_s <= limits.linger_s:
            raise InvalidArgument(
                f"delivery_timeout is {limits.delivery_s:g} s: give more than linger_s, which is {limits.linger_s:g} s"
            )
        tries = arguments.whole(InvalidArgument, "tries_max", tries_max, 1, 1_000)
        self._log = log
        self.hub: object = None
        """The hub that made this producer. The producer refers to it because a hub that nothing refers to closes its
        log."""
        self._partitions = log.partitions
        self._hash = hash_named(log.topic.partitioner)
        self.sending = SendingThread(log, self._hash, limits, tries)
        """The background threads. They outlive a producer that was dropped without `close`, until all is stored: so a
        hub that is being closed closes this."""
        self._outbox = self.sending.outbox
        self.sending.start()

    @property
    def topic_id(self) -> str:
        """The id of the topic that it sends to."""
        return self._log.id

    def send(
        self,
        value: bytes | str | None,
        key: bytes | str | None = None,
        headers: Mapping[str, bytes | None] | Iterable[tuple[str, bytes | None]] | None = None,
        timestamp: int | datetime | None = None,
        partition: int | None = None,
    ) -> Receipt:
        """Send one message; str is taken as UTF-8. The receipt's `result()` waits until it is durable.

        headers:   {name: bytes}, or pairs of both, in which a name may appear more than once.
        timestamp: microseconds since 1970, or a datetime with a time zone; now if none is given.
        partition: else that of the key's hash. Messages without a key are spread over the partitions in runs: see
                   docs/log.md.
        Raises InvalidRecord, Closed, UsedAfterFork, BufferFull, and the error of a partition that takes no more
        messages, as after the topic was deleted. If an interrupt ends it, the message may have been sent.
        """
        if (
            headers is None
            and timestamp is None
            and partition is None
            and type(key) is bytes
            and type(value) is bytes
            and len(key) + len(value) <= SMALL_BYTES
        ):
            outbox = self._outbox
            chunk = outbox.chunk
            rows = chunk.rows
            index = len(rows)
            if index < outbox.chunk_end:
                now = _time()
                rows.extend((key, value, now))
                # Another sender may have added a row at the same moment; then the row is at another index.
                if rows[index + 2] is not now or chunk.is_watched:
                    return outbox.recheck(chunk, index, now) or self._send_any(value, key, None, None, None)
                receipt = RowReceipt()
                receipt.places = chunk.places
                receipt.index = index
                return receipt
        return self._send_any(value, key, headers, timestamp, partition)

    def send_batch(self, table: pa.Table | pa.RecordBatch) -> TableReceipt:
        """Send the rows of a table with the columns value and, if there, key, timestamp, headers, partition.

        A null timestamp is now, a null partition that of the key; rows with neither a key nor a partition are spread as
        `send` does it. Rows of one partition keep their order, also with what was sent before. Raises InvalidRecord
        before anything of the table was sent, and PartlySent, whose `receipt` tells of the rows that were, if the
        buffer stays full or a partition takes no more messages."""
        outbox = self._outbox
        with outbox.lock:
            outbox.check_usable()
        limits = outbox.limits
        batches: list[tuple[SentBatch, int]] = []
        rows = read_table(table, self._partitions, MESSAGE_BYTES_MAX)
        rows_max = limits.batch_rows * min(self._partitions, 64)
        for piece in slices(rows, rows_max, SLICE_BYTES_MAX):
            for partition, records in split_table(piece, self._hash, self._partitions, outbox.choose_keyless):
                for part in cut(records, limits.batch_rows, limits.batch_bytes):
                    try:
                        batches.append((outbox.put(partition, part), part.num_rows))
                    except PxrsError as error:
                        if not batches:
                            raise
                        raise PartlySent(self._log.name, rows.num_rows, TableReceipt(batches)) from error
        return TableReceipt(batches)

    def flush(self, timeout: float | timedelta | None = None) -> None:
        """Wait until everything sent before is durable or has failed: at most 2 s longer than `delivery_timeout`.

        Raises the first error of a message since `flush` or `close` has last raised one; of messages that were sent
        later, too, if they have failed already. The producer can be used on: see docs/log.md.

        timeout: after this, in seconds or as a timedelta, raises TimeoutError. What waits stays under way, and its
        errors are raised by the next call."""
        outbox = self._outbox
        limit_s = outbox.limits.delivery_s + LATE_S
        timeout_s = limit_s if timeout is None else arguments.seconds(InvalidArgument, "timeout", timeout)
        with outbox.lock:
            outbox.check_usable()
            target = outbox.last_serial()
            outbox.press()
        is_done = outbox.done.wait_for(
            lambda: outbox.settled_serial >= target or outbox.is_ended, min(timeout_s, limit_s)
        )
        if not is_done:
            raise TimeoutError(f"{self._log.name}: not everything was stored within {min(timeout_s, limit_s):g} s")
        with outbox.lock:
            outbox.raise_first()
            if outbox.fatal is not None:
                raise copy_of(outbox.fatal)

    def close(self, timeout: float | timedelta | None = None) -> None:
        """Send what waits, then stop: at most 2 s longer than `delivery_timeout`. Raises the first error that neither
        `flush` nor an earlier call has raised.

        timeout: after this, in seconds or as a timedelta, what is not stored fails, as not stored or as unknown, and
        TimeoutError is raised. The producer is closed anyway."""
        self.sending.close(None if timeout is None else arguments.seconds(InvalidArgument, "timeout", timeout))

    def _send_any(
        self,
        value: bytes | str | None,
        key: bytes | str | None,
        headers: GivenHeaders | None,
        timestamp: int | datetime | None,
        partition: int | None,
    ) -> Receipt:
        """The slow path of `send`: for a message with more than a short key and a short value of bytes, or if the open
        chunk is full."""
        plain_key, plain_value = bytes_of("key", key), bytes_of("value", value)
        if plain_key is not key or plain_value is not value:
            return self.send(plain_value, plain_key, headers, timestamp, partition)
        size = len(plain_key or b"") + len(plain_value or b"")
        header_list = None if headers is None else headers_of(headers)
        if (tracing := self.sending.tracing) is not None:
            header_list = tracing.add_current(header_list)
        if header_list:
            size += sum(len(name) * _UTF8_BYTES_MAX + len(content or b"") + PAIR_BYTES for name, content in header_list)
        if size > MESSAGE_BYTES_MAX:
            raise InvalidRecord(f"{self._log.name}: a message of {size:,} bytes, and {MESSAGE_BYTES_MAX:,} is the most")
        time_us = None if timestamp is None else microseconds(timestamp)
        if partition is not None and not self._is_partition(partition):
            raise InvalidRecord(f"{self._log.name} has no partition {partition!r}; it has 0 to {self._partitions - 1}")
        outbox = self._outbox
        counted = 0 if size <= SMALL_BYTES else size
        is_plain = time_us is None and header_list is None and partition is None
        until = time.monotonic() + outbox.limits.buffer_timeout
        while True:
            with outbox.lock:
                if outbox.broken:
                    outbox.check_target(plain_key, partition)
                chunk = outbox.chunk_with_room(counted)
                if chunk is not None:
                    now = _time()
                    moment = now if is_plain else RowDetails(now, time_us, header_list, partition)
                    return outbox.add(chunk, plain_key, plain_value, moment, counted)
                settled = outbox.press()
            outbox.await_room(settled, until)

    def _is_partition(self, given: object) -> bool:
        # A bool is a number in Python, and no partition.
        return isinstance(given, int) and not isinstance(given, bool) and 0 <= given < self._partitions

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
            # The block's own error is raised; this note says that messages were not stored either.
            error.add_note(f"pxrs: closing the producer of {self._log.name} failed too: {failure}")

    def __del__(self) -> None:
        """Takes no lock, see `pxrs.dropped`."""
        outbox = getattr(self, "_outbox", None)
        if outbox is None or outbox.is_forked or sys.is_finalizing():
            return
        name, was_closing = repr(self), outbox.is_closing
        if outbox.is_ended:  # by an error, or because it was closed
            if not was_closing:
                error = outbox.error or outbox.fatal
                outbox.error = None  # told by the warning: a hub that is closed later does not raise it again
                dropped.warn(name, f"not all of what it had was stored: {error}", self)
            return
        self.sending.close_dropped(self.hub)
        if not was_closing:
            dropped.warn(name, "what waits in it is stored now, and an error of that is only logged", self)

    def __repr__(self) -> str:
        return f"<Producer of {self._log.name}{' closed' if self._outbox.is_closing else ''}>"
