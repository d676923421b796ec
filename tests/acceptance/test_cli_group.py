"""Consumer groups from the command line: real processes over a real directory."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs import registry as registries
from pxrs.cli import group as command_group
from pxrs.group.admin import GroupHandle
from pxrs.group.records import Checkpoint, Keys, Leader, Member, Owner, Paused
from pxrs.hub import Hub
from pxrs.registry import Registry
from pxrs.testing import forked
from pxrs.testing.waiting import eventually

COMMAND = [sys.executable, "-m", "pxrs.cli", "group"]
KEYS = Keys("billing")
WATCH_S_MAX = 120.0


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A log whose topic orders has 5 messages in each of 2 partitions, of the seconds 1000 to 1004."""
    data = tmp_path / "data"
    with pxrs.open(data) as hub:
        hub.create_topic("orders", partitions=2)
        with hub.producer("orders") as out:
            for number in range(10):
                out.send(b"x", partition=number % 2, timestamp=(1000 + number // 2) * 1_000_000)
    return data


@pytest.fixture
def topic(data: Path) -> str:
    with pxrs.open(data) as hub:
        return hub.topic("orders").id


@pytest.fixture
def group(data: Path) -> Path:
    """And a group that has read 2 of each."""
    with pxrs.open(data) as hub:
        hub.group("billing").import_checkpoint({0: 2, 1: 2}, "orders")
    return data


@contextmanager
def member(data: Path, topic: str) -> Iterator[Registry]:
    """Somebody is there, and owns the first partition."""
    with registries.open(data / "registry") as registry, registry.lease(30) as lease:
        someone = Member("anna\x1b[2J[/]", topic, "orders", 2, "host", 7, 1_700_000_000.0)
        registry.commit(ephemeral={KEYS.member("i1"): someone.dump()}, lease=lease)
        owner = {KEYS.owner(topic, 0): Owner("i1", 9, "anna\x1b[2J[/]").dump()}
        registry.commit(put={**owner, KEYS.leader: Leader("i1", 3).dump()})
        yield registry


def pause(data: Path, topic: str, partition: int) -> None:
    with registries.open(data / "registry") as registry:
        registry.commit(put={KEYS.pause(topic, partition): Paused(2, "ValueError: [/]\x07 bad").dump()})


def environment(data: Path) -> dict[str, str]:
    return {**os.environ, "PXRS_AT": str(data), "COLUMNS": "200", "NO_COLOR": "1", "TERM": "xterm"}


def run(data: Path, *arguments: str, **rest: Any) -> subprocess.CompletedProcess[str]:
    return forked.run_text("pxrs.cli", ["group", *arguments], **{"env": environment(data), **rest})


def answer(data: Path, text: str, *arguments: str) -> tuple[int, str]:
    """Run it with a terminal to ask at; the exit code and what was printed to it and to standard output."""
    ours, theirs = pty.openpty()
    os.write(ours, text.encode())
    result = run(data, *arguments, stdin=theirs)
    os.close(ours)
    os.close(theirs)
    return result.returncode, result.stdout + result.stderr


@contextmanager
def watching(command: list[str], data: Path, **rest: Any) -> Iterator[subprocess.Popen[Any]]:
    """A command that ends when it is told to, and is killed if that is not soon: nobody reads from it for ever."""
    with subprocess.Popen(command, env=environment(data), **rest) as process:
        limit = threading.Timer(WATCH_S_MAX, process.kill)
        limit.start()
        try:
            yield process
        finally:
            limit.cancel()
            process.kill()


def rows(result: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def offsets(data: Path) -> list[int]:
    with pxrs.open(data) as hub:
        rows = GroupHandle(hub.registry, "billing", hub).describe().partitions
    return [-1 if row.checkpoint is None else row.checkpoint for row in rows]


def refusal(result: subprocess.CompletedProcess[str], code: int = 1) -> str:
    assert (result.returncode, result.stdout) == (code, "")
    (line,) = result.stderr.splitlines()
    return line


def test_x17_groups_are_listed_for_people_and_machines(group: Path) -> None:
    counts = {"group": "billing", "members": 0, "partitions": 2}
    lag = {"lag": 6, "is_lag_exact": True, "lag_problem": None}
    assert rows(run(group, "list", "--json")) == [{**counts, **lag}]
    assert run(group, "list").stdout.split() == ["group", "members", "partitions", "lag", "billing", "0", "2", "6"]


def test_a_group_that_is_deleted_while_they_are_listed_is_left_out(
    group: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Hub, "groups", lambda hub: ["billing", "gone"])
    command_group.list_(str(group), None, as_json=True)
    assert json.loads(capsys.readouterr().out)["group"] == "billing"


def test_x17_a_group_is_described_for_machines(group: Path, topic: str) -> None:
    pause(group, topic, 1)
    with member(group, topic):
        (found,) = rows(run(group, "describe", "billing", "--json"))
    assert (found["group"], found["lag"], found["leader"]) == ("billing", 6, "i1")
    assert found["members"][0]["name"] == "anna\x1b[2J[/]"
    first, second = found["partitions"]
    assert (first["owner"], first["epoch"], first["checkpoint"], first["by"]) == ("i1", 9, 2, "import")
    assert (first["start"], first["end"], first["lag"], first["paused"]) == (0, 5, 3, None)
    assert (second["owner"], second["paused"]["offset"], second["paused"]["error"]) == (
        *(None, 2),
        "ValueError: [/]\x07 bad",
    )


def test_x17_a_group_is_described_for_people_and_shown_safely(group: Path, topic: str) -> None:
    pause(group, topic, 1)
    with member(group, topic):
        shown = run(group, "describe", "billing").stdout
    assert "billing  generation 0  members 1  lag 6" in shown
    assert "anna\\x1b[2J[/] (leader)" in shown
    assert "2023-11-14 22:13:20" in shown
    assert "orders/1 is paused at offset 2: ValueError: [/]\\x07 bad" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown
    gone = run(group, "describe", "billing").stdout
    assert "anna\\x1b[2J[/] (gone)" in gone
    assert "free" in gone


def test_a_group_is_reset(group: Path) -> None:
    moved = run(group, "reset", "billing", "--to", "earliest", "--yes", "--json")
    assert rows(moved) == [{"topic": "orders", "partition": p, "offset": 0} for p in (0, 1)]
    assert offsets(group) == [0, 0]
    for where, expected in (
        (("--to", "latest"), [5, 5]),
        (("--to", "3", "--topic", "orders"), [3, 3]),
        (("--partition", "1=4"), [3, 4]),
        (("--partition", "0=1", "--partition", "1=2"), [1, 2]),
        (("--to", "1970-01-01T00:16:43+00:00"), [3, 3]),
        (("--to", "2000-01-01"), [5, 5]),
    ):
        assert run(group, "reset", "billing", *where, "--yes").returncode == 0, where
        assert offsets(group) == expected, where


def test_a_time_without_a_zone_is_this_machines(group: Path) -> None:
    zone = {**environment(group), "TZ": "XXX-02:00"}
    run(group, "reset", "billing", "--to", "1970-01-01T02:16:41", "--yes", env=zone)
    assert offsets(group) == [1, 1]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--to", "latest", "--partition", "0=1"),
        ("--to", "soon"),
        ("--partition", "0"),
        ("--partition", "0=-1"),
        ("--partition", "0=1", "--partition", "0=2"),
    ],
)
def test_a_reset_that_cannot_be_understood_is_a_usage_error(group: Path, arguments: tuple[str, ...]) -> None:
    result = run(group, "reset", "billing", "--yes", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr
    assert offsets(group) == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("describe", "nobody"), "no group 'nobody'; see `pxrs group list`"),
        (("describe", "nobody", "--watch"), "no group 'nobody'"),
        (("reset", "nobody", "--to", "latest"), "no group 'nobody'"),
        (("delete", "nobody"), "no group 'nobody'"),
        (("reset", "billing", "--to", "6", "--yes"), "orders/0: offset 6 is beyond the end, 5"),
        (("reset", "billing", "--to", "latest", "--topic", "x", "--yes"), "no topic 'x'"),
        (("import-checkpoint", "new", "3", "--topic", "x"), "no topic 'x'"),
        (("retry", "billing", "orders", "0"), "group billing: partition 0 of orders is not paused"),
        (("skip", "billing", "orders", "0"), "group billing: partition 0 of orders is not paused"),
    ],
)
def test_an_error_is_one_line(group: Path, arguments: tuple[str, ...], words: str) -> None:
    assert refusal(run(group, *arguments)).startswith(words)


