"""A SQL table with a rising integer id, read as a topic of virtual partitions (X21).

The table stays as it is and is only ever read. A row belongs to the partition that the hash of its key names, its
offset is its id. So offsets have gaps: the rows of other partitions, rolled back ids, deleted rows. What makes this
hard is that ids are given out before the commit: 6 may be there when 5 is still to come, and a reader who goes on at 7
never sees it.

Invariants:
- Nothing at or beyond the *settled end* is handed out; below it no row will appear any more. `Settling` decides what
  is settled, from what the database tells: see there.
- A stretch of ids is read once for all partitions and split; pages are kept in a cache of bounded bytes. One page is
  `page_bytes` and a few rows at most.
- A batch says how far it was looked (`next_offset`), so that positions pass the rows of other partitions. It may be
  empty for that reason alone.
- An id that the table cannot have given out yet is an error: the table was emptied and counts anew.

On failure a read raises ReadFailed and has changed nothing. Settling begins anew with each process and needs no memory.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import select
import threading
import time
import uuid
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from pxrs.errors import (
    Closed,
    InvalidRecord,
    InvalidTopic,
    InvalidUrl,
    MissingDependency,
    OffsetOutOfRange,
    ReadFailed,
    UsedAfterFork,
)
from pxrs.log.batch import SCHEMA, Batch
from pxrs.log.contract import READ_BYTES_DEFAULT, Source
from pxrs.model import EPOCH, PARTITIONS_DEFAULT, Topic, microseconds_of
from pxrs.partitioner import hash_named

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

log = logging.getLogger(__name__)

POLL_S_DEFAULT: Final = 0.2
SETTLE_S_DEFAULT: Final = 5.0
"""Where the database does not tell who is still writing: neither PostgreSQL nor SQLite."""
NOTIFIED_POLL_S: Final = 30.0
"""With a channel: how often to look although nothing was heard, should a trigger be missing or a connection be dead."""
PAGE_BYTES_DEFAULT: Final = 4 << 20
CACHE_BYTES_DEFAULT: Final = 32 << 20
FETCH_ROWS: Final = 64
"""Rows come from the database in parts of this size: that many may be more than `page_bytes`."""
FIRST_END_S_MAX: Final = 10.0
FIRST_LOOK_S: Final = 0.02
SKIP_IDS: Final = 10_000
"""A position so far behind is worth moving, although there is no message for it."""
_PAGE_OVERHEAD: Final = 1024
_ROW_OVERHEAD: Final = 64
_BACKOFF_S: Final = (0.1, 5.0)
_IDENTITY: Final = uuid.UUID("6f0b2a55-0a3c-5d0e-9c53-3f6f1d2f7c21")
_DRIVERS: Final = {"postgresql": "postgresql+psycopg", "oracle": "oracle+oracledb"}
_PREPARED: Final = "-1/"

# The table, and all that share its rows: an insert by way of a parent locks the child late, and the reverse.
_HOLDERS: Final = """
WITH RECURSIVE family(oid) AS (
    SELECT CAST(:relation AS oid)
    UNION
    SELECT CASE WHEN i.inhparent = family.oid THEN i.inhrelid ELSE i.inhparent END
    FROM pg_inherits i JOIN family ON family.oid IN (i.inhparent, i.inhrelid))
SELECT DISTINCT l.virtualtransaction FROM pg_locks l JOIN family ON l.relation = family.oid
WHERE l.locktype = 'relation' AND l.mode = 'RowExclusiveLock' AND l.granted
AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
# The sequence behind the id: of an identity or serial column, or named in its default.
_SEQUENCE: Final = """
SELECT s.seqrelid, s.seqcache FROM pg_sequence s, pg_attribute t
WHERE t.attrelid = :relation AND t.attname = :id_column AND (
    EXISTS (SELECT 1 FROM pg_depend d WHERE d.classid = CAST('pg_class' AS regclass) AND d.objid = s.seqrelid
        AND d.refclassid = CAST('pg_class' AS regclass) AND d.refobjid = t.attrelid AND d.refobjsubid = t.attnum
        AND d.deptype IN ('a', 'i'))
    OR EXISTS (SELECT 1 FROM pg_attrdef a JOIN pg_depend d ON d.classid = CAST('pg_attrdef' AS regclass)
        AND d.objid = a.oid AND d.refclassid = CAST('pg_class' AS regclass) AND d.refobjid = s.seqrelid
        WHERE a.adrelid = t.attrelid AND a.adnum = t.attnum))
"""
_LAST_VALUE: Final = """
SELECT CASE WHEN has_sequence_privilege(CAST(:sequence AS oid), 'SELECT, USAGE')
    THEN coalesce(pg_sequence_last_value(CAST(CAST(:sequence AS oid) AS regclass)), 0) END
"""
_SQLITE_MADE: Final = "SELECT sql FROM sqlite_master WHERE type = 'table' AND name = :name COLLATE NOCASE"
_SQLITE_LAST: Final = "SELECT max(seq) FROM sqlite_sequence WHERE name = :name COLLATE NOCASE"


