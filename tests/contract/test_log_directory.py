"""The log contract on a local directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pxrs.log.contract import Log, TopicLog
from pxrs.log.directory.log import DirectoryLog
from pxrs.testing.log_contract import LogContract, new_topic


class TestDirectory(LogContract):
    @pytest.fixture
    def log(self, tmp_path: Path) -> Iterator[Log]:
        log = DirectoryLog(tmp_path / "data")
        yield log
        log.close()


class TestDirectoryLeftToTheSystem(TestDirectory):
    @pytest.fixture
    def topic(self, log: Log) -> TopicLog:
        return log.create_topic(new_topic(durability="os"))
