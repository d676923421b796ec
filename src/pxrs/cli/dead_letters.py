"""`pxrs queue dead`: the dead letters of a queue; and how all commands of queues print items."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.table import Table

from pxrs.cli.completion import complete_queue
from pxrs.cli.options import Json, MaybeAt, RegistryUrl, Yes, confirm, open_hub, place_of
from pxrs.cli.terminal import (
    cell,
    data_field,
    data_text,
    echo,
    echo_data,
    indented,
    seconds_field,
    show,
    tell_error,
)
from pxrs.queue.items import Item
from pxrs.wording import command, counted, printable, time_text

app = typer.Typer(no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.", autocompletion=complete_queue)]
Ids = Annotated[
    list[str] | None, typer.Argument(metavar="[ID]...", help="Only the dead letters with these ids; by default all.")
]


@app.command("list")
def list_dead(
    queue: Name,
    at: MaybeAt = None,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many at most, the oldest first.")] = 100,
    traceback: Annotated[bool, typer.Option("--traceback", help="Also print the tracebacks.")] = False,
    registry: RegistryUrl = None,
    as_json: Json = False,
) -> None:
    """List dead letters: when and after how many deliveries each item became one, and the error of the last delivery.

    With --json, error_type and traceback are always there; they are empty if no handler raised."""
    with open_hub(at, registry) as hub:
        found = hub.queue(queue).dead_letters().list(count + 1)
    if as_json:
        print_items(found[:count], as_json)
    else:
        table = Table("id", "died", box=None, header_style="bold")
        table.add_column("deliveries", justify="right")
        for column in ("error", "key", "value"):
            table.add_column(column, no_wrap=True, overflow="ellipsis")
        for item in found[:count]:
            cells = (cell(item.error), cell(data_text(item.key)), cell(data_text(item.value)))
            table.add_row(item.id, time_text(item.died_at), str(item.deliveries), *cells)
        show(table)
        for item in found[:count] if traceback else ():
            echo(f"{item.id} {printable(item.error)}")
            if item.traceback:
                echo(indented(item.traceback))
    if len(found) > count:
        typer.echo(f"these are the first {count:,}; there are more: give --count", err=True)


@app.command()
def retry(queue: Name, at: MaybeAt = None, ids: Ids = None, registry: RegistryUrl = None) -> None:
    """Put dead letters back into the queue, as if they had never been delivered."""
    with open_hub(at, registry) as hub:
        done = hub.queue(queue).dead_letters().retry(ids or None)
    typer.echo(f"{counted(done, 'dead letter')} of {queue} will be tried again")
    _tell_missing(queue, ids, done, place_of(at, registry))


@app.command()
def purge(queue: Name, at: MaybeAt = None, ids: Ids = None, yes: Yes = False, registry: RegistryUrl = None) -> None:
    """Remove dead letters for good."""
    with open_hub(at, registry) as hub:
        letters = hub.queue(queue).dead_letters()
        if not ids:
            confirm(f"Remove {counted(len(letters), 'dead letter')} of {queue} for good?", yes)
        done = letters.purge(ids or None)
    typer.echo(f"removed {counted(done, 'dead letter')} of {queue}")
    _tell_missing(queue, ids, done, place_of(at, registry))


def print_items(items: Iterable[Item], as_json: bool) -> None:
    """Print the items and flush standard output: a command commits what it has taken only after this has returned."""
    for item in items:
        if as_json:
            typer.echo(json.dumps(_plain(item)))
            continue
        echo_data(f"{item.id} {time_text(item.put_at)}", item.key, item.value)
    if sys.stdout is not None:
        sys.stdout.flush()


def _plain(item: Item) -> dict[str, Any]:
    """The item as a JSON object, from which it can be put again."""
    found: dict[str, Any] = {
        "queue": item.queue,
        "id": item.id,
        **data_field("key", item.key),
        **data_field("value", item.value),
        "priority": item.priority,
        "deliveries": item.deliveries,
        **seconds_field("put_at", item.put_at),
        "error": item.error,
    }
    if item.died_at is None:
        return found
    died_at = seconds_field("died_at", item.died_at)
    return {**found, **died_at, "error_type": item.error_type, "traceback": item.traceback}


def _tell_missing(queue: str, ids: list[str] | None, done: int, place: list[str]) -> None:
    missing = len(set(ids or ())) - done
    if ids and missing:
        what = "is no dead letter" if missing == 1 else "are no dead letters"
        tell_error(f"{missing} of these {what} of {queue}: see `{command('queue', 'dead', 'list', queue, *place)}`")
        raise typer.Exit(1)
