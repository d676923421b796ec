"""Topics whose appends can fail, new for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pxrs.producer.producer import Producer
from tests.unit.producer.failing import Fickle, make


@pytest.fixture
def topic() -> Fickle:
    return make()


@pytest.fixture
def single() -> Iterator[tuple[Fickle, Producer]]:
    """One partition, and a producer that sends only when told."""
    topic = make(1)
    with Producer(topic, linger_s=60) as out:
        yield topic, out
