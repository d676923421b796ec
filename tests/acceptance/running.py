"""Commands that run until they are stopped, started by tests and ended with them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from pxrs.testing.forked import Forked
from pxrs.testing.waiting import PATIENCE_S

C = TypeVar("C", bound="Running")


class Running:
    """A command of `pxrs` whose standard error, and by default standard output, goes to a file."""

    def __init__(self, folder: Path, *arguments: str, module: str = "pxrs.cli", with_output: bool = True) -> None:
        self._told = folder / f"told-{time.monotonic_ns()}"
        with self._told.open("wb") as told:
            output = told.fileno() if with_output else None
            self.process = Forked(module, arguments, cwd=folder, stdout=output, stderr=told.fileno())

    def told(self) -> str:
        return self._told.read_text()

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


def starting(make: Callable[..., C], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., C]]:
    """For a fixture: starts commands in this folder, without a hub in the environment, and kills them at the end."""
    for name in ("PXRS_AT", "PXRS_REGISTRY", "PXRS_METRICS_LISTEN"):
        monkeypatch.delenv(name, raising=False)
    started: list[C] = []

    def start(*arguments: str) -> C:
        started.append(make(folder, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait(PATIENCE_S)
