"""Garbage collection of a storage node: removes ledgers that are no longer needed, and unlinks and compacts segments.

A ledger is garbage if the registry has no record of it, or a record that does not name this node. The node first lists
its own ledgers and then reads the records (C5). A record names a node before the node gets data of the ledger, so every
ledger in the list has a record unless the record was deleted. In the other order, the node would remove a ledger that
was created after the records were read. Nothing is removed if the registry belongs to another cluster, or has no
cluster id, for example because it was emptied. Nor is anything removed if the registry has gone back behind what this
process has recorded in it, for example because it was restored from a backup.

The same thread ends doubts (C7). While the node is in doubt, or a part of its journal is damaged, it looks more often
(`_look_s`), at the records of these ledgers alone:

- The doubt about a ledger ends when its record is closed or removed.
- Closed ledgers that name the node are compared with the index, all of them once after a start in doubt, and each one
  when the doubt about it ends. If the node lacks an entry, or knows that it is damaged, `is_complete` of the record is
  cleared by compare-and-set; then the owner of the partition has the copies made again (`copies`).
- When the node is not in doubt and lacks nothing, segments with damaged ranges are compacted and unlinked. With the
  last of them the node accepts entries again.

A record of the journal is live as long as the node needs it (`index` has the rules). A segment without live records is
unlinked. A segment with few live bytes is compacted: its live records are appended to the journal again, and the
segment is unlinked when they are synced.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from pxrs.cluster.ledgers import LedgerName, LedgerRecord
from pxrs.cluster.naming import known_cluster_id
from pxrs.cluster.records import LEDGERS, OWNERS, NodeRecord, ledgers_prefix, node_key, owner_key
from pxrs.cluster.storage.format import Kind, Record
from pxrs.cluster.storage.index import entries_of
from pxrs.cluster.storage.node import StorageNode
from pxrs.cluster.storage.registration import older_registry
from pxrs.cluster.storage.settings import StorageLimits
from pxrs.errors import Conflict, DamagedFrame, NodeFull, PxrsError, RegistryCorrupt, RegistryError
from pxrs.metrics.instruments import STORAGE_REMOVED
from pxrs.registry.contract import Registry
from pxrs.waiting import start_thread

_logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""The first pause between two looks at the records of ledgers that are in doubt or lack entries. It doubles after each
look that has changed nothing, up to `collect_s`."""
TRIES: Final = 5
"""How often a ledger whose record is being changed is compared at once."""
COPY_BYTES: Final = 4 << 20
"""How many bytes compaction reads and appends before it waits for a sync."""


class Collected(NamedTuple):
    """The result of one round."""

    ledgers: int = 0
    """How many ledgers were removed."""
    segments: int = 0
    """How many segments were unlinked."""
    copied_bytes: int = 0
    """How many bytes of live records were written again."""
    skipped: str | None = None
    """Why no ledger could be removed; None if the records were checked."""


