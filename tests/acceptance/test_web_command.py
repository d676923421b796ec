"""`pxrs web` and `pxrs serve --web` as commands: they show a hub, and end in order."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pxrs
from pxrs.cli.app import app
from pxrs.errors import InvalidArgument
from pxrs.server.auth import tokens


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with pxrs.open(tmp_path / "hub") as hub:
        hub.create_topic("orders", 2)
        with hub.producer("orders") as out:
            out.send(b"x")
    return tmp_path / "hub"


@contextmanager
def command(*arguments: str) -> Iterator[str]:
    """Run a command of pxrs; the address of its page. It must end with 0 after SIGTERM."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pxrs.cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        told = process.stdout.readline()
        found = re.fullmatch(r"showing .* at (http://127\.0\.0\.1:[0-9]+/)\n", told)
        assert found, (told, process.communicate(timeout=20))
        yield found[1]
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()
        process.wait()


def overview(url: str, token: str = "") -> dict[str, list[dict[str, object]]]:
    request = urllib.request.Request(f"{url}api/overview", headers={"X-Pxrs-Token": token} if token else {})
    with urllib.request.urlopen(request, timeout=20) as answer:
        found: dict[str, list[dict[str, object]]] = json.load(answer)
    return found


def test_pxrs_web_shows_a_hub_until_it_is_stopped(directory: Path) -> None:
    with command("web", "--at", str(directory), "--listen", "127.0.0.1:0") as url:
        (topic,) = overview(url)["topics"]
        assert (topic["topic"], topic["partitions"], topic["messages"]) == ("orders", 2, 1)


def test_pxrs_serve_shows_its_hub_to_those_with_a_token(directory: Path, tmp_path: Path) -> None:
    file = str(tmp_path / "tokens")
    _, token = tokens.create(file, "me", ["hub=read"], now=time.time())
    assert token is not None
    serve = ("serve", str(directory), "--listen", "127.0.0.1:0", "--auth", file, "--web", "127.0.0.1:0")
    with command(*serve) as url:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            overview(url)
        assert len(overview(url, token)["topics"]) == 1


def test_an_address_that_others_reach_is_refused(directory: Path) -> None:
    run = CliRunner().invoke(app, ["web", "--at", str(directory), "--listen", "0.0.0.0:0"])
    assert isinstance(run.exception, InvalidArgument)
    assert "anyone there could read all messages" in str(run.exception)
