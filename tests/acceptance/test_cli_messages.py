"""`pxrs tail` and `pxrs send`: from where, which messages, in which form; on a directory and through a server."""

from __future__ import annotations

import io
import json
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.cli import tail as tail_command
from pxrs.hub import Hub
from pxrs.server.serving import serving
from pxrs.testing import forked
from pxrs.testing.command import Call, Result, run_here

T_US = 1_700_000_000_000_000
AWKWARD: list[dict[str, Any]] = [
    {"value": b"plain"},
    {"value": None, "key": b"gone"},
    {"value": b"", "key": b""},
    {"value": b"\xff\x00\n\r\x1b[31m", "key": b"\xfe"},
    {"value": "grün \u2028\x00\n".encode(), "key": b'"quoted" \\'},
    {"value": b"h", "headers": []},
    {"value": b"h", "headers": [("a", b"1"), ("a", None), ("ü", b"\xff"), ("", b"")]},
    {"value": b"early", "timestamp": -1},
    {"value": b"before the year 1", "timestamp": -(1 << 62)},
    {"value": b"after 9999", "timestamp": 1 << 62},
    {"value": b"exact", "timestamp": T_US + 123_456},
]
"""What is hard to write down: bytes that are no UTF-8, nulls, empty values, times beyond the calendar."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with pxrs.open(tmp_path / "data") as hub:
        yield hub


@pytest.fixture(params=["directory", "server"])
def at(request: pytest.FixtureRequest, hub: Hub) -> Iterator[str]:
    if request.param == "server":
        pytest.importorskip("grpc")
    with serving(hub) if request.param == "server" else nullcontext(hub.url) as url:
        yield url


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], at: str) -> Call:
    """A command in this process; `stdin` is what it reads."""
    monkeypatch.delenv("PXRS_REGISTRY", raising=False)
    monkeypatch.setenv("PXRS_AT", at)

    def call(*arguments: str, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        return run_here(monkeypatch, capfd, arguments).unwrapped()

    return call


@pytest.fixture
def lines(call: Call) -> Callable[..., list[str]]:
    """The lines that a command prints that succeeds."""

    def lines(*arguments: str, stdin: str = "") -> list[str]:
        found = call(*arguments, stdin=stdin)
        assert (found.code, found.errors) == (0, ""), found
        return found.out.splitlines()

    return lines


@pytest.fixture
def orders(hub: Hub) -> None:
    """A topic of 3 partitions: the messages 0 to 29 with a second between two, in turn; the key is the last digit."""
    hub.create_topic("orders", partitions=3)
    with hub.producer("orders") as out:
        for number in range(30):
            out.send(str(number), f"k{number % 10}", None, T_US + number * 1_000_000, number % 3)


def everything(hub: Hub, topic: str) -> list[tuple[Any, ...]]:
    """Key, value, time and headers of each message of one partition."""
    return [(each.key, each.value, each.timestamp, each.headers) for each in hub.topic(topic).messages(0)]


# tail: from where, and which.


def test_the_last_messages_are_in_the_order_of_time(lines: Callable[..., list[str]], orders: None) -> None:
    assert lines("tail", "orders", "--raw") == [str(number) for number in range(20, 30)]
    assert lines("tail", "orders", "--raw", "-n", "2") == ["28", "29"]
    assert lines("tail", "orders", "--raw", "--count", "3") == ["27", "28", "29"]
    assert lines("tail", "orders", "--raw", "-n", "1000") == [str(number) for number in range(30)]
    assert lines("tail", "orders", "--raw", "-n", "0") == []


def test_the_last_messages_of_a_partition_are_in_their_order_whatever_their_times(
    lines: Callable[..., list[str]], hub: Hub
) -> None:
    """So that `tail -n 100 --json | send --json` keeps the order of each key."""
    hub.create_topic("late", partitions=2)
    with hub.producer("late") as out:
        for partition, seconds in ((0, 100), (0, 1), (0, 2), (1, 50), (1, 60)):
            out.send(f"{partition} at {seconds}", timestamp=T_US + seconds * 1_000_000, partition=partition)
    assert lines("tail", "late", "--raw", "-p", "0") == ["0 at 100", "0 at 1", "0 at 2"]
    assert lines("tail", "late", "--raw", "-n", "4") == ["0 at 1", "0 at 2", "1 at 50", "1 at 60"]
    assert lines("tail", "late", "--raw") == ["0 at 100", "0 at 1", "0 at 2", "1 at 50", "1 at 60"]


def test_the_last_messages_are_shown_although_retention_removes_some_meanwhile(hub: Hub) -> None:
    hub.create_topic("orders", segment_bytes=4096, partitions=1)
    for number in range(10):
        with hub.producer("orders") as out:
            out.send(f"{number} " + "x" * 1000)
    log = hub.topic("orders").log
    reader = tail_command._Reader(log, [0], None)
    log.trim({0: 7})
    first = log.start(0)
    assert 0 < first <= 7
    (found,) = reader.last(100)
    assert [message.offset for message in found] == list(range(first, 10))


def test_from_an_offset_of_each_partition(lines: Callable[..., list[str]], orders: None) -> None:
    assert lines("tail", "orders", "--raw", "--from", "8") == [str(number) for number in range(24, 30)]
    assert lines("tail", "orders", "--raw", "--from", "0", "--count", "4") == ["0", "1", "2", "3"]
    assert lines("tail", "orders", "--raw", "--from", "earliest") == [str(number) for number in range(30)]
    assert lines("tail", "orders", "--raw", "--from", "latest") == []
    assert lines("tail", "orders", "--raw", "--from", "99") == []


def test_from_a_time(lines: Callable[..., list[str]], orders: None, hub: Hub) -> None:
    moment = datetime.fromtimestamp(T_US / 1e6 + 25, UTC).isoformat()
    assert lines("tail", "orders", "--raw", "--from", moment) == ["25", "26", "27", "28", "29"]
    with hub.producer("orders") as out:
        out.send("new", partition=1)
    assert lines("tail", "orders", "--raw", "--from", "10 minutes ago") == ["new"]


def test_of_some_partitions(lines: Callable[..., list[str]], call: Call, orders: None) -> None:
    assert lines("tail", "orders", "--raw", "-p", "1", "-n", "2") == ["25", "28"]
    assert lines("tail", "orders", "--raw", "-p", "0", "-p", "2", "--from", "9") == ["27", "29"]
    found = call("tail", "orders", "-p", "3")
    assert (found.code, "orders has no partition 3; it has 0 to 2" in found.errors) == (2, True)


def test_with_a_key_that_is_no_utf8(lines: Callable[..., list[str]], orders: None) -> None:
    key = os.fsdecode(b"\xffkey")
    lines("send", "orders", "found", "--key", key)
    assert lines("tail", "orders", "--raw", "-k", key) == ["found"]


def test_with_a_key_in_whatever_partition(
    lines: Callable[..., list[str]], orders: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lines("tail", "orders", "--raw", "--key", "k7", "--from", "earliest") == ["7", "17", "27"]
    monkeypatch.setattr(tail_command, "KEY_SCAN_ROWS", 2)  # so that the search has to go back several times
    assert lines("tail", "orders", "--raw", "--key", "k7") == ["7", "17", "27"]
    assert lines("tail", "orders", "--raw", "--key", "k7", "-n", "1") == ["27"]
    assert lines("tail", "orders", "--raw", "--key", "k7", "-n", "2", "-p", "1") == ["7"]
    assert lines("tail", "orders", "--raw", "--key", "nobody") == []
    places = lines("tail", "orders", "--key", "k7", "--format", "{partition}/{offset} {value}\\n")
    assert places == ["1/2 7", "2/5 17", "0/9 27"]


def test_the_last_messages_with_a_key_are_the_latest_ones(
    lines: Callable[..., list[str]], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition may have newer ones than those that were found first, further back: others have followed there."""
    monkeypatch.setattr(tail_command, "KEY_SCAN_ROWS", 2)
    hub.create_topic("t", partitions=2)
    with hub.producer("t") as out:
        for second, key in enumerate(["k", "k"]):
            out.send(f"old {second}", key, None, second, 0)
        for second, key in enumerate(["k", *["other"] * 7], 10):
            out.send(f"new {second}", key, None, second, 1)
    assert lines("tail", "t", "--raw", "--key", "k", "-n", "2") == ["old 1", "new 10"]


