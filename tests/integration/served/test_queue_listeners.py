"""Listeners of queues, and handlers that fail, over a server: their tests, unchanged."""

from __future__ import annotations

import pytest

from tests.integration.served.suites import suite

pytestmark = pytest.mark.sampled(6, of="module")
globals().update(suite("tests.unit.test_queue_listener"))
globals().update(suite("tests.unit.test_queue_failures"))
