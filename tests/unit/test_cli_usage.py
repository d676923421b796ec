"""What every command refuses with exit code 2, and what it prints then."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main

import pxrs
import pxrs.sources
from pxrs.cli import app
from pxrs.cli.amounts import bytes_of_size, duration, seconds_of
from pxrs.testing.command import Call, Result, run_here

VARIABLES = ("PXRS_AT", "PXRS_REGISTRY", "PXRS_AUTH", "PXRS_REGISTRY_WAIT", "PXRS_METRICS_LISTEN", "PXRS_TOKEN")


class Terminal(io.TextIOWrapper):
    """Standard input at which somebody types."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """A command in this process, in a folder with the hub `data`, which has the topic `t`; nothing is typed."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    with pxrs.open("data") as hub:
        hub.create_topic("t", partitions=2)
    (tmp_path / "shop.py").write_text("def handle(message):\n    pass\n")

    def call(*arguments: str, stdin: str = "", is_terminal: bool = False, **environment: str) -> Result:
        kind = Terminal if is_terminal else io.TextIOWrapper
        monkeypatch.setattr(sys, "stdin", kind(io.BytesIO(stdin.encode())))
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            return run_here(patch, capfd, arguments).unwrapped()

    return call


def every_command() -> dict[str, Any]:
    """The commands that do something, by how they are called; also groups that do something themselves."""

    def walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
        inner = getattr(command, "commands", None)
        if inner is None or (path and command.invoke_without_command):
            yield path, command
        for name, each in (inner or {}).items():
            yield from walk(each, f"{path} {name}".strip())

    return dict(walk(typer.main.get_command(app.app), ""))


