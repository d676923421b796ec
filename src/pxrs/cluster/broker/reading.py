"""Reads confirmed entries of ledgers from storage nodes."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from threading import Lock
from typing import Final

import pyarrow as pa

from pxrs.cluster.broker.entries import Entry, decode_entry
from pxrs.cluster.broker.fetched import FetchedEntries
from pxrs.cluster.broker.index import Indexed, LedgerIndex
from pxrs.cluster.ledgers import LedgerRecord
from pxrs.cluster.links import EntryRead, NodeLink
from pxrs.errors import LedgerFenced, NodeUnreachable, ReadFailed, WrongNode

INDEXES_MAX: Final = 64
"""Maximum number of closed ledgers whose index is cached."""
AVOIDED_S: Final = 10.0
"""For how long after a failure a node is asked last, so that a node that hangs costs one timeout of its link, not one
for each read."""
PAGE: Final = 10_000
"""How many entries of an index are requested at a time."""
_FAILURES: Final = (NodeUnreachable, WrongNode, LedgerFenced)

Links = Callable[[str], NodeLink]
"""The link to a node, by its id. Raises NodeUnreachable if its address is not known."""


class LedgerReader:
    """Threads share it."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._lock = Lock()
        self._indexes: OrderedDict[str, LedgerIndex] = OrderedDict()
        self._fetched = FetchedEntries()
        self._avoided: dict[str, float] = {}
        """By node that did not answer: until when it is asked last (monotonic)."""

    def index(self, record: LedgerRecord) -> LedgerIndex:
        """The index of a closed ledger. Raises ReadFailed."""
        with self._lock:
            known = self._indexes.pop(record.id, None)
            if known is not None:
                self._indexes[record.id] = known
                return known
        assert record.last is not None
        index = self.index_upto(record, record.last)
        with self._lock:
            self._indexes[record.id] = index
            while len(self._indexes) > INDEXES_MAX:
                self._indexes.popitem(last=False)
        return index

    def index_upto(self, record: LedgerRecord, last: int, timeout_s: float | None = None) -> LedgerIndex:
        """The index of the entries 0 to `last`, all of which the ledger has. timeout_s: of each request; None: that of
        the link. Raises ReadFailed."""
        found: dict[int, Indexed] = {}
        errors: list[str] = []
        for node in self._nodes(record):
            if all(entry in found for entry in range(last + 1)):
                break
            try:
                for entry, head in self._index_of(node, record, last, timeout_s):
                    found.setdefault(entry, head)
            except _FAILURES as error:
                self.avoid(node)
                errors.append(f"{node}: {error}")
        index = LedgerIndex()
        for entry in range(last + 1):
            if entry not in found:
                raise _unreadable(record, entry, errors)
            index.add(found[entry])
        return index

    def _index_of(
        self, node: str, record: LedgerRecord, last: int, timeout_s: float | None
    ) -> Iterator[tuple[int, Indexed]]:
        after = -1
        while after < last:
            page = self._links(node).index(record.id, after=after, limit=PAGE, timeout_s=timeout_s)
            for entry, head in page.entries:
                after = entry
                yield entry, Indexed(head.offset, head.rows, head.size, head.last_timestamp, head.stored_at)
            if not page.has_more:
                return

    def entries(self, record: LedgerRecord, first: int, last: int, max_bytes: int, place: int) -> list[Entry]:
        """The entries from `first` to `last`; fewer, about `max_bytes`, if the first of them are cached.

        place: the partition's `place_id`. Raises ReadFailed, DamagedFrame."""
        found = self._fetched.get(record.id, first, max_bytes)
        if not found:
            for read in self.read(record, first, last):
                entry = decode_entry(body_of(read), f"entry {read.entry} of ledger {record.id}", place)
                self._fetched.add(record.id, read.entry, entry)
                found.append(entry)
        return found

    def read(self, record: LedgerRecord, first: int, last: int, *, heads: bool = False) -> Iterator[EntryRead]:
        """The entries from `first` to `last`, in order. heads: read the headers of their frames instead of their bytes.
        Raises ReadFailed if an entry cannot be read from any of its nodes."""
        found: dict[int, EntryRead] = {}
        errors: list[str] = []
        entry = first
        while entry <= last:
            began = entry
            for node in self._nodes(record, entry):
                try:
                    read = self._links(node).read(record.id, entry, last, heads=heads)
                except _FAILURES as error:
                    self.avoid(node)
                    errors.append(f"{node}: {error}")
                    continue
                errors += [f"{node}: {each.error}" for each in read if each.error is not None]
                found |= {each.entry: each for each in read if each.head is not None}
                while entry in found:
                    yield found.pop(entry)
                    entry += 1
                if entry > last:
                    return
            if entry == began:
                raise _unreadable(record, entry, errors)

    def _nodes(self, record: LedgerRecord, entry: int = 0) -> list[str]:
        """The nodes of the ledger: first those of this entry, beginning with a different one for each ledger, then the
        others; nodes that did not answer lately come last."""
        nodes = [node for _, node in record.nodes_of(entry) if node is not None]
        turn = record.number % len(nodes) if nodes else 0
        others = sorted(record.named - set(nodes))
        now = time.monotonic()
        return sorted([*nodes[turn:], *nodes[:turn], *others], key=lambda node: self._avoided.get(node, 0.0) > now)

    def avoid(self, node: str) -> None:
        """The node does not answer: ask it last for a while."""
        self._avoided[node] = time.monotonic() + AVOIDED_S

    def forget(self, ledger: str) -> None:
        with self._lock:
            self._indexes.pop(ledger, None)
        self._fetched.forget(ledger)


def _unreadable(record: LedgerRecord, entry: int, errors: list[str]) -> ReadFailed:
    why = "; ".join(errors) or "every node answers that it does not have the entry"
    return ReadFailed(
        f"entry {entry} of ledger {record.id} could not be read from any of its storage nodes: {why}. `pxrs cluster "
        "status` shows which nodes are away"
    )


def body_of(read: EntryRead) -> pa.Buffer:
    """The body of an entry that was read, as an Arrow buffer."""
    return pa.py_buffer(read.body)
