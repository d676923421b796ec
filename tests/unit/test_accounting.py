"""The reckoning itself: what it must find in journals that are wrong, with offsets that have gaps and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from pxrs.testing.accounting import Account, Ownership, account, read_journals

IDS = [3, 4, 9, 20, 21]


def owned(
    epoch: int, start: int, handled: list[int], at: float | None = None, kept: list[tuple[int, float]] | None = None
) -> Ownership:
    at = float(epoch) if at is None else at
    moments = [at + 0.1] * len(handled)
    offsets, kept_at = [offset for offset, _ in kept or []], [moment for _, moment in kept or []]
    return Ownership(0, epoch, f"w{epoch}", start, at, handled, moments, offsets, kept_at)


@pytest.mark.parametrize("messages", [5, range(5)])
def test_offsets_without_gaps_are_named_by_their_end(messages: int | range) -> None:
    found = account([owned(1, 0, [0, 1, 2]), owned(2, 2, [2, 3, 4])], {0: messages})
    assert found == Account(5, 0, 0, 1, 0, 0, 2)


def test_a_start_in_a_gap_is_as_good_as_one_at_its_end() -> None:
    found = account([owned(1, 0, [3, 4]), owned(2, 7, [9]), owned(3, 15, [20, 21]), owned(4, 40, [])], {0: IDS})
    assert found == Account(5, 0, 0, 0, 0, 0, 4)


def test_what_the_group_was_told_to_begin_behind_does_not_count() -> None:
    assert account([owned(1, 5, [9, 20, 21])], {0: IDS}, {0: 5}) == Account(3, 0, 0, 0, 0, 0, 1)


@pytest.mark.parametrize(
    ("ownerships", "expected"),
    [
        ([owned(1, 0, [3, 4, 9, 20])], Account(5, 1, 0, 0, 0, 0, 1)),
        ([owned(1, 0, [3, 4, 20, 21])], Account(5, 1, 1, 0, 0, 0, 1)),
        ([owned(1, 0, [4, 3, 9, 20, 21])], Account(5, 0, 1, 0, 0, 0, 1)),
        ([owned(1, 0, [3, 4, 5, 9, 20, 21])], Account(5, 0, 1, 0, 0, 0, 1)),
        ([owned(1, 0, [3, 4]), owned(2, 10, [20, 21])], Account(5, 1, 0, 0, 1, 0, 2)),
        ([owned(1, 0, [3, 4]), owned(2, 4, [4, 9]), owned(3, 0, [3, 4, 9, 20, 21])], Account(5, 0, 0, 4, 1, 0, 3)),
        ([owned(1, 0, [3, 4], kept=[(5, 1.5)]), owned(2, 4, [4, 9, 20, 21])], Account(5, 0, 0, 1, 1, 0, 2)),
        ([owned(1, 0, [3, 4], kept=[(5, 2.5)]), owned(2, 5, [9, 20, 21])], Account(5, 0, 0, 0, 0, 0, 2, 1)),
        ([owned(1, 0, [3, 4], at=3.0), owned(2, 5, [9, 20, 21])], Account(5, 0, 0, 0, 0, 2, 2)),
    ],
    ids=["the end", "the middle", "order", "no such row", "passed over", "a start", "a checkpoint", "fence", "late"],
)
def test_what_is_wrong_is_found(ownerships: list[Ownership], expected: Account) -> None:
    assert account(ownerships, {0: IDS}) == expected


def test_journals_tell_of_ownerships_up_to_the_line_that_a_kill_cut_off(tmp_path: Path) -> None:
    lines = ["kept 1 8 30 1.0", "assigned 1 8 30 1.1", "handled 1 8 31 1.2", "kept 1 8 32 1.3", "handled 1 8"]
    (tmp_path / "w.journal").write_text("\n".join(lines))
    found = read_journals([tmp_path / "w.journal", tmp_path / "never-started.journal"])
    assert found == [Ownership(1, 8, "w", 30, 1.1, [31], [1.2], [30, 32], [1.0, 1.3])]


def test_one_that_slept_through_its_ownership_and_did_nothing_is_no_wrong_start() -> None:
    slept = owned(2, 9, [], at=9.0)  # claimed after the first, and looked when the third had gone on
    assert account([owned(1, 0, [3, 4]), slept, owned(3, 4, [4, 9, 20, 21])], {0: IDS}).wrong_starts == 0
