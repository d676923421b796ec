"""Runs the demo: starts the cluster, prints what happens, draws the chart, and removes everything again."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pxrs import registry as registries
from pxrs.cli.cluster.demo.story import MEMBERS, PARTITIONS, Ending, Story, Stuck
from pxrs.cli.cluster.local import LocalCluster
from pxrs.cli.cluster.plan import Wish, planned
from pxrs.cli.cluster.process import ProcessFailed
from pxrs.cli.demo import chart
from pxrs.cli.demo.view import account_table
from pxrs.errors import MissingDependency, PxrsError
from pxrs.launching import free_ports

BROKERS: Final = 2
STORAGE: Final = 4
"""One more than a ledger needs: it takes the place of the one that is killed."""
LEASE_S: Final = 2.0
NODE_TIMEOUT_S: Final = 1.0
GRACE_S: Final = 3.0
"""After so many seconds the copies of the storage node that was killed are made anew."""


def show(picture: Path) -> int:
    """Run the demo. Returns the exit code: 1 if it did not finish, or if the account is not exact."""
    console = Console()
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"  {time.monotonic() - began:5.1f} s  {text}", highlight=False, soft_wrap=True)

    with tempfile.TemporaryDirectory(prefix="pxrs-cluster-demo-", ignore_cleanup_errors=True) as temporary:
        plan = planned(Wish(BROKERS, STORAGE), None, free_ports)
        options = {"lease-s": LEASE_S, "node-timeout-s": NODE_TIMEOUT_S, "copies-grace-s": GRACE_S}
        cluster = LocalCluster(Path(temporary), plan, None, options, {"alive_s": 1.0, "lease_s": LEASE_S})
        say(f"[bold]pxrs[/] cluster demo: starting {BROKERS} brokers, {STORAGE} storage nodes and etcd")
        try:
            cluster.start()
            say(f"the cluster is ready at {plan.address}")
            with registries.open(cluster.registry) as registry:
                story = Story(cluster, registry, say)
                ending = story.run()
        except (Stuck, ProcessFailed, PxrsError) as error:
            console.print(f"[red]{escape(str(error))}[/]", highlight=False, soft_wrap=True)
            return 1
        finally:
            for process in reversed(cluster.processes):  # nobody needs the data
                process.kill()
    _tell(console, ending)
    _draw(console, picture, story, ending)
    return 0 if ending.is_exact else 1


def _tell(console: Console, ending: Ending) -> None:
    console.print()
    console.print(account_table(ending.lines))
    table = Table("killed", header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("longest pause of a producer", "longest pause of a consumer"):
        table.add_column(column, justify="right")
    for kill in ending.kills:
        table.add_row(kill.name, f"{kill.produce.seconds:.2f} s", f"{kill.consume.seconds:.2f} s")
    console.print()
    console.print(table)
    console.print(
        f"[dim]a broker's partitions are taken over when its lease of {LEASE_S:g} s expires; messages handled again: "
        f"{ending.redone}[/]",
        highlight=False,
        soft_wrap=True,
    )
    verdict = "[bold green]exact[/]" if ending.is_exact else "[bold red]not exact[/]"
    console.print(f"the account is {verdict}", highlight=False)


def _draw(console: Console, path: Path, story: Story, ending: Ending) -> None:
    title = f"pxrs cluster: {ending.messages:,} messages, {PARTITIONS} partitions, {MEMBERS} consumers"
    pauses = ", ".join(f"{kill.name} {kill.produce.seconds:.2f} s" for kill in ending.kills)
    exact = "nothing lost, in order" if ending.is_exact else "the account is not exact"
    subtitle = f"{exact}; longest pause of a producer after the kill of {pauses}"
    try:
        chart.draw(path, title, subtitle, story.samples, story.marks)
    except MissingDependency as error:
        console.print(f"no chart: {escape(str(error))}", highlight=False, soft_wrap=True)
    except OSError as error:
        console.print(f"no chart: {path} cannot be written: {error.strerror}", highlight=False, soft_wrap=True)
    else:
        console.print(f"chart saved to {escape(str(path))}", highlight=False, soft_wrap=True)
