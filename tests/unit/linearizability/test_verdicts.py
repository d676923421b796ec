"""The checker must accept every history of a correct store, and no other: histories by hand, one for each anomaly."""

from dataclasses import replace

import pytest

from pxrs.testing.linearizability import ABSENT, Operation, check
from tests.unit.linearizability.histories import commit, exhaustive, get, lost, put, simulate


def assert_accepts(*history: Operation) -> None:
    verdict = check(history)
    assert verdict.ok, verdict.explanation
    assert exhaustive(history)


def assert_rejects(*history: Operation) -> str:
    verdict = check(history)
    assert not verdict.ok
    assert verdict.stuck
    assert not exhaustive(history)
    return verdict.explanation


# --- what a correct store may do ---


def test_r1_nothing_is_linearizable() -> None:
    assert_accepts()


def test_r1_calls_one_after_the_other_see_each_other() -> None:
    assert_accepts(
        get((0, 1), "a", None, 0),
        put((2, 3), "a", b"1", 7, expect={"a": ABSENT}),
        get((4, 5), "a", b"1", 7),
        commit((6, 7), expect={"a": 7}, delete=("a",)),
        get((8, 9), "a", None, 0),
        commit((10, 11), delete=("a",)),
        put((12, 13), "a", b"2", 3, expect={"a": ABSENT}),  # versions need not grow
        commit((14, 15), "conflict", expect={"a": 7}),
        commit((16, 17), expect={"a": 3}),
    )


def test_r1_overlapping_calls_may_go_in_either_order() -> None:
    write = put((0, 10), "a", b"1", 1)
    assert_accepts(write, get((1, 2), "a", None, 0), get((3, 4), "a", b"1", 1), get((5, 6), "a", b"1", 1))
    assert_accepts(write, get((1, 2), "a", b"1", 1))
    assert_accepts(write, get((1, 2), "a", None, 0))


def test_r1_a_tie_on_the_clock_is_an_overlap() -> None:
    assert_accepts(put((0, 5), "a", b"1", 1), get((5, 6), "a", None, 0))


def test_r1_a_get_that_never_returned_says_nothing() -> None:
    assert check([get((0, None), "a", b"never written", 9)]).ok


def test_r1_keys_that_no_commit_connects_are_judged_apart() -> None:
    verdict = check([put((0, 1), "a", b"1", 1), put((0, 1), "b", b"1", 1), get((2, 3), "b", None, 0)])
    assert not verdict.ok
    assert "keys b;" in verdict.explanation


@pytest.mark.parametrize("seed", range(40))
def test_r1_histories_of_a_correct_store_are_accepted(seed: int) -> None:
    history = simulate(seed, clients=2 + seed % 5, operations=150)
    verdict = check(history, max_steps=5_000)
    assert verdict.ok, verdict.explanation


@pytest.mark.parametrize("seed", range(40))
def test_r5_histories_of_a_correct_store_with_lost_replies_are_accepted(seed: int) -> None:
    share = (0.02, 0.1, 0.3)[seed % 3]
    values = (0, 0, 4)[seed % 3]
    history = simulate(seed, clients=2 + seed % 5, operations=120, lost_share=share, values=values)
    verdict = check(history, max_steps=100_000)
    assert verdict.ok, verdict.explanation


@pytest.mark.parametrize("lost_share", [0.0, 0.02])
def test_r1_a_thousand_contended_operations_are_decided_in_few_steps(lost_share: float) -> None:
    history = simulate(1, clients=5, operations=1000, lost_share=lost_share)
    verdict = check(history, max_steps=20_000)
    assert verdict.ok, verdict.explanation


# --- what it may not ---


def test_r1_a_stale_read_is_rejected() -> None:
    text = assert_rejects(
        put((0, 1), "a", b"1", 1), put((2, 3), "a", b"2", 2, client=1), get((4, 5), "a", b"1", 1, client=2)
    )
    assert "still to be observed by: client 2 [4.000000, 5.000000] get a -> b'1' @1" in text


def test_r1_a_read_that_goes_back_is_rejected() -> None:
    assert_rejects(
        put((0, 10), "a", b"1", 1),
        get((1, 2), "a", b"1", 1, client=1),
        get((3, 4), "a", None, 0, client=2),
    )


def test_r1_a_read_from_the_future_is_rejected() -> None:
    assert_rejects(get((0, 1), "a", b"1", 1), put((2, 3), "a", b"1", 1))


def test_r1_a_lost_update_is_rejected() -> None:
    first = put((0, 1), "a", b"0", 1)
    assert_rejects(
        first,
        put((2, 9), "a", b"1", 2, expect={"a": 1}, client=1),
        put((2, 9), "a", b"2", 3, expect={"a": 1}, client=2),
    )


def test_r7_write_skew_on_absent_keys_is_rejected() -> None:
    expect = {"a": ABSENT, "b": ABSENT}
    assert_rejects(
        put((0, 9), "a", b"1", 1, expect=expect, client=1), put((0, 9), "b", b"2", 2, expect=expect, client=2)
    )


