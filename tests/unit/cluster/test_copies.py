"""The repair of closed ledgers (P6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pxrs.cluster.copies import (
    CopyEntry,
    Ended,
    ListEntries,
    Place,
    Repair,
    Repaired,
    Shortage,
    needs_repair,
    shortages,
    urgency,
)
from pxrs.cluster.ledgers import Fragment, Joining, LedgerRecord, Quorum
from pxrs.cluster.replication import Change


def closed(nodes: tuple[str | None, ...] = ("a", "b", "c"), *, is_complete: bool = True, last: int = 2) -> LedgerRecord:
    opened = LedgerRecord("t", 0, 0, 1, Quorum(), 0, (Fragment(0, nodes),))
    return opened.closed(last, 3, size=0, stored_at=0, is_complete=is_complete)


def proposed(actions: Sequence[object]) -> Change:
    """The change that is the only action."""
    (change,) = actions
    assert isinstance(change, Change)
    return change


def repair(record: LedgerRecord, live: str, spares: str = "", **options: Any) -> tuple[Repair, list[Any]]:
    made = Repair(record, 5, {*live}, [*spares], **options)
    return made, made.start()


def test_p6_what_lacks_copies_is_visible() -> None:
    opened = LedgerRecord("t", 0, 0, 1, Quorum(), 0, (Fragment(0, ("a", None, "c")),))
    assert shortages(opened, "a") == []
    assert shortages(closed(), "abc") == []
    assert shortages(closed(("a", None, "c")), "a") == [
        Shortage(Place(0, 1), None, "no node"),
        Shortage(Place(0, 2), "c", "node is gone"),
    ]
    assert [each.why for each in shortages(closed(is_complete=False), "abc")] == ["not checked"] * 3
    assert shortages(closed(("a", None, "c"), last=-1), "a") == [], "it has no entries"
    assert urgency(closed(), "a") < urgency(closed(), "ab") < urgency(closed(), "abc")
    assert needs_repair(closed().with_joining([Joining("d", 0, 0)]), "abc")


def test_p6_a_spare_is_named_filled_and_only_then_given_its_place() -> None:
    work, actions = repair(closed(), "abd", "abd", at_once=2)
    joined, expect = proposed(actions)
    assert (joined.joining, joined.fragments, expect) == ((Joining("d", 0, 2),), closed().fragments, 5)
    assert work.committed(6) == [ListEntries("d")]
    assert work.listed("d", [1]) == [CopyEntry(0, ("a", "b", "c"), "d", 0), CopyEntry(2, ("a", "b", "c"), "d", 0)]
    assert work.copied("d", 0) == [] == work.copied("d", 0), "a reply may come twice"
    changed, expect = proposed(work.copied("d", 2))
    assert (changed.fragments, changed.joining, expect) == ((Fragment(0, ("a", "b", "d")),), (), 6)
    assert work.committed(7) == [Repaired(changed, 7, ())]


def test_a_repair_goes_on_with_a_node_that_an_earlier_one_has_named() -> None:
    work, actions = repair(closed().with_joining([Joining("e", 0, 2)]), "abde", "de")
    assert actions == [ListEntries("e")]
    changed = proposed(work.listed("e", [0, 1, 2])).record
    assert changed.fragments == (Fragment(0, ("a", "b", "e")),)


def test_nodes_of_a_recovered_ledger_are_checked_and_completed() -> None:
    work, actions = repair(closed(is_complete=False), "abc")
    assert actions == [ListEntries("a")]
    assert work.listed("a", [0, 1, 2]) == [ListEntries("b")]
    assert work.listed("b", [0, 1]) == [CopyEntry(2, ("c", "a"), "b", 0)]
    assert work.copied("b", 2) == [ListEntries("c")]
    changed = proposed(work.listed("c", [0, 1, 2, 3])).record
    assert changed.is_complete
    assert work.committed(6) == [Repaired(changed, 6, ())]


def test_without_a_spare_the_shortage_stays_and_is_reported() -> None:
    work, actions = repair(closed(), "ab", "ab")
    assert actions == [Repaired(closed(), 5, (Shortage(Place(0, 2), "c", "node is gone"),))]
    empty = closed(("a", "b", None), is_complete=False)
    work, _ = repair(empty, "ab")
    work.listed("a", [0, 1, 2])
    changed = proposed(work.listed("b", [0, 1, 2])).record
    assert changed.is_complete, "the nodes that it names have everything"


def test_a_conflict_a_failure_or_an_unknown_outcome_ends_a_repair() -> None:
    ends: list[Callable[[Repair], list[Any]]] = [
        lambda work: work.conflicted(),
        lambda work: work.unknown(),
        lambda work: work.failed("d"),
    ]
    for end in ends:
        work, actions = repair(closed(), "abd", "d")
        assert proposed(actions).expect == 5
        (ended,) = end(work)
        assert isinstance(ended, Ended)
        assert work.committed(6) == [] == work.listed("d", [])


def test_p6_a_spare_that_takes_no_copies_is_replaced_by_another_one() -> None:
    begun = closed().with_joining([Joining("d", 0, 2)])
    work, actions = repair(begun, "abde", "e")
    assert proposed(actions).record.joining == (Joining("e", 0, 2),), "d is alive, and full"
    work, actions = repair(begun, "abde", "de")
    assert actions == [ListEntries("d")]
    assert len(work.listed("d", [])) == 3
    assert proposed(work.failed("d")).record.joining == (Joining("e", 0, 2),)
    assert work.failed("d") == [] == work.copied("d", 0), "answers that come late"
    assert work.committed(6) == [ListEntries("e")]


def test_p6_a_place_that_cannot_be_mended_does_not_keep_the_others_from_it() -> None:
    record = closed(last=5).with_node(3, 2, "d")  # c has entries 0 to 2, and d the others
    work, actions = repair(record, "abef", "ef")
    assert proposed(actions).record.joining == (Joining("e", 0, 2),)
    work.committed(6)
    work.listed("e", [])
    joined = proposed(work.lost(1)).record
    assert joined.joining == (Joining("e", 0, 2), Joining("e", 3, 2)), "e keeps what was copied"
    assert work.lost(2) == []
    work.committed(7)
    work.listed("e", [3, 4])
    changed = proposed(work.copied("e", 5)).record
    assert changed.fragments[1].nodes == ("a", "b", "e")
    assert changed.joining == (Joining("e", 0, 2),)
    assert work.committed(8) == [Ended("entry 1 cannot be read from any of its nodes")]


def test_p6_a_node_that_does_not_answer_does_not_keep_the_others_from_being_checked() -> None:
    work, actions = repair(closed(is_complete=False), "abc")
    assert actions == [ListEntries("a")]
    assert work.failed("a") == [ListEntries("b")]
    assert work.listed("b", [0, 1, 2]) == [ListEntries("c")]
    (ended,) = work.listed("c", [0, 1, 2])
    assert ended == Ended("storage node a does not answer")
