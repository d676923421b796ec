"""Fixtures for tests of your own handlers. They need pytest and pxrs itself, and none of its extras.

pytest_plugins = ["pxrs.testing.fixtures"] # in the conftest.py at the root of the tests

    def test_a_payment_is_booked(pxrs_hub):
        pxrs_hub.create_topic("payments")
        ...
        assert drain(pxrs_hub, "payments", book) == 3

`memory_hub` says what runs on `pxrs_clock`: nothing expires while a test is stopped in a debugger, and a wait of an
hour is one call of `advance`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pxrs.clock import ManualClock
from pxrs.hub import Hub
from pxrs.testing.handlers import drain, drain_queue, item, memory_hub, message

__all__ = ["drain", "drain_queue", "item", "memory_hub", "message", "pxrs_clock", "pxrs_hub"]


@pytest.fixture
def pxrs_clock() -> ManualClock:
    """The clock of `pxrs_hub`."""
    return ManualClock()


@pytest.fixture
def pxrs_hub(pxrs_clock: ManualClock) -> Iterator[Hub]:
    """An empty hub in memory, closed after the test."""
    with memory_hub(pxrs_clock) as hub:
        yield hub