def test_a_name_that_no_group_can_have_is_a_usage_error(group: Path) -> None:
    assert refusal(run(group, "describe", "a/b"), 2).startswith("group name 'a/b'")


def test_nothing_is_done_to_a_group_with_members_unless_forced(group: Path, topic: str) -> None:
    with member(group, topic):
        for arguments in (
            ("reset", "billing", "--to", "latest", "--yes"),
            ("delete", "billing", "--yes"),
            ("import-checkpoint", "billing", "--partition", "0=3", "--topic", "orders", "--force", "--yes"),
        ):
            assert refusal(run(group, *arguments)).startswith("group billing has members: anna")
        assert offsets(group) == [2, 2]
        assert run(group, "reset", "billing", "--to", "latest", "--yes", "--force").returncode == 0
        assert offsets(group) == [5, 5]
        assert run(group, "delete", "billing", "--yes", "--force").stdout == "removed group billing\n"
        assert rows(run(group, "list", "--json")) == []


def test_what_destroys_asks_first_and_only_at_a_terminal(group: Path, topic: str) -> None:
    pause(group, topic, 0)
    commands = [
        ("skip", "billing", "orders", "0"),
        ("import-checkpoint", "billing", "--partition", "0=3", "--topic", "orders", "--force"),
        ("reset", "billing", "--to", "latest"),
        ("delete", "billing"),
    ]
    for command in commands:
        assert refusal(run(group, *command), 2) == "Not a terminal; pass --yes to confirm"
        code, shown = answer(group, "n\n", *command)
        assert (code, "?" in shown) == (1, True), command
    without_input = [*COMMAND, "delete", "billing"]
    assert subprocess.run(without_input, env=environment(group), preexec_fn=lambda: os.close(0)).returncode == 2
    assert offsets(group) == [2, 2]
    for command in commands:
        code, shown = answer(group, "y\n", *command)
        assert code == 0, shown
    assert rows(run(group, "list", "--json")) == []


