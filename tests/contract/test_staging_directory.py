"""The staging contract on a directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pxrs import disk
from pxrs.publishing.staging.contract import Staging
from pxrs.publishing.staging.directory import DirectoryStaging
from pxrs.testing.staging_contract import TOPIC, StagingContract, rows


class TestDirectory(StagingContract):
    @pytest.fixture
    def staging(self, tmp_path: Path) -> Staging:
        self.folder = tmp_path
        return DirectoryStaging(str(tmp_path))

    def make_older(self, staging: Staging, seconds: float) -> None:
        for path in [self.folder, *self.folder.rglob("*")]:
            found = path.stat()
            os.utime(path, (found.st_atime - seconds, found.st_mtime - seconds))


def test_every_folder_above_the_files_of_a_manifest_is_synced_before_it_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that died may have made them and not synced the folder above; the next task finds them there."""
    staging, synced = DirectoryStaging(str(tmp_path)), set()
    name = staging.stage(TOPIC, "q", 3, 0, [rows(b"v")]).name
    assert name is not None
    sync_folder = disk.sync_folder
    monkeypatch.setattr(disk, "sync_folder", lambda path: (synced.add(Path(path)), sync_folder(path)))
    assert staging.make_durable(TOPIC.id, "q", 3, [name])
    query = tmp_path / "staging" / TOPIC.id / "q"
    assert synced >= {query, *query.parents[:3]}, "up to the hub's own folder"
