"""What every command of `pxrs` prints: times in UTC, tables that a pipe does not cut, counts, errors."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import pxrs
from pxrs import registry as registries
from pxrs import wording
from pxrs.cli import app, worker_process
from pxrs.cli.pipeline import progress
from pxrs.cluster import records as cluster_records
from pxrs.cluster.naming import cluster_id
from pxrs.cluster.records import BrokerRecord, DeletedTopic
from pxrs.group.records import Checkpoint, Keys, Leader, Member, Owner, Paused
from pxrs.testing.command import Call, Result, run_here

RFC_3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
TIMES = {"since", "ended", "when", "put_at", "died_at", "created", "expires", "timestamp", "time"}
"""The names of the fields that hold a time, in any output with --json."""
T_US = 1_700_000_000_123_456
T_TEXT = "2023-11-14T22:13:20.123456Z"
LONG = "v" * 3_000


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """A command in this process, with standard output and error as pipes of 40 columns."""
    monkeypatch.setenv("COLUMNS", "40")
    for name in ("PXRS_AT", "PXRS_REGISTRY"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> Result:
        return run_here(monkeypatch, capfd, arguments)

    return call


@pytest.fixture
def data(tmp_path: Path) -> Iterator[str]:
    """A hub with something of everything that has a time: a topic, a group with a member, queues, a dead letter."""
    url = str(tmp_path / "data")
    with pxrs.open(url) as hub:
        topic = hub.create_topic("orders", partitions=1)
        with hub.producer("orders") as out:
            out.send(b"x", timestamp=T_US)
        keys = Keys("billing")
        someone = Member("anna", topic.id, "orders", 1, "host", 7, T_US / 1e6)
        lease = hub.registry.lease(60)
        hub.registry.commit(ephemeral={keys.member("i1"): someone.dump()}, lease=lease)
        hub.registry.commit(
            put={
                keys.owner(topic.id, 0): Owner("i1", 9, "anna").dump(),
                keys.leader: Leader("i1", 3).dump(),
                keys.checkpoint(topic.id, 0): Checkpoint(0, T_US / 1e6, "anna", 9).dump(),
                keys.pause(topic.id, 0): Paused(0, "ValueError: no", T_US / 1e6, "anna").dump(),
            }
        )
        mail = hub.create_queue("mail", pxrs.ConsumeOnce())
        mail.put("dead " + LONG)
        with hub.transaction() as tx:
            assert tx.take("mail", timeout=10) is not None
            tx.rollback("bad address")
        mail.put("ready")
        yield url


def every_command() -> dict[str, Any]:
    def walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
        if not hasattr(command, "commands"):
            yield path, command
            return
        for name, each in command.commands.items():
            yield from walk(each, f"{path} {name}".strip())

    return dict(walk(typer.main.get_command(app.app), ""))


def fields(value: Any) -> Iterator[tuple[str, Any]]:
    """All fields of a JSON value, however deep, with their names."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield name, each
            yield from fields(each)
    elif isinstance(value, list):
        for each in value:
            yield from fields(each)


def check_times(line: str) -> set[str]:
    """The names of the times in it, which are all as they should be."""
    found = set()
    for name, value in fields(json.loads(line)):
        if name in TIMES or name.endswith("_at"):
            assert value is None or RFC_3339.fullmatch(value), (name, value)
            found.add(name)
        if isinstance(value, int | float):
            assert not 1e9 < value < 1e10, f"{name} is seconds since 1970: {value}"
            assert not 1e15 < value < 1e16, f"{name} is microseconds since 1970: {value}"
    return found


