"""`pxrs pipeline`: the pipelines of a Python file, run by Spark in this process until they are told to stop.

What Spark itself logs goes into a file beside the checkpoints, and errors are told in a line; `--verbose` shows it all.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

import pxrs
from pxrs.cli.terminal import cell, console, data_text, echo, error_text, is_terminal, show, tell_error, time_field
from pxrs.clock import wall_time_us
from pxrs.errors import InvalidPipeline, InvalidUrl, MissingDependency, PipelineFailed, TopicExists
from pxrs.registry.address import parse
from pxrs.spark.pipeline import Pipeline, Place, check_together, collecting
from pxrs.spark.run import (
    FILES_LOG,
    SETTINGS,
    Batch,
    QueryRun,
    Run,
    check_sources,
    check_topics,
    last_written,
    missing_topics,
    short_reason,
)
from pxrs.spark.session import session
from pxrs.wording import counted, printable, rfc3339

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

app = typer.Typer(no_args_is_help=True)
EXIT_BAD_FILE: Final = 2
LOOK_S: Final = 0.5
LOOK_STOPPING_S: Final = 0.05
LOG_BYTES_MAX: Final = 16 << 20
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_MODULE: Final = "pxrs_pipeline_file"
_TIMES: Final = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX", "timeZone": "UTC"}
"""How Spark writes times into JSON: as all other commands do, whatever zone the user has given the session."""


@app.callback()
def _pipelines() -> None:
    """Keeps `run` a command of its own, whose name is typed."""


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="A Python file with functions under @pipeline.")],
    at: Annotated[str, typer.Option("--at", envvar="PXRS_AT", metavar="URL", help="The directory that holds the log.")],
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Only these of its pipelines.")] = None,
    registry: Annotated[
        str | None,
        typer.Option("--registry", envvar="PXRS_REGISTRY", metavar="URL", help="The registry, if it is not in there."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Handle what is there now, and end.")] = False,
    history: Annotated[
        bool, typer.Option("--history", help="As a batch over all that the sources hold; no group moves.")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="With --history: append to the sinks; else show it.")] = False,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="With --history: 2026-01-31T12:00+00:00.")] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="With --history: up to this time.")] = None,
    last: Annotated[int, typer.Option("-n", "--rows", min=1, help="With --history: show so many rows.")] = 20,
    master: Annotated[
        str | None, typer.Option(help="Spark's master, on this machine; by default local[*].", show_default=False)
    ] = None,
    conf: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="A setting of Spark.")] = None,
    checkpoints: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where Spark keeps its checkpoints; by default in the hub.")
    ] = None,
    create_topics: Annotated[bool, typer.Option("--create-topics", help="Make the topics that are missing.")] = False,
    grace: Annotated[float, typer.Option(min=0.0, help="Seconds to finish the batch in hand, when stopped.")] = 60.0,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what Spark logs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Events as JSON, one object a line.")] = False,
) -> None:
    """Run the pipelines of a file, until SIGTERM or Ctrl-C; a second one does not wait.

    They finish the batch in hand, and the next run goes on where they were. Exit code: 0 after a graceful end, 1 if a
    pipeline failed, 2 if they cannot be started as they are written.
    """
    if not history and (write or since or until):
        raise typer.BadParameter("--write, --since and --until go with --history")
    if history and once:
        raise typer.BadParameter("--history ends by itself; --once is for streams")
    place = Place(_directory(at, create_topics), registry)
    if registry is not None and parse(registry).scheme == "memory":
        raise typer.BadParameter("memory: is one process's own; Spark has several")
    folder = (checkpoints or Path(place.url, "pipelines")).absolute()
    try:
        pipelines = _chosen(load(file), names or [])
        with pxrs.open(place.url, registry) as hub, nullcontext() if history else Signals() as signals:
            check_sources(hub, pipelines)
            if create_topics:
                for topic in missing_topics(hub, pipelines):
                    # Another process may have created it since, with whatever settings: it is there, which is enough.
                    with suppress(TopicExists):
                        hub.create_topic(topic)
            check_topics(hub, pipelines)
            if not history:
                hub.check_registry()  # here, and not by each query when Spark has started
            if is_terminal() and not as_json:
                echo("starting Spark, which takes some seconds")
            with _spark(file, master, _settings(conf or []), None if verbose else folder) as spark:
                if signals is None:
                    _history(spark, pipelines, place, _times(since, until), last, write, as_json)
                    return
                signals.listen()  # Spark thinks that Ctrl-C is its own
                running = Run(spark, hub, pipelines, place, folder, once)
                if not signals.heard:
                    _follow(running, signals, grace, as_json)
    except InvalidPipeline as error:
        tell_error(error_text(error), type(error).__name__)
        raise typer.Exit(EXIT_BAD_FILE) from None
    if running.failed is not None:
        raise PipelineFailed(f"the pipeline {running.failed.name} has failed: {running.failed.error}")


def _follow(running: Run, signals: Signals, grace_s: float, as_json: bool) -> None:
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    running.start()
    with _shown(running, as_json) as show:
        while True:
            try:
                running.look()
            except (Py4JError, OSError) as error:
                if not running.is_stopping:
                    raise PipelineFailed(f"Spark has ended: {short_reason(str(error))}") from error
                return  # whoever stopped us has stopped it too; the next run goes on where it was
            show.update()
            if running.is_over:
                return
            heard = signals.wait(LOOK_STOPPING_S if running.is_stopping else LOOK_S)
            if heard is not None and signals.count == 1:
                show.tell("stopping", f"{signal.Signals(heard).name}: finishing what is in hand")
                running.finish(grace_s)
            elif heard is not None:
                running.finish(0)


# The file.


def load(file: Path) -> list[Pipeline]:
    """The pipelines that a file defines itself, in their order. Raises InvalidPipeline, MissingDependency."""
    if importlib.util.find_spec("pyspark") is None:
        raise MissingDependency("Spark needs pyspark: pip install 'pxrs[spark]'")
    if not file.is_file():
        raise InvalidPipeline(f"there is no file {file}")
    folder = str(file.absolute().parent)
    sys.path.insert(0, folder)
    # Spark's workers import what the file imports, and are told here where that is.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    spec = importlib.util.spec_from_file_location(_MODULE, file.absolute())
    if spec is None or spec.loader is None:
        raise InvalidPipeline(f"{file} is no Python file: its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(module)  # the file itself is nothing that a worker could import
    with collecting() as collected:
        try:
            spec.loader.exec_module(module)
        except InvalidPipeline as error:
            raise InvalidPipeline(f"{error}{_line(error, file)}") from error
        except (Exception, SystemExit) as error:  # whatever the file's own code raises
            reason = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
            raise InvalidPipeline(f"{file} cannot be loaded: {reason}{_line(error, file)}") from error
    pipelines = [each for each in collected if getattr(each.function, "__module__", _MODULE) == _MODULE]
    if not pipelines:
        raise InvalidPipeline(f"{file} defines no pipeline: put @pipeline(source=..., sink=...) before a function")
    check_together(pipelines)
    return pipelines


def _line(error: BaseException, file: Path) -> str:
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno})"
    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename == str(file.absolute())]
    return "".join(f" ({file}, line {each.lineno})" for each in frames[-1:])


def _chosen(pipelines: list[Pipeline], names: Sequence[str]) -> list[Pipeline]:
    there = [each.name for each in pipelines]
    if unknown := [name for name in names if name not in there]:
        raise InvalidPipeline(f"no pipeline {', '.join(unknown)}; there are {', '.join(there)}")
    return [each for each in pipelines if not names or each.name in names]


# Where, and with what.


def _directory(at: str, may_be_missing: bool) -> str:
    address = parse(at)
    if address.scheme != "file":
        raise InvalidUrl(f"{address.text}: Spark's processes share a hub in a directory; {address.scheme}: is none")
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
    """log_folder: what Spark logs goes into a file there; with None it is shown."""
    path = os.environ.get("PYTHONPATH", "")
    config = {**SETTINGS, "spark.executorEnv.PYTHONPATH": path, **settings}
    log = None if log_folder is None else log_folder / f"{file.stem}.spark.log"
    try:
        with _stderr_into(log):
            spark = session(f"pxrs pipeline {file.name}", master, config)
    except MissingDependency:
        raise
    except Exception as error:
        where = "" if log is None else f"; see {log}"
        raise PipelineFailed(f"Spark did not start: {short_reason(str(error))}{where}") from error
    if log is not None:
        spark.sparkContext.setLogLevel("ERROR")
        logging.getLogger("DataFrameQueryContextLogger").setLevel(logging.CRITICAL)
    try:
        yield spark
    finally:
        with suppress(Exception):  # it may be gone already
            spark.stop()


@contextmanager
def _stderr_into(log: Path | None) -> Iterator[None]:
    """What is started meanwhile has this file as its standard error, for as long as it lives."""
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


class Signals:
    """SIGTERM and SIGINT, heard when it is time for them."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.count = 0
        """Of those that were waited for."""

    def __enter__(self) -> Signals:
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        self.listen()
        return self

    def listen(self) -> None:
        for number in _SIGNALS:
            signal.signal(number, self._note)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)

    def wait(self, timeout_s: float) -> int | None:
        """The next one, if it comes in time."""
        if not self.heard and select.select([self._woken], [], [], timeout_s)[0]:
            with suppress(BlockingIOError):
                self._woken.recv(4096)
        if not self.heard:
            return None
        self.count += 1
        return self.heard.pop(0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.heard.append(number)

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._woken.close()
        self._waker.close()


# What is shown.


@contextmanager
def _shown(running: Run, as_json: bool) -> Iterator[_Lines | _Screen]:
    if as_json or not is_terminal():
        yield _Lines(running, as_json)
        return
    with Live(console=console(), auto_refresh=False) as live:
        yield _Screen(running, live)


class _Lines:
    """A line for each batch, for people who read a log, or as JSON for machines."""

    def __init__(self, running: Run, as_json: bool) -> None:
        self._running, self._as_json = running, as_json
        self._over: set[str] = set()
        for each in running.queries:
            fields = {"source": each.source, "sink": str(each.sink), "group": each.group}
            text = f"{each.name}: {each.source} to {each.sink}, in the group {each.group}"
            self.tell("started", text, pipeline=each.name, **fields)

    def update(self) -> None:
        for each in self._running.queries:
            for batch in each.batches:
                self.tell("batch", f"{each.name}: {_words(batch, each)}", **_plain(batch, each))
            if each.is_over and each.name not in self._over:
                self._over.add(each.name)
                what = f"failed: {each.error}" if each.error else f"ended after {counted(each.rows_done, 'row')}"
                fields = {"pipeline": each.name, "rows": each.rows_done, "lag": each.lag, "error": each.error}
                self.tell(each.state, f"{each.name}: {what}, lag {_number(each.lag)}", **fields)

    def tell(self, event: str, text: str, **fields: Any) -> None:
        tell_event(self._as_json, event, text, **fields)


def tell_event(as_json: bool, event: str, text: str, **fields: Any) -> None:
    """A line on standard output: for machines with its time and its fields, for people the text."""
    plain = {"event": event, **time_field("time", wall_time_us()), **fields}
    echo(json.dumps(plain) if as_json else printable(text))


class _Screen:
    """A table that stays where it is."""

    def __init__(self, running: Run, live: Live) -> None:
        self._running, self._live = running, live

    def update(self) -> None:
        table = Table("pipeline", "source", "sink", "state", box=None, header_style="bold")
        for column in ("batch", "took", "rows/s", "rows", "lag", "state rows"):
            table.add_column(column, justify="right")
        for each in self._running.queries:
            last = each.last
            numbers = ("-", "-", "-") if last is None else _numbers(last)
            table.add_row(
                Text(each.name),
                Text(printable(each.source)),
                Text(printable(str(each.sink))),
                Text(each.state, style="red" if each.state == "failed" else ""),
                *numbers,
                f"{each.rows_done:,}",
                _number(each.lag),
                _number(None if last is None else last.state_rows),
            )
        self._live.update(table, refresh=True)

    def tell(self, event: str, text: str) -> None:
        self._live.console.print(Text(printable(text)))


def _numbers(batch: Batch) -> tuple[str, str, str]:
    speed = f"{batch.rows_per_s:,.{0 if batch.rows_per_s >= 10 else 1}f}"
    return f"{batch.number:,}", f"{batch.duration_ms / 1000:.1f} s", speed


def _words(batch: Batch, each: QueryRun) -> str:
    number, took, speed = _numbers(batch)
    state = f", {counted(batch.state_rows, 'row')} of state" if batch.state_rows else ""
    return f"batch {number}, {counted(batch.rows, 'row')} in {took} ({speed} rows/s), lag {_number(each.lag)}{state}"


def _plain(batch: Batch, each: QueryRun) -> dict[str, Any]:
    fields = asdict(batch)
    return {"pipeline": each.name, "batch": fields.pop("number"), **fields, "lag": each.lag}


def _number(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


# Over history.


def _history(
    spark: SparkSession,
    pipelines: Sequence[Pipeline],
    place: Place,
    times: dict[str, str],
    rows_max: int,
    is_written: bool,
    as_json: bool,
) -> None:
    for each in pipelines if is_written else ():
        if each.sink.folder is not None and last_written(spark, each.sink.folder) is not None:
            raise InvalidPipeline(
                f"{each.name}: a stream writes into {each.sink.folder}, and Spark sees only the files that its "
                f"{FILES_LOG} names: write history into another folder"
            )
    for each in pipelines:
        try:
            messages = each.messages(spark, place, **times)
            rows = each.over(messages)
            if is_written:
                each.sink.write(each.sink.shaped(rows), place)
                _tell_written(each, as_json)
            else:
                _show_rows(each, rows, rows_max, as_json)
            if each.parse is not None and (bad := each.bad(messages).count()):
                those = "that does" if bad == 1 else "that do"
                tell_error(f"{each.name}: left out {counted(bad, 'message')} {those} not parse")
        except Exception as error:
            if isinstance(error, pxrs.errors.PxrsError):
                raise
            raise PipelineFailed(f"{each.name}: {short_reason(str(error))}") from error


def _tell_written(each: Pipeline, as_json: bool) -> None:
    fields = {"pipeline": each.name, "sink": str(each.sink)}
    tell_event(as_json, "written", f"{each.name}: written to {each.sink}", **fields)


def _show_rows(each: Pipeline, rows: DataFrame, rows_max: int, as_json: bool) -> None:
    from pyspark.sql import functions as F
    from pyspark.sql.types import TimestampType

    if as_json:
        for (text,) in rows.limit(rows_max).select(F.to_json(F.struct("*"), _TIMES)).collect():
            echo(json.dumps({"pipeline": each.name, "row": json.loads(text)}))
        return
    is_time = [isinstance(field.dataType, TimestampType) for field in rows.schema]
    # Spark hands times to Python in the zone of the machine, without saying so: fetch microseconds since 1970 instead.
    # By new names: those that the columns have need not be unique.
    names = [f"c{number}" for number in range(len(is_time))]
    columns = [F.unix_micros(name) if is_one else F.col(name) for name, is_one in zip(names, is_time, strict=True)]
    found = rows.limit(rows_max + 1).toDF(*names).select(*columns).collect()
    table = Table(title=each.name, title_justify="left", box=None, header_style="bold")
    for column in rows.columns:
        table.add_column(Text(printable(column)))
    for row in found[:rows_max]:
        table.add_row(*(cell(_text(value, is_one)) for value, is_one in zip(row, is_time, strict=True)))
    show(table)
    if len(found) > rows_max:
        typer.echo(f"these are the first {rows_max:,}; there are more: give --rows", err=True)


def _text(value: Any, is_time: bool) -> str:
    if is_time and value is not None:
        return rfc3339(value) or f"{value}us"
    return data_text(bytes(value)) if isinstance(value, bytearray | bytes) else "" if value is None else str(value)
