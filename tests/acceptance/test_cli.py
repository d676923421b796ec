"""The command line as people and scripts use it: real processes, real output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pxrs import registry


def pxrs(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pxrs.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_demo_tells_its_story_and_its_account_is_exact() -> None:
    result = pxrs("demo")
    assert result.returncode == 0, result.stderr
    assert "anna was killed" in result.stdout
    assert "lost 0" in result.stdout
    assert "refused (" in result.stdout
    assert result.stderr == ""


def test_scan_and_get_print_for_people_and_for_machines(tmp_path: Path) -> None:
    with registry.open(tmp_path) as handle:
        versions = handle.commit(put={"a/text": "grün".encode(), "a/binary": b"\xff\x00", "b": b""})
    lines = [json.loads(line) for line in pxrs("registry", "scan", str(tmp_path), "a/", "--json").stdout.splitlines()]
    assert lines == [
        {"key": "a/binary", "version": versions["a/binary"], "base64": "/wA="},
        {"key": "a/text", "version": versions["a/text"], "value": "grün"},
    ]
    assert "a/text" in pxrs("registry", "scan", str(tmp_path)).stdout
    assert pxrs("registry", "get", str(tmp_path), "a/text").stdout == "grün"
    missing = pxrs("registry", "get", str(tmp_path), "nothing")
    assert (missing.returncode, missing.stdout, missing.stderr) == (1, "", "no such key: nothing\n")


@pytest.mark.parametrize("dialect", ["oracle", "postgresql", "sqlite"])
def test_ddl_is_printed_for_each_database(dialect: str) -> None:
    result = pxrs("registry", "ddl", "--dialect", dialect)
    assert result.returncode == 0, result.stderr
    assert "CREATE TABLE" in result.stdout
    assert ("GRANT" in result.stdout) == (dialect != "sqlite")


def test_an_error_is_one_line_that_says_what_to_do_and_no_traceback() -> None:
    for arguments, words in (
        (("registry", "scan", "kafka://host"), "unknown scheme 'kafka'; choose from"),
        (("registry", "scan", "localhost:2379"), "looks like a host"),
        (("registry", "ddl", "--dialect", "mysql"), "oracle"),
        (("registry", "scan", "memory:", "no-slash"), "ends in a slash"),
    ):
        result = pxrs(*arguments)
        assert result.returncode != 0
        assert words in " ".join(result.stderr.split()), result.stderr
        assert "Traceback" not in result.stderr


def test_help_and_version() -> None:
    assert "registry" in pxrs("--help").stdout
    assert pxrs("--version").stdout.startswith("pxrs 0.")
    assert pxrs().returncode in (0, 2)
