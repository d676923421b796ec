"""What `pxrs cluster demo` counts: for how long nothing happened, and how many messages are handled."""

from __future__ import annotations

from pathlib import Path

import pytest

import pxrs
from pxrs.cli.cluster.demo.pauses import Pause, longest
from pxrs.cli.cluster.demo.traffic import Consuming


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


def test_a_message_that_two_members_handle_is_one_that_is_handled(tmp_path: Path) -> None:
    """The demo waits until as many are handled as were sent: it must not end while some are not handled at all."""
    with pxrs.open(tmp_path) as hub:
        hub.create_topic("orders", partitions=1)
        with hub.producer("orders") as out:
            for number in range(3):
                out.send(str(number))
        messages = list(hub.topic("orders").messages(0))
    consuming = Consuming(str(tmp_path), 1)
    consuming.handle(messages[:2])
    consuming.handle(messages[:2])
    assert consuming.handled == 2
    consuming.handle(messages[2:])
    assert consuming.handled == 3
    assert len(consuming.told) == 5
