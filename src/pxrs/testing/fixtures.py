"""What the tests of somebody's own handlers need: a hub in memory, a clock that moves when told to, and a way to run.

    pytest_plugins = ["pxrs.testing.fixtures"]     # in the conftest.py at the root of the tests

    def test_a_payment_is_booked(pxrs_hub):
        pxrs_hub.create_topic("payments")
        ...
        assert drain(pxrs_hub, "payments", book) == 3

Leases, hand-over and progress deadlines of `pxrs_hub` go by `pxrs_clock`: nothing expires while a test is looked at in
a debugger, and a death that takes ten seconds takes one call of `advance`. Waiting for messages, the pauses between
retries and the times of messages stay on the machine's clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Unpack

import pytest

from pxrs.clock import Clock, ManualClock
from pxrs.errors import InvalidGroup
from pxrs.hub import Hub
from pxrs.log.memory import MemoryLog
from pxrs.model import Message
from pxrs.options import ConsumerOptions
from pxrs.registry.memory import MemoryRegistry, MemoryStore
from pxrs.runner import Handler


@pytest.fixture
def pxrs_clock() -> ManualClock:
    """The clock of `pxrs_hub`."""
    return ManualClock()


@pytest.fixture
def pxrs_hub(pxrs_clock: ManualClock) -> Iterator[Hub]:
    """An empty hub in memory, closed after the test."""
    with memory_hub(pxrs_clock) as hub:
        yield hub


@contextmanager
def memory_hub(clock: Clock) -> Iterator[Hub]:
    """A hub in memory whose leases go by this clock, for those who do not use pytest."""
    hub = Hub("memory:", MemoryLog(), "memory:")
    hub._registry = MemoryRegistry(MemoryStore(clock))
    with hub:
        yield hub


def drain(
    hub: Hub,
    topic: str,
    handler: Handler,
    group: str = "test",
    *,
    dead_letters: str | None = None,
    **options: Unpack[ConsumerOptions],
) -> int:
    """Call the handler with every message up to the topic's present end that the group has not done; how many it did.

    The first message that it cannot handle raises HandlerFailed, and is the first one of the next call. The other
    arguments are those of `Hub.consumer`, but for `until`, which is "end" here: with `on_error="dead-letter",
    dead_letters=TOPIC` such a message goes to that topic and counts as done."""
    if options.setdefault("until", "end") != "end":
        raise InvalidGroup(f"until is {options['until']!r}: drain reads up to the topic's end, leave it away")
    options.setdefault("on_error", "raise")
    count = 0

    def counted(message: Message) -> None:
        nonlocal count
        handler(message)
        count += 1

    with hub.consumer(topic, group, dead_letters=dead_letters, **options) as inbox:
        inbox.run(counted)
    return count
