"""The registry contract on memory."""

from __future__ import annotations

from collections import defaultdict

import pytest

from pxrs.registry import Registry
from pxrs.registry.memory import MemoryRegistry, MemoryStore
from pxrs.testing.registry_contract import Backend, RegistryContract


class TestMemory(RegistryContract):
    @pytest.fixture
    def backend(self) -> Backend:
        stores: dict[str, MemoryStore] = defaultdict(MemoryStore)

        def open_shared(url: str) -> Registry:
            return MemoryRegistry(stores[url])

        return Backend("memory:", opener=open_shared)
