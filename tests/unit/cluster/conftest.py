"""What the tests of storage nodes share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pxrs import registry as registries
from pxrs.registry.contract import Registry
from tests.unit.cluster.stored import fast_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder for a storage node, removed after the test."""
    with fast_folder() as found:
        yield found


@pytest.fixture
def registry() -> Iterator[Registry]:
    """An empty registry in memory."""
    with registries.open("memory:") as found:
        yield found
