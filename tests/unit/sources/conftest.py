"""A table in SQLite and a hub, new for each test of registered sources."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import pxrs
from pxrs.sources.sql_table import partitioned
from tests.unit.sources.shop import Shop


@pytest.fixture(autouse=True)
def _skip_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer of a table that reads to the end waits for this long, and these tests have dozens of them."""
    monkeypatch.setattr(partitioned, "SKIP_S", 0.1)


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


@pytest.fixture
def hub(shop: Shop) -> Iterator[pxrs.Hub]:
    with pxrs.open(shop.at) as hub:
        yield hub
