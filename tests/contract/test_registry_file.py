"""The registry contract on files."""

from __future__ import annotations

from pathlib import Path

import pytest

from pxrs.testing.registry_contract import Backend, SharedRegistryContract


class TestFile(SharedRegistryContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return Backend(f"file:{tmp_path}/registry")
