"""`pxrs topic`: the topics of a log from the command line."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from pxrs.cli.amounts import duration, size
from pxrs.cli.completion import TopicName
from pxrs.cli.options import At, ExistOk, Json, RegistryUrl, Yes, confirm, open_hub
from pxrs.cli.terminal import cell, error_text, facts, show, tell_error, tell_warning
from pxrs.cli.topic_changes import alter, settings_of
from pxrs.cli.topic_copy import copy
from pxrs.errors import DamagedFrame, LogError, PxrsError, TopicExists, UnknownTopic
from pxrs.model import CODECS, DURABILITIES, PARTITIONERS, PARTITIONS_DEFAULT, Topic
from pxrs.wording import counted, printable

if TYPE_CHECKING:
    from pxrs.hub import Hub

app = typer.Typer(no_args_is_help=True)
app.command()(alter)
app.command()(copy)


@app.command()
def create(
    name: str,
    at: At,
    partitions: Annotated[int, typer.Option(help="Fixed for the topic's life.")] = PARTITIONS_DEFAULT,
    partitioner: Annotated[
        str, typer.Option(help=f"How keys are spread: {', '.join(PARTITIONERS)} or an entry point pxrs.partitioners.")
    ] = "xxh64",
    codec: Annotated[str, typer.Option(help=f"How batches are compressed: {', '.join(CODECS)}.")] = "none",
    durability: Annotated[str, typer.Option(help=f"What sending waits for: {', '.join(DURABILITIES)}.")] = "disk",
    retention: Annotated[
        float | None,
        typer.Option(metavar="DURATION", parser=duration(), help="How long messages are kept, such as 12h or 7d."),
    ] = None,
    retention_bytes: Annotated[
        int | None, typer.Option(metavar="SIZE", parser=size, help="How much of each partition is kept, such as 10GB.")
    ] = None,
    segment_s: Annotated[
        float | None,
        typer.Option(
            "--segment-s",
            metavar="DURATION",
            parser=duration(),
            help="After how long a new segment begins; by default a quarter of the retention.",
        ),
    ] = None,
    keep_unread: Annotated[
        bool, typer.Option("--keep-unread", help="Keep every message that a group has yet to read, whatever its age.")
    ] = False,
    ensemble: Annotated[
        int | None, typer.Option(help="In a cluster: over how many storage nodes messages are spread; by default 3.")
    ] = None,
    write_quorum: Annotated[
        int | None, typer.Option(help="In a cluster: how many nodes keep a copy of each message; by default 3.")
    ] = None,
    ack_quorum: Annotated[
        int | None, typer.Option(help="In a cluster: how many copies acknowledge a message; by default 2.")
    ] = None,
    exist_ok: ExistOk = False,
    registry: RegistryUrl = None,
) -> None:
    """Create a topic."""
    import pxrs

    with pxrs.open(at, registry) as hub:
        create_topic = partial(
            hub.create_topic,
            name,
            partitions=partitions,
            partitioner=partitioner,
            codec=codec,
            durability=durability,
            retention=retention,
            retention_bytes=retention_bytes,
            keep_unread=keep_unread,
            segment_s=segment_s,
            ensemble=ensemble,
            write_quorum=write_quorum,
            ack_quorum=ack_quorum,
        )
        told = f"made {name} with {counted(partitions, 'partition')}"
        try:
            with _warnings_told():
                create_topic()
        except TopicExists:
            if not exist_ok:
                raise
            create_topic(exist_ok=True)  # compares the settings
            told = f"{name} is there already, with {counted(partitions, 'partition')} and the same settings"
    typer.echo(told)


class _Warnings(logging.Handler):
    """Tells each warning of the library on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        tell_warning(record.getMessage())


