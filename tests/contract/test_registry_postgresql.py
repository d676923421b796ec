"""The registry contract on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pxrs.testing.registry_contract import Backend, SharedRegistryContract
from pxrs.testing.servers import PostgresServer

pytestmark = pytest.mark.sampled(2, of="module")


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


class TestPostgresql(SharedRegistryContract):
    @pytest.fixture
    def backend(self, server: PostgresServer) -> Backend:
        return Backend(server.url)
