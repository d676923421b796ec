"""Tables of SQLite and of one PostgreSQL server, which all files of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pxrs.testing.servers import PostgresServer
from tests.integration.sql_table.tables import NUMBERS, Place


@pytest.fixture(scope="session")
def server() -> Iterator[PostgresServer]:
    with PostgresServer(settings={"max_prepared_transactions": "10", "fsync": "off"}) as server:
        yield server


@pytest.fixture
def postgres(server: PostgresServer) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(server.create_database(f"t{next(NUMBERS)}"), stack)


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(f"sqlite:///{tmp_path}/queue.db", stack)


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue(request.param)
    return found