def test_a_deleted_group_leaves_its_guards(group: Path, topic: str) -> None:
    assert run(group, "delete", "billing", "--yes").stdout == "removed group billing\n"
    assert refusal(run(group, "describe", "billing")).startswith("no group 'billing'")
    with registries.open(group / "registry") as registry:
        left = [KEYS.home, *(KEYS.owner(topic, p) for p in (0, 1)), KEYS.starts(topic)]
        assert [entry.key for entry in registry.scan("groups/")] == left


def test_x21_an_old_checkpoint_is_imported(data: Path) -> None:
    arguments = ("import-checkpoint", "billing", "--topic", "orders")
    assert rows(run(data, *arguments, "--partition", "1=4", "--json")) == [
        {"topic": "orders", "partition": 1, "offset": 4}
    ]
    assert "orders" in run(data, *arguments, "--partition", "0=3", "--partition", "1=1").stdout
    assert offsets(data) == [3, 4]
    assert run(data, *arguments, "--partition", "0=1").stdout.startswith("nothing was written: ")
    assert run(data, *arguments, "--partition", "0=5", "--force", "--yes").returncode == 0
    assert offsets(data) == [5, 4]
    assert "orders has 2 partitions" in refusal(run(data, *arguments, "3", "--force", "--yes"), 2)
    assert offsets(data) == [5, 4]
    for wrong in ((), ("3", "--partition", "0=3"), ("-1",)):
        assert run(data, *arguments, *wrong).returncode == 2, wrong


def test_x14_a_paused_partition_is_retried_or_skipped(group: Path, topic: str) -> None:
    for partition in (0, 1):
        pause(group, topic, partition)
    later = " (takes effect when a member joins; the group has none now)"
    assert run(group, "retry", "billing", "orders", "0").stdout == f"group billing retries orders/0{later}\n"
    skipped = run(group, "skip", "billing", "orders", "1", "--yes").stdout
    assert skipped == f"group billing skipped orders/1 offset 2{later}\n"
    (found,) = rows(run(group, "describe", "billing", "--json"))
    assert [row["paused"] and row["paused"]["skip"] for row in found["partitions"]] == [None, True]
    assert "orders/1 is about to skip offset 2: ValueError" in run(group, "describe", "billing").stdout


