"""The staging contract on a directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pxrs import disk
from pxrs.errors import InvalidRecord
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


def test_folders_above_a_query_are_synced_once_and_again_if_its_folder_was_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sync of a small batch is time that the batch takes."""
    staging = DirectoryStaging(str(tmp_path))
    synced: list[Path] = []
    sync_folder = disk.sync_folder
    monkeypatch.setattr(disk, "sync_folder", lambda path: (synced.append(Path(path)), sync_folder(path)))
    query = tmp_path / "staging" / TOPIC.id / "q"

    def durable(batch: int) -> list[Path]:
        name = staging.stage(TOPIC, "q", batch, 0, [rows(b"v")]).name
        assert name is not None
        synced.clear()
        assert staging.make_durable(TOPIC.id, "q", batch, [name])
        staging.clear(TOPIC.id, "q", batch)
        return list(synced)

    above = [tmp_path, tmp_path / "staging", tmp_path / "staging" / TOPIC.id]
    assert durable(0) == [*above, query, query / "0"]
    assert durable(1) == [query, query / "1"]
    for _ in range(3):  # a file system may give a new folder the inode number of a removed one
        query.rmdir()
        query.mkdir()
    assert durable(2) == [*above, query, query / "2"]
    staging.forget_query(TOPIC.id, "q")
    assert not query.exists()
    assert durable(3) == [*above, query, query / "3"]


def test_a_file_of_a_task_that_failed_is_removed(tmp_path: Path) -> None:
    staging = DirectoryStaging(str(tmp_path))
    with pytest.raises(InvalidRecord, match=r"partition 3, but the topic orders has partitions 0 to 2.*drop"):
        staging.stage(TOPIC, "q", 0, 0, [rows(*[b"v"] * 6000), rows(b"v", partition=3)])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