class Settling:
    """Which ids are final, by who was writing when they were seen. No I/O, no clock.

    Told the end of what is visible, and *after* that who holds a writer's lock on the table, it knows: whoever may
    still commit a smaller id drew it before, within an INSERT, so that he held the lock by then and holds it until he
    is done. When those have gone, everything below that end is final; later writers draw larger ids. Unlike the
    oldest transaction id this also covers a writer who has drawn an id and has no transaction id yet, and writers of
    other tables hold nothing up.

    A prepared transaction may keep its lock under another name: after a restart of the server, and on old ones at once.
    So when the others are gone, the prepared ones of that moment are waited for.
    """

    def __init__(self, settle_s: float = 0.0) -> None:
        self.end = 0
        """Ids below it are final."""
        self.settle_s = settle_s
        self._next: int | None = None
        self._active: frozenset[str] = frozenset()
        self._prepared: frozenset[str] | None = None
        self._since = 0.0

    @property
    def is_waiting(self) -> bool:
        return self._next is not None

    def observe(self, visible_end: int, holders: frozenset[str], now: float) -> None:
        """What was visible, and who held a writer's lock afterwards, at this time in seconds."""
        prepared = frozenset(holder for holder in holders if holder.startswith(_PREPARED))
        if self._next is not None and self._is_over(holders, prepared, now):
            self.end, self._next = self._next, None
        if self._next is None and visible_end > self.end:
            self._next, self._active, self._prepared, self._since = visible_end, holders - prepared, None, now
            if self._is_over(holders, prepared, now):
                self.end, self._next = visible_end, None

    def _is_over(self, holders: frozenset[str], prepared: frozenset[str], now: float) -> bool:
        self._active &= holders
        if self._active:
            return False
        self._prepared = prepared if self._prepared is None else self._prepared & prepared
        return not self._prepared and now - self._since >= self.settle_s


class _Page(NamedTuple):
    """A stretch of ids, split by partition."""

    start: int
    end: int
    parts: dict[int, tuple[pa.Int64Array, pa.RecordBatch]]
    size: int


class _Pages:
    """The pages that were read last, within a bound of bytes. They never overlap."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._pages: OrderedDict[int, _Page] = OrderedDict()
        self._starts: list[int] = []
        self.size = 0

    def at(self, offset: int) -> _Page | None:
        place = bisect_right(self._starts, offset) - 1
        if place < 0:
            return None
        page = self._pages[self._starts[place]]
        if offset >= page.end:
            return None
        self._pages.move_to_end(page.start)
        return page

    def next_start(self, offset: int, end: int) -> int:
        """Where the next page after this offset begins, or the end."""
        place = bisect_right(self._starts, offset)
        return min(end, self._starts[place]) if place < len(self._starts) else end

    def add(self, page: _Page) -> None:
        self._pages[page.start] = page
        self._starts.insert(bisect_right(self._starts, page.start), page.start)
        self.size += page.size
        while self.size > self._bytes_max and len(self._pages) > 1:
            start, oldest = self._pages.popitem(last=False)
            del self._starts[bisect_right(self._starts, start) - 1]
            self.size -= oldest.size


class _Columns(NamedTuple):
    """What the table's columns mean."""

    id: str
    key: str | None
    value: str | None
    values: tuple[str, ...]
    timestamp: str | None

    @property
    def read(self) -> tuple[str, ...]:
        """In the order in which they are selected, each once."""
        named = (self.id, self.key, self.timestamp, self.value, *self.values)
        return tuple(dict.fromkeys(name for name in named if name is not None))


