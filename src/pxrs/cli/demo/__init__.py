"""`pxrs demo`: the whole story. Producers, a topic, workers of which one is killed and one a zombie, a Spark pipeline
over the same topic, an exact account of it all, and a chart of the run."""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

import pxrs
from pxrs.cli.demo import chart
from pxrs.cli.demo.spark import groups_of, missing
from pxrs.cli.demo.story import PARTITIONS, WORKERS, Demo, Ending, Stuck
from pxrs.cli.demo.view import account_table
from pxrs.errors import MissingDependency
from pxrs.group.records import Keys
from pxrs.registry.address import parse


def demo(
    url: Annotated[
        str | None, typer.Option("--registry", help="Any registry; by default one of files, in a temporary directory.")
    ] = None,
    has_spark: Annotated[bool, typer.Option("--spark/--no-spark", help="With a Spark pipeline, or without.")] = True,
    messages: Annotated[
        int, typer.Option(min=150, max=2000, help="How many are sent; more if Spark starts slowly.")
    ] = 900,
    picture: Annotated[
        Path, typer.Option("--chart", metavar="PATH", help="Where the picture of the run is saved.")
    ] = Path("pxrs-demo.png"),
) -> None:
    """Show a consumer group, a kill -9, a take-over, a refused zombie and a Spark pipeline, with real processes.

    At the end there is an account of every message, and a chart of the run. Exit code: 1 if the account is not exact.
    """
    console = Console()
    if url is not None and parse(url).scheme == "memory":
        raise typer.BadParameter("memory: is one process's own; the workers are several", param_hint="--registry")
    if has_spark and (reason := missing()) is not None:
        _say(console, f"[yellow]without Spark[/]: {escape(reason)}")
        has_spark = False
    group = f"demo-{uuid.uuid4().hex[:6]}"
    with tempfile.TemporaryDirectory(prefix="pxrs-demo-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        with pxrs.open(folder / "data", registry=url) as hub:
            hub.registry.get("groups")  # its tables are made before the workers race to make them
            who = f"{len(WORKERS)} workers{' and Spark' if has_spark else ''}, {PARTITIONS} partitions"
            _say(console, f"[bold]pxrs[/] demo on {escape(hub.registry.url)}: {who}\n")
            try:
                story = Demo(hub, url or "", group, folder, console, messages, has_spark)
                ending = story.run()
            except Stuck as error:
                _say(console, f"[red]{escape(str(error))}[/]")
                raise typer.Exit(1) from None
            finally:
                _forget(hub, [group, *groups_of(group).values()])
    _tell(console, ending)
    _draw(console, picture, story, ending, has_spark)
    if not ending.is_exact:
        raise typer.Exit(1)


def _tell(console: Console, ending: Ending) -> None:
    console.print()
    console.print(account_table(ending.lines))
    when = "when a worker was killed or stopped" if ending.has_zombie else "when a worker was killed"
    _say(console, f"[dim]handled again: {ending.redone}, in hand and not yet written down {when}[/]")
    if ending.dead_letters:
        why = ", ".join(f"{escape(reason)} ({count})" for reason, count in ending.dead_letters.items())
        _say(console, f"[dim]dead letters: {why}[/]")
    verdict = "[bold green]exact[/]" if ending.is_exact else "[bold red]not exact[/]"
    _say(console, f"the account is {verdict}")


def _draw(console: Console, path: Path, story: Demo, ending: Ending, has_spark: bool) -> None:
    who = f"{len(WORKERS)} workers{' and a Spark pipeline' if has_spark else ''}"
    title = f"pxrs demo: {ending.messages:,} messages, {PARTITIONS} partitions, {who}"
    subtitle = "the account is not exact"
    if ending.is_exact:
        totals = "; Spark's totals right to the cent" if has_spark else ""
        subtitle = f"nothing lost, in order, nothing done twice beyond the last checkpoint{totals}"
    try:
        chart.draw(path, title, subtitle, story.samples, story.marks)
    except MissingDependency as error:
        _say(console, f"no chart: {escape(str(error))}")
    except OSError as error:
        _say(console, f"no chart: {path} cannot be written: {error.strerror}")
    else:
        _say(console, f"a chart of the run: {escape(str(path))}")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


def _forget(hub: pxrs.Hub, groups: list[str]) -> None:
    """Leave nothing in somebody's registry. No name or id of this is ever used again, so no guard is needed (R4)."""
    prefixes = [Keys(group).root for group in groups] + [f"spark/{topic.id}/" for topic in hub.topics()]
    keys = [entry.key for prefix in prefixes for entry in hub.registry.scan(prefix)]
    size = hub.registry.limits.commit_keys_max
    for at in range(0, len(keys), size):
        hub.registry.commit(delete=keys[at : at + size])
