"""Positions, checkpoints and lag, over a server: their tests, unchanged."""

from __future__ import annotations

import pytest

from pxrs.hub import Hub
from tests.integration.served.suites import suite
from tests.unit.test_consumer_positions import COUNT, PARTITIONS, send

pytestmark = pytest.mark.sampled(6, of="module")
globals().update(suite("tests.unit.test_consumer_positions"))


@pytest.fixture
def hub(hub: Hub) -> Hub:
    """With messages."""
    hub.create_topic("t", partitions=PARTITIONS)
    send(hub, *range(PARTITIONS), count=COUNT)
    return hub
