"""What `pxrs pipeline run` does once its options are checked: the hub's directory, the Spark session, and the loop that
follows the queries.

What Spark logs goes into a file beside the checkpoints, and an error is shown as one line; with `--verbose`, Spark's
log goes to standard error.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pxrs.cli.pipeline.health import Health
from pxrs.cli.pipeline.progress import shown
from pxrs.cli.pipeline.signals import Signals
from pxrs.errors import InvalidPipeline, InvalidUrl, MissingDependency, PipelineFailed
from pxrs.registry.address import parse
from pxrs.spark.pipeline import Pipeline
from pxrs.spark.place import SERVER, absolute
from pxrs.spark.progress import short_reason
from pxrs.spark.run import SETTINGS, Run
from pxrs.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOK_S: Final = 0.5
"""How long the loop waits for a signal before it looks at the queries again."""
LOOK_STOPPING_S: Final = 0.05
"""The same while the queries are being stopped."""
LOG_BYTES_MAX: Final = 16 << 20


def follow(running: Run, signals: Signals, grace_s: float, as_json: bool, health: Health) -> None:
    """Show the queries until all have ended; SIGTERM and SIGINT stop them."""
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
                show.tell("stopping", f"{signal.Signals(heard).name}: finishing the current batch")
                running.finish(grace_s)
            elif heard is not None:
                running.finish(0)


def chosen(pipelines: list[Pipeline], names: Sequence[str]) -> list[Pipeline]:
    """Those of these names; all if none is given. Raises InvalidPipeline."""
    there = [each.name for each in pipelines]
    if unknown := [name for name in names if name not in there]:
        raise InvalidPipeline(f"there is no pipeline {', '.join(unknown)}; the file has {', '.join(there)}")
    return [each for each in pipelines if not names or each.name in names]


# The hub, the checkpoints and Spark.


def hub_directory(at: str, may_be_missing: bool) -> str:
    """The hub's directory, or the address of its server."""
    address = parse(at)
    if address.scheme == SERVER:
        return absolute(address)
    if address.scheme != "file":
        raise InvalidUrl(
            f"{address.text} cannot be shared by Spark's processes: give a hub in a directory or behind a server, "
            "pxrs://HOST:PORT"
        )
    directory = address.directory()
    if not may_be_missing and not directory.is_dir():
        raise InvalidUrl(f"there is no directory {at}: correct --at or PXRS_AT")
    return str(directory.absolute())


@contextmanager
def spark_session(
    file: Path, master: str | None, settings: dict[str, str], log_folder: Path | None
) -> Iterator[SparkSession]:
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
