"""Groups that are described, reset, deleted, and begun from an old checkpoint, over a server: tests, unchanged."""

from __future__ import annotations

import pytest

from pxrs.group.admin import GroupHandle
from pxrs.hub import Hub
from pxrs.log.contract import Log
from pxrs.registry import Registry
from tests.integration.served.suites import suite
from tests.unit.group_admin.conftest import idle, worker  # noqa: F401 - fixtures
from tests.unit.group_admin.workers import fill

SERVED = ("registry", "log", "group", "worker", "idle")

pytestmark = pytest.mark.sampled(6, of="module")
globals().update(suite("tests.unit.group_admin.test_describing", served=SERVED))
globals().update(suite("tests.unit.group_admin.test_resetting", served=SERVED))
globals().update(suite("tests.unit.group_admin.test_importing", served=SERVED))
globals().update(suite("tests.unit.group_admin.test_deleting", served=SERVED))


@pytest.fixture
def registry(hub: Hub) -> Registry:
    return hub.registry


@pytest.fixture
def log(hub: Hub) -> Log:
    """The topic orders, in each partition 10 messages, of the times 100 to 109."""
    fill(hub.log, "orders")  # type: ignore[arg-type]
    return hub.log


@pytest.fixture
def group(registry: Registry, log: Log) -> GroupHandle:
    return GroupHandle(registry, "billing", log)
