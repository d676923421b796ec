"""Power loss at any moment of a run: every acknowledged message is there, and nobody saw what is not (L1, L3)."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pytest

from pxrs.log.batch import SCHEMA, Origin
from pxrs.log.contract import Append
from pxrs.log.directory import published as published_module
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.outcomes import offsets_of
from pxrs.model import Topic
from pxrs.testing import power

SOAK = bool(os.environ.get("PXRS_SOAK"))
LOSSES = 8_000 if SOAK else 800


def records(*values: bytes) -> pa.RecordBatch:
    rows = len(values)
    columns = [pa.nulls(rows, pa.binary()), pa.array(values, pa.binary())]
    columns += [pa.array(range(rows), SCHEMA.field(2).type), pa.nulls(rows, SCHEMA.field(3).type)]
    return pa.record_batch(columns, schema=SCHEMA)


@pytest.fixture(scope="module")
def fast() -> Iterator[Path]:
    """A place in memory: what is synced is simulated, so the disk need not be slow."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="pxrs-power-", dir=place) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def tape(fast: Path) -> power.Tape:
    """A run of appends small and large, several frames at once, through rolls; its marks: what was promised."""
    root = fast / "run"
    root.mkdir()
    topic = DirectoryLog(root).create_topic(Topic("t", uuid.uuid4().hex, 1, segment_bytes=16_384))
    dice, producer = random.Random(6), uuid.uuid4()
    with power.recorded(root) as tape:
        sequence = 0
        for number in range(14):
            appends, sent = [], []
            for _ in range(dice.choice((1, 1, 3))):
                size = dice.choice((1, 10, 3000))
                values = [b"%d-%d-" % (number, i) + b"x" * size for i in range(dice.randint(1, 3))]
                appends.append(Append.encoded(0, records(*values), Origin(producer, 0, sequence)))
                sent.append(values)
                sequence += 1
            offsets = offsets_of(topic.append(appends))
            for values, offset in zip(sent, offsets, strict=True):
                tape.mark((offset, values))
            tape.mark((topic.end(0), None))  # a reader may have gone so far, and committed it elsewhere
    assert sum(event.kind == "sync" for event in tape.events) >= 14
    assert len(list((root / "topics/t/partitions/partition-0").glob("*.log"))) >= 3
    return tape


class Losses:
    """Losses of power in a run. The log is started again once on each disk that they leave: many leave equal ones, also
    losses of different tests."""

    _ends: ClassVar[dict[bytes, int]] = {}
    """Where the log ends on a disk, by the disk's digest. The disks of two runs differ by the topic's id."""

    def __init__(self, tape: power.Tape, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._tape, self._target = tape, target
        acknowledged = [promised for _, promised in tape.marks(len(tape.events)) if promised is not None]
        self._values = [value for promised in acknowledged for value in promised]
        """What the run has appended, by offset."""
        monkeypatch.setattr(published_module, "boot_id", lambda: "00000000-0000-0000-0000-00000000000f")

    def check(self, at: int, choose: power.Choose) -> None:
        """Lose the power, start again, and hold the log to what was promised."""
        disk = self._tape.disk(at, choose)
        digest = disk.digest()
        if digest not in self._ends:
            self._ends[digest] = self._start(disk, at)
        end = self._ends[digest]
        for offset, promised in self._tape.marks(at):
            if promised is None:
                assert offset <= end, f"moment {at}: a reader was at {offset}, and the end is {end}"
            else:
                assert offset + len(promised) <= end, f"moment {at}: {offset} was acknowledged, and the end is {end}"

    def _start(self, disk: power.Disk, at: int) -> int:
        """Open the log that is on this disk, read all of it and append; where it ended."""
        disk.write(self._target)
        log = DirectoryLog(self._target)
        topic = log.topic("t")
        values: list[bytes] = []
        while found := topic.read(0, len(values)):
            for batch in found:
                assert batch.base_offset == len(values)
                values += batch.records.column("value").to_pylist()
        assert values == self._values[: len(values)], f"moment {at}"
        assert offsets_of(topic.append([Append.encoded(0, records(b"after"))])) == [len(values)]
        log.close()
        shutil.rmtree(self._target)
        return len(values)


class OneLoss:
    """Everything survives but the thing of this number, which is lost, or torn if it can be."""

    def __init__(self, which: int, is_torn: bool) -> None:
        self._which, self._is_torn, self.asked = which, is_torn, 0

    def __call__(self, possibilities: int) -> int:
        self.asked += 1
        if self.asked - 1 != self._which:
            return possibilities - 1
        return 1 if self._is_torn and possibilities == 3 else 0


def test_each_single_block_lost_or_torn_at_every_moment(
    tape: power.Tape, fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, states = Losses(tape, fast / "state", monkeypatch), 0
    for at in range(len(tape.events) + 1):
        which, things = 0, 1
        while which < things:
            for is_torn in (False, True):
                loss = OneLoss(which, is_torn)
                losses.check(at, loss)
                states += 1
            which, things = which + 1, loss.asked
        losses.check(at, lambda possibilities: 0)
    assert states > 500


def test_seeded_combinations_of_losses(tape: power.Tape, fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = Losses(tape, fast / "state", monkeypatch)
    for seed in range(LOSSES):
        dice = random.Random(seed)
        at = dice.randrange(len(tape.events) + 1)
        try:
            losses.check(at, dice.randrange)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_the_simulation_catches_a_log_that_acknowledges_before_it_syncs(
    fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = fast / "unsynced"
    root.mkdir()
    topic = DirectoryLog(root).create_topic(Topic("t", uuid.uuid4().hex, 1, segment_bytes=16_384))
    topic.end(0)
    monkeypatch.setattr("pxrs.disk.sync_data", lambda descriptor: None)
    with power.recorded(root) as tape:
        (offset,) = offsets_of(topic.append([Append.encoded(0, records(b"acknowledged"))]))
        tape.mark((offset, [b"acknowledged"]))
    monkeypatch.undo()
    losses = Losses(tape, fast / "state", monkeypatch)
    with pytest.raises(AssertionError):
        losses.check(len(tape.events), lambda possibilities: 0)
