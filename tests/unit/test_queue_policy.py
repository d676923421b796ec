"""What a policy and a backoff accept, and how long they let an item wait."""

from __future__ import annotations

from typing import Any

import pytest

from pxrs import ExponentialBackoff
from pxrs.errors import InvalidQueue


@pytest.mark.parametrize("deliveries", [1, 2, 5, 1_000])
@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_q3_no_jitter_goes_beyond_the_cap(deliveries: int, chance: float) -> None:
    assert ExponentialBackoff(first=4, cap=10, jitter=1).delay_s(deliveries, lambda: chance) <= 10


def test_q3_what_waits_for_the_cap_is_spread_too() -> None:
    waits = [ExponentialBackoff(first=10, cap=10, jitter=0.2).delay_s(1, lambda n=n: n / 10) for n in range(11)]
    assert waits == sorted(set(waits))
    assert (waits[0], waits[-1]) == (8, 10)


@pytest.mark.parametrize("name", ["factor", "jitter"])
@pytest.mark.parametrize("value", ["1", None, True, float("nan")])
def test_q3_a_part_of_a_backoff_that_is_no_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidQueue, match=name):
        ExponentialBackoff(**{name: value})
