"""A query from topic to topic on a cluster of real executors, whose driver and executors are killed at random."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

import pxrs
from pxrs.errors import UnknownGroup
from pxrs.spark.home import link_home
from pxrs.testing.transfer import rows_of, transfer

QUERY = Path(__file__).with_name("spark_query.py")
KILLS = 20 if os.environ.get("PXRS_SOAK") else 2
BATCH_ROWS = 200
MESSAGES_MIN = 1200
LEASE_TTL_S = 2.0
PATIENCE_S = 180.0
"""For one thing to happen: a driver's start takes most of it where the machine has much else to do."""
STRIDE_S_MAX = 2.0
"""A kill comes at any moment of so long a time: two or three batches."""
START_S_MAX = 15.0
"""A kill that does not wait for the query to be in its stride comes at any moment of its start."""


class Driver:
    """A driver, its Java, its executors and their workers: the processes of one session, which the driver leads."""

    def __init__(self, url: str, folder: Path, home: Path) -> None:
        self.errors = folder / f"driver-{time.time_ns()}.log"
        command = [sys.executable, str(QUERY), url, str(folder), str(BATCH_ROWS), str(LEASE_TTL_S)]
        environment = {
            **os.environ,
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_HOSTNAME": "localhost",
            "SPARK_LOCAL_DIRS": str(folder / "local"),
            "TMPDIR": str(folder / "local"),
        }
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """All that live, also those whose parents were killed."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def java(self, name: str) -> list[psutil.Process]:
        """Those that run this class."""
        found = []
        for process in self.processes():
            with suppress(psutil.Error):
                if any(word.endswith(name) for word in process.cmdline()):
                    found.append(process)
        return found

    def kill(self, kind: str, choose: random.Random) -> bool:
        """Kill that part of it; False if there is none."""
        if kind == "executor":
            victims = self.java("CoarseGrainedExecutorBackend")
            victims = [choose.choice(victims)] if victims else []
        else:
            victims = self.java("SparkSubmit") if kind in ("driver", "java") else []
            if kind in ("driver", "python"):
                victims.append(psutil.Process(self.process.pid))
        for victim in victims:
            with suppress(psutil.Error):
                victim.kill()
        return bool(victims)

    def close(self) -> None:
        """Nothing is left behind, whatever happened."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        while processes := self.processes():
            for process in processes:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(processes, timeout=5)
        self.process.wait(10)


class Chaos(ExitStack):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.seed = int(os.environ.get("SEED", time.time_ns() % 1_000_000))
        self.random = random.Random(self.seed)
        self.folder, self.home = folder, folder / "spark"
        (folder / "local").mkdir()
        self.home.mkdir()
        assert link_home(self.home)  # so that the cluster works in a folder of the test's
        self.hub = self.enter_context(pxrs.open(folder / "data"))
        self.source = self.hub.create_topic("in", partitions=4)
        self.target = self.hub.create_topic("out", partitions=3)
        self.producer = self.hub.producer("in")
        self.drivers: list[Driver] = []
        self.sent = 0
        self.started_at = time.monotonic()

    @property
    def driver(self) -> Driver:
        return self.drivers[-1]

    def start(self) -> None:
        self.drivers.append(Driver(self.hub.url, self.folder, self.home))
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
        if not self.driver.kill(kind, self.random):
            return self.kill(kind, True)  # it came before there was one
        self.note(f"killed {kind}{'' if waits else ', perhaps at its start'}")
        if kind != "executor":
            # The next one comes at once: what is left of the last one may still be at work.
            self.start()
        return None

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
        while any(driver.processes() for driver in self.drivers):
            assert time.monotonic() < until, self.tell("processes are left behind")
            time.sleep(0.05)

    def tell(self, what: str) -> str:
        errors = "\n".join(f"{each.errors.name}: {each.errors.read_text()[-5000:]}" for each in self.drivers[-2:])
        return f"SEED={self.seed}: {what}\n{errors}"


@pytest.mark.skipif(sys.platform != "linux", reason="sessions are looked up as Linux has them")
def test_s3_kills_of_driver_and_executors_leave_every_message_once(tmp_path: Path) -> None:
    with Chaos(tmp_path) as chaos:
        kinds = ["executor", "driver", "java", "python"]
        kills = ["executor", chaos.random.choice(kinds[1:])] + [chaos.random.choice(kinds) for _ in range(KILLS - 2)]
        chaos.random.shuffle(kills)
        chaos.start()
        for number, kind in enumerate(kills):
            chaos.kill(kind, waits=number < 2 or chaos.random.random() < 0.6)
        chaos.eventually(lambda: chaos.sent >= MESSAGES_MIN, "sending the rest")
        chaos.end()
        found = transfer(rows_of(chaos.source), chaos.target)
        assert found.messages == chaos.sent
        assert found.is_exact, chaos.tell(f"{found}")
        assert chaos.lag() == 0
        batches = sum(each.name.isdecimal() for each in (tmp_path / "checkpoint" / "commits").iterdir())
        seconds = time.monotonic() - chaos.started_at
        print(f"s3 SEED={chaos.seed}: {kills}, {found} in {batches} batches, {seconds:.0f} s")  # noqa: T201
