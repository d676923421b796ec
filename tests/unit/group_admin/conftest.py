"""A registry and a log in memory, a group, and a worker in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pxrs import registry as registries
from pxrs.group.admin import GroupHandle
from pxrs.log.memory import MemoryLog
from pxrs.registry import Registry
from tests.unit.group_admin.workers import CHECKPOINTS_AT, Worker, fill


@pytest.fixture(params=["memory", "file"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Registry]:
    with registries.open("memory:" if request.param == "memory" else tmp_path / "registry") as handle:
        yield handle


@pytest.fixture
def log() -> MemoryLog:
    """The topic orders, in each partition 10 messages, of the times 100 to 109."""
    log = MemoryLog()
    fill(log, "orders")
    return log


@pytest.fixture
def group(registry: Registry, log: MemoryLog) -> GroupHandle:
    return GroupHandle(registry, "billing", log)


@pytest.fixture
def worker(registry: Registry, log: MemoryLog) -> Worker:
    """It owns everything, and has read some of it."""
    anna = Worker(registry, log, "anna").join().settle()
    anna.commit(CHECKPOINTS_AT)
    return anna


@pytest.fixture
def idle(worker: Worker) -> Worker:
    """The group has been left by its only member."""
    worker.leave()
    return worker