def sql_table(
    url_or_engine: str | Engine,
    table: str,
    *,
    id_column: str = "id",
    value_column: str | None = None,
    value_columns: Sequence[str] | None = None,
    key_column: str | None = None,
    timestamp_column: str | None = None,
    partitions: int = PARTITIONS_DEFAULT,
    partitioner: str = "xxh64",
    name: str | None = None,
    identity: str | None = None,
    notify_channel: str | None = None,
    poll_s: float = POLL_S_DEFAULT,
    settle_s: float | None = None,
    page_bytes: int = PAGE_BYTES_DEFAULT,
    cache_bytes: int = CACHE_BYTES_DEFAULT,
) -> SqlTable:
    """A table, `NAME` or `SCHEMA.NAME`, as a Source of so many virtual partitions.

    value_column      its text or bytes are the message; anything else is given as JSON
    value_columns     or several: the message is a JSON object of them
    key_column        rows of one key stay in one partition, in order: whole numbers (as decimal text), text, bytes or
                      UUIDs. Without it, or where it is null, the id decides
    timestamp_column  the message's time; without a zone it is taken as UTC. Without it, messages are of 1970
    identity          names the table in place of its address, for checkpoints to stay when the address changes
    notify_channel    PostgreSQL: look when somebody says NOTIFY there, instead of every `poll_s` seconds
    settle_s          hold rows back for so long after they were first seen; see docs/sources.md for who needs it
    page_bytes, cache_bytes  how much is read at a time, and kept for the other partitions

    Raises InvalidUrl, InvalidTopic, MissingDependency at once, and ReadFailed if the database cannot be reached.
    """
    if (value_column is None) == (value_columns is None):
        raise InvalidTopic(f"{table}: give value_column or value_columns, one of them")
    if isinstance(value_columns, str) or value_columns == ():
        raise InvalidTopic(f"{table}: value_columns is a list of names")
    for setting, given in (("poll_s", poll_s), ("page_bytes", page_bytes), ("cache_bytes", cache_bytes)):
        if not given > 0:
            raise InvalidTopic(f"{table}: {setting} is {given}; give more than 0")
    if settle_s is not None and not settle_s >= 0:
        raise InvalidTopic(f"{table}: settle_s is {settle_s}; give seconds")
    columns = _Columns(id_column, key_column, value_column, tuple(value_columns or ()), timestamp_column)
    engine, is_ours = _engine_of(url_or_engine)
    try:
        return SqlTable(
            engine,
            table,
            columns,
            topic=Topic(
                table if name is None else name,
                _id_of(engine, table, columns, partitions, partitioner, identity),
                partitions,
                partitioner,
            ),
            is_ours=is_ours,
            notify_channel=notify_channel,
            poll_s=poll_s,
            settle_s=settle_s,
            page_bytes=page_bytes,
            cache_bytes=cache_bytes,
        )
    except BaseException:
        if is_ours:
            engine.dispose()
        raise


