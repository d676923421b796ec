"""Pure: the rules of one storage node. No file, no clock, no thread.

Each request returns an `Outcome`: what to append to the journal, and the reply. The caller holds one lock over the
request and the append to the journal, so that a fence and an add of the same ledger never overtake each other (C2). The
reply is given once everything that the journal had at that moment is synced, if `is_after_sync` says so: an entry that
is acknowledged, a fence that is confirmed and a "no such entry" of a recovery must survive a crash of the node.

When a node starts, it passes the items of its journal to `replay` in their order.

A node that removes garbage (C5) calls `ledgers` first, then reads the record of each of these ledgers from the
registry, and then calls `remove` for those whose record does not name the node. `remove` is refused if a request has
touched the ledger since it was listed: the record may have named the node only after it was read, and a copy may have
been acknowledged in the meantime.

A removed ledger's fence is gone. So that a writer which was stopped for long cannot add to a ledger that was closed,
copied elsewhere and removed here, the node remembers for each partition the highest number of a ledger that it has
removed, and refuses adds of writers up to that number. Only the last ledger of a partition has a writer, so nothing
that should be accepted is refused, except to a writer that takes a node back which has removed the ledger meanwhile.
That writer replaces the node again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pxrs.cluster.ledgers import EntryHead, LedgerName
from pxrs.cluster.records import NodeRecord
from pxrs.errors import ClusterError, EntryDiffers, LedgerFenced, LedgerRemoved


class StoreItem(NamedTuple):
    """In the journal: the node has this entry. The caller adds the entry's bytes."""

    ledger: str
    entry: int
    head: EntryHead
    lac: int
    recovery: int | None


class FenceItem(NamedTuple):
    """In the journal: the ledger takes no adds of its writer, nor of recoveries with a lower number."""

    ledger: str
    recovery: int


class RemoveItem(NamedTuple):
    """In the journal: all that stands before about this ledger is void."""

    ledger: str
    is_remembered: bool
    """Adds of writers to ledgers of the partition up to this one's number are refused from now on. False: the topic is
    gone, and nothing is remembered of the partition any more."""


class RememberItem(NamedTuple):
    """In the journal: as `RemoveItem.is_remembered`, and nothing that stands before is void."""

    ledger: str


JournalItem = StoreItem | FenceItem | RemoveItem | RememberItem


class Added(NamedTuple):
    """Reply to `add`: the entry is on this node's disk."""

    ledger: str
    entry: int


class FencedAt(NamedTuple):
    """Reply to `fence`."""

    lac: int
    """The highest entry that the node knows to be confirmed; -1 if none."""
    last: int
    """The highest entry that the node has; -1 if none."""


class Entries(NamedTuple):
    """Reply to `read`: which of the entries that were asked for are there. All others are not."""

    present: tuple[int, ...]


class Indexed(NamedTuple):
    """Reply to `index`."""

    entries: tuple[int, ...]
    lac: int
    fence: int
    is_more: bool


class Removed(NamedTuple):
    """Reply to `remove`. False: the ledger was touched since it was listed, or is not there."""

    is_removed: bool


Reply = Added | FencedAt | Entries | Indexed | Removed | ClusterError


class Outcome(NamedTuple):
    """What the caller has to do for a request."""

    append: tuple[JournalItem, ...]
    """To be appended to the journal, under the lock under which the request was made."""
    reply: Reply
    """An error is a refusal: nothing was changed."""
    is_after_sync: bool
    """Whether the reply must wait until all that is in the journal now is synced."""


class EntryIndex(Protocol):
    """The entries of one ledger on this node. A storage node brings its own, which also knows where the bytes are."""

    def __contains__(self, entry: object) -> bool: ...
    def __len__(self) -> int: ...
    def add(self, entry: int, head: EntryHead) -> None: ...
    def checksum(self, entry: int) -> int:
        """Of an entry that is there."""
        ...

    def after(self, entry: int, limit: int) -> list[int]:
        """The first `limit` entries behind this one, in rising order."""
        ...

    @property
    def last(self) -> int:
        """The highest entry; -1 if there is none."""
        ...


class MemoryIndex:
    """An EntryIndex for tests and simulations."""

    def __init__(self) -> None:
        self.heads: dict[int, EntryHead] = {}
        self.last = -1

    def __contains__(self, entry: object) -> bool:
        return entry in self.heads

    def __len__(self) -> int:
        return len(self.heads)

    def add(self, entry: int, head: EntryHead) -> None:
        self.heads[entry] = head
        self.last = max(self.last, entry)

    def checksum(self, entry: int) -> int:
        return self.heads[entry].checksum

    def after(self, entry: int, limit: int) -> list[int]:
        return sorted(each for each in self.heads if each > entry)[:limit]