class Collector:
    """Collects garbage on one thread. Other threads may call `collect` too; rounds run one after the other."""

    def __init__(self, registry: Registry, node: StorageNode, cluster: str, starts: int, limits: StorageLimits) -> None:
        """starts: which start of the node this process is."""
        self._registry, self._node, self._cluster, self._starts = registry, node, cluster, starts
        self._limits = limits
        self._lock = threading.Lock()
        """Held during a round."""
        self._kept: set[int] = set()
        """Bases of segments that cannot be compacted, because a record in them is damaged."""
        self._problems: dict[str, str] = {}
        """By what has failed: the last error, until it succeeds."""
        self._compared: set[str] = set()
        """The ledgers that this process has compared since its start, while it has not compared all."""
        self._corrupt: set[str] = set()
        """The keys of damaged records that were logged."""
        self._told: dict[str, set[int]] = {}
        """By ledger: the damaged entries with which it was compared."""
        self._look_s = LOOK_S
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = start_thread(self._run, "pxrs-storage-collector")

    def close(self) -> None:
        """Stop the thread, after the round that is under way. Idempotent."""
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        next_look = time.monotonic() + LOOK_S
        next_round = time.monotonic() + self._limits.collect_s
        while not self._is_closing.wait(max(0.0, min(next_look, next_round) - time.monotonic())):
            if time.monotonic() >= next_look:
                self._guarded(self.settle, "the node could not check which entries it lacks")
                next_look = time.monotonic() + self._look_s
            if time.monotonic() >= next_round:
                self._guarded(self.collect, "garbage could not be collected")
                next_round = time.monotonic() + self._limits.collect_s

    def _guarded(self, act: Callable[[], object], failed: str) -> None:
        """failed: begins the log line if it raises, which is written once for each error."""
        try:
            act()
            self._problems.pop(failed, None)
        except (PxrsError, OSError) as error:
            if self._problems.get(failed) != str(error):
                self._problems[failed] = str(error)
                _logger.warning("%s, retrying in the next round: %s", failed, error)

    def settle(self) -> None:
        """Look whether doubts have ended, and which closed ledgers lack entries of this node. Raises RegistryError,
        NodeFull, OSError."""
        if not self._node.is_unsettled:
            self._look_s = LOOK_S
            return
        before = self._unsettled()
        # Also after an error.
        self._look_s = min(2 * self._look_s, max(self._limits.collect_s, LOOK_S))
        with self._lock:
            if (skipped := self._distrust()) is not None:
                raise RegistryError(skipped)
            self._settle()
        if before != self._unsettled():
            self._look_s = LOOK_S

    def _unsettled(self) -> tuple[object, ...]:
        node = self._node
        return node.doubts(), node.damaged_entries(), node.is_unchecked, node.journal.lost

    def _settle(self) -> None:
        node = self._node
        for ledger in node.doubts():
            self._each(ledger, self._end_doubt)
        damaged = node.damaged_entries()
        self._told = {
            ledger: self._told[ledger] & entries for ledger, entries in damaged.items() if ledger in self._told
        }
        for ledger, entries in damaged.items():
            self._each(ledger, functools.partial(self._compare_damaged, entries))
        for begin, end in node.rotten:
            node.move_out(begin, end)
        if node.is_unchecked and self._compare_all(is_news=True) is not None:
            node.checked()
            self._compared.clear()
        if node.journal.lost and not node.load.doubts and not node.is_unchecked and self._compare_all() == 0:
            problem: PxrsError | OSError | None = None
            for base in {node.index.segment_of(each.begin) for each in node.journal.lost}:
                try:
                    self._clean_damaged(base)
                except (PxrsError, OSError) as error:  # others may still be cleaned
                    problem = error
            node.journal.forget_missing()
            if problem is not None:
                raise problem
            if not node.journal.lost:
                _logger.info("the node again has everything that the damaged parts of its journal held")

    def _each(self, ledger: str, act: Callable[[str, tuple[LedgerRecord, int] | None, int], None]) -> None:
        """Call `act` with a ledger, with what `_record_of` returns, and with the ledger's mark from before. The other
        ledgers do not wait for one whose record is damaged, or is changed meanwhile: the next look tries it again."""
        if self._is_closing.is_set():
            return
        try:
            with self._node.lock:
                state = self._node.core.state(ledger)
                mark = 0 if state is None else state.touched
            act(ledger, self._record_of(ledger), mark)
        except RegistryCorrupt as error:
            self._tell_corrupt(LedgerName.of_id(ledger).key, error)
        except Conflict:
            _logger.debug("the record of ledger %s was changed while it was compared", ledger)

    def _end_doubt(self, ledger: str, found: tuple[LedgerRecord, int] | None, _: int) -> None:
        if found is not None:
            if not found[0].is_closed:
                return
            self._compare(*found, is_news=True)
        self._node.end_doubt(ledger)
        _logger.info("ledger %s is no longer in doubt: it is closed or removed", ledger)

    def _compare_damaged(
        self, entries: set[int], ledger: str, found: tuple[LedgerRecord, int] | None, mark: int
    ) -> None:
        """Compare a ledger of which the node has damaged entries."""
        if found is None:
            self._node.forget_damaged(ledger, entries, mark)
            self._told.pop(ledger, None)
        elif found[0].is_closed:
            if all(each.node != self._node.id for each in found[0].joining):
                # Entries that the record does not assign to the node are needed by nobody.
                self._node.forget_damaged(ledger, entries - set(self._entries_of(found[0])), mark)
            self._compare(*found, is_news=not entries <= self._told.get(ledger, set()))
            self._told[ledger] = entries

    def _tell_corrupt(self, key: str, error: RegistryCorrupt) -> None:
        if key not in self._corrupt:
            self._corrupt.add(key)
            _logger.error("a ledger cannot be compared with the journal: %s", error)

    def _record_of(self, ledger: str) -> tuple[LedgerRecord, int] | None:
        """The record of a ledger, and its version; None if there is none."""
        entry = self._registry.get(LedgerName.of_id(ledger).key)
        return None if entry is None else (LedgerRecord.parse(entry.key, entry.value), entry.version)

    def _compare_all(self, *, is_news: bool = False) -> int | None:
        """Compare all closed ledgers that name the node with its index. Returns how many lack entries; None if one of
        them could not be compared. is_news: as for `_compare`, once for each ledger and process."""
        count, is_sure = 0, True
        for entry in self._registry.scan(LEDGERS):
            if self._is_closing.is_set():
                return None
            try:
                record, version = LedgerRecord.parse(entry.key, entry.value), entry.version
                if not record.is_closed or self._node.id not in record.named:
                    continue
                lacks = self._compare_again(record, version, is_news=is_news and record.id not in self._compared)
                if lacks is None:
                    is_sure = False
                    continue
                count += lacks
                if is_news:
                    self._compared.add(record.id)
            except RegistryCorrupt as error:  # the others are compared nevertheless
                self._tell_corrupt(entry.key, error)
        return count if is_sure else None

    def _compare_again(self, record: LedgerRecord, version: int, *, is_news: bool) -> bool | None:
        """As `_compare`, with the record as it is now if it was changed meanwhile. False if the ledger is gone; None if
        it was changed again and again."""
        for _ in range(TRIES):
            try:
                return self._compare(record, version, is_news=is_news)
            except Conflict:  # a repair has changed it since
                again = self._record_of(record.id)
                if again is None or not again[0].is_closed:
                    return False
                record, version = again
        return None

    def _entries_of(self, record: LedgerRecord) -> Iterator[int]:
        """The entries that the record of a closed ledger assigns to this node."""
        for fragment in record.fragments:
            for position, node in enumerate(fragment.nodes):
                if node == self._node.id:
                    yield from record.entries_of(fragment, position)

    def _compare(self, record: LedgerRecord, version: int, *, is_news: bool) -> bool:
        """Whether the node lacks entries that the record of a closed ledger assigns to it. If so, the record says from
        now on that not every node has all its entries. Raises Conflict if it was changed meanwhile.

        is_news: the node may have lost them since it was last compared. Then the record is written even if it says so
        already: a repair that is under way may have counted on them, and must not complete the ledger."""
        lacks = self._node.lacks(record.id, self._entries_of(record))
        # A node in `joining` has no entries yet, but a repair that is about to give it some may have listed others.
        is_joining = any(each.node == self._node.id for each in record.joining)
        if (lacks and record.is_complete) or (is_news and (lacks or is_joining)):
            value = replace(record, is_complete=record.is_complete and not lacks).dump()
            self._registry.commit(expect={record.key: version}, put={record.key: value})
            self._node.cleared += 1
        if lacks and (record.is_complete or is_news):
            _logger.warning("the node lacks entries of ledger %s; brokers will copy them to it again", record.id)
        return lacks

    def _clean_damaged(self, base: int) -> None:
        """Compact and unlink a segment with damaged ranges. Raises DamagedFrame, NodeFull, OSError."""
        with self._node.lock:
            if base == self._node.journal.bases[-1]:
                return
            live = self._node.journal.segment_end(base) - base - self._node.index.dead[base]
        if live > self._node.load.free_bytes // 2:
            why = f"a damaged segment is kept until the disk has space to copy {live:,} bytes out of it"
            raise NodeFull(self._node.id, why)
        self._kept.discard(base)
        self._copy(base)
        self._unlink(base)

    def collect(self) -> Collected:
        """One round. Raises RegistryError, NodeFull, OSError."""
        with self._lock:
            # Before anything is read from the registry.
            mine, remembered = self._node.ledgers(), self._node.remembered()
            removed, full = 0, None
            if (skipped := self._distrust()) is not None:
                _logger.error("no ledger is removed: %s", skipped)
            elif garbage := list(self._garbage(mine)):
                try:
                    self._node.settle()
                    removed = sum(self._remove(ledger, mark) for ledger, mark in garbage)
                except NodeFull as error:  # raised below: what was removed before may free the room that is lacking
                    full = error
            if skipped is None and full is None:
                self._forget_partitions(remembered)
            segments, copied = self._clean()
            if full is not None:
                raise full
            return Collected(removed, segments, copied, skipped)

    def _distrust(self) -> str | None:
        """Why records that the registry does not have prove nothing; None if they do."""
        if known_cluster_id(self._registry) != self._cluster:
            return "the registry belongs to another cluster, or to none"
        recorded_end = self._node.recorded_end  # before the record is read, which may be written meanwhile
        entry = self._registry.get(node_key(self._node.id))
        if entry is None:
            return "the registry has no record of this node"
        return older_registry(NodeRecord.parse(entry.key, entry.value), self._starts, recorded_end)

    def _garbage(self, mine: list[tuple[str, int]]) -> Iterator[tuple[str, int]]:
        """The ledgers that are garbage, each with the mark that `StorageNode.remove` needs."""
        partitions: dict[tuple[str, int], list[tuple[str, int]]] = {}
        for ledger, mark in mine:
            name = LedgerName.of_id(ledger)
            partitions.setdefault((name.topic_id, name.partition), []).append((ledger, mark))
        for (topic_id, partition), ledgers in partitions.items():
            if self._is_closing.is_set():
                return
            try:
                records = {
                    entry.key: LedgerRecord.parse(entry.key, entry.value)
                    for entry in self._registry.scan(ledgers_prefix(topic_id, partition))
                }
            except RegistryCorrupt as error:
                _logger.error("no ledger of partition %d of %s is removed: %s", partition, topic_id, error)
                continue
            for ledger, mark in ledgers:
                record = records.get(LedgerName.of_id(ledger).key)
                if record is None or self._node.id not in record.named:
                    yield ledger, mark

    def _remove(self, ledger: str, mark: int) -> bool:
        if self._is_closing.is_set():
            return False
        name = LedgerName.of_id(ledger)
        has_partition = self._registry.get(owner_key(name.topic_id, name.partition)) is not None
        is_removed = self._node.remove(ledger, mark, has_partition=has_partition)
        if is_removed:
            STORAGE_REMOVED.of().add()
            _logger.info("ledger %s was removed: it has no record, or its record does not name this node", ledger)
        return is_removed

    def _forget_partitions(self, remembered: list[str]) -> None:
        """Forget the removed ledgers of partitions that do not exist any more: a start in doubt remembers one of each
        partition of the cluster. Raises RegistryError, NodeFull."""
        if not remembered:
            return
        partitions = {entry.key for entry in self._registry.scan(OWNERS)}
        for ledger in remembered:
            name = LedgerName.of_id(ledger)
            if self._is_closing.is_set():
                return
            if owner_key(name.topic_id, name.partition) not in partitions and not any(
                self._registry.scan(ledgers_prefix(name.topic_id, name.partition), limit=1)
            ):
                self._node.forget_partition(ledger)

    # Segments.

    def _clean(self) -> tuple[int, int]:
        """Unlink the segments without live records, and compact those with few live bytes; how many segments were
        unlinked, and how many bytes copied.

        Segments with the fewest live bytes come first, because they free the most space. A segment is not copied if its
        live bytes are more than half of the free space."""
        segments = copied = 0
        for base, size, live in sorted(self._sealed(), key=lambda each: each[2]):
            if self._is_closing.is_set():
                break
            if live and (live >= size * self._limits.compact_below or base in self._kept):
                continue
            if live > self._node.load.free_bytes // 2:
                break
            try:
                copied += self._copy(base) if live else 0
            except (DamagedFrame, OSError) as error:  # other segments may still be cleaned
                if isinstance(error, DamagedFrame):
                    self._kept.add(base)
                _logger.error("a segment is kept, because a record in it cannot be read: %s", error)
                continue
            if self._unlink(base):
                segments += 1
        return segments, copied

    def _sealed(self) -> list[tuple[int, int, int]]:
        """Of each sealed segment without damaged ranges: its base, its length, and its live bytes."""
        node = self._node
        with node.lock:
            damaged = {node.index.segment_of(each.begin) for each in node.journal.lost}
            found = [(base, node.journal.segment_end(base) - base) for base in node.journal.bases[:-1]]
            return [(base, size, size - node.index.dead[base]) for base, size in found if base not in damaged]

    def _copy(self, base: int) -> int:
        """Append the live records of a segment to the journal. Returns their length when they are synced. Raises
        DamagedFrame, NodeFull, OSError."""
        copied = size = 0
        wait = None
        for record in self._node.journal.records(base):
            body: memoryview | bytes = b""
            if not self._is_live(record):
                continue
            if record.body_bytes:
                try:
                    _, body = self._node.journal.read(record.ledger, record.position, record.body_bytes)
                except (DamagedFrame, OSError):
                    self._node.verify(record.ledger, record.entry)  # which notes that it is damaged
                    raise
            with self._node.lock:
                if not self._is_live_locked(record):
                    continue
                wait = self._node.write_again(record, body)
            copied += record.size
            size += record.size
            if size >= COPY_BYTES:
                wait()
                size, wait = 0, None
        if wait is not None:
            wait()
        return copied

    def _is_live(self, record: Record) -> bool:
        with self._node.lock:
            return self._is_live_locked(record)

    def _is_live_locked(self, record: Record) -> bool:
        """Whether the record is live. The caller holds the node's lock."""
        index = self._node.index
        if record.kind is Kind.ENTRY:
            state = self._node.core.state(record.ledger)
            place = None if state is None else entries_of(state).find(record.entry)
            return place is not None and place.position == record.position
        if record.kind is Kind.FENCE:
            return index.fences.get(record.ledger, (0, -1))[1] == record.position
        if record.kind is Kind.DOUBT:
            return index.doubts.get(record.ledger) == record.position
        removal = index.removals.get(record.ledger) if record.kind is Kind.REMOVED else None
        return removal is not None and removal.position == record.position

    def _unlink(self, base: int) -> bool:
        """Unlink a segment if it has no live records; whether it was unlinked."""
        node = self._node
        with node.lock:
            if node.index.dead[base] < node.journal.segment_end(base) - base:
                return False
        node.journal.unlink(base)
        with node.lock:
            node.index.forget_segment(base)
        return True