class SqlTable(Source):
    """Made by `sql_table`. Threads share it; a forked child must open its own."""

    has_gaps = True

    def __init__(
        self,
        engine: Engine,
        table: str,
        columns: _Columns,
        *,
        topic: Topic,
        is_ours: bool,
        notify_channel: str | None,
        poll_s: float,
        settle_s: float | None,
        page_bytes: int,
        cache_bytes: int,
    ) -> None:
        self.name, self.id, self.partitions = topic.name, topic.id, topic.partitions
        self._hash = hash_named(topic.partitioner)
        self._table = _Table(engine, table, columns, self.name)
        tells_writers = self._table.check(settle_s)
        if settle_s is None:
            settle_s = 0.0 if tells_writers else SETTLE_S_DEFAULT
        self._columns, self._poll_s, self._page_bytes, self._is_ours = columns, poll_s, page_bytes, is_ours
        self._pid = os.getpid()
        # One look at the database at a time: what one thread reads, the others find in the cache.
        self._lock = threading.RLock()
        self._settling = Settling(settle_s)
        self._visible_end = 0
        self._drawn_end: int | None = None
        self._pages = _Pages(cache_bytes)
        self._empty: dict[int, tuple[int, int]] = {}
        self._changed = threading.Condition()
        self._news = 0
        self._is_closed = False
        self._listener = None if notify_channel is None else _Listener(self._table, notify_channel, self.wake)

    def start(self, partition: int) -> int:
        self._check_usable(partition)
        first = self._table.first_id()
        end = self._settled_end()
        return end if first is None else min(first, end)

    def end(self, partition: int) -> int:
        """Behind the last id that is settled. The first call waits a while for that, and raises ReadFailed in the end:
        with one writer's transaction open since before this source was, nobody can say which rows are final."""
        self._check_usable(partition)
        return self._settled_end()

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
                batch = _cut(page, partition, position, max_bytes - size)
                _append(batches, batch)
                position, size = batch.next_offset, size + batch.records.nbytes
                if position < page.end:
                    break
        return [*batches]

    def wait(
        self,
        positions: Mapping[int, int],
        timeout: float | None = None,
        is_over: Callable[[], bool] | None = None,
    ) -> set[int]:
        for partition in positions:
            self._check_usable(partition)
        until = None if timeout is None else time.monotonic() + timeout
        if self._listener is not None:
            self._listener.start()
        while True:
            self._check_usable()
            with self._changed:
                news = self._news
            ready, is_complete = self._ready(positions)
            left = None if until is None else until - time.monotonic()
            if ready or (left is not None and left <= 0) or (is_over is not None and is_over()):
                return ready
            if not is_complete:
                continue
            pause = self._pause_s()
            with self._changed:
                if self._news == news and not self._is_closed:
                    self._changed.wait(pause if left is None else min(pause, left))

    def wake(self) -> None:
        with self._changed:
            self._news += 1
            self._changed.notify_all()

    def offset_at(self, partition: int, timestamp: int) -> int:
        """An id; the partition's first message from there on may be older if times do not rise with ids."""
        self._check_usable(partition)
        if self._columns.timestamp is None:
            raise InvalidTopic(f"{self.name}: offsets by time need a timestamp_column")
        end = self.end(partition)
        found = self._table.first_id_since(timestamp, end)
        return end if found is None else found

    def close(self) -> None:
        """Idempotent. Who waits gets Closed. An engine that was given stays open."""
        if os.getpid() != self._pid:
            return  # it is the parent's
        self._is_closed = True
        self.wake()
        if self._listener is not None:
            self._listener.close()
        if self._is_ours:
            self._table.engine.dispose()

    def __enter__(self) -> SqlTable:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SqlTable {self.name} of {self._table.address} with {self.partitions} partitions>"

    def _look(self) -> None:
        """See what is new, and what of it is settled."""
        self._visible_end, self._drawn_end = self._table.visible_end(), None
        if self._visible_end > self._settling.end or self._settling.is_waiting:
            # After the end, in a statement of its own: that order is what `Settling` relies on.
            self._settling.observe(self._visible_end, self._table.holders(), time.monotonic())

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
            with self._changed:
                self._changed.wait(min(self._poll_s, FIRST_LOOK_S))

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
            self._look()
            end = self._settling.end
            for partition, offset in positions.items():
                if offset >= end and not self._is_reachable(offset):
                    ready.add(partition)  # its read says what is wrong
                position, may_ask = offset, True
                while position < end and partition not in ready:
                    page = self._page_in_memory(partition, position)
                    if page is None and not may_ask:
                        is_complete = False
                        break
                    if page is None:
                        page, may_ask = self._load(position), False
                    if _cut(page, partition, position, 1).records.num_rows:
                        ready.add(partition)
                        break
                    position = page.end
                    self._note_empty(partition, offset, position)
                    if position - offset >= SKIP_IDS:
                        ready.add(partition)
        return ready, is_complete

    def _page_in_memory(self, partition: int, offset: int) -> _Page | None:
        start, end = self._empty.get(partition, (0, 0))
        return _Page(offset, end, {}, 0) if start <= offset < end else self._pages.at(offset)

    def _load(self, offset: int) -> _Page:
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

    def _split(self, start: int, until: int, rows: _Rows) -> _Page:
        lists: dict[int, list[tuple[int, bytes | None, bytes | None, int]]] = {}
        for row in rows.rows:
            place = str(row[0]).encode() if row[1] is None else row[1]
            lists.setdefault(self._hash(place) % self.partitions, []).append(row)
        parts = {}
        for partition, chosen in lists.items():
            ids, keys, values, times = zip(*chosen, strict=True)
            columns = [
                pa.array(keys, SCHEMA.field("key").type),
                pa.array(values, SCHEMA.field("value").type),
                pa.array(times, pa.int64()).cast(SCHEMA.field("timestamp").type),
                pa.nulls(len(ids), SCHEMA.field("headers").type),
            ]
            parts[partition] = pa.array(ids, pa.int64()), pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
        size = sum(ids.nbytes + records.nbytes + _PAGE_OVERHEAD for ids, records in parts.values()) + _PAGE_OVERHEAD
        return _Page(start, rows.last + 1 if rows.is_cut else until, parts, size)

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


