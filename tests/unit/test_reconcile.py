"""What a member should do next, by what it sees: one test for each rule."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest

from pxrs.group.reconcile import (
    Action,
    Assign,
    Claim,
    Fence,
    Lead,
    Leave,
    Lose,
    Me,
    Release,
    Resume,
    Revoke,
    asked_since,
    moving,
    next_fence_at,
    reconcile,
)
from pxrs.group.records import Leader, Member, Owner, Target
from pxrs.group.snapshot import GroupState
from pxrs.log.numbering import Numbering
from pxrs.registry.contract import ABSENT

T = "t"


def members(*names: str) -> dict[str, Member]:
    return {name: Member(name, T, "orders", 2, since=at) for at, name in enumerate(names)}


def snapshot(
    *names: str,
    leader: str | None = None,
    targets: list[str | None] | None = None,
    owners: Mapping[int, tuple[Owner, int]] = {},
) -> GroupState:
    """targets: whom each partition is meant for. Every member has a target then, of version 50."""
    return GroupState(
        members(*names),
        None if leader is None else (Leader(leader, 3), 30),
        {name: (target(targets, name), 50) for name in names if targets is not None},
        {(T, number): owner for number, owner in owners.items()},
    )


def target(targets: list[str | None], name: str, generation: int = 5) -> Target:
    numbers = [number for number, meant in enumerate(targets) if meant == name]
    return Target(generation, {T: numbers} if numbers else {})


def assign(targets: list[str | None], *names: str) -> Assign:
    """The targets of these members, which are to be written anew."""
    return Assign({name: (target(targets, name, 6), 50) for name in names}, {}, 30)


def me(
    name: str,
    held: Mapping[int, int] = {},
    revoking: Collection[int] = (),
    drained: Collection[int] = (),
) -> Me:
    return Me(name, Numbering([(T, 2)]), held, revoking, drained)


def actions(
    seen: GroupState, who: Me, now: float = 0.0, asked: Mapping[tuple[tuple[str, int], int], float] = {}
) -> list[Action]:
    return reconcile(seen, who, asked, now, handover_s=10.0)


A0, A1 = (Owner("a", 1), 101), (Owner("a", 2), 102)
FREE = (Owner(None, 4), 104)


def test_a_member_that_the_registry_does_not_know_leaves() -> None:
    assert actions(snapshot("b"), me("a")) == [Leave()]


def test_g2_the_first_member_takes_the_lead() -> None:
    assert actions(snapshot("a"), me("a")) == [Lead(ABSENT, 1, None)]


def test_g2_the_lead_is_taken_from_one_who_is_gone_with_the_next_term() -> None:
    assert actions(snapshot("b", leader="a"), me("b"))[0] == Lead(30, 4, "a")


def test_g2_the_lead_is_not_taken_from_one_who_lives() -> None:
    assert actions(snapshot("a", "b", leader="a"), me("b")) == []


def test_r5_a_leader_whose_targets_were_not_answered_begins_another_term() -> None:
    seen = snapshot("a", "b", leader="a", targets=["a", "a"])
    assert actions(seen, replace(me("a"), has_late_targets=True)) == [Lead(30, 4, None)]


def test_x5_the_leader_assigns_when_members_changed_and_only_then() -> None:
    seen = snapshot("a", "b", leader="a", targets=["a", "a"])
    assert actions(seen, me("a")) == [assign(["a", "b"], "a", "b")]
    seen = snapshot("a", "b", leader="a", targets=["a", "b"], owners={0: A0})
    assert actions(seen, me("a", {0: 101})) == []


def test_x8_a_leader_that_assigns_anew_does_nothing_by_the_old_assignment() -> None:
    """It would fence what it has just decided to leave where it is, or claim what it has just given away."""
    seen = snapshot("a", "b", leader="b", targets=["gone", "b"], owners={0: A0})
    assert actions(seen, me("b"), 1_000.0, asked_since(seen, {}, 0.0)) == [assign(["a", "b"], "a")]


def test_x4_a_partition_goes_back_to_its_owner_if_the_one_it_was_meant_for_is_gone() -> None:
    seen = snapshot("a", "b", leader="a", targets=["gone", "b"], owners={0: A0})
    assert actions(seen, me("a", {0: 101})) == [assign(["a", "b"], "a")]


def test_x5_only_the_targets_that_change_are_written() -> None:
    seen = snapshot("a", "b", "c", leader="a", targets=["a", "b"])
    seen.targets.pop("c")
    new = Target(6), ABSENT
    assert actions(seen, me("a")) == [Assign({"c": new}, {}, 30)], "it gets nothing, and is told so"


def test_the_target_of_a_member_that_is_gone_is_deleted() -> None:
    seen = snapshot("a", leader="a", targets=["a", "a"])
    seen.targets["gone"] = Target(4, {T: [1]}), 44
    assert actions(seen, me("a")) == [Assign({}, {"gone": 44}, 30)]


def test_g2_of_a_partition_in_two_targets_the_owner_keeps_it() -> None:
    """A leader has died after it had written one of two targets."""
    seen = snapshot("a", "b", leader="a", targets=["a", "b"], owners={0: A0, 1: A1})
    seen.targets["a"] = Target(4, {T: [0, 1]}), 49
    assert seen.meant_for() == {(T, 0): "a", (T, 1): "a"}
    assert asked_since(seen, {}, 0.0) == {}, "nothing is asked of one whose target names it"
    assert actions(seen, me("a", {0: 101, 1: 102})) == [
        Assign({"a": (Target(6, {T: [0]}), 49)}, {}, 30),
    ]


def test_a_partition_in_no_target_is_given_to_its_owner() -> None:
    seen = snapshot("a", "b", leader="a", targets=["a", None], owners={0: A0, 1: (Owner("b", 1), 7)})
    assert actions(seen, me("a", {0: 101})) == [assign(["a", "b"], "b")]


def test_members_of_another_layout_are_given_nothing() -> None:
    seen = snapshot("a", "b", leader="a", targets=["a", "a"])
    seen.members["b"] = replace(seen.members["b"], layout=1)
    seen.targets.pop("b")
    assert actions(seen, me("a", {0: 1, 1: 2})) == []


def test_x6_a_free_partition_is_claimed_with_the_next_epoch() -> None:
    seen = snapshot("a", "b", leader="b", targets=["a", "b"], owners={0: FREE})
    assert actions(seen, me("a")) == [Claim(0, 104, 5, None)]


def test_x6_a_partition_that_was_never_owned_is_claimed() -> None:
    assert actions(snapshot("a", "b", leader="b", targets=["a", "b"]), me("a")) == [Claim(0, ABSENT, 1, None)]


def test_x6_nothing_is_claimed_from_one_who_lives() -> None:
    seen = snapshot("a", "b", leader="a", targets=["b", "a"], owners={0: A0})
    assert actions(seen, me("b")) == []


def test_g1_a_claim_from_the_dead_names_whose_absence_it_expects() -> None:
    seen = snapshot("b", leader="b", targets=["b", "b"], owners={0: A0})
    assert Claim(0, 101, 2, "a") in actions(seen, me("b"))


def test_r5_an_own_claim_whose_reply_was_lost_is_claimed_again() -> None:
    seen = snapshot("a", "b", leader="b", targets=["a", "b"], owners={0: A0})
    assert actions(seen, me("a")) == [Claim(0, 101, 2, None)]


def test_x6_what_is_meant_for_another_is_revoked_drained_and_released() -> None:
    seen = snapshot("a", "b", leader="b", targets=["b", "b"], owners={0: A0})
    assert actions(seen, me("a", {0: 101})) == [Revoke(0)]
    assert actions(seen, me("a", {0: 101}, revoking=[0])) == []
    assert actions(seen, me("a", {0: 101}, revoking=[0], drained=[0])) == [Release(0)]


def test_what_is_to_stay_after_all_is_resumed() -> None:
    seen = snapshot("a", "b", leader="b", targets=["a", "b"], owners={0: A0})
    assert actions(seen, me("a", {0: 101}, revoking=[0], drained=[0])) == [Resume(0)]


def test_x7_what_stays_is_left_alone() -> None:
    seen = snapshot("a", "b", leader="b", targets=["a", "b"], owners={0: A0, 1: A1})
    assert actions(seen, me("a", {0: 101, 1: 102})) == [Revoke(1)]


def test_x8_what_somebody_has_taken_is_lost() -> None:
    seen = snapshot("a", "b", leader="b", targets=["b", "b"], owners={0: FREE})
    assert actions(seen, me("a", {0: 101})) == [Lose(0)]


def test_x9_what_was_lost_and_claimed_again_by_a_late_write_of_its_own_is_lost_too() -> None:
    seen = snapshot("a", "b", leader="b", targets=["a", "b"], owners={0: (Owner("a", 3), 333)})
    assert actions(seen, me("a", {0: 101})) == [Lose(0)]


def test_x8_the_leader_takes_what_is_not_handed_over_in_time() -> None:
    seen = snapshot("a", "b", leader="b", targets=["b", "a"], owners={0: A0})
    asked = asked_since(seen, {}, 100.0)
    assert list(asked) == [((T, 0), 1)]
    assert actions(seen, me("b"), 109.9, asked) == []
    (fence,) = actions(seen, me("b"), 110.0, asked)
    assert fence == Fence("a", {(T, 0): (101, 2)}, Target(5, {T: [1]}), 50, 30)


def test_x8_all_that_is_overdue_of_one_owner_is_taken_by_one_action() -> None:
    seen = snapshot("a", "b", "c", leader="b", targets=["b", "c"], owners={0: A0, 1: A1})
    asked = asked_since(seen, {}, 100.0)
    assert actions(seen, me("b"), 110.0, asked) == [Fence("a", {(T, 0): (101, 2), (T, 1): (102, 3)}, Target(5), 50, 30)]


def test_x8_nobody_but_the_leader_fences() -> None:
    seen = snapshot("a", "b", "c", leader="c", targets=["b", "c"], owners={0: A0})
    assert actions(seen, me("b"), 1_000.0, asked_since(seen, {}, 0.0)) == []


def test_g9_the_hand_over_time_does_not_begin_anew_when_another_one_asks() -> None:
    first = snapshot("a", "b", leader="b", targets=["b", "b"], owners={0: A0})
    then = snapshot("a", "b", "c", leader="b", targets=["c", "b"], owners={0: A0})
    asked = asked_since(then, asked_since(first, {}, 100.0), 105.0)
    assert asked == {((T, 0), 1): 100.0}


def test_g9_the_time_begins_anew_for_another_owner() -> None:
    first = snapshot("a", "b", leader="b", targets=["b", "b"], owners={0: A0})
    then = snapshot("a", "b", leader="b", targets=["b", "b"], owners={0: (Owner("a", 9), 109)})
    assert asked_since(then, asked_since(first, {}, 100.0), 105.0) == {((T, 0), 9): 105.0}


def test_nothing_is_asked_of_the_dead_or_of_the_one_it_is_meant_for() -> None:
    seen = snapshot("b", leader="b", targets=["b", "b"], owners={0: A0, 1: (Owner("b", 1), 7)})
    assert asked_since(seen, {}, 0.0) == {}


def test_a_member_reads_the_owners_of_what_it_gains_and_loses() -> None:
    mine = Target(5, {T: [0, 1]})
    assert moving(mine, me("a", {0: 101, 1: 102})) == set()
    assert moving(mine, me("a", {0: 101})) == {1}, "it waits for that one"
    assert moving(Target(5, {T: [0]}), me("a", {0: 101, 1: 102})) == {1}, "it gives that one up"
    assert moving(mine, me("a", {0: 101, 1: 102}, revoking=[1])) == {1}, "it may have been taken before it is resumed"
    assert moving(Target(5, {T: [0, 7], "other": [1]}), me("a", {0: 101})) == set(), "its topic has no partition 7"


def test_an_owner_key_that_was_not_read_counts_as_unchanged() -> None:
    seen = snapshot("a", "b", leader="b", targets=["a", "b"])
    assert actions(seen, me("a", {0: 101})) == []
    seen = snapshot("a", "b", leader="b", targets=["a", "b"], owners={0: FREE})
    assert actions(seen, me("a", {0: 101})) == [Lose(0)]


@pytest.mark.parametrize(
    ("own_s", "due_at"), [(3.0, 103.0), (60.0, 160.0), (None, 110.0)], ids=["shorter", "longer", "of version 0.1"]
)
def test_x8_the_time_of_the_owner_counts_or_the_leaders_if_its_record_states_none(
    own_s: float | None, due_at: float
) -> None:
    seen = snapshot("a", "b", leader="b", targets=["b", "a"], owners={0: A0, 1: A1})
    seen = replace(seen, members={**seen.members, "a": replace(seen.members["a"], handover_s=own_s)})
    asked = asked_since(seen, {}, 100.0)
    fence = Fence("a", {(T, 0): (101, 2)}, Target(5, {T: [1]}), 50, 30)
    assert actions(seen, me("b"), due_at - 0.1, asked) == []
    assert actions(seen, me("b"), due_at, asked) == [fence]
    assert next_fence_at(seen, "b", asked, 10.0) == due_at


def test_x8_only_the_leader_has_a_time_to_fence() -> None:
    seen = snapshot("a", "b", "c", leader="b", targets=["b", "a"], owners={0: A0, 1: A1})
    asked = asked_since(seen, {}, 100.0)
    assert next_fence_at(seen, "b", asked, 10.0) == 110.0
    assert next_fence_at(seen, "a", asked, 10.0) == math.inf
    assert next_fence_at(seen, "c", asked, 10.0) == math.inf
    assert next_fence_at(seen, "b", {}, 10.0) == math.inf


def test_a_member_record_of_version_0_1_states_no_hand_over_time() -> None:
    old = b'{"name":"w","topic":"t","topic_name":"orders","partitions":2,"assignor":"sticky","is_alone":false}'
    assert Member.load("k", old).handover_s is None
    assert Member.load("k", Member("w", T, "orders", 2, handover_s=2.5).dump()).handover_s == 2.5
