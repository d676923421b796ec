"""A process that has as many files open as it may: a clear error that says what to do, and nothing broken."""

from __future__ import annotations

import gc
import json
import os
import resource
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

import pxrs
from pxrs.errors import PxrsError
from pxrs.hub import Hub
from pxrs.testing import faults

BOUND_S = 30.0


def append(hub: Hub) -> object:
    with hub.producer("t", linger_s=0, tries_max=1) as out:
        return out.send("more", partition=2).result(BOUND_S)


def take_lease(hub: Hub) -> object:
    with hub.registry.lease(5.0):
        return None


OPERATIONS: dict[str, Callable[[Hub], object]] = {
    "create a topic": lambda hub: hub.create_topic("new"),
    "list topics": lambda hub: hub.topics(),
    "open a topic": lambda hub: hub.topic("t"),
    "end": lambda hub: hub.topic("t").end(1),
    "read": lambda hub: hub.topic("t").read(1, 0),
    "append": append,
    "wait": lambda hub: hub.topic("t").wait({0: 5}, 0.001),
    "delete a topic": lambda hub: hub.delete_topic("gone"),
    "commit": lambda hub: hub.registry.commit(put={"a": b"b"}),
    "lease": take_lease,
}


def descriptors_left(count: int) -> tuple[int, int]:
    """Let this process open so many more files; the limits before."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)  # the lowest number that is free
    os.close(free)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    for _ in range(highest - free):  # fill the holes: the limit is that of numbers
        os.dup(0)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + count, before[1]))
    return before


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are counted in /proc")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_too_many_open_files_says_what_to_do(operation: str, tmp_path: Path) -> None:
    with pxrs.open(tmp_path / "data") as hub:
        hub.create_topic("t", partitions=3)
        hub.create_topic("gone", partitions=1)
        with hub.producer("t") as out:
            for partition in range(3):
                out.send("x", partition=partition)
    told = tmp_path / "told"

    def work() -> None:
        gc.collect()
        gc.disable()  # what is collected closes its files, just when there must be no descriptor left
        if operation not in ("create a topic", "delete a topic"):
            with pxrs.open(warm) as hub:
                OPERATIONS[operation](hub)
        errors: list[str] = []
        with told.open("w") as file, ExitStack() as opened:
            for count in range(10):
                hub = opened.enter_context(pxrs.open(tmp_path / "data"))
                if operation in ("commit", "lease"):
                    hub.registry.get("a")  # it is open
                before = descriptors_left(count)
                try:
                    OPERATIONS[operation](hub)
                    break
                except PxrsError as error:
                    errors.append(f"{type(error).__name__}: {error}")
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, before)
            else:
                raise AssertionError("it never worked")
            json.dump(errors, file)

    warm = tmp_path / "warm"  # what is imported by the first use is imported by now
    with pxrs.open(warm) as hub:
        hub.create_topic("t", partitions=3)
        append(hub)
        take_lease(hub)
    with faults.child(work) as pid:
        assert faults.wait_exit(pid) == 0
    errors = json.loads(told.read_text())
    assert errors, "something was refused"
    for error in errors:
        assert "Too many open files" in error
        assert "ulimit -n" in error
    with pxrs.open(tmp_path / "data") as hub:
        assert hub.topic("t").read(0, 0)[0].records.num_rows == 1, "nothing is broken"
