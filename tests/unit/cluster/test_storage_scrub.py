"""A storage node finds what its disk has damaged in sealed segments, before anybody needs it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pxrs.cluster.storage import reading, scrub
from pxrs.cluster.storage.identity import Started
from pxrs.cluster.storage.scrub import Scrubber
from pxrs.registry.contract import Registry
from tests.unit.cluster.stored import LEDGER, add, entry, stored
from tests.unit.cluster.test_storage_doubt import BadPages, collector, flip, ledger, put, record_of, started

OTHER = LEDGER.replace("/0/0", "/1/0")


@contextmanager
def filled(folder: Path, registry: Registry) -> Iterator[tuple[Started, list[Path]]]:
    """A node with a closed ledger of eight entries, and a fence of another one between them. Some small segments."""
    with started(folder, registry, segment_bytes=600) as found:
        put(registry, ledger(0, found.node.id).closed(7, 8, size=0, stored_at=0, is_complete=True))
        for number in range(8):
            assert add(found.node, entry(number)) == [None]
            if number == 1:
                found.node.fence(OTHER, 3)
        yield found, sorted((folder / "node" / "journal").glob("*.log"))


def a_round(found: Started, folder: Path) -> Scrubber:
    """Check everything once."""
    (folder / scrub.FILE).unlink(missing_ok=True)
    scrubber = Scrubber(found.node, folder, 1 << 30)
    while scrubber.step():
        pass
    scrubber._keep()
    return scrubber


def test_a_damaged_body_is_found_and_gets_a_copy(folder: Path, registry: Registry) -> None:
    with filled(folder, registry) as (found, segments):
        assert a_round(found, folder).place.damaged == []
        flip(segments[0], 2 * 160 - 10)
        assert a_round(found, folder).place.damaged == [(LEDGER, 1)]
        assert found.node.load.damaged == 1
        assert [place.entry for place in found.node.page(LEDGER, -1, 10).places] == [0, 2, 3, 4, 5, 6, 7]
        collector(registry, found).settle()
        assert not record_of(registry, ledger(0))[0].is_complete
        assert add(found.node, entry(1, recovery=0)) == [None]
        assert found.node.load.damaged == 0
        assert stored(found.node, last=7) == [*range(8)]


def test_all_damaged_entries_get_a_copy_although_there_are_more_than_the_node_remembers(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "DAMAGED_MAX", 2)
    with filled(folder, registry) as (found, segments):
        for segment, at in ((0, 160), (0, 2 * 160), (1, 160)):
            flip(segments[segment], at - 10)
        scrubber = Scrubber(found.node, folder, 1 << 30)
        while found.node.load.damaged < 3:  # two of them, and that there are more
            assert scrubber.step()
        ((_, known),) = found.node.damaged_entries().items()
        assert known == {0, 1}
        for number in known:
            assert add(found.node, entry(number, recovery=0)) == [None]
        assert found.node.load.damaged == 1, "the node knows that it does not know all"
        while scrubber.step():
            pass
        ((_, (last,)),) = found.node.damaged_entries().items()
        assert add(found.node, entry(last, recovery=0)) == [None]
        assert found.node.load.damaged == 0
        assert stored(found.node, last=7) == [*range(8)]


def test_a_page_that_the_disk_cannot_read_damages_no_more_than_what_is_in_it(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled(folder, registry) as (found, segments):
        page = (160 + 100) // 64  # of the body of entry 1
        with BadPages(segments[0], frozenset({page})).in_use(monkeypatch):
            scrubber = a_round(found, folder)
        assert scrubber.place.damaged == [(LEDGER, 1)]
        assert not found.node.journal.lost
        assert found.node.refuses is None


def test_c7_each_damage_that_is_found_stops_a_repair_that_counts_on_the_entry(folder: Path, registry: Registry) -> None:
    """The record says already that not every node has all its entries. It is written once for each new damage."""
    with filled(folder, registry) as (found, segments):
        record = ledger(0, found.node.id).closed(7, 8, size=0, stored_at=0, is_complete=False)
        put(registry, record)
        collecting = collector(registry, found)
        for number in (1, 0):
            version, cleared = record_of(registry, record)[1], found.node.cleared
            flip(segments[0], (number + 1) * 160 - 10)
            found.node.verify(LEDGER, number)
            collecting.settle()
            again, after = record_of(registry, record)
            assert (again, found.node.cleared) == (record, cleared + 1)
            assert after > version
            collecting.settle()
            assert record_of(registry, record)[1] == after, "nothing new"


def test_a_damaged_header_is_found_and_what_it_held_is_written_elsewhere(folder: Path, registry: Registry) -> None:
    with filled(folder, registry) as (found, segments):
        for at in (160 + 20, 2 * 160 + 20):  # entry 1, and the fence behind it
            flip(segments[0], at)
        a_round(found, folder)
        assert found.node.load.damaged == 2, "the entry, and the range of the journal"
        assert not found.node.journal.lost, "entry 1 has no other place yet"
        collecting = collector(registry, found)
        collecting.settle()
        assert add(found.node, entry(1, recovery=0)) == [None]
        assert found.node.load.damaged == 1, "told until it is mended, and not only when the next round finds it"
        collecting.settle()
        assert not segments[0].exists()
        assert found.node.refuses is None
        assert found.node.load.damaged == 0
    with started(folder, registry, segment_bytes=600) as found:
        assert found.node.is_proven
        assert stored(found.node, last=7) == [*range(8)]
        assert found.node.page(OTHER, -1, 1).fence == 3


def test_a_start_before_damage_is_repaired_is_in_doubt(folder: Path, registry: Registry) -> None:
    with filled(folder, registry) as (found, segments):
        flip(segments[0], 160 + 20)
        a_round(found, folder)
    with started(folder, registry, segment_bytes=600) as found:
        assert not found.node.is_proven
        assert found.node.page(OTHER, -1, 1).fence == 3


def test_the_place_and_what_was_found_are_kept_over_a_restart(folder: Path, registry: Registry) -> None:
    with filled(folder, registry) as (found, segments):
        flip(segments[0], 2 * 160 - 10)
        scrubber = Scrubber(found.node, folder, 1 << 30)
        assert 0 < scrubber.step() < 700
        place = scrubber.place.position
        assert place > 0
        assert 0 < scrubber.left < found.node.journal.end - place
        scrubber._keep()
    with started(folder, registry, segment_bytes=600) as found:
        assert found.node.load.damaged == 0
        again = Scrubber(found.node, folder, 1 << 30, 60.0)
        assert again.place.position == place
        again.start()
        until = time.monotonic() + 30
        while found.node.load.damaged == 0:
            assert time.monotonic() < until
            again._is_closing.wait(0.01)
        again.close()
    (folder / scrub.FILE).write_text("{")
    with started(folder, registry, segment_bytes=600) as found:
        assert Scrubber(found.node, folder, 1).place.position == 0


def test_records_that_are_longer_than_a_piece_or_cross_its_end_are_checked(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub, "PIECE_BYTES", 4_096)
    with started(folder, registry, segment_bytes=20_000) as found:
        sizes = [100, 9_000, 50, 3_990, 4_100, 700, 1_000, 2_000]
        assert add(found.node, *(entry(number, size=size) for number, size in enumerate(sizes))) == [None] * len(sizes)
        assert add(found.node, entry(20)) == [None]
        assert a_round(found, folder).place.damaged == []
        places = {place.entry: place for place in found.node.page(LEDGER, -1, 20).places}
        (segment, _) = sorted((folder / "node" / "journal").glob("*.log"))
        for number in (1, 3, 4, 7):
            flip(segment, places[number].position + 150)
        assert a_round(found, folder).place.damaged == [(LEDGER, number) for number in (1, 3, 4, 7)]
        for number in (2, 4):
            flip(segment, places[number].position + 20)
        assert {each for _, each in a_round(found, folder).place.damaged} == {1, 2, 3, 4, 7}


def test_a_thread_reads_no_faster_than_it_may(folder: Path, registry: Registry) -> None:
    with filled(folder, registry) as (found, _):
        scrubber = Scrubber(found.node, folder, 1_000, 60.0)
        began = time.monotonic()
        scrubber.start()
        while scrubber.place.position < 1_200:
            assert time.monotonic() < began + 60
            scrubber._is_closing.wait(0.01)
        scrubber.close()
        assert time.monotonic() - began > 0.5, "616 bytes are read before"
