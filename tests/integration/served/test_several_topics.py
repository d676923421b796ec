"""Members that read several topics, over a server: their tests, unchanged."""

from __future__ import annotations

import pytest

from pxrs.hub import Hub
from tests.integration.served.suites import suite

pytestmark = pytest.mark.sampled(6, of="module")
globals().update(suite("tests.unit.consumer.test_several_topics", without=("TestFairness",)))  # of local logs


@pytest.fixture
def hub(hub: Hub) -> Hub:
    """With the topics that these tests read."""
    hub.create_topic("orders", partitions=2)
    hub.create_topic("returns", partitions=3)
    return hub