def test_messages_without_a_key_are_not_those_with_an_empty_one(lines: Callable[..., list[str]], hub: Hub) -> None:
    hub.create_topic("t", partitions=1)
    with hub.producer("t") as out:
        out.send("none")
        out.send("empty", "")
    assert lines("tail", "t", "--raw", "--key", "") == ["empty"]


def test_following_ends_after_a_number_of_messages(
    lines: Callable[..., list[str]], orders: None, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = tail_command._Reader.new

    def send_then_new(self: Any) -> Iterator[Any]:
        with hub.producer("orders") as out:
            for value in ("a", "b", "c"):
                out.send(value, "k3", partition=2)
        return new(self)

    monkeypatch.setattr(tail_command._Reader, "new", send_then_new)
    assert lines("tail", "orders", "--raw", "-f", "--count", "2") == ["a", "b"]
    assert lines("tail", "orders", "--raw", "-f", "--key", "k3", "--from", "7", "--count", "2") == ["23", "a"]
    assert lines("tail", "orders", "--raw", "-f", "-n", "1", "--count", "3", "-p", "2") == ["c", "a", "b"]


def test_a_message_is_printed_when_it_arrives(at: str, hub: Hub, orders: None) -> None:
    read, write = os.pipe()
    tail = ["tail", "orders", "-f", "-n", "1", "--count", "2", "--raw", "--at", at]
    with os.fdopen(read) as shown, forked.Forked("pxrs.cli", tail, stdout=write) as process:
        os.close(write)
        try:
            assert shown.readline() == "29\n"
            with hub.producer("orders") as out:
                out.send("arrived")
            assert shown.readline() == "arrived\n"
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_following_from_an_offset_loses_nothing_that_arrives_during_the_first_read(
    lines: Callable[..., list[str]], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch that is read last may reach beyond the end that was known at the start."""
    hub.create_topic("t", partitions=1)
    with hub.producer("t") as out:
        out.send("0")
    since, new = tail_command._Reader.since, tail_command._Reader.new

    def send_then(value: str, rounds: Iterator[Any]) -> Iterator[Any]:
        with hub.producer("t") as out:
            out.send(value)
        return rounds

    monkeypatch.setattr(tail_command._Reader, "since", lambda self, where: send_then("1", since(self, where)))
    monkeypatch.setattr(tail_command._Reader, "new", lambda self: send_then("2", new(self)))
    assert lines("tail", "t", "--raw", "--from", "0", "-f", "--count", "2") == ["0", "1"]


def test_what_retention_has_removed_is_told(call: Call, hub: Hub) -> None:
    hub.create_topic("t", partitions=1, retention_bytes=1, segment_bytes=4096)
    with hub.producer("t") as out:
        for number in range(4):
            out.send(str(number) * 5_000).result()
    hub.topic("t").retain()
    start = hub.topic("t").start(0)
    assert start > 1
    found = call("tail", "t", "--from", "1", "--format", "{offset}\\n")
    assert found.out.splitlines() == [str(number) for number in range(start, 4)]
    assert f"t/0: offsets 1 to {start - 1} were removed by retention; it begins at {start}" in found.errors
    assert call("tail", "t", "--from", "earliest").errors == ""


def test_a_registered_table_is_read_from_an_id_and_by_key(
    lines: Callable[..., list[str]], hub: Hub, tmp_path: Path
) -> None:
    pytest.importorskip("sqlalchemy")
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("CREATE TABLE events (id INTEGER PRIMARY KEY, who TEXT, body TEXT)")
        rows = [(number * 10, f"k{number % 3}", str(number)) for number in range(1, 10)]
        connection.executemany("INSERT INTO events VALUES (?, ?, ?)", rows)
    url, columns = f"sqlite:///{tmp_path}/shop.db", {"key_column": "who", "value_column": "body"}
    hub.add_source("events", url, table="events", partitions=2, **columns)
    assert lines("tail", "events", "--raw", "--from", "71") == ["8", "9"]
    assert lines("tail", "events", "--raw", "--from", "earliest", "--count", "2") == ["1", "2"]
    assert lines("tail", "events", "--raw", "--key", "k0", "-n", "2") == ["6", "9"]
    assert lines("tail", "events", "--key", "k1", "--from", "0", "--format", "{offset} ") == ["10 40 70 "]


# tail: in which form.


def test_a_format_names_fields(lines: Callable[..., list[str]], hub: Hub) -> None:
    hub.create_topic("t", partitions=1)
    with hub.producer("t") as out:
        out.send("v", "k", [("a", b"1"), ("b", None)], T_US)
        out.send(None, timestamp=1 << 62)
    text = (
        "{{{topic}}} {partition} {offset} {time} {timestamp} {key}={value} {key_bytes} {value_bytes} {headers}\\t.\\n"
    )
    assert lines("tail", "t", "--format", text) == [
        f"{{t}} 0 0 2023-11-14T22:13:20.000000Z {T_US} k=v 1 1 a=1,b=\t.",
        f"{{t}} 0 1 {1 << 62}us {1 << 62} = -1 -1 \t.",
    ]


@pytest.mark.parametrize("text", ["{valeu}", "{value!r}", "{offset:>9}", "{}", "{value", "}"])
def test_a_format_that_is_wrong_is_refused(call: Call, hub: Hub, text: str) -> None:
    hub.create_topic("t", partitions=1)
    found = call("tail", "t", "--format", text)
    assert (found.code, "--format" in found.errors, found.out) == (2, True, "")


def test_bytes_are_written_as_they_are_unless_a_terminal_would_act_on_them(hub: Hub) -> None:
    hub.create_topic("t", partitions=1)
    with hub.producer("t") as out:
        out.send(b"\xff\x1b\x00")
        out.send(None)
    for form in (["--raw"], ["--format", "{value}\\n"]):
        assert forked.run("pxrs.cli", ["tail", "t", *form, "--at", hub.url]).stdout == b"\xff\x1b\x00\n\n"
    assert forked.run("pxrs.cli", ["tail", "t", "-n", "1", "--format", "\\xfe\\0", "--at", hub.url]).stdout == b"\xfe\0"


@pytest.mark.parametrize(
    "arguments",
    [
        ("tail", "t", "--json", "--raw"),
        ("tail", "t", "--from", "1", "-n", "1"),
        ("tail", "t", "--from", "soon"),
        ("send", "t", "v", "--json"),
        ("send", "t", "--json", "--key", "k"),
        ("send", "t", "v", "--keep-partitions"),
        ("send", "t", "--json", "--keep-partitions", "-p", "0"),
        ("send", "t", "v", "--header", "name"),
        ("send", "t", "v", "--timestamp", "soon"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("at", ["directory"], indirect=True)
def test_options_that_contradict_each_other_are_refused(call: Call, hub: Hub, arguments: tuple[str, ...]) -> None:
    hub.create_topic("t", partitions=1)
    assert call(*arguments).code == 2
    assert hub.topic("t").end(0) == 0


# send.


def test_one_value_with_all_that_a_message_has(lines: Callable[..., list[str]], hub: Hub) -> None:
    hub.create_topic("t", partitions=2)
    told = lines("send", "t", "hello", "--key", "k", "-H", "a=1", "-H", "a=2=3", "-p", "1", "--timestamp", str(T_US))
    assert told == ["sent 1 message to t: 1/0"]
    (message,) = hub.topic("t").messages(1)
    assert message[3:7] == (b"k", b"hello", T_US, [("a", b"1"), ("a", b"2=3")])
    lines("send", "t", "", "-p", "1", "--timestamp", "2023-11-14T22:13:20Z")
    *_, message = hub.topic("t").messages(1)
    assert message[3:7] == (None, b"", T_US, None)


def test_lines_have_the_headers_and_the_partition_that_are_given(lines: Callable[..., list[str]], hub: Hub) -> None:
    hub.create_topic("t", partitions=2)
    assert lines("send", "t", "-H", "from=cli", "-p", "1", stdin="a\nb\n") == ["sent 2 messages to t"]
    assert [(each.value, each.headers) for each in hub.topic("t").messages(1)] == [
        (b"a", [("from", b"cli")]),
        (b"b", [("from", b"cli")]),
    ]


def test_a_value_of_bytes_that_are_no_text(hub: Hub) -> None:
    hub.create_topic("t", partitions=1)
    arguments = ["send", "t", os.fsdecode(b"\xff"), "--key", os.fsdecode(b"\xfe"), "--at", hub.url]
    assert forked.run("pxrs.cli", arguments).returncode == 0
    assert [each[:2] for each in everything(hub, "t")] == [(b"\xfe", b"\xff")]


def test_messages_that_were_printed_as_json_are_sent_as_they_were(lines: Callable[..., list[str]], hub: Hub) -> None:
    for name in ("a", "b"):
        hub.create_topic(name, partitions=1)
    with hub.producer("a") as out:
        for message in AWKWARD:
            out.send(**message)
    printed = lines("tail", "a", "--json", "--from", "earliest")
    assert len(printed) == len(AWKWARD)
    in_order = sorted(printed, key=lambda line: json.loads(line)["offset"])
    told = lines("send", "b", "--json", stdin="".join(f"{line}\n" for line in in_order))
    assert told == [f"sent {len(AWKWARD)} messages to b"]
    assert everything(hub, "b") == everything(hub, "a")


def test_json_lines_go_to_the_partition_of_their_key_or_stay_in_theirs(
    lines: Callable[..., list[str]], orders: None, hub: Hub
) -> None:
    for name in ("hashed", "kept"):
        hub.create_topic(name, partitions=3)
    printed = "".join(f"{line}\n" for line in lines("tail", "orders", "--json", "--from", "earliest"))
    lines("send", "kept", "--json", "--keep-partitions", stdin=printed)
    lines("send", "hashed", "--json", stdin=printed)
    for number in range(3):
        of = {name: [each[2:7] for each in hub.topic(name).messages(number)] for name in ("orders", "kept")}
        assert of["kept"] == of["orders"]
    keys = [{each.key for each in hub.topic("hashed").messages(number)} for number in range(3)]
    assert sum(map(len, keys)) == 10, "each key has one partition"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[]", "no JSON object"),
        ("{", "no JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"key": "k"}', "no field 'value' or 'value_base64'"),
        ('{"value": "v", "kye": "k"}', "unknown field 'kye'"),
        ('{"value": {"a": 1}}', "'value' is dict"),
        ('{"value": "v", "value_base64": "dg=="}', "both 'value' and 'value_base64'"),
        ('{"value_base64": "d"}', "'value_base64' is no base64"),
        ('{"value_base64": 5}', "'value_base64' is no base64"),
        ('{"value": "\\ud800"}', "no text that UTF-8 can hold"),
        ('{"value": "v", "timestamp": "2026-01-31T12:00"}', "write its zone too"),
        ('{"value": "v", "timestamp": 5}', "'timestamp' is 5"),
        ('{"value": "v", "timestamp_us": 1.5}', "'timestamp_us' is 1.5"),
        ('{"value": "v", "timestamp_us": 99999999999999999999}', "must be a datetime or whole microseconds"),
        ('{"value": "v", "headers": {"a": "b"}}', "'headers' is no list"),
        ('{"value": "v", "headers": [{"value": "b"}]}', "a header has no field 'key'"),
        ('{"value": "v", "headers": [{"key": "a", "vlaue": "b"}]}', "a header has the unknown field 'vlaue'"),
        ('{"value": "v", "partition": "1"}', "'partition' is '1'"),
    ],
)
@pytest.mark.parametrize("at", ["directory"], indirect=True)
def test_a_json_line_that_is_wrong_ends_the_command_after_those_before_it(
    call: Call, hub: Hub, line: str, why: str
) -> None:
    hub.create_topic("t", partitions=1)
    found = call("send", "t", "--json", stdin=f'{{"value": "first"}}\n{line}\n{{"value": "after"}}\n')
    assert found.code == 1
    assert found.errors.startswith("line 2: "), found.errors
    assert why in found.errors
    assert found.errors.endswith("1 line before it was sent (InvalidRecord)")
    assert [value for _, value, *_ in everything(hub, "t")] == [b"first"]
