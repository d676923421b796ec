"""The background threads of a producer: one takes what is due, sorts it by partition, and appends it.

That thread, the leader, makes the appends itself: to hand each one to another thread would cost more than many appends
take. So an append that blocks blocks the leader. Another thread, which mostly sleeps, sees that after SLOW_S and leads
from then on; the former leader, once its append has returned, does what the others do: it makes the appends of
partitions that are tried apart from others (`Appender`), or waits to lead.

| a thread                      | becomes     | when                                                              |
|-------------------------------|-------------|-------------------------------------------------------------------|
| leads                         | leads, busy | it appends                                                        |
| leads, busy                   | leads       | the append has returned                                           |
| leads, busy                   | helps, busy | the append has taken SLOW_S, and another thread has taken the lead|
| helps                         | leads       | the leader has been busy for SLOW_S                               |
| helps                         | helps, busy | partitions are to be tried apart from others                      |
| helps, busy                   | helps       | the append has returned                                           |

At least one thread is never busy, so that messages are taken and fail at their time whatever appends do; two, while
partitions wait to be tried apart. There are two threads, and up to THREADS_MAX while appends block.

The threads refer to the outbox and never to the producer, so that a producer that nothing else refers to is
garbage-collected although its threads run. The producer's finalizer then makes them store what waits, and end.
"""

from __future__ import annotations

import atexit
import functools
import logging
import math
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
from pxrs.producer.appender import SLOW_S, Appender, Call
from pxrs.producer.chunks import Chunk, columns_of
from pxrs.producer.condition import Condition
from pxrs.producer.outbox import Limits, Outbox
from pxrs.producer.receipts import WIDTH, SentBatch, SortedRows
from pxrs.producer.tables import cut, sort_by_partition

SLICE_BYTES_MAX: Final = 256 << 20
"""How many bytes of messages are sorted together at most."""
THREADS_MAX: Final = 8
"""How many threads a producer has at most."""
APART_MAX: Final = 4
"""How many of them make appends of partitions that are tried apart from others, at most."""
LATE_S: Final = 2.0
"""How long after its `delivery_timeout` a message has its result, at the latest: the Appender's grace, and a moment for
threads to notice."""
_IDLE_S: Final = 10.0
"""How long a thread that is not needed waits before it ends."""
_logger: Final = logging.getLogger(__name__)