class _Rows(NamedTuple):
    """Rows as id, key, value and time; whether there are more before the end that was asked for."""

    rows: list[tuple[int, bytes | None, bytes | None, int]]
    last: int
    is_cut: bool


class _Table:
    """The questions that are put to the database. Errors are translated here."""

    def __init__(self, engine: Engine, table: str, columns: _Columns, name: str) -> None:
        import sqlalchemy

        self.engine, self._columns, self._name = engine, columns, name
        self.dialect: str = engine.dialect.name
        self.address = engine.url.render_as_string(hide_password=True)
        self._sa = sqlalchemy
        schema, _, bare = table.rpartition(".")
        self._schema, self._bare = schema or None, bare
        self._from = sqlalchemy.table(bare, *map(sqlalchemy.column, columns.read), schema=schema or None)
        self._id = self._from.c[columns.id]
        self._relation: int | None = None
        self._sequence: int | None = None

    def check(self, settle_s: float | None) -> bool:
        """Whether the database tells who is writing. Raises InvalidTopic if the table is not as it must be."""
        with self._connection() as connection:
            inspector = self._sa.inspect(connection)
            try:
                found = {column["name"]: column["type"] for column in inspector.get_columns(self._bare, self._schema)}
            except self._sa.exc.NoSuchTableError:
                raise InvalidTopic(f"{self.address}: there is no table {self._full_name!r}") from None
            for name in self._columns.read:
                if name not in found:
                    raise InvalidTopic(f"{self._full_name}: no column {name!r}; there are {', '.join(found)}")
            kind = found[self._columns.id]
            if not isinstance(kind, (self._sa.Integer, self._sa.Numeric)) or isinstance(kind, self._sa.Float):
                raise InvalidTopic(f"{self._full_name}: {self._columns.id} is {kind}, and must be an integer")
            if self.dialect == "postgresql":
                return self._check_postgresql(connection, settle_s)
        return self.dialect == "sqlite"

    def _check_postgresql(self, connection: Connection, settle_s: float | None) -> bool:
        text = self._sa.text
        quoted = self.engine.dialect.identifier_preparer.format_table(self._from)
        question = "SELECT c.oid, c.relkind, pg_is_in_recovery() FROM pg_class c WHERE c.oid = to_regclass(:name)"
        oid, kind, is_standby = connection.execute(text(question), {"name": quoted}).one()
        given = {"relation": oid, "id_column": self._columns.id}
        sequence = connection.execute(text(_SEQUENCE), given).first()
        doubt = None
        if is_standby:
            doubt = "this is a standby, which does not know who is writing"
        elif kind not in ("r", "p"):
            doubt = "this is no plain table, and who is writing to those behind it is not known"
        elif sequence is not None and sequence[1] > 1:
            doubt = f"its sequence has CACHE {sequence[1]}, so that sessions keep ids for later"
        if doubt and not settle_s:
            raise InvalidTopic(
                f"{self._full_name}: {doubt}: rows could come behind the reader and be lost; give settle_s"
            )
        self._relation = None if doubt else oid
        self._sequence = None if sequence is None or is_standby else sequence[0]
        return True

    def visible_end(self) -> int:
        with self._connection() as connection:
            last = connection.execute(self._sa.select(self._sa.func.max(self._id))).scalar()
        return 0 if last is None else max(int(last) + 1, 0)

    def first_id(self) -> int | None:
        with self._connection() as connection:
            first = connection.execute(self._sa.select(self._sa.func.min(self._id))).scalar()
        if first is not None and first < 0:
            raise InvalidRecord(f"{self._full_name}: {self._columns.id} {first} is negative; such rows cannot be read")
        return None if first is None else int(first)

    def holders(self) -> frozenset[str]:
        """The transactions that hold a writer's lock; none where nobody tells."""
        if self._relation is None:
            return frozenset()
        with self._connection() as connection:
            return frozenset(connection.execute(self._sa.text(_HOLDERS), {"relation": self._relation}).scalars())

    def drawn_end(self, visible_end: int) -> int | None:
        """Behind the last id that was ever given out, though its row may be gone; None if that is not known."""
        text = self._sa.text
        with self._connection() as connection:
            if self._sequence is not None:
                last = connection.execute(text(_LAST_VALUE), {"sequence": self._sequence}).scalar()
                return None if last is None else max(int(last) + 1, visible_end)
            if self.dialect != "sqlite":
                return None
            made = connection.execute(text(_SQLITE_MADE), {"name": self._bare}).scalar()
            if made is None or "AUTOINCREMENT" not in made.upper():
                return visible_end  # the ids of deleted rows are given out again
            last = connection.execute(text(_SQLITE_LAST), {"name": self._bare}).scalar()
            return max(int(last or 0) + 1, visible_end)

    def rows(self, start: int, end: int, bytes_max: int) -> _Rows:
        """The rows of these ids, until they are so many bytes."""
        columns = self._columns
        wanted = self._sa.select(self._from).where(self._id >= start, self._id < end).order_by(self._id)
        rows: list[tuple[int, bytes | None, bytes | None, int]] = []
        size = 0
        with self._connection() as connection:
            result = connection.execution_options(yield_per=FETCH_ROWS).execute(wanted)
            for part in result.mappings().partitions():
                for row in part:
                    key = None if columns.key is None else _key_bytes(row[columns.key], columns.key)
                    value = self._value_bytes(row)
                    moment = 0 if columns.timestamp is None else _micros(row[columns.timestamp], columns.timestamp)
                    rows.append((int(row[columns.id]), key, value, moment))
                    size += _ROW_OVERHEAD + len(key or b"") + len(value or b"")
                if size >= bytes_max:
                    result.close()
                    return _Rows(rows, rows[-1][0], True)
        return _Rows(rows, end - 1, False)

    def first_id_since(self, timestamp: int, end: int) -> int | None:
        assert self._columns.timestamp is not None
        column, name = self._from.c[self._columns.timestamp], self._columns.timestamp
        moment: datetime = EPOCH + timedelta(microseconds=timestamp)
        with self._connection() as connection:
            sample = connection.execute(self._sa.select(column).where(column.is_not(None)).limit(1)).scalar()
            if sample is None:
                return None
            if isinstance(sample, datetime):
                bound = moment if sample.tzinfo is not None else moment.replace(tzinfo=None)
                wanted = self._sa.select(self._sa.func.min(self._id)).where(column >= bound, self._id < end)
                found = connection.execute(wanted).scalar()
                return None if found is None else int(found)
            # Times as text: only reading them tells how they compare.
            every = self._sa.select(self._id, column).where(self._id < end).order_by(self._id)
            for row in connection.execution_options(yield_per=FETCH_ROWS).execute(every):
                if _micros(row[1], name) >= timestamp:
                    return int(row[0])
        return None

    def listen(self, channel: str) -> Any:
        """A connection of psycopg, out of the pool for good, that hears the channel."""
        if self.engine.dialect.driver != "psycopg":
            raise InvalidTopic(f"{self._full_name}: notify_channel needs PostgreSQL and its driver psycopg")
        from psycopg import sql

        with self._translated():
            pooled = self.engine.raw_connection()
            connection: Any = pooled.driver_connection
            pooled.detach()
            try:
                connection.rollback()
                connection.autocommit = True
                connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
            except BaseException:
                connection.close()
                raise
        return connection

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        """One connection for one question: its transaction ends with it, so that the next one sees what is new."""
        with self._translated(), self.engine.connect() as connection:
            if self.dialect == "postgresql":
                # A cursor on the server needs a transaction, also if the engine commits by itself.
                connection = connection.execution_options(isolation_level="READ COMMITTED", postgresql_readonly=True)
            yield connection

    @contextmanager
    def _translated(self) -> Iterator[None]:
        drivers = (self._sa.exc.SQLAlchemyError, self.engine.dialect.loaded_dbapi.Error)
        try:
            yield
        except drivers as error:
            text = str(getattr(error, "orig", None) or error)
            if self.engine.url.password:
                text = text.replace(str(self.engine.url.password), "***")
            raise ReadFailed(f"{self.address}: {self._full_name}: {text}") from None

    def _value_bytes(self, row: Any) -> bytes | None:
        if self._columns.value is None:
            return _json({name: row[name] for name in self._columns.values})
        value = row[self._columns.value]
        if value is None:
            return None
        if isinstance(value, str):
            return value.encode()
        return bytes(value) if isinstance(value, (bytes, bytearray, memoryview)) else _json(value)

    @property
    def _full_name(self) -> str:
        return self._bare if self._schema is None else f"{self._schema}.{self._bare}"


