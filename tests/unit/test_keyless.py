"""Messages without a key: which partitions they go to."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from pxrs.producer.keyless import KeylessSpread


def nulls(count: int) -> pa.Array:
    return pa.nulls(count, pa.int32())


@pytest.mark.parametrize("seed", range(20))
def test_no_partition_is_more_than_a_run_ahead_of_another(seed: int) -> None:
    chance = random.Random(seed)
    partitions, run = chance.choice((1, 3, 8)), chance.choice((1, 7, 100))
    spread = KeylessSpread(partitions, chance.randrange(partitions), run)
    counts = [0] * partitions
    for _ in range(300):
        rows = chance.choice((1, run, chance.randrange(1, 3 * run * partitions)))
        found = spread.fill(nulls(rows), rows).to_pylist()
        assert len(found) == rows
        for number in found:
            counts[number] += 1
        used = [count for count in map(found.count, range(partitions)) if count]
        assert len(used) <= max(1, -(-rows // run)), "no more runs than needed"
        assert max(used) - min(used) <= 1
        assert max(counts) - min(counts) <= run, f"{counts}, seed {seed}"


def test_only_messages_without_a_partition_are_given_one() -> None:
    chosen = pa.array([5, None, 6, None, None], pa.int32())
    assert KeylessSpread(8, 3).fill(chosen, 100).to_pylist() == [5, 3, 6, 3, 3]
    whole = pa.array([1, 2], pa.int32())
    assert KeylessSpread(8, 3).fill(whole, 100) is whole


def test_a_broken_partition_is_left_out_while_there_are_others() -> None:
    spread = KeylessSpread(3, 0, 1)
    assert set(spread.fill(nulls(30), 30, {0, 2}).to_pylist()) == {1}
    assert set(spread.fill(nulls(30), 30, {0, 1, 2}).to_pylist()) == {0, 1, 2}
