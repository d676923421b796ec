"""Prints the progress of running queries: a line for each batch, JSON for machines, or on a terminal a table that is
updated in place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.live import Live
from rich.table import Table
from rich.text import Text

from pxrs.cli.terminal import console, echo, is_terminal, time_field
from pxrs.clock import wall_time_us
from pxrs.spark.progress import BatchReport
from pxrs.spark.run import QueryRun, Run
from pxrs.wording import counted, printable


@contextmanager
def shown(running: Run, as_json: bool) -> Iterator[Lines | Screen]:
    if as_json or not is_terminal():
        yield Lines(running, as_json)
        return
    with Live(console=console(), auto_refresh=False) as live:
        yield Screen(running, live)


class Lines:
    """Prints a line for each batch: text, or JSON."""

    def __init__(self, running: Run, as_json: bool) -> None:
        self._running, self._as_json = running, as_json
        self._over: set[str] = set()
        for each in running.queries:
            fields = {"source": each.source, "sink": str(each.sink), "group": each.group}
            text = f"{each.name}: {each.source} to {each.sink}, in the group {each.group}"
            self.tell("started", text, pipeline=each.name, **fields)

    def update(self) -> None:
        for each in self._running.queries:
            for batch in each.batches:
                self.tell("batch", f"{each.name}: {_words(batch, each)}", **_plain(batch, each))
            if each.is_over and each.name not in self._over:
                self._over.add(each.name)
                what = f"failed: {each.error}" if each.error else f"ended after {counted(each.rows_done, 'row')}"
                fields = {"pipeline": each.name, "rows": each.rows_done, "lag": each.lag, "error": each.error}
                self.tell(each.state, f"{each.name}: {what}, lag {_number(each.lag)}", **fields)

    def tell(self, event: str, text: str, **fields: Any) -> None:
        tell_event(self._as_json, event, text, **fields)


def tell_event(as_json: bool, event: str, text: str, **fields: Any) -> None:
    """Print an event on standard output: as JSON its name, time and fields, else the text."""
    plain = {"event": event, **time_field("time", wall_time_us()), **fields}
    echo(json.dumps(plain) if as_json else printable(text))


class Screen:
    """Shows a table on the terminal that is updated in place."""

    def __init__(self, running: Run, live: Live) -> None:
        self._running, self._live = running, live

    def update(self) -> None:
        table = Table("pipeline", "source", "sink", "state", box=None, header_style="bold")
        for column in ("batch", "took", "rows/s", "rows", "lag", "state rows"):
            table.add_column(column, justify="right")
        for each in self._running.queries:
            last = each.last
            numbers = ("-", "-", "-") if last is None else _numbers(last)
            table.add_row(
                Text(each.name),
                Text(printable(each.source)),
                Text(printable(str(each.sink))),
                Text(each.state, style="red" if each.state == "failed" else ""),
                *numbers,
                f"{each.rows_done:,}",
                _number(each.lag),
                _number(None if last is None else last.state_rows),
            )
        self._live.update(table, refresh=True)

    def tell(self, event: str, text: str) -> None:
        self._live.console.print(Text(printable(text)))


def _numbers(batch: BatchReport) -> tuple[str, str, str]:
    speed = f"{batch.rows_per_s:,.{0 if batch.rows_per_s >= 10 else 1}f}"
    return f"{batch.number:,}", f"{batch.duration_ms / 1000:.1f} s", speed


def _words(batch: BatchReport, each: QueryRun) -> str:
    number, took, speed = _numbers(batch)
    state = f", {counted(batch.state_rows, 'row')} of state" if batch.state_rows else ""
    lag = _number(_lag(batch, each))
    return f"batch {number}, {counted(batch.rows, 'row')} in {took} ({speed} rows/s), lag {lag}{state}"


def _plain(batch: BatchReport, each: QueryRun) -> dict[str, Any]:
    fields = asdict(batch)
    fields.pop("phases_ms")
    return {"pipeline": each.name, "batch": fields.pop("number"), **fields, "lag": _lag(batch, each)}


def _lag(batch: BatchReport, each: QueryRun) -> int | None:
    """The lag when the batch was finished, as Spark reports it; if that is not known, the group's present lag."""
    return each.lag if batch.lag is None else batch.lag


def _number(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"
