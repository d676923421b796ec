"""The rules of one storage node."""

from __future__ import annotations

from collections.abc import Callable

from pxrs.cluster.ledgers import EntryHead
from pxrs.cluster.records import NodeRecord
from pxrs.cluster.storage.core import (
    Added,
    Cookie,
    Entries,
    FencedAt,
    FenceItem,
    Indexed,
    JournalItem,
    NodeCore,
    Outcome,
    RememberItem,
    Removed,
    RemoveItem,
    Start,
    StoreItem,
    decide_start,
)
from pxrs.errors import EntryDiffers, LedgerFenced, LedgerRemoved

L = "t/0/3"


def head(number: int = 0) -> EntryHead:
    return EntryHead(number, 1, 10, 0, 0, number)


def with_entries(*entries: int) -> NodeCore:
    core = NodeCore("n1")
    for entry in entries:
        core.add(L, entry, head(entry), entry - 1, None)
    return core


def test_an_entry_is_stored_once_and_answered_after_the_sync_each_time() -> None:
    core = NodeCore("n1")
    stored = core.add(L, 0, head(), -1, None)
    assert stored == Outcome((StoreItem(L, 0, head(), -1, None),), Added(L, 0), True)
    assert core.add(L, 0, head(), -1, None) == Outcome((), Added(L, 0), True)
    differs = core.add(L, 0, head(1), -1, None)
    assert (differs.append, type(differs.reply)) == ((), EntryDiffers)


def test_c2_a_fence_refuses_the_writer_and_lower_recoveries() -> None:
    core = with_entries(0, 1)
    assert core.fence(L, 2) == Outcome((FenceItem(L, 2),), FencedAt(0, 1), True)
    assert core.fence(L, 2) == Outcome((), FencedAt(0, 1), True)
    for refused in (core.add(L, 2, head(2), 1, None), core.add(L, 2, head(2), 1, 1), core.fence(L, 1)):
        assert isinstance(refused.reply, LedgerFenced)
        assert (refused.append, refused.reply.recovery) == ((), 2)
    assert isinstance(core.read(L, 0, 0, 1).reply, LedgerFenced)
    assert core.add(L, 2, head(2), 1, 2).reply == Added(L, 2)


def test_c2_a_read_with_a_recovery_number_fences_and_waits_for_the_sync() -> None:
    core = with_entries(0, 2)
    assert core.read(L, 0, 2) == Outcome((), Entries((0, 2)), False)
    assert core.read(L, 0, 2, 1) == Outcome((FenceItem(L, 1),), Entries((0, 2)), True)
    assert isinstance(core.add(L, 1, head(1), 0, None).reply, LedgerFenced)
    unknown = core.read("t/0/4", 0, 0, 1)
    assert unknown == Outcome((FenceItem("t/0/4", 1),), Entries(()), True)
    assert isinstance(core.add("t/0/4", 0, head(), -1, None).reply, LedgerFenced)


def test_c5_a_ledger_that_was_touched_since_it_was_listed_is_not_removed() -> None:
    touches: list[Callable[[NodeCore], Outcome]] = [
        lambda core: core.add(L, 1, head(1), 0, None),
        lambda core: core.add(L, 0, head(), -1, None),  # is there already; its sender counts the copy
        lambda core: core.fence(L, 1),
        lambda core: core.index(L),  # whoever asks counts what is there
    ]
    for touch in touches:
        core = with_entries(0)
        ((ledger, mark),) = core.ledgers()
        touch(core)
        assert core.remove(ledger, mark) == Outcome((), Removed(False), False)
    ((ledger, mark),) = core.ledgers()
    assert core.remove(ledger, mark) == Outcome((RemoveItem(L, True),), Removed(True), True)
    assert core.ledgers() == []
    assert core.remove(ledger, mark).reply == Removed(False)


def test_a_writer_cannot_add_to_a_ledger_that_was_removed_and_others_can() -> None:
    core = with_entries(0)
    core.fence(L, 1)
    core.remove(*core.ledgers()[0])
    assert isinstance(core.add(L, 1, head(1), 0, None).reply, LedgerRemoved)
    assert isinstance(core.add("t/0/2", 1, head(1), 0, None).reply, LedgerRemoved)
    for ledger, recovery in ((L, 1), ("t/0/4", None), ("t/1/3", None), ("u/0/3", None)):
        assert core.add(ledger, 1, head(1), 0, recovery).reply == Added(ledger, 1)
    assert isinstance(core.add(L, 2, head(2), 0, None).reply, LedgerRemoved), "also when it is there again"


def test_a_node_that_replays_its_journal_is_what_it_was() -> None:
    core = NodeCore("n1")
    journal: list[JournalItem] = []
    for outcome in (
        core.add(L, 0, head(), -1, None),
        core.add(L, 1, head(1), 0, None),
        core.fence(L, 3),
        core.add("t/1/0", 0, head(), -1, None),
        core.add("u/0/9", 0, head(), -1, None),
        core.remove("u/0/9", 5),
        core.remove("t/1/0", 4, has_partition=False),
        core.fence("w/0/1", 2),
    ):
        journal += outcome.append
    again = NodeCore("n1")
    for item in journal:
        again.replay(item)
    assert again.fence(L, 3).reply == FencedAt(0, 1)
    assert again.index(L).reply == Indexed((0, 1), 0, 3, False)
    assert again.index(L, limit=1).reply == Indexed((0,), 0, 3, True)
    assert isinstance(again.add("u/0/9", 0, head(), -1, None).reply, LedgerRemoved)
    assert again.add("t/1/0", 0, head(), -1, None).reply == Added("t/1/0", 0)

    shorter = NodeCore("n1")
    for item in core.standing():
        shorter.replay(item)
    assert (
        {*shorter.standing()}
        == {*core.standing()}
        == {
            RememberItem("u/0/9"),
            FenceItem(L, 3),
            FenceItem("w/0/1", 2),
        }
    )


def test_a_retired_node_is_itself_when_it_is_started_again() -> None:
    retired = NodeRecord("h:1", 5, state="retired")  # its copies are needed until others have them
    assert decide_start(Cookie("n1", "c", 5), retired, "c", 0, "n2") == Start("n1", 6, False, "")


def test_c5_a_disk_that_is_blank_behind_or_of_another_cluster_is_a_new_node() -> None:
    registered = NodeRecord("h:1", starts=5, journal_end=100)
    for starts in (5, 6):  # 6: the last start died before it raised the counter in the registry
        found = decide_start(Cookie("n1", "c", starts), registered, "c", 100, "n2")
        assert (found.node, found.starts, found.is_new) == ("n1", 6, False)
    for cookie, record, end in (
        (None, None, 0),
        (Cookie("n1", "c", 4), registered, 100),
        (Cookie("n1", "c", 7), registered, 100),
        (Cookie("n1", "c", 5), registered, 99),
        (Cookie("n1", "other", 5), registered, 100),
        (Cookie("n1", "c", 5), None, 100),
    ):
        found = decide_start(cookie, record, "c", end, "n2")
        assert (found.node, found.starts, found.is_new) == ("n2", 1, True)
        assert found.why
