"""W6: a waiting client costs the server no thread, no descriptor and no time."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pxrs
from pxrs.testing.servers.hub import HubServer
from tests.integration.server.peer import Control, Put, connect, records

CLIENTS = 10
WAITS = 100
IDLE_S = 2.0


class Process:
    """What the operating system says about a process."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")

    def _status(self, name: str) -> int:
        for line in (self._folder / "status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
        raise KeyError(name)

    @property
    def threads(self) -> int:
        return self._status("Threads:")

    @property
    def memory_mb(self) -> float:
        return self._status("VmRSS:") / 1024

    @property
    def descriptors(self) -> int:
        return len(os.listdir(self._folder / "fd"))

    @property
    def cpu_s(self) -> float:
        fields = (self._folder / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_w6_a_thousand_waiters_cost_no_threads(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    with pxrs.open(tmp_path / "hub") as hub:
        hub.create_topic("t", partitions=4)
    with HubServer(tmp_path / "hub", flags=["--threads", "4"]) as server, ExitStack() as stack:
        process = Process(server.pid)
        address = f"{server.host}:{server.port}"
        channels = [stack.enter_context(connect(address)) for _ in range(CLIENTS)]
        controls = [stack.enter_context(Control(channel)) for channel in channels]
        for control in controls:  # as many calls as there are threads, so that all of them are there
            for number in [control.begin("server.ping") for _ in range(50)]:
                control.answer(number)
        controls[0].make("topic.subscribe", topic="t", partitions=[0], number=0)
        put = stack.enter_context(Put(channels[0], "t"))
        put.send(records(1).serialize(), 1)
        put.outcome()
        before = process.threads, process.descriptors, process.memory_mb
        for control in controls:
            numbers = range(1, WAITS + 1)
            asked = [control.begin("topic.subscribe", topic="t", partitions=[0, 2], number=n) for n in numbers]
            assert all("result" in control.answer(number) for number in asked)
        after = process.threads, process.descriptors, process.memory_mb
        used = process.cpu_s
        threading.Event().wait(IDLE_S)
        share = (process.cpu_s - used) / IDLE_S

        def woken(control: Control) -> float:
            left = set(range(1, WAITS + 1))
            left -= set(control.events)
            while left:
                left.discard(control.take().get("event", 0))
            return time.monotonic()

        with ThreadPoolExecutor(CLIENTS) as pool:
            waiting = [pool.submit(woken, control) for control in controls]
            began = time.monotonic()
            put.send(records(1).serialize(), 0)
            put.outcome()
            acknowledged = time.monotonic()
            last = max(each.result(30) for each in waiting)
        print(  # noqa: T201 - the figures of docs/decisions/0053
            f"threads, descriptors, MB before {before} and with {CLIENTS * WAITS} waiters {after}; "
            f"idle {share:.1%} of a core; acknowledged after {acknowledged - began:.4f} s, "
            f"all woken after {last - began:.4f} s"
        )
        assert after[0] <= before[0] + 8, "gRPC starts some threads of its own when it has more to do"
        assert after[1] <= before[1] + 2
        assert after[2] < before[2] + 40
        assert share < 0.05
        assert last - began < 20