def test_every_time_in_json_is_rfc_3339_in_utc(
    data: str, call: Call, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    at, registry, table = ("--at", data), f"{data}/registry", f"sqlite:///{tmp_path}/t.db"
    auth = ("--auth", str(tmp_path / "tokens.json"))
    with sqlite3.connect(tmp_path / "t.db") as database:
        database.execute("CREATE TABLE t (id INTEGER PRIMARY KEY AUTOINCREMENT, v TEXT)")
    with pxrs.open(data) as hub:
        key = hub.registry.scan("queues/")[0].key
        hub.create_topic("copy", partitions=1)
    cluster = f"file:{tmp_path}/cluster"
    with registries.open(cluster) as opened:
        cluster_id(opened)
        opened.commit(
            put={
                cluster_records.broker_key("b1"): BrokerRecord("h:1", "first", started_at=T_US / 1e6).dump(),
                cluster_records.deleted_key("t1"): DeletedTopic("old", 1, T_US / 1e6).dump(),
            }
        )
    with_json = {
        "cluster status": [("cluster", "status", "--registry", cluster)],
        "topic list": [("topic", "list", *at)],
        "topic describe": [("topic", "describe", "orders", *at)],
        "tail": [("tail", "orders", *at)],
        "top": [("top", "--once", *at)],
        "audit": [("audit", *at)],
        "topic alter": [("topic", "alter", "orders", "--retention", "600", *at)],
        "topic copy": [("topic", "copy", "orders", "copy", *at)],
        "queue alter": [("queue", "alter", "mail", "--no-backoff", *at)],
        "backup": [("backup", str(tmp_path / "backup"), *at)],
        "restore": [("restore", str(tmp_path / "backup"), "--at", str(tmp_path / "restored"))],
        "check": [("check", data)],
        "group list": [("group", "list", *at)],
        "group describe": [("group", "describe", "billing", *at)],
        "group reset": [("group", "reset", "billing", "--to", "0", "--force", "--yes", *at)],
        "group import-checkpoint": [("group", "import-checkpoint", "new", "0", "--topic", "orders", *at)],
        "source add": [("source", "add", "table", "--table", "t", "--sql-table", table, "--value-column", "v", *at)],
        "source list": [("source", "list", *at)],
        "source describe": [("source", "describe", "table", *at)],
        "source remove": [("source", "remove", "table", "--yes", *at)],
        "queue list": [("queue", "list", *at)],
        "queue describe": [("queue", "describe", "mail", *at)],
        "queue depth": [("queue", "depth", "mail", *at)],
        "queue take": [("queue", "take", "mail", "--peek", *at), ("queue", "take", "mail", *at)],
        "queue dead list": [("queue", "dead", "list", "mail", *at)],
        "upkeep status": [("upkeep", "--once", *at), ("upkeep", "status", *at)],
        "token create": [("token", "create", "--name", "ci", "--allow", "hub=read", "--expires", "1d", *auth)],
        "token list": [("token", "list", *auth)],
        "token revoke": [("token", "revoke", "ci", *auth)],
        "registry scan": [("registry", "scan", registry, "queues/")],  # stored values are shown as they are stored
        "registry get": [("registry", "get", registry, key)],
    }
    processes = {"worker", "pipeline run"}  # they print events, which the processes of both make with one function
    without = {"ping", "send"}  # which print durations alone, and no JSON at all: it reads JSON
    known = {path for path, command in every_command().items() if any("--json" in each.opts for each in command.params)}
    alike = {"events"}  # printed by the function that prints those of `audit`
    assert known == with_json.keys() | processes | without | alike
    times: dict[str, set[str]] = {}
    for path, runs in with_json.items():
        for arguments in runs:
            result = call(*arguments, "--json")
            assert result.code == 0, (path, result)
            assert result.out, path
            for line in result.out.splitlines():
                times.setdefault(path, set()).update(check_times(line))
    assert times["cluster status"] == {"started_at", "deleted_at"}
    assert times["group describe"] == {"since", "when"}
    assert times["tail"] == {"timestamp"}
    assert times["source list"] == {"since"}
    assert times["upkeep status"] == {"since", "ended"}
    assert times["queue describe"] == {"created"}
    assert times["token list"] == {"created", "expires"}
    assert times["queue take"] == {"put_at"}
    assert times["queue dead list"] == {"put_at", "died_at"}
    capfd.readouterr()
    worker_process.tell(True, "started", "worker 1 started")
    assert check_times(capfd.readouterr().err) == {"time"}
    progress.tell_event(True, "stopping", "stopping")
    assert check_times(capfd.readouterr().out) == {"time"}


def test_a_message_in_json_keeps_its_time_also_beyond_the_calendar(tmp_path: Path, call: Call) -> None:
    with pxrs.open(tmp_path / "data") as hub:
        hub.create_topic("t", partitions=1)
        with hub.producer("t") as out:
            for timestamp in (T_US, -1, 1 << 62):
                out.send(b"x", timestamp=timestamp)
    lines = [json.loads(line) for line in call("tail", "t", "--json", "--at", str(tmp_path / "data")).out.splitlines()]
    assert [line.get("timestamp") for line in lines] == [T_TEXT, "1969-12-31T23:59:59.999999Z", None]
    assert "timestamp" not in lines[2]
    assert lines[2]["timestamp_us"] == 1 << 62


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (0, "1970-01-01T00:00:00.000000Z"),
        (T_US, T_TEXT),
        (-62_135_596_800_000_000, "0001-01-01T00:00:00.000000Z"),
        (-62_135_596_800_000_001, None),
        (253_402_300_799_999_999, "9999-12-31T23:59:59.999999Z"),
        (253_402_300_800_000_000, None),
    ],
)
def test_a_time_is_rfc_3339_as_far_as_the_calendar_goes(us: int, text: str | None) -> None:
    assert wording.rfc3339(us) == text


def test_seconds_become_microseconds_and_what_is_no_time_none() -> None:
    assert wording.microseconds(T_US / 1e6) == T_US
    assert [wording.microseconds(each) for each in (float("nan"), float("inf"), None, 0.0)] == [None, None, None, None]


def test_every_time_in_a_table_says_that_it_is_utc(data: str, call: Call) -> None:
    at = ("--at", data)
    assert "2023-11-14T22:13:20.123456Z x" in call("tail", "orders", *at).out
    shown = call("group", "describe", "billing", *at).out
    assert shown.count("2023-11-14 22:13:20Z") == 2, "of the member and of the checkpoint"
    moment = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ"
    assert re.search(f"created {moment}", call("queue", "describe", "mail", *at).out)
    assert re.search(moment, call("queue", "take", "mail", "--peek", *at).out)
    assert re.search(moment, call("queue", "dead", "list", "mail", *at).out)


