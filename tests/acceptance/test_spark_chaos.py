"""A query from topic to topic whose driver and executors are killed at random, on every registry.

`make test` has the hub behind a server, with the registry that the seed chooses (SEED= chooses it again), and executors
of a standalone master and worker that never open the hub's directory. The server is killed, and a driver or an
executor. `make soak` kills all of them, more often, also on every registry without a server.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import psutil
import pytest

import pxrs
from pxrs.errors import UnknownGroup
from pxrs.server.auth import tokens
from pxrs.spark.home import link_home
from pxrs.testing.servers import EtcdServer, HubServer, PostgresServer, ZooKeeperServer
from pxrs.testing.transfer import rows_of, transfer
from tests import sessions
from tests.acceptance.standalone_spark import SparkMaster, SparkWorker, environment

QUERY = Path(__file__).with_name("spark_query.py")
AUDIT = Path(__file__).with_name("executor_audit")
"""The folder of a `sitecustomize` that notes what a Python process opens."""
SOAK = bool(os.environ.get("PXRS_SOAK"))
REGISTRIES = ("file", "sqlite", "postgresql", "etcd", "zookeeper")
LOCAL_CLUSTER = "local-cluster[2,1,512]"
DRIVERS_DEATHS = ("driver", "java", "python")
"""Of the driver: all of it, its Java, or its Python process."""
BATCH_ROWS = 200
MESSAGES_MIN = 3000 if SOAK else 600
LEASE_TTL_S = 6.0
"""Long enough for a machine with much else to do: a query whose lease expires during a batch ends, as it should."""
SERVED_LEASE_TTL_S = 20.0
"""Long enough for a server that is killed and started again: its clients cannot renew meanwhile."""
PATIENCE_S = 180.0
"""For one thing to happen: a driver's start takes most of it where the machine has much else to do."""
STRIDE_S_MAX = 2.0
"""A kill comes at any moment of so long a time: two or three batches."""
START_S_MAX = 15.0
"""A kill that does not wait for the query to be in its stride comes at any moment of its start."""


