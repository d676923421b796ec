"""What a broker has read from storage nodes is not read again for the next megabyte of the same entry."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("grpc")

from pxrs.cluster.broker.entries import Entry, encode_entry
from pxrs.cluster.broker.fetched import FetchedEntries
from pxrs.cluster.broker.index import Indexed, LedgerIndex
from pxrs.cluster.broker.reading import LedgerReader
from pxrs.cluster.broker.writing import head_of
from pxrs.cluster.ledgers import EntryHead
from pxrs.cluster.links import EntryRead
from pxrs.log.batch import SCHEMA, Origin, encode
from pxrs.log.contract import Append

PLACE = 7


def _entry(size: int, offset: int = 0) -> Entry:
    return Entry((), (), size, offset, 1, 0, 0)


def test_p4_the_least_recently_used_entries_make_room_for_others() -> None:
    kept = FetchedEntries(bytes_max=100)
    first, second, third = _entry(40), _entry(40), _entry(40)
    kept.add("a", 1, first)
    kept.add("a", 2, second)
    assert kept.get("a", 1, max_bytes=1) == [first]
    kept.add("b", 1, third)
    assert kept.get("a", 2, max_bytes=100) == []
    assert kept.get("a", 1, max_bytes=100) == [first]
    assert kept.get("b", 1, max_bytes=100) == [third]
    assert kept.bytes == 80
    kept.add("b", 2, _entry(101))  # larger than all room: nothing is kept
    assert kept.bytes == 0


def test_p4_consecutive_entries_come_together_up_to_the_bytes_asked_for() -> None:
    kept = FetchedEntries(bytes_max=100)
    entries = [_entry(30, offset) for offset in range(3)]
    for number, entry in enumerate(entries):
        kept.add("a", number, entry)
    assert kept.get("a", 0, max_bytes=60) == entries[:2]
    assert kept.get("a", 1, max_bytes=1) == entries[1:2]
    assert kept.get("a", 3, max_bytes=60) == []


def test_p4_an_entry_that_is_added_again_is_counted_once_and_a_removed_ledger_is_forgotten() -> None:
    kept = FetchedEntries(bytes_max=100)
    kept.add("a", 0, _entry(30))
    kept.add("a", 0, _entry(30))
    kept.add("b", 0, _entry(20))
    assert kept.bytes == 50
    kept.forget("a")
    assert (kept.bytes, kept.get("a", 0, 100)) == (20, [])


class _Reader(LedgerReader):
    """Counts what is asked of nodes."""

    def __init__(self, entries: list[Entry]) -> None:
        super().__init__(links=_no_links)
        self._stored = entries
        self.asked: list[tuple[int, int]] = []

    def read(self, record: Any, first: int, last: int, *, heads: bool = False) -> Iterator[EntryRead]:
        self.asked.append((first, last))
        for number in range(first, last + 1):
            entry = self._stored[number - 1]
            head: EntryHead = head_of(entry)
            yield EntryRead(number, head, memoryview(b"".join(map(bytes, entry.pieces))))


def _no_links(node: str) -> Any:
    raise AssertionError("no node is asked in this test")


class _Record:
    id = "t/0/0"


def test_p4_a_reader_that_takes_an_entry_in_steps_lets_the_broker_read_it_once() -> None:
    rows = pa.record_batch(
        [[b"k"] * 100, [b"v" * 1_000] * 100, pa.array(range(100), SCHEMA.field(2).type), pa.nulls(100)], schema=SCHEMA
    )
    producer = uuid.uuid4()
    entries, index = [], LedgerIndex()
    index.add(Indexed(0, 0, 2, 0, 0))
    for number in range(3):
        batches = [(Append(0, encode(rows), Origin(producer, 0, at)), 300 * number + 100 * at) for at in range(3)]
        entries.append(encode_entry(batches, PLACE, 1))
        found = entries[-1]
        index.add(Indexed(found.offset, found.rows, found.size, found.last_timestamp, found.stored_at))
    reader = _Reader(entries)
    record: Any = _Record()
    for offset in (0, 100, 200):
        first = index.find(offset)
        (one,) = reader.entries(record, first, index.reach(first, 100_000), 100_000, PLACE)
        assert [frame.offset for frame in one.frames] == [0, 100, 200]
    assert reader.asked == [(1, 1)]
    assert len(reader.entries(record, 2, index.reach(2, 1 << 20), 1 << 20, PLACE)) == 2
    assert reader.asked == [(1, 1), (2, 3)]
    reader.forget(record.id)
    reader.entries(record, 1, 1, 1, PLACE)
    assert reader.asked == [(1, 1), (2, 3), (1, 1)]
