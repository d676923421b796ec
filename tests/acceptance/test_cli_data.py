"""Messages from and to the command line: whatever their bytes, they are shown safely, and nothing is lost."""

from __future__ import annotations

import base64
import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from resource import RLIMIT_AS, setrlimit
from typing import Any

import pytest

import pxrs
from pxrs import registry
from pxrs.cli import send as send_command
from pxrs.errors import AppendFailed
from pxrs.producer.producer import Producer
from pxrs.testing import forked

COMMAND = [sys.executable, "-m", "pxrs.cli"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A log with an empty topic."""
    with pxrs.open(tmp_path / "data") as hub:
        hub.create_topic("t", partitions=1)
    return tmp_path / "data"


def put(data: Path, value: bytes | None, **rest: Any) -> None:
    with pxrs.open(data) as hub, hub.producer("t") as out:
        out.send(value, **rest)


def run(data: Path, *arguments: str, given: bytes | None = None, **rest: Any) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PXRS_AT": str(data), "COLUMNS": "40"}
    if rest:
        return subprocess.run([*COMMAND, *arguments], capture_output=True, timeout=60, env=environment, **rest)
    return forked.run("pxrs.cli", arguments, input=given, env=environment)


def tail(data: Path, *arguments: str) -> str:
    result = run(data, "tail", "t", *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout.decode()


def tail_on_a_terminal(data: Path, environment: Mapping[str, str] | None = None) -> str:
    ours, theirs = pty.openpty()
    variables = {**os.environ, "PXRS_AT": str(data), **(environment or {})}
    process = subprocess.Popen([*COMMAND, "tail", "t"], stdout=theirs, stderr=subprocess.PIPE, env=variables)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 1 << 16):
            shown += piece
    except OSError:  # Linux says so when the other end is closed
        pass
    finally:
        os.close(ours)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return shown.decode()


def send(data: Path, lines: bytes, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return run(data, "send", "t", *arguments, given=lines)


def stored(data: Path) -> list[tuple[bytes | None, bytes | None]]:
    with pxrs.open(data) as hub:
        return [(message.key, message.value) for message in hub.topic("t").messages(0)]


@pytest.mark.parametrize("key", ["[/]", "[bold]k", ":smile:", "k\tk"])
def test_a_key_is_printed_as_it_is(data: Path, key: str) -> None:
    put(data, b"value", key=key)
    assert tail(data).endswith(f" {key} value\n")


@pytest.mark.parametrize(
    "value", [":smile: [red]x[/red] [/]", "a\x07b\rc\x1b[31md\te", "x" * 500 + " " + "y" * 500, ""]
)
def test_a_value_in_a_pipe_is_neither_interpreted_nor_wrapped(data: Path, value: str) -> None:
    put(data, value.encode(), key="k")
    assert tail(data).endswith(f" k {value}\n")


def test_a_terminal_is_shown_control_characters_escaped(data: Path) -> None:
    put(data, "a\x07b\rc\x1b]0;title\nd\te\x9b\u202ef\xff ä".encode() + b"\xff", key=b"k\x1b[2J[/]")
    shown = tail_on_a_terminal(data, {"NO_COLOR": "1"})
    assert shown.endswith(" k\\x1b[2J[/] a\\x07b\\rc\\x1b]0;title\\nd\te\\x9b\\u202ef\xff ä\\xff\r\n")
    coloured = tail_on_a_terminal(data, {"NO_COLOR": ""})
    assert "\x1b[36mk\\x1b[2J[/]\x1b[0m a" in coloured


@pytest.mark.parametrize("timestamp", [1 << 62, -(1 << 63), -62_135_596_800_000_001])
def test_a_time_beyond_the_calendar_is_shown_in_microseconds(data: Path, timestamp: int) -> None:
    put(data, b"v", timestamp=timestamp)
    assert tail(data) == f"0/0 {timestamp}us v\n"


def test_a_time_is_shown_to_the_microsecond_in_utc(data: Path) -> None:
    put(data, b"v", timestamp=1_700_000_000_123_999)
    assert tail(data) == "0/0 2023-11-14T22:13:20.123999Z v\n"


def test_json_holds_every_byte_of_a_message(data: Path) -> None:
    put(data, b"\xff\x00", key=b"\\xff", headers=[("a", b"1"), ("b", b"\xfe"), ("a", None)], timestamp=5)
    put(data, None, key=b"\xff", headers=[])
    put(data, "ä\x07".encode())
    first, second, third = (json.loads(line) for line in tail(data, "--json").splitlines())
    assert first == {
        "partition": 0,
        "offset": 0,
        "timestamp": "1970-01-01T00:00:00.000005Z",
        "key": "\\xff",
        "value_base64": base64.b64encode(b"\xff\x00").decode(),
        "headers": [
            {"key": "a", "value": "1"},
            {"key": "b", "value_base64": base64.b64encode(b"\xfe").decode()},
            {"key": "a", "value": None},
        ],
    }
    assert second["key_base64"] == base64.b64encode(b"\xff").decode()
    assert (second["value"], second["headers"]) == (None, [])
    assert (third["key"], third["value"], third["headers"]) == (None, "ä\x07", None)


def test_what_json_says_of_bytes_is_in_the_help(data: Path) -> None:
    assert b"value_base64" in run(data, "tail", "--help").stdout


def test_a_registry_is_shown_as_it_is(tmp_path: Path) -> None:
    with registry.open(tmp_path) as handle:
        handle.commit(put={"a/[/]": b"[/][bold]x\x07"})
    result = run(tmp_path, "registry", "scan", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "a/[/]" in result.stdout.decode()
    assert "[/][bold]x\\x07" in result.stdout.decode()


def test_a_closed_standard_input_is_an_error_of_one_line(data: Path) -> None:
    result = run(data, "send", "t", preexec_fn=lambda: os.close(0))
    assert (result.returncode, result.stdout) == (1, b"")
    (told,) = result.stderr.splitlines()
    assert told == b"standard input is closed: pipe in the messages, one per line, or give VALUE (InvalidRecord)"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (rb'{"k": "\ud800"}', "UTF-8"),
        (b'{"k": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b"not json", "this is not JSON"),
        (b"[1]", "this JSON is not an object"),
        (b'{"j": 1}', "the object has no field 'k'"),
        (b"\xff", "this is not JSON"),
    ],
)
def test_a_line_that_cannot_be_sent_is_named_with_how_many_were(data: Path, line: bytes, words: str) -> None:
    good = [b'{"k": "a"}', b'{"k": "b"}']
    result = send(data, b"\n".join([*good, line, *good]), "--key", "k")
    assert (result.returncode, result.stdout) == (1, b"")
    (told,) = result.stderr.decode().splitlines()
    assert told.startswith("line 3: ")
    assert words in told
    assert told.endswith("; 2 lines before it were sent (InvalidRecord)")
    assert [value for _, value in stored(data)] == good


def test_the_count_of_lines_before_a_bad_one_begins_at_none(data: Path) -> None:
    assert send(data, b"x\n", "--key", "k").stderr.endswith(b"; 0 lines before it were sent (InvalidRecord)\n")
    assert send(data, b'{"k": 1}\nx\n', "--key", "k").stderr.endswith(b"; 1 line before it was sent (InvalidRecord)\n")


def test_lines_are_not_said_to_be_sent_if_they_could_not_be_stored(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Producer) -> None:
        raise AppendFailed("no room")

    monkeypatch.setattr(Producer, "flush", fail)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"k": 1}\nx\n')))
    with pytest.raises(AppendFailed):
        send_command.send("t", str(data), key="k")


def test_a_line_larger_than_a_message_is_refused_and_not_read_to_its_end(data: Path, tmp_path: Path) -> None:
    with open(tmp_path / "lines", "wb") as file:
        file.write(b"a\n")
        file.truncate(16 << 30)
    with open(tmp_path / "lines", "rb") as lines:
        result = run(data, "send", "t", stdin=lines, preexec_fn=lambda: setrlimit(RLIMIT_AS, (8 << 30, 8 << 30)))
    assert result.returncode == 1
    (told,) = result.stderr.decode().splitlines()
    assert told.startswith("line 2: ")
    assert told.endswith("; 1 line before it was sent (InvalidRecord)")
    assert stored(data) == [(None, b"a")]


def test_a_field_is_the_key_and_null_is_none(data: Path) -> None:
    lines = [b'{"k": null}', b'{"k": "null"}', b'{"k": ""}', b'{"k": 1}', rb'{"k": "\u00e4"}']
    result = send(data, b"\n".join(lines), "--key", "k")
    assert result.stdout == b"sent 5 messages to t\n", result.stderr
    assert [key for key, _ in stored(data)] == [None, b"null", b"", b"1", "ä".encode()]


def test_a_line_ends_with_one_line_feed_and_one_carriage_return_before_it(data: Path) -> None:
    assert send(data, b"a\r\r\nb\r\nc\n\n\r\nd").stdout == b"sent 6 messages to t\n"
    assert [value for _, value in stored(data)] == [b"a\r", b"b", b"c", b"", b"", b"d"]


def test_an_error_in_a_pipe_is_one_line_however_long(data: Path) -> None:
    name = "x" * 150
    result = run(data, "tail", name)
    assert result.returncode == 1
    (told,) = result.stderr.decode().splitlines()
    assert told.startswith(f"no topic '{name}'; existing: t; ")


@pytest.mark.parametrize("kind", ["nothing", "a directory", "a file"])
def test_checking_what_is_no_log_is_an_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "[bold] data"
    if kind == "a directory":
        (path / "registry").mkdir(parents=True)
    elif kind == "a file":
        path.touch()
    result = run(tmp_path, "check", str(path))
    assert (result.returncode, result.stdout) == (2, b"")
    (told,) = result.stderr.decode().splitlines()
    assert told.endswith("(InvalidUrl)")
    assert str(path) in told


def test_checking_a_log_without_topics_finds_nothing(data: Path) -> None:
    with pxrs.open(data) as hub:
        hub.delete_topic("t")
    result = run(data, "check", str(data))
    assert (result.returncode, result.stdout) == (0, b"0 messages, 0 bytes, 0 findings\n")
