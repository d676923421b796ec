"""Reads entries of a storage node from its journal. A damaged entry is answered with an error, never as missing."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator
from typing import Final, NamedTuple

from pxrs import disk
from pxrs.cluster.ledgers import EntryHead
from pxrs.cluster.storage.core import NodeCore
from pxrs.cluster.storage.index import UNSYNCED, Place, entries_of
from pxrs.cluster.storage.journal import Journal
from pxrs.errors import DamagedFrame, NodeUnreachable, PxrsError
from pxrs.log.batch import HEADER_BYTES, read_header

_logger = logging.getLogger(__name__)

DAMAGED_MAX: Final = 100_000


class Found(NamedTuple):
    """The answer of a node for one entry."""

    entry: int
    head: EntryHead | None
    """None if the node does not have the entry, or cannot read it."""
    body: bytes | memoryview = b""
    error: PxrsError | None = None
    """Why the entry cannot be read."""
    is_unknown: bool = False
    """The node is in doubt (C7) and does not know whether it had the entry. If this is False, and `error` and `head`
    are None, the node certainly does not have the entry."""


class EntryReader:
    """Threads share it."""

    def __init__(self, node: str, core: NodeCore, journal: Journal, lock: threading.Lock) -> None:
        """lock: guards the core."""
        self._node, self._core, self._journal, self._lock = node, core, journal, lock
        self.damaged: dict[str, dict[int, int]] = {}
        """By ledger and entry: the position of a record that a read has found damaged. At most DAMAGED_MAX, and no
        ledger without any. If such an entry is added again, the node writes it again."""
        self.damaged_count = 0
        """How many entries `damaged` has."""
        self.is_overflowing = False
        """Whether a damaged entry was found that `damaged` has no room for. It is found again when all segments are
        read again."""

    def read(
        self, ledger: str, entries: range, present: set[int], max_bytes: int, *, heads: bool, is_in_doubt: bool
    ) -> Iterator[Found]:
        size = 0
        for entry in entries:
            if entry in present:
                found = self._read_one(ledger, entry, heads=heads)
            else:
                found = Found(entry, None, is_unknown=is_in_doubt)
            size += len(found.body)
            if size > max_bytes and size > len(found.body):
                return
            yield found

    def _read_one(self, ledger: str, entry: int, *, heads: bool) -> Found:
        """Read an entry that was in the index. Compaction may have moved it since: then the read is repeated."""
        while True:
            with self._lock:
                state = self._core.state(ledger)
                place = None if state is None else entries_of(state).find(entry)
            if place is None or place.position == UNSYNCED:
                return Found(entry, None, error=NodeUnreachable(self._node, f"ledger {ledger} was just removed"))
            try:
                if heads and place.rows:
                    return Found(entry, place.head, self._read_heads(ledger, place))
                record, body = self._journal.read(ledger, place.position, place.size)
                if record.entry != entry:
                    raise DamagedFrame(
                        self._journal.folder, place.position, f"found entry {record.entry} instead of {entry}"
                    )
                return Found(entry, place.head, body)
            except (DamagedFrame, OSError) as error:
                is_damage = isinstance(error, DamagedFrame) or error.errno in (errno.ENOENT, *disk.UNREADABLE)
                with self._lock:
                    state = self._core.state(ledger)
                    now = None if state is None else entries_of(state).find(entry)
                    if now is None or now.position != place.position:
                        continue  # compaction has moved it, or its ledger was removed
                    is_known = self.damaged.get(ledger, {}).get(entry) == place.position
                    if is_damage and not is_known:
                        self._note(ledger, entry, place.position)
                if not is_known:
                    _logger.error("entry %d of ledger %s cannot be read: %s", entry, ledger, error)
                return Found(entry, None, error=NodeUnreachable(self._node, f"entry {entry} of {ledger}: {error}"))

    def verify(self, ledger: str, entry: int) -> None:
        """Read an entry, to find out whether it is damaged. If the node does not have it, nothing happens."""
        found = self._read_one(ledger, entry, heads=False)
        if found.error is None:
            with self._lock:
                self.forget(ledger, entry)

    def _note(self, ledger: str, entry: int, position: int) -> None:
        """The record at this position is damaged. Under the lock."""
        self.forget(ledger, entry)
        if self.damaged_count < DAMAGED_MAX:
            self.damaged.setdefault(ledger, {})[entry] = position
            self.damaged_count += 1
        else:
            self.is_overflowing = True

    def forget(self, ledger: str, entry: int | None = None) -> None:
        """The entry, or every entry of the ledger, does not count as damaged any more. The caller holds the lock."""
        entries = self.damaged.get(ledger)
        if entries is None:
            return
        for each in list(entries) if entry is None else [entry]:
            if entries.pop(each, None) is not None:
                self.damaged_count -= 1
        if not entries:
            del self.damaged[ledger]

    def forget_overflow(self) -> bool:
        """Whether more damaged entries were found than are remembered, and half of those are repaired: then all
        segments are to be read again, to find the others. The caller holds the lock."""
        is_over = self.is_overflowing and self.damaged_count <= DAMAGED_MAX // 2
        self.is_overflowing &= not is_over
        return is_over

    def _read_heads(self, ledger: str, place: Place) -> bytes:
        """The headers of the frames of an entry, one after the other, each verified."""
        found, at = [], 0
        while at < place.size:
            data, path = self._journal.read_part(ledger, place.position, at, min(HEADER_BYTES, place.size - at))
            header = read_header(memoryview(data), path, at)
            found.append(data[: header.header_bytes])
            at += header.frame_bytes
        return b"".join(found)
