"""Which registry a hub belongs to, from the command line: every command takes it, and a wrong one does no harm."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import pxrs
from pxrs import clock
from pxrs import registry as registries
from pxrs.cli.app import app
from pxrs.testing import forked

WEEK_US = 7 * 86_400 * 1_000_000


def run(*arguments: str, registry: str | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """registry: as the environment has it."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PXRS_AT", "PXRS_REGISTRY")}
    if registry is not None:
        environment["PXRS_REGISTRY"] = registry
    return forked.run_text("pxrs.cli", arguments, input=stdin.encode(), env=environment)


def commands(command: Any, path: str = "pxrs") -> Iterator[tuple[str, Any]]:
    if hasattr(command, "commands"):
        for name, each in command.commands.items():
            yield from commands(each, f"{path} {name}")
    else:
        yield path, command


def test_every_command_that_takes_a_hub_takes_its_registry() -> None:
    found = dict(commands(typer.main.get_command(app)))
    options = {
        path: {name: option for option in command.params for name in option.opts} for path, command in found.items()
    }
    with_hub = [path for path, names in options.items() if "--at" in names and path != "pxrs ping"]
    assert {"pxrs send", "pxrs tail", "pxrs topic describe", "pxrs registry adopt"} <= set(with_hub)
    for path in with_hub:
        assert "--registry" in options[path], path
        assert options[path]["--registry"].envvar == "PXRS_REGISTRY", path


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Ten messages of 4 kB, stored a week ago, of which a group in SQLite has read two."""
    week_ago = clock.wall_time_us() - WEEK_US
    with pxrs.open(tmp_path / "data", registry_of(tmp_path), upkeep=False) as hub:
        hub.create_topic("t", partitions=1, retention=2, segment_bytes=4096, keep_unread=True)
        hub.consumer("t", "slow").close()
        with monkeypatch.context() as patched, hub.producer("t", linger_s=0) as out:
            patched.setattr(clock, "wall_time_us", lambda: week_ago)
            for _ in range(10):
                out.send(b"x" * 4096).result()
        with hub.consumer("t", "slow") as inbox:
            assert inbox.poll(1, timeout=30)
            assert inbox.poll(1, timeout=30)
            inbox.commit()
    return str(tmp_path / "data")


def registry_of(folder: Path) -> str:
    return f"sqlite:///{folder}/reg.db"


def start(data: str, registry: str) -> int:
    with pxrs.open(data, registry) as hub:
        return hub.topic("t").start(0)


def test_send_without_the_hubs_registry_removes_nothing_and_says_so(data: str, tmp_path: Path) -> None:
    sent = run("send", "t", "--at", data, stdin="x\n")
    assert (sent.returncode, sent.stdout) == (0, "sent 1 message to t\n")
    assert "retention of t is held up" in sent.stderr
    assert "pxrs registry adopt" in sent.stderr
    assert start(data, registry_of(tmp_path)) == 0
    described = json.loads(run("topic", "describe", "t", "--at", data, "--json").stdout)
    assert "belongs to the registry sqlite:" in described["retention_problem"]
    assert "retention is held up" in run("topic", "describe", "t", "--at", data).stdout


def test_send_with_the_hubs_registry_removes_what_is_read(data: str, tmp_path: Path) -> None:
    own, wrong = registry_of(tmp_path), f"sqlite:///{tmp_path}/wrong.db"
    described = run("topic", "describe", "t", "--at", data, "--json", registry=own)
    assert json.loads(described.stdout)["retention_problem"] is None
    assert "held up" in run("send", "t", "--at", data, "--registry", wrong, registry=own, stdin="x\n").stderr
    assert start(data, own) == 0, "what the option says wins over the environment"
    sent = run("send", "t", "--at", data, registry=own, stdin="x\n")
    assert (sent.returncode, sent.stderr) == (0, "")
    assert start(data, own) == 2


def test_an_operator_gives_a_hub_to_another_registry(data: str, tmp_path: Path) -> None:
    own, new = registry_of(tmp_path), f"sqlite:///{tmp_path}/new.db"
    reset = ("group", "reset", "slow", "--to", "latest", "--yes", "--at", data)
    assert "make it with `pxrs queue create` or `pxrs registry adopt` (InvalidUrl)" in run(*reset, registry=new).stderr
    registries.open(new).close()
    refused = run(*reset, registry=new)
    assert refused.returncode == 1
    assert refused.stderr.endswith("(WrongRegistry)\n"), refused.stderr
    adopted = run("registry", "adopt", "--at", data, "--registry", new)
    assert adopted.stdout == f"the hub {data} belongs to the registry {new}; before, to {own}\n", adopted.stderr
    assert "topics with keep_unread: t: " in adopted.stderr
    assert run("send", "t", "--at", data, registry=new, stdin="x\n").stderr == ""
    assert start(data, new) == 10, "no group of this registry has yet to read the old messages"
    assert run("registry", "adopt", "--at", f"{data}/typo", "--registry", new).returncode == 2
