"""One PostgreSQL server, which all files of this folder share, and a proxy before it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pxrs.testing.servers import PostgresServer
from tests.integration.sql_faults.stores import LOCALE


@pytest.fixture(scope="session")
def server() -> Iterator[PostgresServer]:
    with PostgresServer(locales=[LOCALE]) as server:
        yield server
