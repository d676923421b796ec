"""A standalone Spark cluster on this machine: a master and a worker, from the pyspark package."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import psutil

from pxrs.spark.java import java_home
from pxrs.testing.servers import Server, free_ports
from pxrs.testing.servers.process import PROBE_S_MAX

START_S_MAX = 120.0
"""A Java takes long to start on a busy machine."""


class _Daemon(Server):
    """A daemon of a standalone cluster. `home` is a home of Spark."""

    scheme = "spark"

    def __init__(self, home: Path, environment: Mapping[str, str]) -> None:
        super().__init__()
        self._home, self._variables = home, environment
        (self.web_port,) = free_ports(1)

    def _prepare(self, folder: Path) -> None:
        pass

    def _run(self, name: str, *arguments: str) -> list[str]:
        places = ["--host", self.host, "--port", str(self.port), "--webui-port", str(self.web_port)]
        return [str(self._home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *places, *arguments]

    def wait_until_ready(self, timeout_s: float = START_S_MAX) -> None:
        super().wait_until_ready(timeout_s)

    def _environment(self) -> Mapping[str, str]:
        return {**self._variables, "JAVA_HOME": str(java_home()), "SPARK_DAEMON_MEMORY": "256m"}


class SparkMaster(_Daemon):
    def _command(self, folder: Path) -> list[str]:
        return self._run("master.Master")

    def is_ready(self) -> bool:
        return self.state() is not None

    @property
    def address(self) -> str:
        """Where it listens: Spark takes another port if somebody else has taken the one that it was given."""
        state = self.state()
        assert state is not None, self.log_tail()
        return str(state["url"])

    def state(self) -> dict[str, Any] | None:
        """What the master tells of its workers and applications; None if it does not answer."""
        try:
            with urlopen(f"http://{self.host}:{self.web_port}/json/", timeout=PROBE_S_MAX) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (URLError, OSError, ValueError):
            return None


class SparkWorker(_Daemon):
    """A worker with two cores. Its executors are processes of its own, and end with it."""

    def __init__(self, master: SparkMaster, home: Path, environment: Mapping[str, str]) -> None:
        super().__init__(home, environment)
        self._master = master

    def _command(self, folder: Path) -> list[str]:
        resources = ["--cores", "2", "--memory", "2g", "--work-dir", str(folder / "work")]
        return self._run("worker.Worker", *resources, self._master.address)

    def is_ready(self) -> bool:
        state = self._master.state()
        return state is not None and any(worker["state"] == "ALIVE" for worker in state["workers"])

    def executors(self) -> list[psutil.Process]:
        """Its executors and their Python processes that live. The script that starts the worker may leave a dead
        child, which the worker does not wait for."""
        found = []
        for process in self._processes()[1:]:
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


def environment(home: Path, folder: Path) -> dict[str, str]:
    """For Spark's processes that use only the loopback interface and write only below `folder`."""
    return {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_HOSTNAME": "localhost",
        "SPARK_LOCAL_DIRS": str(folder),
        "TMPDIR": str(folder),
    }