AT = ("--at", "data")
NOWHERE = ("--at", "nowhere")
WRONG: dict[str, list[tuple[str, ...]]] = {
    "send": [(), ("t", "v", *AT, "--partition", "-1"), ("t", "v", *AT, "--partition", "2"), ("t", "v", *AT, "-H", "x")],
    "tail": [("t", *AT, "--from", "soon"), ("t", *AT, "--partition", "9"), ("t", *AT, "--format", "{x}")],
    "top": [(), ("--once", *NOWHERE), ("--once", *AT, "--interval", "soon")],
    "topic create": [
        ("new", *AT, "--partitions", "0"),
        ("new", *AT, "--partitions", "many"),
        ("new", *AT, "--retention", "soon"),
        ("new", *AT, "--retention-bytes", "10XB"),
        ("new", *AT, "--codec", "nope"),
        ("new", *AT, "--durability", "nope"),
        ("new", *AT, "--partitioner", "nope"),
        ("new", "--at", "kafka://h"),
        ("new", "--at", "postgresql://h/d"),
        ("a/b", *AT),
    ],
    "topic list": [(), NOWHERE],
    "topic describe": [AT, ("t", *NOWHERE)],
    "topic delete": [AT, ("t", *AT)],
    "topic alter": [("t", *AT), ("t", *AT, "--retention", "soon"), ("t", *AT, "--partitions", "9")],
    "topic copy": [("t", *AT), ("t", "u", *AT, "--from", "soon"), ("t", "u", *AT, "--to-registry", "x")],
    "group list": [(), NOWHERE],
    "group describe": [AT, ("a/b", *AT)],
    "group reset": [("g", *AT), ("g", *AT, "--to", "soon"), ("g", *AT, "--partition", "x")],
    "group delete": [AT, ("a/b", *AT)],
    "group import-checkpoint": [("g", *AT), ("g", "--topic", "t", *AT), ("g", "-1", "--topic", "t", *AT)],
    "group retry": [("g", "t", *AT), ("g", "t", "x", *AT)],
    "group skip": [("g", "t", *AT), ("g", "t", "x", *AT)],
    "queue create": [
        ("a/b", *AT),
        ("q",),
        ("q", *AT, "--policy", "nope"),
        ("q", *AT, "--times", "3"),
        ("q", *AT, "--policy", "consume-times", "--times", "0"),
        ("q", *AT, "--backoff", "fixed", "--pause", "soon"),
    ],
    "queue list": [(), NOWHERE],
    "queue describe": [AT, ("q", *NOWHERE)],
    "queue depth": [AT, ("q", *NOWHERE)],
    "queue put": [("q", "v", *AT, "--priority", "99999"), ("q", "v", *AT, "--delay", "soon")],
    "queue take": [("q", *AT, "--count", "0"), ("q", *AT, "--peek", "--timeout", "1")],
    "queue delete": [AT, ("q", *NOWHERE)],
    "queue alter": [("q", *AT), ("q", *AT, "--backoff", "fixed")],
    "queue dead list": [("q", *AT, "--count", "0")],
    "queue dead retry": [("q", *NOWHERE)],
    "queue dead purge": [("q", *NOWHERE)],
    "source add": [
        ("s", *AT, "--table", "t", "--value-column", "v"),
        ("s", *AT, "--table", "t", "--sql-table", "sqlite:///f.db"),
        ("s", *AT, "--sql-table", "sqlite:///f.db", "--value-column", "v"),
        ("s", *AT, "--table", "t", "--sql-table", "nope://h/d", "--value-column", "v"),
    ],
    "source list": [(), NOWHERE],
    "source describe": [AT, ("s", *NOWHERE)],
    "source remove": [AT, ("s", *NOWHERE)],
    "worker": [
        ("shop:handle", *AT),
        ("shop:handle", "--topic", "t", "--group", "g"),
        ("shop:handle", *AT, "--topic", "t", "--group", "g/h"),
        ("shop:handle", *AT, "--topic", "t", "--group", "g", "--lease-ttl", "0"),
        ("shop:handle", *AT, "--topic", "t", "--group", "g", "--grace", "soon"),
        ("shop:handle", *AT, "--topic", "t", "--group", "g", "--assignor", "nope"),
        ("shop:handle", "--at", "nowhere/data", "--topic", "t", "--group", "g"),
        ("shop:handle", *AT, "--registry", "kafka://h", "--topic", "t", "--group", "g"),
        ("shop:handle", *AT, "--queue", "a/b"),
        ("shop:handle", *AT, "--queue", "q", "--queue", "q"),
        ("shop:handle", *AT, "--queue", "q", "--metrics-listen", "x"),
    ],
    "pipeline run": [
        AT,
        ("none.py", *AT),
        ("none.py", *NOWHERE),
        ("none.py", "--at", "memory:"),
        ("none.py", *AT, "--registry-wait", "-1"),
    ],
    "serve": [
        (),
        ("nowhere/data",),
        ("data", "--listen", "x"),
        ("data", "--limit", "x=1"),
        ("data", "--listen", "0.0.0.0:0"),
        ("data", "--listen", "127.0.0.1:0", "--auth", "none"),
        ("data", "--listen", "127.0.0.1:0", "--tls-cert", "none", "--tls-key", "none"),
        ("pxrs://127.0.0.1:1",),
    ],
    "broker": [
        (),
        ("--registry", "memory:"),
        ("--registry", "data/registry", "--lease-s", "0"),
        ("--registry", "data/registry", "--placement", "nope"),
        ("--registry", "data/registry", "--listen", "x"),
    ],
    "storage": [
        ("--registry", "data/registry"),
        ("--registry", "memory:", "--dir", "node"),
        ("--registry", "data/registry", "--dir", "node", "--limit", "x=1"),
    ],
    "cluster up": [("--brokers", "0"), ("--registry", "memory:"), ("--lease-s", "soon")],
    "cluster status": [(), ("--registry", "kafka://h")],
    "cluster retire": [(), ("node",), ("node", "--registry", "kafka://h")],
    "cluster reinstate": [(), ("node",), ("node", "--registry", "kafka://h")],
    "cluster forget": [(), ("node",), ("node", "--registry", "kafka://h")],
    "cluster abandon": [(), ("node",), ("node", "--registry", "kafka://h")],
    "cluster demo": [("--nope", "1")],
    "token create": [
        ("--auth", "tokens"),
        ("--auth", "tokens", "--name", "x", "--allow", "orders"),
        ("--auth", "tokens", "--name", "x", "--allow", "hub=read", "--expires", "soon"),
    ],
    "token list": [(), ("--auth", "none")],
    "token revoke": [("x",), ("--auth", "tokens")],
    "ping": [(), AT, ("--at", "pxrs://127.0.0.1:1", "--count", "0")],
    "upkeep": [(), ("--once", *NOWHERE), ("--at", "nowhere/data"), ("--once", *AT, "--metrics-listen", "0")],
    "upkeep status": [(), NOWHERE],
    "metrics": [(), ("--at", "nowhere/data"), (*AT, "--listen", "x"), (*AT, "--keep-s", "soon")],
    "events": [(), ("--registry", "data/registry"), (*AT, "--since", "soon"), NOWHERE],
    "audit": [(), ("--registry", "data/registry"), (*AT, "--since", "soon"), NOWHERE],
    "web": [
        (),
        ("--at", "nowhere/data"),
        (*AT, "--listen", "x"),
        (*AT, "--listen", "0.0.0.0:0"),
        (*AT, "--listen", "127.0.0.1:0", "--actions-token-file", "none"),
    ],
    "backup": [AT, ("copy", *NOWHERE), ("copy", "--at", "pxrs://127.0.0.1:1")],
    "restore": [(), ("copy",), ("copy", "--at", "pxrs://127.0.0.1:1")],
    "check": [(), ("nowhere",), ("pxrs://127.0.0.1:1",)],
    "registry ddl": [(), ("--dialect", "nope")],
    "registry scan": [(), ("nowhere",), ("kafka://h",), ("data/registry", "--limit", "0")],
    "registry get": [("data/registry",), ("nowhere", "k")],
    "registry adopt": [(), NOWHERE],
    "new": [(), ("class",), ("1x",)],
    "demo": [("--messages", "1"), ("--registry", "memory:")],
}
"""By command, arguments that it refuses with exit code 2."""


