"""`pxrs`: all its commands."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
from typing import Annotated, Final

import typer

from pxrs.cli.lazy import Lazy, LazyGroup
from pxrs.cli.logs import VARIABLE, chosen, kept, set_up
from pxrs.errors import PxrsError

_logger = logging.getLogger("pxrs.cli")

COMMANDS: Final = {
    "send": Lazy("pxrs.cli.send", "send", "Send messages: one VALUE, or the lines of standard input."),
    "tail": Lazy("pxrs.cli.tail", "tail", "Print messages of a topic, and with -f each new one as it arrives."),
    "top": Lazy("pxrs.cli.top", "top", "Show a hub live: rates, lag, owners, what needs attention first."),
    "topic": Lazy("pxrs.cli.topic", "app", "Create, list, describe, change, copy and delete topics."),
    "group": Lazy("pxrs.cli.group", "app", "Show consumer groups, reset them, delete them."),
    "queue": Lazy("pxrs.cli.queue", "app", "Create work queues, put items into them, take items from them, show them."),
    "source": Lazy("pxrs.cli.source", "app", "Register tables of SQL databases, to be read as topics are."),
    "worker": Lazy("pxrs.cli.worker", "worker", "Handle messages or items of a queue, in several processes."),
    "pipeline": Lazy("pxrs.cli.pipeline.command", "app", "Run the Spark pipelines of a file."),
    "serve": Lazy("pxrs.cli.serve", "serve", "Serve a hub to other processes and hosts."),
    "broker": Lazy("pxrs.cli.broker", "broker", "Run a broker of a replicated cluster."),
    "storage": Lazy("pxrs.cli.storage", "storage", "Run a storage node of a replicated cluster."),
    "cluster": Lazy(
        "pxrs.cli.cluster.command", "app", "Run a cluster on this machine, show one, take storage nodes out of one."
    ),
    "token": Lazy("pxrs.cli.token", "app", "Make, list and revoke the tokens of `pxrs serve --auth FILE`."),
    "ping": Lazy("pxrs.cli.ping", "ping", "Measure round trips to a server, and show its version."),
    "upkeep": Lazy(
        "pxrs.cli.upkeep",
        "app",
        "Apply retention and remove what is no longer needed, or show which process does.",
    ),
    "metrics": Lazy("pxrs.cli.metrics", "metrics", "Export the lag of all groups and the sizes of topics and queues."),
    "events": Lazy("pxrs.cli.events", "events", "Show what happened to a hub: joins, hand-overs, fences, pauses."),
    "audit": Lazy("pxrs.cli.events", "audit", "Show what administrators did to a hub, with who and when."),
    "web": Lazy("pxrs.cli.web", "web", "Show a hub in a browser: topics, groups, queues, streaming queries."),
    "backup": Lazy("pxrs.cli.backup", "backup", "Copy a hub that is in use, consistently."),
    "restore": Lazy("pxrs.cli.backup", "restore", "Make a hub of a backup, in an empty place."),
    "check": Lazy("pxrs.cli.check", "check", "Read every byte of a log, report all damage, and with --repair mend it."),
    "registry": Lazy(
        "pxrs.cli.registry", "app", "Look into a registry, print its DDL, and record which registry a hub belongs to."
    ),
    "demo": Lazy("pxrs.cli.demo.command", "demo", "Show all of it with real processes: a kill -9, a take-over, Spark."),
}
"""What `pxrs --help` lists, in this order."""


class _Commands(LazyGroup):
    table = COMMANDS


app = typer.Typer(
    cls=_Commands,
    name="pxrs",
    help="A partitioned message log with fenced consumer groups, on the coordination store you already have.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    log_format: Annotated[
        str | None,
        typer.Option(
            "--log-format",
            envvar=VARIABLE,
            metavar="FORMAT",
            help="Print the log on standard error, as `text` or as `json`, one object a line.",
        ),
    ] = None,
) -> None:
    set_up(log_format)
    if version:
        import pxrs

        typer.echo(f"pxrs {pxrs.__version__}")
        raise typer.Exit


def main() -> None:
    """The program `pxrs`: run the command that its arguments name."""
    # When the interpreter ends, it searches all objects for unreachable cycles, several times. That is a fifth of the
    # time of a short command, and frees memory that the kernel takes back anyway.
    atexit.register(gc.freeze)
    run()


def run() -> None:
    """Run a command in a process that goes on after it. An error of pxrs or of the operating system, such as a full
    disk behind standard output, is printed as one line on standard error; the exit code is 2 if an option or argument
    is refused, and otherwise 1. Raises SystemExit."""
    # gRPC prints every failed connection on standard error by itself, beside the one line of the error.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    with kept():
        try:
            app(prog_name="pxrs")  # also for `python -m pxrs.cli`: shells ask for completions by this name
        except (PxrsError, OSError) as error:
            from pxrs.cli.exits import EXIT_FAILED, EXIT_USAGE
            from pxrs.cli.restarts import is_wrong_argument
            from pxrs.cli.terminal import error_text, tell_error

            code = EXIT_USAGE if is_wrong_argument(error) else EXIT_FAILED
            if chosen() == "json":
                _logger.error("%s", error_text(error), extra={"error_type": type(error).__name__})
            else:
                tell_error(error_text(error), type(error).__name__)
            sys.exit(code)
