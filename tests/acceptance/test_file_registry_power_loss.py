"""Power loss at any moment of a file registry's commits and compactions: what was acknowledged is there (R9)."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pxrs import registry
from pxrs.registry.file import journal
from pxrs.testing import power

LOSSES = 20_000 if os.environ.get("PXRS_SOAK") else 1_500


@pytest.fixture
def fast() -> Iterator[Path]:
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="pxrs-power-", dir=place) as folder:
        yield Path(folder)


@pytest.fixture
def tape(fast: Path, monkeypatch: pytest.MonkeyPatch) -> power.Tape:
    """A first opening, then two handles in turn, through several compactions. A mark is a count that was acknowledged
    or read by the other handle."""
    monkeypatch.setattr(journal, "ENTRIES_MIN", 4)
    root = fast / "run"
    root.mkdir()
    with power.recorded(root) as tape, registry.open(root) as one, registry.open(root) as two:
        for count in range(1, 19):
            handle, other = (one, two) if count % 2 else (two, one)
            handle.commit(put={"n": b"%d" % count, "twin": b"%d" % count}, delete=[f"old/{count - 3}"])
            tape.mark(count)
            entry = other.get("n")
            assert entry is not None
            tape.mark(int(entry.value))
    assert len({event.path for event in tape.events if event.kind == "folder"}) >= 3, "there were compactions"
    return tape


def check(tape: power.Tape, at: int, choose: power.Choose, target: Path) -> None:
    tape.restore(at, choose, target)
    with registry.open(target) as handle:
        entries = [handle.get("n"), handle.get("twin")]
        counts = [0 if entry is None else int(entry.value) for entry in entries]
        assert counts[0] == counts[1], f"moment {at}: torn"
        assert counts[0] >= max(tape.marks(at), default=0), f"moment {at}: {counts[0]}"
        version = handle.commit(put={"after": b""})["after"]
        with registry.open(target) as fresh:
            found = fresh.get("after")
            assert found is not None
            assert found.version == version
    shutil.rmtree(target)


def test_nothing_is_lost_at_any_moment(tape: power.Tape, fast: Path) -> None:
    for at in range(len(tape.events) + 1):
        for choose in (lambda n: 0, lambda n: n - 1, lambda n: n // 2):
            check(tape, at, choose, fast / "state")


def test_seeded_combinations_of_losses(tape: power.Tape, fast: Path) -> None:
    for seed in range(LOSSES):
        dice = random.Random(seed)
        try:
            check(tape, dice.randrange(len(tape.events) + 1), dice.randrange, fast / "state")
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
