"""Fixtures of the tests of queues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from pxrs.clock import ManualClock
from pxrs.hub import Hub
from pxrs.registry.memory import MemoryStore
from pxrs.testing.hooked import SharedStore


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(10_000)


@pytest.fixture
def place(clock: ManualClock) -> Iterator[SharedStore]:
    """A store in memory, on which a test opens hubs."""
    with ExitStack() as stack:
        yield SharedStore(stack, MemoryStore(clock))


@pytest.fixture
def hub(place: SharedStore) -> Hub:
    return place.open()
