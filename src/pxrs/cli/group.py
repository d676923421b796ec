"""`pxrs group`: shows, resets and deletes consumer groups, and decides about messages that could not be handled."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from pxrs.cli.completion import complete_group
from pxrs.cli.moments import FORMS, moment
from pxrs.cli.options import Json, MaybeAt, RegistryUrl, Yes, confirm, open_hub, place_of
from pxrs.cli.terminal import cell, console, echo, indented, is_terminal, seconds_field, show
from pxrs.errors import UnknownGroup
from pxrs.wording import counted, printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from pxrs.group.admin import GroupHandle
    from pxrs.group.description import Columns, GroupDescription
    from pxrs.group.positions import To
    from pxrs.hub import Hub

app = typer.Typer(no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="GROUP", help="The group's name.", autocompletion=complete_group)]
Pairs = Annotated[
    list[str] | None,
    typer.Option("--partition", metavar="P=OFFSET", help="The offset of one partition; may be repeated."),
]
REFRESH_S: Final = 1.0
"""After how many seconds the lag is read again. Appends do not wake this command, which watches the registry."""
PAUSE_S: Final = 0.1
"""The shortest pause between two redraws, however often something changes."""


@app.command("list")
def list_(at: MaybeAt = None, registry: RegistryUrl = None, as_json: Json = False) -> None:
    """List the groups with their members, partitions and lag.

    A lag such as `<= 12` is an upper bound, as for tables, whose ids have gaps. If a lag is `unknown`, the reason is
    printed below the list.
    """
    with open_hub(at, registry) as hub:
        found = list(_describe_all(hub))
    if as_json:
        for each in found:
            counts = {"members": len(each.members), "partitions": len(each.partitions)}
            typer.echo(json.dumps({"group": each.name, **counts, **_lag(each)}))
        return
    from rich.table import Table

    table = Table("group", box=None, header_style="bold")
    for column in ("members", "partitions", "lag"):
        table.add_column(column, justify="right")
    for each in found:
        table.add_row(each.name, str(len(each.members)), str(len(each.partitions)), each.lag_text)
    show(table)
    for each in found:
        if each.lag_problem is not None:
            echo(printable(f"{each.name}: {each.lag_problem}"))


@app.command()
def describe(
    group: Name,
    at: MaybeAt = None,
    registry: RegistryUrl = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Keep running and show each change, until interrupted.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the members of a group, and for each partition its owner, epoch, checkpoint and lag, and the failed message
    at which it is paused.

    A lag such as `<= 12` is an upper bound: for a table it counts ids, including those of other partitions. For a
    paused partition the traceback of the handler is printed, except with --watch. With --watch and --json, one line is
    printed per change.
    """
    place = place_of(at, registry)
    with open_hub(at, registry) as hub:
        handle = hub.group(group)
        if watch:
            _follow(hub, handle, as_json, place)
            return
        _show(handle.describe(), as_json, place)


@app.command()
def reset(
    group: Name,
    at: MaybeAt = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="WHERE",
            help=f"earliest, latest, an offset, or {FORMS}.",
        ),
    ] = None,
    partition: Pairs = None,
    topic: Annotated[str | None, typer.Option(help="Only this topic or source; by default all.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Reset even if the group has members; they continue from there.")
    ] = False,
    yes: Yes = False,
    registry: RegistryUrl = None,
    as_json: Json = False,
) -> None:
    """Set the checkpoints of a group: give --to for all partitions, or --partition for some.

    If the new offset is before the checkpoint, the messages in between are handled again; if it is after the
    checkpoint, they are skipped.
    """
    if (to is None) == (not partition):
        raise typer.BadParameter("give either --to or --partition")
    target: To = _where(to) if to is not None else _pairs(partition or [])
    with open_hub(at, registry) as hub:
        handle = hub.group(group)
        handle.describe()  # raises an error for an unknown group before anything is asked
        where = to if to is not None else ", ".join(partition or [])
        confirm(f"Reset group {group}{f', topic {topic}' if topic else ''} to {where}?", yes)
        offsets = handle.reset(target, topic, force)
    _tell_offsets(offsets, as_json)


