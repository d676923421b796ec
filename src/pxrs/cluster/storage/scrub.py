"""Reads the sealed segments of a storage node again and again, to find what the disk has damaged since (rot).

One thread reads piece after piece from the medium: what the page cache has of a piece is dropped first. It waits
between two pieces, so that it reads at most `scrub_bytes_s` bytes a second and is busy for at most BUSY_MAX of the
time. The place is kept in a file, `scrub.json`, and a restart continues there; so are the damaged entries that were
found.

    found                                     what is done
    an entry with a damaged body or header    it counts as damaged: reads are answered with an error, and the record of
                                              its closed ledger says that the node lacks it, so that it gets a copy
                                              (`collecting`)
    another live record in a damaged range    it is written again, from memory
    a damaged range without live records      it is recorded (`removed.LOST`), so that the next start passes over it
    more damaged entries than are remembered  when half of those have copies again, all segments are read again

A node that is started before a damaged range is free of live records finds the range itself, and is in doubt (C7).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import xxhash

from pxrs import disk
from pxrs.cluster.storage.format import HEADER_BYTES_MAX, Kind, Record, decode, find_record
from pxrs.cluster.storage.node import StorageNode
from pxrs.cluster.storage.opening import PAGE_BYTES, read_or_zeros
from pxrs.errors import Closed, DamagedFrame, PxrsError
from pxrs.metrics.instruments import STORAGE_SCRUB_ENDED, STORAGE_SCRUB_LEFT, STORAGE_SCRUBBED
from pxrs.waiting import start_thread

_logger = logging.getLogger(__name__)

FILE: Final = "scrub.json"
PIECE_BYTES: Final = 1 << 20
BUSY_MAX: Final = 0.03
"""The part of the time for which the thread is busy at most."""
IDLE_S: Final = 5.0
"""The pause if there is no sealed segment, after an error, and if `scrub_bytes_s` is 0."""
IDLE_S_MIN: Final = 0.1
"""The same pause if `scrub_round_s` is shorter than IDLE_S."""
KEEP_S: Final = 10.0
"""How often the place is written to the file at most."""


@dataclass(slots=True)
class Place:
    """What the file has."""

    position: int = 0
    """Everything before this position of the journal was read in this round."""
    began_at: float = 0.0
    """When this round began, in seconds since 1970."""
    ended_at: float = 0.0
    """When the last round ended; 0 if none has."""
    damaged: list[tuple[str, int]] = field(default_factory=list)
    """The damaged entries that were found and are not repaired."""


class Scrubber:
    """Runs from `start` to `close`."""

    def __init__(self, node: StorageNode, directory: Path, bytes_s: int, round_s: float = 0.0) -> None:
        """bytes_s: how many bytes are read a second at most; 0: none. round_s: how long a round takes at least."""
        self._node, self._path, self._bytes_s, self._round_s = node, directory / FILE, bytes_s, round_s
        self.place = _load(self._path)
        self._kept_at = 0.0
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None
        STORAGE_SCRUB_LEFT.watch(self, lambda scrubber: [((), scrubber.left)])
        STORAGE_SCRUB_ENDED.watch(self, lambda scrubber: [((), scrubber.place.ended_at)])

    def start(self) -> None:
        self._thread = start_thread(self._run, "pxrs-storage-scrub")

    def close(self) -> None:
        """Idempotent."""
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def left(self) -> int:
        """How many bytes of sealed segments this round has not read yet."""
        with self._node.lock:
            bases = self._node.journal.bases
            sealed = [(base, self._node.journal.segment_end(base)) for base in bases[:-1]]
        return sum(max(end - max(base, self.place.position), 0) for base, end in sealed)

    def _run(self) -> None:
        for ledger, entry in self.place.damaged:  # found by an earlier process
            if self._is_closing.is_set():
                return
            self._node.verify(ledger, entry)
        problem = ""
        while not self._is_closing.is_set():
            began = time.monotonic()
            try:
                size = self.step() if self._bytes_s else 0
                if not self._bytes_s:
                    self._node.forget_overflow()
                problem = ""
            except Closed:
                return
            except (OSError, PxrsError) as error:
                size = 0
                if str(error) != problem:
                    problem = str(error)
                    _logger.warning("the segments could not be checked, retrying: %s", error)
            busy_s = time.monotonic() - began
            STORAGE_SCRUBBED.of().add(size)
            idle_s = min(IDLE_S, max(self._round_s, IDLE_S_MIN))
            pause_s = max(size / self._bytes_s - busy_s, busy_s / BUSY_MAX) if size else idle_s
            self._is_closing.wait(pause_s)
        self._keep()

    def step(self) -> int:
        """Check the next piece. Returns how many bytes were read; 0 if the round is over. Raises OSError, PxrsError."""
        node, place = self._node, self.place
        if node.forget_overflow():
            place.position = 0
        with node.lock:
            sealed = [(base, node.journal.segment_end(base)) for base in node.journal.bases[:-1]]
            sealed = [each for each in sealed if each[1] > place.position]
        if not sealed:
            if place.position and 0 <= time.time() - place.began_at < self._round_s:
                return 0
            place.ended_at, place.position = time.time(), 0
            place.began_at = place.ended_at
            self._keep()
            return 0
        base, end = sealed[0]
        begin = max(place.position, base)
        try:
            size = self._check(base, begin, end)
        except OSError as error:
            if error.errno not in (errno.ENOENT, *disk.UNREADABLE):
                raise
            with node.lock:
                is_needed = base in node.journal.bases
            if is_needed:  # else the node has unlinked it meanwhile
                self._lose(DamagedFrame(str(error.filename), 0, f"the segment cannot be opened: {error}"), base, end)
            place.position = end
            return 0
        place.position = begin + size
        if place.position >= end or time.monotonic() - self._kept_at > KEEP_S:
            self._keep()
        return size

    def _check(self, base: int, begin: int, end: int) -> int:
        """Check the records from a position on, as many as are in one piece. Returns their length."""
        node = self._node
        inside = next((each for each in node.journal.lost if each.begin <= begin < each.end), None)
        if inside is not None:
            return inside.end - begin
        limit = min([end, *(each.begin for each in node.journal.lost if each.begin > begin)])
        segment = node.journal.segment(base)
        length = min(PIECE_BYTES, limit - begin)
        _drop_cache(segment.descriptor, begin - base, length)
        data = memoryview(read_or_zeros(segment.descriptor, length, begin - base))
        at = 0
        while at < length:
            try:
                if at + HEADER_BYTES_MAX > len(data) and begin + len(data) < limit and at:
                    return at
                record = decode(data[at : at + HEADER_BYTES_MAX], begin + at - base, base, node.seed, segment.path)
            except DamagedFrame as error:
                if not self._is_lasting(segment.descriptor, begin + at, base, segment.path):
                    return at  # the next step reads this record again
                found = find_record(data, at + 1, begin, node.seed, segment.path)
                if found is None and begin + length < limit:
                    found = length - HEADER_BYTES_MAX if at < length - HEADER_BYTES_MAX else length
                size = (limit - begin if found is None else found) - at
                self._lose(error, begin + at, begin + at + size)
                return at + size
            body = at + record.header_bytes
            if at + record.size > length:
                if at:
                    return at  # the next piece begins with this record
                _drop_cache(segment.descriptor, begin - base, record.size)
                self._check_entry(record, None)
                return record.size
            self._check_entry(record, data[body : body + record.body_bytes])
            at += record.size
        return at

    def _is_lasting(self, descriptor: int, position: int, base: int, path: str) -> bool:
        """Whether the header of the record at this position is damaged if it is read a second time."""
        _drop_cache(descriptor, position - base, HEADER_BYTES_MAX)
        data = memoryview(read_or_zeros(descriptor, HEADER_BYTES_MAX, position - base))
        try:
            decode(data, position - base, base, self._node.seed, path)
        except DamagedFrame:
            return True
        return False

    def _check_entry(self, record: Record, body: memoryview | None) -> None:
        """body: None if it must be read."""
        if record.kind is not Kind.ENTRY or not record.body_bytes:
            return
        if body is None or xxhash.xxh3_64_intdigest(body) != record.checksum:
            self._node.verify(record.ledger, record.entry)  # which finds out whether this record is the live one

    def _lose(self, error: DamagedFrame, begin: int, end: int) -> None:
        """The headers of a range are damaged."""
        _logger.error("%d bytes of the journal are damaged on the disk: %s", end - begin, error)
        for ledger, entry in self._node.entries_within(begin, end):
            self._node.verify(ledger, entry)
        self._node.move_out(begin, end)

    def _keep(self) -> None:
        self._kept_at = time.monotonic()
        self.place.damaged = [
            (ledger, entry) for ledger, found in self._node.damaged_entries().items() for entry in found
        ]
        try:
            disk.replace_file(str(self._path), json.dumps(asdict(self.place)).encode())
        except OSError as error:
            # Nothing is lost: the next process checks some segments again.
            _logger.warning("the progress of the segment check was not written: %s", disk.explain(error, self._path))


def _drop_cache(descriptor: int, at: int, size: int) -> None:
    """Have the next read of these bytes come from the medium."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        begin = at // PAGE_BYTES * PAGE_BYTES  # a page of which only a part is named stays
        end = -(-(at + size) // PAGE_BYTES) * PAGE_BYTES
        os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)


def _load(path: Path) -> Place:
    try:
        found = json.loads(path.read_bytes())
        damaged = [(str(ledger), int(entry)) for ledger, entry in found["damaged"]]
        return Place(int(found["position"]), float(found["began_at"]), float(found["ended_at"]), damaged)
    except FileNotFoundError:
        return Place()
    except (KeyError, TypeError, ValueError, OSError) as error:
        _logger.warning("%s cannot be read; the segments are checked from the beginning: %r", path, error)
        return Place()
