"""The table as a Source: settled rows, read in pages and handed out by partition. The docstring of the package has the
invariants."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Final

from pxrs.errors import Closed, InvalidRecord, InvalidTopic, LogError, OffsetOutOfRange, ReadFailed, UsedAfterFork
from pxrs.log.batch import Batch
from pxrs.log.contract import READ_BYTES_DEFAULT, Bounds, Source
from pxrs.model import Topic
from pxrs.sources.sql_table.ends import TableEnds
from pxrs.sources.sql_table.identity import Meaning, identify, public_url
from pxrs.sources.sql_table.listener import Listener
from pxrs.sources.sql_table.pages import Stretch, append, cut
from pxrs.sources.sql_table.partitioned import PartitionedRows, PassablePositions
from pxrs.sources.sql_table.table import Columns, Table
from pxrs.waiting import BackgroundThread, Callback, Subscribers, Subscription
from pxrs.wording import counted

if TYPE_CHECKING:
    from sqlalchemy.engine import URL, Engine

log = logging.getLogger(__name__)

SETTLE_S_DEFAULT: Final = 5.0
"""The default of `settle_s` for databases that do not report who is writing: all but PostgreSQL and SQLite."""
NOTIFIED_POLL_S: Final = 30.0
"""How often to look with a channel although no notification came: a trigger may be missing, or the connection dead."""
FIRST_END_S_MAX: Final = 10.0
FIRST_LOOK_S: Final = 0.02
SKIP_IDS: Final = 10_000
"""`readable` returns a partition without messages if its position can pass this number of ids of other partitions."""
CLOSE_S_MAX: Final = 5.0
"""How long `close` waits for a query of the polling thread."""


class SqlTable(Source):
    """What `sql_table` returns. Threads share it; a forked child must open its own."""

    has_gaps = True
    has_latency = True

    def __init__(
        self,
        engine: Engine,
        table: str,
        columns: Columns,
        *,
        topic: Topic,
        meaning: Meaning,
        identity: str | None,
        is_ours: bool,
        notify_channel: str | None,
        poll_s: float,
        settle_s: float | None,
        page_bytes: int,
        cache_bytes: int,
        read_timeout_s: float,
    ) -> None:
        """topic: has the name, partition count and partitioner, and the id if the user gave one."""
        self.name, self.partitions = topic.name, topic.partitions
        self._table = Table(engine, table, columns, self.name, read_timeout_s if is_ours else None)
        tells_writers, resolved = self._table.check(settle_s)
        known = identify(engine.url, resolved, meaning, identity, topic.id or None)
        self.id, self.former_ids = known.id, known.former_ids
        self.fingerprint, self.mark = known.fingerprint, known.mark
        self.meaning = str(meaning)
        self.address = f"{resolved.names[0]} of {public_url(engine.url)}"
        if settle_s is None:
            settle_s = 0.0 if tells_writers else SETTLE_S_DEFAULT
        self._columns, self._poll_s, self._page_bytes, self._is_ours = columns, poll_s, page_bytes, is_ours
        self._pid = os.getpid()
        # Held during each query: what one thread reads, the other threads find in the cache.
        self._lock = threading.RLock()
        self._looks = 0
        """How many calls of `_refresh` have begun. Guarded by `_lock`."""
        self._look_error: LogError | None = None
        """The error of the last look; None if it succeeded."""
        self._rows = PartitionedRows(self._table, self.partitions, topic.partitioner, page_bytes, cache_bytes)
        self._passable = PassablePositions(self.partitions)
        self._subscribers = Subscribers()
        self._announced = (0, 0)
        """The settled end and the visible end as they were when the subscribers were last woken."""
        self._may_be_news = threading.Event()
        """Set by a notification of the database, by `close`, and by `_ends` when the polling thread must look more
        often: it looks at once."""
        self._ends = TableEnds(self._table, settle_s, on_waiting=self._may_be_news.set)
        self._closing = threading.Event()
        self._poller = BackgroundThread("pxrs-table-poller", self._poll, self._may_be_news.set)
        """The polling thread, which looks at the table for everyone who waits."""
        self._is_closed = self._is_shared = False
        self._listener = (
            None if notify_channel is None else Listener(self._table, notify_channel, self._may_be_news.set)
        )

    def bounds(self, partitions: Iterable[int]) -> dict[int, Bounds]:
        """The same for every partition: the first id, and the settled end. The first call waits a while for the settled
        end, and then raises ReadFailed: while a writing transaction is open that began before this source, it is not
        known which rows are final."""
        chosen = tuple(partitions)
        self._check_usable()
        for partition in chosen:
            self._check_usable(partition)
        if not chosen:
            return {}
        # Read the end first: all ids before it are final. If the first id were read first, a smaller one could be
        # committed in between, and a group that begins at the first id would never read it.
        end = self._settled_end()
        first = self._table.first_id()
        return dict.fromkeys(chosen, Bounds(end if first is None else min(first, end), end))

    def end(self, partition: int) -> int:
        """The end of `bounds`, with one query less."""
        self._check_usable(partition)
        return self._settled_end()

    def extents(self) -> list[tuple[int, int]]:
        """The visible ids, including those that are not final yet and that `read` hands out later. Does not wait."""
        self._check_usable()
        with self._lock:
            first = self._table.first_id()
            self._ends.look_at_visible()
            return [(self._ends.visible if first is None else first, self._ends.visible)] * self.partitions

    def was_given_out(self, partition: int, offset: int) -> bool:
        self._check_usable(partition)
        with self._lock:
            if offset > self._ends.visible:  # the visible end at the last look
                self._ends.look_at_visible()
            return self._ends.is_reachable(offset)

    def read(self, partition: int, offset: int, max_bytes: int = READ_BYTES_DEFAULT) -> list[Batch]:
        self._check_usable(partition)
        batches: list[Batch] = []
        with self._lock:
            if offset >= self._ends.settled.end:
                self._ends.look()
                if not self._ends.is_reachable(offset):
                    raise OffsetOutOfRange(f"{self.name}/{partition}", offset, self._ends.visible)
            position, size, may_ask = offset, 0, True
            while position < self._ends.settled.end and (not batches or size < max_bytes):
                page = self._rows.in_memory(partition, position)
                if page is None:
                    # Read at most one page from the database in each call, so that a caller does not block in a long
                    # empty range.
                    if not may_ask or size:
                        break
                    page, may_ask = self._rows.load(position, self._ends.settled.end), False
                batch = cut(page, partition, position, max_bytes - size)
                append(batches, batch)
                position, size = batch.next_offset, size + batch.records.nbytes
                if position < page.end:
                    break
        return [*batches]

    def scan(self, start: int, end: int, final_end: int) -> Iterator[Stretch]:
        """The rows with these ids, of all partitions, read once, a page of about `page_bytes` at a time.

        final_end: an end that `end` has returned before, perhaps in another process; `end` must not be larger. So these
        rows are final, and nothing is waited for here. Raises OffsetOutOfRange if the table has not given out the ids
        before `final_end`: it counts from the start again, or is an older copy."""
        self._check_usable()
        with self._lock:
            self._ends.look_at_visible()
            if not self._ends.is_reachable(final_end):
                raise OffsetOutOfRange(self.name, final_end, self._ends.visible)
        while start < end:
            self._check_usable()
            found = self._table.rows(start, end, self._page_bytes)
            if found.rows:
                yield self._rows.stretch(found.rows)
            start = found.last + 1

    def readable(self, positions: Mapping[int, int]) -> list[int]:
        for partition in positions:
            self._check_usable(partition)
        self._check_usable()
        self._refresh()
        ready, is_complete = self._ready(positions)
        if not ready and not is_complete:
            # Wake the caller at once: it first checks its timeout and its `cancel`, then looks again.
            self._subscribers.wake(positions)
        return [partition for partition in positions if partition in ready]

    def subscribe(self, partitions: Iterable[int], callback: Callback) -> Subscription:
        """One thread polls the table for all subscriptions, or looks when the database sends a notification."""
        chosen = tuple(partitions)
        self._check_usable()
        for partition in chosen:
            self._check_usable(partition)
        if self._listener is not None:
            self._listener.start()
        return self._subscribers.add_needing(self._poller, chosen, callback)

    def look_again_s(self, positions: Mapping[int, int]) -> float | None:
        """The time until a position has been passable for `SKIP_S`, which no new row announces."""
        with self._lock:
            return self._passable.due_s(positions.items())

    def _poll(self) -> None:
        """One step of the polling thread: sleep, look at the table, and wake the subscribers after a change."""
        # While a transaction is waited for, poll often: no notification says that it was rolled back or wrote nothing.
        is_told = self._listener is not None and self._listener.is_listening and not self._ends.settled.is_waiting
        self._may_be_news.wait(max(NOTIFIED_POLL_S, self._poll_s) if is_told else self._poll_s)
        self._may_be_news.clear()
        if self._is_closed:
            return
        try:
            self._refresh()
        except LogError as error:  # the waiting threads are woken, look too, and raise it
            log.info("polling %s: %s", self.name, error)
            self._subscribers.wake_all()

    def offset_at(self, partition: int, timestamp: int) -> int:
        """The first id with this time or a later one. Messages behind it may be older if times do not rise with ids."""
        self._check_usable(partition)
        if self._columns.timestamp is None:
            raise InvalidTopic(f"{self.name}: offsets by time need a timestamp_column")
        end = self.end(partition)
        found = self._table.first_id_since(timestamp, end)
        return end if found is None else found

    def close(self) -> None:
        """Threads that wait get Closed. An engine that was passed in stays open. A table that a hub shares stays open
        until the hub is closed. Idempotent."""
        if not self._is_shared:
            self.close_shared()

    def share(self) -> None:
        """Make `close` do nothing, because several callers share the table: only `close_shared` closes it now."""
        self._is_shared = True

    def close_shared(self) -> None:
        """Close the table for all who use it. Idempotent."""
        if os.getpid() != self._pid:
            return  # in a forked child: the table belongs to the parent
        self._is_closed = True
        self._closing.set()
        self._poller.close(CLOSE_S_MAX)
        self._subscribers.wake_all()
        if self._listener is not None:
            self._listener.close()
        if self._is_ours:
            self._table.engine.dispose()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def url(self) -> URL:
        """The address as it was given, with its password. Never show it."""
        return self._table.engine.url

    def __enter__(self) -> SqlTable:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SqlTable {self.name} of {self._table.address} with {counted(self.partitions, 'partition')}>"

    def _refresh(self) -> None:
        """Look, unless another thread has begun to look since this call began: then use the result of that look, or
        raise its error. So many threads that are woken at once make one or two queries."""
        asked_at = self._looks
        with self._lock:
            if self._looks > asked_at:
                if self._look_error is not None:
                    raise ReadFailed(str(self._look_error)) from self._look_error
                return
            self._looks += 1
            self._look_error = None
            try:
                self._ends.look()
            except LogError as error:
                self._look_error = error
                raise
            seen = self._ends.settled.end, self._ends.visible
            has_changed, self._announced = seen != self._announced, seen
        if has_changed:
            self._subscribers.wake_all()

    def _settled_end(self) -> int:
        until = time.monotonic() + self._ends.settled.settle_s + FIRST_END_S_MAX
        while True:
            self._check_usable()
            with self._lock:
                self._ends.look()
                if self._ends.settled.end or not self._ends.settled.is_waiting:
                    return self._ends.settled.end
            if time.monotonic() > until:
                raise ReadFailed(
                    f"{self.name}: a transaction that writes to the table has been open all the time; "
                    "wait until it ends"
                )
            self._closing.wait(min(self._poll_s, FIRST_LOOK_S))

    def _ready(self, positions: Mapping[int, int]) -> tuple[set[int], bool]:
        """The partitions that have something to read, and whether the search is complete. Loads at most one page for
        each partition."""
        ready, is_complete = set(), True
        with self._lock:
            end = self._ends.settled.end
            for partition, offset in positions.items():
                if offset >= end and not self._ends.is_reachable(offset):
                    ready.add(partition)  # `read` raises the error
                position, may_ask = offset, True
                is_passable = self._passable.has_been(partition, offset, end)
                while position < end and partition not in ready:
                    page = self._rows.in_memory(partition, position)
                    if page is None and not may_ask:
                        is_complete = False
                        break
                    if page is None:
                        page, may_ask = self._rows.load(position, self._ends.settled.end), False
                    if cut(page, partition, position, 1).records.num_rows:
                        ready.add(partition)
                        break
                    position = page.end
                    self._rows.note_empty(partition, offset, position)
                    if position - offset >= SKIP_IDS or is_passable:
                        ready.add(partition)
        return ready, is_complete

    def _check_usable(self, partition: int = 0) -> None:
        # Before taking a lock: in a forked child, a thread that does not exist may hold it.
        if os.getpid() != self._pid:
            raise UsedAfterFork(f"the source {self.name} was opened before a fork: open another one in the child")
        if self._is_closed:
            raise Closed(f"the source {self.name} was closed")
        if not 0 <= partition < self.partitions:
            raise InvalidRecord(f"{self.name} has no partition {partition}; it has 0 to {self.partitions - 1}")
