"""Where a partition begins: what retention has removed is told from what is missing, at any moment (F5)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import pxrs
from pxrs.errors import DamagedFrame, LogBusy, MisplacedFile, OffsetTrimmed, PxrsError
from pxrs.log.batch import SCHEMA, place_id
from pxrs.log.contract import Append
from pxrs.log.directory.check import Finding, check
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.directory.published import NAME as PUBLISHED
from pxrs.log.directory.start import NAME, write_start
from pxrs.log.directory.topic import DirectoryTopic
from pxrs.log.outcomes import offsets_of
from pxrs.model import Topic
from pxrs.testing import faults
from tests.acceptance.directory_topics import opened

ROWS = 20
KEPT_BYTES = 6_000
BOUND_S = 30.0


def make(path: Path, rows: int = ROWS, **settings: Any) -> Path:
    """A topic with a segment for every few messages; its partition's folder."""
    log = DirectoryLog(path)
    topic = log.create_topic(Topic("t", uuid.uuid4().hex, 1, segment_bytes=4096, **settings))
    for number in range(rows):
        row = {"value": b"%d" % number + b"x" * 500, "timestamp": number}
        offsets_of(topic.append([Append.encoded(0, pa.RecordBatch.from_pylist([row], SCHEMA))]))
    log.close()
    return Path(topic.partition_folder(0)) if isinstance(topic, DirectoryTopic) else path


def make_judged(path: Path) -> Path:
    """A topic of which retention has said before where it begins: a segment that is missing is noticed."""
    folder = make(path, retention_bytes=KEPT_BYTES)
    write_start(str(folder), place_id(folder.parents[1].name, 0), 0)
    return folder


def retain(path: Path) -> None:
    opened(path).retain(0)


def bases(folder: Path) -> list[int]:
    return sorted(int(file.stem) for file in folder.glob("*.log"))


def remove_first(folder: Path) -> int:
    """Remove the first segment; where the next one begins."""
    first = bases(folder)[0]
    for file in folder.glob(f"{first:020d}.*"):
        file.unlink()
    return bases(folder)[0]


def findings(path: Path) -> list[Finding]:
    return [finding for checked in check(path) for finding in checked.findings]


def read_on(topic: DirectoryTopic, offset: int) -> list[int]:
    """The numbers of the messages from this offset on."""
    found: list[int] = []
    while batches := topic.read(0, offset):
        for batch in batches:
            found += [int(value.rstrip(b"x")) for value in batch.records.column("value").to_pylist()]
            offset = batch.next_offset
    return found


@pytest.mark.parametrize("is_booted", [False, True], ids=["same boot", "another boot"])
def test_f5_a_missing_first_segment_is_damage_and_no_retention(
    is_booted: bool, tmp_path: Path, boot: Callable[[], None]
) -> None:
    folder = make(tmp_path)
    first = remove_first(folder)
    if is_booted:
        boot()
    missing = str(folder / f"{0:020d}.log")
    (finding,) = findings(tmp_path)
    assert (finding.file, finding.partition) == (missing, 0)
    assert f"offsets 0 to {first - 1}" in finding.what
    with pxrs.open(tmp_path) as hub:
        topic = hub.topic("t")
        for act in (lambda: topic.read(0, 0), lambda: topic.read(0, first - 1), topic.to_arrow):
            with pytest.raises(DamagedFrame, match=f"the first existing offset is {first}$") as error:
                act()
            assert error.value.file == missing
        assert topic.to_arrow(start=first).num_rows == ROWS - first, "the rest can be read"
        with hub.consumer("t", "new") as inbox, pytest.raises(DamagedFrame):
            inbox.poll(timeout=BOUND_S)
        hub.group("new").reset(first)
        with hub.consumer("t", "new") as inbox:
            assert inbox.poll(timeout=BOUND_S)[0].offset == first


def test_what_retention_removed_is_told_as_that_and_what_is_missing_behind_it_is_damage(tmp_path: Path) -> None:
    folder = make(tmp_path, retention_bytes=KEPT_BYTES)
    start = opened(tmp_path).retain(0)[0]
    assert bases(folder)[0] == start > 0
    assert findings(tmp_path) == []
    topic = opened(tmp_path)
    assert topic.start(0) == start
    with pytest.raises(OffsetTrimmed) as trimmed:
        topic.read(0, start - 1)
    assert trimmed.value.first_offset == start
    following = remove_first(folder)
    topic = opened(tmp_path)
    assert [finding.file for finding in findings(tmp_path)] == [str(folder / f"{start:020d}.log")]
    assert topic.start(0) == start
    with pytest.raises(DamagedFrame, match=f"offsets {start} to {following - 1}"):
        topic.read(0, start)
    with pytest.raises(OffsetTrimmed):
        topic.read(0, start - 1)
    assert read_on(topic, following) == list(range(following, ROWS))


def test_a_topic_of_version_0_1_with_retention_is_not_judged(tmp_path: Path) -> None:
    """It removed segments without a word."""
    folder = make(tmp_path, retention_bytes=KEPT_BYTES)
    opened(tmp_path).retain(0)
    (folder / NAME).unlink()
    start = remove_first(folder)
    assert findings(tmp_path) == []
    topic = opened(tmp_path)
    assert topic.start(0) == start
    with pytest.raises(OffsetTrimmed):
        topic.read(0, start - 1)
    assert read_on(topic, start) == list(range(start, ROWS))


