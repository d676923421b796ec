"""`pxrs events`, `pxrs audit`, `--log-format`: on a directory and through a server with tokens."""

from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pxrs
from pxrs.errors import NotPermitted
from pxrs.testing.command import Call, run_here
from pxrs.testing.waiting import eventually


@pytest.fixture
def data(tmp_path: Path) -> str:
    """A hub with a topic, of which a member of a group has read."""
    data = str(tmp_path / "data")
    with pxrs.open(data) as hub:
        hub.create_topic("orders", partitions=1)
        with hub.consumer("orders", "billing", name="anna\x1b[31m", until="end") as inbox:
            assert list(inbox) == []
    return data


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Call]:
    for name in ("PXRS_AT", "PXRS_REGISTRY", "PXRS_TOKEN", "PXRS_LOG_FORMAT"):
        monkeypatch.delenv(name, raising=False)
    handlers, level = logging.getLogger().handlers, logging.getLogger("pxrs").level
    yield lambda *arguments: run_here(monkeypatch, capfd, arguments)
    logging.getLogger().handlers = handlers
    logging.getLogger("pxrs").setLevel(level)


def test_events_are_lines_for_people_or_json(call: Call, data: str) -> None:
    lines = call("events", "--at", data, "--group", "billing").out.splitlines()
    assert re.fullmatch(r"[-0-9]{10} [:.0-9]{12}  member\.joined +group billing: anna\\x1b\[31m joined", lines[0])
    rows = call("events", "--at", data, "--topic", "orders", "--since", "1h", "--json").rows()
    assert [row["name"] for row in rows] == ["member.joined", "partition.claimed", "partition.released"]
    assert rows[1]["fields"]["epoch"] == 1
    assert call("events", "--at", data, "--group", "other").out == ""
    assert call("events", "--at", data, "--since", "2100-01-01T00:00Z").out == ""
    wrong = call("events", "--at", data, "--since", "yesterday")
    assert (wrong.code, "give an age such as 90s" in wrong.errors) == (2, True)


def test_the_audit_says_who_did_what(call: Call, data: str) -> None:
    assert call("group", "reset", "billing", "--to", "earliest", "--at", data, "--yes").code == 0
    created, reset = call("audit", "--at", data, "--json").rows()
    assert (created["name"], reset["name"]) == ("audit.create_topic", "audit.reset")
    assert "@" in reset["fields"]["who"]
    assert [row["topic"] for row in call("topic", "list", "--at", data, "--json").rows()] == ["orders"]
    listed = call("topic", "list", "--at", data, "--internal", "--json").rows()
    assert [row["topic"] for row in listed] == ["_audit", "_events", "orders"]


def test_following_prints_each_event_as_it_comes(data: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pxrs.cli", "audit", "--at", data, "--follow", "--json"]
    with (tmp_path / "out").open("wb") as out, subprocess.Popen(command, stdout=out) as follower:
        try:
            eventually(lambda: (tmp_path / "out").read_bytes().count(b"\n") == 1)
            with pxrs.open(data) as hub:
                hub.create_topic("more", partitions=1)
            eventually(lambda: (tmp_path / "out").read_bytes().count(b"\n") == 2)
            follower.send_signal(signal.SIGINT)
            assert follower.wait(20) == 130
        finally:
            follower.kill()
    last = json.loads((tmp_path / "out").read_text().splitlines()[1])
    assert last["fields"]["topic"] == "more"


def test_the_log_is_printed_as_json_or_text_if_asked_for(call: Call, data: str) -> None:
    assert call("topic", "create", "a", "--at", data).errors == ""
    made = call("--log-format", "json", "topic", "create", "b", "--at", data)
    (line,) = map(json.loads, made.errors.splitlines())
    assert (line["level"], line["logger"], line["event"]) == ("info", "pxrs.events.audit", "audit.create_topic")
    assert (line["topic"], line["text"].endswith("topic b was created")) == ("b", True)
    failed = call("--log-format", "json", "topic", "create", "b", "--at", data)
    (line,) = map(json.loads, failed.errors.splitlines())
    assert (failed.code, line["level"], line["error_type"]) == (1, "error", "TopicExists")
    shown = call("--log-format", "text", "topic", "create", "c", "--at", data).errors
    assert re.fullmatch(r"\S+ info    pxrs\.events\.audit: \S+: topic c was created\n", shown)
    wrong = call("--log-format", "xml", "topic", "list", "--at", data)
    assert (wrong.code, "choose from text, json" in wrong.errors) == (2, True)


def test_a_server_stores_the_events_of_its_clients_with_their_tokens(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("grpc")
    from pxrs.server.auth import tokens
    from pxrs.server.serving import ServerSettings, serving

    path = str(tmp_path / "tokens.json")
    made = {
        name: tokens.create(path, name, grants, now=1.0)
        for name, grants in {
            "member": ["topic:orders=read", "group:billing=member"],
            "operator": ["hub=admin"],
            "viewer": ["hub=read"],
        }.items()
    }
    with pxrs.open(data) as hub, serving(hub, ServerSettings(auth=path)) as url:

        def client(name: str) -> pxrs.Hub:
            monkeypatch.setenv("PXRS_TOKEN", made[name][1])
            return pxrs.open(url)

        with client("member") as remote:
            # Of a group that it may not be a member of: refused, and no reason to refuse the others.
            remote.parts.events.record("member.left", group="other", member="bert")
            with remote.consumer("orders", "billing", name="bert", until="end") as inbox:
                assert list(inbox) == []
            with pytest.raises(NotPermitted):
                list(remote.events())
        with client("operator") as remote:
            remote.create_topic("more", partitions=1)
            remote.group("billing").reset("earliest")
        with client("viewer") as remote:
            assert list(remote.events(group="other")) == []
            mine = [each for each in remote.events(group="billing") if each.fields.get("via") is not None]
            actions = list(remote.audit())
            assert [topic.name for topic in remote.topics()] == ["more", "orders"]
    assert [each.name for each in mine] == [
        *("member.joined", "group.assigned", "partition.handed_over", "partition.released", "member.left"),
        "partition.freed",
    ]
    assert {each.fields["via"] for each in mine} == {f"token {made[name][0].id}" for name in ("member", "operator")}
    _, created, reset = actions
    operator = f"token {made['operator'][0].id}"
    assert (created.name, created.fields["who"]) == ("audit.create_topic", operator)
    assert (reset.name, reset.fields["who"]) == ("audit.reset", operator)
    assert "@" in reset.fields["claimed_by"]