def test_a_table_in_a_pipe_is_neither_cut_nor_wrapped(data: str, call: Call) -> None:
    """Whatever COLUMNS says, which is 40 here: a row is a line, and a value is whole."""
    with pxrs.open(data) as hub:
        hub.registry.commit(put={f"long/{'k' * 200}": LONG.encode()})
        hub.create_topic("t" * 90)
        hub.create_queue("q" * 90)
        hub.group("g" * 90).import_checkpoint({0: 0}, "orders")
    at = ("--at", data)
    scanned = call("registry", "scan", f"{data}/registry", "long/").out.splitlines()
    assert len(scanned) == 2
    assert scanned[1].split()[0] == f"long/{'k' * 200}"
    assert scanned[1].split()[2] == LONG
    for arguments, whole in (
        (("topic", "list"), "t" * 90),
        (("topic", "describe", "orders"), "partitioner xxh64  codec none"),
        (("queue", "list"), "q" * 90),
        (("queue", "describe", "mail"), "order by priority, then by age; best effort  backoff none"),
        (("queue", "dead", "list", "mail"), f"dead {LONG}"),
        (("group", "list"), "g" * 90),
        (("group", "describe", "billing"), "anna (leader)"),
        (("group", "import-checkpoint", "h", "0", "--topic", "orders"), "orders"),
    ):
        shown = call(*arguments, *at).out
        assert whole in shown, arguments
        assert "…" not in shown, arguments
    assert len(call("group", "list", *at).out.splitlines()) == 4


def test_on_a_terminal_a_long_value_of_the_registry_is_shortened(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pxrs.registry.open(tmp_path) as registry:
        registry.commit(put={"long/k": LONG.encode()})
    monkeypatch.setattr("pxrs.cli.registry.is_terminal", lambda: True)
    assert "3,000 bytes" in " ".join(call("registry", "scan", str(tmp_path), "long/").out.split())


def test_counts_agree_with_their_nouns(tmp_path: Path, call: Call) -> None:
    assert [wording.counted(number, "message") for number in (0, 1, 2, 1_000)] == [
        "0 messages",
        "1 message",
        "2 messages",
        "1,000 messages",
    ]
    assert wording.counted(1, "entry", "entries") == "1 entry"
    assert wording.counted(2, "entry", "entries") == "2 entries"
    at = ("--at", str(tmp_path / "data"))
    assert call("topic", "create", "t", "--partitions", "1", *at).out == "made t with 1 partition\n"
    with pxrs.open(tmp_path / "data") as hub, hub.producer("t") as out:
        out.send(b"x")
    assert call("check", str(tmp_path / "data")).out.startswith("1 message, ")
    assert call("topic", "delete", "t", "--yes", *at).out == "removed t and its 1 message\n"


def test_an_error_begins_with_what_happened_and_ends_with_its_class(data: str, call: Call, tmp_path: Path) -> None:
    at = ("--at", data)
    for arguments, line in (
        (
            ("tail", "nope", *at),
            "no topic 'nope'; there are orders; create it with create_topic or `pxrs topic create` (UnknownTopic)",
        ),
        (("group", "describe", "nope", *at), "no group 'nope'; see `pxrs group list` (UnknownGroup)"),
        (
            ("queue", "list", "--at", f"{data}/typo"),
            f"there is no directory {data}/typo: correct --at or PXRS_AT (InvalidUrl)",
        ),
        (
            ("group", "skip", "billing", "orders", "0", *at),
            "Not a terminal; pass --yes to confirm",
        ),
        (
            ("queue", "dead", "retry", "mail", "x", *at),
            f"1 of these is no dead letter of mail: see `pxrs queue dead list mail --at {data}`",
        ),
    ):
        result = call(*arguments)
        assert result.code in (1, 2)
        assert result.errors == f"{line}\n"


def test_an_error_of_the_system_begins_with_what_happened(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, os.strerror(28), "/out")

    monkeypatch.setattr("typer.echo", full)
    result = call("registry", "ddl", "--dialect", "sqlite")
    assert (result.code, result.errors) == (1, "No space left on device: /out (OSError)\n")


def test_what_ends_a_worker_is_told_before_its_class(capfd: pytest.CaptureFixture[str]) -> None:
    settings = worker_process.Settings("m:h", ["t"], "g", "at", None, 1, 1.0, {}, as_json=True, number=3)
    with pytest.raises(SystemExit):
        worker_process._fail(settings, "worker 3: ", pxrs.errors.UnknownTopic("t"))
    event = json.loads(capfd.readouterr().err)
    assert event["text"].startswith("worker 3: no topic 't'; create it")
    assert event["text"].endswith("(UnknownTopic)")
    assert event["error_type"] == "UnknownTopic"


def test_a_time_that_no_calendar_has_is_shown_as_a_number() -> None:
    for seconds in (1e305, -1e305, sys.float_info.max):
        assert wording.microseconds(seconds) == int(seconds) * 1_000_000
        assert wording.time_text(seconds) == f"{int(seconds) * 1_000_000}us"
    assert wording.microseconds(float("inf")) is None
