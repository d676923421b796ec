"""Pure: the rules of one storage node. No files, no clock, no threads.

Each request returns an `Outcome`: what to append to the journal, and the reply. The caller holds one lock during the
request and the append to the journal, so that a fence and an add of the same ledger have the same order in memory and
in the journal (C2). If `is_after_sync` is True, the reply must wait until everything in the journal at that moment is
synced: an acknowledged entry, an answered fence and the answer "no such entry" to a recovery must survive a crash.

When a node starts, it passes the items of its journal to `replay`, in their order.

To remove garbage (C5), a node first calls `ledgers`, then reads the records of these ledgers from the registry, and
then calls `remove` for those whose record does not name the node. `remove` does nothing if a request has touched the
ledger since `ledgers` listed it: the record may have been changed to name the node after it was read, and a copy may
have been acknowledged since.

A start in doubt (C7) is one after which records of the journal may be lost, entries and fences alike. Before the node
answers anything, `begin_doubt` puts every ledger in doubt that is not closed and names the node: the node answers
"unknown" instead of "missing" for it. And it makes the node refuse the writers of all ledgers that exist, because it
may have lost their fences. It accepts fences, and adds of recoveries and repairs. The doubt about a ledger ends when
its record is closed or removed (`end_doubt`).

A removed ledger loses its fence. A writer that was paused for long must not add to a ledger that was closed, copied to
other nodes and removed here. So the node remembers, for each partition, the highest number of a ledger that it has
removed, and refuses adds by writers to ledgers up to that number. Only the last ledger of a partition has a writer, so
this refuses no legitimate add, with one exception: a writer that uses a node again which has removed the ledger since.
That writer then replaces the node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from pxrs.cluster.ledgers import EntryHead, LedgerName
from pxrs.cluster.records import NodeRecord
from pxrs.errors import ClusterError, EntryDiffers, LedgerFenced, LedgerRemoved

TRIES_KEPT: Final = 16
"""How many ids of starts a disk keeps (`Cookie.tries`). No id may be dropped while its commit can still land, however
old it is: a database that waits for its standby keeps a commit open for hours, and answers reads meanwhile. So a disk
with this many ids makes no further try before the registry has confirmed that none of them can land
(`has_many_tries`)."""


class StoreItem(NamedTuple):
    """Journal item: the node has this entry. The caller adds the entry's bytes."""

    ledger: str
    entry: int
    head: EntryHead
    lac: int
    recovery: int | None


class FenceItem(NamedTuple):
    """Journal item: the node refuses adds to the ledger by its writer, and by recoveries with a lower number."""

    ledger: str
    recovery: int


class RemoveItem(NamedTuple):
    """Journal item: all earlier items of this ledger are void."""

    ledger: str
    is_remembered: bool
    """True: refuse adds by writers to ledgers of the partition up to this one's number. False: the topic was deleted,
    so the node forgets what it remembered for the partition."""


class RememberItem(NamedTuple):
    """Journal item: as a `RemoveItem` with `is_remembered`, but earlier items stay valid."""

    ledger: str


class DoubtItem(NamedTuple):
    """Journal item: earlier items of this ledger may have been lost (C7)."""

    ledger: str


JournalItem = StoreItem | FenceItem | RemoveItem | RememberItem | DoubtItem


class Added(NamedTuple):
    """Reply to `add`: the node has the entry."""

    ledger: str
    entry: int


class FencedAt(NamedTuple):
    """Reply to `fence`."""

    lac: int
    """The highest entry that the node knows to be confirmed; -1 if there is none."""
    last: int
    """The highest entry that the node has; -1 if there is none."""


class Entries(NamedTuple):
    """Reply to `read`: which of the requested entries the node has."""

    present: tuple[int, ...]
    is_in_doubt: bool = False
    """False: the node does not have the others. True: it does not know whether it had them (C7)."""


class Indexed(NamedTuple):
    """Reply to `index`."""

    entries: tuple[int, ...]
    lac: int
    fence: int
    is_more: bool


class Removed(NamedTuple):
    """Reply to `remove` and `forget_partition`. False if the ledger was touched since it was listed, or does not
    exist."""

    is_removed: bool


Reply = Added | FencedAt | Entries | Indexed | Removed | ClusterError


