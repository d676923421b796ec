"""`pxrs storage`: what it refuses, and with which exit code."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from pxrs.cli.exits import EXIT_FAILED, EXIT_FINAL, EXIT_USAGE
from pxrs.cli.serve import with_limits
from pxrs.cluster.storage.identity import Directory
from pxrs.cluster.storage.settings import StorageLimits
from pxrs.errors import InvalidArgument
from pxrs.testing.command import Result, run_here
from pxrs.testing.servers import free_ports
from tests.unit.source_code import ROOT

ROW = re.compile(r"^\| `(\w+)` \| ([\d,.]+) \| ", re.MULTILINE)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    (port,) = free_ports(1)
    listen = f"127.0.0.1:{port}"
    return ["storage", "--registry", f"file:{tmp_path}/registry", "--dir", f"{tmp_path}/node", "--listen", listen]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> object:
    def call(*more: str) -> Result:
        given = list(arguments)
        if more and more[0] in given:  # in place of the value that it has otherwise
            at = given.index(more[0])
            del given[at : at + 2]
        return run_here(monkeypatch, capsys, (*given, *more)).unwrapped()

    return call


def test_another_format_is_refused_for_good(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "node.json").write_text(json.dumps({"node": "n", "cluster": "c", "starts": 1, "format": 99}))
    result = run()
    assert result.code == EXIT_FINAL
    assert "has format 99 and this version of pxrs knows formats up to 1: start the storage node with" in result.errors


def test_a_directory_in_use_is_refused(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    directory = Directory(tmp_path / "node")
    try:
        result = run()
    finally:
        directory.close()
    assert result.code == EXIT_USAGE
    assert "is used by another storage node that is running" in result.errors


def test_a_port_in_use_may_be_free_later(run, arguments: list[str], tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    import socket

    host, _, port = arguments[-1].rpartition(":")
    with socket.create_server((host, int(port))):
        result = run()
    assert result.code == EXIT_FAILED
    assert "cannot listen on" in result.errors
    assert not (tmp_path / "node" / "node.json").exists()


@pytest.mark.parametrize(
    ("option", "what"),
    [
        (("--limit", "sement_bytes=1"), "there is no such limit; choose from add_bytes_max"),
        (("--listen", "0.0.0.0:0"), "can be reached from other hosts"),
        (("--registry", "memory:"), "belongs to this process alone"),
        (("--tls-cert", "x.pem"), "TLS needs both"),
    ],
)
def test_wrong_options_are_refused(run, option: tuple[str, str], what: str) -> None:  # type: ignore[no-untyped-def]
    result = run(*option)
    assert result.code == EXIT_USAGE
    assert what in result.errors


def test_scrubbing_can_be_turned_off_and_nothing_else_is_0() -> None:
    assert with_limits(StorageLimits(), {}, ["scrub_bytes_s=0"]).scrub_bytes_s == 0
    for given in ("collect_s=0", "scrub_round_s=0", "scrub_bytes_s=-1", "scrub_bytes_s=nan"):
        with pytest.raises(InvalidArgument, match=r"above 0|give a number"):
            with_limits(StorageLimits(), {}, [given])


def test_every_limit_is_documented_with_its_default() -> None:
    text = (ROOT / "docs/cluster-format.md").read_text()
    found = {name: float(value.replace(",", "")) for name, value in ROW.findall(text)}
    limits = StorageLimits()
    assert found == {field.name: getattr(limits, field.name) for field in fields(limits)}
