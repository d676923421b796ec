"""A fault at every request that a command makes to its registry while it starts: it waits, and then runs.

The commands run in the process of the test, on a registry in memory that fails one request. The requests are counted
in a run without a fault, so that a request that is added later is covered too."""

from __future__ import annotations

import importlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import pxrs
from pxrs import registry as registries
from pxrs.cli import upkeep
from pxrs.cli.exits import EXIT_FAILED, EXIT_FINAL
from pxrs.cluster import records
from pxrs.cluster.broker import running
from pxrs.cluster.broker.running import RunningBroker
from pxrs.cluster.records import AliveNode, NodeRecord
from pxrs.errors import AccessDenied, RegistryUnavailable
from pxrs.events import writer
from pxrs.registry import outage
from pxrs.registry.contract import Registry
from pxrs.registry.memory import MemoryRegistry, MemoryStore
from pxrs.testing.command import Result, run_here
from pxrs.testing.hooked import Fault, FaultyRegistry
from pxrs.upkeep import janitor

pytestmark = pytest.mark.sampled(2, of="module")

REQUESTS_MAX = 60
"""More requests than any start makes."""


class Command(NamedTuple):
    """A command, and the beginning of the line that it prints once it has started."""

    module: str
    arguments: tuple[str, ...]
    started: str
    requests_min: int
    """How many requests its start makes at least, so that the test notices if it injects nothing."""


