"""Power loss at any moment of a file registry's commits and compactions: what was acknowledged is there (R9)."""

from __future__ import annotations

import itertools
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pxrs import registry
from pxrs.registry.file import journal
from pxrs.registry.file.codec import encode_entry
from pxrs.registry.file.registry import FileRegistry
from pxrs.registry.state import Change
from pxrs.testing import power

LOSSES = 20_000 if os.environ.get("PXRS_SOAK") else 500


@pytest.fixture
def fast() -> Iterator[Path]:
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="pxrs-power-", dir=place) as folder:
        yield Path(folder)


@pytest.fixture
def tape(fast: Path, monkeypatch: pytest.MonkeyPatch) -> power.Tape:
    """A first opening, then two handles in turn, through several compactions. A mark is a count that was acknowledged
    or read by the other handle. Now and then a third handle publishes an entry and is stopped before it syncs it, just
    when one of the two is about to publish: the entry of that one then lies behind one that is not on disk yet."""
    monkeypatch.setattr(journal, "ENTRIES_MIN", 4)
    root = fast / "run"
    root.mkdir()
    with (
        power.recorded(root) as tape,
        registry.open(root) as one,
        registry.open(root) as two,
        registry.open(root) as stopped,
    ):
        for count in range(1, 19):
            handle, other = (one, two) if count % 2 else (two, one)
            if count % 3 == 0:
                publish_just_before(handle, stopped)
            handle.commit(put={"n": b"%d" % count, "twin": b"%d" % count}, delete=[f"old/{count - 3}"])
            tape.mark(count)
            entry = other.get("n")
            assert entry is not None
            tape.mark(int(entry.value))
    assert len({event.path for event in tape.events if event.kind == "folder"}) >= 3, "there were compactions"
    return tape


def publish_just_before(handle: registry.Registry, stopped: registry.Registry) -> None:
    """Let `stopped` publish an entry, and not sync it, between the next look of `handle` and what it publishes then."""
    assert isinstance(handle, FileRegistry)
    assert isinstance(stopped, FileRegistry)
    attempt, change = handle.shared.attempt, Change(put={"stopped": b""})

    def attempt_second(*arguments: Any) -> Any:
        handle.shared.attempt = attempt  # type: ignore[method-assign]
        stopped.get("n")
        with stopped.shared.journal.prepared(encode_entry(change, stopped.shared.journal.synced)) as scratch:
            assert stopped.shared.attempt(scratch, change, lambda: None) is not None
        return attempt(*arguments)

    handle.shared.attempt = attempt_second  # type: ignore[method-assign]


class Losses:
    """Losses of power in a run. A registry is opened once on each disk that they leave: many leave equal ones."""

    def __init__(self, tape: power.Tape, target: Path) -> None:
        self._tape, self._target = tape, target
        self._counts: dict[bytes, int] = {}
        """The count that the registry has on a disk, by the disk's digest."""

    def check(self, at: int, choose: power.Choose) -> None:
        """Lose the power, open the registry, and hold it to what was acknowledged."""
        disk = self._tape.disk(at, choose)
        digest = disk.digest()
        if digest not in self._counts:
            self._counts[digest] = self._open(disk, at)
        count = self._counts[digest]
        assert count >= max(self._tape.marks(at), default=0), f"moment {at}: {count}"

    def _open(self, disk: power.Disk, at: int) -> int:
        """Open the registry that is on this disk, read it and commit to it; its count."""
        disk.write(self._target)
        with registry.open(self._target) as handle:
            entries = [handle.get("n"), handle.get("twin")]
            counts = [0 if entry is None else int(entry.value) for entry in entries]
            assert counts[0] == counts[1], f"moment {at}: torn"
            version = handle.commit(put={"after": b""})["after"]
            with registry.open(self._target) as fresh:
                found = fresh.get("after")
                assert found is not None
                assert found.version == version
        shutil.rmtree(self._target)
        return counts[0]


def test_nothing_is_lost_at_any_moment(tape: power.Tape, fast: Path) -> None:
    losses = Losses(tape, fast / "state")
    for at in range(len(tape.events) + 1):
        for choose in (lambda n: 0, lambda n: n - 1, lambda n: n // 2):
            losses.check(at, choose)


def test_an_entry_may_be_kept_and_the_unsynced_one_before_it_lost(
    tape: power.Tape, fast: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After each link, one of the last names that are not synced is lost, and all others are kept. What lies behind a
    lost entry is then cut off, not refused as damage."""
    caplog.set_level(logging.WARNING, "pxrs")
    losses = Losses(tape, fast / "state")
    moments = [at for at, event in enumerate(tape.events, 1) if event.kind == "link"]
    for at in moments:
        asked: list[int] = []
        tape.disk(at, lambda n, asked=asked: asked.append(n) or n - 1)  # type: ignore[misc]
        names_count = asked.count(2)  # the names come first; the other questions are about blocks
        for lost in range(max(0, names_count - 8), names_count):
            count = itertools.count()
            losses.check(at, lambda n, lost=lost, count=count: 0 if next(count) == lost else n - 1)  # type: ignore[misc]
    assert "none of them had been acknowledged" in caplog.text


def test_seeded_combinations_of_losses(tape: power.Tape, fast: Path) -> None:
    losses = Losses(tape, fast / "state")
    for seed in range(LOSSES):
        dice = random.Random(seed)
        try:
            losses.check(dice.randrange(len(tape.events) + 1), dice.randrange)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
