"""Hubs that share a directory and a registry, for the tests of upkeep."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pxrs import clock as clocks
from pxrs.address import LazyRegistry
from pxrs.clock import ManualClock
from pxrs.hub import Hub
from pxrs.hub_parts import HubParts
from pxrs.log.directory.log import DirectoryLog
from pxrs.registry.memory import MemoryStore
from pxrs.testing.hooked import HookedRegistry
from pxrs.upkeep.election import Election

HOUR_S = 3600.0
DAY_S = 86_400.0


class Place:
    """A directory, a registry that its processes share, and a clock for both."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, ManualClock()
        self.store = MemoryStore(self.clock)
        self._opened: list[Hub] = []

    def registry(self) -> HookedRegistry:
        registry = HookedRegistry(self.store)
        registry.url = "etcd://shared:2379"  # so that the hub does not take it for this process's own
        return registry

    def log(self) -> DirectoryLog:
        log = DirectoryLog(self.folder)
        log.clock = self.clock
        return log

    def hub(self, registry: HookedRegistry | None = None, *, upkeep: bool = False) -> Hub:
        hub = Hub(self.log(), registry or self.registry(), upkeep=upkeep)
        self._opened.append(hub)
        return hub

    def election(self, registry: HookedRegistry | None = None) -> Election:
        return Election(HubParts(self.log(), LazyRegistry(registry or self.registry()), 10.0))

    def close(self) -> None:
        for hub in self._opened:
            hub.close()


def send_old(hub: Hub, topic: str = "t", count: int = 3) -> None:
    """Messages that were stored a day ago, a segment for each."""
    with pytest.MonkeyPatch.context() as patch, hub.producer(topic, linger_s=0) as out:
        patch.setattr(clocks, "wall_time_us", lambda: (time.time_ns() - 86_400 * 10**9) // 1000)
        for _ in range(count):
            out.send(b"x" * 4096).result()