class Place:
    """Runs commands on one registry and one directory."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self._patch, self._captured = path, monkeypatch, capsys
        self.store = MemoryStore()

    def keys(self) -> Registry:
        return MemoryRegistry(self.store)

    def run(self, command: Command, at: int | None, fault: Fault, on_started: Callable[[], None]) -> list[str]:
        """Run the command until it has started; the requests that it has made until then."""
        registry = FaultyRegistry(self.store, at, fault)
        result = self.run_with(
            command, registry.opened, lambda: (setattr(registry, "is_counting", False), on_started())
        )
        assert result.code == 0, f"{fault} at {at}: {registry.requests[-3:]}: {result.errors}"
        assert "Traceback" not in result.errors
        return registry.requests

    def run_with(
        self, command: Command, open_registry: Callable[[], Registry], on_started: Callable[[], object]
    ) -> Result:
        was_started: list[bool] = []

        def echo(text: str) -> None:
            if text.startswith(command.started) and not was_started:
                was_started.append(True)
                try:
                    on_started()
                finally:
                    os.kill(os.getpid(), signal.SIGTERM)

        with self._patch.context() as patch:
            patch.setattr(registries, "open", lambda url: open_registry())
            patch.setattr(importlib.import_module(command.module), "echo", echo)
            result = run_here(self._patch, self._captured, command.arguments).unwrapped()
        assert result.code or was_started
        return result


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Place]:
    monkeypatch.setattr(outage, "_PAUSE_S", (0.001, 0.001))
    monkeypatch.setattr(janitor, "AGAIN_S", 0.01)
    monkeypatch.setattr(upkeep, "_LOOK_S", 0.01)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield Place(tmp_path, monkeypatch, capsys)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def storage(place: Place, folder: str = "node") -> Command:
    node = str(place.path / folder)
    options = ("--registry", f"file:{place.path}/registry", "--dir", node, "--listen", "127.0.0.1:0")
    return Command("pxrs.cli.storage", ("storage", *options), "storage node ", 7)


def command(name: str, place: Place) -> Command:
    if name == "storage":
        return storage(place)
    at = str(place.path / "hub")
    with pxrs.open(at) as hub:
        hub.create_topic("t", exist_ok=True)
    registry = ("--registry", f"file:{place.path}")
    return {
        "broker": Command("pxrs.cli.broker", ("broker", *registry, "--listen", "127.0.0.1:0"), "broker of", 11),
        "serve": Command("pxrs.cli.serve", ("serve", at, *registry, "--listen", "127.0.0.1:0"), "serving", 2),
        "web": Command("pxrs.cli.web", ("web", "--at", at, *registry, "--listen", "127.0.0.1:0"), "showing", 2),
        "upkeep": Command("pxrs.cli.upkeep", ("upkeep", "--at", at, *registry), "elected", 6),
    }[name]


def check_nothing() -> None: ...


@pytest.mark.parametrize("fault", Fault)
def test_r5_a_broker_joins_whatever_request_of_its_start_fails(
    place: Place, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    for module, name in ((writer, "CLOSE_S"), (running, "FLUSH_S")):
        monkeypatch.setattr(module, name, 0.01)  # without storage nodes it cannot store its events

    def start(at: int | None) -> int:
        """Start a broker and end it; how many requests its start has made."""
        registry = FaultyRegistry(place.store, at, fault)
        broker = RunningBroker(registry)
        try:
            broker.join("127.0.0.1:1")
            registry.is_counting = False
            with place.keys() as keys:
                assert [each.key for each in keys.scan(records.BROKERS)] == [
                    records.broker_key(broker.broker.membership.incarnation)
                ], f"{fault} at {at}"
            broker.leave()
        finally:
            broker.close()
        return len(registry.requests)

    first = start(None)  # which also makes the cluster's id
    assert 11 <= first <= REQUESTS_MAX
    for at in range(1, first + 1):
        if at <= 4:
            place.store = MemoryStore()
        start(at)


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("name", ["serve", "web", "upkeep"])
def test_r5_a_start_survives_a_fault_at_each_request(place: Place, name: str, fault: Fault) -> None:
    it = command(name, place)
    if name == "upkeep":
        with pxrs.open(place.path / "hub", registry=f"file:{place.path}") as hub:
            hub.parts.registry._registry = place.keys()
            hub.join_registry()
    count = len(place.run(it, None, fault, check_nothing))
    assert it.requests_min <= count <= REQUESTS_MAX
    for at in range(1, count + 1):
        place.run(it, at, fault, check_nothing)


def check_registered(place: Place, folder: str) -> Callable[[], None]:
    """Check that the node is alive, and that its disk and the registry agree on its start (C5)."""

    def check() -> None:
        cookie = json.loads((place.path / folder / "node.json").read_text())
        with place.keys() as registry:
            alive, entry = (
                registry.get(records.alive_key(cookie["node"])),
                registry.get(records.node_key(cookie["node"])),
            )
        assert alive is not None
        assert entry is not None
        record = NodeRecord.parse(entry.key, entry.value)
        assert AliveNode.parse(alive.key, alive.value).starts == record.starts == cookie["starts"]
        assert cookie["tries"][-1] == record.start

    return check


@pytest.mark.parametrize("fault", Fault)
def test_c5_the_first_start_of_a_storage_node_survives_a_fault_at_each_request(place: Place, fault: Fault) -> None:
    first = storage(place, "first")
    count = len(place.run(first, None, fault, check_registered(place, "first")))
    assert first.requests_min <= count <= REQUESTS_MAX
    for at in range(1, count + 1):
        place.store = MemoryStore()
        place.run(storage(place, f"node-{at}"), at, fault, check_registered(place, f"node-{at}"))


@pytest.mark.parametrize("fault", Fault)
def test_c5_a_storage_node_that_starts_again_stays_the_same_node_whatever_fails(place: Place, fault: Fault) -> None:
    it, cookie = storage(place), place.path / "node" / "node.json"
    place.run(it, None, fault, check_nothing)
    node = json.loads(cookie.read_text())["node"]
    count = len(place.run(it, None, fault, check_registered(place, "node")))
    assert it.requests_min <= count <= REQUESTS_MAX
    for at in range(1, count + 1):
        place.run(it, at, fault, check_registered(place, "node"))
        assert json.loads(cookie.read_text())["node"] == node, f"{fault} at {at}"
    assert not list((place.path / "node").glob("aside-*"))


@pytest.mark.parametrize("name", ["storage", "broker", "serve", "web"])
def test_a_registry_that_stays_away_ends_the_command_with_what_to_do(place: Place, name: str) -> None:
    it = command(name, place)

    def away() -> Registry:
        raise RegistryUnavailable("nobody answers")

    it = it._replace(arguments=(*it.arguments, "--registry-wait", "0.01"))
    result = place.run_with(it, away, check_nothing)
    assert result.code == EXIT_FAILED
    assert "waited 0.01 s for the" in result.errors
    assert "nobody answers. Check that it is running and reachable from here" in result.errors


@pytest.mark.parametrize("name", ["storage", "broker", "serve", "web"])
def test_an_error_that_cannot_pass_ends_the_command_at_once(place: Place, name: str) -> None:
    it, calls = command(name, place), list[int]()

    def refused() -> Registry:
        calls.append(1)
        raise AccessDenied("wrong password")

    result = place.run_with(it, refused, check_nothing)
    assert (result.code, len(calls)) == (1 if name == "web" else EXIT_FINAL, 1)
    assert "wrong password" in result.errors