class Outcome(NamedTuple):
    """What the caller must do for a request."""

    append: tuple[JournalItem, ...]
    """To be appended to the journal under the same lock as the request."""
    reply: Reply
    """If it is an error, the request was refused and nothing has changed."""
    is_after_sync: bool
    """Whether the reply must wait until everything that is in the journal now is synced."""


class EntryIndex(Protocol):
    """The entries of one ledger on this node. `index.Entries` is the implementation of a real node, which also knows
    where the bytes are."""

    def __contains__(self, entry: object) -> bool: ...
    def __len__(self) -> int: ...
    def add(self, entry: int, head: EntryHead) -> None: ...
    def checksum(self, entry: int) -> int:
        """The checksum of an entry that the index contains."""
        ...

    def after(self, entry: int, limit: int) -> list[int]:
        """The first `limit` entries after this one, in rising order."""
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
    """The highest recovery number with which the ledger is fenced; 0 if it is not fenced."""
    lac: int = -1
    is_in_doubt: bool = False
    touched: int = 0
    """The number of the last request that touched the ledger (`NodeCore._touch`). All ledgers share one counter."""


class NodeCore:
    """The state of a storage node. Not thread-safe: the caller holds a lock, see the module's docstring."""

    def __init__(self, node: str, make_index: Callable[[], EntryIndex] = MemoryIndex) -> None:
        self.node = node
        self._make_index = make_index
        self._ledgers: dict[str, LedgerState] = {}
        self._removed: dict[tuple[str, int], int] = {}
        """By topic id and partition: the highest number of a ledger that the node has removed."""
        self._touches = 0
        self.knows_all = True
        """False: records of any ledger may have been lost, and which ledgers are in doubt is not journaled yet, or it
        cannot be. Everything that is not there is unknown."""

    # Requests.

    def add(self, ledger: str, entry: int, head: EntryHead, lac: int, recovery: int | None) -> Outcome:
        """Store an entry. recovery: None if the ledger's writer sends it; otherwise the `recovery` of the ledger's
        record, sent by a recovery or by the repair of a closed ledger."""
        refusal = self._refusal(ledger, recovery)
        if refusal is not None:
            return Outcome((), refusal, False)
        state = self._touch(ledger)
        if entry in state.index:
            if state.index.checksum(entry) != head.checksum:
                return Outcome((), EntryDiffers(ledger, entry), False)
            state.lac = max(state.lac, lac)
            # The entry may have been added by an earlier request whose sync is still under way.
            return Outcome((), Added(ledger, entry), True)
        item = StoreItem(ledger, entry, head, lac, recovery)
        self._store(state, item)
        return Outcome((item,), Added(ledger, entry), True)

    def fence(self, ledger: str, recovery: int) -> Outcome:
        """Refuse further adds by the ledger's writer, and by recoveries with a lower number."""
        refusal = self._refusal(ledger, recovery)
        if refusal is not None:
            return Outcome((), refusal, False)
        append = self._raise_fence(ledger, recovery)
        state = self._ledgers[ledger]
        return Outcome(append, FencedAt(state.lac, state.index.last), True)

    def read(self, ledger: str, first: int, last: int, recovery: int | None = None) -> Outcome:
        """Which of the entries from `first` to `last` the node has. With a recovery number the read also fences the
        ledger, and the reply waits for the sync: an entry that is reported missing must stay missing."""
        if recovery is not None:
            refusal = self._refusal(ledger, recovery)
            if refusal is not None:
                return Outcome((), refusal, False)
            append = self._raise_fence(ledger, recovery)
        else:
            append = ()
        state = self._ledgers.get(ledger)
        if state is None:
            return Outcome(append, Entries((), not self.knows_all), recovery is not None)
        present = tuple(entry for entry in range(first, last + 1) if entry in state.index)
        return Outcome(append, Entries(present, state.is_in_doubt or not self.knows_all), recovery is not None)

    def index(self, ledger: str, after: int = -1, limit: int = 1_000) -> Outcome:
        """The entries of a ledger after `after`. The reply waits for the sync, because the caller counts these copies,
        and a crash must not lose them. For the same reason the request touches the ledger, so that a garbage collection
        that has read the ledger's record before does not remove it."""
        if ledger not in self._ledgers:
            return Outcome((), Indexed((), -1, 0, False), True)
        state = self._touch(ledger)
        found = state.index.after(after, limit + 1)
        return Outcome((), Indexed(tuple(found[:limit]), state.lac, state.fence, len(found) > limit), True)

    def ledgers(self) -> list[tuple[str, int]]:
        """Every ledger of which the node has data, each with the mark that `remove` needs."""
        return [(ledger, state.touched) for ledger, state in sorted(self._ledgers.items())]

    def remove(self, ledger: str, mark: int, *, has_partition: bool = True) -> Outcome:
        """Remove a ledger whose record does not exist or does not name the node. mark: from `ledgers`, called before
        the record was read. has_partition: whether the partition's owner key exists; if not, the topic was deleted."""
        state = self._ledgers.get(ledger)
        if state is None or state.touched != mark:
            return Outcome((), Removed(False), False)
        item = RemoveItem(ledger, has_partition)
        self._remove(item)
        return Outcome((item,), Removed(True), True)

    def remembered(self) -> list[str]:
        """The removed ledgers that the node remembers: of each partition the one with the highest number."""
        return [LedgerName(*partition, number).id for partition, number in self._removed.items()]

    def forget_partition(self, ledger: str) -> Outcome:
        """Forget what is remembered for a partition that does not exist any more. ledger: from `remembered`. Nothing is
        done if the node has data of it, which `remove` removes, or remembers a later one."""
        name = LedgerName.of_id(ledger)
        if ledger in self._ledgers or self._removed.get((name.topic_id, name.partition)) != name.number:
            return Outcome((), Removed(False), False)
        item = RemoveItem(ledger, False)
        self._remove(item)
        return Outcome((item,), Removed(True), True)

    # Doubt.

    def begin_doubt(self, unclosed: Iterable[str], highest: Iterable[str]) -> list[JournalItem]:
        """What to append to the journal after a start in doubt. The node answers nothing before that is synced.
        unclosed: the ledgers that are not closed and whose record names the node, in any fragment or in `joining`.
        highest: of each partition, the ledger with the highest number that was ever created."""
        items: list[JournalItem] = []
        for ledger in unclosed:
            self._touch(ledger).is_in_doubt = True
            items.append(DoubtItem(ledger))
        for ledger in highest:
            name = LedgerName.of_id(ledger)
            if self._removed.get((name.topic_id, name.partition), -1) < name.number:
                self._remember(name)
                items.append(RememberItem(ledger))
        return items

    def doubts(self) -> list[str]:
        """The ledgers that are in doubt."""
        return sorted(ledger for ledger, state in self._ledgers.items() if state.is_in_doubt)

    def end_doubt(self, ledger: str) -> None:
        """The record of the ledger, read after the doubt began, is closed, or does not exist any more. It need not be
        journaled: a node that starts again finds the same."""
        state = self._ledgers.get(ledger)
        if state is not None:
            state.is_in_doubt = False

    # The journal.

    def replay(self, item: JournalItem) -> None:
        """Apply an item that was read from the journal when the node started."""
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
            case DoubtItem():
                self._touch(item.ledger).is_in_doubt = True

    def standing(self) -> Iterator[JournalItem]:
        """The items, apart from entries, that a node must append again before it drops the beginning of its journal:
        the removed ledgers that it remembers, the fences, and the doubts."""
        yield from map(RememberItem, self.remembered())
        for ledger, state in self._ledgers.items():
            if state.fence:
                yield FenceItem(ledger, state.fence)
            if state.is_in_doubt:
                yield DoubtItem(ledger)

    def state(self, ledger: str) -> LedgerState | None:
        return self._ledgers.get(ledger)

    def __len__(self) -> int:
        return len(self._ledgers)

    # Internal.

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
        """The state of the ledger, created if there is none, marked as touched. An add of an entry that the node
        already has touches the ledger too, because its sender counts this copy from now on."""
        state = self._ledgers.get(ledger)
        if state is None:
            state = self._ledgers[ledger] = LedgerState(self._make_index())
        self._touches += 1
        state.touched = self._touches
        return state

    def _raise_fence(self, ledger: str, recovery: int) -> tuple[JournalItem, ...]:
        state = self._touch(ledger)
        if state.fence >= recovery:
            return ()  # the fence is in the journal; the reply still waits for its sync
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


