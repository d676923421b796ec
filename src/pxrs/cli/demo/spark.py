"""The pipelines of the demo as a process of their own, and their results, read without Spark.

The process is `pxrs pipeline run`, as a user would start it. It stops gracefully when its standard input ends, which
also happens if the demo dies.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlparse

import pyarrow.parquet as pq

import pxrs
from pxrs.cli.demo.child import end, how_it_ended
from pxrs.cli.demo.orders import Totals
from pxrs.errors import MissingDependency, UnknownGroup
from pxrs.errors.general import installing
from pxrs.spark.java import find_java

SOURCE: Final = "orders"
TOTALS: Final = "totals"
DEAD_LETTERS: Final = "orders.dead-letters"
ARCHIVE: Final = "archive"
CORES: Final = 2
GRACE_S: Final = 300
"""Seconds that a batch may take to end when Spark is stopped. The demo kills Spark earlier if its own time is over."""
_FILE: Final = "shop.py"
_CODE: Final = "from pxrs.cli.app import main; from pxrs.cli.demo.child import end_with_input; end_with_input(); main()"
"""What the process runs: the command line, which ends as by SIGTERM when the demo closes the pipe to it."""
_SETTINGS: Final = {
    "spark.sql.shuffle.partitions": "1",
    # Java code that Spark generates and compiles for each query pays for millions of rows, and a batch has hundreds.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # A short run gains more from code that is compiled soon than from code that is compiled well.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def missing() -> str | None:
    """Why Spark cannot be used here, and what to do; None if it can."""
    if importlib.util.find_spec("pyspark") is None:
        return f"pyspark is missing: {installing('spark')}"
    try:
        find_java()
    except MissingDependency as error:
        return str(error)
    return None


def groups_of(group: str) -> dict[str, str]:
    """The group of each query, by its name."""
    return {
        "totals": f"{group}-totals",
        "totals.dead-letters": f"{group}-totals.dead-letters",
        "archive": f"{group}-archive",
    }


class Spark:
    """The process, and the events that it has printed."""

    name: Final = "Spark"

    def __init__(self, hub: pxrs.Hub, registry: str, group: str, folder: Path) -> None:
        self.groups = groups_of(group)
        self.batches = dict.fromkeys(self.groups, 0)
        self.starts = 0
        self.events = 0
        """How many events the process has printed, in all its starts."""
        self._hub, self._folder = hub, folder
        self._errors = folder / "spark.stderr"
        shutil.copyfile(Path(__file__).with_name("pipelines.py"), folder / _FILE)
        self._command = [sys.executable, "-c", _CODE, "pipeline", "run", _FILE, "--at", hub.url, "--json"]
        self._command += ["--master", f"local[{CORES}]", "--grace", f"{GRACE_S}"]
        for setting in _SETTINGS.items():
            self._command += ["--conf", "=".join(setting)]
        self._environment = {**os.environ, "PXRS_DEMO_GROUP": group}
        if registry:
            self._environment["PXRS_REGISTRY"] = registry
        self.start()

    def start(self) -> None:
        """Start the process; also again after it has ended: it goes on where it was."""
        self.state = "starting"
        self.starts += 1
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=self._folder,
                env=self._environment,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.startswith(b"{"):
                continue  # Java prints its warnings there too
            told = json.loads(line)
            self.events += 1
            if told["event"] == "batch":
                self.batches[told["pipeline"]] += 1
                if all(self.batches.values()):
                    self.state = "running"

    def failure(self) -> str | None:
        """Why the process has ended, if it has."""
        if self.process.poll() is None:
            return None
        return how_it_ended("Spark", self.process, self._errors)

    def read(self) -> dict[str, int]:
        """How many messages the checkpoints of each query cover."""
        return {name: self._done(group) for name, group in self.groups.items()}

    def lag(self) -> int | None:
        """The lag of all its groups together; None if the lag of one of them is not known."""
        lags = [self._hub.group(group).describe().lag for group in self.groups.values()]
        return None if None in lags else sum(lag for lag in lags if lag is not None)

    def ask_to_stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def end(self, until: float, on_wait: Callable[[], None] | None = None) -> bool:
        """Wait for the process to finish, or kill it. Returns whether it ended gracefully."""
        self.ask_to_stop()
        is_graceful = end(self.process, self._reader, until, on_wait)
        self.state = "ended"
        return is_graceful

    def _done(self, group: str) -> int:
        try:
            return sum(row.checkpoint or 0 for row in self._hub.group(group).describe().partitions)
        except UnknownGroup:  # it has not joined yet
            return 0

    # Its results.

    def totals(self) -> Totals:
        """The last value of each total in the topic."""
        found = {}
        for message in self._messages(TOTALS):
            row = json.loads(message.value or b"", parse_float=Decimal, parse_int=Decimal)
            found[row["account"], datetime.fromisoformat(row["begin"])] = Decimal(row["total"])
        return found

    def archived(self) -> list[tuple[tuple[str, datetime], Decimal]]:
        """The rows of the Parquet files."""
        found = []
        for path in committed_files(self._folder / ARCHIVE):
            for row in pq.read_table(path).to_pylist():
                begin = row["begin"].replace(tzinfo=UTC)  # Spark writes times in UTC without a zone
                found.append(((row["account"], begin), row["total"]))
        return found

    def dead_letters(self) -> list[tuple[str, str]]:
        """The origin and the reason of each dead letter."""
        found = []
        for message in self._messages(DEAD_LETTERS):
            headers = {name: (value or b"").decode() for name, value in message.headers or ()}
            found.append((headers["pxrs-origin"], headers["pxrs-reason"]))
        return found

    def _messages(self, name: str) -> Iterator[pxrs.Message]:
        topic = self._hub.topic(name)
        for partition in range(topic.partitions):
            yield from topic.messages(partition)


def committed_files(folder: Path) -> list[Path]:
    """The files of a Parquet sink that count: a batch that was tried twice may have left others."""
    found = set()
    for log in (folder / "_spark_metadata").glob("[0-9]*"):
        for line in log.read_text().splitlines()[1:]:
            found.add(Path(unquote(urlparse(json.loads(line)["path"]).path)))
    return sorted(found)