class _Listener:
    """One connection and one thread, which tells of notifications, and of every doubt."""

    def __init__(self, table: _Table, channel: str, wake: Callable[[], None]) -> None:
        self._table, self._channel, self._wake = table, channel, wake
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._connection = table.listen(channel)  # here, so that the caller gets the error if there is one
        self._bell_receiver, self._bell_sender = os.pipe()
        self._stopped = threading.Event()

    @property
    def is_listening(self) -> bool:
        return self._connection is not None

    def start(self) -> None:
        with self._lock:
            if self._thread is None and not self._stopped.is_set():
                self._thread = threading.Thread(target=self._run, name="pxrs-table-listener", daemon=True)
                self._thread.start()

    def close(self) -> None:
        with self._lock:
            if self._stopped.is_set():
                return
            self._stopped.set()
            thread = self._thread
        os.write(self._bell_sender, b"!")
        if thread is not None:
            thread.join()
        self._drop()
        os.close(self._bell_sender)
        os.close(self._bell_receiver)

    def _run(self) -> None:
        backoff = _BACKOFF_S[0]
        while not self._stopped.is_set():
            try:
                if self._connection is None:
                    self._connection = self._table.listen(self._channel)
                    self._wake()  # what was said meanwhile was not heard
                backoff = _BACKOFF_S[0]
                self._hear(self._connection)
            except (ReadFailed, InvalidTopic, OSError, self._table.engine.dialect.loaded_dbapi.Error) as error:
                log.info("listening to %s at %s: %s; will connect again", self._channel, self._table.address, error)
                self._drop()
                self._wake()
                self._stopped.wait(backoff)
                backoff = min(backoff * 2, _BACKOFF_S[1])

    def _hear(self, connection: Any) -> None:
        while not self._stopped.is_set():
            # Those that came in the same packet as an answer are in memory already, and select knows nothing of them.
            heard = list(connection.notifies(timeout=0))
            if heard:
                self._wake()
            else:
                select.select([connection.fileno(), self._bell_receiver], [], [])

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(self._table.engine.dialect.loaded_dbapi.Error):
                connection.close()


