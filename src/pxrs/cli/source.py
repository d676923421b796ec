"""`pxrs source`: registers tables of SQL databases under names; they can then be used wherever a topic can."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pxrs.cli.amounts import duration
from pxrs.cli.options import Json, MaybeAt, RegistryUrl, Yes, check_given, confirm, open_hub
from pxrs.cli.terminal import cell, echo, seconds_field, show
from pxrs.errors import LogError, PxrsError
from pxrs.model import PARTITIONERS, PARTITIONS_DEFAULT
from pxrs.wording import counted, printable

if TYPE_CHECKING:
    from pxrs.sources.catalog import RegisteredSource

app = typer.Typer(no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="SOURCE", help="The source's name.")]


# Over the limit: Typer makes the options and their help from the signature, which is most of the function.
@app.command()
def add(
    name: Name,
    table: Annotated[str, typer.Option(help="The table, NAME or SCHEMA.NAME.")],
    at: MaybeAt = None,
    sql_table: Annotated[
        str | None,
        typer.Option(
            "--sql-table",
            metavar="URL",
            help="The database, as postgresql://HOST/DATABASE. By default what PXRS_SOURCE_<NAME> says.",
        ),
    ] = None,
    value_column: Annotated[
        list[str] | None,
        typer.Option(help="The column that is the message. Several, each with the option: a JSON object of them."),
    ] = None,
    key_column: Annotated[
        str | None, typer.Option(help="Rows with the same value are handled in order, by one worker at a time.")
    ] = None,
    id_column: Annotated[str, typer.Option(help="The rising integer id.")] = "id",
    timestamp_column: Annotated[str | None, typer.Option(help="The message's time.")] = None,
    partitions: Annotated[
        int, typer.Option(help="How many workers can share the table. Fixed for the source's life.")
    ] = PARTITIONS_DEFAULT,
    partitioner: Annotated[str, typer.Option(help=f"How keys are spread: {', '.join(PARTITIONERS)}.")] = "xxh64",
    notify_channel: Annotated[
        str | None, typer.Option(metavar="CHANNEL", help="PostgreSQL: wake on NOTIFY instead of polling.")
    ] = None,
    settle_s: Annotated[
        float | None,
        typer.Option(
            "--settle-s",
            metavar="DURATION",
            parser=duration(),
            help="For how long new rows are held back; see docs/sources.md.",
        ),
    ] = None,
    identity: Annotated[
        str | None, typer.Option(help="Names the table in place of its address, as `identity` of sql_table.")
    ] = None,
    id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="Keep checkpoints under this id, as `pxrs group describe` shows it."),
    ] = None,
    exist_ok: Annotated[
        bool, typer.Option("--exist-ok", help="No error if it is registered already with these settings.")
    ] = False,
    registry: RegistryUrl = None,
    as_json: Json = False,
) -> None:
    """Register a table under a name, to be used wherever a topic is: workers, groups, tail.

    The table is opened once to check that it can be read. The registry keeps the address without user and password:
    each process gives those in PXRS_SOURCE_<NAME> (upper case, other characters as _) as a whole address, or as PGUSER
    and PGPASSWORD or PGPASSFILE.
    """
    import pxrs
    from pxrs.sources.catalog import variable_of

    url = sql_table if sql_table is not None else os.environ.get(variable_of(name))
    if url is None:
        raise typer.BadParameter(f"give the database's address, or set {variable_of(name)}", param_hint="--sql-table")
    # The texts are not shown: there may be a password in them.
    if "://" in table:
        raise typer.BadParameter(
            "this is the address of a database, which --sql-table takes: give the table's name, NAME or SCHEMA.NAME",
            param_hint="--table",
        )
    if "://" not in url:
        raise typer.BadParameter(
            "this is no address of a database, such as postgresql://HOST/DATABASE; the table's name goes to --table",
            param_hint="--sql-table" if sql_table is not None else variable_of(name),
        )
    columns = value_column or []
    if not columns:
        raise typer.BadParameter("give at least one", param_hint="--value-column")
    check_given(at, registry)
    with pxrs.open(at, registry) as hub:
        record = hub.add_source(
            name,
            url,
            table=table,
            key_column=key_column,
            value_column=columns[0] if len(columns) == 1 else None,
            value_columns=columns if len(columns) > 1 else None,
            id_column=id_column,
            timestamp_column=timestamp_column,
            partitions=partitions,
            partitioner=partitioner,
            notify_channel=notify_channel,
            settle_s=settle_s,
            identity=identity,
            id=id,
            exist_ok=exist_ok,
        )
    if as_json:
        typer.echo(json.dumps(_plain(record)))
        return
    typer.echo(f"registered {name}: {record.table} of {record.address}, in {counted(record.partitions, 'partition')}")


@app.command("list")
def list_(at: MaybeAt = None, registry: RegistryUrl = None, as_json: Json = False) -> None:
    """List the registered sources. Does not connect to their databases."""
    with open_hub(at, registry) as hub:
        found = hub.sources()
    if as_json:
        for record in found:
            typer.echo(json.dumps(_plain(record)))
        return
    from rich.table import Table

    table = Table("source", "table", "address", box=None, header_style="bold")
    table.add_column("partitions", justify="right")
    for record in found:
        table.add_row(record.name, cell(record.table), cell(record.address), str(record.partitions))
    show(table)


@app.command()
def describe(name: Name, at: MaybeAt = None, registry: RegistryUrl = None, as_json: Json = False) -> None:
    """Show the settings of a source, the lowest and the next id of its table, and whether this process can read it."""
    with open_hub(at, registry) as hub:
        record = next((each for each in hub.sources() if each.name == name), None)
        start: int | None = None
        end: int | None = None
        problem: str | None = None
        try:
            start, end = hub.source(name).extents()[0]
        except PxrsError as error:
            if record is None or not isinstance(error, LogError | ImportError | ValueError):
                raise
            problem = str(error)
    assert record is not None
    if as_json:
        typer.echo(json.dumps({**_plain(record), "start": start, "end": end, "problem": problem}))
    else:
        for key, value in _plain(record).items():
            echo(printable(f"{key:<17} {'-' if value is None else value}"))
        echo(f"{'start':<17} {'-' if start is None else start}")
        echo(f"{'end':<17} {'-' if end is None else end}")
        if problem is not None:
            echo(printable(f"{'problem':<17} {problem}"))
    if problem is not None:
        raise typer.Exit(1)


@app.command()
def remove(
    name: Name, at: MaybeAt = None, yes: Yes = False, registry: RegistryUrl = None, as_json: Json = False
) -> None:
    """Remove a registered source. The table is not changed. Refused while a group has members that read it.

    The checkpoints of groups are kept, under the source's id: if the table is registered again with the same settings,
    or with that --id, groups go on where they were.
    """
    with open_hub(at, registry) as hub:
        record = next((each for each in hub.sources() if each.name == name), None)
        if record is not None:  # nothing is asked for an unknown source; `remove_source` raises
            confirm(f"Forget the source {name}, {record.table} of {record.address}?", yes)
        hub.remove_source(name)
    assert record is not None
    if as_json:
        typer.echo(json.dumps({"source": name, "id": record.id}))
    else:
        typer.echo(f"removed source {name}; groups have their checkpoints of it under the id {record.id}")


def _plain(record: RegisteredSource) -> dict[str, Any]:
    plain = {"source": record.name, **asdict(record)}
    del plain["name"], plain["fingerprint"], plain["since"]
    return {**plain, **seconds_field("since", record.since), "variable": record.variable}
