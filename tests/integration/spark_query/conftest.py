"""Hubs for the tests of streaming queries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import pxrs
from pxrs.hub import Hub
from tests.integration.spark_query.queries import send


@pytest.fixture
def hub() -> Iterator[Hub]:
    with pxrs.open("memory:") as hub:
        hub.create_topic("orders", partitions=4)
        send(hub, 400)
        yield hub
