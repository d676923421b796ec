"""A bounded scan and a commit cost the same in a large registry as in a small one."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pxrs import registry
from pxrs.registry import Registry
from pxrs.testing.servers import EtcdServer, PostgresServer

SMALL, LARGE = 1_000, 100_000 if os.environ.get("PXRS_SOAK") else 20_000
RATIO_MAX = 1.5


def fill(store: Registry, count: int) -> None:
    keys = [f"n/{i:06}" for i in range(count)]
    size = min(store.limits.commit_keys_max, 1000)
    for begin in range(0, count, size):
        store.commit(put=dict.fromkeys(keys[begin : begin + size], b"x" * 20), quiet=True)


def seconds(work: Callable[[], object], times: int = 20) -> float:
    began = time.perf_counter()
    for _ in range(times):
        work()
    return time.perf_counter() - began


def ratio(small: Callable[[], object], large: Callable[[], object]) -> float:
    """Large against small, measured in turn; the median, so that one pause of the machine decides nothing. Both are
    warmed up first, because a database goes on tidying up for a while after so much was put into it; and a bad result
    is looked at again, because that may have been what was measured."""
    measured = float("inf")
    for _ in range(3):
        until = time.monotonic() + 0.7
        while time.monotonic() < until:
            seconds(small)
            seconds(large)
        measured = min(measured, statistics.median(seconds(large) / seconds(small) for _ in range(11)))
        if measured <= RATIO_MAX:
            break
    return measured


@pytest.fixture(params=["memory", "file", "sqlite", "postgresql", "etcd"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with ExitStack() as stack:
        match request.param:
            case "memory":
                yield "memory:"
            case "file":
                yield f"file:{tmp_path}"
            case "sqlite":
                yield f"sqlite:///{tmp_path}/r.db"
            case "postgresql":
                yield stack.enter_context(PostgresServer()).url
            case "etcd":
                yield stack.enter_context(EtcdServer()).url


@pytest.mark.sampled(2)
def test_a_bounded_scan_and_a_commit_do_not_read_the_whole_prefix(address: str) -> None:
    with registry.open(f"{address}?namespace=small") as small, registry.open(f"{address}?namespace=large") as large:
        fill(small, SMALL)
        fill(large, LARGE)

        def scan(store: Registry, count: int) -> None:
            assert len(store.scan("n/", after=f"n/{count // 2:06}", limit=10)) == 10

        def commit(store: Registry, count: int) -> None:
            store.commit(put={f"n/{count // 2:06}": b"y"})

        for work in (scan, commit):
            measured = ratio(lambda w=work: w(small, SMALL), lambda w=work: w(large, LARGE))  # type: ignore[misc]
            assert measured <= RATIO_MAX, f"{work.__name__}: {measured:.2f}x"
