"""The staging contract on a directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pxrs.publishing.staging.contract import Staging
from pxrs.publishing.staging.directory import DirectoryStaging
from pxrs.testing.staging_contract import StagingContract


class TestDirectory(StagingContract):
    @pytest.fixture
    def staging(self, tmp_path: Path) -> Staging:
        self.folder = tmp_path
        return DirectoryStaging(str(tmp_path))

    def make_older(self, staging: Staging, seconds: float) -> None:
        for path in [self.folder, *self.folder.rglob("*")]:
            found = path.stat()
            os.utime(path, (found.st_atime - seconds, found.st_mtime - seconds))
