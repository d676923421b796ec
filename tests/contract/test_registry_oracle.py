"""The registry contract on Oracle, where there is one: no Oracle comes out of a Python package."""

from __future__ import annotations

import os

import pytest

from pxrs.testing.registry_contract import Backend, SharedRegistryContract

VARIABLE = "PXRS_TEST_ORACLE_URL"
URL = os.environ.get(VARIABLE, "")

if not URL:
    pytest.skip(f"set {VARIABLE} to an oracle:// address to run the contract there", allow_module_level=True)


class TestOracle(SharedRegistryContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return Backend(f"{URL}{'&' if '?' in URL else '?'}poll=0.1")
