"""C7, C9: a storage node that cannot be certain what its disk has lost says so, until it knows."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pxrs.cluster import records
from pxrs.cluster.ledgers import Fragment, Joining, LedgerRecord, Quorum
from pxrs.cluster.records import NodeRecord, OwnerRecord, node_key, owner_key
from pxrs.cluster.storage import identity, journal, mark, opening
from pxrs.cluster.storage.collecting import Collector
from pxrs.cluster.storage.core import Mark, proven_end
from pxrs.cluster.storage.format import Kind, Record, decode, encode, seed_of
from pxrs.cluster.storage.identity import Started, start
from pxrs.cluster.storage.journal import Journal
from pxrs.cluster.storage.mark import MarkFile
from pxrs.cluster.storage.node import NodeSettings, StorageNode
from pxrs.cluster.storage.registration import Registration
from pxrs.cluster.storage.room import Room
from pxrs.cluster.storage.settings import StorageLimits
from pxrs.errors import ClusterError, Conflict, LedgerRemoved, NodeFull, RegistryUnavailable
from pxrs.log.directory.segments.files import pread
from pxrs.log.directory.segments.writing import OpenSegment
from pxrs.registry.contract import Registry
from tests.unit.cluster.stored import TOPIC, add, entry, stored

SEGMENT_BYTES = 600
ADDRESS = "127.0.0.1:1"
GOLDEN = Path(__file__).parents[2] / "golden" / "storage-node-1"
DOUBT = (
    "50584a5201052400000000000100000000100000000000000000000000000000ffffffffffffffffffffffffffffffff"
    "00000000000000000000000000000000000000000000000000000000000000000000000000000000869b0851e3f7bc0c"
    "35353535353535353535353535353535353535353535353535353535353535352f302f3300000000"
)
"""The record of a doubt in the journal (docs/cluster-format.md)."""


@contextmanager
def started(folder: Path, registry: Registry, *, segment_bytes: int = 1 << 20) -> Iterator[Started]:
    """The node of this folder, whose process ends without a word at the end of the block."""
    settings = NodeSettings(free_bytes_min=1, segment_bytes=segment_bytes)
    (folder / "marks").mkdir(exist_ok=True)
    found = start(folder / "node", registry, ADDRESS, settings, marks=folder / "marks")
    try:
        yield found
    finally:
        found.node.close()
        if found.mark is not None:
            found.mark.close()
        found.directory.close()


def lose_mark(folder: Path) -> None:
    """As a reboot does."""
    for path in (folder / "marks").iterdir():
        path.unlink()


def ledger(number: int, *nodes: str | None, partition: int = 0) -> LedgerRecord:
    return LedgerRecord(TOPIC, partition, number, 1, Quorum(3, 3, 2), 0, (Fragment(0, (*nodes, "x", "y", "z")[:3]),))


def put(registry: Registry, *found: LedgerRecord) -> None:
    registry.commit(put={record.key: record.dump() for record in found})


def record_of(registry: Registry, record: LedgerRecord) -> tuple[LedgerRecord, int]:
    found = registry.get(record.key)
    assert found is not None
    return LedgerRecord.parse(found.key, found.value), found.version


def node_record(registry: Registry, node: str) -> NodeRecord:
    found = registry.get(node_key(node))
    assert found is not None
    return NodeRecord.parse(found.key, found.value)


def collector(registry: Registry, found: Started) -> Collector:
    return Collector(registry, found.node, found.cluster, found.starts, StorageLimits())


def killed(*given: object) -> None:
    """In place of a step of a start: the process ends there."""
    raise RegistryUnavailable("the process is killed")


def with_two_entries(folder: Path, registry: Registry) -> tuple[LedgerRecord, Path, int]:
    """A ledger of two entries of 3,000 bytes, each in a batch of its own. Returns the ledger, the only segment of the
    node, and the place of the second entry in it."""
    with started(folder, registry) as found:
        first = ledger(0, found.node.id)
        put(registry, first)
        assert add(found.node, entry(0, first.id, size=3_000)) == [None]
        place = found.node.journal.end
        assert add(found.node, entry(1, first.id, size=3_000)) == [None]
    (segment,) = (folder / "node" / "journal").glob("*.log")
    return first, segment, place


def flip(path: Path, at: int) -> None:
    """Damage one bit."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def answers(node: StorageNode, of: LedgerRecord, last: int = 3) -> str:
    """For each entry: whether the node has it, does not have it, does not know, or cannot read it."""
    found = node.read(of.id, 0, last, 1 << 20, None, heads=False)
    return "".join("+" if a.head else "?" if a.is_unknown else "!" if a.error else "-" for a in found)