def _engine_of(url_or_engine: str | Engine) -> tuple[Engine, bool]:
    """The engine, and whether it was made here."""
    try:
        import sqlalchemy
    except ImportError as error:
        raise MissingDependency("a SQL table needs sqlalchemy: pip install 'pxrs[sql]'", name="sqlalchemy") from error
    if isinstance(url_or_engine, sqlalchemy.Engine):
        return url_or_engine, False
    try:
        url = sqlalchemy.make_url(url_or_engine)
    except (sqlalchemy.exc.ArgumentError, ValueError):
        # Without the text and without the cause: there may be a password in both.
        raise InvalidUrl("the table's address cannot be read; write postgresql://USER@HOST/DATABASE") from None
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise InvalidUrl("a table in SQLite's memory has no address; give the engine")
    url = url.set(drivername=_DRIVERS.get(url.drivername, url.drivername))
    try:
        return sqlalchemy.create_engine(url, pool_pre_ping=True, pool_size=2), True
    except sqlalchemy.exc.NoSuchModuleError:
        raise InvalidUrl(f"{url.drivername}: SQLAlchemy knows no such database") from None
    except ImportError as error:
        extra = "oracle" if url.get_backend_name() == "oracle" else "sql"
        raise MissingDependency(
            f"{url.drivername} needs {error.name}: pip install 'pxrs[{extra}]'", name=error.name
        ) from error


