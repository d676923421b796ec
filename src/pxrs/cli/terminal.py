"""What a terminal may be shown of data that anybody has written."""

from __future__ import annotations

import base64
import os
import re
import sys
from datetime import UTC, datetime
from typing import Final

import typer
from rich.console import Console
from rich.text import Text

PIPE_WIDTH: Final = 1000
# Control characters but the tab, line and paragraph separators, and what turns the direction of writing: each could
# move the cursor, ring, colour, or make a line look like another one.
_UNSAFE: Final = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with such characters as Python writes them, a bell as \\x07; it has one line."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def is_terminal() -> bool:
    """Whether standard output is one."""
    return sys.stdout is not None and sys.stdout.isatty()


def echo(line: str) -> None:
    """A line on standard output as it is: neither wrapped nor stripped, whatever the encoding can hold."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    typer.echo(line.encode(encoding, "backslashreplace"))


def tell_error(name: str, what: str) -> None:
    """One line on standard error, however long."""
    console = Console(stderr=True, highlight=False, emoji=False)
    console.print(Text.assemble((f"{name}:", "bold red"), " ", printable(what.replace("\n", " "))), soft_wrap=True)


def console() -> Console:
    """Standard output for tables. Lines in a pipe are as long as they need to be."""
    return Console(highlight=False, emoji=False, width=None if is_terminal() else PIPE_WIDTH)


def cell(text: str) -> Text:
    """Of a table: what is in it has no meaning for the terminal."""
    return Text(printable(text))


def indented(text: str) -> str:
    """Lines such as those of a traceback, each safe to print, to stand below what they belong to."""
    return "\n".join(f"    {printable(line)}" for line in text.splitlines())


def time_text(seconds: float | None) -> str:
    """A wall-clock time in UTC."""
    if not seconds:
        return "-"
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g}s"


def data_text(data: bytes | None) -> str:
    """Bytes to be read by people."""
    return "" if data is None else data.decode(errors="backslashreplace")


def echo_data(place: str, key: bytes | None, value: bytes | None) -> None:
    """A line: where something is, its key if it has one, and what it says."""
    key_text, text = data_text(key), data_text(value)
    if is_terminal():
        key_text, text = printable(key_text), printable(text)
        if not os.environ.get("NO_COLOR"):
            place, key_text = typer.style(place, dim=True), typer.style(key_text, fg=typer.colors.CYAN)
    echo(f"{place} {text}" if key is None else f"{place} {key_text} {text}")


def data_field(name: str, data: bytes | None) -> dict[str, str | None]:
    """Bytes as a field of JSON: as text, or if they are none in base64 under a name that says so."""
    try:
        return {name: None if data is None else data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data or b"").decode()}
