"""The table as a Source: pages of settled rows, handed out by partition. The package says what it must keep to."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from pxrs.errors import Closed, InvalidRecord, InvalidTopic, LogError, OffsetOutOfRange, ReadFailed, UsedAfterFork
from pxrs.hashing import hash_named
from pxrs.log.batch import SCHEMA, Batch
from pxrs.log.contract import READ_BYTES_DEFAULT, Bounds, Source
from pxrs.model import Topic
from pxrs.sources.sql_table.identity import Meaning, identify, public_url
from pxrs.sources.sql_table.listener import Listener
from pxrs.sources.sql_table.pages import Page, Pages, Stretch, append, cut
from pxrs.sources.sql_table.settling import Settling
from pxrs.sources.sql_table.table import Columns, Row, Rows, Table
from pxrs.waiting import BackgroundThread, Callback, Subscribers, Subscription
from pxrs.wording import counted

if TYPE_CHECKING:
    from sqlalchemy.engine import URL, Engine

log = logging.getLogger(__name__)

SETTLE_S_DEFAULT: Final = 5.0
"""Where the database does not tell who is still writing: neither PostgreSQL nor SQLite."""
NOTIFIED_POLL_S: Final = 30.0
"""With a channel: how often to look although nothing was heard, should a trigger be missing or a connection be dead."""
FIRST_END_S_MAX: Final = 10.0
FIRST_LOOK_S: Final = 0.02
SKIP_IDS: Final = 10_000
"""`wait` names a partition whose position can pass so many ids of other partitions, though it has no message."""
SKIP_S: Final = 1.0
"""`wait` names a partition whose position could pass any ids of other partitions for so long. So the checkpoint of a
partition without messages follows the others, and a group that has handled everything has no lag."""
PASSABLE_MAX: Final = 1024
"""How many positions are remembered to measure `SKIP_S`; beyond, the oldest is forgotten and measured anew."""
CLOSE_S_MAX: Final = 5.0
"""How long `close` waits for a query of the poller's thread to end."""
_PAGE_OVERHEAD: Final = 1024