def test_every_command_has_arguments_in_the_table_that_it_refuses() -> None:
    assert WRONG.keys() == every_command().keys()


@pytest.mark.parametrize(
    ("command", "arguments"), [(command, given) for command, each in WRONG.items() for given in each], ids=str
)
def test_what_is_wrong_on_the_command_line_ends_with_2(call: Call, command: str, arguments: tuple[str, ...]) -> None:
    pytest.importorskip("grpc")
    before = set(os.listdir())
    result = call(*command.split(), *arguments)
    assert (result.code, result.out) == (2, ""), result
    assert result.errors
    assert "Traceback" not in result.errors
    assert set(os.listdir()) - {"__pycache__"} == before, "nothing was created; Python may have compiled the handler"


def test_an_option_that_no_command_has_ends_with_2_everywhere(call: Call) -> None:
    for command in every_command():
        result = call(*command.split(), "--no-such-option")
        assert (result.code, "No such option: --no-such-option" in result.errors) == (2, True), (command, result)


# Options that are given twice.


def test_an_option_that_takes_one_value_is_refused_when_it_is_repeated_by_every_command(call: Call) -> None:
    tried = 0
    for path, command in every_command().items():
        for option in command.params:
            if option.param_type_name != "option" or option.is_flag or option.multiple:
                continue
            tried += 1
            name = option.opts[0]
            result = call(*path.split(), name, "1", name, "1")
            assert result.code == 2, (path, name, result)
            assert f"'{name}'" in result.errors, (path, name, result)
            assert "given more than once; it takes one value" in result.errors, (path, name, result)
    assert tried > 200


def test_what_may_be_repeated_still_is_and_so_is_a_flag(call: Call) -> None:
    sent = call("send", "t", "v", *AT, "-H", "a=1", "-H", "b=2")
    assert sent.code == 0, sent
    shown = call("tail", "t", *AT, "--partition", "0", "--partition", "1", "--json", "--json")
    assert [header["key"] for header in shown.rows()[0]["headers"]] == ["a", "b"]


def test_an_option_of_all_commands_is_refused_when_it_is_repeated(call: Call) -> None:
    twice = call("--log-format", "text", "--log-format", "json", "topic", "list", *AT)
    assert (twice.code, "'--log-format'" in twice.errors) == (2, True)


# Durations and sizes.


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("0.5", 0.5),
        ("1e3", 1000),
        ("90s", 90),
        ("1.5s", 1.5),
        ("5m", 300),
        ("12h", 43_200),
        ("7d", 604_800),
        ("2w", 1_209_600),
    ],
)
def test_a_duration_is_a_number_of_seconds_or_has_a_unit(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "7 d", "7y", "7D", "d", "-5m", "1e3d"])
def test_what_is_no_duration_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ValueError, match="such as 90, 90s, 5m, 12h, 7d or 2w"):
        seconds_of(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000000", 1_000_000),
        ("512B", 512),
        ("10kB", 10_000),
        ("10KiB", 10_240),
        ("512MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("2 TB", 2 * 10**12),
        ("1TiB", 1 << 40),
    ],
)
def test_a_size_is_a_number_of_bytes_or_has_a_unit(text: str, size: int) -> None:
    assert bytes_of_size(text) == size


