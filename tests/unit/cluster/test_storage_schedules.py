"""Random schedules of one storage node: adds, fences, removals, compaction and restarts, while calls of the operating
system fail. After each restart, and after a power loss at any moment, what was answered is true: entries that were
acknowledged are there, fences hold, and entries that a recovery was told to be missing are missing."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from pxrs import registry as registries
from pxrs.cluster.storage.collecting import Collector
from pxrs.cluster.storage.node import NodeSettings, StorageNode
from pxrs.cluster.storage.settings import StorageLimits
from pxrs.errors import LedgerFenced, NodeFull
from pxrs.testing import power
from tests.unit.cluster.stored import NODE, TOPIC, add, entry, fast_folder, opened, stored

SEEDS = 200 if os.environ.get("PXRS_SOAK") else 12
LEDGERS = [f"{TOPIC}/{partition}/{number}" for partition in range(2) for number in range(2)]
ENTRIES = 60
SIZES = (5, 700, 3_000)
CALLS = ("pwritev", "fdatasync", "fsync", "open", "unlink", "replace", "rename", "truncate")


class Faults:
    """Lets some calls of the operating system fail, of which those of a file's sync are never repeated."""

    def __init__(self, dice: random.Random) -> None:
        self.rate, self._dice = 0.0, dice
        self._failed: set[int] = set()
        self.is_sync_repeated = False
        """Whether a file was synced after a sync of it had failed: that may report success for dropped pages (L3)."""

    @contextmanager
    def injected(self) -> Iterator[None]:
        original = {name: getattr(os, name) for name in CALLS}
        for name in CALLS:
            setattr(os, name, self._failing(name, original[name]))
        try:
            yield
        finally:
            for name, call in original.items():
                setattr(os, name, call)

    def _failing(self, name: str, call: Any) -> Any:
        def failing(*arguments: Any, **named: Any) -> Any:
            inode = os.fstat(arguments[0]).st_ino if name == "fdatasync" else 0
            if self._dice.random() < self.rate and (name != "open" or ".log" in str(arguments[0])):
                if name == "pwritev":
                    call(arguments[0], [bytes(arguments[1][0])[:10]], *arguments[2:])
                self._failed.add(inode)
                number = self._dice.choice((errno.EIO, errno.ENOSPC))
                raise OSError(number, os.strerror(number))
            self.is_sync_repeated |= inode > 0 and inode in self._failed and os.fstat(arguments[0]).st_nlink > 0
            return call(*arguments, **named)

        return failing


