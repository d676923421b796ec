"""A hub behind a server, for the tests of the library that are run over it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("grpc")

import pxrs
from pxrs.hub import Hub
from pxrs.server.serving import serving
from tests.unit.consumer.reading import new_reader


@pytest.fixture
def url() -> Iterator[str]:
    """The address of a server in front of an empty hub in memory."""
    with pxrs.open("memory:") as hub, serving(hub) as url:
        yield url


@pytest.fixture
def hub(url: str) -> Iterator[Hub]:
    """The hub of a client of the server."""
    with pxrs.open(url) as hub:
        yield hub


@pytest.fixture(autouse=True)
def _fresh_reader() -> None:
    new_reader()
