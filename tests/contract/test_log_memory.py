"""The log contract on memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pxrs.log.contract import Log
from pxrs.log.memory import MemoryLog
from pxrs.testing.log_contract import LogContract


class TestMemory(LogContract):
    @pytest.fixture
    def log(self) -> Iterator[Log]:
        log = MemoryLog()
        yield log
        log.close()