@app.command()
def delete(
    group: Name,
    at: MaybeAt = None,
    topic: Annotated[
        str | None,
        typer.Option(metavar="NAME_OR_ID", help="Delete only the checkpoints of this topic or source; by default all."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Delete even if the group has members.")] = False,
    yes: Yes = False,
    registry: RegistryUrl = None,
) -> None:
    """Delete a group and its checkpoints, or with --topic those of one topic. Consumers that join the group later start
    without checkpoints."""
    with open_hub(at, registry) as hub:
        handle = hub.group(group)
        count = len(handle.describe().partitions)
        of = counted(count, "partition") if topic is None else topic
        what = f"group {group} and its checkpoints" if topic is None else f"the checkpoints of group {group}"
        confirm(f"Remove {what} of {of} for good?", yes)
        handle.delete(force, topic)
    typer.echo(f"removed group {group}" if topic is None else f"removed the checkpoints of {topic} from group {group}")


@app.command("import-checkpoint")
def import_checkpoint(
    group: Name,
    topic: Annotated[str, typer.Option(help="The topic or registered source that the group will read.")],
    at: MaybeAt = None,
    offset: Annotated[
        int | None,
        typer.Argument(
            min=0, help="The offset of the next message to read, for a table or a topic with one partition."
        ),
    ] = None,
    partition: Pairs = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing checkpoints.")] = False,
    yes: Yes = False,
    registry: RegistryUrl = None,
    as_json: Json = False,
) -> None:
    """Start a group where another consumer stopped: give its position as one OFFSET, or with --partition.

    Each partition of a topic has its own offsets, so a topic with several partitions needs --partition for each. All
    partitions of a table share its ids: OFFSET is the last id that was handled, plus 1. Existing checkpoints are kept
    unless --force is given.
    """
    if (offset is None) == (not partition):
        raise typer.BadParameter("give either OFFSET or --partition")
    with open_hub(at, registry, makes_registry=True) as hub:
        if force:
            confirm(f"Replace the checkpoints that group {group} has of {topic}?", yes)
        source = offset if offset is not None else _pairs(partition or [])
        offsets = hub.group(group).import_checkpoint(source, topic, force)
    _tell_offsets({topic: offsets}, as_json)


@app.command()
def retry(group: Name, topic: str, partition: int, at: MaybeAt = None, registry: RegistryUrl = None) -> None:
    """Retry the failed message at which a partition is paused."""
    with open_hub(at, registry) as hub:
        handle = hub.group(group)
        handle.retry(topic, partition)
        when = _takes_effect(handle)
    typer.echo(f"group {group} retries {topic}/{partition}{when}")


@app.command()
def skip(
    group: Name, topic: str, partition: int, at: MaybeAt = None, yes: Yes = False, registry: RegistryUrl = None
) -> None:
    """Skip the failed message at which a partition is paused, and resume. The group never handles the message."""
    with open_hub(at, registry) as hub:
        handle = hub.group(group)
        paused = handle.paused(topic, partition)
        question = f"Skip {topic}/{partition} offset {paused.offset}, which failed with {printable(paused.error)}?"
        confirm(question, yes)
        handle.skip(topic, partition, paused.offset)
        when = _takes_effect(handle)
    typer.echo(f"group {group} skipped {topic}/{partition} offset {paused.offset}{when}")


def _takes_effect(handle: GroupHandle) -> str:
    """When a decision about a paused partition takes effect, if the group has no member that could act on it."""
    return "" if handle.describe().members else " (takes effect when a member joins; the group has none now)"


def _describe_all(hub: Hub) -> Iterator[GroupDescription]:
    for name in hub.groups():
        try:
            yield hub.group(name).describe()
        except UnknownGroup:  # deleted meanwhile
            continue


def _where(to: str) -> To:
    if to == "earliest":
        return "earliest"
    if to == "latest":
        return "latest"
    if to.isdecimal():
        return int(to)
    try:
        return moment(to)
    except ValueError:
        raise typer.BadParameter(f"{to!r}: give earliest, latest, an offset, or {FORMS}", param_hint="--to") from None


def _pairs(pairs: list[str]) -> dict[int, int]:
    offsets = {}
    for pair in pairs:
        number, _, offset = pair.partition("=")
        if not (number.isdecimal() and offset.isdecimal()) or int(number) in offsets:
            raise typer.BadParameter(
                f"{pair!r}: give PARTITION=OFFSET, such as 3=120, and each partition only once",
                param_hint="--partition",
            )
        offsets[int(number)] = int(offset)
    return offsets


def _tell_offsets(offsets: dict[str, dict[int, int]], as_json: bool) -> None:
    rows = [(topic, number, offset) for topic, of in offsets.items() for number, offset in sorted(of.items())]
    if as_json:
        for topic, number, offset in rows:
            typer.echo(json.dumps({"topic": topic, "partition": number, "offset": offset}))
        return
    if not rows:
        typer.echo("nothing was written: every partition has a checkpoint; pass --force to replace them")
        return
    from rich.table import Table
    from rich.text import Text

    table = Table("topic", box=None, header_style="bold")
    for column in ("partition", "offset"):
        table.add_column(column, justify="right")
    for topic, number, offset in rows:
        table.add_row(Text(printable(topic)), str(number), f"{offset:,}")
    show(table)


def _show(found: GroupDescription, as_json: bool, place: Sequence[str]) -> None:
    if as_json:
        typer.echo(json.dumps(_plain(found)))
    else:
        show(_picture(found, place, has_tracebacks=True))


def _follow(hub: Hub, handle: GroupHandle, as_json: bool, place: Sequence[str]) -> None:
    """Open the watch, then show the group (R2); show it again when the watch wakes, or when the lag on the screen is
    old."""
    from rich.live import Live

    from pxrs.group.records import Keys

    with hub.registry.watch(Keys(handle.name).root) as watch:
        found = handle.describe()
        if not as_json and is_terminal():
            with Live(_picture(found, place), console=console(), auto_refresh=False) as live:
                while True:
                    live.update(_picture(handle.describe(), place), refresh=True)
                    time.sleep(PAUSE_S)
                    watch.wait(REFRESH_S - PAUSE_S)
        _show(found, as_json, place)
        while True:
            time.sleep(PAUSE_S)
            watch.wait(REFRESH_S - PAUSE_S)
            last, found = found, handle.describe()
            if found != last:
                _show(found, as_json, place)


def _plain(found: GroupDescription) -> dict[str, Any]:
    plain = asdict(found)
    plain["members"] = [_with_time(each, "since") for each in plain["members"]]
    plain["partitions"] = [_with_time(each, "when") for each in plain["partitions"]]
    for each in plain["partitions"]:
        if each["paused"] is not None:
            each["paused"] = _with_time(each["paused"], "when")
    return {"group": plain.pop("name"), **_lag(found), **plain}


def _lag(found: GroupDescription) -> dict[str, Any]:
    return {"lag": found.lag, "is_lag_exact": found.is_lag_exact, "lag_problem": found.lag_problem}


def _with_time(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """The fields in their order; the one with seconds since 1970 becomes a time in RFC 3339."""
    found: dict[str, Any] = {}
    for field, value in fields.items():
        found |= seconds_field(name, value) if field == name else {field: value}
    return found


def _picture(found: GroupDescription, place: Sequence[str], *, has_tracebacks: bool = False) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from pxrs.group.description import (
        MEMBER_COLUMNS,
        PARTITION_COLUMNS,
        advice,
        member_rows,
        partition_rows,
        pause_text,
        place_text,
    )

    head = Text.assemble(
        (found.name, "bold"), f"  generation {found.generation}  members {len(found.members)}  lag {found.lag_text}"
    )
    members = _table(MEMBER_COLUMNS, member_rows(found))
    partitions = _table(PARTITION_COLUMNS, partition_rows(found))
    held = [Text(printable(each.problem)) for each in found.topics if each.problem is not None]
    paused = [row for row in found.partitions if row.paused is not None]
    for traceback, rows in groupby(paused, lambda row: row.traceback):  # many messages may fail at the same line
        held += [Text.assemble((place_text(row), "bold red"), f" {pause_text(row)}") for row in rows]
        if traceback and has_tracebacks:
            held.append(Text(indented(traceback)))
    held += [Text(line) for line in advice(found, place)]
    return Group(head, *([members] if found.members else []), partitions, *held)


def _table(columns: Columns, rows: Sequence[tuple[str, ...]]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for name, is_number in columns:
        table.add_column(name, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*map(cell, row))
    return table
