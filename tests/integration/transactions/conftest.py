"""Tables in SQLite and in one PostgreSQL server, which all files of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pxrs.testing.servers import PostgresServer
from tests.integration.transactions.bookings import Place, place_on


@pytest.fixture(scope="session")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def exits() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path, server: PostgresServer, exits: ExitStack) -> Place:
    return place_on(request.param, tmp_path, server, exits)


@pytest.fixture
def postgresql(tmp_path: Path, server: PostgresServer, exits: ExitStack) -> Place:
    return place_on("postgresql", tmp_path, server, exits)


@pytest.fixture
def sqlite(tmp_path: Path, server: PostgresServer, exits: ExitStack) -> Place:
    return place_on("sqlite", tmp_path, server, exits)
