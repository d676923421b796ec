"""Runs the demo: sets it up, prints its progress, draws the chart, and removes everything again."""

from __future__ import annotations

import tempfile
import uuid
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape

import pxrs
from pxrs.cli.demo import chart
from pxrs.cli.demo.spark import groups_of, missing
from pxrs.cli.demo.story import PARTITIONS, RUN_S_MAX, WORKERS, Demo, Ending, Stuck
from pxrs.cli.demo.view import account_table
from pxrs.errors import MissingDependency
from pxrs.group.records import Keys

DISK_MB: Final = 20
"""More than the temporary files of a run take: 6 MB were measured with Spark."""


def show(url: str | None, has_spark: bool, messages: int, picture: Path) -> int:
    """Run the demo. Returns the exit code: 1 if the demo did not finish, or if the account is not exact."""
    console = Console()
    if has_spark and (reason := missing()) is not None:
        _say(console, f"[yellow]running without Spark[/]: {escape(reason)}")
        has_spark = False
    group = f"demo-{uuid.uuid4().hex[:6]}"
    with tempfile.TemporaryDirectory(prefix="pxrs-demo-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        _announce(console, url, has_spark, folder, picture)
        with pxrs.open(folder / "data", registry=url) as hub:
            hub.registry.get("groups")  # makes the tables of the registry before several workers try to
            removed = "" if url is None else "; the groups of the demo are removed from it at the end"
            _say(console, f"[dim]The registry is {escape(hub.registry.url)}{removed}.[/]\n")
            try:
                story = Demo(hub, url or "", group, folder, console, messages, has_spark)
                ending = story.run()
            except Stuck as error:
                _say(console, f"[red]{escape(str(error))}[/]")
                return 1
            finally:
                _forget(hub, [group, *groups_of(group).values()])
    _tell(console, ending)
    _draw(console, picture, story, ending, has_spark)
    return 0 if ending.is_exact else 1


def _announce(console: Console, url: str | None, has_spark: bool, folder: Path, picture: Path) -> None:
    """Say what is going to happen, how long it takes, and where files are written."""
    who = f"{len(WORKERS)} workers{' and Spark' if has_spark else ''}, {PARTITIONS} partitions"
    is_sqlite = url is not None and url.startswith("sqlite:")
    zombie = "" if is_sqlite else "; another is paused past its lease, and its late commit is refused"
    _say(console, f"[bold]pxrs[/] demo: {who}")
    _say(console, f"One worker is killed with kill -9{zombie}. At the end every message is counted.")
    _say(console, f"[dim]It takes about a minute, at most {RUN_S_MAX / 60:g} on a busy machine.[/]")
    where = escape(str(folder)) + (", and beside it those of Spark" if has_spark else "")
    _say(console, f"[dim]Its files, less than {DISK_MB} MB, are in {where}; they are removed at the end.[/]")
    if find_spec("matplotlib") is not None:
        _say(console, f"[dim]The chart of the run will be saved as {escape(str(picture.absolute()))}.[/]")


def _tell(console: Console, ending: Ending) -> None:
    console.print()
    console.print(account_table(ending.lines))
    when = "when a worker was killed or stopped" if ending.has_zombie else "when a worker was killed"
    _say(console, f"[dim]messages handled again: {ending.redone} (in hand without a checkpoint {when})[/]")
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
        totals = "; Spark's totals exact to the cent" if has_spark else ""
        subtitle = f"nothing lost, in order, no duplicates covered by a checkpoint{totals}"
    try:
        chart.draw(path, title, subtitle, story.samples, story.marks, story.spans)
    except MissingDependency as error:
        _say(console, f"no chart: {escape(str(error))}")
    except OSError as error:
        _say(console, f"no chart: {path} cannot be written: {error.strerror}")
    else:
        _say(console, f"chart saved to {escape(str(path))}")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


def _forget(hub: pxrs.Hub, groups: list[str]) -> None:
    """Remove everything from the user's registry. No name or id of the demo is used again, so no guard must stay
    (R4)."""
    prefixes = [Keys(group).root for group in groups] + [f"spark/{topic.id}/" for topic in hub.topics()]
    keys = [entry.key for prefix in prefixes for entry in hub.registry.scan(prefix)]
    size = hub.registry.limits.commit_keys_max
    for at in range(0, len(keys), size):
        hub.registry.commit(delete=keys[at : at + size])
