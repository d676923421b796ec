"""A hub in memory and a reading thread for each test of a consumer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import pxrs
from pxrs.hub import Hub
from tests.unit.consumer.reading import new_reader


@pytest.fixture
def hub() -> Iterator[Hub]:
    with pxrs.open("memory:") as hub:
        yield hub


@pytest.fixture(autouse=True)
def _fresh_reader() -> None:
    new_reader()
