"""`pxrs registry`: prints DDL for the database administrator, shows the keys of a registry, and records which registry
a hub belongs to."""

from __future__ import annotations

import base64
import json
import sys
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.table import Table

from pxrs import registry
from pxrs.cli.options import At, RegistryUrl, check_is_there, open_hub
from pxrs.cli.terminal import cell, data_text, is_terminal, show
from pxrs.registry import Entry

app = typer.Typer(no_args_is_help=True)
Url = Annotated[
    str, typer.Argument(metavar="URL", help="A directory, sqlite:///F, postgresql://, etcd://, zookeeper://, pxrs://")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]


class Dialect(StrEnum):
    """The databases for which DDL can be printed."""

    ORACLE = "oracle"
    POSTGRESQL = "postgresql"
    SQLITE = "sqlite"


@app.command()
def ddl(dialect: Annotated[Dialect, typer.Option(help="The database.")]) -> None:
    """Print the tables and the least privileges that a registry in a SQL database needs.

    Run the DDL as the owner of the schema; then open the registry with ?create=false as a user with those privileges.
    """
    from pxrs.registry import sql

    typer.echo(sql.ddl(dialect.value))


@app.command()
def scan(
    url: Url,
    prefix: Annotated[str, typer.Argument(help="Only keys with this prefix, which must end with a slash.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="List at most this many keys.")] = 1000,
    as_json: Json = False,
) -> None:
    """List keys, versions and values. On a terminal, long values are cut."""
    check_is_there(url, "URL")
    with registry.open(url) as handle:
        entries = handle.scan(prefix, limit=limit)
    if as_json:
        for entry in entries:
            typer.echo(json.dumps(_plain(entry)))
        return
    table = Table("key", "version", "value", box=None, header_style="bold")
    for entry in entries:
        value = _short(entry.value) if is_terminal() else data_text(entry.value)
        table.add_row(cell(entry.key), str(entry.version), cell(value))
    show(table)
    if len(entries) == limit:
        typer.echo(f"showing the first {limit:,}; for more, raise --limit", err=True)


@app.command()
def get(url: Url, key: str, as_json: Json = False) -> None:
    """Print one key's value; exit code 1 if there is no such key."""
    check_is_there(url, "URL")
    with registry.open(url) as handle:
        entry = handle.get(key)
    if entry is None:
        typer.echo(f"no such key: {key}", err=True)
        raise typer.Exit(1)
    if as_json:
        typer.echo(json.dumps(_plain(entry)))
    else:
        sys.stdout.buffer.write(entry.value)


@app.command()
def adopt(at: At, url: RegistryUrl = None) -> None:
    """Record that a hub belongs to another registry. Only processes with that registry may then join its groups, change
    them, and apply the retention of topics with keep_unread.

    Stop the members of its groups first. Nothing is copied: in the new registry a group starts without checkpoints, or
    with those that it has there. Messages that only groups of the old registry have yet to read are no longer kept.
    """
    with open_hub(at, url, needs_log=True, makes_registry=True) as hub:
        before, after = hub.adopt_registry()
        was = f"; before: {before}" if before else ""
        typer.echo(f"the hub {hub.url} now belongs to the registry {after}{was}")
        if before and (kept := [topic.name for topic in hub.topics() if topic.keeps_unread]):
            typer.echo(
                f"topics with keep_unread: {', '.join(kept)}: the next upkeep removes messages that only groups of the "
                "former registry have yet to read; before it runs, import their checkpoints or turn off retention",
                err=True,
            )


def _plain(entry: Entry) -> dict[str, Any]:
    """The bytes as a field of JSON: as text if they are UTF-8, otherwise in base64."""
    try:
        value = {"value": entry.value.decode()}
    except UnicodeDecodeError:
        value = {"base64": base64.b64encode(entry.value).decode()}
    return {"key": entry.key, "version": entry.version, **value}


def _short(value: bytes) -> str:
    text = data_text(value)
    return text if len(text) <= 80 else f"{text[:77]}... ({len(value):,} bytes)"