def test_a_damaged_start_is_told_with_its_file_and_can_be_removed(tmp_path: Path) -> None:
    folder = make(tmp_path, retention_bytes=KEPT_BYTES)
    start = opened(tmp_path).retain(0)[0]
    (folder / NAME).write_text("0" * 16 + f" {start} 0\n")
    assert [finding.file for finding in findings(tmp_path)] == [str(folder / NAME)]
    topic = opened(tmp_path)
    with pytest.raises(DamagedFrame, match="remove it"):
        topic.start(0)
    assert read_on(topic, start) == list(range(start, ROWS)), "what is there can be read"
    (folder / NAME).unlink()
    assert (topic.start(0), findings(tmp_path)) == (start, [])


def test_the_start_of_another_partition_is_not_believed(tmp_path: Path) -> None:
    one, other = make(tmp_path / "1", retention_bytes=KEPT_BYTES), make(tmp_path / "2", retention_bytes=KEPT_BYTES)
    for path in (tmp_path / "1", tmp_path / "2"):
        retain(path)
    shutil.copy(other / NAME, one / NAME)
    with pytest.raises(MisplacedFile):
        opened(tmp_path / "1").start(0)
    assert [finding.file for finding in findings(tmp_path / "1")] == [str(one / NAME)]


def test_offsets_are_not_given_a_second_time_though_every_segment_is_missing(tmp_path: Path) -> None:
    folder = make(tmp_path, retention_bytes=KEPT_BYTES)
    retain(tmp_path)
    for file in [*folder.glob("*.log"), folder / PUBLISHED]:
        file.unlink()
    with pytest.raises(DamagedFrame, match="every segment is missing"):
        opened(tmp_path).end(0)
    assert bases(folder) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_booted", [False, True], ids=["same boot", "another boot"])
def test_a_retention_that_dies_at_any_step_leaves_a_sound_partition(
    is_booted: bool, tmp_path: Path, boot: Callable[[], None]
) -> None:
    whole = make_judged(tmp_path / "whole")
    at, is_over, starts = 0, False, set[int]()
    while not is_over:
        at += 1
        path = tmp_path / "copy"
        shutil.copytree(tmp_path / "whole", path, symlinks=True)
        folder = path / whole.relative_to(tmp_path / "whole")

        def work(path: Path = path, at: int = at) -> None:
            topic = opened(path)
            topic.end(0)
            with faults.counted(faults.Steps(at, faults.kill)):
                topic.retain(0)

        with faults.child(work) as pid:
            is_over = faults.wait_exit(pid) != -signal.SIGKILL
        if is_booted:
            boot()
        assert findings(path) == [], f"killed before system call {at}"
        topic = opened(path)
        starts.add(start := topic.start(0))
        assert read_on(topic, start) == list(range(start, ROWS))
        topic.retain(0)
        assert bases(folder)[0] == topic.start(0) == max(starts | {topic.start(0)})
        assert findings(path) == []
        shutil.rmtree(path)
    assert len(starts) > 1, "some came before the first step that counts"


@pytest.mark.parametrize("operation", ["check", "start", "read", "offset_at"])
def test_a_retention_that_comes_at_any_moment_is_taken_for_nothing_else(operation: str, tmp_path: Path) -> None:
    make_judged(tmp_path / "whole")
    at, is_over, trimmed = 0, False, 0
    while not is_over:
        at += 1
        path = tmp_path / "copy"
        shutil.copytree(tmp_path / "whole", path, symlinks=True)
        topic = opened(path)

        def act(_: str, path: Path = path) -> None:
            with contextlib.suppress(LogBusy):  # the reader holds the lock: retention would come later
                opened(path, timeout=0.0).retain(0)

        with faults.counted(faults.Steps(at, act)) as steps:
            if operation == "check":
                assert findings(path) == [], f"before system call {at}"
            elif operation == "start":
                assert topic.start(0) in (0, opened(path).start(0))
            elif operation == "offset_at":
                assert topic.offset_at(0, 1) >= 1
            else:
                try:
                    assert topic.read(0, 0, 1)[0].base_offset == 0
                except OffsetTrimmed as error:
                    trimmed += error.first_offset == opened(path).start(0)
        is_over = steps.count < at
        shutil.rmtree(path)
    assert operation != "read" or trimmed


def test_a_start_that_was_written_holds_before_the_segments_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path, retention_bytes=KEPT_BYTES)
    unlink = os.unlink

    def fail(path: Any, *arguments: Any, **named: Any) -> None:
        if str(path).endswith(".log"):
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(path, *arguments, **named)

    monkeypatch.setattr(os, "unlink", fail)
    with pytest.raises(PxrsError, match="may not write"):
        opened(tmp_path).retain(0)
    monkeypatch.undo()
    topic = opened(tmp_path)
    start = topic.start(0)
    assert bases(folder)[0] == 0 < start
    assert findings(tmp_path) == []
    assert topic.retain(0)[0] == start == bases(folder)[0]
