"""A storage node without its network: the rules of `core`, the journal, and the index, under one lock.

`NodeCore` decides each request, and the node appends to the journal, under the same lock. So a fence and an add of one
ledger have the same order in memory and in the journal (C2). The replies wait until the journal is synced.

If the journal cannot be written, the node reverts every unsynced decision in memory, the last one first, and each
caller gets an error. Otherwise an entry that is not on the disk could be acknowledged later because the index contains
it.

What a node does in each state:

| state | adds | fences, fencing reads | reads | answers "no such entry" |
|---|---|---|---|---|
| good | yes | yes | yes | yes |
| too little free space | NodeFull | yes | yes | yes |
| the last write of the journal failed | NodeFull | tries | yes | yes |
| read-only: the disk was full at the start | NodeFull | if it has the fence already | yes | if the start is proven |
| the disk has damaged a part of the journal | NodeFull for writers, yes for recoveries and repairs | yes | yes | yes |

For a ledger that is in doubt (C7), in any of these states, the node answers that it does not know whether it had the
entry, and never that it does not have it.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from pxrs.cluster import staged
from pxrs.cluster.ledgers import LedgerName
from pxrs.cluster.messages import Add
from pxrs.cluster.storage.core import (
    DoubtItem,
    FencedAt,
    FenceItem,
    Indexed,
    LedgerState,
    NodeCore,
    Outcome,
    RememberItem,
)
from pxrs.cluster.storage.core import Entries as Present
from pxrs.cluster.storage.format import (
    BODY_BYTES_MAX,
    HERE,
    LEDGER_BYTES_MAX,
    NUMBER_MAX,
    Kind,
    Record,
    header_bytes,
    seed_of,
)
from pxrs.cluster.storage.index import Entries, Index, Place, entries_of
from pxrs.cluster.storage.journal import SEGMENT_BYTES, Journal, Write
from pxrs.cluster.storage.opening import open_journal
from pxrs.cluster.storage.reading import EntryReader, Found
from pxrs.cluster.storage.room import Room
from pxrs.errors import InvalidArgument, InvalidKey, NodeFull, NodeUnreachable, PxrsError
from pxrs.metrics.instruments import (
    STORAGE_BYTES,
    STORAGE_DAMAGED,
    STORAGE_DOUBTS,
    STORAGE_ENTRIES,
    STORAGE_FREE,
    STORAGE_LEDGERS,
    STORAGE_REFUSES,
)
from pxrs.registry.values import check_key

_logger = logging.getLogger(__name__)

FREE_BYTES_MIN: Final = 64 << 20
READ_ENTRIES_MAX: Final = 10_000
SYNC_S_MAX: Final = 60.0
"""How long a fence or a read waits for the disk."""

T = TypeVar("T")


class IndexPage(NamedTuple):
    places: list[Place]
    lac: int
    fence: int
    has_more: bool


class Load(NamedTuple):
    bytes: int
    ledgers: int
    free_bytes: int
    refuses: str | None
    doubts: int
    """How many ledgers are in doubt."""
    damaged: int
    """How many entries are known to be damaged, and how many ranges of the journal."""
    is_unchecked: bool
    """Whether closed ledgers were not all compared with the journal since a start in doubt."""
    cleared: int
    """How many records of closed ledgers this process has changed because the node lacks entries of them."""


@dataclass(frozen=True, slots=True)
class NodeSettings:
    segment_bytes: int = SEGMENT_BYTES
    free_bytes_min: int = FREE_BYTES_MIN
    """With less free space on its disk the node accepts no adds. The rest is for fences and compaction."""


class StorageNode:
    """Threads share it. It is the only user of the journal's folder until `close`."""

    def __init__(
        self,
        node: str,
        folder: str,
        settings: NodeSettings | None = None,
        read_only: str | None = None,
        proof: int | None = None,
        *,
        is_stop: bool = False,
    ) -> None:
        """folder: the folder of the journal, which must exist. read_only: why the node writes nothing at all, not even
        a fence; None if it may. proof, is_stop: the position up to which the journal was synced, if that is known, and
        whether that is where the node has stopped (`open_journal`). Raises OSError."""
        self.id, self.seed = node, seed_of(node)
        self.read_only = read_only
        self._settings = settings or NodeSettings()
        self.lock = threading.Lock()
        self.core = NodeCore(node, Entries)
        bases: list[int] = []
        self.index = Index(self.core, bases)
        is_read_only = read_only is not None
        opened = open_journal(
            folder, seed_of(node), self.index.replay, bases, proof, is_stop=is_stop, is_read_only=is_read_only
        )
        self.index.end_replay()
        self.is_proven = opened.is_proven
        """Whether it is certain that the journal has everything that was acknowledged. If not, the node answers that
        it does not know what it does not have, until `begin_doubt` tells it which ledgers are in doubt."""
        self.core.knows_all = self.is_proven
        self.on_synced: Callable[[int], None] = lambda end: None
        """Called with the new end of the journal after each sync, before anything that waits for it is told."""
        self._room = Room(folder, self._settings.free_bytes_min, self._probe)
        self.journal = Journal(
            folder,
            seed_of(node),
            opened,
            self,
            self.lock,
            self._settings.segment_bytes,
            is_read_only=is_read_only,
            on_synced=lambda end: self.on_synced(end),
        )
        self.cleared = 0
        """See `Load.cleared`."""
        self.rotten: frozenset[tuple[int, int]] = frozenset()
        """Damaged ranges of the journal in which there are live entries. Replaced under the lock."""
        self.is_unchecked = not self.is_proven or self.journal.is_unchecked
        """Whether closed ledgers may lack entries that the node had, and were not compared with the index since."""
        for base in bases:
            end = self.journal.segment_end(base)
            sizes = (min(end, each.end) - max(base, each.begin) for each in opened.lost)
            if lost_bytes := sum(size for size in sizes if size > 0):
                self.index.dead[base] += lost_bytes
        self.recorded_end = -1
        """The end of the journal that the registry has, as this process has recorded it; -1: not yet."""
        self._reader = EntryReader(node, self.core, self.journal, self.lock)
        for record in opened.unreadable:
            self.verify(record.ledger, record.entry)
        self.look_at_room()
        for gauge, read in _GAUGES:
            gauge.watch(self, read)

    @property
    def refuses(self) -> str | None:
        """Why the node accepts no entries of writers; None if it does."""
        return self.read_only or self._room.problem or self.rot

    @property
    def rot(self) -> str | None:
        """What the disk has damaged in the journal; None if it has damaged nothing that is not repaired. A range that a
        power loss may have torn does not count, because the disk is sound."""
        rotten = [each for each in self.journal.lost if not each.is_torn]
        if not rotten:
            return None
        size = sum(each.end - each.begin for each in rotten)
        return (
            f"{size:,} bytes of the journal are damaged on the disk, in {len(rotten)} places; the node accepts entries "
            "again when it has got the missing ones from other nodes. Check the disk"
        )

    @property
    def load(self) -> Load:
        free_bytes = self._room.free_bytes  # without the lock: the disk may hang
        with self.lock:
            damaged = self._reader.damaged_count + self._reader.is_overflowing
            damaged += len(self.rotten) + sum(not each.is_torn for each in self.journal.lost)
            # A ledger of staged rows that is not closed is recovered by nobody.
            doubts = sum(not ledger.startswith(staged.LEDGER) for ledger in self.index.doubts)
            return Load(
                self.index.bytes,
                len(self.core),
                free_bytes,
                self.refuses,
                doubts,
                damaged,
                self.is_unchecked,
                self.cleared,
            )

    # Doubt.

    def begin_doubt(self, unclosed: Sequence[str], highest: Sequence[str]) -> None:
        """After a start in doubt, before the node answers anything: journal what it does not know (C7). Returns when
        that is durable. unclosed, highest: as for `NodeCore.begin_doubt`. Raises NodeFull, NodeUnreachable, OSError."""
        self.journal.keep_unchecked()
        with self.lock:
            for item in self.core.begin_doubt(unclosed, highest):
                if isinstance(item, DoubtItem):
                    record = Record(Kind.DOUBT, item.ledger)
                else:
                    record = Record(Kind.REMOVED, item.ledger, offset=self.index.upto(item.ledger), rows=1)
                self.journal.submit(Write(record, (), _ignore))
            wait = self._wait_for(Write(None, (), _ignore))
        wait()
        self.journal.keep_lost()
        self.core.knows_all = True

    def doubts(self) -> list[str]:
        """The ledgers that are in doubt."""
        with self.lock:
            return self.core.doubts()

    def end_doubt(self, ledger: str) -> None:
        """The record of the ledger is closed, or does not exist any more."""
        with self.lock:
            self.core.end_doubt(ledger)
            self.index.end_doubt(ledger)

    def lacks(self, ledger: str, entries: Iterable[int]) -> bool:
        """Whether the node does not have one of these entries, or cannot read it."""
        with self.lock:
            state = self.core.state(ledger)
            numbers = () if state is None else entries_of(state).numbers()
            damaged = {entry for entry in self._reader.damaged.get(ledger, ()) if self._is_damaged(ledger, entry)}
        found = set(numbers) - damaged  # without the lock: a ledger may have a million entries
        return any(entry not in found for entry in entries)

    def damaged_entries(self) -> dict[str, set[int]]:
        """By ledger: the entries that the node has and cannot read."""
        with self.lock:
            return {ledger: set(entries) for ledger, entries in self._reader.damaged.items()}

    def forget_overflow(self) -> bool:
        """See `EntryReader.forget_overflow`."""
        with self.lock:
            return self._reader.forget_overflow()

    def verify(self, ledger: str, entry: int) -> None:
        """Read an entry, to find out whether it is damaged."""
        self._reader.verify(ledger, entry)

    def entries_within(self, begin: int, end: int) -> list[tuple[str, int]]:
        """The entries of whose record a part lies in this range of positions of the journal."""
        found: list[tuple[str, int]] = []
        for ledger, _ in self.ledgers():
            with self.lock:  # not for all ledgers at once
                state = self.core.state(ledger)
                copied = None if state is None else entries_of(state).copied()
            entries = [] if copied is None else copied.within(begin, end, header_bytes(ledger))
            found += [(ledger, entry) for entry in entries]
        return found

    def move_out(self, begin: int, end: int) -> None:
        """Write the live records of a damaged range again that the node knows without reading them: all but entries. If
        nothing live is left in the range, record that it is damaged; else it stays in `rotten`, and the caller calls
        this again when the entries have copies again. Raises NodeFull, NodeUnreachable, OSError."""
        index = self.index
        with self.lock:
            self.rotten |= {(begin, end)}
        waits: list[Callable[[], None]] = []
        with self.lock:
            for ledger, (number, position) in list(index.fences.items()):
                if begin <= position < end:
                    waits.append(self._wait_for(Write(Record(Kind.FENCE, ledger, recovery=number), (), _ignore)))
            for ledger, position in list(index.doubts.items()):
                if begin <= position < end:
                    waits.append(self._wait_for(Write(Record(Kind.DOUBT, ledger), (), _ignore)))
            for ledger, removal in list(index.removals.items()):
                if begin <= removal.position < end:
                    record = Record(Kind.REMOVED, ledger, offset=removal.upto, rows=int(removal.is_remembered))
                    waits.append(self._wait_for(Write(record, (), _ignore)))
        for wait in waits:
            wait()
        if not self.entries_within(begin, end):
            self.journal.lose(begin, end)
            with self.lock:
                self.rotten -= {(begin, end)}

    def forget_damaged(self, ledger: str, entries: Iterable[int], mark: int) -> None:
        """Nobody needs these damaged entries any more: the node does not have them from now on. mark: the ledger's
        `touched` from before its record was read. If a request has touched it since, nothing is done: a repair may be
        writing the entries again."""
        with self.lock:
            state = self.core.state(ledger)
            if state is not None and state.touched != mark:
                return
            for entry in entries:
                if self._is_damaged(ledger, entry) and state is not None:
                    self.index.drop(ledger, entry)
                self._reader.forget(ledger, entry)

    @property
    def is_unsettled(self) -> bool:
        """Whether the node is in doubt about a ledger, or may lack an entry, or knows of damage."""
        return bool(self.index.doubts or self.is_unchecked or self.journal.lost or self._reader.damaged or self.rotten)

    def checked(self) -> None:
        """All closed ledgers were compared with the index, and the records of those that lack entries say so. Raises
        OSError."""
        self.journal.forget_unchecked()
        self.is_unchecked = False

    def look_at_room(self) -> None:
        """Check the free space, and whether a journal that could not be written can be written again (`Room.look`)."""
        if self.read_only is None:
            self._room.look()

    def _probe(self, done: Callable[[Exception | None], None]) -> None:
        with self.lock:
            self.journal.submit(Write(Record(Kind.PROBE, ""), (), done))

    # Requests.

    def add(self, adds: Sequence[Add], first: int, done: Callable[[int, PxrsError | None], None]) -> None:
        """Store entries whose checksums the caller has verified. first: the number of the first add. done: called on
        the journal's thread for each add, in order, with its number, and with None when it is synced or else the reason
        why it is not stored. Raises Closed."""
        with self.lock:
            for number, add in enumerate(adds, first):
                error = self._add(add, functools.partial(self._told, number, done))
                if error is not None:  # reported in order too, so that one number tells which adds are done
                    self.journal.submit(Write(None, (), functools.partial(_refuse, number, done, error)))

    def _add(self, add: Add, done: Callable[[Exception | None], None]) -> PxrsError | None:
        refuses = self.refuses if add.recovery is None else self.read_only or self._room.problem
        if refuses is not None:
            return NodeFull(self.id, refuses)
        head = add.head
        outcome = self.core.add(add.ledger, add.entry, head, add.lac, add.recovery)
        if isinstance(outcome.reply, PxrsError):
            return outcome.reply
        undo = functools.partial(self._forget, add.ledger, add.entry) if outcome.append else None
        if undo is None and not self._is_damaged(add.ledger, add.entry):
            self.journal.submit(Write(None, (), done))
            return None
        record = Record(
            Kind.ENTRY,
            add.ledger,
            add.entry,
            add.lac,
            add.recovery,
            head.offset,
            head.rows,
            head.last_timestamp,
            head.stored_at,
            head.checksum,
            head.size,
        )
        self._room.take(record.size)
        self.journal.submit(Write(record, add.body, done, undo))
        return None

    def _is_damaged(self, ledger: str, entry: int) -> bool:
        """Whether a read has found the stored entry damaged at its current position, so that it must be written
        again."""
        entries = self._reader.damaged.get(ledger)
        position = None if entries is None else entries.get(entry)
        state = None if position is None else self.core.state(ledger)
        place = None if state is None else entries_of(state).find(entry)
        return place is not None and place.position == position

    def _told(self, number: int, done: Callable[[int, PxrsError | None], None], error: Exception | None) -> None:
        done(number, None if error is None else self._failure(error))

    def _failure(self, error: Exception) -> PxrsError:
        return NodeFull(self.id, f"the journal could not be written: {error}")

    def _forget(self, ledger: str, entry: int) -> None:
        state = self.core.state(ledger)
        if state is not None:
            entries_of(state).discard(entry)

    def fence(self, ledger: str, recovery: int) -> FencedAt:
        """Returns when the fence is synced. Raises LedgerFenced, NodeFull."""
        with self.lock:
            reply, wait = self._decide(self.core.fence, ledger, recovery)
        assert isinstance(reply, FencedAt)
        wait()
        return reply

    def _decide(
        self, decide: Callable[..., Outcome], ledger: str, *arguments: object
    ) -> tuple[object, Callable[[], None]]:
        """The reply of the core, and a function that waits until the reply may be sent. The caller holds the lock, and
        must release it before it calls the function."""
        state = self.core.state(ledger)
        before = 0 if state is None else state.fence
        outcome = decide(ledger, *arguments)
        if isinstance(outcome.reply, PxrsError):
            raise outcome.reply
        record = None
        undo = None
        if outcome.append:
            (item,) = outcome.append
            assert isinstance(item, FenceItem)
            record = Record(Kind.FENCE, ledger, recovery=item.recovery)
            undo = functools.partial(_lower_fence, self.core, ledger, before)
        elif not outcome.is_after_sync:
            return outcome.reply, _nothing
        return outcome.reply, self._wait_for(Write(record, (), _ignore, undo))

    def _wait_for(self, write: Write) -> Callable[[], None]:
        """Submit the write. Returns a function that waits until it is synced, which raises NodeFull,
        NodeUnreachable."""
        is_done = threading.Event()
        errors: list[Exception | None] = []

        def done(error: Exception | None) -> None:
            errors.append(error)
            is_done.set()

        def wait() -> None:
            if not is_done.wait(SYNC_S_MAX):
                raise NodeUnreachable(self.id, f"the journal was not synced within {SYNC_S_MAX:g} s; the disk may hang")
            if errors[0] is not None:
                raise self._failure(errors[0])

        write.done = done
        self.journal.submit(write)
        return wait

    def read(
        self, ledger: str, first: int, last: int, max_bytes: int, recovery: int | None, *, heads: bool
    ) -> Iterator[Found]:
        """An iterator over the node's answers for the entries from `first` to `last`. It reads each entry when it is
        asked for it, and ends after `max_bytes`, but not before the first entry. Raises LedgerFenced, NodeFull."""
        last = min(last, first + READ_ENTRIES_MAX - 1)
        with self.lock:
            reply, wait = self._decide(self.core.read, ledger, first, last, recovery)
            assert isinstance(reply, Present)
            present = set(reply.present)
            state = self.core.state(ledger)
            if recovery is None and state is not None and not all(map(entries_of(state).is_synced, present)):
                wait = self._wait_for(Write(None, (), _ignore))
        wait()
        entries = range(first, last + 1)
        return self._reader.read(ledger, entries, present, max_bytes, heads=heads, is_in_doubt=reply.is_in_doubt)

    def page(self, ledger: str, after: int, limit: int) -> IndexPage:
        """The first `limit` entries of a ledger after `after`, all synced, without those that are known to be damaged.
        Raises NodeFull."""
        with self.lock:
            while True:
                reply, wait = self._decide(self.core.index, ledger, after, limit)
                assert isinstance(reply, Indexed)
                state = self.core.state(ledger)
                whole = [entry for entry in reply.entries if not self._is_damaged(ledger, entry)]
                found = [] if state is None else [entries_of(state).find(entry) for entry in whole]
                if found or not reply.is_more:
                    break
                after = reply.entries[-1]  # all of the page are damaged
        wait()
        places = [place for place in found if place is not None]
        return IndexPage(places, reply.lac, reply.fence, reply.is_more)

    def lacking(self) -> list[str]:
        """The ledgers that are in doubt, or of which the node has damaged entries."""
        with self.lock:
            return sorted({*self.core.doubts(), *self._reader.damaged})

    def ledgers(self) -> list[tuple[str, int]]:
        """Every ledger of which the node has data, each with the mark that `remove` needs."""
        with self.lock:
            return self.core.ledgers()

    def settle(self) -> None:
        """Returns when all that was decided so far is synced. Raises NodeFull."""
        with self.lock:
            wait = self._wait_for(Write(None, (), _ignore))
        wait()

    def remove(self, ledger: str, mark: int, *, has_partition: bool) -> bool:
        """Remove a ledger that is garbage (`NodeCore.remove`). Returns whether it was removed, when that is synced.
        Raises NodeFull.

        Call `settle` between `ledgers`, which gave the mark, and this. An entry or a fence that is synced only after
        the removal was decided would count as voided by it, and be lost if the removal itself cannot be written."""
        with self.lock:
            state = self.core.state(ledger)
            outcome = self.core.remove(ledger, mark, has_partition=has_partition)
            if not outcome.append or state is None:
                return False
            record = Record(Kind.REMOVED, ledger, offset=HERE, rows=int(has_partition))
            undo = functools.partial(self._restore, ledger, state)
            self._reader.forget(ledger)
            wait = self._wait_for(Write(record, (), _ignore, undo, entries_of(state)))
        wait()
        return True

    def remembered(self) -> list[str]:
        """Of each partition of which the node has removed a ledger: the ledger with the highest number, as far as the
        node has no data of it."""
        with self.lock:
            return [ledger for ledger in self.core.remembered() if self.core.state(ledger) is None]

    def forget_partition(self, ledger: str) -> None:
        """The partition does not exist any more. ledger: from `remembered`, called before that was found out. Returns
        when that is synced. Raises NodeFull."""
        with self.lock:
            outcome = self.core.forget_partition(ledger)
            if not outcome.append:
                return
            record = Record(Kind.REMOVED, ledger, offset=HERE, rows=0)
            undo = functools.partial(self.core.replay, RememberItem(ledger))
            wait = self._wait_for(Write(record, (), _ignore, undo))
        wait()

    def _restore(self, ledger: str, state: LedgerState) -> None:
        """Revert a removal whose record could not be written."""
        self.core.replay(FenceItem(ledger, state.fence))
        again = self.core.state(ledger)
        assert again is not None
        again.index, again.lac, again.is_in_doubt = state.index, state.lac, state.is_in_doubt

    def write_again(self, record: Record, body: bytes | memoryview) -> Callable[[], None]:
        """Append a live record to the journal again, for compaction. The caller holds the lock. Returns a function that
        waits until the record is synced."""
        return self._wait_for(Write(record, (body,), _ignore))

    # The journal.

    def written(self, writes: Sequence[Write]) -> None:
        entries = 0
        for write in writes:
            if write.record is not None:
                if write.removes is not None:
                    self.index.void(write.record, write.removes)
                self.index.written(write.record)
                if write.record.kind is Kind.ENTRY and self._reader.damaged:
                    self._reader.forget(write.record.ledger, write.record.entry)
                entries += write.undo is not None and write.record.kind is Kind.ENTRY
        STORAGE_ENTRIES.of().add(entries)

    def failed(self, error: OSError) -> None:
        self._room.failed(error)

    def close(self) -> None:
        """Write what is waiting, and close the journal. Idempotent."""
        self.journal.close()


