"""What the demo shows while it runs, and the account at its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from pxrs.cli.demo.account import Line
from pxrs.cli.demo.crew import Worker
from pxrs.group.description import PartitionDescription

WIDE = 104
"""From this number of columns on, the tables are side by side."""


def picture(
    workers: Sequence[Worker],
    rows: Sequence[PartitionDescription],
    spark: Table | None,
    waiting: str,
    width: int,
) -> RenderableType:
    """waiting: what the demo waits for, and for how long so far."""
    left: list[RenderableType] = [_workers(workers, rows)]
    if spark is not None:
        left += ["", spark]
    last = f"[dim]{escape(waiting)}[/]"
    if width < WIDE:
        return Group("", *left, "", _partitions(rows), "", last)
    both = Table.grid(padding=(0, 4))
    both.add_row(Group(*left), _partitions(rows))
    return Group("", both, "", last)


def spark_table(state: str, read: Mapping[str, int], sent: int) -> Table:
    table = _table(("Spark", "state"), ("read", "lag"))
    for name, count in read.items():
        table.add_row(name, state, f"{count:,}", f"{sent - count:,}")
    return table


def account_table(lines: Iterable[Line]) -> Table:
    table = Table("account", header_style="bold", title_justify="left")
    for column in ("expected", "found"):
        table.add_column(column, justify="right")
    for line in lines:
        found = escape(line.found)
        table.add_row(line.what, line.expected, f"[green]{found}[/]" if line.is_right else f"[bold red]{found}[/]")
    return table


def _workers(workers: Sequence[Worker], rows: Sequence[PartitionDescription]) -> Table:
    table = _table(("worker", "state", "partitions"), ("handled",))
    for worker in workers:
        owned = " ".join(str(row.partition) for row in rows if row.owner_name == worker.name)
        table.add_row(worker.name, worker.state, owned, f"{worker.handled:,}")
    return table


def _partitions(rows: Sequence[PartitionDescription]) -> Table:
    table = _table(("partition", "owner"), ("epoch", "checkpoint", "end", "lag"))
    for row in rows:
        numbers = (row.checkpoint, row.end, row.lag)
        owner = row.owner_name or "" if row.is_owner_there else f"[red]{escape(row.owner_name or '')}[/]"
        table.add_row(str(row.partition), owner, str(row.epoch), *("" if n is None else f"{n:,}" for n in numbers))
    return table


def _table(words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in words:
        table.add_column(column)
    for column in numbers:
        table.add_column(column, justify="right")
    return table
