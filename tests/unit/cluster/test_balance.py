"""Which partition a broker releases, and which nodes count as live."""

from __future__ import annotations

from pxrs.cluster.broker.balance import to_release
from pxrs.cluster.broker.presence import News, Presence
from pxrs.cluster.broker.view import Place


def settled(owners: dict[Place, str], brokers: set[str]) -> list[tuple[Place, str]]:
    """Let the brokers release, and the least loaded one claim, until nothing moves; what has moved where."""
    moves = []
    while True:
        released = {
            (place, broker)
            for broker in brokers
            if (place := to_release(broker, brokers, owners, [each for each in owners if owners[each] == broker]))
        }
        assert len(released) <= 1, "two brokers release at the same time"
        if not released:
            return moves
        assert len(moves) < 100, "partitions move for ever"
        ((place, _),) = released
        load = {broker: sum(owner == broker for owner in owners.values()) for broker in brokers}
        load[owners[place]] -= 1
        owners[place] = min(brokers, key=lambda broker: (load[broker], broker))
        moves.append((place, owners[place]))


def test_p5_partitions_move_until_no_broker_has_two_more_than_another_and_no_further() -> None:
    owners = {("t", number): "ab"[number % 2] for number in range(10)}
    moves = settled(owners, {"a", "b", "c"})
    assert [to for _, to in moves] == ["c"] * 3
    assert len({place for place, _ in moves}) == 3
    assert settled(owners, {"a", "b", "c"}) == []


def test_p5_a_difference_of_one_moves_nothing() -> None:
    owners = {("t", 0): "a", ("t", 1): "a", ("t", 2): "b"}
    assert settled(owners, {"a", "b"}) == []


def test_p5_each_topic_is_spread() -> None:
    owners = {(topic, number): "a" for topic in "tuv" for number in range(2)}
    settled(owners, {"a", "b"})
    assert sorted(topic for (topic, _), owner in owners.items() if owner == "b") == ["t", "u", "v"]


def test_p5_nothing_is_released_while_a_partition_has_no_owner_or_by_one_that_leaves() -> None:
    owners = {("t", number): "a" for number in range(4)}
    assert to_release("a", {"a", "b"}, owners, [("t", 1)]) == ("t", 1)
    assert to_release("a", {"a", "b"}, {**owners, ("t", 4): ""}, [("t", 1)]) is None
    assert to_release("a", {"b"}, owners, [("t", 1)]) is None
    assert to_release("a", {"a", "b"}, owners, []) is None


def test_p6_a_node_is_live_until_its_grace_is_over_and_is_told_to_be_lost_once() -> None:
    presence = Presence(10.0)
    assert presence.look("ab", "", "abc", 0.0) == News(frozenset("abc"), (), ())  # c may come back soon
    assert presence.look("a", "", "abc", 5.0) == News(frozenset("abc"), (), ())
    # c was never seen alive: that it is away is no news.
    assert presence.look("a", "", "abc", 11.0) == News(frozenset("ab"), (), ())
    assert presence.look("a", "", "abc", 15.0) == News(frozenset("a"), (("b", 10.0),), ())
    assert presence.look("a", "", "abc", 16.0) == News(frozenset("a"), (), ())
    assert presence.look("ab", "", "abc", 20.0) == News(frozenset("ab"), (), (("b", 15.0),))
    assert presence.look("a", "", "abc", 21.0).live == frozenset("ab")
    assert presence.look("ab", "a", "abc", 22.0).live == frozenset("b")  # a was retired


def test_a_node_that_the_registry_has_forgotten_is_not_waited_for() -> None:
    presence = Presence(10.0)
    presence.look("ab", "", "ab", 0.0)
    assert presence.look("a", "", "a", 1.0).live == frozenset("a")