_GAUGES: Final = (
    (STORAGE_BYTES, lambda node: [((), node.load.bytes)]),
    (STORAGE_LEDGERS, lambda node: [((), node.load.ledgers)]),
    (STORAGE_FREE, lambda node: [((), node.load.free_bytes)]),
    (STORAGE_REFUSES, lambda node: [((), float(node.load.refuses is not None))]),
    (STORAGE_DOUBTS, lambda node: [((), node.load.doubts)]),
    (STORAGE_DAMAGED, lambda node: [((), node.load.damaged)]),
)


def check_add(add: Add) -> None:
    """Raises InvalidArgument if the ledger's id is malformed, a number cannot be stored, or the entry is too long."""
    if not is_ledger(add.ledger):
        raise InvalidArgument(f"{add.ledger[:200]!r} is not the id of a ledger")
    offset, rows, _, last_timestamp, stored_at, _ = add.head
    numbers = add.entry, add.lac, add.recovery or 0, offset, rows, last_timestamp, stored_at
    if max(numbers) > NUMBER_MAX or min(last_timestamp, stored_at) < -NUMBER_MAX:
        raise InvalidArgument(f"an entry of ledger {add.ledger} has a number that does not fit into 64 bits")
    if add.lac < -1 or min(add.entry, add.recovery or 0, offset, rows) < 0:
        raise InvalidArgument(f"an entry of ledger {add.ledger} has a negative number, recovery, offset or row count")
    if add.head.size > BODY_BYTES_MAX:
        raise InvalidArgument(f"an entry has {add.head.size:,} bytes; the maximum is {BODY_BYTES_MAX:,}")


@functools.lru_cache(maxsize=4096)
def is_ledger(text: str) -> bool:
    """Whether the text has the form of a ledger's id, and can be part of a key of the registry."""
    if not text.isascii() or len(text) > LEDGER_BYTES_MAX or text.count("/") != 2:
        return False
    try:
        name = LedgerName.of_id(text)
        check_key(name.key)
    except (ValueError, InvalidKey):
        return False
    return name.id == text and name.partition >= 0 and name.number >= 0


def _lower_fence(core: NodeCore, ledger: str, before: int) -> None:
    """Take a fence back that could not be written."""
    state = core.state(ledger)
    if state is not None:
        state.fence = before


def _refuse(number: int, done: Callable[[int, PxrsError | None], None], why: PxrsError, _: Exception | None) -> None:
    done(number, why)


def _ignore(error: Exception | None) -> None:
    """The `done` of a write until `_wait_for` replaces it."""


def _nothing() -> None:
    """The wait of a reply that need not wait for a sync."""
