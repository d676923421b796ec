"""`pxrs topic copy`: copy a topic into another one."""

from __future__ import annotations

import json
from contextlib import ExitStack
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from pxrs.cli.moments import FORMS, moment
from pxrs.cli.options import At, Json, RegistryUrl, open_hub
from pxrs.wording import counted

if TYPE_CHECKING:
    from pxrs.copying.copier import Copied


def copy(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The topic to copy.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The topic to copy into; created if it is missing.")],
    at: At,
    to: Annotated[
        str | None, typer.Option("--to", metavar="URL", help="The hub of TARGET; by default that of SOURCE.")
    ] = None,
    partitions: Annotated[
        int | None, typer.Option(help="How many partitions TARGET has; by default as many as SOURCE.")
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option("--from", metavar="OFFSET|TIME", help=f"Where to begin: an offset of each partition, or {FORMS}."),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="OFFSET|TIME", help="Where to stop; by default at the current end.")
    ] = None,
    append: Annotated[
        bool, typer.Option("--append", help="Allow a new copy into a topic that has messages already.")
    ] = False,
    registry: RegistryUrl = None,
    to_registry: Annotated[
        str | None,
        typer.Option("--to-registry", metavar="URL", help="With --to: the registry, if it is not in the directory."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Copy the messages of a topic into another one: each message exactly once, in order per key.

    To resume a copy that was interrupted or killed, run the command again. Run again later, it copies the messages that
    have arrived since."""
    start, end = _place("--from", begin), _place("--until", until)
    if to is None and to_registry is not None:
        raise typer.BadParameter("--to-registry requires --to")
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    import pxrs

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    err = Console(stderr=True)
    with ExitStack() as stack:
        hub = stack.enter_context(open_hub(at, registry, needs_log=True))
        other = hub if to is None else stack.enter_context(pxrs.open(to, to_registry))
        bar = stack.enter_context(Progress(*columns, console=err, transient=True, disable=not err.is_terminal))
        task = bar.add_task("copying", total=None)

        def show(done: Copied) -> None:
            bar.update(task, description=counted(done.messages, "message"), completed=done.offsets, total=done.total)

        done = hub.copy_topic(
            source, target, to=other, partitions=partitions, start=start, end=end, append=append, on_progress=show
        )
    if as_json:
        typer.echo(json.dumps({"topic": source, "target": target, "messages": done.messages, "offsets": done.offsets}))
    else:
        typer.echo(f"copied {counted(done.messages, 'message')} of {source} into {target}")


def _place(option: str, text: str | None) -> int | datetime | None:
    if text is None:
        return None
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        return moment(text)
    except ValueError:
        raise typer.BadParameter(f"{option} {text!r}: give an offset, or {FORMS}") from None
