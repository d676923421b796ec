"""Standard input of a command, typed by a person or piped in by a program, and what Ctrl-C does to the command.

When Ctrl-C ends a command, the command must be able to say how much it has done. So Ctrl-C ends the wait for more input
at once, but input that was read before is still processed, made durable and counted: during that work the first Ctrl-C
is only noted. A second Ctrl-C raises KeyboardInterrupt at once. The command must then say that the outcome is not
known, and end without waiting.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, NoReturn, Self, TypeVar

import typer

from pxrs.errors import InvalidRecord

EXIT_INTERRUPTED: Final = 130
"""The exit code of a process that Ctrl-C has ended, as shells have it: 128 and the number of SIGINT."""

T = TypeVar("T")


def is_typed() -> bool:
    """Whether standard input is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


def tell_typist(what_becomes_of_a_line: str) -> None:
    """At a terminal, print that the command reads from it: otherwise the command would seem to hang."""
    if is_typed():
        typer.echo(f"each line that you type is {what_becomes_of_a_line}; Ctrl-D ends the input", err=True)


def interrupted(what: str) -> typer.Exit:
    """Print what was done when Ctrl-C ended the command. Returns the exception to raise."""
    typer.echo(f"interrupted: {what}", err=True)
    return typer.Exit(EXIT_INTERRUPTED)


def end_after_second_interrupt(what: str) -> NoReturn:
    """Print what a second Ctrl-C has left unfinished, and end the process at once.

    No `finally`, `with` block or exit handler is run: closing a producer or a hub waits for the disk or the registry,
    and one of these that does not answer may be why Ctrl-C was pressed again. The leases of this process end at their
    deadline. Stop a progress bar before, or the terminal's cursor stays hidden."""
    try:
        typer.echo(f"interrupted again: {what}", err=True)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    finally:
        os._exit(EXIT_INTERRUPTED)


class Interrupts:
    """Within the block, Ctrl-C raises KeyboardInterrupt during `wait` and at `check`; a second one raises it anywhere.

    If SIGINT was ignored before, as in a background job of a shell, it stays ignored."""

    def __init__(self) -> None:
        self.count = 0
        """How often Ctrl-C was pressed within the block."""
        self._is_waiting = False
        self._before: Any = None
        """The handler of SIGINT outside the block."""
        self._is_ours = False
        """Whether this object handles SIGINT now."""

    def __enter__(self) -> Self:
        self._before = signal.getsignal(signal.SIGINT)
        # Python allows signal handlers in the main thread only.
        is_main = threading.current_thread() is threading.main_thread()
        self._is_ours = is_main and self._before is not signal.SIG_IGN
        if self._is_ours:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_ours:
            signal.signal(signal.SIGINT, self._before)

    def wait(self, read: Callable[[], T]) -> T:
        """The result of `read`. Input that arrives in the moment of a Ctrl-C may be dropped; it was not processed."""
        # Set the flag before calling `check`: a Ctrl-C before this line is found by `check`, one after it raises in
        # `_note`.
        self._is_waiting = True
        try:
            self.check()
            return read()
        finally:
            self._is_waiting = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self.count:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._is_waiting or self.count > 1:
            raise KeyboardInterrupt


def key_in(line: bytes, field: str) -> bytes | None:
    """The key that a line has in this field of its JSON object: a string as it is, null as no key, anything else as
    JSON. Raises InvalidRecord."""
    try:
        found = json.loads(line)
    except RecursionError as error:
        raise InvalidRecord("its JSON is nested too deeply") from error
    except ValueError as error:
        raise InvalidRecord(f"--key {field} names a field of JSON objects, but this is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRecord(f"--key {field} names a field of JSON objects, but this JSON is not an object")
    if field not in found:
        raise InvalidRecord(f"the object has no field {field!r}, which --key names; a field that is null means no key")
    key = found[field]
    text = key if isinstance(key, str) or key is None else json.dumps(key)
    try:
        return None if text is None else text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRecord(f"the field {field!r} cannot be encoded as UTF-8: {error}") from error
