"""How all commands print tables, lines of data, times and errors.

On a terminal a table fits the window. Elsewhere, as in a pipe or a file, it is as wide as its longest values: nothing
is cut or wrapped, whatever COLUMNS says.
"""

from __future__ import annotations

import base64
import io
import os
import sys
from typing import Any, Final

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from pxrs import disk
from pxrs.wording import microseconds, printable, rfc3339

PIPE_COLUMNS: Final = 1 << 30
"""The width of a table that is not printed on a terminal: more than any table needs."""


def is_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def echo(line: str) -> None:
    """Print a line on standard output as it is, neither wrapped nor stripped. Characters that the encoding lacks are
    escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    typer.echo(line.encode(encoding, "backslashreplace"))


def tell_error(what: str, kind: str = "") -> None:
    """Print an error as one line on standard error: what happened, then the class of the error, by which the docs name
    it."""
    console = Console(stderr=True, highlight=False, emoji=False)
    line = Text(printable(what.replace("\n", " ")), "red")
    console.print(line.append(f" ({kind})", "dim") if kind else line, soft_wrap=True)


def tell_warning(what: str) -> None:
    """Print a warning as one line on standard error."""
    line = Text(f"warning: {printable(what)}", "yellow")
    Console(stderr=True, highlight=False, emoji=False).print(line, soft_wrap=True)


def error_text(error: BaseException) -> str:
    """The message of an error, with the notes that were added to it."""
    what = str(error)
    if isinstance(error, PermissionError):
        what = disk.explain(error)
    elif isinstance(error, OSError) and error.strerror:  # `str` would begin with the number of the error
        what = error.strerror if error.filename is None else f"{error.strerror}: {os.fsdecode(error.filename)}"
    return "; ".join([what, *getattr(error, "__notes__", [])])


def console() -> Console:
    """Standard output of a terminal."""
    return Console(highlight=False, emoji=False)


def show(*parts: RenderableType) -> None:
    """Print tables and lines, one below the other, on standard output."""
    if is_terminal():
        console().print(*parts, sep="\n")
        return
    # Rendered into a string first: rich fills every line of a table up to its width, here with thousands of blanks.
    lines = io.StringIO()
    Console(file=lines, highlight=False, emoji=False, width=PIPE_COLUMNS).print(*parts, sep="\n")
    for line in lines.getvalue().removesuffix("\n").split("\n"):
        echo(line.rstrip())


def facts(pairs: dict[str, object]) -> Text:
    """Names and values on one line."""
    parts = [Text.assemble((name, "bold"), f" {printable(str(value))}") for name, value in pairs.items()]
    return Text("  ").join(parts)


def cell(text: str) -> Text:
    """A value in a table, with everything escaped that rich or the terminal would interpret. A tab is escaped too,
    because rich would turn it into blanks."""
    return Text(printable(text).replace("\t", "\\t"))


def indented(text: str) -> str:
    """Lines such as those of a traceback, escaped and indented, to be printed below what they belong to."""
    return "\n".join(f"    {printable(line)}" for line in text.splitlines())


def time_field(name: str, time_us: int | None) -> dict[str, Any]:
    """A wall-clock time, in microseconds since 1970, as a field of JSON: in RFC 3339, or, if it lies beyond the
    calendar, as that number under a name that says so."""
    if time_us is None:
        return {name: None}
    text = rfc3339(time_us)
    return {f"{name}_us": time_us} if text is None else {name: text}


def seconds_field(name: str, seconds: float | None) -> dict[str, Any]:
    """As `time_field`, of seconds since 1970; None if there are none."""
    return time_field(name, microseconds(seconds))


def data_text(data: bytes | None) -> str:
    """Bytes as text for people."""
    return "" if data is None else data.decode(errors="backslashreplace")


def data_line(place: str, key: bytes | None, value: bytes | None) -> str:
    """A line for people: where something is, its key if it has one, and its value."""
    key_text, text = data_text(key), data_text(value)
    if is_terminal():
        key_text, text = printable(key_text), printable(text)
        if not os.environ.get("NO_COLOR"):
            place, key_text = typer.style(place, dim=True), typer.style(key_text, fg=typer.colors.CYAN)
    return f"{place} {text}" if key is None else f"{place} {key_text} {text}"


def echo_data(place: str, key: bytes | None, value: bytes | None) -> None:
    """Print such a line."""
    echo(data_line(place, key, value))


def data_field(name: str, data: bytes | None) -> dict[str, str | None]:
    """Bytes as a field of JSON: as text if they are UTF-8, otherwise in base64 under a name that says so."""
    try:
        return {name: None if data is None else data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data or b"").decode()}
