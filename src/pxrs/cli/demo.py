"""`pxrs demo`: the registry kernel at work, with real processes, a real kill and a real zombie.

Three workers share eight partitions: each holds a lease, claims what is free, and counts up on what it owns; every
count is a commit that expects the owner's version, which is the fence. One worker is killed, one is stopped past its
lease and woken again. At the end every acknowledged count must be there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from pxrs import registry
from pxrs.cli.demo_worker import COUNTS, OWNERS, PARTITIONS, TTL_S
from pxrs.registry import Registry

WORKERS = ("anna", "ben", "cleo")
WAIT_S = 60.0


class Worker:
    """A worker process, and what it has told."""

    def __init__(self, url: str, name: str) -> None:
        command = [sys.executable, "-c", "from pxrs.cli.demo_worker import main; main()", url, name]
        self.name = name
        self.state = "running"
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.acknowledged: Counter[int] = Counter()
        self.refused: str | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            what, _, detail = line.strip().partition(" ")
            if what == "counted":
                self.acknowledged[int(detail)] += 1
            elif what == "refused":
                self.refused = detail

    def signal(self, number: int, state: str) -> None:
        self.state = state
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self._reader.join(10)


def demo(
    url: Annotated[
        str | None, typer.Option("--registry", help="Any registry; by default a new temporary directory.")
    ] = None,
) -> None:
    """Show claims, a kill -9, a take-over and a zombie that is refused, with real processes."""
    console = Console()
    with _place(url) as where, registry.open(where) as handle:
        console.print(
            f"[bold]pxrs[/] registry demo on {escape(handle.url)}: {len(WORKERS)} processes, {PARTITIONS} partitions\n"
        )
        handle.commit(
            put={f"{OWNERS}{p}": b"" for p in range(PARTITIONS)} | {f"{COUNTS}{p}": b"0" for p in range(PARTITIONS)}
        )
        workers = [Worker(where, name) for name in WORKERS]
        try:
            with Live(console=console, refresh_per_second=10) as live:
                _story(handle, workers, live)
        finally:
            for worker in workers:
                worker.end()
        if not _account(handle, workers, console):
            raise typer.Exit(1)


def _story(handle: Registry, workers: list[Worker], live: Live) -> None:
    anna, _, cleo = workers
    everyone, survivors = {"anna", "ben", "cleo"}, {"ben", "cleo"}
    _until(handle, workers, live, lambda owners: set(owners) == everyone and None not in owners)
    _until(handle, workers, live, lambda owners: sum(sum(w.acknowledged.values()) for w in workers) > 300)
    began = time.monotonic()
    anna.signal(signal.SIGKILL, "killed -9")
    _until(handle, workers, live, lambda owners: set(owners) == survivors)
    live.console.print(
        f"  anna was [red]killed[/]; the others own her partitions after {time.monotonic() - began:.2f} s"
    )
    if handle.url.startswith("sqlite:"):
        live.console.print(
            "  no zombie here: SQLite has one writer, and one that is stopped in a commit stops the others"
        )
    else:
        _wake_a_zombie(handle, workers, live)
        cleo.state = "owns everything"
    total = sum(cleo.acknowledged.values())
    _until(handle, workers, live, lambda owners: sum(cleo.acknowledged.values()) > total + 50)


def _wake_a_zombie(handle: Registry, workers: list[Worker], live: Live) -> None:
    ben = workers[1]
    began = time.monotonic()
    ben.signal(signal.SIGSTOP, "stopped")
    _until(handle, workers, live, lambda owners: set(owners) == {"cleo"})
    live.console.print(
        f"  ben was [yellow]stopped[/], his lease of {TTL_S:g} s ran out; cleo took over after "
        f"{time.monotonic() - began:.2f} s"
    )
    ben.signal(signal.SIGCONT, "woken: a zombie")
    _until(handle, workers, live, lambda owners: ben.refused is not None)
    live.console.print(f"  ben woke up and tried to write: [green]refused[/] ({escape(str(ben.refused))})")


def _until(handle: Registry, workers: list[Worker], live: Live, condition: Callable[[list[str | None]], bool]) -> None:
    """Redraw until the condition on the owners holds."""
    until = time.monotonic() + WAIT_S
    while True:
        owners = [entry.value.decode().partition(" ")[0] or None for entry in handle.scan(OWNERS)]
        live.update(_picture(workers, owners))
        if condition(owners):
            return
        if time.monotonic() > until:
            raise TimeoutError("the demo did not get on; is the registry very slow?")
        time.sleep(0.02)


def _picture(workers: list[Worker], owners: list[str | None]) -> Table:
    table = Table(title="who owns what", header_style="bold")
    for column in ("worker", "state", "partitions", "acknowledged"):
        table.add_column(column, justify="right" if column == "acknowledged" else "left")
    for worker in workers:
        owned = " ".join(str(p) for p, owner in enumerate(owners) if owner == worker.name)
        table.add_row(worker.name, worker.state, owned, f"{sum(worker.acknowledged.values()):,}")
    return table


def _account(handle: Registry, workers: list[Worker], console: Console) -> bool:
    """Every acknowledged count is stored, and at most the one in hand of a killed worker besides."""
    acknowledged: Counter[int] = Counter()
    for worker in workers:
        acknowledged.update(worker.acknowledged)
    stored = {int(entry.key.removeprefix(COUNTS)): int(entry.value) for entry in handle.scan(COUNTS)}
    lost = sum(max(0, acknowledged[p] - stored[p]) for p in stored)
    unheard = sum(max(0, stored[p] - acknowledged[p]) for p in stored)
    console.print(
        f"\n[bold]account[/]: {sum(acknowledged.values()):,} acknowledged, lost {lost}, "
        f"stored but never acknowledged {unheard} (in hand when a worker was killed)"
    )
    return lost == 0 and unheard <= PARTITIONS


@contextmanager
def _place(url: str | None) -> Iterator[str]:
    """The registry to use, in a namespace of this run."""
    if url is None:
        with tempfile.TemporaryDirectory(prefix="pxrs-demo-") as directory:
            yield directory
    else:
        yield f"{url}{'&' if '?' in url else '?'}namespace=demo-{os.getpid()}-{int(time.time())}"