@pytest.mark.parametrize("text", ["", "large", "10G", "1.5", "0.3B", "-1GB"])
def test_what_is_no_size_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ValueError, match="such as 1000000, 10GB or 512MiB"):
        bytes_of_size(text)


@pytest.mark.parametrize("text", ["0.5", "11", "1h", "nan"])
def test_a_duration_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not from 1 to 10 seconds"):
        duration(1, 10)(text)


def test_the_retention_of_a_topic_is_given_with_units(call: Call) -> None:
    made = call("topic", "create", "new", *AT, "--retention", "7d", "--retention-bytes", "10GB", "--segment-s", "6h")
    assert made.code == 0, made
    with pxrs.open("data") as hub:
        topic = hub.topic("new").topic
    assert (topic.retention_s, topic.retention_bytes, topic.segment_s) == (604_800, 10**10, 21_600)
    altered = call("topic", "alter", "new", *AT, "--retention", "2w", "--retention-bytes", "none")
    assert "new: retention changed from 604800 to 1.2096e+06" in altered.out, altered
    refused = call("topic", "alter", "new", *AT, "--retention", "a week")
    assert "--retention" in refused.errors
    assert "'a week' is not a duration: give seconds, or a number with s, m, h, d or w" in refused.errors
    assert "or none" in refused.errors


DURATIONS = {
    "--registry-wait": 7,
    "--lease-ttl": 1,
    "--handover-timeout": 1,
    "--progress-timeout": 1,
    "--commit-interval": 1,
    "--grace": 2,
    "--retention": 1,
    "--segment-s": 1,
    "--delay": 1,
    "--timeout": 2,
    "--pause": 2,
    "--first": 2,
    "--cap": 2,
    "--drain-s": 1,
    "--lease-s": 2,
    "--node-timeout-s": 1,
    "--append-s": 1,
    "--copies-grace-s": 1,
    "--keep-s": 1,
    "--interval": 1,
    "--settle-s": 1,
}
"""The options that take a duration alone, and how many commands have each."""


def test_every_option_that_takes_seconds_takes_a_duration() -> None:
    found: dict[str, int] = {}
    for path, command in every_command().items():
        for option in command.params:
            name = option.opts[0]
            if option.metavar == "DURATION" and name != "--expires":
                found[name] = found.get(name, 0) + 1
            annotation = getattr(getattr(option, "type_descriptor", None), "annotation", None)
            is_number = annotation is not None and "float" in str(annotation)
            assert not is_number or option.metavar == "DURATION" or name in ("--factor", "--jitter"), (path, name)
    assert found == DURATIONS


# Confirmations.

CONFIRMED = {
    "topic delete": ("t",),
    "group delete": ("g",),
    "group reset": ("g", "--to", "earliest"),
    "group skip": ("g", "t", "0"),
    "group import-checkpoint": ("g", "0", "--topic", "one", "--force"),
    "queue delete": ("q",),
    "queue dead purge": ("q",),
    "source remove": ("s",),
}
"""Commands that ask, with arguments of a hub in which there is something to do."""


@pytest.fixture
def shop(call: Call, tmp_path: Path) -> Path:
    """The hub of `call`, with something of everything that a command asks about."""
    import sqlite3

    with sqlite3.connect("t.db") as database:
        database.execute("CREATE TABLE t (id INTEGER PRIMARY KEY AUTOINCREMENT, v TEXT)")

    def reject(message: object) -> None:
        raise ValueError("no")

    with pxrs.open("data") as hub:
        hub.create_topic("one", partitions=1)
        hub.create_queue("q")
        hub.add_source("s", f"sqlite:///{tmp_path}/t.db", table="t", value_column="v")
        with hub.producer("t") as out:
            out.send(b"x", partition=0)
        with hub.consumer("t", "g", until="end") as inbox, pytest.raises(pxrs.errors.PartitionsPaused):
            inbox.run(reject)
    return tmp_path


