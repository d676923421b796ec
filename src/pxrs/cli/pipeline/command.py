"""The command `pxrs pipeline run`.

What Spark logs goes into a file beside the checkpoints, and an error is shown as one line; with `--verbose`, Spark's
log goes to standard error.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

import pxrs
from pxrs.cli.exits import exit_codes
from pxrs.cli.monitoring import MetricsListen, refuse_metrics
from pxrs.cli.pipeline.file import load
from pxrs.cli.pipeline.health import Health
from pxrs.cli.pipeline.history import run_history
from pxrs.cli.pipeline.progress import shown
from pxrs.cli.pipeline.signals import Signals
from pxrs.cli.terminal import echo, error_text, is_terminal, tell_error
from pxrs.errors import InvalidPipeline, InvalidUrl, MissingDependency, PipelineFailed, TopicExists
from pxrs.registry.address import parse
from pxrs.spark.pipeline import Pipeline
from pxrs.spark.place import SERVER, absolute, is_server
from pxrs.spark.progress import short_reason
from pxrs.spark.run import SETTINGS, Run, check_sources, check_topics, missing_topics
from pxrs.spark.session import session
from pxrs.spark.sinks import HubAddress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

app = typer.Typer(no_args_is_help=True)
EXIT_BAD_FILE: Final = 2
LOOK_S: Final = 0.5
"""How long the loop waits for a signal before it looks at the queries again."""
LOOK_STOPPING_S: Final = 0.05
"""The same while the queries are being stopped."""
LOG_BYTES_MAX: Final = 16 << 20


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
    grace: Annotated[float, typer.Option(min=0.0, help="Seconds to finish the current batch when stopped.")] = 60.0,
    metrics_listen: MetricsListen = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print what Spark logs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Events as JSON, one object a line.")] = False,
) -> None:
    """Run the pipelines of a file, until SIGTERM or Ctrl-C; a second one does not wait.

    They finish the current batch, and the next run goes on where they were. Exit code: 0 after a graceful end, 1 if a
    pipeline failed, 2 if a pipeline is not valid, 3 if another start cannot help.
    """
    if not history and (write or since or until):
        raise typer.BadParameter("--write, --since and --until go with --history")
    if history and once:
        raise typer.BadParameter("--history ends by itself; --once is for streams")
    if history:
        refuse_metrics(context, "--history ends by itself; --metrics-listen is for streams")
        metrics_listen = None
    address = HubAddress(_directory(at, create_topics), registry)
    if registry is not None and parse(registry).scheme == "memory":
        raise typer.BadParameter("memory: exists in one process only, and Spark has several")
    if checkpoints is None and is_server(address.url):
        raise typer.BadParameter("the hub is behind a server: say where Spark keeps its checkpoints, --checkpoints DIR")
    folder = (checkpoints or Path(address.url, "pipelines")).absolute()
    health = Health(as_json)
    try:
        pipelines = _chosen(load(file), names or [])
        with (
            pxrs.open(address.url, registry) as hub,
            nullcontext() if history else Signals() as signals,
            health.answered(metrics_listen),
        ):
            check_sources(hub, pipelines)
            if create_topics:
                for topic in missing_topics(hub, pipelines):
                    # A topic that another process has created since is used as it is, whatever its settings are.
                    with suppress(TopicExists):
                        hub.create_topic(topic)
            check_topics(hub, pipelines)
            if not history:
                hub.check_registry()  # before Spark starts, which takes seconds; each query would check it again
            if is_terminal() and not as_json:
                echo("starting Spark, which takes some seconds")
            with _spark(file, master, _settings(conf or []), None if verbose else folder) as spark:
                if signals is None:
                    run_history(spark, pipelines, address, _times(since, until), last, write, as_json)
                    return
                signals.listen()  # Spark has installed a handler of its own for Ctrl-C
                running = Run(spark, hub, pipelines, address, folder, once)
                if not signals.received:
                    _follow(running, signals, grace, as_json, health)
    except InvalidPipeline as error:
        tell_error(error_text(error), type(error).__name__)
        raise typer.Exit(EXIT_BAD_FILE) from None
    if running.failed is not None:
        raise PipelineFailed(f"the pipeline {running.failed.name} has failed: {running.failed.error}")


def _follow(running: Run, signals: Signals, grace_s: float, as_json: bool, health: Health) -> None:
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    running.start()
    with shown(running, as_json) as show:
        while True:
            try:
                running.look()
            except (Py4JError, OSError) as error:
                if not running.is_stopping:
                    raise PipelineFailed(f"Spark has ended: {short_reason(str(error))}") from error
                return  # the signal that stops this process has ended Spark too; the next run goes on from there
            show.update()
            health.update(running)
            if running.is_over:
                return
            heard = signals.wait(LOOK_STOPPING_S if running.is_stopping else LOOK_S)
            if heard is not None and signals.count == 1:
                show.tell("stopping", f"{signal.Signals(heard).name}: finishing what is in hand")
                running.finish(grace_s)
            elif heard is not None:
                running.finish(0)


def _chosen(pipelines: list[Pipeline], names: Sequence[str]) -> list[Pipeline]:
    there = [each.name for each in pipelines]
    if unknown := [name for name in names if name not in there]:
        raise InvalidPipeline(f"no pipeline {', '.join(unknown)}; there are {', '.join(there)}")
    return [each for each in pipelines if not names or each.name in names]


# The hub, the checkpoints and Spark.


def _directory(at: str, may_be_missing: bool) -> str:
    """The hub's directory, or the address of its server."""
    address = parse(at)
    if address.scheme == SERVER:
        return absolute(address)
    if address.scheme != "file":
        raise InvalidUrl(
            f"{address.text}: Spark's processes share a hub in a directory or behind a server, pxrs://HOST:PORT; "
            f"{address.scheme}: is neither"
        )
    directory = address.directory()
    if not may_be_missing and not directory.is_dir():
        raise InvalidUrl(f"there is no directory {at}: correct --at or PXRS_AT")
    return str(directory.absolute())


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


@contextmanager
def _spark(file: Path, master: str | None, settings: dict[str, str], log_folder: Path | None) -> Iterator[SparkSession]:
    """A Spark session for the block. log_folder: where the file with Spark's log is; None leaves the log on standard
    error."""
    path = os.environ.get("PYTHONPATH", "")
    config = {**SETTINGS, "spark.executorEnv.PYTHONPATH": path, **settings}
    log = None if log_folder is None else log_folder / f"{file.stem}.spark.log"
    try:
        with stderr_into(log):
            spark = session(f"pxrs pipeline {file.name}", master, config)
    except MissingDependency:
        raise
    except Exception as error:
        where = "" if log is None else f"; see {log}"
        raise PipelineFailed(f"Spark did not start: {short_reason(str(error))}{where}") from error
    if log is not None:
        spark.sparkContext.setLogLevel("ERROR")
        # This command prints the error of a query itself. Without this, these loggers would print it again.
        for name in ("DataFrameQueryContextLogger", "pxrs.spark.watch"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield spark
    finally:
        with suppress(Exception):  # Spark's process may have ended before
            spark.stop()


@contextmanager
def stderr_into(log: Path | None) -> Iterator[None]:
    """Processes that are started in the block have this file as their standard error for as long as they live."""
    if log is None:
        yield
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > LOG_BYTES_MAX:
        log.unlink()
    sys.stderr.flush()
    ours = os.dup(2)
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)
