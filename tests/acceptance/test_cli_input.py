"""`pxrs send` and `pxrs queue put` at a keyboard: they say that they read, and on Ctrl-C how much is stored."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.cli import queue as command_queue
from pxrs.producer.producer import Producer
from pxrs.queue.transaction import Transaction
from pxrs.testing.command import Call, Result, run_here
from pxrs.testing.waiting import eventually

INTERRUPTED = 130


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with pxrs.open(tmp_path / "data") as hub:
        hub.create_topic("t", partitions=1)
        hub.create_queue("q")
    return tmp_path / "data"


def stored(data: Path, what: str = "send") -> list[bytes | None]:
    with pxrs.open(data) as hub:
        if what == "send":
            return [message.value for message in hub.topic("t").messages(0)]
        return [item.value for item in hub.queue("q").peek(10_000)]


def interrupt() -> None:
    """As a terminal's Ctrl-C: the main thread, which waits for input or works, is interrupted."""
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], None]]:
    """Types lines into standard input, which does not end by itself."""
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb") as reader:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(reader))
        yield lambda lines: (os.write(theirs, lines), None)[1]
        os.close(theirs)


@pytest.fixture
def command(data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """A command in this process."""

    def command(*arguments: str) -> Result:
        with monkeypatch.context() as patched:
            patched.setattr(os, "_exit", sys.exit)  # after a second Ctrl-C
            return run_here(monkeypatch, capsys, (*arguments, "--at", str(data)))

    return command


COMMANDS = {"send": ("send", "t"), "put": ("queue", "put", "q")}


@pytest.mark.parametrize(
    ("what", "hint", "said"),
    [
        (
            "send",
            "each line that you type is sent to t as a message; Ctrl-D ends the input",
            "sent 2 messages to t; what was sent",
        ),
        (
            "put",
            "each line that you type is put into q as an item; Ctrl-D ends the input",
            "put 2 items into q; what was put",
        ),
    ],
)
def test_at_a_terminal_it_says_that_it_reads_and_on_ctrl_c_how_much_is_stored(
    data: Path, what: str, hint: str, said: str
) -> None:
    ours, theirs = pty.openpty()
    arguments = [sys.executable, "-m", "pxrs.cli", *COMMANDS[what], "--at", str(data)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(arguments, stdin=theirs, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.stderr.readline() == f"{hint}\n"
            os.write(ours, b"one\ntwo\nthr")
            eventually(lambda: stored(data, what) == [b"one", b"two"])
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=60)
        finally:
            process.kill()
            os.close(ours)
            os.close(theirs)
    assert (process.returncode, out, errors) == (INTERRUPTED, "", f"interrupted: {said} is durable\n")
    assert stored(data, what) == [b"one", b"two"]


@pytest.mark.parametrize("what", COMMANDS)
def test_in_a_pipe_it_says_nothing_of_that(
    data: Path, command: Call, what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "lines").write_bytes(b"one\n")
    with open(tmp_path / "lines") as lines:
        monkeypatch.setattr(sys, "stdin", lines)
        code, _, errors = command(*COMMANDS[what])
    assert (code, errors) == (0, "")
    assert stored(data, what) == [b"one"]


def test_a_line_that_is_being_sent_when_ctrl_c_comes_is_stored_and_counted(
    data: Path, command: Call, keyboard: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Producer.send

    def interrupted(self: Producer, value: Any, **rest: Any) -> Any:
        if value == b"two":
            interrupt()
        return send(self, value, **rest)

    monkeypatch.setattr(Producer, "send", interrupted)
    keyboard(b"one\ntwo\nthree\n")
    code, out, errors = command("send", "t")
    assert (code, out) == (INTERRUPTED, "")
    assert errors == "interrupted: sent 2 messages to t; what was sent is durable\n"
    assert stored(data) == [b"one", b"two"]


def test_items_that_are_being_put_when_ctrl_c_comes_are_stored_and_counted(
    data: Path, command: Call, keyboard: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Transaction.commit

    def interrupted(self: Transaction) -> None:
        interrupt()
        commit(self)

    monkeypatch.setattr(Transaction, "commit", interrupted)
    monkeypatch.setattr(command_queue, "PUT_ITEMS", 2)
    keyboard(b"one\ntwo\nthree\n")
    code, out, errors = command("queue", "put", "q")
    assert (code, out, errors) == (INTERRUPTED, "", "interrupted: put 2 items into q; what was put is durable\n")
    assert stored(data, "put") == [b"one", b"two"]


def test_after_a_second_ctrl_c_nothing_is_called_sent_that_may_not_be(
    data: Path, command: Call, keyboard: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Producer) -> None:
        interrupt()
        raise AssertionError("the interrupt came before this")

    monkeypatch.setattr(Producer, "flush", interrupted)
    keyboard(b"one\ntwo\n")
    threading.Timer(0.0, lambda: eventually(lambda: len(stored(data)) == 2) and interrupt()).start()
    code, out, errors = command("send", "t")
    assert (code, out) == (INTERRUPTED, "")
    assert errors == "interrupted again: it is not known how many of 2 messages are stored in t\n"


def test_after_a_second_ctrl_c_items_are_counted_that_are_put_for_certain(
    data: Path, command: Call, keyboard: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, calls = Transaction.commit, iter([1, 2])

    def interrupted(self: Transaction) -> None:
        if next(calls) == 2:
            interrupt()
            interrupt()
        commit(self)

    monkeypatch.setattr(Transaction, "commit", interrupted)
    monkeypatch.setattr(command_queue, "PUT_ITEMS", 2)
    keyboard(b"one\ntwo\nthree\n")
    code, out, errors = command("queue", "put", "q")
    assert (code, out) == (INTERRUPTED, "")
    assert errors == "interrupted again: put 2 items into q; it is not known whether later items were put\n"


SEND_AND_TELL = """
import os
from pxrs.cli import app, input
from pxrs.producer.producer import Producer
send, note = Producer.send, input.Interrupts._note
def send_and_tell(self, *given, **named):
    send(self, *given, **named)
    os.write(1, b"ready\\n")
Producer.send = send_and_tell
def told(self, number, frame):
    os.write(1, b"noted\\n")  # `print` raises an error if the signal has interrupted another `print`
    note(self, number, frame)
input.Interrupts._note = told
app.main()
"""


def test_a_second_ctrl_c_does_not_wait_for_an_append_that_is_blocked(data: Path) -> None:
    with pxrs.open(data) as hub:
        folder = Path(hub.topic("t").log.partition_folder(0))  # type: ignore[attr-defined]
        with hub.producer("t") as out:
            out.send("zero")
    arguments = [sys.executable, "-c", SEND_AND_TELL, "send", "t", "--at", str(data)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with (
        open(folder / "lock", "rb+") as lock,
        subprocess.Popen(arguments, text=True, **pipes) as process,  # type: ignore[call-overload]
    ):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # as a process does that was stopped within an append
            process.stdin.write("one\n")
            process.stdin.close()
            process.stdin = None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "noted\n"
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=30)  # the append is tried for longer than a minute
        finally:
            process.kill()
    assert (process.returncode, out) == (INTERRUPTED, "noted\n"), errors
    assert errors.startswith("interrupted again: it is not known how many of ")
    assert errors.count("\n") == 1


def test_a_second_ctrl_c_does_not_wait_until_the_hub_is_closed(
    data: Path, command: Call, keyboard: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    close, leave, done = pxrs.Hub.close, sys.exit, list[str]()

    def interrupted(self: Transaction) -> None:
        interrupt()
        interrupt()

    def left(code: int) -> None:
        done.append("left")
        leave(code)

    monkeypatch.setattr(Transaction, "commit", interrupted)
    monkeypatch.setattr(pxrs.Hub, "close", lambda self: (done.append("closed"), close(self))[1])
    monkeypatch.setattr(sys, "exit", left)
    keyboard(b"one\n")
    assert command("queue", "put", "q")[0] == INTERRUPTED
    assert done[0] == "left"


def test_ctrl_c_stays_ignored_where_the_shell_has_said_so(
    data: Path, command: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Producer.send

    def interrupted(self: Producer, value: Any, **rest: Any) -> Any:
        interrupt()
        return send(self, value, **rest)

    monkeypatch.setattr(Producer, "send", interrupted)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")))
        assert command("send", "t")[:2] == (0, "sent 2 messages to t\n")
    finally:
        signal.signal(signal.SIGINT, before)
