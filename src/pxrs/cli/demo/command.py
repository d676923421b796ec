"""`pxrs demo`: producers, a topic, workers of which one is killed and one is stopped past its lease, a Spark pipeline
over the same topic, an account of every message, and a chart of the run.

`pxrs demo --help` loads this module; the other modules of the demo are loaded when the demo runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pxrs.registry.address import parse


def demo(
    url: Annotated[
        str | None, typer.Option("--registry", help="The registry; by default files in a temporary directory.")
    ] = None,
    has_spark: Annotated[bool, typer.Option("--spark/--no-spark", help="Whether to run a Spark pipeline.")] = True,
    messages: Annotated[
        int, typer.Option(min=150, max=2000, help="How many messages to send; more if Spark starts slowly.")
    ] = 900,
    picture: Annotated[
        Path, typer.Option("--chart", metavar="PATH", help="Where to save the chart of the run.")
    ] = Path("pxrs-demo.png"),
) -> None:
    """Show a consumer group, a kill -9, a take-over, a refused late commit and a Spark pipeline, with real processes.

    At the end an account of every message is printed, and a chart of the run is saved. It takes about a minute. On a
    busy machine it prints what it waits for, and gives up after ten minutes. Exit code 1 if the account is not exact,
    or if the run did not finish.
    """
    if url is not None and parse(url).scheme == "memory":
        raise typer.BadParameter(
            "memory: exists in one process only, and the workers are several processes", param_hint="--registry"
        )
    from pxrs.cli.demo.show import show

    if code := show(url, has_spark, messages, picture):
        raise typer.Exit(code)
