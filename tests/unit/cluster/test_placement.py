"""Which nodes keep a ledger (P9)."""

from __future__ import annotations

import pytest

from pxrs.cluster.placement import (
    Candidate,
    broker_candidates,
    choose,
    ensemble,
    placement_named,
    storage_candidates,
)
from pxrs.cluster.records import AliveNode, BrokerRecord
from pxrs.errors import InvalidPlacement

ALIVE = {
    "a": AliveNode("h:1", 1, 50),
    "b": AliveNode("h:2", 1, 10),
    "c": AliveNode("h:3", 1, 50),
    "d": AliveNode("h:4", 1, 0, refuses="disk full"),
}


def test_p9_least_loaded_comes_first_and_equals_take_turns() -> None:
    least = placement_named("least loaded")
    assert [ensemble(least, ALIVE, 2, turn) for turn in (0, 1, 2)] == [("b", "a"), ("b", "c"), ("b", "c")]
    assert ensemble(least, ALIVE, 4, 0) == ("b", "a", "c", None)
    brokers = {"x": BrokerRecord("h", load=3), "y": BrokerRecord("h", load=1)}
    assert choose(least, broker_candidates(brokers), 1, 0) == ["y"]


def test_p9_round_robin_and_random_return_different_nodes() -> None:
    robin = placement_named("round robin")
    assert [ensemble(robin, ALIVE, 2, turn) for turn in range(3)] == [("a", "b"), ("b", "c"), ("c", "a")]
    assert {*ensemble(placement_named("random"), ALIVE, 3, 0)} == {"a", "b", "c"}
    assert choose(robin, storage_candidates(ALIVE, without="ab"), 3, 0) == ["c"]
    assert choose(robin, [], 3, 0) == []


@pytest.mark.parametrize("answer", [["a", "a"], ["z"], ["a", "b", "c"]])
def test_p9_an_answer_that_would_put_two_copies_on_one_node_is_refused(answer: list[str]) -> None:
    with pytest.raises(InvalidPlacement, match="must return"):
        choose(lambda candidates, count, turn: answer, [Candidate("a", 0), Candidate("b", 0), Candidate("c", 0)], 2, 0)
    with pytest.raises(InvalidPlacement, match="choose from least loaded, round robin, random"):
        placement_named("worst")
