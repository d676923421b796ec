"""`pxrs worker` and what fails in it: it is shown, and what can never work is not tried again."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs import ConsumeOnce
from pxrs.cli import worker
from pxrs.cli.worker_settings import EXIT_BAD_HANDLER, EXIT_CANNOT_WORK, EXIT_FAILED, EXIT_UNREACHABLE, Settings
from pxrs.group.records import Keys, Member
from pxrs.metrics.reports import Reports
from pxrs.testing.forked import Forked, run_text
from pxrs.testing.waiting import eventually

PATIENCE_S = 60.0
FORKED_WORKERS = "pxrs.testing.forked_workers"
SHOP = """
def reject(message):
    raise ValueError("not this one")

def reject_item(tx, item):
    raise ValueError("not this item")

def take(message):
    pass
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[pxrs.Hub]:
    (tmp_path / "shop.py").write_text(SHOP)
    with pxrs.open(tmp_path / "data") as hub:
        hub.create_topic("t", partitions=1)
        with hub.producer("t") as out:
            out.send(b"x")
        yield hub


def run(folder: Path, handler: str, *arguments: str, are_forked: bool = True) -> subprocess.CompletedProcess[str]:
    """are_forked: the workers are, which is cheaper than to start them as `pxrs worker` does."""
    module = FORKED_WORKERS if are_forked else "pxrs.cli"
    return run_text(module, ["worker", handler, "--at", "data", *arguments], cwd=folder, timeout=PATIENCE_S)


def events(lines: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in map(json.loads, lines.splitlines()) if event["event"] == kind]


# What is shown.


def test_people_are_shown_what_a_handler_raised_when_and_where(hub: pxrs.Hub, tmp_path: Path) -> None:
    done = run(tmp_path, "shop:reject", "--topic", "t", "--group", "g", "--until-end", are_forked=False)
    assert done.returncode == 3, done.stderr
    lines = done.stderr.splitlines()
    told = [number for number, line in enumerate(lines) if "t/0 offset 0: the handler failed, pausing" in line]
    assert len(told) == 1, done.stderr
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ worker 1: group g, ", lines[told[0]])
    assert lines[told[0]].endswith(": ValueError: not this one")
    shown = lines[told[0] + 1 : told[0] + 5]
    assert shown[0] == "    Traceback (most recent call last):"
    assert shown[1].endswith('shop.py", line 3, in reject')
    assert shown[3] == "    ValueError: not this one"
    assert all(re.match(r"\d{4}-\d\d-\d\d |    ", line) for line in lines), "every event has its time"


