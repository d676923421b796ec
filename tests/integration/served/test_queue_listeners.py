"""Listeners of queues, and handlers that fail, over a server: their tests, unchanged."""

from __future__ import annotations

from tests.integration.served.suites import suite

globals().update(suite("tests.unit.test_queue_listener"))
globals().update(suite("tests.unit.test_queue_failures"))