@contextmanager
def _warnings_told() -> Iterator[None]:
    """Within the block, what the library logs about a topic that is created is told as other output of the command."""
    logger, handler = logging.getLogger("pxrs.hub_topics"), _Warnings(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@app.command("list")
def list_(
    at: At,
    registry: RegistryUrl = None,
    internal: Annotated[bool, typer.Option("--internal", help="Also _events and _audit, which pxrs writes.")] = False,
    as_json: Json = False,
) -> None:
    """List the topics, and how many messages each holds. Exit code 1 if any is damaged."""
    with open_hub(at, registry, needs_log=True) as hub:
        rows = _rows(hub, internal=internal)
        sources = 0 if as_json else _count_sources(hub)
    if as_json:
        for row in rows:
            plain = {"topic": row.name, "partitions": row.partitions, "messages": row.messages}
            told = {"damage": row.damage, "ends_problem": row.ends_problem}
            typer.echo(json.dumps(plain | {field: text for field, text in told.items() if text is not None}))
    else:
        from rich.table import Table

        table = Table("topic", box=None, header_style="bold")
        table.add_column("partitions", justify="right")
        table.add_column("messages", justify="right")
        is_damaged = any(row.damage is not None for row in rows)
        if is_damaged:
            table.add_column("damage")
        for row in rows:
            counts = ["-" if count is None else f"{count:,}" for count in (row.partitions, row.messages)]
            if row.ends_problem is not None:
                counts[1] = f"at least {counts[1]}"
            table.add_row(row.name, *counts, *([cell(row.damage or "")] if is_damaged else []))
        show(table)
        if sources:
            typer.echo(f"and {counted(sources, 'registered source')}: see `pxrs source list`", err=True)
    if any(row.damage is not None for row in rows):
        raise typer.Exit(1)


def _count_sources(hub: Hub) -> int:
    """How many registered sources there are; 0 if the registry cannot be asked, because topics are listed without
    it."""
    try:
        return len(hub.sources())
    except PxrsError as error:
        tell_error(f"registered sources are not known: {error_text(error)}", type(error).__name__)
        return 0


class _Row(NamedTuple):
    """A line of the list of topics; None for what is not known because of damage."""

    name: str
    partitions: int | None
    messages: int | None
    damage: str | None = None
    ends_problem: str | None = None
    """Why `messages` is only a lower bound."""


def _rows(hub: Hub, *, internal: bool = False) -> list[_Row]:
    advice = "restore the file from a copy, or delete the topic"
    rows = [_Row(each.name, None, None, f"{each.error}; {advice}") for each in hub.damaged_topics()]
    for topic in hub.topics(internal=internal):
        try:
            problem = hub.topic(topic.name).log.ends_problem()  # before the ends are read
            rows.append(_Row(topic.name, topic.partitions, _count(hub, topic), ends_problem=problem))
        except UnknownTopic:  # deleted meanwhile
            continue
        except LogError as error:
            rows.append(_Row(topic.name, topic.partitions, None, str(error)))
    return sorted(rows, key=lambda row: row.name)


@app.command()
def describe(name: TopicName, at: At, registry: RegistryUrl = None, as_json: Json = False) -> None:
    """Show the settings of a topic, the first and next offset of each partition, why its retention removes nothing, and
    why there may be messages that this process cannot show."""
    with open_hub(at, registry, needs_log=True) as hub:
        handle = hub.topic(name)
        topic = handle.topic
        ends_problem = handle.log.ends_problem()  # before the ends are read
        ends = [(p, *found) for p, found in handle.bounds(range(topic.partitions)).items()]
        problem = handle.retention_problem()
    settings = settings_of(topic)
    if as_json:
        offsets = [{"partition": p, "start": start, "end": end} for p, start, end in ends]
        problems = {"retention_problem": problem, "ends_problem": ends_problem}
        typer.echo(json.dumps({**settings, **problems, "partitions": offsets}))
        return
    from rich.table import Table
    from rich.text import Text

    told = {"retention is held up": problem, "there may be more messages": ends_problem}
    lines = [Text.assemble((f"{what}: ", "bold red"), printable(why)) for what, why in told.items() if why is not None]
    table = Table(box=None, header_style="bold")
    for column in ("partition", "start", "end", "messages"):
        table.add_column(column, justify="right")
    for p, start, end in ends:
        table.add_row(str(p), f"{start:,}", f"{end:,}", f"{end - start:,}")
    show(facts(settings), *lines, table)


@app.command()
def delete(
    name: TopicName,
    at: At,
    yes: Yes = False,
    registry: RegistryUrl = None,
) -> None:
    """Remove a topic and all its messages."""
    import pxrs

    with pxrs.open(at, registry) as hub:
        try:
            what = f"its {counted(_count(hub, hub.topic(name).topic), 'message')}"
        except DamagedFrame as damage:  # a damaged topic can be removed too
            tell_error(error_text(damage), type(damage).__name__)
            what = "all its messages (they cannot be counted)"
        confirm(f"Remove {name} and {what} for good?", yes)
        hub.delete_topic(name)
    typer.echo(f"removed {name} and {what}")


def _count(hub: Hub, topic: Topic) -> int:
    handle = hub.topic(topic.name)
    return sum(found.end - found.start for found in handle.bounds(range(topic.partitions)).values())
