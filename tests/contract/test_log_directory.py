"""The log contract on a local directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pxrs.log.contract import Log
from pxrs.log.directory import DirectoryLog
from pxrs.testing.log_contract import LogContract


class TestDirectory(LogContract):
    @pytest.fixture
    def log(self, tmp_path: Path) -> Iterator[Log]:
        log = DirectoryLog(tmp_path / "data")
        yield log
        log.close()
