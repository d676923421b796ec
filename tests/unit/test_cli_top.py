"""`pxrs top`: true numbers, what needs attention first, and a bounded cost of each look."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, Group

import pxrs
from pxrs.attention import Attention
from pxrs.cli import glancing, looking, top
from pxrs.cli.looking import GroupLook, Look, Looker, QueueLook, Rates, TopicLook
from pxrs.group.records import Checkpoint, Keys, Member, Owner, Paused
from pxrs.hub import Hub
from pxrs.registry.contract import Registry
from pxrs.server.serving import serving
from pxrs.testing import forked
from pxrs.testing.command import Call, Result, run_here

DEADLINE_S = 60.0


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """Two topics, three groups of which two need attention, a queue with a dead letter."""
    with pxrs.open(tmp_path / "data") as hub:
        orders = hub.create_topic("orders", partitions=4)
        hub.create_topic("idle", partitions=1)
        with hub.producer("orders") as out:
            for number in range(20):
                out.send(b"x", partition=number % 4)
        for group, offset in (("done", 5), ("left", 2)):
            hub.group(group).import_checkpoint(dict.fromkeys(range(4), offset), "orders")
        keys, now = Keys("billing"), time.time()
        lease = hub.registry.lease(60)
        anna = Member("anna", orders.id, "orders", 4, "host", 7, now)
        hub.registry.commit(ephemeral={keys.member("i1"): anna.dump()}, lease=lease)
        records = {keys.owner(orders.id, number): Owner("i1", 1, "anna").dump() for number in range(3)}
        records |= {keys.owner(orders.id, 3): Owner("i0", 1, "gone").dump()}
        records |= {keys.checkpoint(orders.id, 0): Checkpoint(4, now - 1_000, "anna", 1).dump()}
        records |= {keys.checkpoint(orders.id, number): Checkpoint(5, now, "anna", 1).dump() for number in (1, 2, 3)}
        records |= {keys.pause(orders.id, 0): Paused(4, "ValueError: no", now, "anna").dump()}
        hub.registry.commit(put=records)
        mail = hub.create_queue("mail", pxrs.ConsumeOnce())
        mail.put("dead")
        with hub.transaction() as tx:
            assert tx.take("mail", timeout=10) is not None
            tx.rollback("bad address")
        mail.put("ready")
        mail.put("later", delay=600)
        yield hub


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    for name in ("PXRS_AT", "PXRS_REGISTRY"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> Result:
        return run_here(monkeypatch, capfd, arguments)

    return call


@pytest.mark.parametrize("through", ["directory", "server"])
def test_the_numbers_are_those_of_describe(hub: Hub, call: Call, through: str) -> None:
    if through == "server":
        pytest.importorskip("grpc")
    with serving(hub) if through == "server" else nullcontext(hub.url) as at:
        (found,) = call("top", "--once", "--json", "--at", at).rows()
    assert {each["topic"]: (each["partitions"], each["messages"]) for each in found["topics"]} == {
        "orders": (4, 20),
        "idle": (1, 0),
    }
    for each in found["groups"]:
        described = hub.group(each["group"]).describe()
        members, partitions = len(described.members), len(described.partitions)
        assert (each["lag"], each["is_lag_exact"]) == (described.lag, described.is_lag_exact)
        assert (each["members"], each["partitions"]) == (members, partitions)
    assert [(each["group"], each["lag"], each["owners"], each["unowned"]) for each in found["groups"]] == [
        ("billing", 1, {"anna": 3}, 1),
        ("done", 0, {}, 4),
        ("left", 12, {}, 4),
    ]
    depth = hub.queue("mail").depth()
    (queue,) = found["queues"]
    assert {**queue, "queue": "mail", "is_exact": True} == queue
    assert (queue["ready"], queue["delayed"], queue["in_flight"], queue["dead"]) == (1, 1, 0, 1)
    assert (depth.ready, depth.delayed, depth.in_flight, depth.dead) == (1, 1, 0, 1)


def test_what_needs_attention_is_told_the_urgent_first(hub: Hub) -> None:
    told = Looker(hub, has_log=True, place=["--at", "my data"]).look().attention
    paused = "1 of 4 partitions paused by a message that failed: `pxrs group describe billing --at 'my data'` shows how"
    letters = "see `pxrs queue dead list mail --at 'my data'`, then `pxrs queue dead retry mail --at 'my data'`"
    assert [(each.kind, each.name, each.text) for each in told if each.is_urgent] == [
        ("group", "billing", f"{paused} to continue"),
        ("group", "left", "lag 12, and no members"),
        ("queue", "mail", f"1 dead letter: {letters}"),
    ]
    others = [(each.kind, each.name, each.text) for each in told if not each.is_urgent]
    assert others[0] == ("group", "billing", "1 of 4 partitions without an owner")
    assert others[1][2].startswith("a partition with a lag has had no checkpoint for 1,00")
    assert len(others) == 2
    assert [each.is_urgent for each in told] == sorted((each.is_urgent for each in told), reverse=True)


def test_a_damaged_topic_and_a_lag_that_is_not_known_are_told(hub: Hub, tmp_path: Path) -> None:
    topic = hub.topic("orders")
    hub.group("lost").import_checkpoint({0: 5}, "orders")
    key = Keys("lost").checkpoint(topic.id, 0)
    hub.registry.commit(put={key: Checkpoint(99).dump()})
    for path in (tmp_path / "data").glob("topics/idle/topic.json"):
        path.write_text("{")
    with pxrs.open(hub.url) as other:
        look = Looker(other, has_log=True).look()
    told = {(each.kind, each.name): each for each in look.attention}
    assert told["topic", "idle"].is_urgent
    assert "checkpoint of partition 0, 99, is beyond its end" in told["group", "lost"].text
    (lost,) = [each for each in look.groups if each.group == "lost"]
    assert lost.lag is None


def test_what_a_group_reads_no_more_has_no_lag(hub: Hub) -> None:
    hub.delete_topic("orders")
    groups = Looker(hub, has_log=True).look().groups
    assert {each.group: each.lag for each in groups} == {"billing": 0, "done": 0, "left": 0}


def test_a_look_scans_each_group_once_and_a_bounded_part_of_a_queue(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.queue("mail").put_many(["x"] * 30)
    monkeypatch.setattr(looking, "QUEUE_PAGE", 10)
    monkeypatch.setattr(glancing, "GROUP_PAGE", 7)
    looker = Looker(hub, has_log=True)
    looker.look()
    scan, read = Registry.scan, list[str]()

    def counting(self: Registry, prefix: str, after: str | None = None, limit: int | None = None) -> list[Any]:
        found = scan(self, prefix, after, limit)
        read.extend(entry.key for entry in found)
        return found

    monkeypatch.setattr(Registry, "scan", counting)
    look = looker.look()
    of_groups = [key for key in read if key.startswith("groups/")]
    assert len(of_groups) == len(set(of_groups)) == len(scan(hub.registry, "groups/"))
    assert len([key for key in read if "/ready/" in key]) <= 10
    (mail,) = look.queues
    assert (mail.ready, mail.is_exact) == (10, False)
    assert "10+" in shown(look)


def test_rates_are_those_between_two_looks(hub: Hub) -> None:
    seconds = iter([100.0, 102.0])
    looker = Looker(hub, has_log=True, monotonic=lambda: next(seconds))
    assert {each.rate for each in looker.look().topics} == {None}
    with hub.producer("orders") as out:
        for _ in range(10):
            out.send(b"x", partition=0)
    hub.group("left").reset(5, "orders")
    second = looker.look()
    assert {each.topic: each.rate for each in second.topics} == {"orders": 5.0, "idle": 0.0}
    assert {each.group: each.rate for each in second.groups} == {"billing": 0.0, "done": 0.0, "left": 6.0}
    assert "in 5/s" in shown(second)


def test_a_number_that_falls_or_is_new_has_no_negative_rate() -> None:
    rates = Rates()
    rates.begin(1.0)
    assert rates.of(("topic", "a"), 10) is None
    rates.begin(3.0)
    assert rates.of(("topic", "a"), 4) == 0.0
    assert rates.of(("topic", "b"), 4) is None


# The screen.


def shown(look: Look, height: int | None = None, width: int = 200) -> str:
    text = io.StringIO()
    Console(file=text, width=width, highlight=False).print(Group(*top.picture("hub", look, height)))
    return text.getvalue()


def many(count: int) -> Look:
    groups = [GroupLook(f"g{n}", 1, 8, n, True, 1.0, {f"m{m}": 2 for m in range(5)}, 1, 0, None) for n in range(count)]
    topics = [TopicLook(f"t{n}", 8, n, float(n)) for n in range(count)]
    queues = [QueueLook(f"q{n}", n, 0, 0, 0) for n in range(count)]
    calls = [Attention(True, "group", f"g{n}", "x" * 500) for n in range(count)]
    return Look(1.7e9, topics, groups, queues, calls)


@pytest.mark.parametrize("height", [10, 24, 60])
def test_a_screen_is_filled_and_no_more(height: int) -> None:
    lines = shown(many(100), height, width=100).splitlines()
    assert len(lines) <= max(height, 20)
    assert "and 93 more: see `pxrs top --once`" in lines[8]
    assert any(line.startswith("group (") and " of 100)" in line for line in lines)


def test_everything_is_shown_elsewhere_and_what_needs_attention_first() -> None:
    text = shown(many(100))
    for name in ("g0", "t0", "q0", "g99", "t99", "q99"):
        assert f"\n{name} " in text
    assert text.index("group g0:") < text.index("\ng99 ") < text.index("\ng0 ")
    assert "m0 2, m1 2, m2 2, and 2 more, none 1" in text


def test_names_cannot_act_on_the_terminal() -> None:
    evil = "\x1b[31mred[bold]"
    look = Look(1.7e9, [TopicLook(evil, 1, 1, None)], [], [], [Attention(True, "topic", evil, evil)])
    assert "\x1b" not in shown(look)
    assert "[bold]" in shown(look)


def test_top_prints_once_into_a_pipe(hub: Hub, call: Call) -> None:
    found = call("top", "--at", hub.url)
    assert found.code == 0
    assert "group left: lag 12, and no members" in found.out.splitlines()


def test_json_is_a_line_for_each_look_until_ctrl_c(hub: Hub) -> None:
    read, write = os.pipe()
    arguments = ["top", "--json", "--interval", "0.2", "--at", hub.url]
    with os.fdopen(read) as out, forked.Forked("pxrs.cli", arguments, stdout=write, has_group=True) as process:
        os.close(write)
        try:
            first, second = (json.loads(out.readline()) for _ in range(2))
            assert {each["rate"] for each in first["topics"]} == {None}
            assert {each["rate"] for each in second["topics"]} == {0.0}
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) == 130
        finally:
            process.kill()


def read_until(terminal: int, wanted: bytes) -> bytes:
    """What is shown up to and including these bytes."""
    seen, until = b"", time.monotonic() + DEADLINE_S
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, until - time.monotonic()))
        assert ready, seen
        seen += os.read(terminal, 1 << 16)
    return seen


@pytest.mark.parametrize(("key", "code"), [(b"q", 0), (b"\x03", 130)], ids=["q", "Ctrl-C"])
def test_a_key_ends_the_live_view_and_the_terminal_is_as_before(hub: Hub, key: bytes, code: int) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [sys.executable, "-m", "pxrs.cli", "top", "--at", hub.url],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it
    )
    try:
        seen = read_until(ours, b"no members")
        assert b"billing" in seen
        os.write(ours, key)
        read_until(ours, b"\x1b[?1049l")  # leaves the alternate screen
        assert process.wait(DEADLINE_S) == code
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)
