"""Ranges whose server hangs: the connection stays open, and nothing comes any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.log.batch import Batch
from pxrs.remote.client import limits, transfers
from pxrs.server.serving import serving
from pxrs.testing.proxy import Proxy
from pxrs.testing.servers import HubServer
from pxrs.testing.waiting import aside
from tests.integration.server.conftest import Running
from tests.integration.server.test_limits import fill

STALLED_S = 0.4
ROWS = 16
"""In each batch of `fill`."""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "STALLED_S", STALLED_S)
    monkeypatch.setattr(limits, "LOOK_S", 0.05)


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why each transfer that was begun again had ended."""
    found: list[str] = []
    after = transfers.Patience.after

    def noted(patience: transfers.Patience, error: Exception) -> None:
        found.append(str(error))
        after(patience, error)

    monkeypatch.setattr(transfers.Patience, "after", noted)
    return found


def offsets(batches: Iterator[Batch]) -> list[int]:
    return [batch.base_offset for batch in batches]


def test_a_range_is_begun_again_if_a_thread_of_the_server_hangs(
    running: Running, breaks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC answers the pings of the client all the while."""
    fill(running.hub, 8)
    log = running.hub.topic("t").log
    read, calls, opened = type(log).read, [0], threading.Event()

    def hanging(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            opened.wait(30)
        return read(*given)

    monkeypatch.setattr(type(log), "read", hanging)
    try:
        with pxrs.open(f"pxrs://{running.address}") as hub:
            found = aside(lambda: offsets(hub.topic("t").batches(0))).result(20)
    finally:
        opened.set()
    assert found == [ROWS * number for number in range(8)]
    assert set(breaks) == {f"the transfer made no progress for {STALLED_S} s"}  # on a busy machine perhaps twice


def test_a_range_is_read_on_from_another_server_if_one_is_stopped(tmp_path: Path, breaks: list[str]) -> None:
    """Sooner than gRPC's pings notice it, which takes 5 s or more: a proxy may answer them for the server."""
    with (
        HubServer(tmp_path / "data", forked=True) as stopped,
        pxrs.open(stopped.data, upkeep=False) as local,
        serving(local) as other,
        Proxy(stopped.host, stopped.port) as proxy,
    ):
        fill(local, 32)
        url = f"pxrs://{proxy.host}:{proxy.port},{other.removeprefix('pxrs://')}?timeout=0.5"
        with pxrs.open(url) as hub:
            batches = hub.topic("t").batches(0)
            found = [next(batches).base_offset]
            stopped.pause()
            found += aside(lambda: offsets(batches)).result(20)
    assert found == [ROWS * number for number in range(32)]
    assert breaks[0] == f"the transfer made no progress for {STALLED_S} s"


def test_a_reader_that_pauses_is_not_taken_for_a_server_that_hangs(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, keep = [], limits.Limits.kept

    def noted(mine: limits.Limits, limit: limits.Limit, end: Callable[[], object]) -> AbstractContextManager[None]:
        kept.append(limit)
        return keep(mine, limit, end)

    monkeypatch.setattr(limits.Limits, "kept", noted)
    fill(running.hub, 8)
    with pxrs.open(f"pxrs://{running.address}") as hub:
        batches = hub.topic("t").batches(0)
        next(batches)
        assert not kept[-1].is_due(time.monotonic() + 3_600), "the reader may take any time"
        assert offsets(batches) == [ROWS * number for number in range(1, 8)]
