"""`pxrs send`: one message from the command line, or a message for each line of standard input."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pxrs.cli.completion import TopicName
from pxrs.cli.input import Interrupts, end_after_second_interrupt, interrupted, is_typed, key_in, tell_typist
from pxrs.cli.moments import FORMS, moment
from pxrs.cli.options import At, RegistryUrl, bytes_of
from pxrs.errors import InvalidRecord
from pxrs.model import Topic, microseconds_of
from pxrs.wording import counted

if TYPE_CHECKING:
    from pxrs.cli.message_json import Record
    from pxrs.producer.producer import Producer

SEND_ROWS: Final = 5_000
"""After how many lines the count on the screen is written again."""
LINE_END_BYTES: Final = 2
JSON_BYTES_PER_BYTE: Final = 6
"""How many bytes of JSON a byte of a message becomes at most: a control character is written as \\u0001."""
JSON_BYTES_BESIDE: Final = 1 << 20
"""Room in a line of JSON for the names of its fields."""


def send(
    topic: TopicName,
    at: At,
    value: Annotated[
        str | None, typer.Argument(metavar="[VALUE]", help="The message; without it, standard input is read.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="The key of VALUE. Of lines: the field of each JSON object that is its key."),
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header; may be repeated.")
    ] = None,
    partition: Annotated[
        int | None, typer.Option("--partition", "-p", min=0, help="By default the hash of the key decides.")
    ] = None,
    timestamp: Annotated[
        str | None, typer.Option(metavar="TIME", help=f"Microseconds since 1970, or {FORMS}; by default now.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Each line is a JSON object as `pxrs tail --json` prints it.")
    ] = False,
    keep_partitions: Annotated[
        bool, typer.Option("--keep-partitions", help="With --json: send to the partition that each line names.")
    ] = False,
    registry: RegistryUrl = None,
) -> None:
    """Send VALUE, or each line of standard input, as a message; all are durable when the command ends.

    With --key, a field that is null means no key. A line that cannot be sent ends the command, once the lines
    before it are durable. Ctrl-C ends it too: it prints how many messages were sent, and the exit code is 130.

    With --json the key, value, headers and time of each message come from its line, so that `pxrs tail a --json | pxrs
    send b --json` copies messages exactly. The hash of the key decides about the partition, unless --keep-partitions or
    --partition is given.
    """
    given = {"VALUE": value, "--key": key, "--header": header, "--timestamp": timestamp}
    if as_json and (beside := [name for name, each in given.items() if each]):
        raise typer.BadParameter(f"with --json, each line says it: leave out {', '.join(beside)}")
    if keep_partitions and (not as_json or partition is not None):
        raise typer.BadParameter("--keep-partitions needs --json, and excludes --partition")
    plan = _Plan(key, _headers(header or []), _time(timestamp), partition, as_json, keep_partitions)
    if value is not None:
        _send_one(topic, at, registry, value, plan)
    else:
        _send_lines(topic, at, registry, plan)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the options say about each message."""

    key: str | None
    """The key of the one message, or the field of each line's JSON object that is its key."""
    headers: list[tuple[str, bytes | None]] | None
    timestamp: int | None
    partition: int | None
    is_json: bool
    keeps_partitions: bool

    def record(self, line: bytes) -> Record:
        """The message of a line. Raises InvalidRecord."""
        from pxrs.cli.message_json import Record, record_in

        if self.is_json:
            found = record_in(line)
            return found if self.keeps_partitions else found._replace(partition=self.partition)
        key = None if self.key is None else key_in(line, self.key)
        return Record(line, key, self.headers, self.timestamp, self.partition)

    @property
    def line_bytes_max(self) -> int:
        """How many bytes of a line are read: the largest message and its line end. The rest of a longer line is not
        read."""
        from pxrs.producer.tables import MESSAGE_BYTES_MAX

        if self.is_json:
            return JSON_BYTES_PER_BYTE * MESSAGE_BYTES_MAX + JSON_BYTES_BESIDE
        return MESSAGE_BYTES_MAX + LINE_END_BYTES


def _headers(pairs: list[str]) -> list[tuple[str, bytes | None]] | None:
    headers: list[tuple[str, bytes | None]] = []
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{pair!r}: write a name and a value, such as trace=7", param_hint="--header")
        headers.append((name, bytes_of(value)))
    return headers or None


def _time(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        number = int(text)
    except ValueError:
        number = None
    try:
        found = microseconds_of(moment(text)) if number is None else number
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--timestamp") from None
    if not -(1 << 63) <= found < 1 << 63:
        raise typer.BadParameter(f"{text} microseconds do not fit into 64 bits", param_hint="--timestamp")
    return found


def _check_partition(topic: Topic, partition: int | None) -> None:
    if partition is not None and partition >= topic.partitions:
        raise typer.BadParameter(
            f"{topic.name} has no partition {partition}; it has 0 to {topic.partitions - 1}", param_hint="--partition"
        )


def _send_one(topic: str, at: str, registry: str | None, value: str, plan: _Plan) -> None:
    import pxrs

    with pxrs.open(at, registry) as hub, hub.producer(topic, linger_s=0) as out:
        _check_partition(hub.topic(topic).topic, plan.partition)
        key = None if plan.key is None else bytes_of(plan.key)
        receipt = out.send(bytes_of(value), key, plan.headers, plan.timestamp, plan.partition)
        partition, offset = receipt.result()[:2]
    typer.echo(f"sent 1 message to {topic}: {partition}/{offset}")


def _send_lines(topic: str, at: str, registry: str | None, plan: _Plan) -> None:
    if sys.stdin is None:
        raise InvalidRecord("standard input is closed; give it the lines to send")
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    import pxrs

    err = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} sent"), TimeElapsedColumn())
    bar = Progress(*columns, console=err, disable=not err.is_terminal or is_typed())
    with pxrs.open(at, registry) as hub, hub.producer(topic) as out, bar:
        _check_partition(hub.topic(topic).topic, plan.partition)
        tell_typist(f"sent to {topic} as a message")
        task = bar.add_task("sending", total=None)
        lines = _Lines(out, plan, lambda count: bar.update(task, completed=count))
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

    def __init__(self, out: Producer, plan: _Plan, progress: Callable[[int], None]) -> None:
        self._out, self._plan, self._progress = out, plan, progress
        self.count = 0

    def send(self, interrupts: Interrupts) -> None:
        """Send all lines. Raises KeyboardInterrupt on Ctrl-C: then exactly the counted lines are in the producer."""
        stdin, bytes_max = sys.stdin.buffer, self._plan.line_bytes_max
        while line := interrupts.wait(lambda: stdin.readline(bytes_max)):
            try:
                value = line.removesuffix(b"\n").removesuffix(b"\r")
                if self._plan.is_json and len(line) == bytes_max and value is line:
                    raise InvalidRecord(f"longer than the {bytes_max:,} bytes that a message has in JSON at most")
                found = self._plan.record(value)
                self._out.send(**found._asdict())
            except InvalidRecord as error:
                self._out.flush()  # so that the error can say that the lines before it were sent
                before = f"{counted(self.count, 'line')} before it {'was' if self.count == 1 else 'were'} sent"
                raise InvalidRecord(f"line {self.count + 1:,}: {error}; {before}") from error
            self.count += 1
            if self.count % SEND_ROWS == 0:
                self._progress(self.count)