class SqlTable(Source):
    """Made by `sql_table`. Threads share it; a forked child must open its own."""

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
    ) -> None:
        """topic: its name, partition count and partitioner; its id if that is given and not computed."""
        self.name, self.partitions = topic.name, topic.partitions
        self._hash = hash_named(topic.partitioner)
        self._table = Table(engine, table, columns, self.name)
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
        # One look at the database at a time: what one thread reads, the others find in the cache.
        self._lock = threading.RLock()
        self._looks = 0
        """How many calls of `_look` have begun. Changes under the lock."""
        self._look_error: LogError | None = None
        """Why the last call of `_look` failed."""
        self._settling = Settling(settle_s)
        self._visible_end = 0
        self._drawn_end: int | None = None
        self._pages = Pages(cache_bytes)
        self._empty: dict[int, tuple[int, int]] = {}
        self._passable: dict[tuple[int, int], float] = {}
        """By partition and offset: positions that could pass ids of other partitions, and since when, on the monotonic
        clock. Several readers of one partition may be at different offsets. At most `PASSABLE_MAX`."""
        self._subscribers = Subscribers()
        self._announced = (0, 0)
        """The settled end and the visible end as they were when the subscribers were last woken."""
        self._may_be_news = threading.Event()
        """Set by a notification of the database, and by `close`: the poller looks at once."""
        self._closing = threading.Event()
        self._poller = BackgroundThread("pxrs-table-poller", self._poll, self._may_be_news.set)
        """Looks at the table for everyone who waits for it."""
        self._is_closed = self._is_shared = False
        self._listener = (
            None if notify_channel is None else Listener(self._table, notify_channel, self._may_be_news.set)
        )

    def bounds(self, partitions: Iterable[int]) -> dict[int, Bounds]:
        """The same for every partition: the first id, and the one behind the last id that is settled. The first call
        waits a while for that, and raises ReadFailed in the end: with one writer's transaction open since before this
        source was, nobody can say which rows are final."""
        chosen = tuple(partitions)
        self._check_usable()
        for partition in chosen:
            self._check_usable(partition)
        if not chosen:
            return {}
        # Read the end first: every id before it is final then. If the first id were read first, a smaller one could be
        # committed in between, and a group that begins at the first id would never read it.
        end = self._settled_end()
        first = self._table.first_id()
        return dict.fromkeys(chosen, Bounds(end if first is None else min(first, end), end))

    def end(self, partition: int) -> int:
        """As `bounds` tells it; one query less."""
        self._check_usable(partition)
        return self._settled_end()

    def extents(self) -> list[tuple[int, int]]:
        """Ids that can be seen, also those that are not final yet: `read` hands these out later. Waits for nothing."""
        self._check_usable()
        with self._lock:
            first = self._table.first_id()
            self._visible_end, self._drawn_end = self._table.visible_end(), None
            return [(self._visible_end if first is None else first, self._visible_end)] * self.partitions

    def was_given_out(self, partition: int, offset: int) -> bool:
        self._check_usable(partition)
        with self._lock:
            if offset > self._visible_end:  # as it was when somebody last looked
                self._visible_end, self._drawn_end = self._table.visible_end(), None
            return self._is_reachable(offset)

    def read(self, partition: int, offset: int, max_bytes: int = READ_BYTES_DEFAULT) -> list[Batch]:
        self._check_usable(partition)
        batches: list[Batch] = []
        with self._lock:
            if offset >= self._settling.end:
                self._look()
                if not self._is_reachable(offset):
                    raise OffsetOutOfRange(f"{self.name}/{partition}", offset, self._visible_end)
            position, size, may_ask = offset, 0, True
            while position < self._settling.end and (not batches or size < max_bytes):
                page = self._page_in_memory(partition, position)
                if page is None:
                    # One page from the database for each call, if any: the caller stays awake in a long empty stretch.
                    if not may_ask or size:
                        break
                    page, may_ask = self._load(position), False
                batch = cut(page, partition, position, max_bytes - size)
                append(batches, batch)
                position, size = batch.next_offset, size + batch.records.nbytes
                if position < page.end:
                    break
        return [*batches]

    def scan(self, start: int, end: int, final_end: int) -> Iterator[Stretch]:
        """The rows with these ids, of all partitions, read once, a page of about `page_bytes` at a time.

        final_end: an end that the method `end` has named before, perhaps in another process; `end` is not larger. So
        these rows are final, and nothing is waited for here. Raises OffsetOutOfRange if the table has not given out the
        ids before `final_end`: it counts anew, or is an older copy."""
        self._check_usable()
        with self._lock:
            self._visible_end, self._drawn_end = self._table.visible_end(), None
            if not self._is_reachable(final_end):
                raise OffsetOutOfRange(self.name, final_end, self._visible_end)
        while start < end:
            self._check_usable()
            found = self._table.rows(start, end, self._page_bytes)
            if found.rows:
                partitions = pa.array([self._partition_of(row) for row in found.rows], pa.int32())
                yield Stretch(partitions, *_as_arrow(found.rows))
            start = found.last + 1

    def readable(self, positions: Mapping[int, int]) -> list[int]:
        for partition in positions:
            self._check_usable(partition)
        self._check_usable()
        self._refresh()
        ready, is_complete = self._ready(positions)
        if not ready and not is_complete:
            # Whoever waits looks again at once: after it has seen whether its time is up or its wait was cancelled.
            self._subscribers.wake(positions)
        return [partition for partition in positions if partition in ready]

    def subscribe(self, partitions: Iterable[int], callback: Callback) -> Subscription:
        """One thread polls the table for all subscriptions, or looks when the database notifies it."""
        chosen = tuple(partitions)
        self._check_usable()
        for partition in chosen:
            self._check_usable(partition)
        if self._listener is not None:
            self._listener.start()
        self._poller.need()  # first: it raises if no thread can be started
        added = self._subscribers.add(chosen, callback)

        def end() -> None:
            added.close()
            self._poller.release()

        return Subscription(end)

    def look_again_s(self, positions: Mapping[int, int]) -> float | None:
        """Until a position has been passable for `SKIP_S`, though nothing new was written."""
        with self._lock:
            dues = [self._passable[each] + SKIP_S for each in positions.items() if each in self._passable]
        return max(0.01, min(dues) - time.monotonic()) if dues else None

    def wake(self) -> None:
        self._subscribers.wake_all()

    def _poll(self) -> None:
        """One step of the poller's thread: sleep, look at the table, wake those who wait if anything has changed."""
        self._may_be_news.wait(self._pause_s())
        self._may_be_news.clear()
        if self._is_closed:
            return
        try:
            self._refresh()
        except LogError as error:  # whoever waits looks too, and raises what it meets
            log.info("polling %s: %s", self.name, error)
            self._subscribers.wake_all()

    def offset_at(self, partition: int, timestamp: int) -> int:
        """An id; the partition's first message from there on may be older if times do not rise with ids."""
        self._check_usable(partition)
        if self._columns.timestamp is None:
            raise InvalidTopic(f"{self.name}: offsets by time need a timestamp_column")
        end = self.end(partition)
        found = self._table.first_id_since(timestamp, end)
        return end if found is None else found

    def close(self) -> None:
        """Idempotent. Who waits gets Closed. An engine that was given stays open. A table that a hub shares among all
        who ask for it stays open until the hub is closed."""
        if not self._is_shared:
            self.close_shared()

    def share(self) -> None:
        """Make `close` do nothing: only `close_shared` closes the table from now on."""
        self._is_shared = True

    def close_shared(self) -> None:
        """Close the table for all who use it. Idempotent."""
        if os.getpid() != self._pid:
            return  # it is the parent's
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
        """The address as it was given, with its password: not to be shown."""
        return self._table.engine.url

    def __enter__(self) -> SqlTable:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SqlTable {self.name} of {self._table.address} with {counted(self.partitions, 'partition')}>"

    def _look(self) -> None:
        """See what is new, and what of it is settled."""
        self._visible_end, self._drawn_end = self._table.visible_end(), None
        if self._visible_end > self._settling.end or self._settling.is_waiting:
            # After the end, in a statement of its own: that order is what `Settling` relies on.
            was_waiting = self._settling.is_waiting
            self._settling.observe(self._visible_end, self._table.holders(), time.monotonic())
            if self._settling.is_waiting and not was_waiting:
                self._may_be_news.set()  # the poller may have begun a long sleep, and must look more often from now on

    def _refresh(self) -> None:
        """Look, unless another thread has begun to look since this call began: then take over what that one saw, also
        its error. So many threads that are woken at once make one query or two, not one each."""
        asked_at = self._looks
        with self._lock:
            if self._looks > asked_at:
                if self._look_error is not None:
                    raise ReadFailed(str(self._look_error)) from self._look_error
                return
            self._looks += 1
            self._look_error = None
            try:
                self._look()
            except LogError as error:
                self._look_error = error
                raise
            seen = self._settling.end, self._visible_end
            has_changed, self._announced = seen != self._announced, seen
        if has_changed:
            self._subscribers.wake_all()

    def _settled_end(self) -> int:
        until = time.monotonic() + self._settling.settle_s + FIRST_END_S_MAX
        while True:
            self._check_usable()
            with self._lock:
                self._look()
                if self._settling.end or not self._settling.is_waiting:
                    return self._settling.end
            if time.monotonic() > until:
                raise ReadFailed(f"{self.name}: a transaction that writes to the table is open, and has been all along")
            self._closing.wait(min(self._poll_s, FIRST_LOOK_S))

    def _is_reachable(self, offset: int) -> bool:
        """Whether the table may have given out all ids before this one, though their rows may be gone."""
        if offset <= self._visible_end:
            return True
        if self._drawn_end is None:
            drawn = self._table.drawn_end(self._visible_end)
            self._drawn_end = self._settling.end if drawn is None else drawn
        return offset <= self._drawn_end

    def _ready(self, positions: Mapping[int, int]) -> tuple[set[int], bool]:
        """The partitions that have something, and whether all was looked at. Loads a page for each at most."""
        ready, is_complete = set(), True
        with self._lock:
            end = self._settling.end
            for partition, offset in positions.items():
                if offset >= end and not self._is_reachable(offset):
                    ready.add(partition)  # its read says what is wrong
                position, may_ask = offset, True
                is_passable = self._has_been_passable(partition, offset, end)
                while position < end and partition not in ready:
                    page = self._page_in_memory(partition, position)
                    if page is None and not may_ask:
                        is_complete = False
                        break
                    if page is None:
                        page, may_ask = self._load(position), False
                    if cut(page, partition, position, 1).records.num_rows:
                        ready.add(partition)
                        break
                    position = page.end
                    self._note_empty(partition, offset, position)
                    if position - offset >= SKIP_IDS or is_passable:
                        ready.add(partition)
        return ready, is_complete

    def _has_been_passable(self, partition: int, offset: int, end: int) -> bool:
        """Whether the position has been behind the end, with no message for it, for `SKIP_S`. Only under the lock."""
        if offset >= end:
            self._passable.pop((partition, offset), None)
            return False
        now = time.monotonic()
        since = self._passable.get((partition, offset))
        if since is not None:
            return now - since >= SKIP_S
        while len(self._passable) >= max(PASSABLE_MAX, self.partitions):
            del self._passable[next(iter(self._passable))]  # the oldest
        self._passable[partition, offset] = now
        return False

    def _page_in_memory(self, partition: int, offset: int) -> Page | None:
        start, end = self._empty.get(partition, (0, 0))
        return Page(offset, end, {}, 0) if start <= offset < end else self._pages.at(offset)

    def _load(self, offset: int) -> Page:
        """The page that begins here, for all partitions."""
        until = self._pages.next_start(offset, self._settling.end)
        page = self._split(offset, until, self._table.rows(offset, until, self._page_bytes))
        self._pages.add(page)
        return page

    def _note_empty(self, partition: int, start: int, end: int) -> None:
        """Remember it for when the page is gone: a quiet partition is not to be looked through again and again."""
        known = self._empty.get(partition)
        if known is not None and known[0] <= start <= known[1]:
            start, end = known[0], max(end, known[1])
        self._empty[partition] = start, end

    def _split(self, start: int, until: int, rows: Rows) -> Page:
        lists: dict[int, list[Row]] = {}
        for row in rows.rows:
            lists.setdefault(self._partition_of(row), []).append(row)
        parts = {partition: _as_arrow(chosen) for partition, chosen in lists.items()}
        size = sum(ids.nbytes + records.nbytes + _PAGE_OVERHEAD for ids, records in parts.values()) + _PAGE_OVERHEAD
        return Page(start, rows.last + 1 if rows.is_cut else until, parts, size)

    def _partition_of(self, row: Row) -> int:
        place = str(row[0]).encode() if row[1] is None else row[1]
        return self._hash(place) % self.partitions

    def _pause_s(self) -> float:
        # The end of a transaction that wrote nothing, or was rolled back, is announced by nobody.
        is_told = self._listener is not None and self._listener.is_listening and not self._settling.is_waiting
        return max(NOTIFIED_POLL_S, self._poll_s) if is_told else self._poll_s

    def _check_usable(self, partition: int = 0) -> None:
        # Before any lock is touched: in a forked child another thread may have held it.
        if os.getpid() != self._pid:
            raise UsedAfterFork(f"the source {self.name} was opened before a fork: open another one in the child")
        if self._is_closed:
            raise Closed(f"the source {self.name} was closed")
        if not 0 <= partition < self.partitions:
            raise InvalidRecord(f"{self.name} has no partition {partition}; it has 0 to {self.partitions - 1}")


def _as_arrow(rows: Sequence[Row]) -> tuple[pa.Int64Array, pa.RecordBatch]:
    """Ids, and the records that have them."""
    ids, keys, values, times = zip(*rows, strict=True)
    columns = [
        pa.array(keys, SCHEMA.field("key").type),
        pa.array(values, SCHEMA.field("value").type),
        pa.array(times, pa.int64()).cast(SCHEMA.field("timestamp").type),
        pa.nulls(len(ids), SCHEMA.field("headers").type),
    ]
    return pa.array(ids, pa.int64()), pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
