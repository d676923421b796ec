"""What may be lost if storage nodes are abandoned (C6), from records alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pxrs.cluster import records
from pxrs.cluster.deciding import abandon, abandonment_of, assess
from pxrs.cluster.ledgers import CLOSED, Fragment, LedgerRecord, Quorum
from pxrs.cluster.records import AliveNode, NodeRecord, TopicRecord
from pxrs.errors import InvalidArgument
from pxrs.model import Topic
from pxrs.registry.contract import Registry

OPEN = LedgerRecord("t", 0, 3, 1, Quorum(3, 3, 2), 70, (Fragment(0, ("a", "b", "c")),))
CLOSED_ONE = replace(OPEN, number=2, base=10, state=CLOSED, last=4, end=70, is_complete=True)
NAMES = {"t": "orders"}


def test_c6_a_ledger_that_the_living_nodes_can_recover_needs_no_decision() -> None:
    assert assess([OPEN], {"c"}, {"a", "b"}, NAMES) == []
    assert assess([OPEN], {"b", "c"}, {"a"}, {}) == []  # it belongs to no topic, and is removed
    (loss,) = assess([OPEN], {"b", "c"}, {"a"}, NAMES)
    assert (loss.ledger, loss.topic, loss.nodes, loss.first, loss.end) == ("t/0/3", "orders", ("b", "c"), 70, None)
    assert (loss.entries, loss.waits_for) == (None, ())


def test_c6_it_is_told_which_other_nodes_a_recovery_would_still_wait_for() -> None:
    (loss,) = assess([OPEN], {"c"}, set(), NAMES)
    assert loss.waits_for == ("a", "b")
    (loss,) = assess([OPEN], {"b", "c"}, set(), NAMES)
    assert loss.waits_for == ("a",), "a recovery without some nodes of a write set hears all the others"
    (loss,) = assess([OPEN], {"a", "b", "c"}, set(), NAMES)
    assert loss.waits_for == ()
    decided = replace(OPEN, abandoned=("b", "c"))
    (loss,) = assess([decided], {"a"}, set(), NAMES)
    assert loss.waits_for == (), "what was decided before stands"
    assert assess([decided], {"b"}, {"a"}, NAMES) == []


def test_c6_an_empty_position_counts_as_answered() -> None:
    degraded = replace(OPEN, fragments=(Fragment(0, ("a", None, "c")),))
    assert assess([degraded], {"c"}, {"a"}, NAMES) == []


def test_c6_a_fragment_whose_entries_are_all_confirmed_needs_no_decision() -> None:
    settled = replace(OPEN, fragments=(Fragment(0, ("a", "b", "c")), Fragment(5, ("d", "e", "f"))), confirmed=7)
    assert assess([settled], {"b", "c"}, {"a", "d", "e"}, NAMES) == []
    assert len(assess([replace(settled, confirmed=3)], {"b", "c"}, {"a", "d", "e"}, NAMES)) == 1


def test_c6_confirmed_entries_without_any_node_stop_a_recovery_too() -> None:
    nodes = Fragment(0, ("a", "b", "c")), Fragment(5, ("d", "e", "f"))
    settled = replace(OPEN, fragments=nodes, confirmed=7)
    (loss,) = assess([settled], {"a", "b"}, {"d", "e", "f"}, NAMES)
    assert (loss.nodes, loss.waits_for) == (("a", "b"), ("c",))
    (loss,) = assess([settled], {"a", "b", "c"}, {"d", "e", "f"}, NAMES)
    assert loss.waits_for == ()
    alone = replace(OPEN, quorum=Quorum(1, 1, 1), fragments=(Fragment(0, ("a",)), Fragment(5, ("b",))), confirmed=4)
    assert len(assess([alone], {"a"}, {"b"}, NAMES)) == 1


def test_c6_of_a_closed_ledger_only_entries_without_any_other_copy_are_lost() -> None:
    assert assess([CLOSED_ONE], {"b", "c"}, {"a"}, NAMES) == []
    (loss,) = assess([CLOSED_ONE], {"a", "b", "c"}, set(), NAMES)
    assert (loss.entries, loss.first, loss.end) == (5, 10, 70)
    spread = replace(CLOSED_ONE, quorum=Quorum(3, 2, 2))
    (loss,) = assess([spread], {"a", "b"}, {"c"}, NAMES)
    assert loss.entries == 2  # entries 0 and 3 are at positions 0 and 1


def test_c6_a_node_in_doubt_does_not_make_a_decision_unnecessary() -> None:
    """The recovery needs two nodes that are certain (C8), and one of the two living ones is not."""
    (loss,) = assess([OPEN], {"c"}, {"a", "b"}, NAMES, {"b"})
    assert (loss.ledger, loss.nodes, loss.waits_for) == ("t/0/3", ("c",), ())
    (loss,) = assess([OPEN], {"c"}, {"a", "b"}, NAMES, {"a", "b"})
    assert loss.waits_for == (), "once c is abandoned, their answers are enough"
    degraded = replace(OPEN, fragments=(Fragment(0, ("a", None, "c")),))
    (loss,) = assess([degraded], {"c"}, {"a"}, NAMES, {"a"})
    assert loss.nodes == ("c",)


def test_c6_after_a_decision_the_answer_of_a_node_in_doubt_is_enough() -> None:
    decided = replace(OPEN, abandoned=("c",))
    assert assess([decided], {"c"}, {"a", "b"}, NAMES, {"a", "b"}) == []
    (loss,) = assess([decided], {"b"}, {"a"}, NAMES, {"a"})
    assert loss.waits_for == ()


@pytest.mark.parametrize("unsure", ["doubts", "damaged"])
def test_c6_nodes_of_a_ledger_can_be_abandoned_while_a_living_node_is_not_sure(registry: Registry, unsure: str) -> None:
    """As the registry has it: the living nodes themselves say whether they are sure."""
    registry.commit(put={records.node_key(node): NodeRecord("h:1", 1).dump() for node in "abc"})
    registry.commit(put={records.topic_key("orders"): TopicRecord(Topic("orders", "t", 1), OPEN.quorum).dump()})
    registry.commit(put={OPEN.key: OPEN.dump(), records.alive_key("a"): AliveNode("h:1", 1).dump()})
    registry.commit(put={records.alive_key("b"): AliveNode("h:1", 1).dump()})
    with pytest.raises(InvalidArgument, match="do not need the decision"):
        abandon(registry, ["c"], [OPEN.id])
    registry.commit(put={records.alive_key("b"): replace(AliveNode("h:1", 1), **{unsure: 1}).dump()})
    (loss,) = abandon(registry, ["c"], [OPEN.id])
    assert loss.nodes == ("c",)
    decided = abandonment_of(registry, OPEN)
    assert decided is not None
    assert decided.nodes == ("c",)