class Driver:
    """A driver, its Java, its executors and their workers: the processes of one session, which the driver leads. The
    executors of a standalone cluster are not among them."""

    def __init__(self, master: str, url: str, folder: Path, variables: Mapping[str, str], lease_ttl: float) -> None:
        self.errors = folder / f"driver-{time.time_ns()}.log"
        command = [sys.executable, str(QUERY), master, url, str(folder), str(BATCH_ROWS), str(lease_ttl)]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                cwd=folder,
                env=variables,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """All that live, also those whose parents were killed."""
        return sessions.members(self.process.pid)

    def close(self) -> None:
        """Nothing is left behind, whatever happened."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        sessions.end(self.process.pid)
        self.process.wait(10)


def running(processes: Iterable[psutil.Process], name: str) -> list[psutil.Process]:
    """The processes among these that run this Java class."""
    found = []
    for process in processes:
        with suppress(psutil.Error):
            if any(word.endswith(name) for word in process.cmdline()):
                found.append(process)
    return found


def commands_of(processes: Iterable[psutil.Process]) -> list[str]:
    """What these processes run, of those that still live."""
    found = []
    for process in processes:
        with suppress(psutil.Error):
            found.append(" ".join(process.cmdline())[-200:])
    return found


class Chaos(ExitStack):
    def __init__(
        self, folder: Path, registry: str = "file", master: str = LOCAL_CLUSTER, *, is_served: bool = False
    ) -> None:
        """registry: one of REGISTRIES, of which "file" is in the hub's directory; "any" for one that the seed chooses.
        master: as Spark has it; "standalone" for a cluster that is started here.
        is_served: drivers and executors reach the hub through a server; the executors' Python processes note what they
                   open below its directory."""
        super().__init__()
        self.seed = int(os.environ.get("SEED", time.time_ns() % 1_000_000))
        self.random = random.Random(self.seed)
        self.registry = self.random.choice(REGISTRIES) if registry == "any" else registry
        self.folder, self.master = folder, master
        # Executors of a local cluster work in the home, others in a folder of their worker.
        shared = None if master == LOCAL_CLUSTER else os.environ.get("SPARK_HOME")
        self.home = Path(shared or folder / "spark")
        self.variables = environment(self.home, folder / "local")
        self.is_served = is_served
        self.server: HubServer | None = None
        self.audit = folder / "audit"
        self.token: str | None = None
        """The drivers' token, if the hub is behind a server."""
        self.worker: SparkWorker | None = None
        self.drivers: list[Driver] = []
        self.kills: list[str] = []
        self.sent = 0
        self.started_at = time.monotonic()

    def __enter__(self) -> Self:
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise
        return self

    def _prepare(self) -> None:
        (self.folder / "local").mkdir()
        if not self.home.exists():
            self.home.mkdir()
            assert link_home(self.home)
        if self.master == "standalone":
            spark = self.enter_context(SparkMaster(self.home, self.variables))
            self.worker = self.enter_context(SparkWorker(spark, self.home, self.variables | self.audited()))
            self.master = spark.address
        address = self._start_registry()
        if self.is_served:
            allow = ["topic:in=read", "topic:out=write", "group:g=member"]
            _, self.token = tokens.create(str(self.folder / "tokens"), "drivers", allow, now=time.time())
            (self.folder / "events").mkdir()
            # One executor at a time: each is a Java to start.
            self.variables |= {} if SOAK else {"CHAOS_CORES_MAX": "1"}
            self.variables["CHAOS_EVENTS"] = str(self.folder / "events")
            flags = ["--auth", str(self.folder / "tokens")]
            self.server = self.enter_context(HubServer(self.folder / "data", address, flags=flags))
        elif address is not None:
            self.variables["CHAOS_REGISTRY"] = address
        self.hub = self.enter_context(pxrs.open(self.folder / "data", registry=address))
        self.source = self.hub.create_topic("in", partitions=4)
        self.target = self.hub.create_topic("out", partitions=3)
        self.producer = self.hub.producer("in")

    def audited(self) -> dict[str, str]:
        """What makes the Python processes of executors note what they open below the hub's directory."""
        if not self.is_served:
            return {}
        path = os.pathsep.join(filter(None, [str(AUDIT), os.environ.get("PYTHONPATH")]))
        forbidden = str(self.folder / "data")
        return {"PYTHONPATH": path, "EXECUTOR_AUDIT": str(self.audit), "EXECUTOR_AUDIT_FORBIDDEN": forbidden}

    def opened(self) -> list[str]:
        """What Python processes have noted that they opened there; at least one must have started."""
        lines = self.audit.read_text().splitlines()
        started = [line for line in lines if line.split(" ")[1] == "start"]
        assert started
        return [line for line in lines if line not in started]

    def files_with(self, *secrets: str) -> list[Path]:
        """The files that any process of Spark has left, and that hold one of these texts: logs, events, checkpoints."""
        data = [path for path in self.folder.rglob("*") if path.is_file() and "local" not in path.parts]
        return [path for path in data if any(secret.encode() in path.read_bytes() for secret in secrets)]

    def _start_registry(self) -> str | None:
        """Its address; None if it is in the hub's directory."""
        match self.registry:
            case "sqlite":
                return f"sqlite:///{self.folder}/registry.db"
            case "postgresql":
                return self.enter_context(PostgresServer()).url
            case "etcd":
                return self.enter_context(EtcdServer()).url
            case "zookeeper":
                return self.enter_context(ZooKeeperServer()).url
        return None

    @property
    def driver(self) -> Driver:
        return self.drivers[-1]

    def start(self) -> None:
        url, lease_ttl = (self.hub.url, LEASE_TTL_S) if self.server is None else (self.server.url, SERVED_LEASE_TTL_S)
        variables = {**self.variables, "PXRS_TOKEN": self.token} if self.token else self.variables
        self.drivers.append(Driver(self.master, url, self.folder, variables, lease_ttl))
        self.callback(self.driver.close)

    def arrived(self) -> int:
        return sum(self.target.end(number) for number in range(self.target.partitions))

    def lag(self) -> int | None:
        """As anybody sees it; None before the group has begun."""
        try:
            return self.hub.group("g").describe().lag
        except UnknownGroup:
            return None

    def load(self) -> None:
        """Some more to read, as long as it is a few batches: what waits must be read when all kills are over."""
        if self.sent - self.arrived() < 3 * BATCH_ROWS:
            for _ in range(20):
                self.producer.send(b"%d" % self.sent, b"key-%d" % self.random.randrange(100))
                self.sent += 1
            self.producer.flush()

    def eventually(self, check: Callable[[], bool], what: str) -> None:
        """There is load until then."""
        until = time.monotonic() + PATIENCE_S
        while not check():
            assert self.driver.is_running, self.tell(f"the driver ended by itself while {what}")
            assert time.monotonic() < until, self.tell(what)
            self.load()
            time.sleep(0.01)

    def go_on(self, seconds: float) -> None:
        """Up to the random moment."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.load()
            time.sleep(0.01)

    def kill(self, kind: str, waits: bool) -> None:
        if waits:
            arrived = self.arrived() + BATCH_ROWS
            self.eventually(lambda: self.arrived() >= arrived, f"waiting for a batch, before a kill of {kind}")
            self.go_on(self.random.uniform(0, STRIDE_S_MAX))
        else:
            self.go_on(self.random.uniform(0, START_S_MAX))
        if kind == "server":
            assert self.server is not None
            self.server.kill()
            self.server.start()
        elif victims := self._victims(kind):
            for victim in victims:
                with suppress(psutil.Error):
                    victim.kill()
        else:
            return self.kill(kind, True)  # it came before there was one
        self.kills.append(kind)
        self.note(f"killed {kind}{'' if waits else ', perhaps at its start'}")
        if kind in DRIVERS_DEATHS:
            # The next one comes at once: what is left of the last one may still be at work.
            self.start()
        return None

    def _victims(self, kind: str) -> list[psutil.Process]:
        if kind == "executor":
            processes = self.driver.processes() if self.worker is None else self.worker.executors()
            executors = running(processes, "CoarseGrainedExecutorBackend")
            return [self.random.choice(executors)] if executors else []
        victims = running(self.driver.processes(), "SparkSubmit") if kind in ("driver", "java") else []
        if kind in ("driver", "python"):
            victims.append(psutil.Process(self.driver.process.pid))
        return victims

    def note(self, what: str) -> None:
        seconds = time.monotonic() - self.started_at
        print(f"{seconds:5.1f} s: {what}; {self.arrived()} of {self.sent} arrived, lag {self.lag()}")  # noqa: T201

    def end(self) -> None:
        """Everything is read, and the last driver ends by itself, with all that was ever started."""
        until = time.monotonic() + PATIENCE_S
        while self.lag() != 0:
            assert self.driver.is_running, self.tell("the driver ended by itself at the end")
            assert time.monotonic() < until, self.tell(f"the lag stays at {self.lag()}")
            time.sleep(0.05)
        self.note("all is read")
        stdin = self.driver.process.stdin
        assert stdin is not None
        stdin.close()
        assert self.driver.process.wait(PATIENCE_S) == 0, self.tell("the last driver")
        until = time.monotonic() + PATIENCE_S
        while left := [each for driver in self.drivers for each in driver.processes()] + (
            [] if self.worker is None else self.worker.executors()
        ):
            assert time.monotonic() < until, self.tell(f"processes are left behind: {commands_of(left)}")
            time.sleep(0.05)

    def check(self) -> None:
        """Assert that every message is in the topic `out` once, and that the messages of a key are in order."""
        found = transfer(rows_of(self.source), self.target)
        assert found.messages == self.sent >= MESSAGES_MIN
        assert found.is_exact, self.tell(f"{found}")
        assert self.lag() == 0
        batches = sum(each.name.isdecimal() for each in (self.folder / "checkpoint" / "commits").iterdir())
        seconds = time.monotonic() - self.started_at
        where = f"{self.registry}, {self.master}"
        print(f"s3 SEED={self.seed}: {where}: {self.kills}, {found} in {batches} batches, {seconds:.0f} s")  # noqa: T201

    def tell(self, what: str) -> str:
        errors = "\n".join(f"{each.errors.name}: {each.errors.read_text()[-5000:]}" for each in self.drivers[-2:])
        return f"SEED={self.seed}: {self.registry}, {self.master}: {what}\n{errors}"


def run(chaos: Chaos, kills: Sequence[str]) -> None:
    """The query, all these kills of it, and the account."""
    chaos.start()
    for number, kind in enumerate(kills):
        chaos.kill(kind, waits=number < 2 or chaos.random.random() < 0.6)
    chaos.eventually(lambda: chaos.sent >= MESSAGES_MIN, "sending the rest")
    chaos.end()
    chaos.check()


def kills_of(chaos: Chaos, executors: int, drivers: int) -> list[str]:
    """This number of kills of each kind, in random order."""
    found = ["executor"] * executors + [chaos.random.choice(DRIVERS_DEATHS) for _ in range(drivers)]
    chaos.random.shuffle(found)
    return found


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sessions are looked up as Linux has them")


@pytest.mark.skipif(not SOAK, reason="the test with a server kills a driver and an executor; `make soak` runs it")
@pytest.mark.parametrize("registry", random.Random(os.environ["SEED"]).sample(REGISTRIES, 2))
def test_s3_kills_on_every_registry_leave_every_message_once(registry: str, tmp_path: Path) -> None:
    with Chaos(tmp_path, registry) as chaos:
        run(chaos, kills_of(chaos, executors=2, drivers=3))


@pytest.mark.skipif(not SOAK, reason="two daemons and five drivers take minutes to start; `make soak` runs it")
def test_s3_kills_of_the_driver_with_a_standalone_cluster_leave_every_message_once(tmp_path: Path) -> None:
    with Chaos(tmp_path, master="standalone") as chaos:
        run(chaos, kills_of(chaos, executors=2, drivers=4))


@pytest.mark.sampled(3, of="long spark stories")
def test_s3_s5_k5_executors_that_never_open_the_hubs_directory_are_killed_with_driver_and_server(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The executors have neither the hub's directory nor its registry, nor the driver's token: they fetch and stage
    through the server, each batch with a token of its own."""
    with Chaos(tmp_path, "any", master="standalone", is_served=True) as chaos:
        record_property("chosen", f"{chaos.registry} by SEED={chaos.seed}")
        either = chaos.random.choice(["driver", "executor"])
        kills = ["server", "driver", "executor"] * 2 if SOAK else ["server", either]
        chaos.random.shuffle(kills)
        run(chaos, kills)
        assert chaos.opened() == [], chaos.tell("executors opened files of the hub")
        assert list((tmp_path / "events").iterdir())
        assert chaos.token is not None
        assert chaos.files_with(chaos.token, "pxrsc_") == [], "a token is in a log or in an event of Spark"
        # The same hook, in a process that does read the directory.
        look = f"import pxrs; pxrs.open({chaos.hub.url!r}).topic('in').to_arrow()"
        looked = sessions.run([sys.executable, "-c", look], PATIENCE_S, env=chaos.variables | chaos.audited())
        assert looked.returncode == 0, looked.stderr
        assert chaos.opened()