@pytest.mark.parametrize(("command", "arguments"), CONFIRMED.items(), ids=CONFIRMED)
def test_without_a_terminal_a_command_that_asks_says_how_to_confirm(
    call: Call, shop: Path, command: str, arguments: tuple[str, ...]
) -> None:
    result = call(*command.split(), *arguments, *AT, stdin="y\n")
    assert (result.code, result.out, result.errors) == (2, "", "Not a terminal; pass --yes to confirm")


@pytest.mark.parametrize("typed", ["n\n", "\n", ""], ids=["no", "enter", "Ctrl-D"])
def test_who_declines_is_told_that_nothing_was_changed(call: Call, shop: Path, typed: str) -> None:
    result = call("topic", "delete", "t", *AT, stdin=typed, is_terminal=True)
    assert (result.code, result.errors.endswith("Aborted; nothing was changed")) == (1, True), result
    with pxrs.open("data") as hub:
        assert hub.topic("t").topic.partitions == 2
    agreed = call("topic", "delete", "t", *AT, stdin="y\n", is_terminal=True)
    assert (agreed.code, agreed.out.strip()) == (0, "removed t and its 1 message"), agreed


# Where the hub is.


def test_check_takes_the_directory_from_the_environment(call: Call) -> None:
    assert call("check", PXRS_AT="data").out == "0 messages, 0 bytes, 0 findings\n"
    given = call("check", "nowhere", PXRS_AT="data")
    assert (given.code, "nowhere" in given.errors) == (2, True), "the argument takes precedence"
    served = call("check", PXRS_AT="pxrs://127.0.0.1:1")
    assert (served.code, "run `pxrs check` on its host with the hub's directory" in served.errors) == (2, True)


@pytest.mark.parametrize("command", ["events", "audit"])
def test_events_of_a_registry_alone_say_what_is_missing(call: Call, command: str) -> None:
    result = call(command, "--registry", "data/registry")
    assert "give the hub's directory or server with --at URL or PXRS_AT" in result.errors
    assert call(command, PXRS_AT="data").code == 0


# The table of a source.


def test_an_address_in_place_of_a_table_is_refused_without_showing_it(call: Call, tmp_path: Path) -> None:
    url = "postgresql://anna:secret@db/shop"
    result = call("source", "add", "s", *AT, "--table", url, "--sql-table", url, "--value-column", "v")
    assert result.code == 2
    assert "--table" in result.errors
    assert "this is the address of a database, which --sql-table takes" in result.errors
    swapped = call("source", "add", "s", *AT, "--table", "events", "--sql-table", "anna:secret", "--value-column", "v")
    assert swapped.code == 2
    assert "the table's name goes to --table" in swapped.errors
    assert "secret" not in result.errors + swapped.errors
    with pxrs.open("data") as hub, pytest.raises(pxrs.errors.InvalidTopic, match="--sql-table URL") as refused:
        hub.add_source("s", f"sqlite:///{tmp_path}/t.db", table=url, value_column="v")
    assert "secret" not in str(refused.value)
    with pytest.raises(pxrs.errors.InvalidTopic, match="--sql-table URL") as refused:
        pxrs.sources.sql_table(f"sqlite:///{tmp_path}/t.db", url, value_column="v")
    assert "secret" not in str(refused.value)


# Lines whose field is the key.


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"id": 1}', "the object has no field 'account', which --key names"),
        ("[1, 2]", "--key account names a field of JSON objects, but this JSON is not an object"),
        ('"account"', "this JSON is not an object"),
        ("7", "this JSON is not an object"),
        ("account", "this is not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("", "this is not JSON"),
    ],
)
def test_a_line_without_the_field_of_its_key_is_an_error_that_names_the_line(call: Call, line: str, words: str) -> None:
    result = call("send", "t", "--key", "account", *AT, stdin=f'{{"account": "ann"}}\n{line}\n{{"account": "bob"}}\n')
    assert result.code == 1
    assert result.errors.startswith("line 2: "), result
    assert words in result.errors
    assert "1 line before it was sent" in result.errors
    assert "KeyError" not in result.errors
    with pxrs.open("data") as hub:
        assert sum(found.end for found in hub.topic("t").bounds(range(2)).values()) == 1
