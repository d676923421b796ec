"""One worker of `pxrs demo`: claims free partitions, counts up on its own, tells each acknowledged count on stdout."""

from __future__ import annotations

import logging
import signal
import sys
import time

from pxrs import registry
from pxrs.errors import Conflict, LeaseExpired
from pxrs.registry import ABSENT, Lease, Registry

PARTITIONS = 8
TTL_S = 2.0
PAUSE_S = 0.005
MEMBERS, OWNERS, COUNTS = "demo/members/", "demo/owners/", "demo/counts/"


class Worker:
    def __init__(self, handle: Registry, name: str, lease: Lease) -> None:
        self.handle, self.name, self.lease = handle, name, lease
        self.member = f"{MEMBERS}{name}"
        self.owned: dict[int, int] = {}
        """Partition -> the owner key's version at which it was claimed: the fence."""

    def claim(self) -> None:
        """Take what is free, or what a dead member held, up to a fair share."""
        alive = {entry.key: entry for entry in self.handle.scan(MEMBERS)}
        share = -(-PARTITIONS // max(1, len(alive)))
        for entry in self.handle.scan(OWNERS):
            partition, owner = int(entry.key.removeprefix(OWNERS)), entry.value.decode()
            if len(self.owned) >= share or partition in self.owned or f"{MEMBERS}{owner}" in alive:
                continue
            expect = {entry.key: entry.version}
            if owner:
                expect[f"{MEMBERS}{owner}"] = ABSENT
            try:
                versions = self.handle.commit(expect=expect, put={entry.key: self.name.encode()}, lease=self.lease)
            except Conflict:
                continue
            self.owned[partition] = versions[entry.key]

    def count(self, partition: int) -> None:
        key = f"{COUNTS}{partition}"
        entry = self.handle.get(key)
        assert entry is not None
        expect = {key: entry.version, f"{OWNERS}{partition}": self.owned[partition]}
        put = {key: b"%d" % (int(entry.value) + 1)}
        try:
            self.handle.commit(expect=expect, put=put, lease=self.lease, quiet=True)
        except LeaseExpired:
            # A careless writer would go on without its lease. The fence in the write stops that too.
            self.handle.commit(expect=expect, put=put, quiet=True)
        tell(f"counted {partition}")


def work(url: str, name: str) -> None:
    with registry.open(url) as handle, handle.lease(TTL_S) as lease:
        handle.commit(ephemeral={f"{MEMBERS}{name}": b""}, lease=lease)
        worker = Worker(handle, name, lease)
        with handle.watch(MEMBERS, OWNERS) as watch:
            while not _wait_for_all(handle):
                watch.wait(1.0)
            worker.claim()
            while True:
                if watch.wait(0):
                    worker.claim()
                for partition in worker.owned:
                    worker.count(partition)
                time.sleep(PAUSE_S)


def _wait_for_all(handle: Registry) -> bool:
    """So that the first claims are fair: all three are there, or somebody has claimed already."""
    return len(handle.scan(MEMBERS)) >= 3 or any(entry.value for entry in handle.scan(OWNERS))


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    logging.basicConfig(level=logging.ERROR)  # the demo shows what happens; warnings would break its picture
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        work(*sys.argv[1:3])
    except (Conflict, LeaseExpired) as refusal:
        tell(f"refused {refusal}")
