"""The registry contract on a SQLite file."""

from __future__ import annotations

from pathlib import Path

import pytest

from pxrs.testing.registry_contract import Backend, SharedRegistryContract

pytestmark = pytest.mark.sampled(2, of="module")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sqlite") / "registry.db"


class TestSqlite(SharedRegistryContract):
    @pytest.fixture
    def backend(self, path: Path) -> Backend:
        return Backend(f"sqlite:///{path}")