# The identity of a node (C5).


class Cookie(NamedTuple):
    """The identity that a node's directory contains (`node.json`)."""

    node: str
    cluster: str
    starts: int
    tries: tuple[str, ...] = ()
    """The ids of the starts that have tried to record `starts` in the registry, the last one at the end. At most one of
    them has succeeded. Empty if an earlier version of pxrs wrote the file."""
    before: str = ""
    """The id of the start that the registry had recorded when the first of `tries` was made."""


class Start(NamedTuple):
    """The identity with which a node starts. The caller writes `starts` to the disk and syncs it, then writes the
    node's record in the registry by compare-and-set. Only then does the node serve."""

    node: str
    starts: int
    is_new: bool
    """The node has a new id and begins empty. The caller moves the directory's content aside."""
    why: str
    """Why the node has a new id; empty if it does not."""


def decide_start(
    cookie: Cookie | None, registered: NodeRecord | None, cluster: str, journal_end: int, new_node: str
) -> Start:
    """Decide with which id a node starts on a directory. registered: the record of the node that the cookie names.

    A start raises the counter on the disk before the one in the registry. So the disk's counter is equal, or one higher
    if the last start failed in between. A disk with a lower counter was restored from a copy and may lack entries and
    fences that the node has acknowledged. Such a disk, and an empty one, must not answer "no such entry" with the old
    id. A retired node keeps its id, because its copies are needed until other nodes have them.

    The counter alone does not tell whose start the registry has recorded. The reply to that commit may be lost, and the
    commit may land after its process has given up, so the disk keeps the ids of its own starts: the registry must have
    recorded one of `tries`, or still `before`. If it has recorded another one, a process on a copy of this disk was
    faster, and this disk lacks what that one has acknowledged.

    A copy of the disk that was made after the last start, and after the end of the journal was last recorded, has the
    identity of the original. It starts in doubt (`proven_end`)."""
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
    elif not _is_own_start(cookie, registered):
        why = f"start {registered.starts} was made on another copy of the disk: this disk is an older copy"
    elif journal_end < registered.journal_end:
        why = f"the journal ends at {journal_end:,} but had {registered.journal_end:,} bytes: it is an older copy"
    if why or cookie is None or registered is None:
        return Start(new_node, 1, True, why)
    return Start(cookie.node, registered.starts + 1, False, "")


