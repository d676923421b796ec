"""`pxrs cluster demo`. `--help` loads this module; the others of the demo are loaded when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    picture: Annotated[
        Path, typer.Option("--chart", metavar="PATH", help="Where to save the chart of the run.")
    ] = Path("pxrs-cluster-demo.png"),
) -> None:
    """Kill a broker and a storage node of a running cluster, and count every message.

    Two brokers, four storage nodes and an etcd are started as real processes on this machine, and removed at the end.
    It takes less than a minute. Exit code 1 if a message was lost, duplicated or out of order.
    """
    from pxrs.cli.cluster.demo.show import show

    if code := show(picture):
        raise typer.Exit(code)
