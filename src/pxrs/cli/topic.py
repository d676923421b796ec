"""`pxrs topic`, `pxrs send`, `pxrs tail`, `pxrs check`: a log from the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import pxrs
from pxrs.cli.input import Interrupts, end_after_second_interrupt, interrupted, is_typed, tell_typist
from pxrs.cli.options import At, ExistOk, Json, MaybeAt, RegistryUrl, open_hub, refuse_server
from pxrs.cli.terminal import cell, data_field, echo, echo_data, error_text, facts, show, tell_error, time_field
from pxrs.errors import DamagedFrame, InvalidRecord, LogError, PxrsError, TopicExists, UnknownTopic
from pxrs.log.contract import Source
from pxrs.log.messages import messages_of
from pxrs.model import CODECS, DURABILITIES, PARTITIONERS, PARTITIONS_DEFAULT, Message, Topic, is_internal
from pxrs.producer.producer import Producer
from pxrs.producer.tables import MESSAGE_BYTES_MAX
from pxrs.wording import counted, printable, rfc3339

app = typer.Typer(no_args_is_help=True)
SEND_ROWS = 5_000
LINE_BYTES_MAX = MESSAGE_BYTES_MAX + 2
"""How many bytes of a line are read: the largest message and its line end. The rest of a longer line is not read."""


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
    retention: Annotated[float | None, typer.Option(help="How many seconds messages are kept.")] = None,
    retention_bytes: Annotated[int | None, typer.Option(help="How many bytes of each partition are kept.")] = None,
    segment_s: Annotated[
        float | None,
        typer.Option(
            "--segment-s", help="After how many seconds a new segment begins; by default a quarter of the retention."
        ),
    ] = None,
    keep_unread: Annotated[
        bool, typer.Option("--keep-unread", help="Keep every message that a group has yet to read, whatever its age.")
    ] = False,
    exist_ok: ExistOk = False,
    registry: RegistryUrl = None,
) -> None:
    """Create a topic."""
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
        )
        told = f"made {name} with {counted(partitions, 'partition')}"
        try:
            create_topic()
        except TopicExists:
            if not exist_ok:
                raise
            create_topic(exist_ok=True)  # compares the settings
            told = f"{name} is there already, with {counted(partitions, 'partition')} and the same settings"
    typer.echo(told)


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


def _count_sources(hub: pxrs.Hub) -> int:
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


def _rows(hub: pxrs.Hub, *, internal: bool = False) -> list[_Row]:
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
def describe(name: str, at: At, registry: RegistryUrl = None, as_json: Json = False) -> None:
    """Show the settings of a topic, the first and next offset of each partition, why its retention removes nothing, and
    why there may be messages that this process cannot show."""
    with open_hub(at, registry, needs_log=True) as hub:
        handle = hub.topic(name)
        topic = handle.topic
        ends_problem = handle.log.ends_problem()  # before the ends are read
        ends = [(p, *found) for p, found in handle.bounds(range(topic.partitions)).items()]
        problem = handle.retention_problem()
    settings: dict[str, Any] = {
        "topic": topic.name,
        "id": topic.id,
        "partitioner": topic.partitioner,
        "codec": topic.codec,
        "durability": topic.durability,
    }
    settings |= {"retention_s": topic.retention_s, "retention_bytes": topic.retention_bytes}
    settings |= {"segment_bytes": topic.segment_bytes, "segment_s": topic.segment_age_s}
    settings["keep_unread"] = topic.keep_unread
    if as_json:
        offsets = [{"partition": p, "start": start, "end": end} for p, start, end in ends]
        problems = {"retention_problem": problem, "ends_problem": ends_problem}
        typer.echo(json.dumps({**settings, **problems, "partitions": offsets}))
        return
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
    name: str,
    at: At,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    registry: RegistryUrl = None,
) -> None:
    """Remove a topic and all its messages."""
    with pxrs.open(at, registry) as hub:
        try:
            what = f"its {counted(_count(hub, hub.topic(name).topic), 'message')}"
        except DamagedFrame as damage:  # a damaged topic can be removed too
            tell_error(error_text(damage), type(damage).__name__)
            what = "all its messages (they cannot be counted)"
        if not yes:
            typer.confirm(f"Remove {name} and {what} for good?", abort=True)
        hub.delete_topic(name)
    typer.echo(f"removed {name} and {what}")


def send(
    topic: str,
    at: At,
    key: Annotated[
        str | None, typer.Option(metavar="FIELD", help="Lines are JSON objects; this field is each message's key.")
    ] = None,
    registry: RegistryUrl = None,
) -> None:
    """Send each line of standard input as a message; all are durable when the command ends.

    With --key, a field that is null means no key. A line that cannot be sent ends the command, once the lines
    before it are durable. Ctrl-C ends it too: it prints how many messages were sent, and the exit code is 130.
    """
    if sys.stdin is None:
        raise InvalidRecord("standard input is closed; give it the lines to send")
    err = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} sent"), TimeElapsedColumn())
    bar = Progress(*columns, console=err, disable=not err.is_terminal or is_typed())
    with pxrs.open(at, registry) as hub, hub.producer(topic) as out, bar:
        tell_typist(f"sent to {topic} as a message")
        task = bar.add_task("sending", total=None)
        lines = _Lines(out, key, lambda count: bar.update(task, completed=count))
        try:
            with Interrupts() as interrupts:
                try:
                    lines.send(interrupts)
                except KeyboardInterrupt:
                    if interrupts.count > 1:
                        raise
                out.flush()
        except KeyboardInterrupt:
            read = counted(lines.count, "message")
            bar.stop()
            end_after_second_interrupt(f"how many of {read} are stored in {topic} is not known")
        bar.update(task, completed=lines.count)
    sent = f"sent {counted(lines.count, 'message')} to {topic}"
    if interrupts.count:
        raise interrupted(f"{sent}; what was sent is durable")
    typer.echo(sent)


class _Lines:
    """Sends the lines of standard input, and counts those that the producer has accepted."""

    def __init__(self, out: Producer, key: str | None, progress: Callable[[int], None]) -> None:
        self._out, self._key, self._progress = out, key, progress
        self.count = 0

    def send(self, interrupts: Interrupts) -> None:
        """Send all lines. Raises KeyboardInterrupt on Ctrl-C: then exactly the counted lines are in the producer."""
        stdin = sys.stdin.buffer
        while line := interrupts.wait(lambda: stdin.readline(LINE_BYTES_MAX)):
            try:
                value = line.removesuffix(b"\n").removesuffix(b"\r")
                self._out.send(value, key=None if self._key is None else key_in(value, self._key))
            except InvalidRecord as error:
                self._out.flush()  # so that the error can say that the lines before it were sent
                before = f"{counted(self.count, 'line')} before it {'was' if self.count == 1 else 'were'} sent"
                raise InvalidRecord(f"line {self.count + 1:,}: {error}; {before}") from error
            self.count += 1
            if self.count % SEND_ROWS == 0:
                self._progress(self.count)


def key_in(line: bytes, field: str) -> bytes | None:
    try:
        found = json.loads(line)[field]
        text = found if isinstance(found, str) or found is None else json.dumps(found)
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRecord(f"no JSON object with the field {field!r}: {error!r}") from error
    except RecursionError as error:
        raise InvalidRecord("its JSON is nested too deeply") from error
    try:
        return None if text is None else text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRecord(f"the field {field!r} is no text that UTF-8 can hold: {error}") from error


def tail(
    topic: str,
    at: MaybeAt = None,
    last: Annotated[int, typer.Option("-n", "--last", min=0, help="How many messages before the end to begin.")] = 10,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Wait for more, until interrupted.")] = False,
    registry: RegistryUrl = None,
    as_json: Json = False,
) -> None:
    """Print the last messages of a topic or registered source, and with -f each new one as it arrives.

    On a terminal control characters are shown escaped, such as \\x07. With --json nothing is lost: key, value and the
    value of each header are text if their bytes are UTF-8; if not, key_base64 or value_base64 stands in their place.
    """
    with open_hub(at, registry) as hub:
        source = hub.readable(topic)
        positions = dict(enumerate(source.ends()))
        found = _last(source, positions, last)
        # The ids of a table are in the order of arrival; a table need not have times.
        found.sort(key=lambda message: message.offset if source.has_gaps else message.timestamp)
        for message in found[len(found) - min(last, len(found)) :]:
            _print(message, as_json)
        while follow and positions:
            for p, found_there in sorted(source.fetch(positions, timeout=60.0).items()):
                if found_there.error is not None:
                    raise found_there.error
                if found_there.is_ended:
                    del positions[p]
                for batch in found_there.batches:
                    for message in messages_of(batch, source.name, p):
                        _print(message, as_json)
                    positions[p] = batch.next_offset


def _last(source: Source, ends: Mapping[int, int], count: int) -> list[Message]:
    """At least the last `count` messages before these ends, if there are as many, in the order of their partitions.

    The offsets of a table have gaps, so several tries may be needed, each from further back."""
    back = count
    while count:
        bounds = source.bounds(ends)
        begins = {p: max(bounds[p].start, end - back) for p, end in ends.items()}
        found = [message for p, end in ends.items() for message in _messages(source, p, begins[p], end)]
        is_whole = not source.has_gaps or all(begins[p] <= bounds[p].start for p in ends)
        if is_whole or len(found) >= count:
            return found
        back *= 4
    return []


def _messages(source: Source, partition: int, offset: int, end: int) -> Iterator[Message]:
    while offset < end and (batches := source.read(partition, offset)):
        for batch in batches:
            yield from messages_of(batch.within(offset, end), source.name, partition)
            offset = batch.next_offset


def _print(message: Message, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_plain(message)))
        return
    moment = rfc3339(message.timestamp) or f"{message.timestamp}us"  # set by the sender; it may be beyond the calendar
    place = f"{message.partition}/{message.offset} {moment}"
    echo_data(place, message.key, message.value)


def _plain(message: Message) -> dict[str, Any]:
    """The message as a JSON object, from which it can be sent again."""
    headers = message.headers
    return {
        "partition": message.partition,
        "offset": message.offset,
        **time_field("timestamp", message.timestamp),
        **data_field("key", message.key),
        **data_field("value", message.value),
        "headers": None if headers is None else [{"key": name, **data_field("value", data)} for name, data in headers],
    }


def _count(hub: pxrs.Hub, topic: Topic) -> int:
    handle = hub.topic(topic.name)
    return sum(found.end - found.start for found in handle.bounds(range(topic.partitions)).values())


def check(directory: Annotated[str, typer.Argument(metavar="DIRECTORY")], as_json: Json = False) -> None:
    """Read every byte of a log, and report everything that is damaged, missing or inconsistent. Exit code 1 if anything
    is.

    It changes nothing and takes no lock: run it at any time, beside producers and consumers.
    """
    from pxrs.log.directory.check import check as check_log

    refuse_server(directory, "pxrs check", "a log is checked where its files are")
    findings, messages, size = [], 0, 0
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    err = Console(stderr=True)
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("reading", total=None)
        for checked in check_log(Path(directory)):
            findings += checked.findings
            if not is_internal(checked.topic):  # those are checked too, and not counted: the user has sent none of them
                messages, size = messages + checked.messages, size + checked.bytes
            bar.update(task, description=f"{checked.topic}: {counted(messages, 'message')}")
    if as_json:
        for finding in findings:
            typer.echo(json.dumps(finding._asdict()))
        typer.echo(json.dumps({"messages": messages, "bytes": size, "findings": len(findings)}))
    else:
        for finding in findings:
            echo(printable(f"{finding.file} at byte {finding.position:,}: {finding.what}"))
        totals = counted(messages, "message"), counted(size, "byte"), counted(len(findings), "finding")
        typer.echo(", ".join(totals))
    if findings:
        raise typer.Exit(1)
