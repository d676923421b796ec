"""Who may only read a hub can back it up: a backup takes no lock in its directory and writes nothing there (V5)."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

import pxrs
from pxrs.cli.app import app
from pxrs.errors import BackupError
from pxrs.log.directory.published import NAME as PUBLISHED
from tests.acceptance.read_only.reading import picture, reading_only


def test_v5_who_may_only_read_a_hub_can_back_it_up(data: Path, place: Path) -> None:
    before = picture(data)
    target = place / "target"
    target.mkdir()
    target.chmod(0o777)
    with reading_only(data):
        done = CliRunner().invoke(app, ["backup", "--at", str(data), str(target / "backup")])
    assert done.exit_code == 0, done.output
    assert picture(data) == before
    done = CliRunner().invoke(app, ["restore", str(target / "backup"), "--at", str(place / "new")])
    assert done.exit_code == 0, done.output
    with pxrs.open(place / "new") as hub:
        assert sum(hub.topic("orders").end(number) for number in range(3)) == 10
        assert hub.group("billing").describe().lag == 6
        assert [item.value for item in hub.queue("mail").peek()] == [b"hello"]


def test_l1_a_backup_whose_maker_cannot_find_the_end_of_a_partition_fails_and_says_so(data: Path, place: Path) -> None:
    """A damaged `published` is rebuilt by a process that may write. Without that, acknowledged messages might be
    missing."""
    with pxrs.open(data) as hub:
        file = Path(hub.topic("orders").log.partition_folder(0)) / PUBLISHED  # type: ignore[attr-defined]
    damaged = bytearray(file.read_bytes())
    damaged[0] ^= 0xFF
    damaged[64] ^= 0xFF
    file.write_bytes(damaged)
    (place / "target").mkdir()
    (place / "target").chmod(0o777)
    command = ["backup", "--at", str(data), str(place / "target" / "backup")]
    with reading_only(data):
        done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, BackupError)
    assert "might lack acknowledged messages" in str(done.exception)
    assert not (place / "target" / "backup" / "backup.json").exists()
