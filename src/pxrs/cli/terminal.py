"""What a terminal may be shown of data that anybody has written."""

from __future__ import annotations

import re
import sys
from typing import Final

import typer
from rich.console import Console
from rich.text import Text

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