def test_r1_a_torn_commit_is_rejected() -> None:
    both = commit((0, 9), put={"a": b"1", "b": b"1"}, versions={"a": 1, "b": 1})
    seen = get((1, 2), "a", b"1", 1, client=1)
    assert_accepts(both, seen, get((3, 4), "b", b"1", 1, client=1))
    assert_rejects(both, seen, get((3, 4), "b", None, 0, client=1))


def test_r1_a_conflict_that_no_state_justifies_is_rejected() -> None:
    first = put((0, 1), "a", b"1", 1)
    conflict = commit((2, 5), "conflict", expect={"a": 1}, client=1)
    text = assert_rejects(first, conflict)
    assert "all its expectations hold" in text
    assert_rejects(first, commit((2, 5), "conflict", put={"a": b"2"}, client=1))
    assert_rejects(first, conflict, put((6, 7), "a", b"2", 2))
    assert_accepts(first, conflict, put((4, 7), "a", b"2", 2))


def test_r1_a_commit_of_nothing_cannot_conflict() -> None:
    assert_rejects(commit((0, 1), "conflict"))


def test_r1_an_acknowledged_commit_that_vanished_is_rejected() -> None:
    text = assert_rejects(put((0, 1), "a", b"1", 1), get((2, 3), "a", None, 0, client=1))
    assert "a is @1, not absent" in text
    assert_rejects(
        put((0, 1), "a", b"1", 1),
        commit((2, 3), expect={"a": 1}, delete=("a",)),
        get((4, 5), "a", b"1", 1, client=1),
    )


def test_r1_a_reused_version_is_rejected() -> None:
    text = assert_rejects(
        put((0, 1), "a", b"1", 7),
        commit((2, 3), delete=("a",)),
        put((4, 5), "a", b"2", 7, client=3),
    )
    assert "a@7 is also the version of: client 0" in text
    assert_rejects(put((0, 1), "a", b"1", 7), lost(2, put={"a": b"2"}), get((4, 5), "a", b"2", 7))


def test_r1_an_ok_commit_whose_expectation_never_held_is_rejected() -> None:
    assert_rejects(put((0, 1), "a", b"1", 1), put((2, 3), "a", b"2", 2, expect={"a": 5}))
    assert_rejects(put((0, 1), "a", b"1", 1), commit((2, 3), expect={"a": ABSENT}))


@pytest.mark.parametrize("versions", [{}, {"a": 0}, {"a": -3}, {"a": 1, "b": 2}])
def test_r1_an_ok_commit_must_return_the_versions_of_what_it_put(versions: dict[str, int]) -> None:
    assert_rejects(commit((0, 1), put={"a": b"1"}, versions=versions))


@pytest.mark.parametrize(("value", "version"), [(None, 1), (b"1", 0), (b"other", 1), (b"1", 2)])
def test_r1_a_get_must_report_value_and_version_as_written(value: bytes | None, version: int) -> None:
    assert_rejects(put((0, 1), "a", b"1", 1), get((2, 3), "a", value, version))


# --- unknown outcomes ---


def test_r5_an_unknown_commit_may_never_happen() -> None:
    assert_accepts(lost(0, put={"a": b"1"}), get((1, 2), "a", None, 0), get((3, 4), "a", None, 0))


def test_r5_an_unknown_commit_may_land_late() -> None:
    late = lost(0, put={"a": b"1"})
    assert_accepts(late, get((1, 2), "a", None, 0), get((3, 4), "a", b"1", 5), get((5, 6), "a", b"1", 5))
    # An unknown outcome that was told at some time does not end the commit then.
    assert_accepts(replace(late, ret=0.5), get((1, 2), "a", None, 0), get((3, 4), "a", b"1", 5))


def test_r5_an_unknown_commit_does_not_happen_before_its_call() -> None:
    assert_rejects(get((0, 1), "a", b"1", 5), lost(2, put={"a": b"1"}))


def test_r5_an_unknown_commit_that_was_seen_and_vanished_is_rejected() -> None:
    late = lost(0, put={"a": b"1"})
    assert_rejects(late, get((1, 2), "a", b"1", 5), get((3, 4), "a", None, 0))


def test_r5_an_unknown_commit_happens_once() -> None:
    late = lost(0, put={"a": b"1"})
    gone = commit((3, 4), delete=("a",))
    assert_rejects(late, get((1, 2), "a", b"1", 5), gone, get((5, 6), "a", b"1", 6))
    assert_rejects(late, get((1, 2), "a", b"1", 5), gone, get((5, 6), "a", b"1", 5))


def test_r5_an_unknown_commit_has_one_version() -> None:
    assert_rejects(lost(0, put={"a": b"1"}), get((1, 2), "a", b"1", 5), get((3, 4), "a", b"1", 6))


