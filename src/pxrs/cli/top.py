"""`pxrs top`: a live view of a hub, what needs attention first."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from pxrs.cli.amounts import duration
from pxrs.cli.options import MaybeAt, RegistryUrl, open_hub, place_of
from pxrs.cli.terminal import cell, console, error_text, is_terminal, seconds_field, show
from pxrs.errors import PxrsError
from pxrs.wording import printable, time_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from pxrs.cli.looking import GroupLook, Look, QueueLook, TopicLook

INTERVAL_S: Final = 2.0
ATTENTION_ROWS: Final = 8
"""How many lines of what needs attention a screen has at most."""
FIXED_ROWS: Final = 8
"""The lines of a screen that are no rows of a table: the head, blank lines, the names of columns."""
OWNERS_SHOWN: Final = 3


def top(
    at: MaybeAt = None,
    registry: RegistryUrl = None,
    interval: Annotated[
        float,
        typer.Option(
            "--interval", "-i", metavar="DURATION", parser=duration(0.2, 3600), help="The time between two looks."
        ),
    ] = INTERVAL_S,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end. There are no rates then.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each look.")] = False,
) -> None:
    """Show topics, groups and queues with their rates, lag and owners, what needs attention first; until q or Ctrl-C.

    A look reads the ends of each topic, the keys of each group once, and at most 500 items of each state of a queue: a
    count such as 500+ is a lower bound. Elsewhere than on a terminal it looks once, unless --json is given.
    """
    from pxrs.cli.looking import Looker

    with open_hub(at, registry) as hub:
        looker = Looker(hub, has_log=at is not None, place=place_of(at, registry))
        if as_json:
            while True:
                typer.echo(json.dumps(plain(looker.look())))
                if once:
                    return
                time.sleep(interval)
        if once or not is_terminal():
            show(*picture(hub.url, looker.look(), None))
            return
        _live(hub.url, looker.look, interval)


def _live(url: str, look: Callable[[], Look], interval: float) -> None:
    from rich.console import Group
    from rich.live import Live

    screen, shown = console(), Group()
    with _keys() as key, Live(shown, console=screen, screen=True, auto_refresh=False) as live:
        while True:
            try:
                parts = picture(url, look(), screen.height)
            except PxrsError as error:  # an outage: what was seen last stays on the screen below it
                parts = [cell(f"{error_text(error)} ({type(error).__name__})"), shown]
            else:
                shown = Group(*parts)
            live.update(Group(*parts), refresh=True)
            if key(interval) in ("q", "Q"):
                return


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits up to some seconds for a key, and returns it, or an empty text. Within the block keys are
    read one by one and not shown. Without a terminal to read from, it only waits."""
    if sys.stdin is None or not sys.stdin.isatty():

        def sleep(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield sleep
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def wait(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, 1).decode(errors="replace") if ready else ""

    try:
        tty.setcbreak(descriptor)
        yield wait
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def plain(look: Look) -> dict[str, Any]:
    """The look as JSON."""
    return {
        **seconds_field("time", look.time),
        "attention": [each._asdict() for each in look.attention],
        "topics": [asdict(each) for each in look.topics],
        "groups": [asdict(each) for each in look.groups],
        "queues": [{**asdict(each), "is_exact": each.is_exact} for each in look.queues],
    }


def picture(url: str, look: Look, height: int | None) -> list[RenderableType]:
    """The look as lines and tables. height: how many lines the screen has; None for as many as are needed."""
    from rich.text import Text

    noticed = {(each.kind, each.name) for each in look.attention}
    groups = sorted(look.groups, key=lambda each: (("group", each.group) not in noticed, -(each.lag or 0), each.group))
    topics = sorted(look.topics, key=lambda each: (("topic", each.topic) not in noticed, -(each.rate or 0), each.topic))
    queues = sorted(look.queues, key=lambda each: (-each.dead, -each.ready, each.queue))
    calls = _calls(look, None if height is None else ATTENTION_ROWS)
    counts = [len(groups), len(topics), len(queues)]
    rooms = _rooms(counts, None if height is None else height - FIXED_ROWS - len(calls))
    tables = (
        _group_table(groups[: rooms[0]], counts[0]),
        _topic_table(topics[: rooms[1]], counts[1]),
        _queue_table(queues[: rooms[2]], counts[2]),
    )
    parts: list[RenderableType] = [_head(url, look, is_live=height is not None), *calls]
    for table, count in zip(tables, counts, strict=True):
        if count:
            parts += [Text(), table]
    return parts


def _head(url: str, look: Look, *, is_live: bool) -> Text:
    from rich.text import Text

    rate, lag = sum(topic.rate or 0 for topic in look.topics), sum(group.lag or 0 for group in look.groups)
    head = Text.assemble(("pxrs top", "bold"), f"  {printable(url)}  {time_text(look.time)}  ")
    head.append(f"in {rate:,.0f}/s  lag {lag:,}", "bold")
    return head.append("  q ends", "dim") if is_live else head


def _calls(look: Look, rows: int | None) -> list[Text]:
    """What needs attention, a line for each. rows: how many lines there may be, none of them wrapped; None: all."""
    from rich.text import Text

    calls = [
        Text.assemble(
            (f"{each.kind} {printable(each.name)}", "bold red" if each.is_urgent else "bold yellow"),
            f": {printable(each.text)}",
            no_wrap=rows is not None,
            overflow="ellipsis",
        )
        for each in look.attention
    ]
    if rows is None or len(calls) <= rows:
        return calls
    more = len(calls) - rows + 1
    return [*calls[: rows - 1], Text(f"and {more:,} more: see `pxrs top --once`", "dim")]


def _rooms(wanted: list[int], height: int | None) -> list[int]:
    """How many rows each table gets. What one does not need, the others share."""
    if height is None:
        return wanted
    rooms, left = [0] * len(wanted), max(height, len(wanted))
    while left > 0 and rooms != wanted:
        for at, count in enumerate(wanted):
            if rooms[at] < count and left > 0:
                rooms[at] += 1
                left -= 1
    return rooms


def _table(name: str, shown: int, count: int, columns: tuple[str, ...]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(name if shown == count else f"{name} ({shown:,} of {count:,})", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _group_table(groups: list[GroupLook], count: int) -> Table:
    from pxrs.group.description import lag_text

    table = _table("group", len(groups), count, ("lag", "done/s", "members", "partitions", "paused"))
    table.add_column("owners", no_wrap=True)
    for each in groups:
        numbers = (lag_text(each.lag, each.is_lag_exact), _rate(each.rate), f"{each.members:,}", f"{each.partitions:,}")
        table.add_row(cell(each.group), *numbers, f"{each.paused:,}", cell(_owners(each)))
    return table


def _owners(group: GroupLook) -> str:
    names = [f"{name} {count:,}" for name, count in group.owners.items()]
    names = [*names[:OWNERS_SHOWN], *([f"and {len(names) - OWNERS_SHOWN:,} more"] if len(names) > OWNERS_SHOWN else [])]
    return ", ".join([*names, *([f"none {group.unowned:,}"] if group.unowned else [])])


def _topic_table(topics: list[TopicLook], count: int) -> Table:
    table = _table("topic", len(topics), count, ("in/s", "messages", "partitions"))
    for each in topics:
        numbers = ("-" if number is None else f"{number:,}" for number in (each.messages, each.partitions))
        table.add_row(cell(each.topic), _rate(each.rate), *numbers)
    return table


def _queue_table(queues: list[QueueLook], count: int) -> Table:
    from pxrs.cli.looking import QUEUE_PAGE

    table = _table("queue", len(queues), count, ("ready", "in flight", "delayed", "dead"))
    for each in queues:
        counts = (each.ready, each.in_flight, each.delayed, each.dead)
        table.add_row(cell(each.queue), *(f"{number:,}{'+' if number >= QUEUE_PAGE else ''}" for number in counts))
    return table


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}" if rate >= 10 or rate == 0 else f"{rate:.1f}"