def test_machines_are_given_the_fields_and_the_traceback(hub: pxrs.Hub, tmp_path: Path) -> None:
    options = ("--on-error", "retry", "--retries", "1", "--until-end", "--json")
    done = run(tmp_path, "shop:reject", "--topic", "t", "--group", "g", *options)
    first, last = events(done.stderr, "log")
    fields = ("group", "topic", "partition", "offset", "error_type", "level", "worker", "logger")
    assert [last[name] for name in fields] == ["g", "t", 0, 0, "ValueError", "error", 1, "pxrs.consumer.runner"]
    assert "in reject" in first["traceback"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", last["time"])
    assert "\n" not in first["text"]


def test_a_handler_that_ends_its_worker_is_shown_with_its_traceback(hub: pxrs.Hub, tmp_path: Path) -> None:
    command = ["worker", "shop:reject", "--at", "data", "--topic", "t", "--group", "g", "--on-error", "raise", "--json"]
    with (tmp_path / "told").open("wb") as told:
        process = Forked(FORKED_WORKERS, command, cwd=tmp_path, stderr=told.fileno())
    try:
        (failed, *_) = eventually(lambda: events((tmp_path / "told").read_text(), "failed"), PATIENCE_S)
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert "the handler failed on t/0 offset 0: ValueError: not this one" in failed["text"]
    assert "in reject" in failed["traceback"]


def test_a_worker_of_a_queue_shows_what_was_raised(hub: pxrs.Hub, tmp_path: Path) -> None:
    queue = hub.create_queue("q", ConsumeOnce())
    item = queue.put("x")
    command = ["worker", "shop:reject_item", "--at", "data", "--queue", "q", "--json"]
    with (tmp_path / "told").open("wb") as told:
        process = Forked(FORKED_WORKERS, command, cwd=tmp_path, stderr=told.fileno())
    try:
        (failed,) = eventually(lambda: events((tmp_path / "told").read_text(), "log"), PATIENCE_S)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
    assert [failed[name] for name in ("queue", "item", "deliveries", "error_type")] == ["q", item, 1, "ValueError"]
    assert "in reject_item" in failed["traceback"]


# What is not tried again.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--lease-ttl", "0.001"), "lease_ttl is 0.001"),
        (("--on-error", "dead-letter", "--dead-letters", "t"), "dead_letters is the topic t itself"),
    ],
)
def test_an_option_that_can_never_work_ends_the_command_at_once(
    hub: pxrs.Hub, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    done = run(tmp_path, "shop:take", "--topic", "t", "--group", "g", *arguments)
    assert done.returncode == 2, done.stderr
    assert " ".join(done.stderr.split()).count(words) == 1, done.stderr
    assert "started" not in done.stderr


def test_a_lease_that_no_store_grants_ends_a_worker_of_a_queue_too(hub: pxrs.Hub, tmp_path: Path) -> None:
    hub.create_queue("q")
    done = run(tmp_path, "shop:reject_item", "--queue", "q", "--lease-ttl", "0.001")
    assert (done.returncode, "lease_ttl is 0.001" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ({"is_alone": True}, "group g belongs to other on h alone"),
        ({"assignor": "range"}, "group g: this member has the assignor 'sticky', but other on h has"),
    ],
)
def test_a_refusal_of_the_registry_ends_the_command_and_the_other_workers(
    hub: pxrs.Hub, tmp_path: Path, there: dict[str, Any], words: str
) -> None:
    topic = hub.topic("t")
    with hub.registry.lease(60) as lease:
        other = Member("other", topic.id, "t", 1, host="h", **there)
        hub.registry.commit(ephemeral={Keys("g").member("m1"): other.dump()}, lease=lease)
        done = run(tmp_path, "shop:take", "--topic", "t", "--group", "g", "--processes", "2", "--json")
    assert done.returncode == 3, done.stderr
    failed = events(done.stderr, "failed")
    assert failed
    assert all(words in event["text"] for event in failed)
    assert events(done.stderr, "died") == []
    (stopping, *_) = events(done.stderr, "stopping")
    assert "cannot work" in stopping["text"]


class Trial:
    """A process that has ended with this code."""

    def __init__(self, code: int) -> None:
        self.returncode = code

    def poll(self) -> int:
        return self.returncode


def test_a_registry_that_stays_away_at_the_start_ends_the_command_after_the_wait(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker, "RESTART_S", (0.001, 0.002))
    monkeypatch.setattr(worker, "spawn", lambda settings, reports: Trial(EXIT_UNREACHABLE))
    settings = Settings("shop:take", ["t"], "g", "data", None, 1, 1.0, {})
    with closing(Reports()) as reports:
        supervisor = worker.Supervisor(settings, 1, reports, start_s=0.05)
        monitor = supervisor.monitor(reports)
        assert monitor.ready().reason == "waiting for the registry"
        assert supervisor.run() == EXIT_FAILED
        assert monitor.ready().reason == "waiting for the registry: the trial process cannot reach the registry"
    told = capfd.readouterr().err
    assert "starting it again in" in told
    assert "for 0.05 s now; ending: see that the registry runs" in told


@pytest.mark.parametrize(
    ("codes", "tried", "code"),
    [
        ([EXIT_FAILED, -signal.SIGKILL, 0], 3, 0),
        ([EXIT_FAILED, EXIT_CANNOT_WORK], 2, 3),
        ([EXIT_BAD_HANDLER], 1, 2),
        ([0], 1, 0),
    ],
)
def test_a_trial_is_repeated_only_for_what_may_pass(
    monkeypatch: pytest.MonkeyPatch, codes: list[int], tried: int, code: int
) -> None:
    monkeypatch.setattr(worker, "RESTART_S", (0.001, 0.002))
    supervisor = worker.Supervisor(Settings("shop:take", ["t"], "g", "data", None, 1, 1.0, {}), 1)
    started: list[Trial] = []

    def spawn(settings: Settings, reports: object) -> Any:
        assert settings.is_trial
        started.append(Trial(codes[len(started)]))
        return started[-1]

    monkeypatch.setattr(worker, "spawn", spawn)
    with supervisor._signals() as woken:
        assert supervisor._try(woken) == code
    assert len(started) == tried
