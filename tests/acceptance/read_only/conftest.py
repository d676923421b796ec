"""A hub in a folder that every user may reach, and a process that writes to it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import pxrs
import pxrs.registry.sql.registry
import pxrs.registry.sql.sqlite
from tests.acceptance.read_only.reading import send


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user may reach, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="pxrs-read-only-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def data(place: Path) -> Path:
    """A hub with 5 messages in each of two partitions of `orders`, none in the third, a group that has read 2 of each,
    and a queue with one item."""
    data = place / "data"
    with pxrs.open(data) as hub:
        hub.create_topic("orders", partitions=3)
        send(hub, "orders", 10)
        hub.group("billing").import_checkpoint({0: 2, 1: 2}, "orders")
        hub.create_queue("mail").put("hello")
    return data