# Whether a start is proven.


def test_c9_a_start_after_the_death_of_the_process_is_proven_and_one_after_a_reboot_is_in_doubt(
    folder: Path, registry: Registry
) -> None:
    with started(folder, registry) as found:
        assert found.node.is_proven, "an empty disk has lost nothing"
        first = ledger(0, found.node.id)
        put(registry, first)
        assert add(found.node, entry(0, first.id), entry(1, first.id)) == [None, None]
    with started(folder, registry) as found:
        assert found.node.is_proven
        assert answers(found.node, first) == "++--"
        assert add(found.node, entry(2, first.id)) == [None]
    lose_mark(folder)
    for _ in range(2):  # the doubt survives a restart that is proven itself
        with started(folder, registry) as found:
            assert answers(found.node, first) == "+++?"
            assert isinstance(add(found.node, entry(3, first.id))[0], LedgerRemoved), "it may have lost a fence"
            assert found.node.load.doubts == 1
    assert found.node.is_proven


def test_c9_a_start_after_a_stop_in_order_is_proven_on_any_machine(folder: Path, registry: Registry) -> None:
    with started(folder, registry) as found:
        assert add(found.node, entry(0, ledger(0).id)) == [None]
        registration = Registration(registry, found.node, found.starts, ADDRESS, StorageLimits(), print)
        registration.start()
        registration.close()
        assert node_record(registry, found.node.id).stopped_at is None, "it may still acknowledge something"
        found.node.close()
        registration.record_stop()
        assert node_record(registry, found.node.id).stopped_at == found.node.journal.end
    lose_mark(folder)
    with started(folder, registry) as found:
        assert found.node.is_proven
        assert node_record(registry, found.node.id).stopped_at is None
    lose_mark(folder)
    with started(folder, registry) as found:
        assert not found.node.is_proven, "the recorded end was that of an earlier process"


def test_c9_a_journal_that_is_shorter_than_the_mark_is_in_doubt(folder: Path, registry: Registry) -> None:
    """Cut between two batches, or an earlier copy: nothing in the journal itself shows it."""
    with started(folder, registry) as found:
        first = ledger(0, found.node.id)
        put(registry, first)
        assert add(found.node, entry(0, first.id)) == [None]
        shutil.copytree(folder / "node", folder / "copy")
        assert add(found.node, entry(1, first.id)) == [None]
    shutil.rmtree(folder / "node")
    (folder / "copy").rename(folder / "node")
    with started(folder, registry) as found:
        assert not found.node.is_proven
        assert answers(found.node, first) == "+???"


@pytest.mark.parametrize("place", ["header", "body"])
def test_c7_a_flipped_bit_in_the_last_batch_is_not_taken_for_a_write_that_was_cut_off(
    folder: Path, registry: Registry, place: str
) -> None:
    with started(folder, registry) as found:
        first = ledger(0, found.node.id)
        put(registry, first)
        assert add(found.node, entry(0, first.id)) == [None]
        size = found.node.journal.end
        assert add(found.node, entry(1, first.id), entry(2, first.id)) == [None, None]
    (segment,) = (folder / "node" / "journal").glob("*.log")
    data = bytearray(segment.read_bytes())
    data[size + (20 if place == "header" else size - 10)] ^= 1
    segment.write_bytes(data)
    with started(folder, registry) as found:
        # A body that cannot be read says nothing less about the journal; a header may have been anything.
        assert found.node.is_proven == (place == "body")
        assert answers(found.node, first) == ("+?+?" if place == "header" else "+!+-")
        kept = (folder / "node" / "journal" / segment.name).read_bytes()
        assert place == "body" or kept == bytes(data), "the damaged bytes are kept"
    with started(folder, registry) as found:
        assert found.node.is_proven
        assert answers(found.node, first) == ("+?+?" if place == "header" else "+!+-")