class SendingThread:
    """The threads of one outbox, which run until it is closed. `close` may be called by any thread."""

    def __init__(self, log: TopicLog, hash_of: Hash, limits: Limits, tries_max: int) -> None:
        self._log, self._hash = log, hash_of
        self.outbox = Outbox(log.name, log.partitions, hash_of, limits)
        self._appender = Appender(log, tries_max, self.outbox, self._wake)
        self.tracing = self._appender.tracing
        if self.tracing is not None:
            self.outbox.chunk_end = 0  # `send` then looks for the current span, which the fast path does not
        instruments.PRODUCER_BUFFER.watch(self, SendingThread._buffered)
        self._kept: tuple[object, ...] = ()
        """Objects that must not be garbage-collected before the thread has ended, once the producer was dropped."""
        self._is_dropped = False
        self._at_exit = functools.partial(_close, weakref.ref(self))
        """Refers to this object weakly: what has ended, and whose producer was dropped, is collected."""
        self._lock = threading.Lock()
        """Guards the fields below, unless their comment says otherwise. Nothing waits, and no other lock is taken,
        while it is held."""
        self._leader: threading.Thread | None = None
        self._leads_call: Call | None = None
        """The append that the leader makes now."""
        self._threads = 1
        self._busy = self._apart = 0
        """How many threads make an append; how many of these are of partitions that are tried apart from others."""
        self._is_lonely = False
        """No other thread can be started now, as when the interpreter ends."""
        self._gives_up = False
        """What has no result is to fail. Without the lock."""
        self._is_over = False
        """All threads end, each when it is not busy."""
        self._helpers = Condition()
        """The threads that do not lead wait for it."""
        self._nudges = 0
        """Raised when there may be something to do for threads that do not lead. Without the lock."""
        self._dozing = 0
        """How many threads that do not lead sleep until they are nudged: the leader does so when it begins an append.
        Read without the lock."""
        self._calls = self._calls_seen = 0
        """How many appends leaders have made; how many there were when a thread that does not lead has last looked."""
        self.thread = self._new_thread()
        """The first one."""

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, name=f"pxrs-producer-{self._log.name}", daemon=True)

    def _buffered(self) -> list[instruments.Read]:
        return [] if self.outbox.is_ended else [((self._log.name,), self.outbox.counted)]

    def start(self) -> None:
        self.thread.start()
        _running.add(self)
        # The thread is a daemon, so that a producer that was not closed does not keep the process from ending. What
        # waits in it is stored when the interpreter ends.
        atexit.register(self._at_exit)

    def close(self, timeout_s: float | None = None) -> None:
        """Store what waits, then end. Raises the first error, unless `flush` or an earlier call has raised it.

        timeout_s: after this, what is not stored fails, and TimeoutError is raised. Everything has its result LATE_S
        after its `delivery_timeout` anyway."""
        outbox = self.outbox
        if outbox.is_forked:
            return  # the parent process stores it
        with outbox.lock:
            outbox.is_closing = True
            outbox.chunk_end = 0
            outbox.press()
        outbox.done.notify_all()
        # Not `Thread.join`: if one call of it is interrupted, the next one returns at once.
        limit_s = outbox.limits.delivery_s + LATE_S
        is_late = timeout_s is not None and timeout_s < limit_s
        if is_ended := outbox.done.wait_for(lambda: outbox.is_ended, timeout_s if is_late else limit_s):
            is_late = False
        else:
            self._abandon()
        atexit.unregister(self._at_exit)
        late = TimeoutError(
            f"the producer of {self._log.name} was closed, but not everything was stored within {timeout_s or 0:g} s: "
            "the receipts have the result of each message"
        )
        with outbox.lock:
            if is_late and not is_ended:
                error, outbox.error = outbox.error, None
                raise late from error
            outbox.raise_first()

    def _abandon(self) -> None:
        """Fail what has no result yet. Appends that have not returned may still store what they have.

        The leader does it: an interrupt of this thread in the middle would leave messages without a result, or with a
        wrong one. At the end of the interpreter the leader may be the only thread, and busy."""
        self._gives_up = True
        self._wake()
        if not self.outbox.done.wait_for(lambda: self.outbox.is_ended, LATE_S / 2):
            self._give_up()

    def _give_up(self) -> None:
        self._appender.abandon()
        self.outbox.abandon()
        self._end(None)

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
        """What each thread does: lead, or help."""
        me = threading.current_thread()
        try:
            while not self._is_over:
                with self._lock:
                    self._leader = self._leader or me
                    leads = self._leader is me
                if leads:
                    self._lead(me)
                elif not self._help(me):
                    return  # it is not counted any more
        except BaseException as raised:  # noqa: BLE001 - raised by `flush`, `close` and the receipts
            self._end(raised)
        with self._lock:
            self._threads -= 1

    def _lead(self, me: threading.Thread) -> None:
        """Wait for messages, let more of them come for `linger_s`, store them, and so on, until another thread leads or
        everything is done."""
        outbox, appender = self.outbox, self._appender
        while self._leader is me and not self._is_over:
            if self._gives_up:
                self._give_up()
                break
            seen = appender.changes
            if self._make_call(me) or (self._is_lonely and self._make_call(None)):
                continue
            self._keep_helper()
            appender.expire()
            if outbox.is_drained and appender.is_settled():
                self._end(None)
            elif self._wait(seen) and outbox.take():
                self._store(list(self._cut_in_hand()))

    def _wait(self, seen: int) -> bool:
        """Wait until messages are due: True; or until the Appender has something to do: `changes` is not `seen`."""
        outbox, appender = self.outbox, self._appender
        wake_at = appender.wake_at() if not appender.is_idle else math.inf
        if wake_at <= time.monotonic():  # a partition is ready, and all threads but this one are busy
            wake_at = time.monotonic() + SLOW_S

        was_held = outbox.is_held

        def is_pressed() -> bool:
            return (outbox.is_pressed and not outbox.is_held) or (outbox.is_closing and not outbox.is_drained)

        def is_called() -> bool:
            return appender.changes != seen or self._gives_up

        if not outbox.has_work():
            # Set before the first check of `wait_for`: a sender that adds a row after that check reads it.
            outbox.chunk.is_watched = True
            left = None if wake_at == math.inf else max(0.0, wake_at - time.monotonic())
            outbox.work.wait_for(lambda: is_pressed() or outbox.has_work() or is_called(), left)
            if not is_pressed() and not outbox.has_work():
                return False
            if not was_held:
                outbox.lingers_since = time.monotonic()
        due = outbox.lingers_since + outbox.limits.linger_s
        left = max(0.0, min(due, wake_at) - time.monotonic())
        outbox.work.wait_for(lambda: is_pressed() or bool(outbox.ready) or is_called(), left)
        return is_pressed() or bool(outbox.ready) or time.monotonic() >= due

    def _make_call(self, leader: threading.Thread | None) -> bool:
        """Make one append, if there is one to make and a thread is left that is not busy. False if not.

        leader: this thread, if it leads; None if the append is to be one of partitions that are tried apart."""
        is_apart = leader is None
        with self._lock:
            is_free = self._threads - self._busy > 1 or self._threads < THREADS_MAX or self._is_lonely
            if not is_free or (is_apart and self._apart >= APART_MAX) or self._appender.is_idle:
                return False
            self._busy += 1
            self._apart += is_apart
        try:
            call = self._appender.next_call(is_apart=is_apart)
            if call is None:
                return False
            self._keep_free(1)
            if is_apart:
                self._keep_helper()
            call.is_slow |= self._is_lonely  # nobody would notice
            if leader is not None:
                self._calls += 1
                self._leads_call = call
                if self._dozing:
                    self._nudge()
            self._appender.perform(call)
            return True
        finally:
            with self._lock:
                self._busy -= 1
                self._apart -= is_apart
                if leader is not None and self._leader is leader:
                    self._leads_call = None

    def _keep_helper(self) -> None:
        """The leader makes no appends of partitions that are tried apart: have another thread for them."""
        is_missing = self._threads - self._busy < 2 and self._apart < APART_MAX and not self._is_lonely
        if is_missing and self._appender.has_apart():
            self._keep_free(2)

    def _keep_free(self, count: int) -> None:
        """Start a thread if fewer than this number are not busy."""
        with self._lock:
            if self._threads - self._busy >= count:
                self._is_lonely = False
                return
            if self._threads >= THREADS_MAX:
                return
            self._threads += 1
        try:
            self._new_thread().start()
            is_lonely = False
        except RuntimeError:  # the limit of threads is reached, or the interpreter ends
            is_lonely = True
        with self._lock:
            self._threads -= is_lonely
            self._is_lonely = is_lonely

    def _help(self, me: threading.Thread) -> bool:
        """Make an append of partitions that are tried apart; take the lead if the leader is blocked; or wait. False if
        this thread is not needed any more."""
        nudges = self._nudges
        if self._make_call(None) or self._take_over(me):
            return True
        now = time.monotonic()
        left = self._appender.wake_at(is_apart=True) - now
        if left <= 0:  # all threads that may are busy
            left = SLOW_S
        if self._leads_call is not None or self._calls != self._calls_seen:
            # To look now and then costs less than to be nudged before each append.
            self._calls_seen = self._calls
            self._helpers.wait_for(lambda: self._is_over or self._nudges != nudges, min(left, SLOW_S))
            return True
        # This thread raises `_dozing`, then reads `_leads_call`. The leader sets `_leads_call`, then reads `_dozing`.
        # So at least one of the two sees the other's write, and a leader that blocks is noticed.
        with self._lock:
            self._dozing += 1
            is_extra = self._threads > 2
        left = min(left, _IDLE_S if is_extra else left)
        is_nudged = self._leads_call is not None or self._helpers.wait_for(
            lambda: self._is_over or self._nudges != nudges, None if left == math.inf else left
        )
        with self._lock:
            self._dozing -= 1
            # Two others are left, one of them is not busy, and nobody can have counted on this one since.
            is_left = not is_nudged and is_extra and left >= _IDLE_S and self._threads - 1 > max(1, self._busy)
            self._threads -= is_left
            return not is_left

    def _take_over(self, me: threading.Thread) -> bool:
        """Lead, if the leader has been busy with one append for SLOW_S."""
        call = self._leads_call
        if call is None or time.monotonic() - call.blocks_since < SLOW_S:
            return False
        with self._lock:
            if self._leads_call is not call:
                return False
            self._leader, self._leads_call = me, None
        self._appender.note_slow(call)
        return True

    def _wake(self, is_apart: bool = True) -> None:
        """There may be something to do for the leader. is_apart: and for the others."""
        self.outbox.work.notify_all()
        if is_apart:
            self._nudge()

    def _nudge(self) -> None:
        self._nudges += 1
        self._helpers.notify_all()

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self.outbox.end(error)
        self._wake()
        if self._is_dropped:
            self._end_dropped()

    def _end_dropped(self) -> None:
        outbox = self.outbox
        atexit.unregister(self._at_exit)
        if outbox.error is not None:
            _logger.error(
                "the producer of %s was dropped without close(), and not all of its messages were stored: %s",
                self._log.name,
                outbox.error,
            )
            outbox.error = None  # told by the record: a hub that is closed later does not raise it again
        self._kept = ()

    def _cut_in_hand(self) -> Iterator[SentBatch]:
        """What was taken, as batches. Chunks that follow each other are sorted together: the more rows are sorted, the
        larger the batches."""
        chunks: list[Chunk] = []
        size = 0
        for item in self.outbox.in_hand:
            more = item.counted + item.large_bytes if isinstance(item, Chunk) else 0
            is_cut = isinstance(item, SentBatch) or size + more > SLICE_BYTES_MAX
            if chunks and (is_cut or self.outbox.is_cut_behind(chunks[-1])):
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
            chosen = outbox.choose_keyless(chosen, records.nbytes, chunks[-1].serial)
        order, pieces = sort_by_partition(records, chosen)
        limits = outbox.limits
        parts = [(number, part) for number, all_ in pieces for part in cut(all_, limits.batch_rows, limits.batch_bytes)]
        starts = list(accumulate((part.num_rows for _, part in parts), initial=0))
        # Each batch gives its share of the buffer back.
        counted = sum(chunk.counted + chunk.large_bytes for chunk in chunks)
        shares = pairwise(counted * start // starts[-1] for start in starts)
        expires_at = chunks[0].since + limits.delivery_s
        batches = [
            SentBatch(number, outbox.done, part, after - before, expires_at, chunks[-1].serial)
            for (number, part), (before, after) in zip(parts, shares, strict=True)
        ]
        found = SortedRows(order, starts[:-1], batches)
        firsts = [first // WIDTH for first in accumulate(ends, initial=0)]
        return batches if outbox.note_sorted(chunks, firsts, found) else []

    def _store(self, batches: list[SentBatch]) -> None:
        if self.outbox.begin_round(batches):
            self._appender.add(batches)
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
