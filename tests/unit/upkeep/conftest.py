"""What the tests of upkeep share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.upkeep.hubs import HOUR_S, Place


@pytest.fixture
def upkeep_threads() -> Callable[[], list[str]]:
    """Tells which threads of upkeep have been started since the test began, and run."""

    def running() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("pxrs-upkeep")}

    before = running()
    return lambda: [thread.name for thread in running() - before]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A hub with a topic of one hour, whose registry is on record."""
    place = Place(tmp_path / "data")
    hub = place.hub()
    hub.create_topic("t", partitions=1, retention=HOUR_S, segment_bytes=4096)
    hub.consumer("t", "g").close()
    yield place
    place.close()
