"""Who may only read a hub can back it up: a backup takes no lock in its directory and writes nothing there (V5)."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

import pxrs
from pxrs.cli.app import app
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