class Schedule:
    """Runs one node. Notes on the tape what was tried and what was answered."""

    def __init__(self, folder: Path, tape: power.Tape, faults: Faults, dice: random.Random) -> None:
        self._folder, self._tape, self._faults, self._dice = folder, tape, faults, dice
        self._settings = NodeSettings(segment_bytes=dice.choice((300, 1_000, 4_000)), free_bytes_min=1)
        self._node: StorageNode | None = None
        self._synced = 0
        """The node's mark."""

    def run(self, steps: int) -> None:
        actions = (self._add, self._add, self._add, self._fence, self._read, self._remove, self._compact, self._restart)
        for _ in range(steps):
            self._faults.rate = self._dice.choice((0.0, 0.0, 0.1))
            with suppress(NodeFull, LedgerFenced, OSError):
                self._dice.choice(actions)(self._opened(), self._dice.choice(LEDGERS))
            if self._dice.random() < 0.3:
                self._faults.rate = 0.0
                self._opened().look_at_room()
        self._faults.rate = 0.0
        self._opened().close()

    def _opened(self) -> StorageNode:
        while self._node is None:
            try:
                self._node = StorageNode(NODE, str(self._folder), self._settings, proof=self._synced)
            except OSError:
                self._faults.rate = 0.0
                continue
            assert self._node.is_proven, "C9: what was synced is there after any end of the process"
            self._node.on_synced = self._note_synced
        return self._node

    def _note_synced(self, end: int) -> None:
        self._synced = end

    def _add(self, node: StorageNode, ledger: str) -> None:
        numbers = [self._dice.randrange(ENTRIES) for _ in range(self._dice.randint(1, 3))]
        recovery = self._dice.choice((None, 50))
        for number in numbers:
            self._tape.mark(("try to add", ledger, number))
        answers = add(node, *(entry(number, ledger, size=SIZES[number % 3], recovery=recovery) for number in numbers))
        for number, answer in zip(numbers, answers, strict=True):
            if answer is None:
                self._tape.mark(("added", ledger, number))

    def _fence(self, node: StorageNode, ledger: str) -> None:
        number = self._dice.randint(1, 50)
        node.fence(ledger, number)
        self._tape.mark(("fenced", ledger, number))

    def _read(self, node: StorageNode, ledger: str) -> None:
        number = self._dice.randint(1, 50)
        found = list(node.read(ledger, 0, ENTRIES - 1, 1 << 30, number, heads=False))
        self._tape.mark(("fenced", ledger, number))
        for each in found:
            if each.head is None and each.error is None:
                self._tape.mark(("missing", ledger, each.entry))

    def _remove(self, node: StorageNode, ledger: str) -> None:
        marks = dict(node.ledgers())
        node.settle()
        if ledger in marks:
            self._tape.mark(("try to remove", ledger, 0))
            node.remove(ledger, marks[ledger], has_partition=True)

    def _compact(self, node: StorageNode, ledger: str) -> None:
        with registries.open("memory:") as unused:
            Collector(unused, node, "", 1, StorageLimits(compact_below=0.9))._clean()

    def _restart(self, node: StorageNode, ledger: str) -> None:
        self._node = None
        node.close()
        rate, self._faults.rate = self._faults.rate, 0.0
        copy = self._folder.with_name("copy")
        shutil.copytree(self._folder, copy)
        check(copy, self._tape.marks(len(self._tape.events)))
        shutil.rmtree(copy)
        self._faults.rate = rate


def check(folder: Path, marks: list[Any]) -> None:
    """A node that is started on this folder keeps everything that was answered."""
    entries: dict[str, set[int]] = {ledger: set() for ledger in LEDGERS}
    missing: dict[str, set[int]] = {ledger: set() for ledger in LEDGERS}
    fences = dict.fromkeys(LEDGERS, 0)
    for what, ledger, number in marks:
        if what == "added":
            entries[ledger].add(number)
        elif what == "missing":
            missing[ledger].add(number)
        elif what == "fenced":
            fences[ledger] = max(number, fences[ledger])
        elif what == "try to add":
            missing[ledger].discard(number)
        else:
            entries[ledger], fences[ledger] = set(), 0
    with opened(folder) as node:
        assert node.rot is None
        for ledger in LEDGERS:
            found = set(stored(node, ledger, ENTRIES))
            assert entries[ledger] <= found
            assert not missing[ledger] & found
            assert node.page(ledger, -1, 1).fence >= fences[ledger]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_was_answered_is_true_after_faults_restarts_and_a_power_loss(seed: int) -> None:
    dice = random.Random(seed)
    faults = Faults(random.Random(seed + 1))
    with fast_folder() as folder:
        run = folder / "run"
        run.mkdir()
        with power.recorded(run) as tape, faults.injected():
            Schedule(run, tape, faults, dice).run(dice.randint(20, 60))
        assert not faults.is_sync_repeated
        for number in range(10):
            at = dice.randrange(len(tape.events) + 1)
            mode = dice.randrange(3)
            after = folder / f"after-{number}"
            tape.restore(at, lambda count, mode=mode: (0, count - 1, dice.randrange(count))[mode], after)
            after.mkdir(exist_ok=True)
            for _ in range(2):
                check(after, tape.marks(at))
            shutil.rmtree(after)