@dataclass(slots=True)
class LedgerState:
    """One ledger on this node."""

    index: EntryIndex
    fence: int = 0
    """The highest number of a recovery that has fenced it; 0: not fenced."""
    lac: int = -1
    touched: int = 0
    """Which request was the last that added, fenced or read with a recovery number; rises over all ledgers."""


class NodeCore:
    """The state of a storage node. Not thread-safe: see the module's page."""

    def __init__(self, node: str, make_index: Callable[[], EntryIndex] = MemoryIndex) -> None:
        self.node = node
        self._make_index = make_index
        self._ledgers: dict[str, LedgerState] = {}
        self._removed: dict[tuple[str, int], int] = {}
        """By topic id and partition: the highest number of a ledger that was removed."""
        self._touches = 0

    # Requests.

    def add(self, ledger: str, entry: int, head: EntryHead, lac: int, recovery: int | None) -> Outcome:
        """Store an entry. recovery: None from the ledger's writer; else the `recovery` of the ledger's record, from a
        recoverer or from whoever copies a closed ledger."""
        refusal = self._refusal(ledger, recovery)
        if refusal is not None:
            return Outcome((), refusal, False)
        state = self._touch(ledger)
        if entry in state.index:
            if state.index.checksum(entry) != head.checksum:
                return Outcome((), EntryDiffers(ledger, entry), False)
            state.lac = max(state.lac, lac)
            # It may have been appended by a request whose sync is still under way.
            return Outcome((), Added(ledger, entry), True)
        item = StoreItem(ledger, entry, head, lac, recovery)
        self._store(state, item)
        return Outcome((item,), Added(ledger, entry), True)

    def fence(self, ledger: str, recovery: int) -> Outcome:
        """Take no more adds of the ledger's writer, nor of recoveries with a lower number."""
        refusal = self._refusal(ledger, recovery)
        if refusal is not None:
            return Outcome((), refusal, False)
        append = self._raise_fence(ledger, recovery)
        state = self._ledgers[ledger]
        return Outcome(append, FencedAt(state.lac, state.index.last), True)

    def read(self, ledger: str, first: int, last: int, recovery: int | None = None) -> Outcome:
        """Which of the entries from `first` to `last` are there. With a recovery number the read fences too, and the
        reply waits for the sync: an entry that is reported missing must stay missing."""
        if recovery is not None:
            refusal = self._refusal(ledger, recovery)
            if refusal is not None:
                return Outcome((), refusal, False)
            append = self._raise_fence(ledger, recovery)
        else:
            append = ()
        state = self._ledgers.get(ledger)
        present = () if state is None else tuple(entry for entry in range(first, last + 1) if entry in state.index)
        return Outcome(append, Entries(present), recovery is not None)

    def index(self, ledger: str, after: int = -1, limit: int = 1_000) -> Outcome:
        """The entries of a ledger behind `after`. They are all synced when the reply is given: whoever counts copies
        must not count one that a crash would take. For the same reason the request touches the ledger, so that it is
        not removed by what was read of its record before."""
        if ledger not in self._ledgers:
            return Outcome((), Indexed((), -1, 0, False), True)
        state = self._touch(ledger)
        found = state.index.after(after, limit + 1)
        return Outcome((), Indexed(tuple(found[:limit]), state.lac, state.fence, len(found) > limit), True)

    def ledgers(self) -> list[tuple[str, int]]:
        """Every ledger of which the node has something, with the mark that `remove` wants."""
        return [(ledger, state.touched) for ledger, state in sorted(self._ledgers.items())]

    def remove(self, ledger: str, mark: int, *, has_partition: bool = True) -> Outcome:
        """Remove a ledger whose record, read after `ledgers` gave this mark, does not exist or does not name the node.
        has_partition: whether the partition's owner key exists; if not, the topic is gone for good."""
        state = self._ledgers.get(ledger)
        if state is None or state.touched != mark:
            return Outcome((), Removed(False), False)
        item = RemoveItem(ledger, has_partition)
        self._remove(item)
        return Outcome((item,), Removed(True), True)

    # The journal.

    def replay(self, item: JournalItem) -> None:
        """An item of the journal that was read at the start."""
        match item:
            case StoreItem():
                state = self._touch(item.ledger)
                if item.entry not in state.index:
                    self._store(state, item)
                state.lac = max(state.lac, item.lac)
            case FenceItem():
                state = self._touch(item.ledger)
                state.fence = max(state.fence, item.recovery)
            case RemoveItem():
                self._remove(item)
            case RememberItem():
                self._remember(LedgerName.of_id(item.ledger))

    def standing(self) -> Iterator[JournalItem]:
        """What a node has to append again before it drops the beginning of its journal, apart from entries: which
        ledgers were removed, and which are fenced."""
        for (topic_id, partition), number in self._removed.items():
            yield RememberItem(LedgerName(topic_id, partition, number).id)
        for ledger, state in self._ledgers.items():
            if state.fence:
                yield FenceItem(ledger, state.fence)

    def state(self, ledger: str) -> LedgerState | None:
        return self._ledgers.get(ledger)

    def __len__(self) -> int:
        return len(self._ledgers)

    # Within.

    def _refusal(self, ledger: str, recovery: int | None) -> ClusterError | None:
        state = self._ledgers.get(ledger)
        if state is not None and state.fence > (0 if recovery is None else recovery):
            return LedgerFenced(ledger, state.fence)
        if recovery is None and self._removed:
            name = LedgerName.of_id(ledger)
            if name.number <= self._removed.get((name.topic_id, name.partition), -1):
                return LedgerRemoved(self.node, ledger)
        return None

    def _touch(self, ledger: str) -> LedgerState:
        """Also an add of an entry that is there touches the ledger: its sender counts this copy from now on."""
        state = self._ledgers.get(ledger)
        if state is None:
            state = self._ledgers[ledger] = LedgerState(self._make_index())
        self._touches += 1
        state.touched = self._touches
        return state

    def _raise_fence(self, ledger: str, recovery: int) -> tuple[JournalItem, ...]:
        state = self._touch(ledger)
        if state.fence >= recovery:
            return ()  # the journal has it; the reply still waits for the sync of it
        state.fence = recovery
        return (FenceItem(ledger, recovery),)

    def _store(self, state: LedgerState, item: StoreItem) -> None:
        state.index.add(item.entry, item.head)
        state.lac = max(state.lac, item.lac)

    def _remove(self, item: RemoveItem) -> None:
        self._ledgers.pop(item.ledger, None)
        name = LedgerName.of_id(item.ledger)
        if item.is_remembered:
            self._remember(name)
        else:
            self._removed.pop((name.topic_id, name.partition), None)

    def _remember(self, name: LedgerName) -> None:
        partition = name.topic_id, name.partition
        self._removed[partition] = max(name.number, self._removed.get(partition, -1))


