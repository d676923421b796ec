"""Which topics a reader chooses, and which offsets stand for a boundary that a user has given."""

import pytest

from pxrs.errors import InvalidOption
from pxrs.publishing.selection import FROM_START, TO_END, Boundary, Topics, resolve

EXTENTS = {0: (3, 10), 1: (5, 20)}


def offset_at(number: int, time_us: int) -> int:
    """A message in each microsecond: the one at offset n is of the time n."""
    return min(max(time_us, EXTENTS[number][0]), EXTENTS[number][1])


def starting(**given: object) -> Boundary:
    return Boundary("startingOffsets", "earliest", **given)  # type: ignore[arg-type]


def resolved(boundary: Boundary) -> dict[int, int]:
    return resolve(boundary, "t", EXTENTS, offset_at)


def test_offsets_become_numbers_within_what_is_there() -> None:
    assert resolved(FROM_START) == resolved(Boundary("startingOffsets", "committed")) == {0: 3, 1: 5}
    assert resolved(TO_END) == {0: 10, 1: 20}
    assert resolved(starting(offsets={"t": {0: -2, 1: 7}})) == {0: 3, 1: 7}
    assert resolved(starting(offsets={"t": {0: 10, 1: -1}})) == {0: 10, 1: 20}
    with pytest.raises(InvalidOption, match="option startingOffsets: t/0 ends at offset 10, but 11 is beyond it"):
        resolved(starting(offsets={"t": {0: 11, 1: 5}}))
    assert resolve(starting(offsets={"t": {0: 11, 1: 5}}), "t", EXTENTS, offset_at, lambda offset: offset < 12) == {
        0: 11,
        1: 5,
    }


def test_partitions_that_are_left_out_or_not_read_are_named() -> None:
    with pytest.raises(InvalidOption, match="it lacks partition 1 of t: name partitions 0, 1"):
        resolved(starting(offsets={"t": {0: 3}}))
    with pytest.raises(InvalidOption, match="it names partitions 2 to 4 of t: name only partitions 0, 1"):
        resolved(starting(times_us={"t": dict.fromkeys(range(5), 0)}))


def test_times_become_offsets_for_all_partitions_or_for_each() -> None:
    assert resolved(starting(time_us=7)) == {0: 7, 1: 7}
    assert resolved(starting(times_us={"t": {0: 4, 1: 9}})) == {0: 4, 1: 9}
    assert resolved(starting(time_us=15)) == {0: 10, 1: 15}, "its end stands for a partition without such a message"
    with pytest.raises(InvalidOption, match=r"t has no message of that time or later in partition 0\. .* to latest"):
        resolved(starting(time_us=15, must_match=True))


def test_offsets_by_topic_are_for_exactly_the_topics_that_are_read() -> None:
    given = starting(offsets={"a": {0: 0}, "b": {0: 0}})
    given.check_topics(["b", "a"])
    FROM_START.check_topics(["a"])
    with pytest.raises(InvalidOption, match="it lacks c: name every topic"):
        given.check_topics(["a", "b", "c"])
    with pytest.raises(InvalidOption, match="it names b, but the topics that are read are a"):
        given.check_topics(["a"])


def test_only_a_number_counts_as_an_offset_that_the_user_gave() -> None:
    given = starting(offsets={"t": {0: 7, 1: -2}})
    assert [given.is_offset_given("t", number) for number in (0, 1, 2)] == [True, False, False]
    assert not given.is_offset_given("other", 0)
    assert not starting(time_us=7).is_offset_given("t", 0)


def test_topics_by_name_by_pattern_and_by_partition() -> None:
    existing = ["orders", "returns", "orders-old"]
    assert Topics(("b", "a")).among(existing) == ["b", "a"]
    assert Topics(pattern="orders|ret").among(existing) == ["orders"], "the whole name has to match"
    assert Topics(pattern="orders.*").among(existing) == ["orders", "orders-old"]
    assigned = Topics(assigned={"orders": (0, 2)})
    assert assigned.among(existing) == ["orders"]
    assert assigned.partitions_of("orders", 3) == [0, 2]
    assert Topics(("a",)).partitions_of("a", 3) == [0, 1, 2]
    with pytest.raises(InvalidOption, match="option assign: orders has only partitions 0, 1, not 2"):
        assigned.partitions_of("orders", 2)
    assert [Topics(("a",)).only, Topics(("a", "b")).only, assigned.only, Topics(pattern="a").only] == ["a", *[None] * 3]