def test_r5_an_unknown_commit_is_not_torn() -> None:
    late = lost(0, put={"a": b"1", "b": b"1"})
    assert_accepts(late, get((1, 2), "a", b"1", 5), get((3, 4), "b", b"1", 6))
    assert_rejects(late, get((1, 2), "a", b"1", 5), get((3, 4), "b", None, 0))


def test_r5_an_unknown_commit_needs_its_expectations() -> None:
    first = put((0, 1), "a", b"0", 1)
    assert_accepts(first, lost(2, expect={"a": 1}, put={"a": b"1"}), get((3, 4), "a", b"1", 5))
    assert_rejects(first, lost(2, expect={"a": ABSENT}, put={"a": b"1"}), get((3, 4), "a", b"1", 5))


def test_r5_an_expectation_can_be_the_first_to_tell_an_unknown_version() -> None:
    late = lost(0, put={"a": b"1"})
    follow = put((1, 2), "a", b"2", 9, expect={"a": 5})
    assert_accepts(late, follow)
    assert_accepts(late, follow, get((3, 4), "a", b"2", 9))
    assert_rejects(late, follow, put((3, 4), "a", b"3", 10, expect={"a": 6}))
    assert_rejects(late, follow, get((3, 4), "a", b"1", 5))
    assert_rejects(late, commit((1, 2), expect={"a": 5}), commit((3, 4), expect={"a": 6}))


def test_r5_an_unseen_unknown_commit_can_justify_a_conflict() -> None:
    first = put((0, 1), "a", b"1", 1)
    conflict = commit((3, 4), "conflict", expect={"a": 1})
    assert_accepts(first, lost(2, put={"a": b"2"}), conflict)
    assert_accepts(first, lost(2, delete=("a",)), conflict)
    # Once in effect it stays so: the old version cannot come back after the conflict.
    assert_rejects(first, lost(2, put={"a": b"2"}), conflict, get((5, 6), "a", b"1", 1))
    assert_rejects(first, lost(2, put={"b": b"2"}), conflict)
    assert_rejects(first, lost(5, put={"a": b"2"}), conflict)


def test_r5_a_conflict_is_no_proof_of_the_version_it_expected() -> None:
    late = lost(0, put={"a": b"1"})
    conflict = commit((1, 2), "conflict", expect={"a": 5})
    assert_accepts(late, conflict, get((3, 4), "a", b"1", 5))  # it came after the conflict
    assert_accepts(late, get((1, 2), "a", b"1", 6), commit((3, 4), "conflict", expect={"a": 5}))
    assert_rejects(late, get((1, 2), "a", b"1", 5), commit((3, 4), "conflict", expect={"a": 5}))


def test_r5_equal_values_of_two_unknown_commits_are_told_apart_by_version() -> None:
    twins = [lost(0, put={"a": b"1"}), lost(0, put={"a": b"1"}, client=1)]
    gone = commit((3, 4), delete=("a",))
    assert_accepts(*twins, get((1, 2), "a", b"1", 5), gone, get((5, 6), "a", b"1", 6))
    assert_rejects(*twins, get((1, 2), "a", b"1", 5), gone, get((5, 6), "a", b"1", 5))
    assert_rejects(*twins, *(get((n, n + 0.5), "a", b"1", n) for n in (1, 2, 3)))


def test_r5_one_of_two_equal_unknown_commits_may_stay_unseen() -> None:
    twins = [lost(0, put={"a": b"1"}), lost(0, put={"a": b"1"}, client=1)]
    over = put((3, 4), "a", b"2", 9)
    conflict = commit((5, 6), "conflict", expect={"a": 9})
    assert_accepts(*twins, get((1, 2), "a", b"1", 5), over, conflict)
    assert_rejects(twins[0], get((1, 2), "a", b"1", 5), over, conflict)
    # The second twin cannot have the version of the first, so the delete that expects it cannot land any more.
    remove = lost(0, expect={"a": 5}, delete=("a",), client=2)
    seen: list[Operation] = [get((1, 2), "a", b"1", 5), over, get((5, 6), "a", b"2", 9)]
    assert_rejects(*twins, remove, *seen, get((7, 8), "a", None, 0))


def test_r5_the_unknown_commit_that_is_used_is_the_one_that_can_be_spared() -> None:
    first = put((1, 2), "a", b"0", 1)
    conflict = commit((3, 4), "conflict", expect={"a": 1})
    assert_accepts(
        lost(0, put={"a": b"1"}),
        lost(0.5, put={"a": b"2"}),
        lost(100, put={"a": b"1"}),
        first,
        conflict,  # due to b"2", or else b"1" could not come after b"3"
        put((4.3, 4.6), "a", b"3", 2),
        get((5, 6), "a", b"1", 5),
    )
    # Of two with the same effect, only one has expectations that hold.
    second = put((2.3, 2.6), "a", b"0", 2)
    late = commit((3, 4), "conflict", expect={"a": 2})
    assert_accepts(lost(0, expect={"a": 1}, put={"a": b"1"}), lost(0.5, put={"a": b"1"}), first, second, late)
