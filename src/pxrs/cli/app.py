"""`pxrs`: all its commands."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import pxrs
from pxrs.cli import events, group, queue, registry, source, token, topic, upkeep, worker
from pxrs.cli.demo.command import demo
from pxrs.cli.ping import ping
from pxrs.cli.pipeline.command import app as pipelines
from pxrs.cli.serve import serve
from pxrs.cli.terminal import error_text, tell_error
from pxrs.errors import PxrsError

app = typer.Typer(
    name="pxrs",
    help="A partitioned message log with fenced consumer groups, on the coordination store you already have.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.add_typer(
    registry.app,
    name="registry",
    help="Look into a registry, print its DDL, and record which registry a hub belongs to.",
)
app.add_typer(topic.app, name="topic", help="Create, list, describe and delete topics.")
app.add_typer(source.app, name="source", help="Register tables of SQL databases, to be read as topics are.")
app.add_typer(group.app, name="group", help="Show consumer groups, reset them, delete them.")
app.add_typer(queue.app, name="queue", help="Create work queues, put items into them, take items from them, show them.")
app.add_typer(pipelines, name="pipeline", help="Run the Spark pipelines of a file.")
app.add_typer(
    upkeep.app, name="upkeep", help="Apply retention and remove what is no longer needed, or show which process does."
)
app.add_typer(token.app, name="token", help="Make, list and revoke the tokens of `pxrs serve --auth FILE`.")
app.command("send")(topic.send)
app.command("tail")(topic.tail)
app.command("check")(topic.check)
app.command("events")(events.events)
app.command("audit")(events.audit)
app.command("worker")(worker.worker)
app.command("serve")(serve)
app.command("ping")(ping)
app.command("demo")(demo)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"pxrs {pxrs.__version__}")
        raise typer.Exit


def main() -> None:
    """Run a command. An error of pxrs or of the operating system, such as a full disk behind standard output, is
    printed as one line on standard error; the exit code is 1."""
    # gRPC prints every failed connection on standard error by itself, beside the one line of the error.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        app()
    except (PxrsError, OSError) as error:
        tell_error(error_text(error), type(error).__name__)
        sys.exit(1)
