"""New topics, groups and registries for the tests of publishing."""

from __future__ import annotations

import itertools
import logging
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pxrs.publishing.staging import appends
from pxrs.registry import outage
from tests.integration.publishing.driver import SEED, SOAK, Place, Places


@pytest.fixture
def kind() -> type[Place]:
    """The kind of place that `places` makes."""
    return Place


@pytest.fixture
def places(kind: type[Place], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Places]:
    """Makes a new place each time."""
    caplog.set_level(logging.ERROR, "pxrs")
    made: list[Place] = []
    numbers = itertools.count()
    monkeypatch.setattr(outage, "_PAUSE_S", (0.0, 0.0))
    monkeypatch.setattr(appends, "_TOGETHER_MAX", 2)  # so that a batch is appended in several calls

    # Processes die here, not the power: there is no need for a disk, and thousands of files come and go.
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="pxrs-publishing-", dir=folder) as root:

        def make(*arguments: Any, **named: Any) -> Place:
            made.append(kind(Path(root, str(next(numbers))), *arguments, **named))
            return made[-1]

        yield make
        for place in made:
            place.close()


@pytest.fixture
def place(places: Places) -> Place:
    return places()


@pytest.fixture(params=["one hub", "two hubs"] if SOAK else ["any"])
def is_one_hub(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> bool:
    """Whether the drivers of a test share one hub, or each has its own. `make test` has what the seed chooses."""
    hubs = request.param if SOAK else random.Random(SEED).choice(["one hub", "two hubs"])
    record_property("chosen", f"{hubs} by SEED={SEED}")
    return bool(hubs == "one hub")
