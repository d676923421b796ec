"""Runs the parts of a benchmark, and prints what they compare as a table."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.log.workload import Row

Part = Callable[[Path], Iterator[Row]]
"""Is given an empty folder."""


def rate(per_s: float | None) -> str:
    """A speed; without one, what the heading of its column says."""
    return "/s" if per_s is None else f"{per_s:,.0f}"


def print_rows(
    console: Console,
    title: str,
    parts: Mapping[str, Part],
    chosen: Iterable[str],
    show: Callable[[float | None], str] = rate,
    folder: Path | None = None,
) -> None:
    """Run the chosen parts, each in a folder of its own below `folder`, and print one table of all their rows.

    show: how a figure is written."""
    wanted = {*chosen} & {*parts}
    if not wanted:
        return
    table = Table("what", "reference", title=title, header_style="bold")
    for column in ("ours" + show(None), "reference" + show(None), "ratio", "wanted"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, measure in parts.items():
        if name in wanted:
            with console.status(f"measuring {name}"), tempfile.TemporaryDirectory(dir=folder) as place:
                for row in measure(Path(place)):
                    ours, reference = show(row.figure.ours_per_s), show(row.figure.reference_per_s)
                    table.add_row(row.what, row.reference, ours, reference, f"{row.figure.ratio:.2f}x", row.wanted)
    console.print(table)
