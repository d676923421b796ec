"""The recovery of a ledger, message by message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pxrs.cluster.ledgers import EntryHead, Fragment, Joining, LedgerRecord, Quorum
from pxrs.cluster.recovery import (
    CHANGED,
    DAMAGED,
    FENCED,
    UNKNOWN,
    UNREADABLE,
    AddEntry,
    Closed,
    FenceNode,
    Measure,
    NeedSpares,
    ReadEntry,
    Recovery,
    Stopped,
)
from pxrs.cluster.replication import Change


def record(nodes: tuple[str | None, ...] = ("a", "b", "c"), quorum: Quorum | None = None) -> LedgerRecord:
    return LedgerRecord("t", 0, 0, 1, quorum or Quorum(), 100, (Fragment(0, nodes),))


def proposed(actions: Sequence[object]) -> Change:
    """The change that is the only action."""
    (change,) = actions
    assert isinstance(change, Change)
    return change


def head(entry: int) -> EntryHead:
    return EntryHead(100 + entry, 1, 10, 0, 1_000 + entry, entry)


def begun(found: LedgerRecord | None = None, **options: Any) -> tuple[Recovery, list[Any]]:
    """A recovery whose first change is committed, and what follows from that."""
    recovery = Recovery(found or record(), 5, 7, **{"window": 1, **options})
    change, expect = proposed(recovery.start())
    assert (change.state, change.recovery, change.recoverer, expect) == ("recovering", 1, 7, 5)
    return recovery, recovery.committed(6)


def fenced(*nodes: str, lac: int = -1, found: LedgerRecord | None = None, **options: Any) -> tuple[Recovery, list[Any]]:
    recovery, actions = begun(found, **options)
    for node in nodes:
        actions = recovery.fenced(node, lac)
    return recovery, actions


def reads(actions: list[Any]) -> list[tuple[str, int]]:
    return sorted((action.node, action.entry) for action in actions if isinstance(action, ReadEntry))


def adds(actions: list[Any]) -> list[tuple[str, int]]:
    return sorted((action.node, action.entry) for action in actions if isinstance(action, AddEntry))


def after_a_while(recovery: Recovery) -> list[Any]:
    """What the recovery does, apart from asking again, when nobody has answered for a retry period."""
    return [action for action in recovery.retry() if not isinstance(action, (ReadEntry, FenceNode))]


def test_c2_nothing_is_read_before_qw_minus_qa_plus_1_nodes_of_every_write_set_are_fenced() -> None:
    recovery, actions = begun()
    assert actions == [FenceNode(node, 1) for node in "abc"]
    assert recovery.fenced("a", -1) == [] == recovery.fenced("a", -1) == recovery.failed("c")
    assert reads(recovery.fenced("b", -1)) == [("a", 0), ("b", 0), ("c", 0)]

    striped, actions = begun(record(tuple("abcde"), Quorum(5, 3, 2)))
    assert [striped.fenced(node, -1) for node in "abd"] == [[], [], []], "of c, d, e one is fenced"
    assert reads(striped.fenced("c", -1)) == [("a", 0), ("b", 0), ("c", 0)]


def test_fragments_that_hold_confirmed_entries_alone_need_no_fence() -> None:
    changed = record().with_node(3, 0, "d")
    recovery, actions = begun(changed)
    assert {action.node for action in actions} == {*"abcd"}
    recovery.fenced("d", 1)
    assert reads(recovery.fenced("b", -1)) == [], "entry 2 is kept by a, b, c, of which one is fenced"
    assert reads(recovery.fenced("c", 1)) == [(node, entry) for node in "abc" for entry in (1, 2)]
    _, actions = begun(replace(changed, confirmed=2))
    assert {action.node for action in actions} == {*"bcd"}


def test_p5_the_ledger_ends_where_enough_of_the_write_set_have_no_entry_and_silence_is_no_answer() -> None:
    recovery, _ = fenced("a", "b")
    assert recovery.missing("a", 0) == [] == recovery.missing("a", 0) == recovery.failed("b") == recovery.failed("c")
    assert recovery.missing("c", 0) == [], "b may have the entry, and has had no time to answer"
    closed, version = proposed(after_a_while(recovery))
    assert (closed.state, closed.last, closed.end, version) == ("closed", -1, 100, 6)
    assert recovery.committed(9) == [Closed(closed, 9)]


def test_c1_a_recovered_entry_has_qa_copies_before_the_ledger_is_closed() -> None:
    recovery, actions = fenced("a", "b", lac=0)
    assert reads(actions) == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0), ("c", 1)]
    assert adds(recovery.found("c", 1, head(1), b"x")) == [("a", 1), ("b", 1)]
    actions = recovery.acked("b", 1)
    assert reads(actions) == [("a", 2), ("b", 2), ("c", 2)]
    recovery.missing("a", 2)
    recovery.missing("b", 2)
    assert after_a_while(recovery) == [Measure(1)]
    closed = proposed(recovery.measured(1, 10)).record
    assert (closed.last, closed.end, closed.size, closed.stored_at, closed.is_complete) == (1, 102, 10, 1_001, False)


def test_the_last_confirmed_entry_is_read_for_the_ledgers_end() -> None:
    recovery, _ = fenced("a", "b", lac=4)
    recovery.missing("a", 5)
    recovery.missing("b", 5)
    assert after_a_while(recovery) == [], "where the ledger ends is known, and not yet at which offset"
    assert recovery.found("b", 4, head(4), b"x") == [Measure(4)]
    lost, _ = fenced("a", "b", lac=4)
    for node in "abc":
        lost.missing(node, 5)
    assert [lost.missing(node, 4) for node in "ab"] == [[], []]
    assert lost.missing("c", 4) == [Stopped(DAMAGED, lost.record, 6)]


def test_a_replacement_is_named_in_joining_first_and_gets_its_place_with_the_close() -> None:
    recovery, _ = fenced("a", "b")
    recovery.failed("b")
    assert NeedSpares() in [*recovery.failed("c"), *recovery.found("a", 0, head(0), b"x")]
    joined = proposed(recovery.offer(["b", "d"])).record
    assert joined.joining == (Joining("d", 0, 1),)
    assert joined.fragments == record().fragments, "a second recoverer must ask the nodes that the writer wrote to"
    actions = recovery.committed(8)
    assert adds(actions) == [("d", 0)]
    assert [action.lac for action in actions if isinstance(action, AddEntry)] == [-1]
    assert reads(recovery.acked("d", 0)) == [("a", 1), ("b", 1), ("c", 1)]
    recovery.missing("a", 1)
    recovery.missing("c", 1)
    closed = proposed(after_a_while(recovery)).record
    assert (closed.fragments, closed.joining) == ((Fragment(0, ("a", "d", "c")),), ())


def test_an_entry_that_was_never_confirmed_is_left_out_rather_than_waited_for() -> None:
    recovery, _ = fenced("a", found=record(("a", "b"), Quorum(2, 2, 2)))
    recovery.found("a", 0, head(0), b"x")
    recovery.missing("b", 0)
    closed = proposed(recovery.failed("b")).record
    assert closed.last == -1


def test_an_empty_position_counts_as_fenced_and_as_no() -> None:
    recovery, actions = fenced("a", found=record(("a", "b", None)))
    assert reads(actions) == [("a", 0), ("b", 0)]
    recovery.missing("b", 0)
    closed = proposed(after_a_while(recovery)).record
    assert closed.last == -1


def test_c8_a_copy_wins_over_two_nodes_without_it_until_the_close_is_proposed() -> None:
    in_time, _ = fenced("a", "b")
    in_time.missing("a", 0)
    in_time.missing("b", 0)
    assert adds(in_time.found("c", 0, head(0), b"x")) == [("a", 0), ("b", 0)]

    late, _ = fenced("a", "b", lac=1)
    late.found("a", 1, head(1), b"x")
    late.missing("a", 2)
    late.missing("b", 2)
    assert after_a_while(late) == [Measure(1)]
    assert adds(late.found("c", 2, head(2), b"x")) == [("a", 2), ("b", 2)]
    assert late.measured(1, 10) == [], "the ledger does not end there any more"


def test_c7_a_node_that_does_not_know_is_no_node_without_the_entry() -> None:
    recovery, _ = fenced("a", "b")
    recovery.doubtful("a", 0)
    recovery.missing("b", 0)
    assert after_a_while(recovery) == [], "c may have it"
    assert reads(recovery.retry()) == [("c", 0)]
    assert adds(recovery.found("c", 0, head(0), b"x")) == [("a", 0), ("b", 0)]


def test_c8_b_if_every_node_has_answered_and_some_do_not_know_the_ledger_ends_and_its_record_names_them() -> None:
    recovery, _ = fenced("a", "b")
    recovery.doubtful("a", 0)
    recovery.doubtful("b", 0)
    assert after_a_while(recovery) == [] == recovery.failed("c"), "one is silent"
    assert recovery.missing("c", 0) == [], "and may know that the entry is confirmed"
    assert FenceNode("c", 1) in recovery.retry()
    closed = proposed(recovery.fenced("c", -1)).record
    assert (closed.last, closed.doubted) == (-1, ("a", "b"))
    assert LedgerRecord.parse(closed.key, closed.dump()) == closed
    sure, _ = fenced("a", "b")
    sure.doubtful("a", 0)
    sure.missing("b", 0)
    assert proposed(sure.missing("c", 0)).record.doubted == (), "two nodes without it are enough"


def test_c8_b_an_entry_that_a_node_has_and_cannot_read_is_no_end() -> None:
    recovery, _ = fenced("a", "b")
    recovery.doubtful("a", 0)
    recovery.unreadable("b", 0)
    assert recovery.doubtful("c", 0) == [] == after_a_while(recovery)
    assert reads(recovery.retry()) == [("b", 0)]
    assert adds(recovery.found("b", 0, head(0), b"x")) == [("a", 0), ("c", 0)]


def test_c8_the_ledger_does_not_end_at_or_before_what_a_late_answer_to_a_fence_says_is_confirmed() -> None:
    recovery, _ = fenced("a", "b")
    recovery.missing("a", 0)
    recovery.fenced("c", 0)
    recovery.missing("b", 0)
    assert after_a_while(recovery) == []
    assert recovery.missing("c", 0) == [Stopped(DAMAGED, recovery.record, 6)]

    found, _ = fenced("a", "b")
    found.fenced("c", 0)
    assert [action.lac for action in found.found("c", 0, head(0), b"x") if isinstance(action, AddEntry)] == [-1, -1]


def test_c8_what_is_heard_to_be_confirmed_takes_an_end_back_that_is_not_proposed() -> None:
    recovery, _ = fenced("a", "b", lac=1)
    recovery.found("a", 1, head(1), b"x")
    recovery.missing("a", 2)
    recovery.missing("b", 2)
    assert after_a_while(recovery) == [Measure(1)]
    recovery.fenced("c", 2)
    assert recovery.measured(1, 10) == []
    assert adds(recovery.found("c", 2, head(2), b"x")) == [("a", 2), ("b", 2)]


def test_c8_an_entry_that_was_left_out_belongs_to_the_ledger_once_it_is_heard_to_be_confirmed() -> None:
    recovery, _ = fenced("a", "b", lac=1)
    recovery.found("a", 1, head(1), b"x")
    recovery.found("a", 2, head(2), b"x")
    for node in "bc":
        recovery.missing(node, 2)
    recovery.failed("b")
    assert recovery.failed("c") == [Measure(1)]
    assert recovery.left_out == 2, "too few nodes can store it"
    recovery.fenced("c", 2)
    assert recovery.left_out is None
    assert recovery.measured(1, 10) == [], "the ledger does not end there any more"
    assert adds(recovery.found("a", 2, head(2), b"x")) == [("c", 2)]
    recovery.acked("c", 2)
    for node in "ab":
        recovery.missing(node, 3)
    assert after_a_while(recovery) == [Measure(2)]
    assert proposed(recovery.measured(2, 10)).record.last == 2


def test_c8_nodes_whose_answers_have_ended_nothing_in_the_end_are_not_named() -> None:
    """Entry 2 is on c, d, e. None of them knows of it at first, so the ledger would end before it. Then it is found,
    and the ledger ends before entry 3 (d, e, a), without `a`, which an operator has abandoned."""
    spread = replace(record(tuple("abcde"), Quorum(5, 3, 2)), confirmed=1)
    recovery, _ = fenced(*"cde", found=spread, abandoned=["a"])
    recovery.found("b", 1, head(1), b"x")
    recovery.doubtful("c", 2)
    recovery.doubtful("d", 2)
    assert recovery.doubtful("e", 2) == [Measure(1)]
    assert adds(recovery.found("c", 2, head(2), b"x")) == [("d", 2), ("e", 2)]
    recovery.fenced("b", 3)
    recovery.acked("d", 2)
    recovery.doubtful("d", 3)
    assert recovery.doubtful("e", 3) == [Measure(2)], "the loss of entry 3 was accepted"
    assert proposed(recovery.measured(2, 10)).record.doubted == ()


def test_c8_what_the_owner_has_confirmed_itself_is_no_end() -> None:
    recovery, _ = fenced("a", "b", "c", confirmed=0)
    for node in "ab":
        recovery.doubtful(node, 0)
    assert recovery.doubtful("c", 0) == []
    for node in "ab":
        recovery.doubtful(node, 1)
    assert recovery.doubtful("c", 1) == [Stopped(DAMAGED, recovery.record, 6)], "entry 0 is the anchor"


def test_a_recovery_tells_what_it_waits_for() -> None:
    recovery, _ = begun()
    recovery.fenced("a", -1)
    assert recovery.awaited() == (None, {"b": None, "c": None})
    recovery.fenced("b", -1)
    recovery.doubtful("a", 0)
    recovery.unreadable("b", 0)
    assert recovery.awaited() == (0, {"a": UNKNOWN, "b": UNREADABLE, "c": None})


def test_c6_an_operator_who_abandons_nodes_accepts_that_others_do_not_know() -> None:
    recovery, _ = begun(abandoned=["c"])
    recovery.fenced("a", -1)
    recovery.doubtful("a", 0)
    assert after_a_while(recovery) == []
    closed = proposed(recovery.doubtful("b", 0)).record
    assert (closed.last, closed.abandoned, closed.doubted) == (-1, ("c",), ())


def test_c6_abandoned_nodes_count_as_no_once_all_others_have_answered_and_are_recorded() -> None:
    recovery, actions = begun(abandoned=["a", "b"])
    assert reads(actions) == [("c", 0)]
    assert recovery.found("c", 0, head(0), b"x") == [NeedSpares()]
    recovery.offer(["d"])
    recovery.committed(8)
    recovery.acked("d", 0)
    closed = proposed(recovery.missing("c", 1)).record
    assert (closed.last, closed.abandoned) == (0, ("a", "b"))
    deeper, _ = begun(replace(record(), confirmed=2), abandoned=["a", "b"])
    deeper.missing("c", 3)
    assert reads(deeper.missing("c", 2)) == [("c", 1)]
    assert deeper.found("c", 1, head(1), b"x") == [Measure(1)]


def test_c6_a_spread_ledger_ends_before_an_entry_that_was_on_abandoned_nodes_alone() -> None:
    spread = replace(record(tuple("abcde"), Quorum(5, 3, 2)), confirmed=2)
    recovery, _ = fenced(*"abe", found=spread, abandoned=["c", "d"])  # entry 2 is on c, d, e, and 1 on b, c, d
    recovery.missing("e", 3)
    recovery.missing("a", 3)
    assert reads(recovery.missing("e", 2)) == [("b", 1)]
    assert recovery.found("b", 1, head(1), b"x") == [Measure(1)]


def test_c1_another_recovery_ends_this_one() -> None:
    recovery, _ = fenced("a", "b")
    assert recovery.refused() == [Stopped(FENCED)]
    assert recovery.missing("a", 0) == [] == recovery.retry()
    lost = Recovery(record(), 5, 7)
    lost.start()
    found = record().in_recovery(8)
    assert lost.conflicted(found, 6) == [Stopped(CHANGED, found, 6)]


def test_a_change_whose_outcome_is_unknown_is_tried_again() -> None:
    recovery = Recovery(record(), 5, 7)
    (change,) = recovery.start()
    assert isinstance(change, Change)
    assert recovery.unknown() == [change]
    assert recovery.conflicted(change.record, 6) == [FenceNode(node, 1) for node in "abc"]


def test_whatever_was_not_answered_is_asked_again() -> None:
    recovery, _ = fenced("a")
    assert recovery.retry() == [FenceNode("b", 1), FenceNode("c", 1)]
    recovery.fenced("b", -1)
    recovery.missing("a", 0)
    assert reads(recovery.retry()) == [("b", 0), ("c", 0)]
    recovery.found("b", 0, head(0), b"x")
    assert adds(recovery.retry()) == [("a", 0), ("c", 0)]
