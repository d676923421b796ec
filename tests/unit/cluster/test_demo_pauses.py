"""How long nothing happened, as `pxrs cluster demo` reckons it."""

from __future__ import annotations

import pytest

from pxrs.cli.cluster.demo.pauses import Pause, longest


@pytest.mark.parametrize(
    ("moments", "expected"),
    [
        ({0: [1.0, 2.0, 5.0, 6.0]}, Pause(0, 3.0)),  # across the kill at 3
        ({0: [1.0, 2.5, 3.5, 4.0], 1: [1.0, 2.5, 8.5]}, Pause(1, 6.0)),  # the worst partition
        ({0: [1.0, 2.0]}, Pause(0, 7.0)),  # nothing more until the end at 9
        ({0: [0.0, 2.9, 3.1, 3.2, 12.0]}, Pause(0, 8.8)),  # a pause that begins before the end counts whole
        ({0: []}, Pause(0, 6.0)),  # nothing at all: from the kill to the end
    ],
)
def test_the_longest_pause_after_a_kill(moments: dict[int, list[float]], expected: Pause) -> None:
    found = longest(moments, begin=3.0, end=9.0)
    assert (found.partition, round(found.seconds, 6)) == expected