def test_the_registry_may_be_elsewhere(data: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'groups.db'}"
    arguments = ("import-checkpoint", "billing", "--partition", "0=3", "--topic", "orders", "--registry", url)
    assert run(data, *arguments, "--partition", "1=3").returncode == 0
    assert rows(run(data, "list", "--json")) == []
    (found,) = rows(run(data, "list", "--json", "--registry", url))
    assert (found["group"], found["lag"]) == ("billing", 4)


def test_a_wrong_path_is_an_error_and_leaves_nothing_behind(tmp_path: Path) -> None:
    assert refusal(run(tmp_path / "typo", "list"), 2).startswith("there is no directory ")
    assert not (tmp_path / "typo").exists()


def test_watching_prints_each_change_of_the_group_and_of_its_lag(group: Path, topic: str) -> None:
    command = [*COMMAND, "describe", "billing", "--watch", "--json"]
    with watching(command, group, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["lag"] == 6
            with registries.open(group / "registry") as registry:
                registry.commit(put={KEYS.checkpoint(topic, 0): Checkpoint(4).dump()})
            assert json.loads(process.stdout.readline())["lag"] == 4
            with pxrs.open(group) as hub, hub.producer("orders") as out:
                out.send(b"x", partition=0)
            assert json.loads(process.stdout.readline())["lag"] == 5, "no key of the group has changed"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def test_watching_on_a_terminal_draws_anew_until_the_group_is_gone(group: Path, topic: str) -> None:
    ours, theirs = pty.openpty()
    command = [*COMMAND, "describe", "billing", "--watch"]
    with watching(command, group, stdout=theirs, stderr=subprocess.PIPE) as process:
        os.close(theirs)
        shown = b""
        while b"lag 6" not in shown:
            shown += os.read(ours, 1 << 16)
        with registries.open(group / "registry") as registry:
            registry.commit(put={KEYS.checkpoint(topic, 0): Checkpoint(4).dump()})
        while b"lag 4" not in shown:
            shown += os.read(ours, 1 << 16)
        assert b"\x1b[1A" in shown, "the cursor goes up: it is drawn over the last one"
        with pxrs.open(group) as hub:
            GroupHandle(hub.registry, "billing", hub).delete()
        try:
            while os.read(ours, 1 << 16):
                pass
        except OSError:  # Linux says so when the other end is closed
            pass
        _, errors = process.communicate(timeout=60)
    os.close(ours)
    assert (process.returncode, errors.startswith(b"no group 'billing'")) == (1, True), errors


def test_every_command_has_a_help(data: Path) -> None:
    shown = run(data, "--help").stdout
    for command in ("list", "describe", "reset", "delete", "import-checkpoint", "retry", "skip"):
        assert f"  {command} " in shown
    assert "--registry" in run(data, "import-checkpoint", "--help").stdout


def test_a_member_of_several_topics_is_shown_with_all_of_them(data: Path) -> None:
    with pxrs.open(data) as hub:
        for name in ("returns", "refunds", "faxes"):
            hub.create_topic(name, partitions=1)
        with (
            hub.consumer(["orders", "returns"], "billing", name="anna") as anna,
            hub.consumer(["orders", "returns", "refunds", "faxes"], "billing", name="ben") as ben,
        ):
            eventually(lambda: len(anna.assignment) + len(ben.assignment) == 5)
            (found,) = rows(run(data, "describe", "billing", "--json"))
            assert {member["name"]: member["topics"] for member in found["members"]} == {
                "anna": ["orders", "returns"],
                "ben": ["orders", "returns", "refunds", "faxes"],
            }
            assert {member["name"]: member["topic"] for member in found["members"]}["anna"] == "orders, returns"
            assert {(each["topic"], each["lag"]) for each in found["topics"]} == {
                ("orders", 10),
                *((name, 0) for name in ("returns", "refunds", "faxes")),
            }
            assert found["lag"] == 10
            shown = run(data, "describe", "billing").stdout
            assert "orders, returns " in shown
            assert "orders, returns, refunds and 1 more" in shown
            (listed,) = rows(run(data, "list", "--json"))
            assert (listed["members"], listed["partitions"], listed["lag"]) == (2, 5, 10)
            table = hub.group("billing").describe().to_arrow()
            assert sorted(set(table.column("topic").to_pylist())) == ["faxes", "orders", "refunds", "returns"]
