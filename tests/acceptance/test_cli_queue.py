"""Work queues from the command line: real processes over a real directory."""

from __future__ import annotations

import base64
import os
import pty
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs import clock, wording
from pxrs.cli import queue as command_queue
from pxrs.errors import OutcomeUnknown, RegistryUnavailable, UnknownQueue
from pxrs.queue.handle import QueueHandle
from pxrs.registry import Registry
from pxrs.testing import forked
from pxrs.testing.command import Call, Result, run_here

COMMAND = [sys.executable, "-m", "pxrs.cli", "queue"]
PATIENCE_S = 60.0


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A place with three queues: mail, where an item is delivered once, one that is strict, and jobs."""
    with pxrs.open(tmp_path / "data") as hub:
        hub.create_queue("mail", pxrs.ConsumeOnce())
        hub.create_queue("strict", fifo=True)
        hub.create_queue("jobs")
    return tmp_path / "data"


def environment(data: Path) -> dict[str, str]:
    return {**os.environ, "PXRS_AT": str(data), "COLUMNS": "200", "NO_COLOR": "1", "TERM": "xterm"}


def run(data: Path, *arguments: str, **rest: Any) -> subprocess.CompletedProcess[str]:
    return forked.run_text("pxrs.cli", ["queue", *arguments], env=environment(data), timeout=PATIENCE_S, **rest)


def done(data: Path, *arguments: str, **rest: Any) -> str:
    result = run(data, *arguments, **rest)
    assert result.returncode == 0, result.stderr
    return str(result.stdout)


def answer(data: Path, text: str, *arguments: str) -> tuple[int, str]:
    """Run it with a terminal to ask at; the exit code and what was printed to it and to standard output."""
    ours, theirs = pty.openpty()
    os.write(ours, text.encode())
    result = run(data, *arguments, stdin=theirs)
    os.close(ours)
    os.close(theirs)
    return result.returncode, result.stdout + result.stderr


def values(data: Path, queue: str = "jobs") -> list[bytes]:
    with pxrs.open(data) as hub:
        return [item.value for item in hub.queue(queue).peek(10_000)]


def shown_values(lines: str) -> list[list[str]]:
    """Behind the id and the time of each."""
    return [line.split()[3:] for line in lines.splitlines()]


def put(data: Path, queue: str, *items: bytes | str, **options: Any) -> list[str]:
    with pxrs.open(data) as hub:
        return [hub.queue(queue).put(item, **options) for item in items]


def kill_letters(data: Path, *items: bytes | str, error: str = "no") -> list[str]:
    """Put these into mail and give them up, in this order; their ids."""
    with pxrs.open(data) as hub:
        for item in items:
            hub.queue("mail").put(item, key="k\x1b[2J")
            tx = hub.transaction()
            assert tx.take("mail", timeout=10) is not None
            tx.rollback(error)
        return [item.id for item in hub.queue("mail").dead_letters()]


@pytest.fixture
def call(data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """The command without a process of its own, which takes longer than most of what is tested here."""

    def call(*arguments: str) -> Result:
        monkeypatch.setenv("PXRS_AT", str(data))
        return run_here(monkeypatch, capsys, ("queue", *arguments)).unwrapped()

    return call


def test_a_queue_is_made_as_it_was_asked_for_and_described(tmp_path: Path, call: Call) -> None:
    new = tmp_path / "new"
    backoff = ("--backoff", "exponential", "--first", "0.5", "--factor", "3", "--cap", "60", "--jitter", "0")
    told = done(new, "create", "mail", "--policy", "consume-times", "--times", "5", "--fifo", *backoff)
    assert told == "created queue mail\n"
    (found,) = call("describe", "mail", "--json", "--at", str(new)).rows()
    assert found["policy"] == {"kind": "consume-times", "times": 5}
    assert found["backoff"] == {"kind": "exponential", "first": 0.5, "factor": 3.0, "cap": 60.0, "jitter": 0.0}
    assert (found["queue"], found["fifo"], found["ready"], found["dead"]) == ("mail", True, 0, 0)
    shown = call("describe", "mail", "--at", str(new)).out
    assert "policy consume-times (times 5)  order strictly first in, first out  backoff exponential (first 0.5" in shown
    assert shown.split()[-8:] == ["delayed", "in", "flight", "dead", "0", "0", "0", "0"]


@pytest.mark.parametrize(
    ("arguments", "policy", "backoff"),
    [
        ((), pxrs.AtLeastOnce(), None),
        (("--policy", "consume-once"), pxrs.ConsumeOnce(), None),
        (("--backoff", "fixed", "--pause", "2"), pxrs.AtLeastOnce(), pxrs.FixedBackoff(2.0)),
        (("--backoff", "exponential"), pxrs.AtLeastOnce(), pxrs.ExponentialBackoff()),
    ],
)
def test_each_setting_reaches_the_queue(
    data: Path,
    call: Call,
    arguments: tuple[str, ...],
    policy: object,
    backoff: object,
) -> None:
    assert call("create", "new", *arguments)[0] == 0
    with pxrs.open(data) as hub:
        made = hub.queue("new")
    assert (made.policy, made.is_fifo, made.backoff) == (policy, False, backoff)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("create", "new", "--times", "3"), "--policy consume-times and --times K must be given together"),
        (("create", "new", "--policy", "consume-times"), "--policy consume-times and --times K must be given together"),
        (("create", "new", "--pause", "3"), "--pause requires --backoff fixed"),
        (("create", "new", "--backoff", "fixed", "--cap", "3"), "--cap requires --backoff exponential"),
        (("create", "new", "--backoff", "fixed"), "--backoff fixed needs --pause"),
        (("create", "new", "--backoff", "slow"), "slow"),
        (("take", "jobs", "--peek", "--timeout", "1"), "--peek does not wait"),
        (("take", "jobs", "--count", "0"), "--count"),
    ],
)
def test_options_that_do_not_go_together_are_named(call: Call, arguments: tuple[str, ...], words: str) -> None:
    code, out, errors = call(*arguments)
    assert (code, out) == (2, "")
    assert words in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("describe", "nope"), "no queue 'nope'; existing: jobs, mail, strict; create it"),
        (("depth", "nope"), "no queue 'nope'"),
        (("put", "nope", "x"), "no queue 'nope'"),
        (("take", "nope"), "no queue 'nope'"),
        (("take", "nope", "--peek"), "no queue 'nope'"),
        (("delete", "nope"), "no queue 'nope'"),
        (("dead", "list", "nope"), "no queue 'nope'"),
        (("dead", "retry", "nope"), "no queue 'nope'"),
        (("dead", "purge", "nope", "--yes"), "no queue 'nope'"),
        (("create", "jobs"), "queue 'jobs' already exists"),
        (("create", "a/b"), "queue name 'a/b'"),
        (
            ("create", "new", "--policy", "consume-times", "--times", "0"),
            "ConsumeTimes: times must be a whole number from 1",
        ),
        (("put", "strict", "x", "--priority", "1"), "value 1: queue strict is a FIFO queue"),
        (("list", "--at", "typo"), "there is no directory typo"),
        (("put", "jobs", "x", "--at", "typo"), "there is no directory typo"),
    ],
)
def test_an_error_is_one_line_and_leaves_nothing_behind(
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: Call,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(data.parent)
    code, out, errors = call(*arguments)
    is_wrong = not {"a/b", "0", "typo"}.isdisjoint(arguments)
    assert (code, out) == (2 if is_wrong else 1, "")
    assert errors.startswith(words)
    assert not Path("typo").exists()
    assert values(data) == values(data, "strict") == []


def test_values_and_lines_are_put_and_taken_by_priority_and_age(data: Path, call: Call) -> None:
    assert call("put", "jobs", "plain", "ä").out == "put 2 items into jobs\n"
    assert done(data, "put", "jobs", "--priority", "5", input=b"1\r\n\n2") == "put 3 items into jobs\n"
    assert call("put", "jobs", "later", "--delay", "3600").out == "put 1 item into jobs\n"
    assert values(data) == [b"1", b"", b"2", b"plain", "ä".encode()]
    (depth,) = call("depth", "jobs", "--json").rows()
    assert depth == {"queue": "jobs", "ready": 5, "delayed": 1, "in_flight": 0, "dead": 0}
    assert call("depth", "jobs").out.split() == ["ready", "delayed", "in", "flight", "dead", "5", "1", "0", "0"]
    assert shown_values(call("take", "jobs", "--peek", "-n", "2").out) == [["1"], []]
    assert shown_values(done(data, "take", "jobs", "--count", "4")) == [["1"], [], ["2"], ["plain"]]
    assert values(data) == ["ä".encode()]


def test_a_field_is_the_key_and_a_line_without_it_is_named(data: Path) -> None:
    lines = '{"k": "a"}\n{"k": null}\n{"k": 1}\nnot json\n{"k": "b"}\n'
    result = run(data, "put", "jobs", "--key", "k", input=lines.encode())
    assert (result.returncode, result.stdout) == (1, "")
    (told,) = result.stderr.splitlines()
    assert told.startswith("line 4: --key k names a field of JSON objects, but this is not JSON: ")
    assert told.endswith("; 3 lines before it were put (InvalidItem)")
    with pxrs.open(data) as hub:
        assert [item.key for item in hub.queue("jobs").peek(10)] == [b"a", None, b"1"]


def test_a_line_larger_than_an_item_is_refused_and_not_read_to_its_end(data: Path, tmp_path: Path) -> None:
    with open(tmp_path / "lines", "wb") as file:
        file.write(b"a\n")
        file.truncate(16 << 30)
    with open(tmp_path / "lines", "rb") as lines:
        result = run(data, "put", "jobs", stdin=lines.fileno())
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("line 2: the item has ")
    assert result.stderr.endswith("; 1 line before it was put (InvalidItem)\n")
    assert values(data) == [b"a"]


def test_many_lines_are_put_in_their_order_and_taken_in_it(data: Path, call: Call) -> None:
    numbers = [str(number) for number in range(2 * command_queue.PUT_ITEMS + 1)]
    assert done(data, "put", "strict", input="\n".join(numbers).encode()) == f"put {len(numbers):,} items into strict\n"
    assert values(data, "strict") == [number.encode() for number in numbers]
    count = 2 * command_queue.TAKE_ITEMS + 1
    taken = call("take", "strict", "--count", str(count)).out
    assert shown_values(taken) == [[number] for number in numbers[:count]]
    assert len(values(data, "strict")) == len(numbers) - count


def test_a_line_is_put_when_it_comes_and_not_when_the_input_ends(data: Path) -> None:
    with subprocess.Popen([*COMMAND, "put", "jobs"], env=environment(data), stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b"first\nsec")
        process.stdin.flush()
        until = time.monotonic() + PATIENCE_S
        while not values(data):
            assert time.monotonic() < until
            time.sleep(0.02)
        assert values(data) == [b"first"]
        process.stdin.write(b"ond")
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
    assert values(data) == [b"first", b"second"]


@pytest.mark.parametrize("has_landed", [True, False])
def test_a_lost_reply_puts_nothing_twice_and_nothing_never(
    data: Path, monkeypatch: pytest.MonkeyPatch, call: Call, has_landed: bool
) -> None:
    commit, lost = Registry.commit, []

    def lose_one(self: Registry, expect: Mapping[str, int], put: Mapping[str, bytes] = {}, **rest: Any) -> Any:
        if lost or not any(key.startswith("items/") for key in put):
            return commit(self, expect, put, **rest)
        lost.append(has_landed and commit(self, expect, put, **rest))
        raise OutcomeUnknown("the reply was lost")

    with monkeypatch.context() as patched:
        patched.setattr(Registry, "commit", lose_one)
        assert call("put", "jobs", "a", "b")[:2] == (0, "put 2 items into jobs\n")
    assert lost
    assert values(data) == [b"a", b"b"]


def test_an_outage_says_how_many_were_put(data: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    commit, calls = Registry.commit, []

    def fail(self: Registry, expect: Mapping[str, int], put: Mapping[str, bytes] = {}, **rest: Any) -> Any:
        calls.append(any(key.startswith("items/") for key in put))
        if sum(calls) > 1:
            raise RegistryUnavailable("nobody answers")
        return commit(self, expect, put, **rest)

    monkeypatch.setattr(command_queue, "PUT_ITEMS", 2)
    with monkeypatch.context() as patched:
        patched.setattr(Registry, "commit", fail)
        code, _, errors = call("put", "jobs", "a", "b", "c")
    assert (code, errors) == (1, "nobody answers; 2 values were put before this error (RegistryUnavailable)")
    assert values(data) == [b"a", b"b"]


def test_what_could_not_be_printed_is_given_back(data: Path) -> None:
    put(data, "jobs", "a", "b")
    with open("/dev/full", "w") as full:
        result = run(data, "take", "jobs", "--count", "2", stdout=full.fileno())
    assert result.returncode != 0
    with pxrs.open(data) as hub:
        assert [(item.value, item.deliveries) for item in hub.queue("jobs").peek(9)] == [(b"a", 1), (b"b", 1)]


def test_nothing_is_taken_when_it_cannot_be_printed_at_all(
    data: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    put(data, "jobs", "a")
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", None)  # as it is after `>&-`
        code, _, errors = call("take", "jobs")
    assert (code, "standard output is closed" in errors) == (2, True)
    with pxrs.open(data) as hub:
        assert [item.deliveries for item in hub.queue("jobs").peek(9)] == [0]


def test_what_is_due_is_taken_by_one_that_does_not_wait(data: Path, call: Call) -> None:
    put(data, "jobs", "late", "later", delay=0.05)
    due = time.time() + 0.05
    while time.time() <= due:
        time.sleep(0.01)
    assert shown_values(call("take", "jobs", "--count", "3").out) == [["late"], ["later"]]


@pytest.mark.parametrize(("queue", "expected"), [("jobs", [["a"]]), ("strict", [["a"]]), ("mail", [])])
def test_what_a_dead_taker_held_is_taken_by_one_that_does_not_wait(
    data: Path, call: Call, queue: str, expected: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_queue, "OWED_S", PATIENCE_S)
    put(data, queue, "a")
    die = f"import os, pxrs; pxrs.open({str(data)!r}).transaction().take({queue!r}); os._exit(0)"
    subprocess.run([sys.executable, "-c", die], check=True, timeout=PATIENCE_S)
    began = time.monotonic()
    assert shown_values(call("take", queue).out) == expected
    assert time.monotonic() - began < PATIENCE_S, "a dead letter is not waited for"


@pytest.mark.parametrize("has_landed", [True, False])
def test_a_lost_reply_is_settled_and_said_if_what_was_printed_comes_again(
    data: Path, monkeypatch: pytest.MonkeyPatch, call: Call, has_landed: bool
) -> None:
    put(data, "jobs", "a")
    commit, lost = Registry.commit, []

    def lose_one(self: Registry, expect: Mapping[str, int], put: Mapping[str, bytes] = {}, **rest: Any) -> Any:
        if lost or not any(key.startswith("outcomes/") for key in put):
            return commit(self, expect, put, **rest)
        lost.append(has_landed and commit(self, expect, put, **rest))
        raise OutcomeUnknown("the reply was lost")

    with monkeypatch.context() as patched:
        patched.setattr(Registry, "commit", lose_one)
        code, out, errors = call("take", "jobs")
    assert lost
    assert shown_values(out) == [["a"]]
    assert values(data) == ([] if has_landed else [b"a"])
    assert (code, errors == "") == ((0, True) if has_landed else (1, False))
    assert has_landed or "the last item that was printed is still in the queue" in errors
    assert "outcome()" not in errors


def test_a_lost_reply_that_cannot_be_settled_is_said(data: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    put(data, "jobs", "a")
    commit = Registry.commit
    lost: list[bool] = []

    def lose(self: Registry, expect: Mapping[str, int], put: Mapping[str, bytes] = {}, **rest: Any) -> Any:
        if any(key.startswith("outcomes/") for key in put):
            lost.append(True)
            raise OutcomeUnknown("the reply was lost") if len(lost) == 1 else RegistryUnavailable("nobody answers")
        return commit(self, expect, put, **rest)

    with monkeypatch.context() as patched:
        patched.setattr(Registry, "commit", lose)
        code, _, errors = call("take", "jobs")
    said = "it is not known whether the last item that was printed was removed from the queue"
    assert (code, errors) == (1, f"nobody answers; {said} (RegistryUnavailable)")


def test_taking_waits_as_long_as_it_is_told_and_no_longer(data: Path, call: Call) -> None:
    assert call("take", "jobs") == (0, "", ""), "it does not wait without being told"
    put(data, "jobs", "soon", delay=0.5)
    began = time.monotonic()
    (found,) = call("take", "jobs", "--count", "2", "--timeout", "1.5", "--json").rows()
    assert (found["value"], found["deliveries"]) == ("soon", 1)
    assert 1.5 <= time.monotonic() - began < PATIENCE_S
    assert values(data) == []


def test_json_holds_every_byte_of_an_item(data: Path, call: Call) -> None:
    (first,) = put(data, "jobs", b"\xff\x00", key=b"\xfe", priority=7)
    put(data, "jobs", "ä\x07")
    one, two = call("take", "jobs", "-n", "2", "--json").rows()
    assert (one["id"], one["queue"], one["priority"], one["error"]) == (first, "jobs", 7, "")
    assert one["value_base64"] == base64.b64encode(b"\xff\x00").decode()
    assert one["key_base64"] == base64.b64encode(b"\xfe").decode()
    assert (two["key"], two["value"]) == (None, "ä\x07")


def test_a_terminal_is_shown_control_characters_escaped(data: Path) -> None:
    put(data, "jobs", "a\x07b\x1b[2J", key="k\r")
    ours, theirs = pty.openpty()
    assert run(data, "take", "jobs", "--peek", stdout=theirs).returncode == 0
    os.close(theirs)
    assert os.read(ours, 1 << 16).endswith(rb" k\r a\x07b\x1b[2J" + b"\r\n")
    os.close(ours)


def test_queues_are_listed_for_people_and_machines(data: Path, call: Call) -> None:
    put(data, "jobs", "a", "b")
    put(data, "jobs", "c", delay=3600)
    kill_letters(data, "d")
    assert call("list", "--json").rows() == [
        {"queue": "jobs", "ready": 2, "delayed": 1, "in_flight": 0, "dead": 0},
        {"queue": "mail", "ready": 0, "delayed": 0, "in_flight": 0, "dead": 1},
        {"queue": "strict", "ready": 0, "delayed": 0, "in_flight": 0, "dead": 0},
    ]
    with pxrs.open(data) as hub, hub.transaction() as tx:
        assert tx.take("jobs", timeout=10) is not None
        shown = call("list").out.splitlines()
    assert shown[0].split() == ["queue", "ready", "delayed", "in", "flight", "dead"]
    assert shown[1].split() == ["jobs", "1", "1", "1", "0"]


def test_a_queue_that_is_deleted_while_they_are_listed_is_left_out(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    depth = QueueHandle.depth

    def gone(self: QueueHandle) -> object:
        if self.name == "jobs":
            raise UnknownQueue("jobs")
        return depth(self)

    monkeypatch.setattr(QueueHandle, "depth", gone)
    assert [row["queue"] for row in call("list", "--json").rows()] == ["mail", "strict"]


def test_dead_letters_are_listed_retried_and_purged(data: Path, call: Call) -> None:
    first, second, third = kill_letters(data, "a\x07", b"\xff", "c", error="ValueError: [/]\x07 bad")
    found = call("dead", "list", "mail", "--json").rows()
    assert [(row["id"], row["deliveries"]) for row in found] == [(first, 1), (second, 1), (third, 1)]
    assert found[0]["error"] == "ValueError: [/]\x07 bad"
    assert "1970" < found[0]["put_at"] < found[0]["died_at"] < str(wording.rfc3339(clock.wall_time_us()))
    listed = call("dead", "list", "mail", "--count", "2")
    assert "ValueError: [/]\\x07 bad  k\\x1b[2J  a\\x07" in listed.out
    assert third not in listed.out
    assert listed.errors == "showing the first 2; for more, raise --count"
    assert call("dead", "retry", "mail", first).out == "1 dead letter of mail will be retried\n"
    assert values(data, "mail") == [b"a\x07"]
    code, told, errors = call("dead", "purge", "mail", first, second)
    assert (code, told) == (1, "removed 1 dead letter of mail\n")
    assert errors.startswith("1 of the given ids is not a dead letter of mail: see `pxrs queue dead list")
    assert call("dead", "retry", "mail").out == "1 dead letter of mail will be retried\n"
    assert values(data, "mail") == [b"a\x07", b"c"]


def test_what_destroys_asks_first_and_only_at_a_terminal(data: Path, call: Call) -> None:
    kill_letters(data, "a", "b")
    put(data, "mail", "c")
    for command, question, told in (
        (("dead", "purge", "mail"), "Remove 2 dead letters of mail for good?", "removed 2 dead letters of mail\n"),
        (("delete", "mail"), "Remove queue mail and its 1 item for good?", "removed queue mail and its 1 item\n"),
    ):
        refused = call(*command)
        assert (refused.code, refused.out) == (2, "")
        assert refused.errors == "Not a terminal; pass --yes to confirm"
        code, shown = answer(data, "n\n", *command)
        assert (code, question in shown) == (1, True), shown
        with pxrs.open(data) as hub:
            assert (len(hub.queue("mail").dead_letters()), values(data, "mail")) == (2 * (command[0] == "dead"), [b"c"])
        assert call(*command, "--yes").out == told
    with pxrs.open(data) as hub:
        assert [queue.name for queue in hub.queues()] == ["jobs", "strict"]


def test_the_registry_may_be_elsewhere(tmp_path: Path, call: Call) -> None:
    elsewhere = ("--registry", f"sqlite:///{tmp_path / 'queues.db'}")
    for arguments in (("create", "other"), ("put", "other", "x"), ("take", "other"), ("put", "other", "y")):
        assert call(*arguments, *elsewhere).code == 0
    assert call("list", "--json", *elsewhere).rows() == [
        {"queue": "other", "ready": 1, "delayed": 0, "in_flight": 0, "dead": 0}
    ]


def test_every_command_has_a_help(call: Call) -> None:
    shown = call("--help").out
    for command in ("create", "list", "describe", "put", "take", "depth", "dead", "delete"):
        assert f"  {command} " in shown