# Whether a disk is that of the node that it names (C5).


class Cookie(NamedTuple):
    """What a node's directory says about itself (`node.json`)."""

    node: str
    cluster: str
    starts: int


class Start(NamedTuple):
    """Under which identity a node starts. The caller writes `starts` to the disk and syncs it, then compares and sets
    the node's record in the registry; only then does the node serve."""

    node: str
    starts: int
    is_new: bool
    """The directory's content is moved aside, and the node begins with nothing."""
    why: str
    """Why the node is a new one; empty if it is not."""


def decide_start(
    cookie: Cookie | None, registered: NodeRecord | None, cluster: str, journal_end: int, new_node: str
) -> Start:
    """Which node this directory is. `registered` is the record of the node that the cookie names.

    The disk's counter is written before the registry's: so it is the same, or one ahead if the last start died in
    between. A disk that is behind was restored from a copy; entries that the node has acknowledged may be missing, and
    fences. Such a disk, and an empty one, must not answer "no such entry" under the old name. A node that was retired
    stays what it is: its copies are needed until others have them, and then its record is removed.

    A copy of the disk that was made after the last start, and after the journal's end was last recorded, cannot be
    told from the disk itself."""
    why = ""
    if cookie is None:
        why = "the directory is empty"
    elif cookie.cluster != cluster:
        why = f"the directory belongs to another cluster, {cookie.cluster}"
    elif registered is None:
        why = f"the registry does not know the node {cookie.node}"
    elif cookie.starts not in (registered.starts, registered.starts + 1):
        older = "the disk" if cookie.starts < registered.starts else "the registry"
        why = f"the disk counts {cookie.starts} starts and the registry {registered.starts}: {older} is an older copy"
    elif journal_end < registered.journal_end:
        why = f"the journal ends at {journal_end:,} and had {registered.journal_end:,} bytes: it is an older copy"
    if why or cookie is None or registered is None:
        return Start(new_node, 1, True, why)
    return Start(cookie.node, registered.starts + 1, False, "")
