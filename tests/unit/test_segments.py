"""The lower half of the log in a directory alone, as a storage node uses it: the frames of several ledgers, interleaved
in one sequence of segment files, with one sync for all of them (C5)."""

from __future__ import annotations

import ast
import os
import uuid
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from pxrs.errors import DamagedFrame
from pxrs.log import directory
from pxrs.log.batch import Header, Origin, Payload, encode, header_bytes, padding, read_payload
from pxrs.log.directory.segments.files import segment_bases
from pxrs.log.directory.segments.scanning import Scan, scan
from pxrs.log.directory.segments.writing import OpenSegment, next_segment
from pxrs.testing.log_contract import records

LEDGERS = (11, 22, 33)
"""Each ledger's id stands where a topic's frames name their partition."""
NODE = uuid.UUID(int=7)


class Journal:
    """A storage node in miniature: counts entries per ledger, and knows what it has synced."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.entries: dict[int, list[bytes]] = defaultdict(list)
        bases = segment_bases(self.folder)
        self.segment = OpenSegment.open(self.folder, bases[-1] if bases else 0, is_created=True)
        for base in bases[:-1]:
            self._take_in(OpenSegment.open(self.folder, base))
        self.synced = self._take_in(self.segment).position
        self.written = self.synced
        self.follows = 0

    def _take_in(self, segment: OpenSegment) -> Scan:
        data = segment.read()
        found = scan(data, segment.path, self._check(segment.path))
        is_last = segment is self.segment
        if is_last:
            segment.keep_whole(data, found, lambda header: True, None)
        for at, header in found.found:
            values = read_payload(header, data.slice(at, header.frame_bytes), segment.path, at).column("value")
            assert header.place_id is not None
            self.entries[header.place_id] += values.to_pylist()
        return found

    def _check(self, path: str) -> Callable[[int, Header], None]:
        """Each ledger's frames continue that ledger, whatever lies between them."""
        ends = {ledger: len(entries) for ledger, entries in self.entries.items()}

        def check(at: int, header: Header) -> None:
            assert header.place_id is not None
            if header.base_offset != ends.get(header.place_id, 0):
                raise DamagedFrame(path, at, "another entry of the ledger must be here")
            ends[header.place_id] = header.next_offset

        return check

    def write(self, ledger: int, *values: bytes) -> None:
        """Without a sync."""
        payload: Payload = encode(records(values))
        offset = len(self.entries[ledger])
        raw = header_bytes(payload, offset, Origin(NODE, 1, 0), place=ledger, stored_at=5, follows=self.follows)
        self.segment.write([raw, payload.data, padding(payload)], self.written)
        self.written += payload.frame_bytes
        self.follows += 1
        self.entries[ledger] += values

    def sync(self) -> None:
        self.segment.sync()
        self.synced, self.follows = self.written, 0

    def roll(self) -> None:
        """The base of a file is the number of entries before it, of all ledgers."""
        base = sum(map(len, self.entries.values()))
        self.segment = next_segment(self.folder, base)
        self.synced = self.written = 0


def fill(journal: Journal, syncs: int = 4) -> None:
    for number in range(syncs):
        for ledger in LEDGERS:
            journal.write(ledger, *(b"%d-%d" % (ledger, number),) * (1 + ledger % 2))
        journal.sync()


def test_c5_one_sync_makes_the_entries_of_all_ledgers_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs: list[int] = []
    sync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: syncs.append(descriptor) or sync(descriptor))
    journal = Journal(tmp_path)
    syncs.clear()
    fill(journal, syncs=4)
    assert len(syncs) == 4
    assert Journal(tmp_path).entries == journal.entries
    assert {ledger: len(entries) for ledger, entries in journal.entries.items()} == {11: 8, 22: 4, 33: 8}


@pytest.mark.parametrize("kept", ["nothing", "a part of a frame", "a frame and a part", "everything"])
def test_c5_a_killed_node_finds_what_it_had_synced_and_cuts_off_the_rest(tmp_path: Path, kept: str) -> None:
    """A power loss keeps any part of what was written and not synced."""
    journal = Journal(tmp_path)
    fill(journal)
    synced = {ledger: list(entries) for ledger, entries in journal.entries.items()}
    end = journal.synced
    journal.write(22, b"not synced")
    one = journal.written - end
    journal.write(33, b"not synced either")
    both = journal.written - end
    journal.segment.cut(end + {"nothing": 0, "a part of a frame": 40, "a frame and a part": one + 40}.get(kept, both))
    again = Journal(tmp_path)
    synced[22] += [b"not synced"] * (kept in ("a frame and a part", "everything"))
    synced[33] += [b"not synced either"] * (kept == "everything")
    assert again.entries == synced
    assert again.segment.size == again.synced, "nothing torn is left"
    fill(again)
    assert Journal(tmp_path).entries == again.entries


def test_damage_that_a_later_append_proves_to_be_older_is_reported_and_never_cut(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    fill(journal)
    path = Path(journal.segment.path)
    damaged = bytearray(path.read_bytes())
    damaged[200] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(DamagedFrame):
        Journal(tmp_path)
    assert path.read_bytes() == damaged


def test_a_sequence_goes_on_in_the_next_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    fill(journal)
    journal.roll()
    fill(journal)
    assert segment_bases(str(tmp_path)) == [0, 20]
    assert Journal(tmp_path).entries == journal.entries


def test_l3_the_next_file_must_be_empty(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    fill(journal)
    journal.roll()
    fill(journal, syncs=1)
    with pytest.raises(DamagedFrame, match="a segment with messages exists where the next one must begin"):
        next_segment(str(tmp_path), 20)
    assert next_segment(str(tmp_path), 20, is_emptied=True).size == 0


def test_an_empty_file_that_a_killed_writer_has_made_is_used(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    fill(journal)
    journal.roll()
    again = Journal(tmp_path)
    assert (again.segment.base, again.synced, again.entries) == (20, 0, journal.entries)


def test_the_lower_half_knows_nothing_of_the_upper_one() -> None:
    allowed = {"pxrs", "pxrs.disk", "pxrs.errors", "pxrs.log.batch"}
    lower = Path(directory.__file__).parent / "segments"
    for path in lower.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
                ours = {name for name in names if name.split(".")[0] == "pxrs"}
                beyond = {name for name in ours - allowed if not name.startswith("pxrs.log.directory.segments.")}
                assert not beyond, f"{path.name} imports {beyond}"
