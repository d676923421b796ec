"""K3 and S1, S6: which offsets a batch reads, and whose checkpoint counts."""

import math
from itertools import pairwise

import pytest

from pxrs.errors import CheckpointsDiffer
from pxrs.group.records import Checkpoint
from pxrs.publishing.planning import (
    Delay,
    IdRange,
    Range,
    Span,
    batch_between,
    first_of,
    gather,
    may_replay,
    resume_at,
    share_out,
    split,
    split_ids,
)

DONE = Span(4, 10, 20)


def test_a_batch_is_what_differs_and_begins_where_it_says() -> None:
    start = {0: Span(1, 0, 5), 1: Span(1, 0, 5)}
    end = {0: Span(1, 0, 5), 1: Span(3, 9, 12), 2: Span(1, 4, 4)}
    assert batch_between(start, end) == {1: Span(3, 9, 12)}


@pytest.mark.parametrize(
    ("checkpoint", "position"),
    [
        (Checkpoint(20, by="m", epoch=4), 20),
        (Checkpoint(10, by="start", epoch=0), 20),  # Spark was ahead when the driver died
        (Checkpoint(10, by="m", epoch=6), 20),  # released unchanged by an incarnation that planned nothing
        (Checkpoint(3, by="reset", epoch=5), 3),
        (Checkpoint(90, by="reset", epoch=5), 90),
        (Checkpoint(3, by="reset", epoch=2), 20),  # a reset from before the range was taken
    ],
)
def test_k3_where_a_partition_goes_on(checkpoint: Checkpoint, position: int) -> None:
    assert resume_at(DONE, checkpoint, False, "t/0") == position


def test_nothing_finished_goes_on_at_the_groups_checkpoint() -> None:
    assert resume_at(None, Checkpoint(7), False, "t/0") == 7


def test_a_group_that_is_further_than_an_only_query_means_a_restored_checkpoint() -> None:
    with pytest.raises(CheckpointsDiffer, match=r"new checkpoint location.*neither a pxrs topic nor files.* 20$"):
        resume_at(DONE, Checkpoint(25, by="m", epoch=9), False, "t/0")
    assert resume_at(DONE, Checkpoint(25, by="m", epoch=9), True, "t/0") == 25


SPAN = Span(5, 20, 30)


@pytest.mark.parametrize(
    ("checkpoint", "alone", "shared"),
    [
        (Checkpoint(20, by="m", epoch=4), True, True),
        (Checkpoint(10, by="m", epoch=4), True, True),  # Spark finished the batch before it, the group does not know
        (Checkpoint(30, by="spark", epoch=5), True, False),  # published with the checkpoint
        (Checkpoint(25, by="m", epoch=7), None, False),
        (Checkpoint(40, by="m", epoch=7), None, False),
        (Checkpoint(30, by="reset", epoch=7), None, False),
        (Checkpoint(0, by="reset", epoch=7), None, False),
    ],
)
def test_k3_whether_a_batch_may_be_read_again(checkpoint: Checkpoint, alone: bool | None, shared: bool) -> None:
    """None: an error that says what to do."""
    assert may_replay(SPAN, DONE, checkpoint, True, "t/0") is shared
    if alone is None:
        with pytest.raises(CheckpointsDiffer, match=r"new checkpoint location.*neither a pxrs topic nor files.* 20$"):
            may_replay(SPAN, DONE, checkpoint, False, "t/0")
    else:
        assert may_replay(SPAN, DONE, checkpoint, False, "t/0") is alone


@pytest.mark.parametrize("rows_max", [1, 3, 10, 99, 1000])
def test_rows_are_shared_out_by_what_each_has(rows_max: int) -> None:
    available = {0: 100, 1: 10, 2: 1, 3: 0}
    shares = share_out(available, rows_max)
    assert sum(shares.values()) == min(rows_max, 111)
    assert all(shares[number] <= available[number] for number in available)


