"""For the tests of the log: a machine that can be started again."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from pxrs import clock
from pxrs.log.directory import published
from tests.acceptance.directory_topics import OPENED


class WallTime:
    """The time that messages are stored at, in microseconds since 1970."""

    us = 0


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> WallTime:
    """The time is what the test says from now on."""
    wall = WallTime()
    monkeypatch.setattr(clock, "wall_time_us", lambda: wall.us)
    return wall


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Start the machine again, as handles of logs that are opened from then on see it."""

    def start() -> None:
        boot_id = str(uuid.uuid4())
        monkeypatch.setattr(published, "boot_id", lambda: boot_id)

    return start


@pytest.fixture(autouse=True)
def close_logs() -> Iterator[None]:
    """Close the logs that the test has opened with `log_in`."""
    yield
    while OPENED:
        OPENED.pop().close()
