"""The writer of a ledger, message by message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pxrs.cluster.ledgers import EntryHead, Fragment, LedgerRecord, Quorum
from pxrs.cluster.replication import (
    CHANGED,
    CLOSED,
    FENCED,
    Action,
    Change,
    Confirmed,
    Forget,
    LedgerWriter,
    Send,
    Stop,
)


def record(nodes: tuple[str | None, ...] = ("a", "b", "c"), quorum: Quorum | None = None) -> LedgerRecord:
    return LedgerRecord("t", 0, 0, 1, quorum or Quorum(), 100, (Fragment(0, nodes),))


def head(entry: int) -> EntryHead:
    return EntryHead(100 + entry, 1, 10, 0, 1_000 + entry, entry)


def writer_with(count: int, **options: object) -> LedgerWriter:
    writer = LedgerWriter(record(**options), 5)  # type: ignore[arg-type]
    for entry in range(count):
        writer.append(head(entry))
    return writer


def ack(writer: LedgerWriter, entry: int, *nodes: str) -> list[Action]:
    """Acknowledgements of nodes that have been there from the beginning."""
    return [action for node in nodes for action in writer.acked(node, "abcde".index(node), entry)]


def changes(actions: list[Action]) -> list[Change]:
    return [action for action in actions if isinstance(action, Change)]


def test_p3_an_entry_goes_to_its_write_set_and_is_confirmed_at_qa() -> None:
    writer = writer_with(0)
    assert writer.append(head(0)) == [Send(node, tenure, 0, -1) for tenure, node in enumerate("abc")]
    assert ack(writer, 0, "a", "a") == [], "a duplicate counts once"
    assert ack(writer, 0, "c") == [Confirmed(0)]
    assert ack(writer, 0, "b") == [Forget(0)]
    assert writer.append(head(1))[0] == Send("b", 1, 1, 0), "the next entry carries the last one that was confirmed"
    striped = writer_with(0, nodes=tuple("abcde"), quorum=Quorum(5, 3, 2))
    sent = [[action.node for action in striped.append(head(entry)) if isinstance(action, Send)] for entry in range(4)]
    assert sent == [["a", "b", "c"], ["b", "c", "d"], ["c", "d", "e"], ["d", "e", "a"]]


def test_c4_an_entry_is_confirmed_only_with_all_earlier_ones() -> None:
    writer = writer_with(3)
    assert ack(writer, 1, "a", "b") + ack(writer, 2, "a", "b") == []
    assert ack(writer, 0, "b", "c") == [Confirmed(2)]


def test_c1_nothing_is_confirmed_or_sent_to_a_replacement_before_the_change_is_committed() -> None:
    writer = writer_with(3)
    ack(writer, 0, "a", "c")
    writer.offer(["a", "d"])
    (change,) = writer.failed("c", 2)
    assert change == Change(replace(record().with_node(1, 2, "d"), confirmed=0), 5)
    assert ack(writer, 1, "a", "b", "c") == [], "neither by the others, nor by the node that has failed"
    assert writer.append(head(3)) == [Send("a", 0, 3, 0), Send("b", 1, 3, 0)]
    actions = writer.committed(6)
    assert actions == [Send("d", 3, 1, 0), Send("d", 3, 2, 0), Send("d", 3, 3, 0), Confirmed(1)]
    assert writer.acked("d", 3, 2) == [] == ack(writer, 2, "c")
    assert ack(writer, 2, "b") == [Confirmed(2)]
    assert writer.should_roll


def test_a_change_whose_outcome_is_unknown_is_tried_again_and_its_own_record_is_adopted() -> None:
    writer = writer_with(1)
    (change,) = changes(writer.failed("b", 1))
    assert writer.unknown() == [change]
    assert writer.conflicted(change.record, 9) == []
    assert (writer.record, writer.version, writer.is_degraded) == (change.record, 9, True)
    assert writer.record.fragments == (Fragment(0, ("a", None, "c")),)


@pytest.mark.parametrize("state", ["recovering", "closed", "gone", "open"])
def test_c1_a_record_that_somebody_else_has_changed_ends_the_writer(state: str) -> None:
    writer = writer_with(1)
    writer.failed("b", 1)
    found = {
        "recovering": record().in_recovery(2),
        "closed": record().closed(0, 101, size=0, stored_at=0, is_complete=False),
        "gone": None,
        "open": record().with_node(0, 0, "x"),
    }[state]
    assert writer.conflicted(found, 9) == [Stop(CHANGED, found)]
    assert ack(writer, 0, "a", "c") == [] == writer.committed(6) == writer.fenced()


def test_c1_fenced_ends_the_writer() -> None:
    writer = writer_with(1)
    assert writer.fenced() == [Stop(FENCED)]
    assert ack(writer, 0, "a", "b", "c") == []
    with pytest.raises(ValueError, match="closed"):
        writer.append(head(1))


def test_a_confirmed_entry_keeps_qa_copies_on_nodes_that_the_record_names() -> None:
    """The acknowledgements of `c` come out of order: entry 1 is confirmed by `a` and `c`, entry 0 by `a` and `b`. If
    the replacement of `c` began at entry 0, the record would name only `a` for entry 1."""
    writer = writer_with(3)
    ack(writer, 0, "a", "b")
    assert ack(writer, 1, "a", "c") == [Confirmed(1)]
    (change,) = changes(writer.failed("c", 2))
    assert change.record.fragments == (Fragment(0, ("a", "b", "c")), Fragment(2, ("a", "b", None)))
    writer.committed(6)
    ack(writer, 1, "b")
    ack(writer, 2, "a", "b")
    assert writer.forgotten == 2
    (closing,) = changes(writer.close())
    assert not closing.record.is_complete, "entry 0 lacks the copy of c"


def test_a_node_that_comes_back_begins_a_new_tenure() -> None:
    writer = writer_with(1)
    writer.failed("c", 2)
    writer.committed(6)
    (change,) = changes(writer.offer(["c"]))
    assert change.record.fragments == (Fragment(0, ("a", "b", "c")),), "it gets what the writer still holds"
    assert Send("c", 4, 0, -1) in writer.committed(7)
    ack(writer, 0, "a")
    assert writer.acked("c", 2, 0) == [], "late, and perhaps removed since"
    assert writer.acked("c", 4, 0) == [Confirmed(0)]
    writer.failed("c", 4, is_lasting=True)
    writer.committed(8)
    assert writer.offer(["c"]) == []


def test_one_position_is_changed_after_the_other_and_a_failed_replacement_is_replaced() -> None:
    writer = writer_with(2)
    writer.offer(["d", "e"])
    writer.failed("a", 0)
    assert writer.failed("b", 1) == []
    actions = writer.committed(6)
    (change,) = changes(actions)
    assert change.record.fragments == (Fragment(0, ("d", "e", "c")),)
    writer.committed(7)
    writer.failed("d", 3)
    assert writer.committed(8) == []
    assert writer.record.fragments == (Fragment(0, (None, "e", "c")),)
    assert [writer.acked("e", 4, 0), ack(writer, 0, "c")] == [[], [Confirmed(0), Forget(0)]]
    assert writer.awaiting() == [("e", 4, 1), ("c", 2, 1)] or writer.awaiting() == [("c", 2, 1), ("e", 4, 1)]


def test_a_ledger_is_closed_when_every_entry_is_confirmed() -> None:
    writer = writer_with(3)
    assert writer.close() == []
    for entry in range(3):
        actions = ack(writer, entry, "a", "b", "c")
    (change,) = changes(actions)
    closed = change.record
    assert (closed.last, closed.end, closed.size, closed.stored_at) == (2, 103, 20, 1_002)
    assert writer.committed(6) == [Stop(CLOSED, closed)]
    assert changes(LedgerWriter(record(), 1).close())[0].record.end == 100
