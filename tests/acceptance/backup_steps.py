"""A small hub, and its backup and restoration step by step, for the tests of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pxrs
from pxrs import Hub
from pxrs import registry as registries
from pxrs.backup.making import MadeBackup, Progress, make_backup
from pxrs.backup.restoring import refuse_used, restore, verify
from pxrs.log.directory.check import check
from pxrs.registry.values import Snapshot

Hook = Callable[[], None]


class Interrupted(BaseException):
    """The process is gone."""


class Between:
    """The registry of a hub, and what happens right before and after it is copied."""

    def __init__(self, registry: Any, after: Hook = lambda: None, before: Hook = lambda: None) -> None:
        self._registry, self._after, self._before = registry, after, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)

    def snapshot(self, is_written_once: Callable[[str], bool]) -> Snapshot:
        self._before()
        found: Snapshot = self._registry.snapshot(is_written_once)
        self._after()
        return found


@contextmanager
def a_hub(path: Path, **options: Any) -> Iterator[Hub]:
    with pxrs.open(path, upkeep=False) as hub:
        hub.create_topic("orders", partitions=2, segment_bytes=4_096, **options)
        send(hub, 60)
        yield hub


def send(hub: Hub, count: int, topic: str = "orders") -> None:
    """Four messages at a time, in turn to the partitions."""
    with hub.producer(topic) as producer:
        for number in range(count):
            producer.send(b"%d" % number + b"x" * 200, partition=number % 2)
            if number % 4 == 3:
                producer.flush()


def read(hub: Hub, count: int, group: str = "g", topic: str = "orders") -> list[pxrs.Message]:
    found: list[pxrs.Message] = []
    with hub.consumer(topic, group=group, start="earliest") as consumer:
        while len(found) < count:
            found += consumer.poll(count - len(found), timeout=10)
        consumer.commit()
    return found


def back_up(
    hub: Hub, target: Path, tell: Callable[[Progress], None] = lambda progress: None, **given: Any
) -> MadeBackup:
    home = hub.check_registry()
    assert hub.log.folder is not None
    registry = given.get("registry", hub.registry)
    return make_backup(hub.log.folder, home.hub if home else "", registry, "shown", target, "1", tell)


def restored(source: Path, path: Path) -> Hub:
    refuse_used(path)
    manifest = verify(source, lambda progress: None)
    with registries.open(path / "registry") as registry:
        restore(source, manifest, path, registry, str(path / "registry"), lambda progress: None)
    assert [found.findings for found in check(path) if found.findings] == []
    return pxrs.open(path, upkeep=False)
