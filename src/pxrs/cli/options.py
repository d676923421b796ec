"""The options that several commands have, and how they open what those name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

import pxrs
from pxrs.cli.terminal import tell_error
from pxrs.errors import InvalidUrl
from pxrs.registry.address import parse

At = Annotated[str, typer.Option("--at", envvar="PXRS_AT", metavar="URL", help="The directory that holds the log.")]
RegistryUrl = Annotated[
    str | None,
    typer.Option("--registry", envvar="PXRS_REGISTRY", metavar="URL", help="The registry, if it is not in there."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@contextmanager
def open_hub(at: str, registry: str | None, *, needs_log: bool = False) -> Iterator[pxrs.Hub]:
    """What is there; a place that is not is not made.

    needs_log: the directory must be there although the registry is elsewhere: messages are asked for."""
    address = parse(at)
    # The registry is made by its first use: a wrong path would leave an empty one behind.
    if (registry is None or needs_log) and address.scheme == "file" and not address.directory().is_dir():
        raise InvalidUrl(f"there is no directory {at}: correct --at or PXRS_AT")
    with pxrs.open(at, registry) as hub:
        yield hub


def confirm(question: str, yes: bool) -> None:
    """Ask, unless the answer was given."""
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        tell_error("standard input is no terminal to ask at; give --yes to do it")
        raise typer.Exit(2)
    typer.confirm(question, abort=True, err=True)
