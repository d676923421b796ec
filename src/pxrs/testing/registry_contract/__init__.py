"""The registry's contract as tests: one suite for every backend, ours and yours.

    class TestMine(SharedRegistryContract):
        @pytest.fixture
        def backend(self):
            return Backend("mine://127.0.0.1:1234")

`RegistryContract` needs threads only; `SharedRegistryContract` adds real processes that race, are killed and stopped.
Every test works in a namespace of its own. Nothing here is optional.
"""

import pytest

# Before they are imported, so that a failing assertion shows its values.
for part in ("commits", "keys", "leases", "lifecycle", "races", "suites", "watches"):
    pytest.register_assert_rewrite(f"{__name__}.{part}")

from pxrs.testing.registry_contract.store import Backend, Store, at_once, quieten  # noqa: E402
from pxrs.testing.registry_contract.suites import RegistryContract, SharedRegistryContract  # noqa: E402

__all__ = ["Backend", "RegistryContract", "SharedRegistryContract", "Store", "at_once", "quieten"]
