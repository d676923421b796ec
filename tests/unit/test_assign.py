"""Who should have what: fair, with the fewest moves, and the same everywhere (X4)."""

from __future__ import annotations

import itertools
import random

import pytest

from pxrs.errors import InvalidGroup
from pxrs.group.assign import ASSIGNORS, assignor_named, sticky
from pxrs.testing.simulator import fewest_moves

SIZES = {1: [8], 2: [4, 4], 3: [3, 3, 2], 4: [2, 2, 2, 2], 5: [2, 2, 2, 1, 1], 10: [1] * 8 + [0, 0]}


def sizes(members: list[str], targets: list[str | None]) -> list[int]:
    return sorted((targets.count(member) for member in members), reverse=True)


def moves(before: list[str | None], after: list[str | None]) -> int:
    return sum(old != new for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("name", ASSIGNORS)
@pytest.mark.parametrize(("count", "expected"), SIZES.items())
def test_x4_eight_partitions_are_shared_fairly(name: str, count: int, expected: list[int]) -> None:
    members = [f"m{number}" for number in range(count)]
    assert sizes(members, assignor_named(name)(members, 8, [])) == expected


@pytest.mark.parametrize("name", ASSIGNORS)
def test_without_members_nothing_is_meant_for_anybody(name: str) -> None:
    assert assignor_named(name)([], 3, ["gone"] * 3) == [None] * 3


@pytest.mark.parametrize("name", ASSIGNORS)
def test_x4_the_same_input_gives_the_same_assignment(name: str) -> None:
    before: list[str | None] = ["b", "b", None, "gone", "a"]
    assign = assignor_named(name)
    assert assign(["a", "b", "c"], 5, before) == assign(["a", "b", "c"], 5, list(before))


def test_x4_sticky_moves_as_few_as_any_fair_assignment_could() -> None:
    """Against every fair assignment of small groups."""
    for count, partitions in itertools.product((1, 2, 3), (1, 2, 3, 4)):
        members = [f"m{number}" for number in range(count)]
        every: list[list[str | None]] = [list(each) for each in itertools.product(members, repeat=partitions)]
        fair = [each for each in every if max(sizes(members, each)) - min(sizes(members, each)) <= 1]
        for before in itertools.product([*members, "gone", None], repeat=partitions):
            found = sticky(members, partitions, before)
            fewest = min(moves(list(before), each) for each in fair)
            assert found in fair
            assert moves(list(before), found) == fewest
            assert fewest == fewest_moves([before.count(member) for member in members], partitions)


def test_x4_sticky_moves_the_fewest_in_large_groups() -> None:
    rng = random.Random(7)
    for _ in range(300):
        members = [f"m{number}" for number in range(rng.randint(1, 20))]
        partitions = rng.randint(1, 64)
        before = [rng.choice([*members, "gone", None]) for _ in range(partitions)]
        found = sticky(members, partitions, before)
        assert max(sizes(members, found)) - min(sizes(members, found)) <= 1
        assert moves(before, found) == fewest_moves([before.count(member) for member in members], partitions)


def test_x5_sticky_leaves_a_fair_assignment_as_it_is() -> None:
    members = ["a", "b", "c"]
    found = sticky(members, 8, [])
    assert sticky(members, 8, found) == found
    assert sticky(list(reversed(members)), 8, found) == found


def test_an_unknown_assignor_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidGroup, match="sticky"):
        assignor_named("best")
