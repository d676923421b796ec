"""A table in SQLite and a hub, new for each test of registered sources."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import pxrs
from tests.unit.sources.shop import Shop


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


@pytest.fixture
def hub(shop: Shop) -> Iterator[pxrs.Hub]:
    with pxrs.open(shop.at) as hub:
        yield hub