def _id_of(
    engine: Engine, table: str, columns: _Columns, partitions: int, partitioner: str, identity: str | None
) -> str:
    """The same in every process, and for no other table, count of partitions or meaning of its ids (G7)."""
    url = engine.url
    where: list[Any] = ["identity", identity]
    if identity is None:
        database = url.database
        if engine.dialect.name == "sqlite" and database not in (None, "", ":memory:"):
            database = str(Path(str(database)).resolve())
        port = url.port or (5432 if engine.dialect.name == "postgresql" else None)
        where = [engine.dialect.name, url.host, port, database, table]
    return uuid.uuid5(_IDENTITY, json.dumps([*where, columns.id, columns.key, partitions, partitioner])).hex


def _cut(page: _Page, partition: int, offset: int, max_bytes: int) -> Batch:
    """What the page has for the partition from the offset on, about so many bytes of it."""
    if partition not in page.parts:
        return _nothing(offset, page.end)
    ids, records = page.parts[partition]
    first = bisect_left(memoryview(ids.buffers()[1]).cast("q")[: len(ids)], offset)
    ids, records = ids.slice(first), records.slice(first)
    if records.num_rows and records.nbytes > max_bytes:
        count = max(1, records.num_rows * max(max_bytes, 0) // records.nbytes)
        if count < records.num_rows:
            ids, records = ids.slice(0, count), records.slice(0, count)
            return Batch(offset, records, ids, ids[-1].as_py() + 1)
    return Batch(offset, records, ids, page.end)


def _append(batches: list[Batch], batch: Batch) -> None:
    """Put it to the others; an empty stretch is made part of its neighbour."""
    if batches and not (batch.records.num_rows and batches[-1].records.num_rows):
        last = batches.pop()
        full = batch if batch.records.num_rows else last
        batch = Batch(last.base_offset, full.records, full.offsets, batch.next_offset)
    batches.append(batch)


def _nothing(start: int, end: int) -> Batch:
    return Batch(start, _NO_RECORDS, _NO_OFFSETS, end)


_NO_RECORDS: Final = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in SCHEMA], schema=SCHEMA)
_NO_OFFSETS: Final = pa.array([], pa.int64())


def _key_bytes(key: Any, column: str) -> bytes | None:
    """The same bytes for the same key, in whichever database: whole numbers as decimal text."""
    if key is None:
        return None
    if isinstance(key, str):
        return key.encode()
    if isinstance(key, (bytes, bytearray, memoryview)):
        return bytes(key)
    if isinstance(key, uuid.UUID):
        return str(key).encode()
    if isinstance(key, Decimal) and key == key.to_integral_value():
        return str(int(key)).encode()
    if isinstance(key, int) and not isinstance(key, bool):
        return str(key).encode()
    raise InvalidRecord(f"a key in {column} is a {type(key).__name__}; whole numbers, text, bytes or UUIDs can be keys")


def _micros(moment: Any, column: str) -> int:
    if moment is None:
        return 0
    if isinstance(moment, str):
        try:
            moment = datetime.fromisoformat(moment)
        except ValueError:
            raise InvalidRecord(f"a time in {column} is {moment!r}; as text it must be like 2026-01-31T12:00") from None
    if not isinstance(moment, datetime):
        raise InvalidRecord(f"a time in {column} is a {type(moment).__name__}; dates with times can be read")
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return microseconds_of(moment)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain).encode()


def _plain(value: Any) -> Any:
    """What JSON has no word for: times as ISO 8601, bytes as base64, exact numbers and all else as text."""
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode()
    return str(value)