def _is_own_start(cookie: Cookie, registered: NodeRecord) -> bool:
    """Whether the start that the registry has recorded was made on this disk; True if the ids are not known."""
    if not registered.start or not cookie.tries:
        return True
    if cookie.starts == registered.starts:
        return registered.start in cookie.tries
    return cookie.before in ("", registered.start)


class Mark(NamedTuple):
    """What the last process of a node has left outside of the disk, in memory that a process outlives and a machine
    does not (C9)."""

    starts: tuple[str, ...]
    """The ids of the starts for which it is true: that of the process, and that of the start before, which is the
    recorded one until the commit that records the process's own."""
    end: int
    """The journal was synced up to this position. Moved after each sync, and before the answers that wait for it."""


def proven_end(registered: NodeRecord | None, mark: Mark | None) -> int | None:
    """The position up to which the journal must be whole for a start without doubt (C9); None if nothing says it.

    It is known after a clean stop, which records it in the registry, and after the death of a process on a machine that
    runs on, by the mark. After a reboot or a power loss, on a copy of the disk, or on another machine, it is not known
    what the disk has lost, and neither whether it lost anything. registered: the node's record before this start."""
    if registered is None:
        return None
    if registered.stopped_at is not None:
        return registered.stopped_at
    if mark is not None and registered.start and registered.start in mark.starts:
        return mark.end
    return None


def has_many_tries(cookie: Cookie | None, decided: Start) -> bool:
    """Whether the disk has TRIES_KEPT starts that may still be recorded as `decided.starts`. Then the caller first
    writes the node's record as it is, by compare-and-set: each of those starts expects an older version of the record,
    so that none of them can land any more. After that, the list begins anew."""
    return (
        cookie is not None
        and not decided.is_new
        and cookie.starts == decided.starts
        and len(cookie.tries) >= TRIES_KEPT
    )


def next_cookie(
    cookie: Cookie | None, registered: NodeRecord | None, decided: Start, cluster: str, tried: str
) -> Cookie:
    """What the disk says before the start with the id `tried` is recorded in the registry."""
    tries: tuple[str, ...] = ()
    if cookie is not None and not decided.is_new and cookie.starts == decided.starts:
        tries = cookie.tries  # of starts that ended before they knew whether they were recorded: they may land yet
    if has_many_tries(cookie, decided):
        tries = ()  # none of them can land any more
    before = "" if registered is None or decided.is_new else registered.start
    return Cookie(decided.node, cluster, decided.starts, (*tries, tried), before)
