"""The command `pxrs pipeline run`: its options. `running.py` has what it does with them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Final

import typer

import pxrs
from pxrs.cli.amounts import duration
from pxrs.cli.exits import exit_codes
from pxrs.cli.monitoring import MetricsListen, refuse_metrics
from pxrs.cli.options import RegistryWait
from pxrs.cli.terminal import echo, error_text, is_terminal, tell_error
from pxrs.errors import Closed, InvalidPipeline, PipelineFailed, TopicExists
from pxrs.registry.address import parse
from pxrs.registry.outage import START_WAIT_S, StartWait

app = typer.Typer(no_args_is_help=True)
EXIT_BAD_FILE: Final = 2


@app.callback()
def _pipelines() -> None:
    """Makes `run` a subcommand: with one command and no callback, Typer would run it as `pxrs pipeline FILE`."""


# Over the limit: the parameters are the options of the command, one by one, and the help is made of them.
@app.command()
@exit_codes()
def run(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A Python file with functions under @pipeline.")],
    at: Annotated[str, typer.Option("--at", envvar="PXRS_AT", metavar="URL", help="The directory that holds the log.")],
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Only these of its pipelines.")] = None,
    registry: Annotated[
        str | None,
        typer.Option(
            "--registry", envvar="PXRS_REGISTRY", metavar="URL", help="The registry, if it is not in the directory."
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Read what is there now, and end.")] = False,
    history: Annotated[
        bool, typer.Option("--history", help="Run as a batch over all that the sources hold; no group changes.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="With --history: append to the sinks, instead of printing.")
    ] = False,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="With --history: 2026-01-31T12:00+00:00.")] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="With --history: up to this time.")] = None,
    last: Annotated[int, typer.Option("-n", "--rows", min=1, help="With --history: how many rows are printed.")] = 20,
    master: Annotated[str | None, typer.Option(help="Spark's master; by default local[*].", show_default=False)] = None,
    conf: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="A setting of Spark.")] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where Spark keeps its checkpoints; by default in the directory."),
    ] = None,
    create_topics: Annotated[bool, typer.Option("--create-topics", help="Create the topics that are missing.")] = False,
    grace: Annotated[
        float,
        typer.Option(
            metavar="DURATION", parser=duration(0), help="How long the current batch may take to finish, when stopped."
        ),
    ] = 60.0,
    metrics_listen: MetricsListen = None,
    registry_wait: RegistryWait = START_WAIT_S,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print what Spark logs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Events as JSON, one object a line.")] = False,
) -> None:
    """Run the pipelines of a file, until SIGTERM or Ctrl-C; a second one does not wait.

    They finish the current batch, and the next run goes on where they were. Exit code: 0 after a graceful end, 1 if a
    pipeline failed, 2 if a pipeline is not valid, 3 if another start cannot help.
    """
    from pxrs.cli.pipeline.file import load
    from pxrs.cli.pipeline.health import Health
    from pxrs.cli.pipeline.history import run_history
    from pxrs.cli.pipeline.running import chosen, follow, hub_directory, spark_session
    from pxrs.cli.pipeline.signals import Signals
    from pxrs.spark.place import is_server
    from pxrs.spark.run import Run, check_sources, check_topics, missing_topics
    from pxrs.spark.sinks import HubAddress

    if not history and (write or since or until):
        raise typer.BadParameter("--write, --since and --until go with --history")
    if history and once:
        raise typer.BadParameter("--history ends by itself; --once is for streams")
    if history:
        refuse_metrics(context, "--history ends by itself; --metrics-listen is for streams")
        metrics_listen = None
    address = HubAddress(hub_directory(at, create_topics), registry)
    if registry is not None and parse(registry).scheme == "memory":
        raise typer.BadParameter("memory: exists in one process only, and Spark has several")
    if checkpoints is None and is_server(address.url):
        raise typer.BadParameter("the hub is behind a server: say where Spark keeps its checkpoints, --checkpoints DIR")
    folder = (checkpoints or Path(address.url, "pipelines")).absolute()
    wait = StartWait(registry_wait, "the hub's registry or server")
    health = Health(as_json, wait)

    def check(hub: pxrs.Hub) -> None:
        """Before Spark starts, which takes seconds; each query would check it again. May be called again."""
        check_sources(hub, pipelines)
        if create_topics:
            for topic in missing_topics(hub, pipelines):
                # A topic that another process has created since is used as it is, whatever its settings are.
                with suppress(TopicExists):
                    hub.create_topic(topic)
        check_topics(hub, pipelines)
        if not history:
            hub.check_registry()

    try:
        pipelines = chosen(load(file), names or [])
        with ExitStack() as stack:
            hubs = stack.enter_context(ExitStack())
            signals = None if history else stack.enter_context(Signals(wait.stop))
            stack.enter_context(health.answered(metrics_listen))
            try:
                hub = wait(lambda: hubs.enter_context(pxrs.open(address.url, registry)))
                wait(lambda: check(hub))
            except Closed:
                if signals is None or not signals.received:
                    raise
                return
            health.begin()
            if is_terminal() and not as_json:
                echo("starting Spark, which takes some seconds")
            with spark_session(file, master, _settings(conf or []), None if verbose else folder) as spark:
                if signals is None:
                    run_history(spark, pipelines, address, _times(since, until), last, write, as_json)
                    return
                signals.listen()  # Spark has installed a handler of its own for Ctrl-C
                running = Run(spark, hub, pipelines, address, folder, once)
                if not signals.received:
                    follow(running, signals, grace, as_json, health)
    except InvalidPipeline as error:
        tell_error(error_text(error), type(error).__name__)
        raise typer.Exit(EXIT_BAD_FILE) from None
    if running.failed is not None:
        raise PipelineFailed(f"the pipeline {running.failed.name} has failed: {running.failed.error}")


def _settings(conf: Sequence[str]) -> dict[str, str]:
    settings = {}
    for pair in conf:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{pair!r}: write KEY=VALUE, such as spark.executor.memory=2g")
        settings[key] = value
    return settings


def _times(since: str | None, until: str | None) -> dict[str, str]:
    times = {"startingTimestamp": since, "endingTimestamp": until}
    return {name: value for name, value in times.items() if value is not None}