def test_a_short_partition_has_a_row_beside_one_that_is_filled_again_and_again() -> None:
    assert share_out({0: 1_000_000, 1: 5, 2: 1}, 10) == {0: 8, 1: 1, 2: 1}
    left = {0: 10_000, 1: 5}
    for _ in range(5):
        left[0] += 10
        for number, count in share_out(left, 10).items():
            left[number] -= count
    assert left[1] == 0


def test_partitions_have_their_turn() -> None:
    assert first_of([0, 1, 2, 3], -1, 2) == [0, 1]
    assert first_of([0, 1, 2, 3], 1, 3) == [2, 3, 0]


def test_ranges_are_split_into_enough_tasks_and_nothing_changes() -> None:
    ranges = [Range(0, 0, 1000), Range(1, 5, 10), Range(2, 7, 8)]
    parts = split(ranges, 8)
    assert sum(map(len, parts)) >= 8
    for each, mine in zip(ranges, parts, strict=True):
        assert {part.partition for part in mine} == {each.partition}
        assert mine[0].start == each.start
        assert mine[-1].end == each.end
        assert all(one.end == two.start for one, two in pairwise(mine))
    assert split(ranges, 2) == [[each] for each in ranges]
    assert split([], 4) == []
    assert split([Range(0, 0, 2)], 5) == [[Range(0, 0, 1), Range(0, 1, 2)]]
    assert split([Range(0, 0, 0)], 4) == [[Range(0, 0, 0)]], "a batch of which nothing may be read has a task too"


def test_short_ranges_share_a_task_and_long_ones_have_their_own() -> None:
    short = [Range(number, 0, 5) for number in range(6)]
    assert gather(short, 10) == [short[:2], short[2:4], short[4:]]
    long = [Range(number, 0, 50) for number in range(3)]
    assert gather(long, 10) == [[each] for each in long]
    assert gather([], 10) == []


def test_x21_a_table_is_read_once_for_all_its_partitions() -> None:
    ranges = [Range(number, 1, 1_000) for number in range(64)]
    assert split_ids(ranges, None) == [IdRange(1, 1_000)]
    tasks = split_ids(ranges, 7)
    assert len(tasks) == 7
    assert (tasks[0].start, tasks[-1].end) == (1, 1_000)
    assert all(one.end == two.start for one, two in pairwise(tasks))


def test_x21_ids_between_the_ranges_of_all_partitions_are_not_read() -> None:
    ranges = [Range(0, 900, 1_000), Range(1, 0, 10), Range(2, 5, 20), Range(3, 20, 25), Range(4, 7, 7)]
    assert split_ids(ranges, None) == [IdRange(0, 25), IdRange(900, 1_000)]
    assert split_ids([Range(0, 7, 7)], None) == split_ids([], 3) == []
    assert split_ids([Range(0, 3, 5)], 9) == [IdRange(3, 4), IdRange(4, 5)]


def test_x21_a_large_table_has_more_tasks_and_one_with_sparse_ids_a_bounded_number() -> None:
    assert len(split_ids([Range(0, 0, 1_000_000)], None)) == 10
    sparse = split_ids([Range(0, 1, 1 << 62)], None)
    assert len(sparse) == 256
    assert (sparse[0].start, sparse[-1].end) == (1, 1 << 62)
    assert all(one.end == two.start for one, two in pairwise(sparse))


def test_a_batch_with_few_rows_is_delayed_until_there_are_more_or_its_first_rows_have_waited() -> None:
    delay = Delay(rows_min=10, delay_s=5.0)
    assert delay.is_due(0, now=100.0), "an empty batch is no batch: nothing is delayed"
    assert delay.due == math.inf
    assert not delay.is_due(3, now=101.0)
    assert delay.due == 106.0
    assert not delay.is_due(9, now=105.9)
    assert delay.is_due(9, now=106.0), "counted from the first rows, whatever came since"
    assert not delay.is_due(1, now=106.1), "the next batch counts anew"
    assert delay.is_due(10, now=106.2)
    assert delay.due == math.inf