def test_c9_the_rest_of_a_write_that_was_cut_off_is_removed_where_the_mark_says_that_it_was_not_synced(
    folder: Path, registry: Registry
) -> None:
    with started(folder, registry) as found:
        first = ledger(0, found.node.id)
        put(registry, first)
        assert add(found.node, entry(0, first.id)) == [None]
    (segment,) = (folder / "node" / "journal").glob("*.log")
    segment.write_bytes(segment.read_bytes() + segment.read_bytes()[:100])
    with started(folder, registry) as found:
        assert found.node.is_proven
        assert answers(found.node, first) == "+---"


def test_a_start_that_ends_before_its_doubt_is_durable_is_in_doubt_again(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(folder, registry) as found:
        first = ledger(0, found.node.id)
        put(registry, first)
        assert add(found.node, entry(0, first.id)) == [None]
    lose_mark(folder)

    for step in ("begin_doubt", "_wait_for"):
        with monkeypatch.context() as patch:
            patch.setattr(StorageNode, step, killed)
            with pytest.raises(RegistryUnavailable), started(folder, registry):
                pass
    with started(folder, registry) as found:
        assert not found.node.is_proven
        assert answers(found.node, first) == "+???"


@pytest.mark.parametrize("part", ["end", "body"])
@pytest.mark.parametrize("step", [(identity, "_register"), (StorageNode, "begin_doubt"), (Journal, "keep_lost")])
def test_c7_a_torn_range_stays_torn_if_the_start_that_found_it_ends_before_it_is_listed(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch, part: str, step: tuple[object, str]
) -> None:
    """Rot would make the node refuse writers, and the advice would be to check a sound disk."""
    with started(folder, registry) as found:
        first = ledger(0, found.node.id)
        put(registry, first)
        assert add(found.node, entry(0, first.id)) == [None]
        assert add(found.node, entry(1, first.id)) == [None]
    (segment,) = (folder / "node" / "journal").glob("*.log")
    if part == "end":
        os.truncate(segment, segment.stat().st_size - 8)
    else:
        flip(segment, segment.stat().st_size - 10)
    lose_mark(folder)

    with monkeypatch.context() as patch:
        patch.setattr(*step, killed)
        for _ in range(2):
            with pytest.raises(RegistryUnavailable), started(folder, registry):
                pass
    for _ in range(2):
        with started(folder, registry) as found:
            assert [each.is_torn for each in found.node.journal.lost] == [True]
            assert found.node.refuses is None
            assert answers(found.node, first) == "+???"


@pytest.mark.parametrize("has_stopped", [False, True])
def test_rot_stays_rot_if_the_start_that_found_it_ends_before_it_is_recorded(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch, *, has_stopped: bool
) -> None:
    """The mark, which tells that the damaged range was synced, is gone then. The end that a stop has recorded is not,
    and proves nothing."""
    with started(folder, registry) as found:
        first = ledger(0, found.node.id)
        put(registry, first)
        assert add(found.node, entry(0, first.id)) == [None]
        record, end = node_record(registry, found.node.id), found.node.journal.end
    if has_stopped:
        registry.commit(put={node_key(found.node.id): replace(record, stopped_at=end).dump()})
    (segment,) = (folder / "node" / "journal").glob("*.log")
    flip(segment, 20)

    with monkeypatch.context() as patch:
        patch.setattr(identity, "_register", killed)
        with pytest.raises(RegistryUnavailable), started(folder, registry):
            pass
    for _ in range(2):
        with started(folder, registry) as found:
            assert [each.is_torn for each in found.node.journal.lost] == [False]
            assert "damaged on the disk" in str(found.node.refuses)
            assert answers(found.node, first) == "????"


def test_c9_more_than_the_registry_knows_of_a_stop_is_no_proof(folder: Path, registry: Registry) -> None:
    """The registry was put back to a copy from after a stop, and a power loss has torn what came later."""
    with started(folder, registry) as found:
        first = ledger(0, found.node.id)
        put(registry, first)
        assert add(found.node, entry(0, first.id)) == [None]
        key = node_key(found.node.id)
        record, end = node_record(registry, found.node.id), found.node.journal.end
    registry.commit(put={key: replace(record, journal_end=end, stopped_at=end).dump()})
    copy = registry.get(key)
    assert copy is not None
    with started(folder, registry) as found:
        assert found.node.is_proven
        assert add(found.node, entry(1, first.id), entry(2, first.id)) == [None, None]
    registry.commit(put={key: copy.value})
    segment = max((folder / "node" / "journal").glob("*.log"))
    os.truncate(segment, segment.stat().st_size - 8)
    with started(folder, registry) as found:
        assert not found.node.is_proven
        assert answers(found.node, first) == "++??"


def test_c9_a_machine_that_was_put_back_to_an_earlier_state_is_no_longer_the_node(
    folder: Path, registry: Registry
) -> None:
    """Its memory, disk and mark are those of before. Only the registry knows that there was more."""
    with started(folder, registry) as found:
        key = node_key(found.node.id)
        registration = Registration(registry, found.node, found.starts, ADDRESS, StorageLimits(), print)
        record = node_record(registry, found.node.id)
        registry.commit(put={key: replace(record, journal_end=found.node.journal.end + 80).dump()})
        with pytest.raises(ClusterError, match="restored to an earlier state"):
            registration._record()
        assert node_record(registry, found.node.id).journal_end == found.node.journal.end + 80
        before = found.node.id
    with started(folder, registry) as found:
        assert found.node.id != before, "the next start is that of a new node"


def test_an_entry_of_the_last_batch_that_cannot_be_read_is_told_after_the_start(
    folder: Path, registry: Registry
) -> None:
    """The start is proven, and the segment is not sealed, so scrubbing does not come by."""
    with started(folder, registry) as found:
        first = ledger(0, found.node.id)
        put(registry, first)
        assert add(found.node, entry(0, first.id)) == [None]
    (segment,) = (folder / "node" / "journal").glob("*.log")
    flip(segment, segment.stat().st_size - 10)
    with started(folder, registry) as found:
        assert found.node.is_proven
        assert found.node.load.damaged == 1
        assert answers(found.node, first, 0) == "!"


# What the disk cannot read.


@dataclass
class BadPages:
    """Pages of 64 bytes of one file that the disk cannot read."""

    path: Path
    pages: frozenset[int]

    def pread(self, descriptor: int, size: int, position: int) -> bytes:
        if os.path.samestat(os.fstat(descriptor), self.path.stat()):
            bad = [page for page in self.pages if position < (page + 1) * 64 and page * 64 < position + size]
            if bad:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(descriptor, size, position)

    @contextmanager
    def in_use(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(opening, "PAGE_BYTES", 64)
            patch.setattr(opening, "COPY_BYTES", 1_024)  # what is searched is searched in several pieces
            patch.setattr(opening, "pread", self.pread)
            patch.setattr(journal, "pread", self.pread)
            yield


@pytest.mark.parametrize("is_sealed", [True, False])
def test_c7_a_node_starts_although_the_disk_cannot_read_a_part_of_its_journal(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch, *, is_sealed: bool
) -> None:
    """Four entries of 3,000 bytes, each in a batch of its own: the header of the second one and a part of the body of
    the third one cannot be read."""
    with started(folder, registry, segment_bytes=10_000 if is_sealed else 1 << 20) as found:
        first = ledger(0, found.node.id)
        put(registry, first)
        places = []
        for number in range(5):
            places.append(found.node.journal.end)
            assert add(found.node, entry(number, first.id, size=3_000)) == [None]
    segment = min((folder / "node" / "journal").glob("*.log"))
    bad = BadPages(segment, frozenset({places[1] // 64, (places[2] + 1_000) // 64}))
    with bad.in_use(monkeypatch):
        for _ in range(2):
            with started(folder, registry) as found:
                assert answers(found.node, first, 5) == "+?!++?"
                assert "damaged on the disk" in str(found.node.refuses)


def test_the_next_record_is_found_wherever_the_pieces_end_in_which_it_is_searched(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(folder, registry) as found:
        assert add(found.node, entry(0, ledger(0).id, size=3_000)) == [None]
        second = found.node.journal.end
        assert add(found.node, entry(1, ledger(0).id, size=3_000)) == [None]
    (segment,) = (folder / "node" / "journal").glob("*.log")
    with segment.open("rb") as file:
        for piece_bytes in range(opening.SEARCH_BYTES_MIN + 8, second + 300, 8):
            monkeypatch.setattr(opening, "COPY_BYTES", piece_bytes)
            size = segment.stat().st_size
            assert opening._next(file.fileno(), 0, size, 0, found.node.seed, str(segment)) == second


def test_a_header_that_goes_on_in_a_page_that_the_disk_cannot_read_is_rot(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its beginning can be read, and looks like that of a write that was cut off."""
    first, segment, place = with_two_entries(folder, registry)
    lose_mark(folder)
    with BadPages(segment, frozenset({place // 64 + 1})).in_use(monkeypatch), started(folder, registry) as found:
        assert [each.is_torn for each in found.node.journal.lost] == [False]
        assert "damaged on the disk" in str(found.node.refuses)
        assert answers(found.node, first, 2) == "+??"


def test_c9_a_stop_in_order_after_a_failed_write_leaves_nothing_of_it(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: OpenSegment) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with started(folder, registry) as found:
        first = ledger(0, found.node.id)
        put(registry, first)
        assert add(found.node, entry(0, first.id)) == [None]
        with monkeypatch.context() as patch:
            patch.setattr(OpenSegment, "sync", fail)
            assert isinstance(add(found.node, entry(1, first.id))[0], NodeFull)
        record, end = node_record(registry, found.node.id), found.node.journal.end
        registry.commit(put={node_key(found.node.id): replace(record, stopped_at=end).dump()})
    lose_mark(folder)
    with started(folder, registry) as found:
        assert found.node.is_proven
        assert answers(found.node, first) == "+---"


@pytest.mark.parametrize("part", ["header", "body"])
def test_c7_a_node_starts_although_the_disk_cannot_read_its_last_entry(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    first, segment, place = with_two_entries(folder, registry)
    bad = BadPages(segment, frozenset({(place if part == "header" else place + 1_000) // 64}))
    with bad.in_use(monkeypatch), started(folder, registry) as found:
        assert answers(found.node, first, 2) == ("+??" if part == "header" else "+!-")


# The mark.


def test_c9_a_mark_is_believed_on_the_same_boot_by_the_same_user_and_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = MarkFile(folder, "n1")
    assert file.read() is None
    file.begin(("a" * 32, "b" * 32), 7)
    file.move(900)
    assert MarkFile(folder, "n1").read() == Mark(("a" * 32, "b" * 32), 900)
    assert MarkFile(folder, "n2").read() is None
    content = file.path.read_bytes()
    for at in (0, 10, 60, 120, len(content) - 1):
        file.path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert MarkFile(folder, "n1").read() is None
    for other in (content[:-1], content + b"x", b""):
        file.path.write_bytes(other)
        assert MarkFile(folder, "n1").read() is None
    file.path.write_bytes(content)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert MarkFile(folder, "n1").read() is None, "somebody else has written it"
    other_boot = folder / "boot"
    other_boot.write_text("0" * 36)
    monkeypatch.setattr(mark, "BOOT_ID", other_boot)
    assert MarkFile(folder, "n1").read() is None, "the machine was booted since"
    file.remove()
    assert not file.path.exists()


def test_a_mark_that_cannot_be_written_is_removed_and_no_link_is_followed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = MarkFile(folder, "n1")
    target = folder / "target"
    target.write_text("precious")
    file.path.symlink_to(target)
    assert file.read() is None
    file.begin(("a" * 32,), 5)
    assert target.read_text() == "precious"
    assert MarkFile(folder, "n1").read() == Mark(("a" * 32,), 5)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *given: 3)
        file.move(6)
    assert not file.path.exists(), "it would say less than was acknowledged"
    file.move(7)
    assert not file.path.exists()
    MarkFile(folder / "nowhere", "n1").begin(("a" * 32,), 5)


def test_c9_what_is_known_of_the_end_of_a_journal() -> None:
    record = NodeRecord(ADDRESS, 3, start="s3")
    assert proven_end(None, Mark(("s3",), 5)) is None
    assert proven_end(record, None) is None
    assert proven_end(record, Mark(("s3", "s2"), 5)) == 5
    assert proven_end(record, Mark(("s4", "s3"), 5)) == 5, "the start s4 was not recorded"
    assert proven_end(record, Mark(("s2", "s1"), 5)) is None, "another process was the node since"
    assert proven_end(replace(record, start=""), Mark(("", "s2"), 5)) is None
    assert proven_end(replace(record, stopped_at=9), Mark(("s3",), 5)) == 9


# What is in doubt, and for how long.


def test_c7_the_ledgers_in_doubt_are_the_unclosed_ones_that_name_the_node_anywhere(
    folder: Path, registry: Registry
) -> None:
    with started(folder, registry) as found:
        me = found.node.id
    replaced = ledger(1, me, partition=1).with_node(5, 0, "spare")
    joining = replace(ledger(2, partition=2), state=records.RECOVERING, recovery=1, joining=(Joining(me, 0, 0),))
    closed = ledger(3, me, partition=3).closed(-1, 0, size=0, stored_at=0, is_complete=True)
    others = ledger(4, partition=4)
    put(registry, ledger(0, me), replaced, joining, closed, others)
    registry.commit(put={owner_key(TOPIC, 5): OwnerRecord(1, next=8).dump(), owner_key(TOPIC, 6): OwnerRecord().dump()})
    lose_mark(folder)
    with started(folder, registry) as found:
        assert found.node.doubts() == [f"{TOPIC}/0/0", f"{TOPIC}/1/1", f"{TOPIC}/2/2"]
        # Writers of every ledger that exists, or existed, are refused: a fence of it may be lost.
        for partition, number in ((0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 7), (5, 3)):
            assert isinstance(add(found.node, entry(0, f"{TOPIC}/{partition}/{number}"))[0], LedgerRemoved)
        for partition, number in ((0, 1), (4, 5), (5, 8), (6, 0)):
            assert add(found.node, entry(0, f"{TOPIC}/{partition}/{number}")) == [None]
        # Recoveries and repairs are served.
        assert found.node.fence(f"{TOPIC}/0/0", 2).last == -1
        assert add(found.node, entry(0, f"{TOPIC}/0/0", recovery=2)) == [None]


def test_c7_a_doubt_ends_when_the_ledger_is_closed_or_gone_and_not_before(folder: Path, registry: Registry) -> None:
    with started(folder, registry) as found:
        me = found.node.id
        first, second, third = (ledger(0, me, partition=number) for number in range(3))
        put(registry, first, second, third)
        assert add(found.node, entry(0, first.id)) == [None]
    lose_mark(folder)
    with started(folder, registry) as found:
        put(registry, first.closed(1, 2, size=0, stored_at=0, is_complete=True))
        registry.commit(delete=[second.key])
        collector(registry, found).settle()
        assert found.node.doubts() == [third.id]
        assert answers(found.node, first, 1) == "+-"
        closed, version = record_of(registry, first)
        assert not closed.is_complete, "entry 1 is to be copied to it again"
        assert found.node.cleared
        assert add(found.node, entry(1, first.id, recovery=closed.recovery)) == [None]
        collector(registry, found).settle()
        assert record_of(registry, first)[1] == version
    with started(folder, registry) as found:
        collector(registry, found).settle()
        assert found.node.doubts() == [third.id]
        assert record_of(registry, first)[1] == version


def test_c7_the_end_of_a_doubt_stops_a_repair_that_counts_on_what_the_node_lacks(
    folder: Path, registry: Registry
) -> None:
    """The record says already that not every node has all its entries. It is written all the same: a repair that has
    begun before expects the version that it has read, and must not complete the ledger."""
    with started(folder, registry) as found:
        me = found.node.id
        lacking, whole, joining = (ledger(number, me, partition=number) for number in range(3))
        joining = replace(joining, fragments=ledger(0).fragments, joining=(Joining(me, 0, 0),))
        put(registry, lacking, whole, joining)
        assert add(found.node, entry(0, whole.id)) == [None]
    lose_mark(folder)
    with started(folder, registry) as found:
        collecting = collector(registry, found)
        collecting.settle()
        assert not found.node.is_unchecked, "nothing else than the end of the doubts compares these ledgers"
        before = {}
        for record in (lacking, whole, joining):
            closed = record.closed(0, 1, size=0, stored_at=0, is_complete=False)
            put(registry, replace(closed, joining=record.joining))
            before[record] = record_of(registry, record)
        collecting.settle()
        assert found.node.doubts() == []
        changed = {record for record in before if record_of(registry, record)[1] != before[record][1]}
        assert changed == {lacking, joining}
        assert all(record_of(registry, record)[0] == before[record][0] for record in before)
        assert found.node.cleared == 2, "by which the owners are told"


def test_c7_the_record_of_one_ledger_that_is_damaged_keeps_no_other_in_doubt(
    folder: Path, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    with started(folder, registry) as found:
        first, second = (ledger(0, found.node.id, partition=number) for number in range(2))
        put(registry, first, second)
    lose_mark(folder)
    with started(folder, registry) as found:
        assert found.node.doubts() == [first.id, second.id]
        registry.commit(put={first.key: b"damaged"})
        put(registry, second.closed(-1, 0, size=0, stored_at=0, is_complete=True))
        collecting = collector(registry, found)
        for _ in range(2):
            collecting.settle()
        assert found.node.doubts() == [first.id]
    told = [each.getMessage() for each in caplog.records if "cannot be compared" in each.getMessage()]
    assert len(told) == 1
    assert first.key in told[0]


def test_what_a_start_in_doubt_remembers_of_partitions_is_forgotten_when_they_are_gone(
    folder: Path, registry: Registry
) -> None:
    with started(folder, registry) as found:
        pass
    staged = ledger(2, partition=3)
    put(registry, staged)
    registry.commit(put={owner_key(TOPIC, number): OwnerRecord(1, next=8).dump() for number in range(2)})
    lose_mark(folder)
    with started(folder, registry) as found:
        remembered = [f"{TOPIC}/0/7", f"{TOPIC}/1/7", staged.id]
        assert found.node.remembered() == [staged.id, *remembered[:2]]
        collector(registry, found).collect()
        assert sorted(found.node.remembered()) == remembered
        registry.commit(delete=[owner_key(TOPIC, 0), staged.key])
        collector(registry, found).collect()
        assert found.node.remembered() == [f"{TOPIC}/1/7"]
        assert isinstance(add(found.node, entry(0, f"{TOPIC}/1/7"))[0], LedgerRemoved)
    with started(folder, registry) as found:
        assert found.node.remembered() == [f"{TOPIC}/1/7"]


def test_c7_closed_ledgers_are_compared_after_a_start_in_doubt_also_by_the_next_process(
    folder: Path, registry: Registry
) -> None:
    with started(folder, registry) as found:
        me = found.node.id
        whole, lacking, marked = (
            ledger(number, me).closed(0, 1, size=0, stored_at=0, is_complete=number != 2) for number in range(3)
        )
        put(registry, whole, lacking, marked)
        assert add(found.node, entry(0, whole.id)) == [None]
    lose_mark(folder)
    with started(folder, registry) as found:
        assert found.node.is_unchecked
    with started(folder, registry) as found:
        assert found.node.is_proven
        assert found.node.is_unchecked, "the process before has not compared them"
        before = record_of(registry, marked)[1]
        collector(registry, found).settle()
        assert record_of(registry, whole)[0].is_complete
        assert not record_of(registry, lacking)[0].is_complete
        assert record_of(registry, marked)[1] > before, "a repair that counts on its entry must not complete it"
        assert not found.node.is_unchecked
    with started(folder, registry) as found:
        assert not found.node.is_unchecked


def test_c7_a_damaged_node_takes_entries_again_when_it_lacks_nothing(folder: Path, registry: Registry) -> None:
    with started(folder, registry, segment_bytes=SEGMENT_BYTES) as found:
        me = found.node.id
        first = ledger(0, me)
        put(registry, first.closed(7, 8, size=0, stored_at=0, is_complete=True))
        for number in range(8):
            assert add(found.node, entry(number, first.id)) == [None]
        assert found.node.fence(first.id, 4).last == 7
    segments = sorted((folder / "node" / "journal").glob("*.log"))
    data = bytearray(segments[0].read_bytes())
    data[20] ^= 1
    segments[0].write_bytes(data)
    with started(folder, registry, segment_bytes=SEGMENT_BYTES) as found:
        assert "damaged on the disk" in str(found.node.refuses)
        assert found.node.load.damaged == 1
        collecting = collector(registry, found)
        collecting.settle()
        assert not record_of(registry, first)[0].is_complete
        assert collecting.collect().segments == 0
        assert segments[0].exists(), "what is damaged is kept until the node lacks nothing"
        assert add(found.node, entry(0, first.id, recovery=4)) == [None]
        collecting.settle()
        assert found.node.refuses is None
        assert not segments[0].exists()
        assert stored(found.node, first.id, 7) == [*range(8)]
    with started(folder, registry, segment_bytes=SEGMENT_BYTES) as found:
        assert found.node.is_proven
        assert found.node.refuses is None
        assert stored(found.node, first.id, 7) == [*range(8)]


def test_c7_a_ledger_whose_record_changes_again_and_again_counts_as_not_compared(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(folder, registry) as found:
        lacking = ledger(0, found.node.id).closed(0, 1, size=0, stored_at=0, is_complete=False)
        put(registry, lacking)
    lose_mark(folder)
    with started(folder, registry) as found:
        collecting, before = collector(registry, found), record_of(registry, lacking)[1]

        def conflict(*given: object, **named: object) -> None:
            raise Conflict([lacking.key])

        with monkeypatch.context() as patch:
            patch.setattr(registry, "commit", conflict)
            collecting.settle()
        assert found.node.is_unchecked
        assert record_of(registry, lacking)[1] == before
        collecting.settle()
        assert record_of(registry, lacking)[1] > before, "a repair that counts on its entry must not complete it"
        assert not found.node.is_unchecked


def test_c7_an_entry_that_a_repair_is_writing_again_is_not_forgotten(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector has read the ledger's record before the repair has named the node."""
    with started(folder, registry) as found:
        first = ledger(0).closed(0, 1, size=0, stored_at=0, is_complete=True)
        put(registry, first)
        assert add(found.node, entry(0, first.id)) == [None]
    (segment,) = (folder / "node" / "journal").glob("*.log")
    flip(segment, segment.stat().st_size - 10)
    with started(folder, registry) as found:
        assert answers(found.node, first, 0) == "!"
        read, sync = registry.get, OpenSegment.sync
        is_added, is_synced = threading.Event(), threading.Event()

        def slow_read(key: str) -> object:
            entry_read = read(key)
            if key == first.key:
                assert found.node.page(first.id, -1, 10).places == [], "the repair looks what is there"
                monkeypatch.setattr(OpenSegment, "sync", slow_sync)
                found.node.add([entry(0, first.id, recovery=1)], 0, lambda number, error: is_added.set())
            return entry_read

        def slow_sync(self: OpenSegment) -> None:
            assert is_synced.wait(30)
            sync(self)

        monkeypatch.setattr(registry, "get", slow_read)
        collector(registry, found).settle()
        is_synced.set()
        assert is_added.wait(30)
        assert answers(found.node, first, 0) == "+"


def test_a_damaged_segment_is_cleaned_only_if_that_leaves_the_reserve(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(folder, registry, segment_bytes=SEGMENT_BYTES) as found:
        first = ledger(0, found.node.id)
        for number in range(8):
            assert add(found.node, entry(number, first.id)) == [None]
    flip(sorted((folder / "node" / "journal").glob("*.log"))[1], 20)
    with started(folder, registry, segment_bytes=SEGMENT_BYTES) as found:
        collecting, end = collector(registry, found), found.node.journal.end
        with monkeypatch.context() as patch:
            patch.setattr(Room, "free_bytes", 400)
            with pytest.raises(NodeFull, match="until the disk has space to copy"):
                collecting.settle()
        assert found.node.journal.end == end
        collecting.settle()
        assert found.node.refuses is None


# What is stored.


def test_a_directory_of_the_time_before_doubt_opens_and_is_in_doubt(folder: Path, registry: Registry) -> None:
    """As tests/golden/storage-node-1/make.py has made it, with the code of that time."""
    shutil.copytree(GOLDEN / "old", folder / "node")
    told = json.loads((GOLDEN / "record.json").read_text())
    registry.commit(
        put={
            records.CLUSTER_ID: json.dumps({"id": told["cluster"]}).encode(),
            node_key(told["node"]): json.dumps(told["record"]).encode(),
        }
    )
    first = ledger(0, told["node"])
    put(registry, first)
    with started(folder, registry, segment_bytes=SEGMENT_BYTES) as found:
        assert found.node.id == told["node"]
        assert not found.node.is_proven
        assert answers(found.node, first, 7) == "+++++++?"
        assert stored(found.node, f"{TOPIC}/1/0") == [0, 1, 2]
        assert found.node.page(f"{TOPIC}/1/0", -1, 1).fence == 2
        assert isinstance(add(found.node, entry(0, f"{TOPIC}/2/7"))[0], LedgerRemoved)
    with started(folder, registry, segment_bytes=SEGMENT_BYTES) as found:
        assert found.node.is_proven
        assert answers(found.node, first, 7) == "+++++++?"


def test_the_bytes_of_a_doubt_are_these() -> None:
    record = Record(Kind.DOUBT, f"{TOPIC}/0/3")
    found = encode(record, 4_096, 1, seed_of("node-1"))
    assert found.hex() == DOUBT
    assert decode(memoryview(found), 96, 4_000, seed_of("node-1"), "") == record._replace(position=4_096, follows=1)
